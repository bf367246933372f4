"""Serve's policies with a Serve of numbers around them: reports, ticks, replicas that come and go.

Time is virtual. What is decided is the planner's own; here it must arrive, and arrive whole.
"""

import json
import logging
import sys
import types
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest

from services.planner import autoscaler
from services.planner.autoscaler import Autoscaler, latest, scaling_of
from services.planner.config import PoolScaling, ScalingConfig
from tests.support.serve_of_numbers import (
    CONFIG,
    POOL,
    REPORT_S,
    TICK_S,
    Clock,
    Context,
    Deployment,
    Sample,
    World,
)


@dataclass
class Posts:
    """What registries are told, by their names."""

    plans: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    error: Exception | None = None

    @property
    def last(self) -> dict[str, Any]:
        (plans,) = self.plans.values()
        return plans[-1]


@pytest.fixture
def posts(monkeypatch: pytest.MonkeyPatch) -> Posts:
    """In place of the registry: no Ray here, and no planner of another test."""
    posts = Posts()

    class RegistryClient:
        def __init__(self, name: str) -> None:
            self.name = name

        def post(self, plan: dict[str, Any]) -> None:
            if posts.error is not None:
                raise posts.error
            posts.plans.setdefault(self.name, []).append(plan)

    registry: Any = types.ModuleType("services.registry")
    registry.RegistryClient = RegistryClient
    monkeypatch.setitem(sys.modules, "services.registry", registry)
    monkeypatch.setattr(autoscaler, "_PLANNERS", {})
    return posts


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(autoscaler, "time", clock)
    return clock


def changes_since(each: Deployment, moment: float) -> list[tuple[float, int]]:
    return [change for change in each.changes if change[0] > moment]


# --- what comes in, what goes out -----------------------------------------------------------------


def test_the_last_report_of_each_replica_counts() -> None:
    series = {
        "a": {"one": [Sample(1, 10), Sample(2, 20)], "two": [Sample(3, 30)]},
        "b": {"one": [Sample(1, 11), Sample(2, 21)], "two": []},
        "c": {"three": []},
    }
    assert latest(series) == {"one": (2, {"a": 20, "b": 21}), "two": (3, {"a": 30})}
    assert latest({}) == {}


def test_what_a_policy_is_told_comes_back_as_it_was() -> None:
    config = ScalingConfig(budget=5, attainment=0.9, prefill=PoolScaling(1, 4, 2.0, devices=2))
    assert scaling_of(json.loads(json.dumps(asdict(config)))) == config


def test_nothing_changes_before_both_pools_have_spoken(posts: Posts, clock: Clock) -> None:
    world = World(clock)
    for _ in range(100):
        clock.now += 1
        assert world.prefill.policy(world.prefill.context()) == (1, {})
    assert posts.plans == {}
    world.run(3)
    assert posts.last["targets"] == {"prefill": 1, "decode": 1}


def test_each_decision_is_published_with_its_reason_changed_or_not(
    posts: Posts, clock: Clock
) -> None:
    world = World(clock)
    world.run(20)
    (plans,) = posts.plans.values()
    assert 9 <= len(plans) <= 11  # every interval_s
    assert all(plan["targets"] == {"prefill": 1, "decode": 1} for plan in plans)
    assert plans[-1]["reasons"].keys() == plans[-1]["words"].keys() == {"prefill", "decode"}
    assert plans[-1]["decisions"] == {}


def test_a_pool_of_fixed_size_keeps_it_and_is_not_spoken_of(posts: Posts, clock: Clock) -> None:
    world = World(clock, replace(CONFIG, decode=PoolScaling()), sizes=(1, 3))
    world.load.rate = 3
    world.run(60)
    assert world.prefill.target >= 3
    assert world.decode.target == 3
    assert posts.last["targets"].keys() == {"prefill"}


# --- load -----------------------------------------------------------------------------------------


