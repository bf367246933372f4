"""The fit of the time model: right, never negative, and honest about what it cannot know."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from statistics import median

import pytest
from hypothesis import assume, example, given, settings, strategies as st

from services.planner.fit import FEWEST, Fit, FitError, Point, as_json, fit, from_json
from services.planner.halves import FIELDS, as_stats, from_stats, kinds_of, with_zeros
from services.planner.profile import Profile

PROFILE = Profile(0.02, 0.003, 4e-7, 0.022, 0.0016, 3.9e-6)
LENGTHS = [(64, 0), (128, 0), (256, 0), (512, 0), (2048, 0), (64, 1024), (256, 2048), (64, 4096)]
BATCHES = [(batch, context) for batch in (1, 2, 8, 32) for context in (64, 512, 2048)]
SHAPES = {"prefill": LENGTHS, "decode": BATCHES}

kinds = st.sampled_from(["prefill", "decode"])
coefficients = st.floats(1e-9, 0.01)


def seconds(profile: Profile, kind: str, size: float, context: float) -> float:
    return (profile.prefill_s if kind == "prefill" else profile.decode_s)(size, context)


def points(profile: Profile, kind: str, factors: list[float] | None = None) -> list[Point]:
    shapes = SHAPES[kind]
    return [
        Point(size, context, seconds(profile, kind, size, context) * factor)
        for (size, context), factor in zip(shapes, factors or [1.0] * len(shapes), strict=True)
    ]


# --- right ---


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_points_of_the_model_give_its_coefficients(kind: str) -> None:
    found = fit(kind, points(PROFILE, kind))
    for name in FIELDS[kind]:
        assert found.half[name] == pytest.approx(getattr(PROFILE, name), rel=1e-9)
    assert found.largest_error < 1e-9


@settings(max_examples=50)
@given(kind=kinds, values=st.tuples(*[coefficients] * 3))
def test_any_coefficients_are_found_again(kind: str, values: tuple[float, ...]) -> None:
    """As far as they matter: the times are right, whatever the coefficients' sizes."""
    half = dict(zip(FIELDS[kind], values, strict=True))
    found = fit(kind, points(with_zeros(half), kind))
    assert found.largest_error < 1e-6


@settings(max_examples=50)
@given(kind=kinds, noise=st.lists(st.floats(-0.05, 0.05), min_size=12, max_size=12))
def test_noise_moves_the_model_by_no_more_than_the_noise(kind: str, noise: list[float]) -> None:
    factors = [1 + x for x in noise[: len(SHAPES[kind])]]
    found = fit(kind, points(PROFILE, kind, factors))
    for size, context in SHAPES[kind]:
        right = seconds(PROFILE, kind, size, context)
        assert found.seconds(size, context) == pytest.approx(right, rel=0.15)
    size, context = (1000, 500) if kind == "prefill" else (16, 1000)  # in the middle of them
    right = seconds(PROFILE, kind, size, context)
    assert found.seconds(size, context) == pytest.approx(right, rel=0.15)


def test_what_is_below_zero_in_the_plain_fit_is_zero_and_the_others_make_up_for_it() -> None:
    """Steps that take less than in proportion: a plain fit has a pair cost below zero."""
    sizes = (64, 128, 256, 512, 1024)
    found = fit("prefill", [Point(n, 0, 0.01 + 0.002 * n - 1e-7 * n * n) for n in sizes])
    assert found.half["prefill_pair"] == 0
    step, token = found.half["prefill_step"], found.half["prefill_token"]
    # The best line through them, by plain formulas: relative errors are errors over the time.
    times = [0.01 + 0.002 * n - 1e-7 * n * n for n in sizes]
    weights = [1 / t**2 for t in times]
    whole = sum(weights)
    mean_n = sum(w * n for w, n in zip(weights, sizes, strict=True)) / whole
    mean_t = sum(w * t for w, t in zip(weights, times, strict=True)) / whole
    slope = sum(
        w * (n - mean_n) * (t - mean_t) for w, n, t in zip(weights, sizes, times, strict=True)
    ) / sum(w * (n - mean_n) ** 2 for w, n in zip(weights, sizes, strict=True))
    assert token == pytest.approx(slope, rel=1e-9)
    assert step == pytest.approx(mean_t - slope * mean_n, rel=1e-6)


