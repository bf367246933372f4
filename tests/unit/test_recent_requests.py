"""Percentiles of the last minute and their history, as the live console asks for them."""

from __future__ import annotations

import pytest

from router.events import Recent, percentile
from tests.support.observations import NOON, seen


@pytest.mark.parametrize(
    ("count", "percent", "expected"),
    [(1, 50, 1), (1, 99, 1), (2, 50, 1), (4, 50, 2), (100, 95, 95), (100, 99, 99), (101, 99, 100)],
)
def test_percentiles_are_values_that_occurred(count: int, percent: float, expected: float) -> None:
    assert percentile([float(i) for i in range(1, count + 1)], percent) == expected


def test_a_minute() -> None:
    recent = Recent()
    recent.add(seen(NOON - 100, ttft=9.0, tpot=9.0, good=False))  # long ago
    for i in range(20):
        recent.add(seen(NOON - 30 + i, ttft=(i + 1) / 100, tpot=(i + 1) / 1000, good=i > 0))
    recent.add(seen(NOON - 2, ttft=None, tpot=None, good=None))  # cancelled before it had anything
    assert recent.summary(NOON) == {
        "window_s": 60.0,
        "ttft": {"n": 20, "p50": 0.1, "p95": 0.19, "p99": 0.2},
        "tpot": {"n": 20, "p50": 0.01, "p95": 0.019, "p99": 0.02},
        "good": 19,
        "judged": 20,
        "ended": 21,
    }


def test_a_first_token_counts_when_it_comes_not_when_the_answer_ends() -> None:
    recent = Recent()
    running = seen(NOON - 50, ttft=3.0, end=None, tpot=0.05, good=None)
    waiting = seen(NOON - 40, ttft=None, end=None, tpot=None, good=None)
    summary = recent.summary(NOON, [running, waiting])
    assert summary["ttft"] == {"n": 1, "p50": 3.0, "p95": 3.0, "p99": 3.0}
    assert summary["tpot"] is None  # it is not known before the end
    recent.add(seen(NOON - 90, ttft=1.0, end=85.0))  # its first token is older than a minute
    assert recent.summary(NOON)["ttft"] is None
    assert recent.summary(NOON)["tpot"]["n"] == 1


def test_nothing_at_all() -> None:
    empty = Recent().summary(NOON)
    assert (empty["ttft"], empty["tpot"], empty["judged"]) == (None, None, 0)
    assert Recent().history(NOON) == []


def test_history_has_a_point_for_each_five_seconds_of_the_clock() -> None:
    recent = Recent()
    recent.add(seen(NOON - 400, ttft=0.5))  # before the history
    recent.add(seen(NOON - 12, ttft=0.5, end=1.0, good=False, tokens=7))  # both at −15 … −10
    recent.add(seen(NOON - 8, ttft=0.3, end=7.0, tokens=5))  # first token −10 … −5, end −5 … 0
    (first, second, third) = recent.history(NOON)
    assert [first["t"], second["t"], third["t"]] == [NOON - 15, NOON - 10, NOON - 5]
    assert (first["ttft"]["n"], first["good"], first["judged"], first["tokens"]) == (1, 0, 1, 7)
    assert (second["ttft"]["p50"], second["tpot"], second["judged"]) == (0.3, None, 0)
    assert (third["ttft"], third["tpot"]["n"], third["good"], third["tokens"]) == (None, 1, 1, 5)


def test_a_step_that_the_beginning_cuts_through_is_left_out() -> None:
    """Else the page would replace a whole point that it has by half of it."""
    recent = Recent()
    for second in range(12):
        recent.add(seen(NOON - 12 + second, ttft=0.0, end=0.0))
    points = recent.history(NOON + 1, span_s=10.0)  # from −9 on
    assert [(point["t"] - NOON, point["judged"]) for point in points] == [(-5, 5)]
    points = recent.history(NOON + 1, span_s=11.0)
    assert [(point["t"] - NOON, point["judged"]) for point in points] == [(-10, 5), (-5, 5)]


def test_memory_is_bounded() -> None:
    recent = Recent(keep=3, samples=5)
    for i in range(10):
        recent.add(seen(NOON + i, end=0.5))
    assert [one.at - NOON for one in recent.ended] == [7, 8, 9]
    assert recent.summary(NOON + 10)["ended"] == 5


def test_at_high_rates_it_says_how_far_back_it_reaches() -> None:
    """A step of which only some are kept must not replace the whole one that a page has."""
    recent = Recent(samples=20)
    for i in range(60):  # two a second over 30 s; the last 20 reach 9.5 s back
        recent.add(seen(NOON - 29.5 + i / 2, ttft=0.0, end=0.0))
    assert recent.summary(NOON)["window_s"] == 9.5
    points = recent.history(NOON)
    assert [(point["t"] - NOON, point["judged"]) for point in points] == [(-5, 10), (0, 1)]
    # The present one is shown in any case.
    for _ in range(20):
        recent.add(seen(NOON + 1, ttft=0.0, end=0.0))
    points = recent.history(NOON + 1)
    assert [(point["t"] - NOON, point["judged"]) for point in points] == [(0, 20)]


def test_what_goes_on_is_not_added() -> None:
    with pytest.raises(AssertionError, match="not ended"):
        Recent().add(seen(NOON, end=None))
