"""What is timed, and how: the real engine over a runner whose clock moves as a profile says."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle

import pytest
from hypothesis import given, settings, strategies as st

from services.engine.config import EngineConfig
from services.engine.pace import Pace, PacedRunner
from services.engine.scheduler import NO_TOKEN, Plan, Row
from services.planner.fit import fit
from services.planner.halves import FIELDS
from services.planner.profile import Profile
from services.planner.trials import (
    LENGTH,
    MOST_TURNS,
    STEPS,
    WARM_UP,
    Case,
    TrialError,
    Trials,
    batches,
    blocks_of,
    prompts,
)

PROFILE = Profile(0.002, 0.003, 4e-7, 0.022, 0.0016, 3.9e-6)
SHAPES = {
    "prefill": [(64, 0), (512, 0), (100, 2000), (4000, 0)],
    "decode": [(1, 64), (8, 1000), (32, 64), (1, 5000)],
}


def config(**changes: object) -> EngineConfig:
    values = {
        "kv_blocks": 1025,
        "max_model_len": 8192,
        "max_num_seqs": 32,
        "token_budget": 160,
        "chunk_budget": 160,
        "device": "cpu",
        **changes,
    }
    return EngineConfig(**values)  # type: ignore[arg-type]


@dataclass
class TimedRunner:
    """Takes its time by its own clock. ``slower`` is by how much, step by step."""

    profile: Profile = PROFILE
    slower: tuple[float, ...] = (1.0,)
    token: int = 5
    now: float = 0.0
    filled: int = 0
    plans: list[Plan] = field(default_factory=list)
    _factors: Iterator[float] = field(default_factory=lambda: iter(()))

    def __post_init__(self) -> None:
        self._factors = cycle(self.slower)

    def run(self, plan: Plan) -> list[int]:
        assert not plan.opened, "nobody may hear of these blocks"
        assert not plan.spoiled
        blocks = [block for row in plan.rows for block in row.blocks]
        assert len(blocks) == len(set(blocks)), "sequences do not share memory"
        assert min(blocks) >= 1, "block 0 is for padding"
        assert max(blocks) <= self.filled, "memory that nobody has written"
        self.plans.append(plan)
        self.now += self._seconds(plan.rows) * next(self._factors)
        return [self.token if row.sample else NO_TOKEN for row in plan.rows]

    def _seconds(self, rows: tuple[Row, ...]) -> float:
        if all(row.start >= row.num_prompt for row in rows):  # behind its first token
            assert all(len(row.ids) == 1 for row in rows)
            context = sum(row.start for row in rows) / len(rows)
            return self.profile.decode_s(len(rows), context)
        (row,) = rows
        # A prompt has one fixed cost, in however many steps it is computed.
        fixed = 0.0 if row.sample else self.profile.prefill_step
        return self.profile.prefill_s(len(row.ids), row.start) - fixed

    def zero(self, blocks: list[int]) -> None:
        raise AssertionError("nothing is zeroed")

    def publish(self, opened: object, sealed: object) -> None:
        raise AssertionError("nothing is published")

    def fill(self, blocks: int) -> None:
        self.filled = blocks

    def trials(self, **changes: object) -> Trials:
        return Trials(config(**changes), self, self.fill, lambda: self.now)


def close_to(profile: Profile, found: dict[str, float], rel: float) -> bool:
    return all(
        value == pytest.approx(getattr(profile, name), rel=rel) for name, value in found.items()
    )


@pytest.mark.parametrize("thorough", [False, True])
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_what_is_timed_gives_the_profile_of_the_steps(kind: str, thorough: bool) -> None:
    """Contexts, chunks of prompts and batches are what they are said to be: else no such fit."""
    runner = TimedRunner()
    points = runner.trials().points(kind, 15.0 if thorough else 8.0, thorough)
    found = fit(kind, points)
    assert set(found.half) == set(FIELDS[kind])
    assert close_to(PROFILE, dict(found.half), 1e-6)
    assert found.largest_error < 1e-6


def test_prompts_are_computed_in_steps_of_the_token_budget() -> None:
    runner = TimedRunner()
    runner.trials(token_budget=96, chunk_budget=96).points("prefill", 60.0, True)
    lengths = [len(row.ids) for plan in runner.plans for row in plan.rows]
    assert max(lengths) == 96
    assert all(len(plan.rows) == 1 for plan in runner.plans)


def test_batches_are_full_from_the_first_step() -> None:
    runner = TimedRunner()
    runner.trials().points("decode", 8.0, False)
    sizes = {len(plan.rows) for plan in runner.plans}
    assert sizes == {1, 8, 32}


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_neighbour_who_comes_and_goes_is_not_believed(kind: str) -> None:
    """Some steps take three times as long."""
    drawn = random.Random(1)
    slower = tuple(3.0 if drawn.random() < 0.15 else 1.0 for _ in range(4999))
    fast = Profile(*(value / 10 for value in vars(PROFILE).values()))
    runner = TimedRunner(fast, slower)
    found = fit(kind, runner.trials(token_budget=8192).points(kind, 60.0, False))
    of = fast.prefill_s if kind == "prefill" else fast.decode_s
    for size, context in SHAPES[kind]:
        assert found.seconds(size, context) == pytest.approx(of(size, context), rel=0.2)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("speed", [0.001, 0.1, 1.0, 3.0])
def test_it_ends_in_time(kind: str, speed: float) -> None:
    """From a GPU to a few prompt tokens per second."""
    values = [speed * value for value in vars(PROFILE).values()]
    runner = TimedRunner(Profile(*values))
    runner.trials().points(kind, 8.0, False)
    assert runner.now <= 8.0 * 1.3


def test_of_a_very_slow_model_short_prompts_are_timed() -> None:
    slow = Profile(0.5, 0.2, 1e-6, 0.7, 0.1, 1e-5)
    runner = TimedRunner(slow)
    points = runner.trials().points("prefill", 8.0, False)
    assert min(point.size for point in points) < LENGTH
    assert runner.now < 30.0  # 64 tokens alone would have taken 13 s
    found = fit("prefill", points)
    assert found.seconds(64) == pytest.approx(slow.prefill_s(64), rel=0.01)


def test_tries_are_by_turns() -> None:
    """Each case is timed once before any is again; and no more often than is of use."""
    order: list[tuple[int, int]] = []
    runner = TimedRunner()
    runner.trials().points("decode", 600.0, False)
    for plan in runner.plans:
        order.append((len(plan.rows), plan.rows[0].start))
    steps = WARM_UP + STEPS
    visits = order[::steps][1:]  # the first one sets things up
    cases = len(set(visits))
    assert len(visits) == MOST_TURNS * cases
    for turn in range(MOST_TURNS):
        assert len(set(visits[turn * cases : (turn + 1) * cases])) == cases


def test_progress_is_told() -> None:
    told: list[tuple[int, float]] = []
    runner = TimedRunner()
    points = runner.trials().points("prefill", 60.0, True, lambda n, s: told.append((n, s)))
    assert told[-1][0] == len(points)
    assert [seconds for _, seconds in told] == sorted(seconds for _, seconds in told)
    assert told[-1][1] <= 60.0


def test_steps_of_a_pace_are_timed_with_it() -> None:
    """Sequences generate from the first step that is timed on, as a worker's do."""
    runner = TimedRunner(Profile(0, 1e-6, 0, 0, 1e-6, 0))

    def sleep(seconds: float) -> None:
        runner.now += seconds

    paced = PacedRunner(runner, Pace(0.02, 0.001, 0.005), lambda: runner.now, sleep)
    trials = Trials(config(), paced, runner.fill, lambda: runner.now)
    found = fit("decode", trials.points("decode", 8.0, False))
    assert found.half["decode_step"] == pytest.approx(0.02, rel=1e-6)
    assert found.half["decode_seq"] == pytest.approx(0.005, rel=1e-6)


