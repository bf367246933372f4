"""The small form of ``make bench-loadtest``: medians are right within its limits.

A machine that is busy with other things delays this process and the stub at any time, so the best
of some runs counts; a client that is wrong is so in all of them.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from loadtest.figures import Summary, summarize
from loadtest.record import Record, RunResult
from tests.bench_loadtest import SLOS, Case, Measured, known_stub, measure
from tests.support.stub_server import RunningStub

RUNS = 10
MEDIANS = ("p50",)


@pytest.fixture(scope="module")
def stub() -> Iterator[RunningStub]:
    with known_stub() as running:
        yield running


@pytest.mark.parametrize("case", [Case(60, 1.0, 16), Case(400, 0.5, 2)], ids=str)
def test_medians_are_those_of_the_stub(stub: RunningStub, case: Case) -> None:
    missed: dict[str, str] = {}
    for seed in range(RUNS):
        missed = measure(stub, case, seed).misses(MEDIANS)
        if not missed:
            return
    pytest.fail(str(missed))


CASE = Case(10, 1.0, 4)


def seen(late_s: float = 0.0, slower: float = 1.0, **fields: Any) -> Summary:
    """A run with exactly the delays that were asked for, and then what is wrong with it."""
    records = []
    for i in range(10):
        name = ("short", "long")[i % 2]
        nominal = CASE.nominal_s(name)
        chunks = tuple(nominal["ttft"] + late_s + k * nominal["itl"] * slower for k in range(4))
        record = Record(i, name, i, 0, i / 10, i / 10, 10, 4, output_tokens=4, chunk_s=chunks)
        records.append(replace(record, **fields))
    return summarize(RunResult(tuple(records), 2.0, "", 10), SLOS)


@pytest.mark.parametrize(
    ("wrong", "misses"),
    [
        ({}, ""),
        ({"late_s": 0.0009}, ""),
        ({"late_s": 0.0025}, "short ttft p50 55.00 ms, the stub's 52.50 ms"),
        ({"slower": 1.2}, "long tpot p50 12.00 ms, the stub's 10.00 ms"),
        ({"output_tokens": 3}, "tokens of answers 30"),
        ({"error": "reset"}, "requests failed {'reset': 10}"),
        ({"late_s": 0.05}, "attainment 0.0%, by the stub's times 50.0%"),
        ({"sent_s": 2.0}, "p99 lag"),
    ],
)
def test_what_is_wrong_is_found(wrong: dict[str, Any], misses: str) -> None:
    found = Measured(CASE, seen(**wrong), seen()).misses()
    assert any(misses in f"{name} {text}" for name, text in found.items()) if misses else not found
