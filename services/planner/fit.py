"""Fits the time model of a step to points that were timed (pure).

Least squares of the relative error, so that a step of milliseconds counts as much as one of
seconds, over coefficients that are zero or above. With three of them there is no need to search: if
some are zero in the best fit, it is the plain fit of the others, so each choice of others is
solved, and the best that has no negative one is taken. Numbers are fractions meanwhile: whether
points tell the coefficients apart is then a fact, and no matter of rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from math import isfinite
from statistics import median
from typing import Any

from services.planner.halves import FIELDS, Half, with_zeros

FEWEST = 4  # points; three would be met exactly, whatever they are
LONGEST_S = 1e6
SHORTEST_S = 1e-9
LARGEST = 1e9  # tokens, sequences
DOUBTFUL = (0.25, 0.6)  # median and largest error


class FitError(ValueError):
    """No model can be made of these points; the message says why."""


@dataclass(frozen=True)
class Point:
    """One timing: of a prompt's next tokens, or of a step that decodes."""

    size: int  # tokens, or sequences
    context: float  # tokens before them; when decoding, before each of them
    seconds: float


@dataclass(frozen=True)
class Fit:
    """One half of a profile, and what it was made of."""

    kind: str  # prefill or decode
    points: tuple[Point, ...]
    half: Half  # coefficients, by the names that Profile has for them

    def seconds(self, size: float, context: float = 0.0) -> float:
        """What the model says."""
        profile = with_zeros(self.half)
        of = profile.prefill_s if self.kind == "prefill" else profile.decode_s
        return of(size, context)

    def error(self, point: Point) -> float:
        """By what share of the measured time the model is above it, or below."""
        return self.seconds(point.size, point.context) / point.seconds - 1

    @property
    def median_error(self) -> float:
        """Of the sizes of all errors."""
        return median(abs(self.error(point)) for point in self.points)

    @property
    def worst(self) -> Point:
        """The point with the largest error."""
        return max(self.points, key=lambda point: abs(self.error(point)))

    @property
    def largest_error(self) -> float:
        """Its size."""
        return abs(self.error(self.worst))

    @property
    def is_doubtful(self) -> bool:
        """The machine was busy with something else, or its steps are not as the model has them."""
        middle, largest = DOUBTFUL
        return self.median_error > middle or self.largest_error > largest


def fit(kind: str, points: Iterable[Point]) -> Fit:
    """The model of ``kind``, prefill or decode, that comes closest. Raises FitError."""
    if kind not in FIELDS:
        raise FitError(f"{kind!r} is neither prefill nor decode")
    points = tuple(points)
    for point in points:
        _check(kind, point)
    if len(points) < FEWEST:
        raise FitError(f"{kind}: {len(points)} points are too few, {FEWEST} are needed")
    weights = [Fraction(1 / point.seconds) for point in points]
    rows = [
        [weight * part for part in _parts(kind, point)]
        for weight, point in zip(weights, points, strict=True)
    ]
    products = [[_dot(a, b) for b in zip(*rows, strict=True)] for a in zip(*rows, strict=True)]
    sums = [sum(column, Fraction()) for column in zip(*rows, strict=True)]
    best, gain = _best(products, sums)
    if not gain:
        raise FitError(
            f"{kind}: these points do not tell the three coefficients apart; they need other"
            f" {'lengths' if kind == 'prefill' else 'batches'} and contexts"
        )
    return Fit(kind, points, dict(zip(FIELDS[kind], map(float, best), strict=True)))


def _parts(kind: str, point: Point) -> tuple[Fraction, Fraction, Fraction]:
    """What each coefficient is multiplied with, as in Profile's ``prefill_s`` and ``decode_s``."""
    size, context = Fraction(point.size), Fraction(point.context)
    pairs = size * (context + size / 2 if kind == "prefill" else context)
    return Fraction(1), size, pairs


def _best(
    products: Sequence[Sequence[Fraction]], sums: Sequence[Fraction]
) -> tuple[list[Fraction], Fraction]:
    """The best coefficients, and by how much they lower the sum of squares; zeros if even all three
    columns together do not have one solution.
    """
    best, gain = [Fraction()] * 3, Fraction()
    if _solved(products, sums) is None:
        return best, gain
    for count in (3, 2, 1):
        for chosen in combinations(range(3), count):
            values = _solved(
                [[products[i][j] for j in chosen] for i in chosen], [sums[i] for i in chosen]
            )
            if values is None or min(values) < 0:
                continue
            gained = _dot(values, [sums[i] for i in chosen])
            if gained > gain:
                gain, best = gained, [Fraction()] * 3
                for i, value in zip(chosen, values, strict=True):
                    best[i] = value
    return best, gain


def _solved(
    matrix: Sequence[Sequence[Fraction]], right: Sequence[Fraction]
) -> list[Fraction] | None:
    """The solution of a system with a symmetric matrix of products; None if there are several."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for i in range(size):
        if not rows[i][i]:  # then what is left of this column is zero: it adds nothing to others
            return None
        for j in range(size):
            if j != i:
                factor = rows[j][i] / rows[i][i]
                rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i], strict=True)]
    return [rows[i][size] / rows[i][i] for i in range(size)]


def _dot(a: Sequence[Fraction], b: Sequence[Fraction]) -> Fraction:
    return sum((x * y for x, y in zip(a, b, strict=True)), Fraction())


def _check(kind: str, point: Point) -> None:
    for name, value, low, high in (
        ("size", point.size, 1, LARGEST),
        ("context", point.context, 0, LARGEST),
        ("seconds", point.seconds, SHORTEST_S, LONGEST_S),
    ):
        if not (isfinite(value) and low <= value <= high):  # also NaN
            raise FitError(f"{kind}: a point's {name} is {value!r}, not {low:g} to {high:g}")


# --- JSON -----------------------------------------------------------------------------------------


def as_json(found: Fit) -> dict[str, Any]:
    """For a file. Only the points are read back: the rest is for people."""
    return {
        "kind": found.kind,
        "points": [[point.size, point.context, point.seconds] for point in found.points],
        "coefficients": dict(found.half),
        "median_error": found.median_error,
        "largest_error": found.largest_error,
    }


def from_json(value: Any) -> Fit:
    """The fit of a file's points. Anything else raises ValueError, KeyError, TypeError or, for a
    number without measure, OverflowError.
    """
    return fit(value["kind"], [Point(*numbers) for numbers in value["points"]])
