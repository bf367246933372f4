"""Figures against slow formulas written out by hand, and brute force."""

import json
import math
import random

import pytest
from hypothesis import given, settings, strategies as st

from loadtest.figures import Attainment, Spread, pooled, summarize
from loadtest.record import INTERRUPTED, Record, RunResult
from loadtest.slo import SLO

times = st.floats(0.001, 5.0)


@st.composite
def some_records(draw: st.DrawFn, max_size: int = 12) -> list[Record]:
    records = []
    for index in range(draw(st.integers(0, max_size))):
        error = draw(st.sampled_from(["", "", "", "http 429", "reset", INTERRUPTED]))
        chunks, now = [], 0.0
        for gap in draw(st.lists(times, min_size=0 if error else 1, max_size=6)):
            now += gap
            chunks.append(now)
        records.append(
            Record(
                index=index,
                class_name=draw(st.sampled_from(["chat", "long"])),
                conversation=index,
                turn=0,
                due_s=index * 0.1,
                sent_s=index * 0.1 + draw(st.floats(0, 0.004)),
                planned_tokens=10,
                max_tokens=8,
                error=error,
                prompt_tokens=draw(st.integers(1, 50)),
                output_tokens=draw(st.integers(1, 12)) if chunks else 0,
                chunk_s=tuple(chunks),
            )
        )
    return records


def run_of(records: list[Record], duration_s: float = 10.0) -> RunResult:
    return RunResult(tuple(records), duration_s, "2026-01-02T03:04:05+00:00", len(records))


def one(chunks: list[float], tokens: int, error: str = "", name: str = "chat") -> Record:
    return Record(0, name, 0, 0, 0.0, 0.0, 10, 8, error, "", 10, tokens, tuple(chunks))


def slow_percentile(values: list[float], percent: float) -> float:
    values = sorted(values)
    place = percent / 100 * (len(values) - 1)
    below = math.floor(place)
    above = min(below + 1, len(values) - 1)
    return values[below] + (values[above] - values[below]) * (place - below)


def check_spread(spread: Spread, values: list[float]) -> None:
    assert spread.count == len(values)
    if not values:
        assert math.isnan(spread.p50)
        assert math.isnan(spread.mean)
        return
    mean = sum(values) / len(values)
    assert spread.mean == pytest.approx(mean)
    variance = sum((value - mean) ** 2 for value in values) / len(values)
    assert spread.std == pytest.approx(math.sqrt(variance), abs=1e-7)
    assert spread.max == max(values)
    for percent in (50, 90, 99):
        expected = slow_percentile(values, percent)
        assert getattr(spread, f"p{percent}") == pytest.approx(expected)


@settings(max_examples=40, deadline=None)
@given(some_records(), st.floats(0.01, 3), st.floats(0.001, 1), st.floats(0.01, 10))
def test_figures_are_the_formulas(
    records: list[Record], ttft: float, tpot: float, e2e: float
) -> None:
    slos = {"chat": SLO(ttft=ttft, tpot=tpot), "long": SLO(e2e=e2e)}
    total = summarize(run_of(records), slos).total
    ok = [record for record in records if record.error == ""]
    first, last, per_token, gaps = [], [], [], []
    good = 0
    for record in ok:
        first.append(record.chunk_s[0])
        last.append(record.chunk_s[-1])
        this = 0.0
        if record.output_tokens > 1:
            this = (record.chunk_s[-1] - record.chunk_s[0]) / (record.output_tokens - 1)
            per_token.append(this)
        for place in range(1, len(record.chunk_s)):
            gaps.append(record.chunk_s[place] - record.chunk_s[place - 1])
        if record.class_name == "chat":
            good += record.chunk_s[0] <= ttft and this <= tpot
        else:
            good += record.chunk_s[-1] <= e2e
    check_spread(total.ttft, first)
    check_spread(total.e2e, last)
    check_spread(total.tpot, per_token)
    check_spread(total.itl, gaps)
    assert total.request_throughput == len(ok) / 10
    assert total.output_throughput == sum(record.output_tokens for record in ok) / 10
    assert total.goodput == good / 10
    ended = sum(record.error != INTERRUPTED for record in records)
    assert (total.attainment.met, total.attainment.total) == (good, ended)
    assert total.num_interrupted == len(records) - ended
    assert sum(total.errors.values()) == total.num_failed == ended - len(ok)
    assert INTERRUPTED not in total.errors


@settings(max_examples=15, deadline=None)
@given(some_records(), st.integers(0, 1000))
def test_the_order_of_requests_does_not_matter(records: list[Record], seed: int) -> None:
    shuffled = random.Random(seed).sample(records, len(records))
    slos = {"chat": SLO(ttft=1.0)}
    a, b = summarize(run_of(records), slos), summarize(run_of(shuffled), slos)
    assert a.to_json() == b.to_json()


