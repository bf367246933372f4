"""Arrival processes: sorted, inside the run, of the right rate and of the right shape."""

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from loadtest.arrivals import parse_arrivals

PROCESSES = [
    "constant",
    "poisson",
    "gamma:0.25",
    "gamma:4",
    "bursts:4",
    "poisson-bursts:3",
    "ramp:0.5..1.5",
    "ramp:1..1",
    "exp-ramp:0.5..2",
    "exp-ramp:2..2",
]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@settings(max_examples=60, deadline=None)
@given(
    text=st.sampled_from(PROCESSES),
    rate=st.floats(0.01, 200),
    duration_s=st.floats(0, 20),
    seed=st.integers(0, 99),
)
def test_times_are_sorted_and_inside_the_duration(
    text: str, rate: float, duration_s: float, seed: int
) -> None:
    arrivals = parse_arrivals(text)
    times = arrivals.times(rate, duration_s, rng(seed))
    assert np.all(np.diff(times) >= 0)
    assert np.all((times >= 0) & (times < duration_s))
    assert np.array_equal(times, arrivals.times(rate, duration_s, rng(seed)))


@settings(max_examples=60, deadline=None)
@given(
    text=st.sampled_from(PROCESSES),
    rate=st.floats(0.01, 200),
    n=st.integers(0, 300),
    seed=st.integers(0, 99),
)
def test_by_number_there_are_so_many_sorted_and_about_as_long_as_the_rate_says(
    text: str, rate: float, n: int, seed: int
) -> None:
    times = parse_arrivals(text).times_of(rate, n, rng(seed))
    assert times.size == n
    assert np.all(np.diff(times) >= 0)
    assert np.all(times >= 0)
    if n:
        # A group of four that is not full still takes its whole interval, a ramp begins slowly.
        assert times[-1] <= (n + 4) / rate * 1.2


@pytest.mark.parametrize("text", PROCESSES)
def test_the_mean_rate_is_the_one_asked_for(text: str) -> None:
    mean = {"exp-ramp:0.5..2": 1.5 / math.log(4), "exp-ramp:2..2": 2.0}.get(text, 1.0)
    arrivals, generator = parse_arrivals(text), rng(1)
    counts = [arrivals.times(5.0, 20.0, generator).size for _ in range(400)]
    assert np.mean(counts) == pytest.approx(100 * mean, abs=4 * np.std(counts) / 20 + 1e-9)


@pytest.mark.parametrize("text", ["poisson", "gamma:0.25", "gamma:4", "poisson-bursts:3"])
def test_by_number_the_rate_is_met_exactly(text: str) -> None:
    assert parse_arrivals(text).times_of(4.0, 120, rng())[-1] == pytest.approx(30.0)


@pytest.mark.parametrize(
    ("text", "variation"), [("constant", 0), ("poisson", 1), ("gamma:0.25", 2), ("gamma:4", 0.5)]
)
def test_intervals_vary_as_the_burstiness_says(text: str, variation: float) -> None:
    for times in (
        parse_arrivals(text).times(10.0, 4000.0, rng(2)),
        parse_arrivals(text).times_of(10.0, 40_000, rng(2)),
    ):
        gaps = np.diff(times)
        # The standard error of a coefficient of variation c of n intervals is about c³ / sqrt(n).
        assert gaps.std() / gaps.mean() == pytest.approx(variation, abs=0.06)


def test_a_clumpy_process_is_in_its_steady_state_from_the_start() -> None:
    """Begun with an arrival, a gamma process of shape 0.1 has many too many arrivals early on."""
    arrivals, generator = parse_arrivals("gamma:0.1"), rng(3)
    early = [arrivals.times(1.0, 2.0, generator).size for _ in range(3000)]
    assert np.mean(early) == pytest.approx(2.0, abs=4 * np.std(early) / math.sqrt(3000))
    naive = [
        (np.cumsum(generator.gamma(0.1, 10.0, 60)) < 2.0).sum() for _ in range(3000)
    ]  # what the check above must be able to see
    assert np.mean(naive) > 2.5


