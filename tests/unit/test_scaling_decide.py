"""``decide`` alone: what it makes of what is seen, and what it never does whatever is seen."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from services.planner.arriving import arriving
from services.planner.config import PoolScaling, ScalingConfig
from services.planner.demand import waits
from services.planner.observation import (
    REASONS,
    Decision,
    Memory,
    Observation,
    PoolSeen,
    Seats,
    Window,
)
from services.planner.planner import FAILURES, STALE_S, decide
from services.planner.profile import Profile

SECOND = Profile(0.0, 0.01, 0.0, 0.02, 0.008, 0.0)
"""Prompts of 100 tokens take a second; steps of ten answers take 0.1 s."""

LATELY_S = (5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
POOL = PoolScaling(min=0, max=20, objective_s=2.0)
CONFIG = ScalingConfig(prefill=POOL, decode=replace(POOL, objective_s=0.1), start_s=20.0)


def windows(rate: float, prompt: float = 100.0) -> tuple[Window, ...]:
    return tuple(Window(s, rate * s, prompt * rate * s, prompt**2 * rate * s) for s in LATELY_S)


def seen(at: float = 1000.0, rate: float = 0.0, **more: Any) -> Observation:
    """A steady load of prompts of 100 tokens and answers of 50."""
    lately = windows(rate)
    minute = Window(60.0, rate * 60, rate * 6000, rate * 600_000)
    base = Observation(
        at=at,
        prefill=PoolSeen(target=1, ready=1),
        decode=PoolSeen(target=1, ready=1),
        short=lately[1],
        long=minute,
        before=minute,
        lately=lately,
        answer_tokens=50.0 if rate else 0.0,
        seats=Seats(32, 100_000),
    )
    return replace(base, **more)


@dataclass
class World:
    """Calls ``decide`` every two seconds; workers are there at once unless told otherwise."""

    config: ScalingConfig = CONFIG
    profile: Profile | None = SECOND
    at: float = 1000.0
    sizes: tuple[int, int] = (1, 1)
    memory: Memory = Memory()
    starts: bool = True
    decisions: list[tuple[float, Decision]] = field(default_factory=list)

    def run(self, seconds: float, rate: float = 0.0, **more: Any) -> Decision:
        end = self.at + seconds
        while True:
            prefill, decode = self.sizes
            ready = self.sizes if self.starts else (1, 1)
            pools = {
                "prefill": PoolSeen(target=prefill, ready=ready[0]),
                "decode": PoolSeen(target=decode, ready=ready[1]),
            }
            observation = replace(seen(self.at, rate, **pools), **more)
            decision = decide(observation, self.profile, self.config, self.memory)
            self.memory = decision.memory
            self.decisions.append((self.at, decision))
            self.sizes = (decision.prefill.target, decision.decode.target)
            self.at += 2.0
            if self.at > end:
                return decision

    def changes(self, role: str, first: int) -> list[tuple[float, int]]:
        targets = [(at, getattr(decision, role).target) for at, decision in self.decisions]
        before = [first, *(target for _, target in targets)]
        pairs = zip(targets, before, strict=False)
        return [(at, target - old) for (at, target), old in pairs if target != old]


# --- what the load needs --------------------------------------------------------------------------


def test_b111_prompts_that_wait_make_the_prefill_pool_grow_and_no_other() -> None:
    """One worker computes a prompt a second and five come: what is finished stays one a second, and
    what arrives and waits must count.
    """
    world = World()
    decision = world.run(60, rate=5.0, queued=40, queued_tokens=4000, running=2)
    assert decision.prefill.target >= 6
    assert decision.decode.target <= 4, "24 answers run, and ten a worker may"
    assert world.decisions[0][1].prefill.reason in ("load", "backlog")
    alone = World().run(60, rate=5.0, running=2)
    assert decision.decode == alone.decode, "prompts that wait are no matter of the decode pool"
    fewer = World().run(60, rate=5.0)
    assert fewer.prefill.target <= decision.prefill.target


def test_b112_a_constant_load_settles() -> None:
    """Also where the need lies just between two sizes, and whatever size there was at first."""
    for rate in (0.9, 2.0, 3.45, 7.0):
        world = World(sizes=(9, 9))
        world.run(900, rate=rate)
        for role in ("prefill", "decode"):
            changes = world.changes(role, 9)
            assert len(changes) <= 3, (rate, role, changes)
            assert all(at < 1000 + 300 for at, _ in changes), "changes after it had settled"


def test_b112_it_can_fire_with_one_worker_and_one_request() -> None:
    world = World(sizes=(0, 0))
    decision = world.run(0, queued=1)
    assert (decision.prefill.target, decision.decode.target) == (1, 1)
    assert (decision.prefill.reason, decision.decode.reason) == ("wake", "wake")


def test_long_answers_make_the_decode_pool_grow_and_no_other() -> None:
    world = World()
    decision = world.run(60, rate=0.05, running=45, answer_tokens=9000.0)
    assert decision.decode.target >= 5
    assert decision.prefill.target == 1


def test_a_burst_is_noticed_at_once_and_chance_is_not() -> None:
    """Twice as many in the last ten seconds: of 300 that is a burst, of three it is nothing."""

    def lately(rate: float) -> tuple[Window, ...]:
        more = (rate * min(s, 10.0) for s in LATELY_S)
        requests = [rate * s + extra for s, extra in zip(LATELY_S, more, strict=True)]
        return tuple(Window(s, n, n, n) for s, n in zip(LATELY_S, requests, strict=True))

    def count(rate: float) -> float:
        return arriving(lately(rate), 30.0, lambda window: window.requests, 1.0).now / rate

    assert count(30.0) == pytest.approx(2.0)
    assert count(0.3) == pytest.approx(1.0625)


def test_a_growing_load_is_met_before_it_is_there() -> None:
    """From 5 to 10 per second within 160 s: 30 s later there will be more than now."""
    requests = [10 * s - s * s / 64 for s in LATELY_S]
    lately = tuple(Window(s, n, n, n) for s, n in zip(LATELY_S, requests, strict=True))
    found = arriving(lately, 30.0, lambda window: window.requests, 1.0)
    assert found.grows
    assert 10.0 < found.later < 11.5
    falling = tuple(Window(s, 5 * s + s * s / 64, 0, 0) for s in LATELY_S)
    assert not arriving(falling, 30.0, lambda window: window.requests, 1.0).grows


def test_waiting_by_erlang_c() -> None:
    """A table's values."""
    assert waits(1, 0.5) == pytest.approx(0.5)
    assert waits(2, 1.0) == pytest.approx(1 / 3)
    assert waits(10, 8.0) == pytest.approx(0.409, abs=0.001)