@settings(max_examples=15, deadline=None)
@given(some_records())
def test_classes_add_up_and_json_has_no_nan(records: list[Record]) -> None:
    summary = summarize(run_of(records), {"chat": SLO(ttft=1.0), "idle": SLO(tpot=0.1)})
    classes = summary.classes
    for name in ("num_sent", "num_ok", "num_failed", "num_interrupted", "output_tokens"):
        assert sum(getattr(group, name) for group in classes) == getattr(summary.total, name)
    assert sum(group.attainment.met for group in classes) == summary.total.attainment.met
    assert [group.name for group in classes][:2] == ["chat", "idle"]  # as given, also if empty
    json.dumps(summary.to_json(), allow_nan=False)


def test_an_empty_run_and_one_in_which_all_failed() -> None:
    empty = summarize(RunResult((), 0.0, "", 0), {"chat": SLO(ttft=1.0)})
    plain = empty.to_json()
    assert plain["total"]["goodput"] is None
    assert plain["total"]["ttft"]["p50"] is None
    assert plain["total"]["attainment"] == {
        "met": 0, "total": 0, "share": None, "interval": [0.0, 1.0],
    }  # fmt: skip
    assert empty.spoiled == ""
    failed = summarize(run_of([one([], 0, "connect")] * 3), {"chat": SLO(ttft=1.0)})
    assert failed.total.goodput == 0
    assert failed.total.attainment == Attainment(0, 3)
    assert failed.total.objectives == {"ttft": Attainment(0, 3)}
    assert failed.total.errors == {"connect": 3}
    assert set(failed.total.messages) == {"connect"}
    assert failed.total.ttft.count == 0


def test_an_answer_of_one_token_has_no_tpot_but_meets_it() -> None:
    summary = summarize(run_of([one([0.5], 1)]), {"chat": SLO(tpot=1e-9)})
    assert summary.total.tpot.count == 0
    assert summary.total.attainment == Attainment(1, 1)


def test_a_failed_request_with_chunks_enters_no_latency() -> None:
    records = [one([0.1, 0.2], 2), one([9.0, 19.0], 2, "reset")]
    total = summarize(run_of(records), {}).total
    assert total.ttft.max == pytest.approx(0.1)
    assert total.itl.count == 1
    assert total.attainment == Attainment(1, 2)


def test_requests_cut_off_by_the_load_test_count_neither_way() -> None:
    records = [one([0.1], 1), one([0.1], 1, INTERRUPTED)]
    assert summarize(run_of(records), {"chat": SLO(ttft=1.0)}).total.attainment == Attainment(1, 1)


def test_each_objective_by_itself() -> None:
    records = [one([0.1, 0.4], 2), one([0.9, 1.0], 2), one([0.1, 0.2], 2)]
    total = summarize(run_of(records), {"chat": SLO(ttft=0.5, tpot=0.2)}).total
    assert total.objectives == {"ttft": Attainment(2, 3), "tpot": Attainment(2, 3)}
    assert total.attainment == Attainment(1, 3)


@pytest.mark.parametrize(
    ("met", "total", "low", "high"),
    # by hand from (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n), z = 1.96
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (45, 50, 0.7864, 0.9565), (1, 2, 0.0945, 0.9055)],
)
def test_wilson_interval(met: int, total: int, low: float, high: float) -> None:
    assert Attainment(met, total).interval == pytest.approx((low, high), abs=1e-4)


def late(lag_s: float, ttft_s: float, count: int = 200, num_late: int = 200) -> RunResult:
    return run_of(
        [
            Record(i, "chat", i, 0, i * 0.1, i * 0.1 + (lag_s if i < num_late else 0.0), 10, 8,
                   "", "", 10, 1, (ttft_s,))
            for i in range(count)
        ]
    )  # fmt: skip


def test_a_late_client_spoils_its_run() -> None:
    assert "20.0 ms or more after they were due" in summarize(late(0.02, 0.1), {}).spoiled
    assert summarize(late(0.02, 1.0), {}).spoiled == ""  # 2 % of the median TTFT
    assert summarize(late(0.004, 0.001), {}).spoiled == ""  # under 5 ms
    assert summarize(late(0.5, 0.1, num_late=1), {}).spoiled == ""  # one in 200
    assert summarize(late(0.5, 0.1, count=9, num_late=2), {}).spoiled == ""  # of nine, one is p99
    assert summarize(late(0.5, 0.1, count=9, num_late=3), {}).spoiled


def test_rounds_are_pooled() -> None:
    one_round = run_of([one([0.1], 1)] * 4, duration_s=2.0)
    two = summarize(pooled([one_round, one_round]), {})
    assert two.total.request_throughput == 2.0
    assert two.total.num_ok == two.num_planned == 8
