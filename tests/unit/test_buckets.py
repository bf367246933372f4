"""Tallies count as prometheus_client's histograms do, and the loop's lag is what it is."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st
from prometheus_client import CollectorRegistry, Histogram

from router import loop_lag
from router.buckets import TPOT, TTFT, Tally, with_border
from router.ledger import Ledger, Objectives
from router.loop_lag import LoopLag

BORDERS = (0.1, 0.5, 1.0, 2.0)


@given(st.lists(st.one_of(st.floats(0, 3), st.sampled_from(BORDERS))))
def test_counts_are_those_of_prometheus(values: list[float]) -> None:
    registry = CollectorRegistry()
    theirs = Histogram("x", "x", buckets=BORDERS, registry=registry)
    ours = Tally(BORDERS)
    for value in values:
        theirs.observe(value)
        ours.add(value)
    assert ours.cumulative() == [
        (border, registry.get_sample_value("x_bucket", {"le": border}))
        for border in ("0.1", "0.5", "1.0", "2.0", "+Inf")
    ]
    assert ours.count == registry.get_sample_value("x_count")
    assert ours.total == registry.get_sample_value("x_sum")


def test_quantiles() -> None:
    tally = Tally(BORDERS)
    assert math.isnan(tally.quantile(0.5))
    for value in (0.05, 0.2, 0.3, 5.0):
        tally.add(value)
    assert [tally.quantile(q) for q in (0.0, 0.25, 0.5, 0.75, 1.0)] == [
        0.1, 0.1, 0.5, 0.5, math.inf,
    ]  # fmt: skip


def test_borders_must_grow() -> None:
    with pytest.raises(AssertionError):
        Tally((1.0, 0.5))


def test_objectives_are_borders_of_their_histograms() -> None:
    ledger = Ledger(Objectives(ttft_s=1.7, tpot_s=0.1))
    assert ledger.ttft[True].borders == (*TTFT[:16], 1.7, *TTFT[16:])
    assert ledger.tpot.borders == ledger.gaps.borders == TPOT  # 0.1 is one anyway
    assert with_border((1.0, 2.0), 0.5) == (0.5, 1.0, 2.0)
    ledger.ttft[True].add(1.7)  # within
    ledger.ttft[True].add(1.7001)
    assert dict(ledger.ttft[True].cumulative())["1.7"] == 1


def test_buckets_reach_as_far_as_requests_may_wait() -> None:
    assert max(TTFT) >= 120


def test_loop_lag_sees_a_loop_that_is_held_up() -> None:
    async def scenario() -> Tally:
        lag = LoopLag(every_s=0.01)
        lag.start()
        lag.start()  # once is enough
        await asyncio.sleep(0.05)
        before = lag.tally.count
        assert before >= 1
        time.sleep(0.3)  # what must never happen
        await asyncio.sleep(0.05)
        assert lag.tally.count > before
        lag.stop()
        after = lag.tally.count
        await asyncio.sleep(0.05)
        assert lag.tally.count == after
        return lag.tally

    tally = asyncio.run(scenario())
    late = dict(tally.cumulative())
    assert late["+Inf"] - late["0.25"] >= 1


@pytest.mark.parametrize("held_s", [0.1, 4.0])
def test_of_a_loop_that_stands_still_each_moment_counts(
    monkeypatch: pytest.MonkeyPatch, held_s: float
) -> None:
    """A loop that stands still for 5 % of the time is that late in about 5 % of the values, whether
    for a moment each second or for seconds once in a while: p99 of the values sees both.
    """
    clock = Clock()
    monkeypatch.setattr(loop_lag, "time", clock)

    async def scenario() -> Tally:
        lag = LoopLag(every_s=0.01)
        monkeypatch.setattr(asyncio.get_running_loop(), "call_later", clock.call_later)
        lag.start()
        for _ in range(20):
            clock.go(held_s * 19)
            clock.stand_still(held_s)
        monkeypatch.undo()
        return lag.tally

    tally = asyncio.run(scenario())
    assert tally.count == pytest.approx(20 * held_s * 20 / 0.01, rel=0.01)
    late = tally.count - dict(tally.cumulative())["0.001"]
    assert late / tally.count == pytest.approx(0.05, abs=0.01)
    assert tally.quantile(0.99) >= held_s * 0.7


def test_a_stop_of_hours_is_counted_without_another_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(loop_lag, "time", clock)

    async def scenario() -> Tally:
        lag = LoopLag(every_s=0.1)
        monkeypatch.setattr(asyncio.get_running_loop(), "call_later", clock.call_later)
        lag.start()
        clock.stand_still(12 * 3600)
        clock.go(1)
        monkeypatch.undo()
        return lag.tally

    tally = asyncio.run(scenario())
    assert tally.count == pytest.approx(loop_lag.MOST_AT_ONCE + 10, abs=2)
    assert dict(tally.cumulative())["0.001"] == pytest.approx(10, abs=2)


class Clock:
    """``time`` and the timers of a loop, for one timer at a time."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._timer: tuple[float, Callable[..., None], tuple[float, ...]] | None = None

    def monotonic(self) -> float:
        return self._now

    def call_later(self, in_s: float, call: Callable[..., None], *args: float) -> None:
        self._timer = self._now + in_s, call, args

    def go(self, seconds: float) -> None:
        """Time passes, and what is due is called then."""
        end = self._now + seconds
        while self._timer is not None and self._timer[0] <= end:
            due, call, args = self._timer
            self._timer, self._now = None, max(self._now, due)
            call(*args)
        self._now = end

    def stand_still(self, seconds: float) -> None:
        """Time passes, and nothing is called."""
        self._now += seconds