def test_prompts_that_wait_bring_prefill_workers_and_no_decode_workers(
    posts: Posts, clock: Clock
) -> None:
    """B111: five prompts a second, each of which takes a second of a worker. How many are finished
    says one a second, whatever waits.
    """
    world = World(clock)
    world.load.rate = 5
    world.run(120)
    assert world.prefill.target >= 6
    assert {size for _, size in world.decode.changes} <= {1}
    assert world.waiting < 1, "what waited has been worked off"
    ups = sum(n for (role, way, _), n in posts.last["decisions"].items() if way == "up")
    sizes = [1, *(size for _, size in world.prefill.changes)]
    assert ups == sum(new > old for old, new in pairwise(sizes)) > 0
    assert not [key for key in posts.last["decisions"] if key[0] == "decode"]


@pytest.mark.parametrize(("late_s", "lost"), [(0.0, 0.0), (10.0, 0.0), (0.0, 0.2)])
def test_under_a_constant_load_pools_come_to_rest(
    late_s: float, lost: float, posts: Posts, clock: Clock
) -> None:
    """B112, also with reports that come late or not at all."""
    world = World(clock)
    world.late_s, world.lost = late_s, lost
    world.load.rate = 3
    world.run(180)
    assert world.prefill.target >= 4
    for _ in range(2):
        settled = clock.now
        world.run(300)
        for pool in (world.prefill, world.decode):
            assert len(changes_since(pool, settled)) <= 1, pool.changes


def test_idle_pools_go_to_none_and_the_first_request_wakes_both(posts: Posts, clock: Clock) -> None:
    world = World(clock)
    world.load.rate = 3
    world.run(60)
    assert world.prefill.target > 1
    world.load.rate = 0
    world.run(CONFIG.idle_s + 30)
    assert (world.prefill.target, world.decode.target) == (0, 0)
    assert posts.last["reasons"] == {"prefill": "idle", "decode": "idle"}
    world.run(600)
    assert (world.prefill.target, world.decode.target) == (0, 0)
    asleep = clock.now
    world.waiting = 1.0
    world.run(REPORT_S + CONFIG.interval_s + 1)
    assert (world.prefill.target, world.decode.target) == (1, 1)
    assert posts.last["decisions"]["prefill", "up", "wake"] == 1
    assert posts.last["decisions"]["decode", "up", "wake"] == 1
    world.run(world.start_s)
    assert world.waiting == 0
    assert len(changes_since(world.prefill, asleep)) == 1