@settings(max_examples=50)
@given(
    kind=kinds,
    noise=st.lists(st.floats(-0.5, 2.0), min_size=12, max_size=12),
    other=st.tuples(*[coefficients] * 3),
)
def test_no_other_model_is_closer(
    kind: str, noise: list[float], other: tuple[float, float, float]
) -> None:
    factors = [1 + x for x in noise[: len(SHAPES[kind])]]
    found = fit(kind, points(PROFILE, kind, factors))
    names = FIELDS[kind]

    def squares(half: dict[str, float]) -> float:
        it = replace(found, half=half)
        return sum(it.error(point) ** 2 for point in found.points)

    best = squares(dict(found.half))
    near = {
        n: v * (0.9 + 0.2 * min(o, 1)) for (n, v), o in zip(found.half.items(), other, strict=True)
    }
    assert best <= squares(near) + 1e-12
    assert best <= squares(dict(zip(names, other, strict=True))) + 1e-12
    for name in names:  # a little more of any of them
        assert best <= squares({**found.half, name: found.half[name] * 1.01 + 1e-9}) + 1e-12


# --- never negative, never broken ---

a_point = st.builds(
    Point,
    st.integers(1, 100_000),
    st.floats(0, 1e6),
    st.floats(1e-6, 1e4),
)


@settings(max_examples=60)
@given(kind=kinds, first=st.lists(a_point, min_size=FEWEST, max_size=9), more=a_point)
@example("decode", [Point(1, 0, 1.0), Point(2, 0, 1.0), Point(1, 1, 1.0), Point(2, 1, 1.0)],
         Point(1, 5e-324, 1.0))  # fmt: skip
def test_never_negative_and_a_point_more_never_breaks_it(
    kind: str, first: list[Point], more: Point
) -> None:
    """Whatever the points are, as long as they tell the coefficients apart."""
    try:
        found = fit(kind, first)
    except FitError:
        assume(False)
        raise
    for it in (found, fit(kind, [*first, more]), fit(kind, [*first, first[0]])):
        assert all(0 <= value < math.inf for value in it.half.values())
        assert any(it.half.values())
        assert math.isfinite(it.median_error)
        assert it.median_error <= it.largest_error == abs(it.error(it.worst))


def test_the_order_of_points_does_not_matter() -> None:
    there = points(PROFILE, "decode", [1 + 0.01 * (i % 5) for i in range(12)])
    assert fit("decode", there).half == fit("decode", there[::-1]).half


# --- honest ---


@pytest.mark.parametrize(
    ("kind", "bad", "words"),
    [
        ("prefill", [], "0 points are too few, 4 are needed"),
        ("decode", points(PROFILE, "decode")[:3], "3 points are too few"),
        ("prefill", [Point(64, 0, 1.0)] * 5, "do not tell the three coefficients apart"),
        ("prefill", [Point(n, 0, n / 100) for n in (64, 128, 64, 128)], "other lengths"),
        ("decode", [Point(n, 0.1, n / 100) for n in (1, 2, 3, 4, 5)], "other batches"),
        ("decode", [Point(3, n, n / 100) for n in (1, 2, 3, 4, 5)], "other batches"),
        ("decode", [*points(PROFILE, "decode"), Point(1, 64, 0.0)], "seconds is 0.0"),
        ("decode", [*points(PROFILE, "decode"), Point(1, 64, -1.0)], "seconds is -1.0"),
        ("decode", [*points(PROFILE, "decode"), Point(1, 64, math.nan)], "seconds is nan"),
        ("decode", [*points(PROFILE, "decode"), Point(1, 64, math.inf)], "seconds is inf"),
        ("prefill", [*points(PROFILE, "prefill"), Point(0, 64, 1.0)], "size is 0"),
        ("prefill", [*points(PROFILE, "prefill"), Point(1, -1, 1.0)], "context is -1"),
        ("prefill", [*points(PROFILE, "prefill"), Point(1, math.nan, 1.0)], "context is nan"),
        ("mixed", points(PROFILE, "prefill"), "'mixed' is neither prefill nor decode"),
    ],
)
def test_nonsense_is_refused(kind: str, bad: list[Point], words: str) -> None:
    with pytest.raises(FitError, match=words):
        fit(kind, bad)


