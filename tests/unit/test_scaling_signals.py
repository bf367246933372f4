"""What the planner makes of reports that are lost, late or doubled, of replicas that begin anew."""

from __future__ import annotations

from dataclasses import asdict, fields
from math import inf, isfinite, nan
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from services.planner.observation import Observation
from services.planner.profile import Profile
from services.planner.signals import COUNTERS, FORGET_S, Signals

PROFILE = Profile(0.05, 0.004, 5e-7, 0.08, 0.012, 4e-6)
ONE = {"prefill": 1, "decode": 1}


def router(at: float, rate: float = 3.0, prompt: float = 100.0, **more: float) -> dict[str, float]:
    """Counters of a router that has been asked at a steady rate since moment zero."""
    asked = rate * at
    steady = {
        "requests": asked,
        "prompt_tokens": prompt * asked,
        "prompt_squares": prompt**2 * asked,
        "answers": asked,
        "answer_tokens": 20 * asked,
        "ttft_good": 0.9 * asked,
        "ttft_bad": 0.1 * asked,
        "tpot_good": asked,
        "tpot_bad": 0.0,
        "queued": 0.0,
        "queued_tokens": 0.0,
    }
    return {**steady, **more}


def fed(signals: Signals, moments: list[float], name: str = "r", **more: float) -> None:
    for at in moments:
        signals.router(name, at, router(at, **more))


def test_a_steady_load_is_seen_as_it_is() -> None:
    signals = Signals()
    fed(signals, [float(at) for at in range(0, 402, 2)])
    seen = signals.observe(400.0, ONE, ONE)
    for window, seconds in ((seen.short, 10), (seen.long, 60), (seen.before, 60)):
        assert window.seconds == seconds
        assert window.rate == pytest.approx(3.0)
        assert window.prompt_tokens == pytest.approx(100 * window.requests)
        assert window.prompt_squares == pytest.approx(100**2 * window.requests)
    assert [window.seconds for window in seen.lately] == [5, 10, 20, 40, 80, 160]
    assert all(window.rate == pytest.approx(3.0) for window in seen.lately)
    assert seen.answer_tokens == pytest.approx(20)
    assert seen.prefill.attainment == pytest.approx(0.9)
    assert seen.decode.attainment == pytest.approx(1.0)
    assert seen.late_s == 0