def test_full_kv_asks_for_one_more_decode_worker() -> None:
    decision = World().run(0, rate=0.1, running=2, kv_use=0.97)
    assert decision.decode.target == 2
    assert decision.decode.reason == "kv"
    assert "97 %" in decision.decode.words


def test_missed_objectives_correct_the_profile_but_not_while_workers_start() -> None:
    bad = {"good": 150.0, "bad": 100.0}
    results = {}
    for starts in (True, False):
        world = World(starts=starts)
        world.run(120, rate=3.0, running=12)
        for _ in range(300):
            prefill, decode = world.sizes
            ready = decode if starts else 1
            world.run(
                0, rate=3.0, running=12,
                decode=PoolSeen(target=decode, ready=ready, start_s=20.0, **bad),
            )  # fmt: skip
        results[starts] = world.sizes[1]
        reasons = {decision.decode.reason for _, decision in world.decisions}
        assert ("attainment" in reasons) is starts
    assert results[True] >= 1.5 * results[False]


def test_first_tokens_that_are_late_for_want_of_kv_are_no_matter_of_the_prefill_pool() -> None:
    def run(kv_use: float) -> int:
        world = World()
        for _ in range(300):
            prefill, decode = world.sizes
            late = PoolSeen(target=prefill, ready=prefill, start_s=20.0, good=50.0, bad=100.0)
            world.run(0, rate=2.0, queued=10, kv_use=kv_use, prefill=late)
        return world.sizes[0]

    assert run(0.94) == World().run(600, rate=2.0).prefill.target < run(0.5)


# --- silence --------------------------------------------------------------------------------------


def test_a_pool_of_which_nothing_is_known_keeps_its_size() -> None:
    for unknown in ({"profile": None}, {}):
        world = World(sizes=(3, 4), **unknown)
        decision = world.run(900, rate=5.0, late_s=0.0 if unknown else STALE_S)
        assert world.sizes == (3, 4)
        assert decision.prefill.reason == "steady"
        assert decision.prefill.words
    assert World(sizes=(0, 0), profile=None).run(0, queued=1).prefill.target == 1


def test_silence_is_not_idleness() -> None:
    """Routers that are not heard of any more may be busy."""
    world = World(sizes=(3, 4))
    for _ in range(1000):
        world.run(0, late_s=float(2 * len(world.decisions)))
        if 2 * len(world.decisions) < STALE_S:
            assert world.sizes == (3, 4)
    assert world.sizes == (3, 4)


