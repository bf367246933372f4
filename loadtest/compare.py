"""Several targets by turns, A B B A: every round asks all of them the same, the next asks anew.

What changes on the machine meanwhile then meets all of them alike. Which target goes first rotates.
One target alone with a :class:`Search` is the search for its highest rate. What was seen when it is
interrupted, or when a target dies, is kept. Statistics are in :mod:`loadtest.ratios`.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from loadtest.client import Client, ServerUnusable
from loadtest.conversation import Conversation
from loadtest.figures import summarize
from loadtest.fleet import Fleet
from loadtest.record import Record
from loadtest.runner import run
from loadtest.search import Probe, RateSearch, max_rate
from loadtest.targets import Server, Target, TargetError
from loadtest.trial import Comparison, Objectives, Trial, Window
from loadtest.trial_run import ping_s, run_trial, wait_quiet
from loadtest.wording import percent, time_words

Workload = Callable[[float, int], Sequence[Conversation]]
"""Conversations of a rate and a seed, due within the window. Different seeds: different texts."""
Connect = Callable[[str], AbstractAsyncContextManager[Client]]
"""A client of the server at a URL."""

Result = TypeVar("Result")

WARM_UP_TOGETHER = 2
WARM_UP_SEED = 1 << 32  # nobody gives that one
QUIET_PATIENCE_S = 60.0
SHARED = (
    "Two targets are the same server, {}: who comes second may find its prompts in the prefix"
    " cache."
)


@dataclass(frozen=True)
class Slot:
    """One trial that is to be made."""

    target: str
    round: int
    rate: float
    seed: int


class Plan(Protocol):
    """Which trials follow one another."""

    @property
    def attainment(self) -> float:
        """The share of requests that is to meet its SLOs."""
        ...

    def round(
        self, number: int, names: Sequence[str], seen: Mapping[str, Sequence[Probe]]
    ) -> list[Slot]:
        """Trials of one round of the targets ``names``; empty: it is over.

        ``seen``: by target, its trials so far by the first of the objectives.
        """
        ...

    def num_trials(self, num_targets: int) -> int:
        """At most."""
        ...


@dataclass(frozen=True)
class Sweep:
    """Every target at the same rates, so many rounds."""

    rates: tuple[float, ...]
    rounds: int = 3
    seed: int = 0
    attainment: float = 0.9
    by_target: bool = False  # all rates of a target before the next one's: for restarts

    def round(
        self, number: int, names: Sequence[str], seen: Mapping[str, Sequence[Probe]]
    ) -> list[Slot]:
        """See :class:`Plan`."""
        if number >= self.rounds:
            return []
        slots = [
            Slot(name, number, rate, child_seed(self.seed, number, place))
            for place, rate in enumerate(self.rates)
            for name in rotated(names, number if self.by_target else number + place)
        ]
        if self.by_target:
            order = rotated(names, number)
            slots.sort(key=lambda slot: order.index(slot.target))
        return slots

    def num_trials(self, num_targets: int) -> int:
        """See :class:`Plan`."""
        return self.rounds * len(self.rates) * num_targets


@dataclass(frozen=True)
class Search:
    """Every target's own highest rate; targets take turns, each at the rate it needs next."""

    search: RateSearch
    seed: int = 0

    @property
    def attainment(self) -> float:
        """What the search looks for."""
        return self.search.attainment

    def round(
        self, number: int, names: Sequence[str], seen: Mapping[str, Sequence[Probe]]
    ) -> list[Slot]:
        """See :class:`Plan`."""
        seed = child_seed(self.seed, number, 0)
        rates = {name: self.search.next(seen.get(name, ())) for name in rotated(names, number)}
        return [Slot(name, number, rate, seed) for name, rate in rates.items() if rate is not None]

    def num_trials(self, num_targets: int) -> int:
        """See :class:`Plan`."""
        return self.search.probes * num_targets


