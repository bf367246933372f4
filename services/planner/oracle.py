"""The fewest workers that would do, for somebody who knows what comes (pure).

For each slot of time, in order, the fewest workers with which enough of the requests that arrive in
it meet the objective, by the same profile that the simulator's workers are timed by, and given what
the slots before have left: the prompts as a queue with as many clerks, the answers as sharing the
workers evenly. That is kinder than reality, where batches differ, so what it finds is played back
in the simulator, and where objectives are missed, planned again against stricter ones. A worker
counts from when it must be started, and until it has drained, as the simulator counts for all.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from math import ceil, inf
from typing import NamedTuple

from services.planner.profile import Profile
from services.planner.sim_control import Scheduled
from services.planner.sim_pool import World
from services.planner.sim_run import Run, Sizes
from services.planner.simulator import Simulation
from services.planner.workload import Trace

SLOT_S = 120.0
STRICTER = 0.97  # times the objective, each time that a plan has failed
TRIES = 8
LARGEST = 512
HOPELESS = 3.0  # times the objective that a step may take before fewer workers are given up

Schedule = dict[str, list[tuple[float, int]]]
"""By role: (from when on, workers wanted), in order."""


@dataclass(frozen=True)
class Oracle:
    """What was found. ``run`` is its playback, whose hours and attainment are the oracle's."""

    schedule: Schedule
    run: Run


def oracle(trace: Trace, world: World, attainment: float = 0.95) -> Oracle:
    """Raises RuntimeError if nothing that was tried meets the objectives in the simulator."""
    strict = {"prefill": 1.0, "decode": 1.0}
    for _ in range(TRIES):
        schedule = plan(trace, world, attainment, strict)
        run = play(trace, world, schedule)
        if run.ttft < attainment:
            strict["prefill"] *= STRICTER
        if run.tpot < attainment:
            strict["decode"] *= STRICTER
        if min(run.ttft, run.tpot) >= attainment:
            return Oracle(schedule, run)
    raise RuntimeError(f"{trace.name}: {TRIES} plans have missed the objectives")


def play(trace: Trace, world: World, schedule: Schedule) -> Run:
    """The load under these sizes."""
    first: Sizes = {role: sizes[0][1] for role, sizes in schedule.items()}
    return Simulation(trace, world, Scheduled(schedule), first).run()


def plan(trace: Trace, world: World, attainment: float, strict: dict[str, float]) -> Schedule:
    """Sizes by slot, each asked for so early that the workers are there when the slot begins.

    ``strict``: objectives are so many times as long, by role.
    """
    slots = ceil(trace.duration_s / SLOT_S)
    config = world.router
    jobs = [
        _Job(each.at, _service_s(each.prompt, world), each.prompt, each.answer)
        for each in trace.arrivals
    ]
    prefill, firsts = _fewest_clerks(jobs, slots, strict["prefill"] * config.slo_ttft_s, attainment)
    for job, first in zip(jobs, firsts, strict=True):
        job.decoded_from = first + world.handoff_s
    jobs.sort(key=lambda job: job.decoded_from)
    decode = _fewest_sharers(
        jobs,
        slots,
        world.profile,
        strict["decode"] * config.slo_tpot_s,
        world.handoff_s,
        attainment,
    )
    return {
        "prefill": _asked_for(prefill, world.start_s),
        "decode": _asked_for(decode, world.start_s),
    }


def _asked_for(sizes: Sequence[int], start_s: float) -> list[tuple[float, int]]:
    """From sizes by slot to when they must be asked for: who is wanted in a slot, or in the ones
    that begin while a worker would start.
    """
    ends = [(index + 1) * SLOT_S for index in range(len(sizes))]
    moments = sorted({0.0, *ends[:-1], *(max(0.0, end - start_s) for end in ends[:-1])})
    found: list[tuple[float, int]] = []
    for moment in moments:
        until = moment + start_s
        wanted = max(
            size
            for index, size in enumerate(sizes)
            if index * SLOT_S <= until and ends[index] > moment
        )
        if not found or found[-1][1] != wanted:
            found.append((moment, wanted))
    return found


@dataclass
class _Job:
    at: float
    service_s: float
    prompt: int
    answer: int
    decoded_from: float = 0.0


def _service_s(tokens: int, world: World) -> float:
    """How long a prompt takes, in as many steps as it needs."""
    budget = world.prefill.token_budget
    starts = range(0, tokens, budget)
    return sum(world.profile.prefill_s(min(budget, tokens - start), start) for start in starts)


# --- prompts: a queue before clerks ---------------------------------------------------------------