def test_a_decision_that_serve_has_not_taken_up_yet_is_no_second_one(
    posts: Posts, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve's controller has much to do, and tells what was, for three decisions."""
    world = World(clock, sizes=(0, 0))
    world.run(10)
    world.waiting = 1.0
    monkeypatch.setattr(world.decode, "context", lambda: Context(0, 0, world.decode.metrics))
    world.run(REPORT_S + 4 * CONFIG.interval_s)
    assert posts.last["targets"] == {"prefill": 1, "decode": 1}
    assert posts.last["decisions"] == {("prefill", "up", "wake"): 1, ("decode", "up", "wake"): 1}


def test_the_time_of_the_first_start_is_no_idle_time(posts: Posts, clock: Clock) -> None:
    """Else a large model would never be there: stopped before it has started."""
    world = World(clock, start_s=3 * CONFIG.idle_s, started=False)
    world.run(world.start_s + 10)
    assert (len(world.prefill.ready), len(world.decode.ready)) == (1, 1)
    assert world.prefill.changes == world.decode.changes == []
    world.run(CONFIG.idle_s)
    assert (world.prefill.target, world.decode.target) == (0, 0)


# --- replicas that come and go --------------------------------------------------------------------


def test_replicas_that_are_replaced_change_no_target(posts: Posts, clock: Clock) -> None:
    """A router and the workers begin again, under new names and with counters at zero."""
    world = World(clock, sizes=(6, 1))
    world.load.rate = 3
    world.run(120)
    settled, before = clock.now, world.prefill.target
    for each in world.deployments:
        each.ready = [f"{each.role}-again-{n}" for n in range(each.target)]
        each.heard.clear()
    world._totals = dict.fromkeys(world._totals, 0.0)
    world.run(120)
    assert changes_since(world.prefill, settled) == changes_since(world.decode, settled) == []
    assert world.prefill.target == before


def test_a_controller_that_restarts_goes_on_from_the_targets_that_serve_kept(
    posts: Posts, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(clock, sizes=(6, 1))
    world.load.rate = 3
    world.run(120)
    settled, before = clock.now, world.prefill.target
    monkeypatch.setattr(autoscaler, "_PLANNERS", {})
    for each in world.deployments:
        each.policy = Autoscaler(each.role, asdict(CONFIG), "registry-of-this-one")
        each.heard.clear()
    found = [each.ready for each in world.deployments]
    for each in world.deployments:
        each.starting, each.ready = [(clock.now + 1, name) for name in each.ready], []
    world.run(5)
    assert [each.ready for each in world.deployments] == found, "one was replaced"
    world.run(120)
    assert changes_since(world.prefill, settled) == changes_since(world.decode, settled) == []
    assert world.prefill.target == before


def test_a_controller_that_restarts_removes_nobody_before_it_knows_the_load(
    posts: Posts, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was asked for in the first seconds is less than what is asked for in ten."""
    quick = replace(POOL, down_after_s=3.0)
    world = World(clock, config=replace(CONFIG, prefill=quick, decode=quick), sizes=(6, 1))
    world.load.rate = 3
    world.run(120)
    settled = clock.now
    assert world.prefill.target > 1
    monkeypatch.setattr(autoscaler, "_PLANNERS", {})
    for each in world.deployments:
        each.policy = Autoscaler(each.role, asdict(world.config), "registry-of-this-one")
        each.heard.clear()
    world.run(60)
    assert changes_since(world.prefill, settled) == changes_since(world.decode, settled) == []


def test_starts_that_fail_again_and_again_are_tried_later(posts: Posts, clock: Clock) -> None:
    world = World(clock, start_s=1e9)
    world.run(10)
    world.load.rate = 5
    world.run(20)
    assert world.prefill.target > 1
    world.failures["prefill"] = 3
    world.run(5)
    assert world.prefill.target == 1  # that works
    assert posts.last["reasons"]["prefill"] == "start_failures"
    world.run(50)
    assert world.prefill.target == 1
    world.failures["prefill"], world.start_s = 0, 5.0
    world.run(120)
    assert len(world.prefill.ready) >= 6


# --- what must not happen -------------------------------------------------------------------------


def test_an_exception_inside_changes_nothing_and_is_logged(
    posts: Posts, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Serve would scale no deployment of the cluster any more."""
    caplog.set_level(logging.ERROR, "services.planner")

    class Broken:
        target_num_replicas = current_num_replicas = 4

        @property
        def raw_metrics(self) -> Any:
            raise OverflowError("of these")

    world = World(clock)
    world.run(10)
    clock.now += 10
    assert world.decode.policy(Broken()) == (1, {})  # as decided
    assert "the size of the decode pool stays as it is" in caplog.text
    assert "of these" in caplog.text
    world.load.rate = 5
    world.run(60)
    assert world.prefill.target > 1


def test_decisions_hold_though_nobody_can_be_told(
    posts: Posts, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(clock)
    posts.error = ConnectionError("no registry")
    world.load.rate = 5
    world.run(60)
    assert world.prefill.target > 1
    assert "no registry" in caplog.text
    posts.error = None
    world.run(3)
    assert posts.last["targets"]["prefill"] == world.prefill.target


def test_two_deployments_do_not_meet(posts: Posts, clock: Clock) -> None:
    one, two = World(clock, registry="one"), World(clock, registry="two")
    one.load.rate = 5
    for _ in range(240):
        one.run(TICK_S)
        clock.now -= TICK_S
        two.run(TICK_S)
    assert one.prefill.target > 1
    assert two.prefill.changes == []
    assert posts.plans.keys() == {"one", "two"}
    assert {plan["targets"]["prefill"] for plan in posts.plans["two"]} == {1}


def test_another_configuration_begins_anew_and_the_same_goes_on(posts: Posts, clock: Clock) -> None:
    world = World(clock)
    world.load.rate = 5
    world.run(60)
    size = world.prefill.target
    again = Autoscaler("prefill", asdict(CONFIG), "registry-of-this-one")
    assert again(Context(1, 1)) == (size, {})
    smaller = replace(CONFIG, prefill=replace(POOL, max=2))
    other = Autoscaler("prefill", asdict(smaller), "registry-of-this-one")
    assert other(Context(1, 1)) == (1, {})
