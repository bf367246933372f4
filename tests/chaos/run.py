"""``make chaos SEED=1 SECONDS=600 TRANSPORT=nixl``: everything dies, nothing is wrong.

::

    answers of one mixed engine ─► baton serve ─► load ║ faults ║ watching ─► idle? ─► report

Starts a real server with two prefill and two decode workers, keeps requests under way whose right
answers are known, and injects the faults of a schedule drawn from the seed: kills, stops, drains,
clients that leave, transfers and messages that are lost, late, doubled, damaged or out of order,
pools that are too small, leases that run out. Ends with a table and a verdict; the exit status is 1
if any promise was broken, and the server's logs are kept then.
"""

import argparse
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from router.tokenizer import Tokenizer
from services.config import ConfigError
from services.drain import DrainOptions, run_drain
from services.fetch import DEFAULT_MODEL, fetch
from tests.chaos import logs
from tests.chaos.aftermath import aftermath
from tests.chaos.fleet import Clock, Fleet, Member
from tests.chaos.inject import Injector
from tests.chaos.load import Load, label, mixed_answers, settle
from tests.chaos.questions import Question, long_question, questions
from tests.chaos.report import Goal, Run, examples, lines, verdict
from tests.chaos.schedule import EVERY_S, schedule
from tests.support.serving import Served, served

MAX_MODEL_LEN, BLOCK = 320, 16
KV_BLOCKS = 40  # of which one longest request takes 20
LEASE_S = 4.0
REQUEST_TIMEOUT_S = 60.0
HANG_AFTER_S = REQUEST_TIMEOUT_S + 10
REPORT_EVERY_S = 15.0
NUM_FLOOD = 5
FULL_S = 600.0  # a run of this length must reach the full goal
TRANSPORTS = {
    "nixl": ("--transport", "nixl"),
    "nixl-tcp": ("--transport", "nixl", "--ucx-tls", "tcp"),
    "tcp": ("--transport", "tcp"),
}
TOKEN_BUDGET = 64  # several chunks of most prompts
PULL_FAULTS = "drop=0.006,delay=0.03,duplicate=0.012,corrupt=0.012,reorder=0.012,delay_s=0.7"
# A message that is lost, doubled, damaged or out of order ends its connection.
LINK_FAULTS = "drop=3e-4,delay=3e-3,duplicate=3e-4,corrupt=3e-4,reorder=3e-4,delay_s=0.3"
SIZES = (
    *("--max-model-len", str(MAX_MODEL_LEN), "--token-budget", str(TOKEN_BUDGET)),
    *("--threads", "1"),
)


@dataclass(frozen=True)
class Options:
    """What a run is told."""

    seed: int = 1
    seconds: float = FULL_S
    transport: str = "nixl"
    clients: int = 8
    routers: int = 2
    num_questions: int = 64
    noise: bool = True  # faults of single transfers and messages as well
    every_s: float = EVERY_S  # between faults
    keep_logs: bool = False  # also when all is well


def flags(options: Options) -> list[str]:
    """Of ``baton serve``."""
    found = [
        *SIZES,
        *TRANSPORTS[options.transport],
        *("--prefill", "2", "--decode", "2", "--routers", str(options.routers)),
        *("--kv-blocks", str(KV_BLOCKS), "--checksums", "--lease-s", str(LEASE_S)),
        *("--request-timeout-s", str(REQUEST_TIMEOUT_S), "--first-token-status-s", "5"),
        *("--pull-stall-s", "2"),
    ]
    if options.noise:
        found += ["--pull-faults", f"{PULL_FAULTS},seed={options.seed}"]
        found += ["--link-faults", f"{LINK_FAULTS},seed={options.seed}"]
    return found


def goal(options: Options) -> Goal:
    """What a run must show. In a short one, a single fault meets a large share of the requests."""
    if options.seconds >= FULL_S:
        return Goal(answers=1000, right_share=0.95, each_kind=5, noise=options.noise)
    return Goal(int(options.seconds / 4), right_share=0.75, each_kind=0, noise=options.noise)