def _fewest_clerks(
    jobs: list[_Job], slots: int, objective_s: float, attainment: float
) -> tuple[list[int], list[float]]:
    """Clerks by slot, and when each job's first token is there."""
    sizes: list[int] = []
    firsts: list[float] = []
    free: list[float] = [0.0]  # when each clerk is free
    place = 0
    for slot in range(slots):
        begin, end = slot * SLOT_S, (slot + 1) * SLOT_S
        here = place
        while place < len(jobs) and jobs[place].at < end:
            place += 1
        mine = jobs[here:place]
        possible = sum(job.service_s <= objective_s for job in mine)
        enough = min(attainment * len(mine), possible)
        for size in range(1, LARGEST):
            clerks = sorted(free)[:size] + [begin] * (size - len(free))
            heapq.heapify(clerks)
            done = [_serve(clerks, job) for job in mine]
            good = sum(first - job.at <= objective_s for first, job in zip(done, mine, strict=True))
            if good >= enough:
                break
        sizes.append(size)
        firsts += done
        free = clerks
    return sizes, firsts


def _serve(clerks: list[float], job: _Job) -> float:
    """The first clerk who is free takes it; returns when it is done."""
    done = max(clerks[0], job.at) + job.service_s
    heapq.heapreplace(clerks, done)
    return done


# --- answers: all at once, the slower the more ----------------------------------------------------


class _Answer(NamedTuple):
    ends: float  # at which ``tokens``
    began: float
    base: float  # of its context
    answer: int


class _Sharing:
    """Answers that share workers evenly. ``tokens`` is what one that began at time zero would have
    by now: all who are there get the same.
    """

    def __init__(self, profile: Profile, handoff_s: float) -> None:
        self.profile = profile
        self.handoff_s = handoff_s  # since the first token
        self.now = 0.0
        self.tokens = 0.0
        self.base = 0.0  # the sum of their contexts, less ``tokens`` for each
        self.ends: list[_Answer] = []  # a heap

    def copy(self) -> _Sharing:
        other = copy(self)
        other.ends = self.ends.copy()
        return other

    def step_s(self, workers: int) -> float:
        """Of a step now."""
        count = max(1, len(self.ends))
        context = self.base / count + self.tokens
        return self.profile.decode_s(max(1.0, count / workers), context)

    def go_on(self, until: float, workers: int) -> list[tuple[float, float]]:
        """(when it began, seconds per token) of the answers that end."""
        ended = []
        while self.ends:
            step_s = self.step_s(workers)
            first = self.ends[0]
            if self.now + (first.ends - self.tokens) * step_s > until:
                self.tokens += (until - self.now) / step_s
                break
            heapq.heappop(self.ends)
            self.now += (first.ends - self.tokens) * step_s
            self.tokens = first.ends
            self.base -= first.base
            took_s = self.now - first.began + self.handoff_s
            ended.append((first.began, took_s / (first.answer - 1)))
        self.now = until
        return ended

    def add(self, job: _Job) -> None:
        """Its KV is here."""
        base = job.prompt - self.tokens
        self.base += base
        end = self.tokens + job.answer - 1
        heapq.heappush(self.ends, _Answer(end, self.now, base, job.answer))


def _fewest_sharers(
    jobs: list[_Job],
    slots: int,
    profile: Profile,
    objective_s: float,
    handoff_s: float,
    attainment: float,
) -> list[int]:
    """Workers by slot. Jobs in the order in which their KV comes."""
    sizes: list[int] = []
    state, place = _Sharing(profile, handoff_s), 0
    for slot in range(slots):
        for size in range(1, LARGEST):
            tpots, after = _try_slot(state, jobs, place, slot, size, HOPELESS * objective_s)
            if after is None:
                continue
            if sum(tpot <= objective_s for tpot in tpots) >= attainment * len(tpots):
                break
        assert after is not None
        sizes.append(size)
        state, place = after
    return sizes


def _try_slot(
    state: _Sharing, jobs: list[_Job], place: int, slot: int, size: int, hopeless_s: float
) -> tuple[list[float], tuple[_Sharing, int] | None]:
    """Seconds per token of the answers that begin in a slot, if so many workers stay until they
    have ended; and what there is at the slot's end, if no step takes longer than ``hopeless_s``.
    """
    begin, end = slot * SLOT_S, (slot + 1) * SLOT_S
    trial = state.copy()
    after: tuple[_Sharing, int] | None = None
    ended: list[tuple[float, float]] = []
    while after is None or any(begin <= each.began < end for each in trial.ends):
        next_at = jobs[place].decoded_from if place < len(jobs) else inf
        if after is None and next_at >= end:
            ended += trial.go_on(end, size)
            after = trial.copy(), place
            continue
        ended += trial.go_on(next_at, size)
        if trial.step_s(size) > hopeless_s:
            return [], None
        if place < len(jobs):
            trial.add(jobs[place])
            place += 1
    return [tpot for began, tpot in ended if begin <= began < end], after