def test_idle_pools_go_to_none_and_wake_up_for_the_first_who_asks() -> None:
    world = World(sizes=(2, 2))
    world.run(CONFIG.idle_s - 50)
    assert min(world.sizes) >= 1
    decision = world.run(60)
    assert world.sizes == (0, 0)
    assert (decision.prefill.reason, decision.decode.reason) == ("idle", "idle")
    world.run(3600)
    assert world.sizes == (0, 0)
    decision = world.run(0, queued=1, queued_tokens=100)
    assert world.sizes == (1, 1)
    assert decision.decode.reason == "wake"
    assert "1 answers wait" in decision.decode.words or "1 answer" in decision.decode.words
    world.run(CONFIG.idle_s - 50)
    assert world.sizes == (1, 1), "who has just been woken stays for a while"


def test_idle_pools_keep_their_minimum() -> None:
    config = replace(CONFIG, decode=replace(CONFIG.decode, min=2))
    world = World(config, sizes=(3, 3))
    world.run(1000)
    assert world.sizes == (0, 2)


def test_an_idle_minute_neither_corrects_nor_pins_a_pool() -> None:
    """No verdicts is not bad verdicts; a correction of before is of no load."""
    world = World(sizes=(5, 5))
    world.memory = Memory(
        prefill=replace(world.memory.prefill, correction=4.0),
        decode=replace(world.memory.decode, correction=4.0),
    )
    world.run(290)
    assert world.sizes == (1, 1)


# --- starts that fail -----------------------------------------------------------------------------


def test_starts_that_fail_hold_back_further_ones_for_longer_and_longer() -> None:
    world = World(sizes=(1, 1), starts=False)
    world.run(10, rate=4.0)
    assert world.sizes[0] > 4
    held: list[float] = []
    failures = 0
    for _ in range(1500):
        prefill, decode = world.sizes
        if prefill > 1:
            failures += 1  # one more start has failed since
        pool = PoolSeen(target=prefill, ready=1, start_failures=failures)
        decision = world.run(0, rate=4.0, prefill=pool)
        if failures >= FAILURES and decision.prefill.target > 1:
            held.append(world.at)
    assert len(held) < 20, "starts went on and on"
    gaps = [later - early for early, later in zip(held, held[1:], strict=False)]
    assert gaps == sorted(gaps)
    assert max(gaps) >= 900
    reasons = {decision.prefill.reason for _, decision in world.decisions}
    assert "start_failures" in reasons
    words = [d.prefill.words for _, d in world.decisions if d.prefill.reason == "start_failures"]
    assert "in a row" in words[-1]


def test_a_few_failures_hold_back_nothing() -> None:
    pool = PoolSeen(target=1, ready=1, start_failures=FAILURES - 1)
    assert World().run(0, rate=4.0, prefill=pool).prefill.target > 4


# --- limits, budget, patience ---------------------------------------------------------------------


def test_max_is_said_to_be_in_the_way() -> None:
    config = replace(CONFIG, prefill=replace(POOL, max=3))
    decision = World(config).run(0, rate=8.0)
    assert decision.prefill.target == 3
    assert decision.prefill.need > 8
    assert decision.prefill.reason == "limits"
    assert "max is 3" in decision.prefill.words


def test_a_budget_is_shared_by_need() -> None:
    config = replace(CONFIG, budget=6)
    world = World(config)
    decision = world.run(300, rate=6.0, running=30)
    assert sum(world.sizes) == 6
    assert {decision.prefill.reason, decision.decode.reason} == {"budget"}
    assert world.sizes[0] > world.sizes[1] >= 1


def test_a_pool_of_fixed_size_counts_against_the_budget_and_keeps_its_size() -> None:
    config = ScalingConfig(budget=6, prefill=POOL, decode=PoolScaling())
    world = World(config, sizes=(1, 4))
    decision = world.run(300, rate=6.0, running=30)
    assert world.sizes == (2, 4)
    assert decision.decode.reason == "fixed"


def test_fewer_workers_must_have_been_enough_for_a_while() -> None:
    world = World(sizes=(8, 8))
    world.run(CONFIG.prefill.down_after_s * 0.8, rate=1.0)
    assert world.sizes == (8, 8)
    assert world.decisions[-1][1].prefill.reason == "cooldown"
    world.run(60, rate=1.0)
    assert world.sizes[0] < 4


def test_more_workers_are_started_at_most_so_often() -> None:
    world = World()
    for step in range(60):
        world.run(0, rate=0.5 * step)
    moments = [at for at, by in world.changes("prefill", 1) if by > 0]
    gaps = [later - early for early, later in zip(moments, moments[1:], strict=False)]
    assert min(gaps) >= CONFIG.prefill.up_cooldown_s


