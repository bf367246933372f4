"""The meter of an engine: all time is busy or idle, and what is idle for long uses nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from services.engine.meter import RECENT_S, StepMeter, Utilisation, Work
from services.engine.roofline import Ceilings, Cost
from services.engine.scheduler import Row
from services.engine.sequence import SamplingParams

ROW = Row((b"", 0), (1,), 0, (1,), True, SamplingParams(max_tokens=1), 1)
IDLE = Utilisation(0.0, 0.0, 0.0)


def meter() -> StepMeter:
    """A step costs 100 operations and 50 bytes by row."""
    return StepMeter(
        lambda rows: Cost(100 * len(rows), 50 * len(rows)), Ceilings(flops_s=1_000, bytes_s=100)
    )


def test_work_and_time_add_up() -> None:
    it = meter()
    it.waited(10.0)  # the start
    it.waited(10.5)
    it.stepped([ROW], 11.0, 11.25)
    it.stepped([ROW, ROW], 11.5, 12.0)
    it.waited(13.0)
    assert it.total == Work(flops=300, num_bytes=150, seconds=0.75)
    assert it.idle_s == 0.5 + 0.5 + 0.25 + 1.0


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), max_size=20))
def test_busy_and_idle_are_all_time(turns: list[tuple[float, float]]) -> None:
    it, now = meter(), 5.0
    it.waited(now)
    for pause, took in turns:
        now += pause
        if took:
            it.stepped([ROW], now, now + took)
            now += took
        else:
            it.waited(now)
    it.waited(now)
    assert it.total.seconds + it.idle_s == pytest.approx(now - 5.0)


def test_shares_are_of_the_time_within_steps() -> None:
    it = meter()
    it.stepped([ROW], 100.0, 100.5)
    assert it.utilisation(100.5) == Utilisation(flops=0.2, bandwidth=1.0, intensity=2.0)
    it.stepped([ROW], 103.0, 104.5)  # the pause does not count
    assert it.utilisation(104.6) == Utilisation(flops=0.1, bandwidth=0.5, intensity=2.0)


def test_an_idle_engine_uses_exactly_nothing() -> None:
    it = meter()
    assert it.utilisation(0.0) == IDLE
    it.stepped([ROW], 100.2, 100.7)
    assert it.utilisation(100.7 + RECENT_S) != IDLE
    assert it.utilisation(101.0 + RECENT_S) == IDLE
    it.stepped([ROW], 200.0, 200.5)
    assert it.recent(200.5) == Work(100, 50, 0.5), "what was long ago came back"


def test_old_work_makes_room() -> None:
    it = meter()
    for second in range(100):
        it.stepped([ROW], second + 0.25, second + 0.5)
        kept = min(second, RECENT_S) + 1
        assert it.recent(second + 0.75) == Work(100 * kept, 50 * kept, 0.25 * kept)


def test_without_ceilings_there_are_no_shares() -> None:
    it = StepMeter(lambda rows: Cost(100, 50))
    it.stepped([ROW], 1.0, 2.0)
    assert it.utilisation(2.0) == Utilisation(0.0, 0.0, 2.0)


def test_of_an_unknown_model_only_time_is_known() -> None:
    it = StepMeter()
    it.stepped([ROW], 1.0, 2.0)
    assert it.total == Work(0, 0, 1.0)
    assert it.utilisation(2.0) == IDLE
