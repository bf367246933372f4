"""What only metrics want to know: durations, sizes, work (pure); for the engine's thread."""

from collections.abc import Sequence

from kvtransfer.pull_events import Arrived
from router.buckets import TOKENS, TTFT, Tally
from services.engine.meter import StepMeter
from services.engine.scheduler import Row

# Upper borders of buckets.
STEP = (
    0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2,
    0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
SEQUENCES = (1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0, 256.0, 512.0)
WAIT = (0.0005, 0.001, 0.0025, *TTFT)
PULL = tuple(round(0.0001 * 2**n, 4) for n in range(20))  # 0.1 ms to 52 s
BYTES = tuple(4096.0 * 4**n for n in range(12))  # 4 KiB to 16 GiB
BLOCKS = tuple(border for border in TOKENS if border <= 20_000)


class WorkerTallies:
    """One worker's."""

    def __init__(self, meter: StepMeter | None = None) -> None:
        self.meter = meter or StepMeter()
        self.step_s, self.step_tokens, self.step_seqs = Tally(STEP), Tally(TOKENS), Tally(SEQUENCES)
        self.queue_s, self.prefill_s = Tally(WAIT), Tally(WAIT)
        self.pull_s = {phase: Tally(PULL) for phase in ("queue", "wire", "seals", "total")}
        self.pull_bytes, self.pull_blocks = Tally(BYTES), Tally(BLOCKS)

    def on_turn(self, rows: Sequence[Row], began: float, ended: float) -> None:
        """A turn of the engine's loop: with a step of these rows, or without any."""
        if not rows:
            self.meter.waited(ended)
            return
        self.meter.stepped(rows, began, ended)
        self.step_s.add(ended - began)
        self.step_tokens.add(sum(len(row.ids) for row in rows))
        self.step_seqs.add(len(rows))

    def on_prompt(self, queue_s: float, prefill_s: float) -> None:
        """A prompt that was computed here has its first token. ``queue_s``: from its arrival to its
        first step; ``prefill_s``: from there to the token.
        """
        self.queue_s.add(queue_s)
        self.prefill_s.add(prefill_s)

    def on_pull(self, pull: Arrived) -> None:
        """Blocks have arrived, and are verified."""
        times = pull.times
        self.pull_s["queue"].add(times.queue_s)
        self.pull_s["wire"].add(times.wire_s)
        self.pull_s["seals"].add(times.seals_s)
        self.pull_s["total"].add(times.total_s)
        self.pull_bytes.add(pull.num_bytes)
        self.pull_blocks.add(len(pull.blocks))