# --- what fits ---


@settings(max_examples=40, deadline=None)
@given(
    longest=st.integers(1, 600),
    block_size=st.sampled_from([1, 4, 16, 64]),
    more_blocks=st.integers(0, 200),
    seqs=st.integers(1, 40),
    budget=st.integers(8, 500),
    thorough=st.booleans(),
    kind=st.sampled_from(["prefill", "decode"]),
)
def test_whatever_a_worker_holds_is_timed_or_refused(
    longest: int,
    block_size: int,
    more_blocks: int,
    seqs: int,
    budget: int,
    thorough: bool,
    kind: str,
) -> None:
    """Cases fit the pool, the seats and the longest sequence; the engine runs all of them."""
    worker = config(
        max_model_len=longest,
        block_size=block_size,
        kv_blocks=-(-longest // block_size) + 1 + more_blocks,
        max_num_seqs=seqs,
        token_budget=budget,
        chunk_budget=budget,
    )
    runner = TimedRunner(Profile(1e-4, 1e-5, 1e-8, 1e-4, 1e-5, 1e-8))
    trials = Trials(worker, runner, runner.fill, lambda: runner.now)
    cases = prompts(worker, LENGTH, thorough) if kind == "prefill" else batches(worker, thorough)
    assert len(set(cases)) == len(cases)
    if not cases:
        assert longest < 10
        with pytest.raises(TrialError, match="nothing fits"):
            trials.points(kind, 0.05, thorough)
        return
    points = trials.points(kind, 0.05, thorough)
    assert runner.filled < worker.kv_blocks
    for point in points:
        whole = point.context + (point.size if kind == "prefill" else 0)
        assert whole < longest
        assert kind == "prefill" or point.size <= max(2, seqs)
    if longest >= 64 and more_blocks * block_size >= 2 * longest:
        fit(kind, points)  # they tell the coefficients apart


def test_lengths_reach_from_short_to_what_fits() -> None:
    sizes = [case.size for case in prompts(config(), LENGTH) if not case.context]
    assert sizes == [64, 128, 256, 512, 1024, 2048, 4096, 8191]
    assert max(case.size + case.context for case in prompts(config(), LENGTH)) == 8191
    small = config(kv_blocks=65)
    assert max(case.size + case.context for case in prompts(small, LENGTH)) == 64 * 16


def test_batches_reach_from_one_to_all_seats_as_far_as_memory_goes() -> None:
    found = batches(config())
    assert {case.size for case in found} == {1, 2, 4, 8, 16, 32}
    assert Case(1, 8192 - 1 - WARM_UP - STEPS) in found
    assert all(blocks_of("decode", case, config()) <= 1024 for case in found)
    assert Case(32, 256) in found
    assert Case(32, 1024) not in found  # twice the pool
    assert {case.size for case in batches(config(max_num_seqs=1))} == {1, 2}
    assert max(case.size for case in batches(config(token_budget=20))) == 20


# --- what goes wrong ---


def test_an_output_that_is_no_number_is_refused() -> None:
    for kind in ("prefill", "decode"):
        runner = TimedRunner(token=NO_TOKEN)
        with pytest.raises(TrialError, match="not a number"):
            runner.trials().points(kind, 8.0, False)


def test_an_error_of_the_model_is_not_swallowed() -> None:
    class Broken(TimedRunner):
        def run(self, plan: Plan) -> list[int]:
            raise RuntimeError("out of memory")

    calls: list[Callable[[], object]] = [
        lambda: Broken().trials().points("prefill", 8.0, False),
        lambda: Broken().trials().points("decode", 8.0, False),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="out of memory"):
            call()