@dataclass
class Comparer:
    """Runs the turns of a comparison, and says how it goes."""

    workload: Workload
    window: Window
    objectives: Objectives
    connect: Connect
    stop: asyncio.Event  # set: what is under way is cut off, and what there is returned
    say: Callable[[str], None] = print
    on_trial: Callable[[Trial], None] = lambda trial: None
    on_record: Callable[[Slot, Record], None] = lambda slot, record: None  # while a trial runs
    warm_up: int = 4  # conversations, for a server that has just started
    _best_ping_s: dict[str, float] = field(default_factory=dict, init=False)
    _num_prepared: int = field(default=0, init=False)
    _clients: dict[str, tuple[Client, AsyncExitStack]] = field(default_factory=dict, init=False)
    _trials: list[Trial] = field(default_factory=list, init=False)

    async def compare(
        self,
        targets: Sequence[Target],
        plan: Plan,
        folder: Path,
        restart: bool = False,
        command: Sequence[str] | None = None,
    ) -> Comparison:
        """Make the trials of the plan; ``folder`` gets the output of servers.

        Raises TargetError, with nothing left running, if a server cannot be started at first.
        """
        started = datetime.now().astimezone().isoformat(timespec="seconds")
        urls = [target.url for target in targets if target.url]
        shared = sorted({url for url in urls if urls.count(url) > 1})
        fleet = Fleet(targets, folder, self._prepare, self.say, restart, command)
        self._trials = []
        try:
            await unless(self.stop, fleet.open())
            if fleet.restart and isinstance(plan, Sweep):
                plan = replace(plan, by_target=True)
            await self._rounds(fleet, plan)
        finally:
            for name in list(self._clients):
                await self._disconnect(name)
            await fleet.close()
        quiet = [f"{t.target} at {t.rate:g}/s: {note}" for t in self._trials for note in t.notes]
        return Comparison(
            targets=tuple(targets),
            trials=tuple(self._trials),
            objectives=self.objectives,
            attainment=plan.attainment,
            started=started,
            notes=(*(SHARED.format(url) for url in shared), *fleet.notes, *quiet),
            interrupted=self.stop.is_set(),
        )

    async def _rounds(self, fleet: Fleet, plan: Plan) -> None:
        began, number = time.monotonic(), 0
        most = plan.num_trials(len(fleet.targets))
        by_name = {target.name: target for target in fleet.targets}
        while not self.stop.is_set():
            names = [target.name for target in fleet.alive]
            slots = plan.round(number, names, self._seen())
            if not slots:
                return
            for slot in slots:
                server = await unless(self.stop, fleet.turn(by_name[slot.target]))
                if server is None:
                    continue
                self.say(f"{_where(slot)}: {self.window.duration_s:.0f} s of requests")
                trial = await self._trial(server, slot)
                fleet.check(server)
                self._trials.append(trial)
                self.on_trial(trial)
                took_s = (time.monotonic() - began) / len(self._trials)
                left_s = took_s * max(most - len(self._trials), 0)
                left = f"at most {time_words(left_s)} left" if left_s else "that was the last"
                self.say(f"{_where(slot)}: {self._outcome(trial, plan)}; {left}")
            number += 1

    def _seen(self) -> dict[str, list[Probe]]:
        """Of all targets, by the first objectives."""
        slos = next(iter(self.objectives.values()))
        seen: dict[str, list[Probe]] = {}
        for trial in self._trials:
            seen.setdefault(trial.target, []).append(trial.probe(slos))
        return seen

    async def _prepare(self, server: Server) -> None:
        """Warm a server up, and see how fast it answers when it has nothing else to do."""
        name = server.target.name
        rate = max(2 * self.warm_up / self.window.duration_s, 1e-9)  # so that there are enough
        conversations = self.workload(rate, child_seed(WARM_UP_SEED, self._num_prepared, 0))
        self._num_prepared += 1
        client = await self._client(server)
        await run(
            conversations[: self.warm_up], client, concurrency=WARM_UP_TOGETHER, stop=self.stop
        )
        self._best_ping_s[name] = await ping_s(client)

    async def _client(self, server: Server) -> Client:
        """A new client for a server that has just become ready."""
        name = server.target.name
        await self._disconnect(name)
        stack = AsyncExitStack()
        try:
            client = await stack.enter_async_context(self.connect(server.url))
        except ServerUnusable as error:
            raise TargetError(f"{name}: {error}") from error
        self._clients[name] = client, stack
        return client

    async def _disconnect(self, name: str) -> None:
        if name in self._clients:
            await self._clients.pop(name)[1].aclose()

    async def _trial(self, server: Server, slot: Slot) -> Trial:
        notes = []
        client = self._clients[slot.target][0]
        best_s = self._best_ping_s[slot.target]
        if why := await wait_quiet(client, best_s, QUIET_PATIENCE_S, self.stop):
            notes.append(why)
        conversations = self.workload(slot.rate, slot.seed)
        result = await run_trial(
            conversations,
            client,
            self.window,
            self.objectives,
            self.stop,
            partial(self.on_record, slot),
        )
        if spoiled := summarize(result, next(iter(self.objectives.values()))).spoiled:
            notes.append(spoiled)
        return Trial(
            target=slot.target,
            round=slot.round,
            rate=slot.rate,
            seed=slot.seed,
            result=result,
            start_s=self.window.start_s,
            end_s=self.window.duration_s,
            notes=() if self.stop.is_set() else tuple(notes),
        )

    def _outcome(self, trial: Trial, plan: Plan) -> str:
        """What came out, and what all of the target's trials say by now."""
        figures = summarize(trial.result, next(iter(self.objectives.values()))).total
        met, total = figures.attainment.met, figures.attainment.total
        words = f"{met} of {total} met their SLOs"
        if total:
            words += f" ({percent(met / total)}), TTFT p50 {time_words(figures.ttft.p50)},"
            words += f" TPOT p50 {time_words(figures.tpot.p50)}"
        if figures.errors:
            words += ", errors: " + ", ".join(f"{n} {kind}" for kind, n in figures.errors.items())
        probes = [probe for probe in self._seen()[trial.target] if probe.met]
        if len({probe.rate for probe in probes}) > 1:
            words += f"; highest rate so far {max_rate(probes, plan.attainment)}"
        return words


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, Result]) -> Result | None:
    """What ``work`` returns; it is cancelled, and None, when ``stop`` is set before."""
    task, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            return await task
    finally:
        stopping.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
    return None


def child_seed(seed: int, number: int, place: int) -> int:
    """A seed of its own for each round and rate, so that no prompt comes twice."""
    return int(np.random.SeedSequence((seed, number, place)).generate_state(1)[0])


def rotated(names: Sequence[str], turns: int) -> list[str]:
    """The names in their order, from another one on."""
    first = turns % len(names) if names else 0
    return [*names[first:], *names[:first]]


def _where(slot: Slot) -> str:
    return f"round {slot.round + 1}, {slot.target} at {slot.rate:.3g}/s"
