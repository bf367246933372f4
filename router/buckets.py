"""Histograms as plain numbers (pure): what is counted on the token path, and borders for all.

Adding to a :class:`Tally` is a bisection and two additions: a tenth of what a histogram of
prometheus_client costs, and no lock. Who exports them knows the names; see ``router.metrics``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from math import inf, nan

# Upper borders, inclusive. Seconds, unless they say otherwise.
TTFT = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75,
    1.0, 1.5, 2.0, 2.5, 3.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
TPOT = (
    0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.075,
    0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
DURATION = (
    0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0,
    960.0,
)  # fmt: skip
STAGE = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, *TTFT)
OVERHEAD = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1)
LAG = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
TOKENS = tuple(
    float(digit * 10**power) for power in range(6) for digit in (1, 2, 5)
)  # 1 to 500,000 tokens


def with_border(borders: Iterable[float], border: float) -> tuple[float, ...]:
    """``borders`` with one more in its place: so a ratio of buckets says exactly what is within."""
    return tuple(sorted({*borders, border}))


class Tally:
    """Counts by bucket, and their sum. One thread adds; others may look at it at any time."""

    __slots__ = ("borders", "counts", "total")

    def __init__(self, borders: Iterable[float]) -> None:
        self.borders = tuple(borders)
        assert list(self.borders) == sorted(set(self.borders)), "borders must grow"
        self.counts = [0] * (len(self.borders) + 1)  # the last one: above all borders
        self.total = 0.0

    @property
    def count(self) -> int:
        """Values that were added."""
        return sum(self.counts)

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.borders, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """(border as Prometheus writes it, values up to it), "+Inf" last."""
        counts = self.counts.copy()  # whatever is added meanwhile
        running, result = 0, []
        for border, count in zip((*map(str, self.borders), "+Inf"), counts, strict=True):
            running += count
            result.append((border, float(running)))
        return result

    def quantile(self, share: float) -> float:
        """The upper border of the bucket that holds this share of the values; inf above all."""
        counts, running = self.counts.copy(), 0
        wanted = share * sum(counts)
        for border, count in zip((*self.borders, inf), counts, strict=True):
            running += count
            if running and running >= wanted:
                return border
        return nan