NUMBERS = st.floats(0, 1e4)
SMALL = st.integers(0, 30)
POOLS_SEEN = st.builds(
    PoolSeen, start_failures=st.integers(0, 6), start_s=st.floats(0, 300), good=NUMBERS, bad=NUMBERS
)
MOMENTS = st.fixed_dictionaries(
    {
        "gap": st.sampled_from([0.1, 1.0, 2.0, 5.0, 30.0, 400.0]),
        "rate": st.sampled_from([0.0, 0.0, 0.5, 1.0, 3.0, 20.0, 1e4]),
        "prompt": st.sampled_from([1.0, 100.0, 1e5]),
        "queued": SMALL,
        "queued_tokens": st.integers(0, 10**6),
        "running": SMALL,
        "context": NUMBERS,
        "answer_tokens": NUMBERS,
        "kv_use": st.floats(0, 1),
        "seats": st.builds(Seats, SMALL, st.integers(0, 10**5)),
        "late_s": st.sampled_from([0.0, 0.0, 5.0, 100.0]),
        "prefill": POOLS_SEEN,
        "decode": POOLS_SEEN,
        "ready": st.tuples(st.floats(0, 1), st.floats(0, 1)),
    }
)
SCALINGS = st.builds(
    PoolScaling,
    min=st.integers(0, 2),
    max=st.integers(2, 12),
    objective_s=st.sampled_from([0.05, 0.2, 3.0]),
    devices=st.integers(0, 3),
    up_cooldown_s=st.sampled_from([0.0, 10.0]),
    down_after_s=st.sampled_from([0.0, 20.0, 120.0]),
    cooldown_s=st.sampled_from([0.0, 30.0, 100.0]),
)
PROFILES = st.one_of(
    st.none(),
    st.just(SECOND),
    st.just(Profile(0, 0, 0, 0, 0, 0)),
    st.just(Profile(9.0, 1.0, 1e-3, 3.0, 1.0, 1e-3)),
)


@settings(max_examples=100, deadline=None)
@given(
    prefill=SCALINGS,
    decode=SCALINGS,
    budget=st.integers(0, 20),
    profile=PROFILES,
    moments=st.lists(MOMENTS, min_size=1, max_size=25),
)
def test_whatever_is_seen(
    prefill: PoolScaling,
    decode: PoolScaling,
    budget: int,
    profile: Profile | None,
    moments: list[dict[str, Any]],
) -> None:
    """Limits and budget hold, a direction is reversed at most once per cool-down (waking up from
    none is not a reversal), and each decision says why.
    """
    least = max(prefill.min, 1) * prefill.devices + max(decode.min, 1) * decode.devices
    config = ScalingConfig(budget=budget and max(budget, least), prefill=prefill, decode=decode)
    pools = {"prefill": prefill, "decode": decode}
    sizes = {role: pool.min for role, pool in pools.items()}
    reversals: dict[str, list[float]] = {role: [] for role in pools}
    directions = dict.fromkeys(pools, 0)
    memory, at = Memory(), 0.0
    for moment in moments:
        at += moment["gap"]
        lately = windows(moment["rate"], moment["prompt"])
        shown = {
            role: replace(moment[role], target=sizes[role], ready=round(share * sizes[role]))
            for role, share in zip(pools, moment["ready"], strict=True)
        }
        rest = {
            k: v for k, v in moment.items() if k not in ("gap", "rate", "prompt", "ready", *pools)
        }
        observation = Observation(
            at=at, short=lately[1], long=lately[3], before=lately[3], lately=lately, **shown, **rest
        )
        decision = decide(observation, profile, config, memory)
        assert decide(observation, profile, config, memory) == decision, "it remembers something"
        memory = decision.memory
        for role, pool in pools.items():
            made = getattr(decision, role)
            assert type(made.target) is int
            assert pool.min <= made.target <= pool.max
            assert made.reason in REASONS
            assert made.words
            if made.target != sizes[role]:
                assert made.reason not in ("steady", "cooldown", "fixed"), made
                direction = 1 if made.target > sizes[role] else -1
                if directions[role] == -direction and made.reason not in ("wake", "start_failures"):
                    reversals[role].append(at)
                directions[role] = direction
            sizes[role] = made.target
        if config.budget:
            used = sum(pool.devices * sizes[role] for role, pool in pools.items())
            assert used <= config.budget
    for role, pool in pools.items():
        gaps = zip(reversals[role], reversals[role][1:], strict=False)
        assert all(late - early >= pool.cooldown_s for early, late in gaps)
