"""Trials: a workload sent to one server at one rate for a while, and what a comparison has of them.

Trials follow one another on the same server, so each is brought to its end: answers are waited for
as long as a request can still meet its SLOs. By then an overloaded server may hold hundreds that
cannot; they are cut off, and count as missed, since that is what they are. Requests that are cut
off before it is known (by Ctrl-C) count neither way. Those that are due in the first part, when
the server is not yet under load, are sent and left out. Pure data and decisions.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from loadtest.conversation import Conversation
from loadtest.record import INTERRUPTED, Record, RunResult
from loadtest.search import Probe
from loadtest.slo import SLO
from loadtest.targets import Target

OVERDUE = "overdue"
"""The error of a request that was cut off when it could meet none of its SLOs any more."""

Objectives = Mapping[str, Mapping[str, SLO]]
"""By label ("tight", "loose"), the SLO of each class. All are judged by the same trials."""


@dataclass(frozen=True)
class Window:
    """When requests are sent, and from when they count."""

    duration_s: float
    lead: float = 0.1  # share of the duration whose requests do not count
    drain_s: float = 60.0  # for answers whose SLOs have no end, as those of TPOT alone

    @property
    def start_s(self) -> float:
        """Requests due from here count."""
        return self.duration_s * self.lead


@dataclass(frozen=True)
class Trial:
    """What one target did at one rate in one round."""

    target: str
    round: int  # from 0
    rate: float
    seed: int  # of its workload: the same for all targets of a round
    result: RunResult  # requests that count only
    start_s: float
    end_s: float
    notes: tuple[str, ...] = ()

    def probe(self, slos: Mapping[str, SLO]) -> Probe:
        """For the search and the estimate of the highest rate.

        Times count from when requests were due: what a client that cannot keep up sends late has
        not been served in time, however fast the answer was.
        """
        known = [record for record in self.result.records if record.error != INTERRUPTED]
        return Probe(
            rate=self.rate,
            due_s=tuple(record.due_s for record in known),
            met=tuple(
                slos.get(record.class_name, SLO()).met(record, max(0.0, record.lag_s))
                for record in known
            ),
            start_s=self.start_s,
            end_s=self.end_s,
        )


@dataclass(frozen=True)
class Comparison:
    """All that was seen."""

    targets: tuple[Target, ...]
    trials: tuple[Trial, ...]  # in the order in which they were made
    objectives: Objectives
    attainment: float
    started: str  # wall clock, ISO 8601
    notes: tuple[str, ...] = ()  # dead targets, servers that did not become quiet ...
    interrupted: bool = False

    def of(self, target: str, rate: float | None = None) -> tuple[Trial, ...]:
        """A target's trials, at one rate or at all."""
        return tuple(
            trial
            for trial in self.trials
            if trial.target == target and (rate is None or trial.rate == rate)
        )

    @property
    def rates(self) -> tuple[float, ...]:
        """Rates tried, ascending."""
        return tuple(sorted({trial.rate for trial in self.trials}))


def deadline_s(max_tokens: int, slo: SLO) -> float:
    """After so long a request has surely missed; infinite if that can always be still to come."""
    decode_s = slo.tpot * (max_tokens - 1) if max_tokens > 1 else 0.0
    return min(slo.e2e, slo.ttft + decode_s)


def surely_missed(record: Record, slo: SLO, elapsed_s: float) -> bool:
    """Whether a request that was cut off after ``elapsed_s`` could not have met its SLO."""
    if elapsed_s > deadline_s(record.max_tokens, slo):
        return True
    if not record.chunk_s:
        return elapsed_s > slo.ttft
    decode_s = slo.tpot * (record.max_tokens - 1) if record.max_tokens > 1 else math.inf
    return record.ttft_s > slo.ttft or elapsed_s - record.ttft_s > decode_s


def judge(record: Record, objectives: Objectives, elapsed_s: float) -> Record:
    """A request that was cut off has failed if it has missed by all objectives."""
    slos = [slos.get(record.class_name, SLO()) for slos in objectives.values()]
    if record.error != INTERRUPTED or not slos:
        return record
    if all(surely_missed(record, slo, elapsed_s) for slo in slos):
        message = f"cut off after {elapsed_s:.1f} s, when it had missed its SLOs"
        return replace(record, error=OVERDUE, message=message)
    return record


def patience_s(
    conversations: Sequence[Conversation], window: Window, objectives: Objectives
) -> float:
    """From the last sending until every request has met or missed all of its SLOs."""
    longest: dict[str, int] = {}
    for conversation in conversations:
        tokens = max(turn.max_tokens for turn in conversation.turns)
        longest[conversation.class_name] = max(tokens, longest.get(conversation.class_name, 0))
    deadlines = [
        deadline_s(tokens, slos.get(name, SLO()))
        for slos in objectives.values()
        for name, tokens in longest.items()
    ]
    return max(
        (time_s if math.isfinite(time_s) else window.drain_s for time_s in deadlines),
        default=window.drain_s,
    )