@settings(max_examples=30, deadline=None)
@given(
    kept=st.lists(st.booleans(), min_size=101, max_size=101),
    order=st.randoms(use_true_random=False),
    late=st.floats(0, 30),
)
def test_lost_late_and_doubled_reports_change_no_rate(
    kept: list[bool], order: Any, late: float
) -> None:
    """Counters that only grow lose nothing with a report."""
    moments = [2.0 * i for i, keep in enumerate(kept) if keep or i in (0, 100)]
    again = [*moments, *order.sample(moments, len(moments) // 3)]
    # Each comes a little out of its order.
    again.sort(key=lambda at: at + order.uniform(0, 5))
    signals = Signals()
    for at in again:
        signals.router("r", at, router(at))
        signals.observe(at, ONE, ONE)
    seen = signals.observe(200.0 + late, ONE, ONE)
    for window in (seen.short, seen.long, seen.before, *seen.lately):
        assert window.rate == pytest.approx(3.0)
    assert seen.late_s == pytest.approx(late)


def test_a_router_that_begins_at_zero_again_adds_what_it_has_counted_since() -> None:
    signals = Signals()
    fed(signals, [float(at) for at in range(0, 102, 2)])
    for at in range(102, 162, 2):
        signals.router("r", float(at), router(at - 100.0))
    seen = signals.observe(160.0, ONE, ONE)
    assert seen.long.requests == pytest.approx(3 * 60)
    assert seen.before.requests == pytest.approx(3 * 60)


def test_several_routers_are_added_and_one_that_is_new_counts_by_its_rate() -> None:
    signals = Signals()
    fed(signals, [float(at) for at in range(0, 202, 2)], "a")
    fed(signals, [float(at) for at in range(170, 202, 2)], "b", rate=5.0)
    seen = signals.observe(200.0, ONE, ONE)
    assert seen.long.rate == pytest.approx(8.0)
    assert seen.short.rate == pytest.approx(8.0)


def test_who_says_nothing_new_for_long_is_forgotten() -> None:
    signals = Signals()
    fed(signals, [float(at) for at in range(101)], "a")
    fed(signals, [float(at) for at in range(101)], "b", rate=5.0)
    signals.worker("decode", "d", 100.0, {"running": 4, "context": 50, "seqs": 8})
    before = signals.observe(100.0, ONE, ONE)
    assert before.long.rate == pytest.approx(8.0)
    assert before.running == 4
    for at in range(101, 100 + int(FORGET_S) + 2):
        signals.router("a", float(at), router(at))
        signals.router("b", 100.0, router(100.0, rate=5.0))  # the same report again and again
        seen = signals.observe(float(at), ONE, ONE)
    assert seen.long.rate == pytest.approx(3.0)
    assert seen.running == 0
    assert seen.seats.seqs == 8, "what workers are like is remembered"


def test_clocks_of_others_are_not_compared() -> None:
    """A router whose clock is an hour behind is as good as any."""
    signals = Signals()
    for at in range(0, 202, 2):
        signals.router("a", float(at), router(at))
        signals.router("b", at - 3600.0, router(at))
        seen = signals.observe(float(at), ONE, ONE)
    assert seen.long.rate == pytest.approx(6.0)
    assert seen.late_s == 0
    alone = Signals()
    for at in range(0, 202, 2):
        alone.router("b", at - 3600.0, router(at))
        seen = alone.observe(float(at), ONE, ONE)
    assert seen.late_s == FORGET_S, "it goes on reporting"


def test_silence_has_an_age_and_no_numbers() -> None:
    signals = Signals()
    assert signals.observe(1000.0, ONE, {}).late_s == 0
    seen = signals.observe(1090.0, ONE, {})
    assert seen.late_s == 90
    assert seen.prefill.attainment is None
    fed(signals, [1100.0])
    assert signals.observe(1110.0, ONE, {}).late_s == 10
    assert signals.observe(1300.0, ONE, {}).late_s == 190, "since it was heard of"


def test_prefix_hits_are_taken_off_by_the_share_that_workers_report() -> None:
    signals = Signals()
    for at in range(0, 202, 2):
        signals.router("r", float(at), router(at, queued=2, queued_tokens=200))
        signals.worker(
            "prefill",
            "p",
            float(at),
            {"computed_prompt_tokens": 25 * at, "cached_prompt_tokens": 75 * at},
        )
    seen = signals.observe(200.0, ONE, ONE)
    assert seen.long.prompt_tokens == pytest.approx(0.25 * 100 * seen.long.requests)
    assert seen.long.prompt_squares == pytest.approx(0.25**2 * 100**2 * seen.long.requests)
    assert seen.queued_tokens == 50


def test_a_prefill_worker_that_begins_anew_has_no_negative_hits() -> None:
    signals = Signals()
    fed(signals, [float(at) for at in range(0, 102, 2)])
    counts = [(0, 0), (1000, 3000), (100, 0), (200, 0)]
    for at, (computed, cached) in enumerate(counts):
        stats = {"computed_prompt_tokens": computed, "cached_prompt_tokens": cached}
        signals.worker("prefill", "p", 97.0 + at, stats)
    seen = signals.observe(100.0, ONE, ONE)
    assert 0 < seen.long.prompt_tokens <= 100 * seen.long.requests


def test_decode_workers_are_weighed_by_what_they_run() -> None:
    signals = Signals()
    fed(signals, [0.0, 1.0])
    common = {"seqs": 16, "kv_tokens": 4096}
    signals.worker("decode", "a", 1.0, {"running": 3, "context": 100, "kv_use": 0.3, **common})
    signals.worker("decode", "b", 1.0, {"running": 1, "context": 300, "kv_use": 0.1, **common})
    signals.worker("prefill", "p", 1.0, {"running": 9, "waiting_tokens": 70})
    seen = signals.observe(1.0, ONE, ONE)
    assert seen.running == 4
    assert seen.context == pytest.approx(150)
    assert seen.kv_use == pytest.approx(0.2)
    assert (seen.seats.seqs, seen.seats.kv_tokens) == (16, 4096)
    assert seen.queued_tokens == 70


def test_each_pool_says_how_fast_its_own_half_is() -> None:
    signals = Signals()
    assert signals.profile is None
    mine = {f"profile_{name}": value for name, value in asdict(PROFILE).items()}
    halves = {
        role: {name: value for name, value in mine.items() if role in name}
        for role in ("prefill", "decode")
    }
    signals.worker("prefill", "p", 1.0, halves["prefill"])
    signals.observe(1.0, ONE, ONE)
    assert signals.profile is None
    slow = {name: 2 * value for name, value in mine.items()}
    for name, stats in (("d1", mine), ("d2", mine), ("d3", slow)):
        signals.worker("decode", name, 1.0, stats)
    signals.observe(1.0, ONE, ONE)
    assert signals.profile == PROFILE
    signals.observe(1000.0, ONE, {})
    assert signals.profile == PROFILE, "remembered while no worker is there"


def test_starts_are_timed_from_the_decision_to_the_worker() -> None:
    signals = Signals()
    sizes = [(0, 1, 0), (10, 1, 1), (20, 3, 1), (24, 3, 2), (40, 3, 3), (50, 2, 2), (60, 3, 2)]
    for at, target, ready in sizes:
        seen = signals.observe(float(at), {"prefill": target}, {"prefill": ready})
    assert seen.prefill.start_s == 10  # the median of 10, 4 and 20
    assert seen.decode.start_s == 0


def test_starts_that_were_called_off_are_not_timed() -> None:
    signals = Signals()
    for at, target, ready in [
        (0, 1, 1),
        (10, 3, 1),
        (20, 2, 1),
        (25, 2, 2),
        (90, 2, 1),
        (99, 2, 2),
    ]:
        seen = signals.observe(float(at), {"decode": target}, {"decode": ready})
    assert seen.decode.start_s == 15, "one was called off, and one was replaced"


NUMBER = st.one_of(
    st.floats(0, 1e9), st.sampled_from([0.0, nan, inf, -1.0]), st.integers(0, 1000).map(float)
)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_whatever_is_reported_observations_are_numbers(data: st.DataObject) -> None:
    signals = Signals()
    names = [*COUNTERS, "queued", "queued_tokens", "oldest_wait_s"]
    workers = ["running", "context", "kv_use", "seqs", "kv_tokens", "waiting_tokens",
               "computed_prompt_tokens", "cached_prompt_tokens"]  # fmt: skip
    now = 0.0
    for _ in range(data.draw(st.integers(1, 6))):
        now += data.draw(st.floats(0, 100))
        at = data.draw(st.one_of(st.just(now), st.floats(-100, 1000), st.just(nan)))
        stats = data.draw(st.dictionaries(st.sampled_from(names), NUMBER, max_size=6))
        signals.router(data.draw(st.sampled_from("ab")), at, stats)
        stats = data.draw(st.dictionaries(st.sampled_from(workers), NUMBER, max_size=6))
        signals.worker(data.draw(st.sampled_from(["prefill", "decode"])), "w", at, stats)
        check_numbers(signals.observe(now, ONE, {}))


def check_numbers(seen: Observation) -> None:
    def look(value: Any) -> None:
        if isinstance(value, (int, float)):
            assert isfinite(value)
            assert value >= 0
        elif isinstance(value, (tuple, list)):
            for each in value:
                look(each)
        elif value is not None:
            for each in fields(value):
                look(getattr(value, each.name))

    look(seen)
