"""One trial: a workload sent to one server at one rate, and what becomes of its requests.

Trials follow one another on the same server, so each is brought to its end: answers are waited for
as long as a request can still meet its SLOs. By then an overloaded server may hold hundreds that
cannot; they are cut off, and count as missed, since that is what they are. Requests that are cut
off before it is known (by Ctrl-C) count neither way. Those that are due in the first part, when
the server is not yet under load, are sent and left out.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from loadtest.client import Reply
from loadtest.conversation import Conversation, Text
from loadtest.record import INTERRUPTED, Record, RunResult
from loadtest.runner import run
from loadtest.search import Probe
from loadtest.slo import SLO

OVERDUE = "overdue"
"""The error of a request that was cut off when it could meet none of its SLOs any more."""

SLACK_S = 0.2  # after a deadline, for answers on their way
PING = "Hello"
QUIET_FACTOR, QUIET_S = 2.0, 0.05  # a quiet server answers within so much of its best
PINGS = 3

Objectives = Mapping[str, Mapping[str, SLO]]
"""By label ("tight", "loose"), the SLO of each class. All are judged by the same trials."""


class Sender(Protocol):
    """What trials need of a client."""

    async def send(self, text: Text, max_tokens: int) -> Reply:
        """One request; never raises for what a server does."""
        ...


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
        """For the search and the estimate of the highest rate."""
        known = [record for record in self.result.records if record.error != INTERRUPTED]
        return Probe(
            rate=self.rate,
            due_s=tuple(record.due_s for record in known),
            met=tuple(slos.get(record.class_name, SLO()).met(record) for record in known),
            start_s=self.start_s,
            end_s=self.end_s,
        )


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


async def run_trial(
    conversations: Sequence[Conversation],
    client: Sender,
    window: Window,
    objectives: Objectives,
    stop: asyncio.Event,
    on_record: Callable[[Record], None] | None = None,
) -> RunResult:
    """The requests that are due in the window, all of them ended.

    Later turns of conversations go on until the last of those has ended, so that it sees the load
    that it would see; they do not count. ``stop`` cuts everything off at once.
    """
    loop = asyncio.get_running_loop()
    cut = asyncio.Event()
    started = loop.time()
    task = asyncio.create_task(run(conversations, client, stop=cut, on_record=on_record))
    stopping = asyncio.create_task(stop.wait())
    try:
        patience = window.duration_s + _patience_s(conversations, window, objectives) + SLACK_S
        await asyncio.wait((task, stopping), timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        cut_s = loop.time() - started
        cut.set()
        result = await task
    finally:
        task.cancel()
        stopping.cancel()
    records = tuple(
        _judge(record, objectives, cut_s - record.sent_s)
        for record in result.records
        if window.start_s <= record.due_s < window.duration_s
    )
    interrupted = stop.is_set() and result.interrupted
    return replace(
        result,
        records=records,
        duration_s=max(result.duration_s - window.start_s, 0.0),
        num_planned=result.num_planned if interrupted else len(records),
        interrupted=interrupted,
    )


async def ping_s(client: Sender) -> float:
    """How long the shortest request takes at best; infinite if the server does not answer."""
    return min([await _ping_s(client) for _ in range(PINGS)])


async def wait_quiet(client: Sender, best_s: float, patience_s: float, stop: asyncio.Event) -> str:
    """Return when the server answers as fast as one that has nothing else to do; else why not.

    A client that goes away does not stop every server: what was cut off may still be computed.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + patience_s
    while not stop.is_set():
        took_s = await _ping_s(client)
        if took_s <= best_s * QUIET_FACTOR + QUIET_S:
            return ""
        if math.isinf(took_s):
            return "it did not answer before its turn"
        if loop.time() > end:
            return f"it was still busy {patience_s:.0f} s after the turn before"
        await asyncio.sleep(min(took_s, 1.0))
    return ""


async def _ping_s(client: Sender) -> float:
    loop = asyncio.get_running_loop()
    started = loop.time()
    reply = await client.send(PING, 1)
    return math.inf if reply.error else loop.time() - started


def _patience_s(
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


def _judge(record: Record, objectives: Objectives, elapsed_s: float) -> Record:
    """A request that was cut off has failed if it has missed by all objectives."""
    slos = [slos.get(record.class_name, SLO()) for slos in objectives.values()]
    if record.error != INTERRUPTED or not slos:
        return record
    if all(surely_missed(record, slo, elapsed_s) for slo in slos):
        message = f"cut off after {elapsed_s:.1f} s, when it had missed its SLOs"
        return replace(record, error=OVERDUE, message=message)
    return record
