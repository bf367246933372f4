"""Times steps as a worker makes them: prompts by length, decoding by batch, both by context.

An engine over the worker's own runner computes them, a prompt in steps of the worker's token
budget, from the moment it is known to its first token. What a prompt or an answer stands behind is
not computed: ``fill`` puts any keys and values there, as pulls do, since how long attention takes
does not depend on what they are. But it does on their memory, so they must have been written.

Every case has its turn before any has another, so that whoever disturbs the machine for seconds
disturbs each a little. A disturbed step only ever takes longer, and while a deployment starts there
are many of them: what counts is what a quarter of the tries reach. A model that is a little too
fast is corrected by what users see, see ``planner``; one that is too slow would not be. Knows no
torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from statistics import fmean

from services.engine.config import EngineConfig
from services.engine.engine import Engine, Runner
from services.engine.scheduler import ERROR, NOT_FINITE, Output, Plan
from services.engine.sequence import Key, SamplingParams
from services.planner.fit import FEWEST, SHORTEST_S, FitError, Point, fit

LENGTH = 64  # of the shortest prompt; smaller steps would mostly read weights
LOOK = 8  # tokens of the first one, which says whether even such take too long
LONG = 10  # they do, if one takes more than this part of the time that there is
CONTEXT = 64  # of the shortest answers
BEHIND = 512  # shortest context of chunks of prompts
TURNS = 3  # of each case, about: the first ones may take a third of the time
MOST_TURNS = 9
WARM_UP, STEPS = 1, 2  # of a batch that decodes, in each turn
SKETCHY_TOKENS = 8192  # KV that a short look fills, at most
AVERAGE = 2048  # tokens of context that cost about as much as all else; for the order only

PROMPT = SamplingParams(max_tokens=1, temperature=0.0)
ANSWER = SamplingParams(max_tokens=1 << 20)  # sampled, as who says nothing of temperature gets it

Progress = Callable[[int, float], None]
"""Told how many points there are, and after how many seconds."""


class TrialError(RuntimeError):
    """The engine does not do what is timed."""


@dataclass(frozen=True)
class Case:
    """What is timed: ``size`` tokens of a prompt or sequences, behind ``context`` tokens."""

    size: int
    context: int = 0

    @property
    def work(self) -> float:
        """Orders cases from short to long, about."""
        return self.size * (1 + self.context / AVERAGE)


# --- what to time ---------------------------------------------------------------------------------


def prompts(config: EngineConfig, shortest: int, thorough: bool = True) -> list[Case]:
    """Whole prompts, and chunks behind a context, from short ones to what fits."""
    room = _room(config) if thorough else min(_room(config), SKETCHY_TOKENS)
    first = min(shortest, max(1, room // 8))
    found = [Case(length) for length in _multiples(first, room, 2)]
    for chunk in (first, 4 * first, 16 * first) if thorough else (first, 2 * first):
        contexts = _multiples(min(BEHIND, max(1, room // 2)), room - chunk, 4)
        found += [Case(chunk, context) for context in contexts]
    return sorted(found, key=lambda case: case.work)


def batches(config: EngineConfig, thorough: bool = True) -> list[Case]:
    """Steps that decode, from one sequence with a short context to what fits.

    At least two sequences, even if the worker has one seat: one alone would not tell what a
    sequence costs from what a step does.
    """
    blocks = config.kv_blocks - 1
    if not thorough:
        blocks = min(blocks, SKETCHY_TOKENS // config.block_size)
    longest = min(_room(config), blocks * config.block_size - 1) - WARM_UP - STEPS
    shortest = max(1, min(CONTEXT, longest // 4))
    most = min(_seats(config), config.token_budget)
    for more, longer in ((2, 4),) if thorough else ((8, 8), (2, 4)):
        found = [
            Case(batch, context)
            for batch in _multiples(1, most, more)
            for context in _multiples(shortest, longest, longer)
            if blocks_of("decode", Case(batch, context), config) <= blocks
        ]
        if len(found) > FEWEST:
            break
    return sorted(found, key=lambda case: case.work)


def blocks_of(kind: str, case: Case, config: EngineConfig) -> int:
    """Blocks that a case takes; of a batch, with one for each but the last that reserves: who comes
    later leaves them one to grow.
    """
    if kind == "prefill":
        return -(-(case.size + case.context) // config.block_size)
    tokens = case.context + WARM_UP + STEPS + 1
    return case.size * (-(-tokens // config.block_size) + 1) - 1


def _room(config: EngineConfig) -> int:
    """Tokens of the longest sequence that still gets one more."""
    return min(config.max_model_len - 1, (config.kv_blocks - 1) * config.block_size)


def _seats(config: EngineConfig) -> int:
    return max(2, config.max_num_seqs)


def _multiples(first: int, last: int, factor: int) -> Iterator[int]:
    """``first``, ``first * factor`` and so on, and ``last``; nothing if that is smaller."""
    value = first
    while value < last:
        yield value
        value *= factor
    if first <= last:
        yield last


# --- timing ---------------------------------------------------------------------------------------


class Trials:
    """Of one worker in which nothing runs yet. Its blocks from 1 on are written to."""

    def __init__(
        self,
        config: EngineConfig,  # of the worker, without zeros
        runner: Runner,
        fill: Callable[[int], None],  # puts numbers into blocks 1 to so many
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._config = replace(config, prefix_cache=False, max_num_seqs=_seats(config))
        self._runner = _Unpublished(runner)
        self._fill = fill
        self._clock = clock
        self._ids = count(1)

    def points(
        self, kind: str, limit_s: float, thorough: bool, progress: Progress = lambda *_: None
    ) -> list[Point]:
        """Timings for :func:`services.planner.fit.fit`, in about ``limit_s`` seconds; in more where
        even the first few take longer. Raises TrialError.
        """
        began = self._clock()

        def elapsed() -> float:
            return self._clock() - began

        if kind == "prefill":
            cases = prompts(self._config, self._shortest(limit_s), thorough)
        else:
            cases = batches(self._config, thorough)
        if not cases:
            raise TrialError(f"{kind}: nothing fits {self._config.kv_blocks} blocks")
        engine = self._engine(max(blocks_of(kind, case, self._config) for case in cases))
        timed = partial(self._prompt if kind == "prefill" else self._batch, engine)
        timed(cases[0])  # sets things up
        taken = _by_turns(kind, cases, timed, limit_s, elapsed, progress)
        later = WARM_UP + (STEPS - 1) / 2 if kind == "decode" else 0  # each step adds a token
        return [
            Point(case.size, case.context + later, sorted(times)[len(times) // 4])
            for case, times in taken.items()
        ]

    def _engine(self, blocks: int) -> Engine:
        """With no more blocks than it needs: it goes round through all that it has."""
        self._fill(blocks)
        return Engine(replace(self._config, kv_blocks=blocks + 1), self._runner)

    def _shortest(self, limit_s: float) -> int:
        """Tokens of the shortest prompt; fewer where the model is very slow."""
        room = _room(self._config)
        shortest = min(LOOK, room)
        if shortest < 1:
            return LENGTH  # nothing fits
        engine = self._engine(blocks_of("prefill", Case(min(LENGTH, room)), self._config))
        self._prompt(engine, Case(shortest))
        took = self._prompt(engine, Case(shortest))
        while 2 * shortest <= min(LENGTH, room) and 2 * took * LONG <= limit_s:
            shortest *= 2
            took = self._prompt(engine, Case(shortest))
        return shortest

    def _prompt(self, engine: Engine, case: Case) -> float:
        """Seconds from a prompt, or what is left of it, to its first token."""
        key, ids = self._key(), [0] * (case.size + case.context)
        if case.context and engine.reserve(key, ids[: case.context]) is None:
            raise TrialError(f"no room for {len(ids)} tokens")
        if case.context:
            engine.admit(key, ids, len(ids), PROMPT)
        else:
            engine.add(key, ids, len(ids), PROMPT)
        began = self._clock()
        while not (outputs := engine.step(began)):
            if engine.stalled:
                raise TrialError(f"no room for {len(ids)} tokens")
        took = self._clock() - began
        _check(outputs, 1)
        return took

    def _batch(self, engine: Engine, case: Case) -> float:
        """Mean seconds of some steps, of sequences that have come from another worker."""
        keys: list[Key] = []
        taken: list[float] = []
        try:
            for _ in range(case.size):
                key, ids = self._key(), [0] * (case.context + 1)  # the last is its first token
                if engine.reserve(key, ids[:-1]) is None:
                    raise TrialError(f"no room for {case.size} times {case.context} tokens")
                keys.append(key)
                engine.admit(key, ids, case.context, ANSWER)
            for _ in range(WARM_UP + STEPS):
                began = self._clock()
                outputs = engine.step(began)
                taken.append(self._clock() - began)
                _check(outputs, case.size)
        finally:
            for key in keys:
                engine.abort(key)
        return fmean(taken[WARM_UP:])

    def _key(self) -> Key:
        return next(self._ids).to_bytes(16, "big"), 0


def _by_turns(
    kind: str,
    cases: list[Case],
    timed: Callable[[Case], float],
    limit_s: float,
    elapsed: Callable[[], float],
    progress: Progress,
) -> dict[Case, list[float]]:
    """Seconds by case. The first round leaves out what would take too long, but for a few."""
    taken: dict[Case, list[float]] = {}
    costs: dict[Case, float] = {}  # seconds of a turn, with all that is not timed

    def take(case: Case) -> None:
        began = elapsed()
        taken.setdefault(case, []).append(timed(case))
        costs[case] = elapsed() - began
        progress(len(taken), elapsed())

    for case in cases:
        late = elapsed() + _expected(kind, costs, case) > limit_s / TURNS
        if len(taken) < FEWEST or not late:
            take(case)
    for _ in range(1, MOST_TURNS):
        for case in taken:
            if elapsed() + costs[case] <= limit_s:
                take(case)
    return taken


def _expected(kind: str, costs: dict[Case, float], case: Case) -> float:
    """Seconds that a turn of ``case`` will take, by what others took."""
    try:
        known = [Point(c.size, c.context, max(cost, SHORTEST_S)) for c, cost in costs.items()]
        return fit(kind, known).seconds(case.size, case.context)
    except FitError:  # too few so far, or too much alike
        return max((cost * case.work / c.work for c, cost in costs.items()), default=0.0)


def _check(outputs: list[Output], number: int) -> None:
    if any(output.finish == ERROR for output in outputs):
        raise TrialError(NOT_FINITE)
    if len(outputs) != number:
        raise TrialError(f"{len(outputs)} tokens of {number} sequences")


@dataclass(frozen=True)
class _Unpublished:
    """The worker's runner, of whose blocks peers hear nothing: generations that they may see begin
    with the worker's own engine.
    """

    runner: Runner

    def run(self, plan: Plan) -> list[int]:
        return self.runner.run(replace(plan, opened=(), spoiled=[]))

    def zero(self, blocks: list[int]) -> None:
        pass

    def publish(self, opened: tuple[tuple[int, int], ...], sealed: list[tuple[int, int]]) -> None:
        pass
