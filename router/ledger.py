"""What one router has counted since it started, in plain numbers (pure).

Written on the event loop only, read by whoever exports it, from any thread: each number is complete
by itself at any time. Warm-up proofs never come here.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from math import inf

from router.buckets import DURATION, STAGE, TOKENS, TPOT, TTFT, Tally, with_border
from router.observation import FIRST_STAGES, SECOND_STAGES, STATUSES, Observation


@dataclass(frozen=True)
class Objectives:
    """What this server wants to be: seconds to the first token, and for each one after it."""

    ttft_s: float = inf
    tpot_s: float = inf


@dataclass
class Routing:
    """What the dispatcher did. Keys are values of labels."""

    decisions: Counter[tuple[str, ...]] = field(default_factory=Counter)  # (decision,)
    retries: Counter[tuple[str, ...]] = field(default_factory=Counter)  # (stage, reason)
    failovers: Counter[tuple[str, ...]] = field(default_factory=Counter)  # (kind,)
    losses: Counter[tuple[str, ...]] = field(default_factory=Counter)  # (role, reason)


class Ledger:
    """What became of HTTP requests for tokens."""

    def __init__(self, objectives: Objectives | None = None) -> None:
        self.objectives = objectives or Objectives()
        self.requests: Counter[tuple[str, ...]] = Counter()  # endpoint, stream, code, error_type
        self.rejections: Counter[tuple[str, ...]] = Counter()  # (reason,)
        self.disconnects: Counter[tuple[str, ...]] = Counter()  # (stage,)
        self.verdicts: Counter[tuple[str, ...]] = Counter()  # (slo, verdict)
        self.prompt_tokens = 0  # of prompts whose first token was made
        self.cached_tokens = 0  # of them, not computed
        self.generated_tokens = 0
        ttft, tpot = (
            with_border(borders, slo) if slo < inf else borders
            for borders, slo in ((TTFT, self.objectives.ttft_s), (TPOT, self.objectives.tpot_s))
        )
        self.ttft = {stream: Tally(ttft) for stream in (False, True)}
        self.tpot = Tally(tpot)
        self.gaps = Tally(tpot)
        self.durations: defaultdict[int, Tally] = defaultdict(
            lambda: Tally(DURATION), {status: Tally(DURATION) for status in STATUSES}
        )
        self.stages = {name: Tally(STAGE) for name in FIRST_STAGES + SECOND_STAGES}
        self.prompt_sizes = Tally(TOKENS)
        self.answer_sizes = Tally(TOKENS)

    def first_token(self, seen: Observation) -> None:
        """A request has its first token. ``seen`` goes on."""
        if seen.ttft_s is not None:
            self.ttft[seen.stream].add(seen.ttft_s)
        for stage, seconds in (seen.stages or {}).items():
            self.stages[stage].add(seconds)

    def finished(self, seen: Observation) -> None:
        """A request has ended, in whatever way."""
        stream = "true" if seen.stream else "false"
        self.requests[seen.endpoint, stream, str(seen.code), seen.error_type] += 1
        assert seen.ended_at is not None
        self.durations[seen.code].add(seen.ended_at - seen.arrived_at)
        if seen.rejection:
            self.rejections[seen.rejection,] += 1
        if seen.left_in:
            self.disconnects[seen.left_in,] += 1
        if seen.tpot_s is not None:
            self.tpot.add(seen.tpot_s)
        for stage, seconds in (seen.next_stages or {}).items():
            self.stages[stage].add(seconds)
        if seen.ttft_s is not None:
            self.prompt_sizes.add(seen.prompt_tokens)
            self.answer_sizes.add(seen.tokens)
        for slo, good in (
            ("ttft", seen.ttft_good), ("tpot", seen.tpot_good), ("both", seen.good),
        ):  # fmt: skip
            if good is not None:
                self.verdicts[slo, "good" if good else "bad"] += 1