def test_constant_is_evenly_spaced_from_zero() -> None:
    assert parse_arrivals("constant").times(4.0, 1.0, rng()).tolist() == [0, 0.25, 0.5, 0.75]
    assert parse_arrivals("constant").times_of(4.0, 3, rng()).tolist() == [0, 0.25, 0.5]


def test_bursts_come_in_groups_at_regular_intervals() -> None:
    times = parse_arrivals("bursts:4").times(2.0, 7.0, rng())
    assert times.tolist() == [1.0] * 4 + [3.0] * 4 + [5.0] * 4
    assert parse_arrivals("bursts:4").times_of(2.0, 6, rng()).tolist() == [1.0] * 4 + [3.0] * 2


def test_poisson_bursts_are_groups_whose_intervals_are_exponential() -> None:
    times = parse_arrivals("poisson-bursts:3").times(30.0, 2000.0, rng(4))
    groups, sizes = np.unique(times, return_counts=True)
    assert set(sizes) == {3}
    gaps = np.diff(groups)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(
    ("text", "share_at_half"),
    [
        ("ramp:0..2", 0.25),  # t² / 2 of 1 / 2
        ("ramp:0.5..1.5", (0.5 * 0.5 + 0.125) / 1),
        ("ramp:2..0", 0.75),
        ("exp-ramp:1..9", 0.25),  # (3 - 1) of (9 - 1)
    ],
)
def test_a_ramp_has_its_density(text: str, share_at_half: float) -> None:
    times = parse_arrivals(text).times(100.0, 400.0, rng(5))
    assert (times < 200).mean() == pytest.approx(share_at_half, abs=0.012)
    times = parse_arrivals(text).times_of(100.0, 40_000, rng(5))
    mean = {"exp-ramp:1..9": 8 / math.log(9)}.get(text, 1.0)
    assert (times < 200 / mean).mean() == pytest.approx(share_at_half, abs=0.012)


def test_an_infinite_rate_is_all_at_once() -> None:
    assert parse_arrivals("gamma:2").times_of(math.inf, 3, rng()).tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="a rate of inf requests/s"):
        parse_arrivals("poisson").times(math.inf, 1.0, rng())


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_a_rate_must_be_above_zero(rate: float) -> None:
    with pytest.raises(ValueError, match="want a number above 0"):
        parse_arrivals("poisson").times(rate, 1.0, rng())
    with pytest.raises(ValueError, match="want a number above 0"):
        parse_arrivals("constant").times_of(rate, 1, rng())


@pytest.mark.parametrize("duration_s", [-1.0, math.inf, math.nan])
def test_a_duration_is_finite(duration_s: float) -> None:
    with pytest.raises(ValueError, match=r"a duration of .* want a number of 0 or more"):
        parse_arrivals("poisson").times(1.0, duration_s, rng())


@pytest.mark.parametrize("text", PROCESSES)
def test_processes_read_back_as_they_are_written(text: str) -> None:
    assert str(parse_arrivals(text)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gama:1", "no process 'gama'; want constant, poisson, gamma:SHAPE, bursts:N"),
        ("", "no process ''"),
        ("gamma", "want gamma:SHAPE"),
        ("gamma:fast", "want gamma:SHAPE"),
        ("gamma:0", "gamma:SHAPE with numbers from 0.01 up"),
        ("constant:3", "want constant"),
        ("bursts:0", "bursts:N with numbers from 1 up"),
        ("bursts:1.5", "want bursts:N"),
        ("ramp:1", "want ramp:A..B"),
        ("ramp:-1..1", "want ramp:A..B"),
        ("ramp:0..0", "a ramp from 0 to 0 sends nothing"),
        ("exp-ramp:0..1", "exp-ramp:A..B with numbers from 0.001 up"),
    ],
)
def test_what_is_wrong_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        parse_arrivals(text)
    assert repr(text) in str(error.value)