def chaos(options: Options, say: Callable[[str], None] = print) -> tuple[Run, bool]:
    """A whole run; whether all promises were kept."""
    clock = Clock()
    asked = ask_for(options)
    answers = mixed_answers(asked, SIZES)
    say(f"seed {options.seed}, {options.transport}: {len(asked)} answers of one engine")
    say(f"{clock.now():.0f} s; starting")
    with served(*flags(options)) as server:
        say(server.text)
        say(f"{clock.now():.0f} s; load and faults")
        run = inject(options, server, asked, answers, say)
        settle(run.records, asked, answers)
        for line in lines(run, goal(options)):
            say(line)
        passed = all(check.ok for check in verdict(run, goal(options)))
        if not passed or options.keep_logs:
            folder = logs.keep(server)
            say(f"{'passed' if passed else 'FAILED'}: seed {options.seed}, {options.transport};")
            say(f"the server's logs are kept in {folder}")
            labels = [label(options.seed, record.number) for record in examples(run)]
            for line in logs.about(folder, labels) if folder else ():
                say(line)
    return run, passed


def ask_for(options: Options) -> list[Question]:
    """Questions of the seed; the last one is what floods are made of."""
    tokenizer = Tokenizer.load(fetch(DEFAULT_MODEL))
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    text_ids = tokenizer.encode(" ".join(text.split()))
    return [
        *questions(options.seed, options.num_questions, text_ids),
        long_question(options.seed, text_ids, MAX_MODEL_LEN - 40, 8),
    ]


def inject(
    options: Options, server: Served, asked: list[Question], answers: list, say: Callable
) -> Run:
    """Load and faults at the same time, then calm, then a look at what is left."""
    clock = Clock()
    expected = {"prefill": 2, "decode": 2, "router": options.routers, "registry": 1}
    fleet = Fleet(server, expected, clock)
    load = Load(server.url, options.seed, asked, answers, options.clients, HANG_AFTER_S, clock)
    drains = Drains(server, fleet)
    injector = Injector(fleet, clock, LEASE_S, drains.start, lambda: load.flood(NUM_FLOOD))
    faults = schedule(options.seed, options.seconds, options.every_s)
    progress = Progress(load, fleet, injector, clock, say)
    try:
        injector.run(faults, options.seconds)
    finally:
        injector.close()
        load.stop()
        progress.close()
    say(f"{clock.now():.0f} s after the load's begin; waiting until all is idle and whole")
    left = aftermath(server, fleet, asked, answers, HANG_AFTER_S)
    say(f"{clock.now():.0f} s after the load's begin; done")
    fleet.close()
    return Run(
        load.records, injector.done, injector.late, fleet.members, fleet.samples,
        fleet.seen.total(), left, forgiven=options.transport == "nixl-tcp",
        extra={"drains": ", ".join(drains.ends)},
    )  # fmt: skip


class Drains:
    """Workers that were told to leave by ``baton drain``, and how that went."""

    def __init__(self, server: Served, fleet: Fleet) -> None:
        self.ends: list[str] = []
        self._url, self._fleet = server.url, fleet
        (self._secret_file,) = re.findall(r"--secret-file (\S+)", server.text)

    def start(self, member: Member, deadline_s: float) -> None:
        """Returns at once."""
        threading.Thread(target=self._run, args=(member, deadline_s), daemon=True).start()

    def _run(self, member: Member, deadline_s: float) -> None:
        name = self._fleet.worker_id(member)
        try:
            status = run_drain(
                DrainOptions(name, "", self._url, self._secret_file, deadline_s), lambda _: None
            )
            self.ends.append("left" if status == 0 else "did not leave in time")
        except ConfigError as error:
            self.ends.append(str(error))


class Progress:
    """A line from time to time."""

    def __init__(
        self, load: Load, fleet: Fleet, injector: Injector, clock: Clock, say: Callable
    ) -> None:
        self._stop = threading.Event()
        self._parts = load, fleet, injector, clock, say
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        load, fleet, injector, clock, say = self._parts
        while not self._stop.wait(REPORT_EVERY_S):
            answered = sum(record.answered for record in load.records)
            sample = fleet.samples[-1] if fleet.samples else None
            say(
                f"{clock.now():5.0f} s  {answered} answered of {len(load.records)},"
                f" {len(injector.done)} faults, healthy: {bool(sample and sample.healthy)}"
            )


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=FULL_S)
    parser.add_argument("--transport", choices=TRANSPORTS, default="nixl")
    parser.add_argument("--clients", type=int, default=8, help="requests in flight")
    parser.add_argument("--routers", type=int, default=2)
    parser.add_argument("--every-s", type=float, default=EVERY_S, help="between faults")
    parser.add_argument("--questions", dest="num_questions", type=int, default=64)
    parser.add_argument("--keep-logs", action="store_true", help="also when all is well")
    parser.add_argument("--noise", action=argparse.BooleanOptionalAction, default=True)
    _, passed = chaos(Options(**vars(parser.parse_args())))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