def test_errors_are_those_of_the_points() -> None:
    found = Fit(
        "decode",
        (Point(1, 0, 0.01), Point(2, 0, 0.02), Point(4, 0, 0.08)),
        {"decode_step": 0.0, "decode_seq": 0.012, "decode_pair": 0.0},
    )
    errors = [0.2, 0.2, -0.4]
    assert [found.error(point) for point in found.points] == pytest.approx(errors)
    assert found.median_error == pytest.approx(median(map(abs, errors)))
    assert found.worst == found.points[2]
    assert found.largest_error == pytest.approx(0.4)


def test_points_that_do_not_fit_are_doubtful() -> None:
    there = points(PROFILE, "decode")
    assert not fit("decode", there).is_doubtful
    one = replace(there[5], seconds=5 * there[5].seconds)
    assert fit("decode", [*there[:5], one, *there[6:]]).is_doubtful
    many = [replace(p, seconds=p.seconds * (1, 2.2)[i % 2]) for i, p in enumerate(there)]
    assert fit("decode", many).is_doubtful


# --- files and reports ---


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_file_gives_the_same_fit(kind: str) -> None:
    found = fit(kind, points(PROFILE, kind, [1 + 0.03 * (i % 3) for i in range(len(SHAPES[kind]))]))
    assert from_json(json.loads(json.dumps(as_json(found)))) == found


@pytest.mark.parametrize(
    "damage",
    [None, [], {}, {"kind": "decode"}, {"kind": "decode", "points": []}, {"kind": 5, "points": []},
     {"kind": "decode", "points": [[1]]},
     {"kind": "decode", "points": [[1, 2]] * 4}, {"kind": "decode", "points": [["1", 0, 1.0]] * 4},
     {"kind": "decode", "points": [[1, None, 1.0]] * 4}, {"kind": [], "points": []},
     {"kind": "decode", "points": [[10**400, 0, 1.0]] * 4}],
)  # fmt: skip
def test_a_damaged_file_is_no_fit(damage: object) -> None:
    with pytest.raises((ValueError, KeyError, TypeError, OverflowError)):
        from_json(damage)


def test_reports_carry_what_the_pool_needs() -> None:
    half = dict(fit("decode", points(PROFILE, "decode")).half)
    stats = as_stats(half)
    assert set(stats) == {"profile_decode_step", "profile_decode_seq", "profile_decode_pair"}
    assert from_stats({"running": 3.0, **stats}) == half
    assert kinds_of("prefill") == ("prefill",)
    assert kinds_of("decode") == ("decode",)
    assert kinds_of("mixed") == ("prefill", "decode")


@pytest.mark.parametrize(
    "change",
    [
        {"profile_decode_step": math.nan},
        {"profile_decode_seq": math.inf},
        {"profile_decode_pair": -1e-9},
        dict.fromkeys(as_stats(fit("decode", points(PROFILE, "decode")).half), 0.0),
    ],
)
def test_a_half_that_makes_no_sense_is_left_out(change: dict[str, float]) -> None:
    prefill = dict(fit("prefill", points(PROFILE, "prefill")).half)
    decode = dict(fit("decode", points(PROFILE, "decode")).half)
    assert from_stats({**as_stats(decode), **as_stats(prefill)}) == {**prefill, **decode}
    assert from_stats({**as_stats(decode), **as_stats(prefill), **change}) == prefill
    stats = as_stats(prefill)
    del stats["profile_prefill_pair"]
    assert from_stats(stats) == {}
