"""The search for the highest rate, against a simulated server whose highest rate is known.

The server is one queue (M/G/1): a request waits for those before it, is served for a random time,
and meets its SLO when both take no longer than a limit. Requests of one run then depend on one
another as they do on a real server.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest

from loadtest.search import (
    STEPS_PER_DOUBLING,
    Estimate,
    Probe,
    RateSearch,
    attainment_curve,
    falling,
    max_rate,
)

SERVICE_S, LIMIT_S = 0.1, 1.0
PROBE_S, LEAD_S = 20.0, 2.0
STEP = 2 ** (1 / STEPS_PER_DOUBLING)


def queue(rate: float, rng: np.random.Generator, probe_s: float = PROBE_S) -> Probe:
    """One run of the simulated server."""
    due = np.sort(rng.uniform(0, probe_s, rng.poisson(rate * probe_s)))
    served = np.cumsum(rng.exponential(SERVICE_S, len(due)))
    before = served - np.diff(served, prepend=0.0)
    done = served + np.maximum.accumulate(due - before)  # Lindley's recursion, unrolled
    counts = due >= LEAD_S
    met = done - due <= LIMIT_S
    return Probe(rate, tuple(due[counts]), tuple(met[counts].tolist()), LEAD_S, probe_s)


@cache
def capacity(probe_s: float = PROBE_S) -> float:
    """The rate at which 90 % meet, in runs without end of this length; right to 1 %."""
    rng = np.random.default_rng(5)
    low, high = 2.0, 10.0
    for _ in range(8):
        middle = (low + high) / 2
        seen = np.concatenate([queue(middle, rng, probe_s).met for _ in range(400)])
        low, high = (middle, high) if seen.mean() >= 0.9 else (low, middle)
    return low


def searched(search: RateSearch, run: Callable[[float], Probe]) -> list[Probe]:
    seen: list[Probe] = []
    while (rate := search.next(seen)) is not None:
        seen.append(run(rate))
    return seen


def cliff(rate: float, at: float) -> Probe:
    """All requests meet up to a rate, none beyond."""
    due = tuple(np.linspace(0, 9.9, 100))
    return Probe(rate, due, (rate <= at,) * 100, 0.0, 10.0)


def flat(rate: float, met: int, total: int) -> Probe:
    """So many of so many, spread evenly over its time."""
    hits = np.diff(np.floor(np.arange(total + 1) * met / total)) > 0
    return Probe(rate, tuple(np.arange(total) * 10 / total), tuple(hits.tolist()), 0.0, 10.0)


def rates(probes: Sequence[Probe]) -> list[float]:
    return [round(probe.rate, 3) for probe in probes]


def test_it_doubles_then_halves_then_stays_at_the_crossing() -> None:
    probes = searched(RateSearch(1.0, probes=10), lambda rate: cliff(rate, 5.0))
    assert rates(probes)[:3] == [1.0, 2.0, 4.0]
    places = [math.log2(probe.rate) * STEPS_PER_DOUBLING for probe in probes]
    assert places == pytest.approx([round(place) for place in places])  # all on the grid
    held, missed = 2 ** (11 / STEPS_PER_DOUBLING), 2 ** (12 / STEPS_PER_DOUBLING)
    assert held <= 5.0 < missed
    assert {round(held, 3), round(missed, 3)} <= set(rates(probes))
    near = [
        rate for rate in rates(probes)[-3:] if held / STEP < rate * 1.001 < missed * STEP * 1.01
    ]
    assert len(near) == 3
    assert len(probes) == 10


def test_it_comes_down_from_far_above() -> None:
    probes = searched(RateSearch(100.0, probes=12), lambda rate: cliff(rate, 5.0))
    found = max_rate(probes)
    assert found.kind == "inside"
    assert found.low <= 5.0 < found.high
    assert found.rate == pytest.approx(5.0, rel=0.15)


def test_the_bracket_moves_when_an_end_turns_out_otherwise() -> None:
    """A first lucky run at a rate must not pin the search there."""
    unlucky = {4.0: [100, 40, 40]}

    def run(rate: float) -> Probe:
        luck = unlucky.get(round(rate, 3))
        return flat(rate, luck.pop(0), 100) if luck else cliff(rate, 3.0)

    found = max_rate(searched(RateSearch(1.0, probes=14), run))
    assert found.low <= 3.0 <= found.high < 4.0 * STEP


def test_without_any_requests_it_goes_up() -> None:
    nothing = [Probe(1.0, (), (), 0.0, 10.0)]
    assert RateSearch(1.0).next(nothing) == 2.0
    with pytest.raises(ValueError, match="nothing to estimate"):
        max_rate(nothing)


def test_all_rates_hold() -> None:
    found = max_rate([flat(1.0, 100, 100), flat(2.0, 100, 100)])
    assert found == Estimate(2.0, 2.0, math.inf, "above")
    assert str(found) == "at least 2/s (the highest rate tried)"
    assert "lower bound" in found.note


def test_no_rate_holds() -> None:
    probes = searched(RateSearch(8.0, probes=20), lambda rate: cliff(rate, 0.0))
    assert 8.0 / 64 <= probes[-1].rate < 8.0 / 16  # it gave up: load is not what they miss by
    found = max_rate(probes)
    assert (found.kind, found.low, found.rate) == ("below", 0.0, probes[-1].rate)


def test_falling_is_the_least_squares_fit() -> None:
    values, weights = np.array([1.0, 0.8, 0.9, 0.9, 0.2]), np.array([1.0, 3.0, 1.0, 1.0, 1.0])
    assert falling(values, weights).tolist() == pytest.approx([1.0, 0.84, 0.84, 0.84, 0.2])
    rng = np.random.default_rng(1)
    values, weights = rng.random(12), rng.random(12) + 0.1
    fit = falling(values, weights)
    assert (np.diff(fit) <= 1e-12).all()
    error = (weights * (values - fit) ** 2).sum()
    for _ in range(300):  # no other falling sequence is nearer
        other = np.sort(fit + rng.normal(0, 0.05, 12))[::-1]
        assert (weights * (values - other) ** 2).sum() >= error - 1e-12


def test_the_estimate_lies_between_neighbours_by_their_attainment() -> None:
    found = max_rate([flat(1.0, 1000, 1000), flat(2.0, 950, 1000), flat(4.0, 850, 1000)])
    assert found.rate == pytest.approx(math.sqrt(8), rel=0.001)  # 90 % is half way from 95 to 85
    assert found.low == 2.0
    assert found.high == 4.0


def test_requests_that_fail_together_count_as_few() -> None:
    """The same number met, all misses in one stretch: says far less."""
    together = [Probe(2.0, probe.due_s, tuple(sorted(probe.met)), 0.0, 10.0)
                for probe in [flat(2.0, 920, 1000)]]  # fmt: skip
    others = [flat(1.0, 1000, 1000), flat(4.0, 100, 1000)]
    spread = max_rate([flat(2.0, 920, 1000), *others])
    assert max_rate([*together, *others]).low < spread.low == 2.0
    assert attainment_curve(together).effect[0] > 50
    assert attainment_curve([flat(2.0, 920, 1000)]).effect[0] == 1


def test_the_same_seed_gives_the_same_estimate() -> None:
    probes = searched(RateSearch(1.0), lambda rate: queue(rate, np.random.default_rng(7)))
    assert max_rate(probes, 0.9, np.random.default_rng(1)) == max_rate(
        probes, 0.9, np.random.default_rng(5)
    )


def test_intervals_cover_the_capacity_of_a_queue() -> None:
    """95 of 100 intervals should; those of independent requests cover far fewer."""
    truth, rng = capacity(), np.random.default_rng(3)
    runs = [searched(RateSearch(2.0), lambda rate: queue(rate, rng)) for _ in range(40)]
    found = [max_rate(probes, 0.9, rng) for probes in runs]
    assert sum(each.low <= truth <= each.high for each in found) >= 36
    assert np.median([each.rate for each in found]) == pytest.approx(truth, rel=0.08)
    widths = [each.high / each.low for each in found if each.low > 0]
    assert np.median(widths) < 2.5  # and it says something

    def pretend_independent(probe: Probe) -> Probe:
        order = rng.permutation(len(probe.met))
        return Probe(
            probe.rate, probe.due_s, tuple(np.array(probe.met)[order]), probe.start_s, probe.end_s
        )

    wrong = [max_rate([pretend_independent(p) for p in probes], 0.9, rng) for probes in runs]
    assert sum(each.low <= truth <= each.high for each in wrong) < 30
