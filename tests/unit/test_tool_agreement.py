"""The rules by which `make bench-tools` finds that two tools agree or do not."""

import math

import pytest

from tests.support.agreement import FIGURES, Comparison, Medians, compare, table


def runs(*ttfts: float) -> list[Medians]:
    return [Medians(ttft=ttft, tpot=0.01, itl=0.01, e2e=1.0) for ttft in ttfts]


def ttft(ours: list[float], theirs: list[float], share: float | None = None) -> Comparison:
    found = compare(runs(*ours), runs(*theirs), share)
    assert [each.figure for each in found] == list(FIGURES)
    return found[0]


def test_a_share_is_of_the_other_tools_median() -> None:
    assert ttft([0.1029, 0.1029], [0.1, 0.1], 0.03).agrees
    assert not ttft([0.1031, 0.1031], [0.1, 0.1], 0.03).agrees
    assert not ttft([0.0969, 0.0969], [0.1, 0.1], 0.03).agrees
    assert ttft([0.09, 0.11], [0.1, 0.1], 0.03).difference == pytest.approx(0)
    assert ttft([0.1, 0.1, 0.9], [0.1, 0.1, 0.1], 0.03).agrees  # one round that was disturbed
    assert not ttft([0.1, 0.9, 0.9], [0.1, 0.1, 0.1], 0.03).agrees


def test_the_spread_is_half_of_both_ranges() -> None:
    wide = ttft([0.10, 0.12], [0.11, 0.15])  # medians 0.11 and 0.13, ranges 0.02 and 0.04
    assert wide.difference == pytest.approx(-0.02)
    assert wide.allowed == pytest.approx(0.03)
    assert wide.agrees
    assert not ttft([0.10, 0.11], [0.13, 0.14]).agrees  # 0.03 apart, 0.01 allowed
    assert not ttft([0.13, 0.14], [0.10, 0.11]).agrees


def test_what_is_no_number_agrees_with_nothing() -> None:
    for disturbed in ([math.nan, 0.1, 0.1], [0.1, 0.1, math.nan]):
        assert not ttft(disturbed, [0.1, 0.1, 0.1], 0.03).agrees
        assert not ttft([0.0, 0.1, 0.2], disturbed).agrees


def test_a_spread_needs_two_rounds_of_each() -> None:
    assert ttft([0.1], [0.1], 0.03).agrees
    with pytest.raises(ValueError, match="1 and 1 rounds"):
        ttft([0.1], [0.1])
    with pytest.raises(ValueError, match="2 and 1 rounds"):
        ttft([0.1, 0.1], [0.1])


def test_the_table_judges_ttft_and_tpot_only() -> None:
    far = [Medians(ttft=0.2, tpot=0.01, itl=0.5, e2e=9.0)] * 2
    text = table(compare(far, runs(0.1, 0.1)), "another")
    by_figure = {line.split("|")[1].strip(): line for line in text.splitlines()[2:]}
    assert "**differ**" in by_figure["TTFT"]
    assert "+100.00 ms (+100.0 %)" in by_figure["TTFT"]
    assert "agree" in by_figure["TPOT"]
    assert not any(word in by_figure[name] for name in ("ITL", "E2E") for word in ("agree", "diff"))
