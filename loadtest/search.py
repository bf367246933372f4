"""The highest rate at which enough requests meet their SLOs: which rate to try next, and how sure.

Pure and deterministic: what was seen so far goes in, the next rate or an estimate comes out.

    next     double (or halve) until the crossing lies between two rates tried; halve that bracket
             on a grid of 15 % steps; spend what is left on the bracket's ends and their neighbours
    estimate attainment falls with the rate: an isotonic fit (pool adjacent violators) over all
             that was tried, and where it crosses the wanted share

Requests of one run depend on one another: one queue that builds up makes a hundred of them late.
How much is measured by stretches of time. The number met in a stretch varies more than that of
independent requests would, by a factor (the design effect), and a run says as much as that many
times fewer requests. The interval is that of fits to attainments drawn anew with those numbers.
What it does not know: a rate that fails only after longer than a probe lasts.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

STRETCHES = 5  # of a probe; longer ones see slower waves, more of them see their size better
DRAWS = 1000
STEPS_PER_DOUBLING = 5  # of the grid of rates: 15 % each
LOWEST = 1 / 64  # of the first rate; what misses its SLOs there misses them without any load


@dataclass(frozen=True)
class Probe:
    """One run at one rate: the requests whose outcome is known, in any order."""

    rate: float
    due_s: tuple[float, ...]
    met: tuple[bool, ...]
    start_s: float  # requests due from here
    end_s: float  # to here count

    def stretches(self) -> tuple[Array, Array]:
        """Requests that met, and requests, in each of STRETCHES equal parts of its time."""
        edges = np.linspace(self.start_s, self.end_s, STRETCHES + 1)[1:-1]
        where = np.searchsorted(edges, np.asarray(self.due_s), side="right")
        met = np.bincount(where, np.asarray(self.met, np.float64), minlength=STRETCHES)
        return met.astype(np.float64), np.bincount(where, minlength=STRETCHES).astype(np.float64)


@dataclass(frozen=True)
class Estimate:
    """The highest rate that holds, between ``low`` and ``high`` in 95 of 100 searches.

    ``low`` and ``high`` are rates that were tried, 0 or infinite: between two rates next to one
    another nothing was seen, so the interval never ends there.
    """

    rate: float  # "above": the highest rate tried; "below": the lowest
    low: float
    high: float
    kind: Literal["inside", "above", "below"] = "inside"

    @property
    def note(self) -> str:
        """What there is to say; empty for a crossing that was found and closed in."""
        if self.kind == "above":
            return f"the highest rate tried, {self.rate:.3g}/s, still holds: a lower bound"
        if self.kind == "below":
            return f"not even the lowest rate tried, {self.rate:.3g}/s, holds: an upper bound"
        if math.isinf(self.high):
            return "no rate tried is clearly too high: the upper end is open"
        if self.low == 0:
            return "no rate tried holds clearly: the lower end is open"
        return ""

    def __str__(self) -> str:
        """One line: ``2.31/s (1.9 to 2.7)``."""
        if self.kind == "above":
            return f"at least {self.rate:.3g}/s (the highest rate tried)"
        if self.kind == "below":
            return f"under {self.rate:.3g}/s (the lowest rate tried)"
        return f"{self.rate:.3g}/s ({self.low:.3g} to {self.high:.3g})"


@dataclass(frozen=True)
class RateSearch:
    """Which rate to try next."""

    start: float
    attainment: float = 0.9  # share of requests that must meet all of their SLOs
    probes: int = 10  # in all

    def next(self, seen: Sequence[Probe]) -> float | None:
        """The rate of the next probe; None when it is over.

        ``seen``: probes so far, at rates that this has chosen.
        """
        if len(seen) >= self.probes:
            return None
        if not seen:
            return self.start
        places = [self._place(probe.rate) for probe in seen]
        held, missed = self._bracket(seen)
        # Two doublings first; whoever starts further off than that goes by fours.
        leap = STEPS_PER_DOUBLING * (1 if len(seen) <= 2 else 2)
        if missed is None:
            return self._rate(max(places) + leap)
        if held is None:
            lower = self._rate(min(places) - leap)
            return lower if lower >= self.start * LOWEST else None
        if missed - held > 1:
            return self._rate((held + missed) // 2)
        tried = Counter(places)
        around = (held, missed, held - 1, missed + 1)
        return self._rate(min(around, key=lambda place: tried[place]))  # the first of equals

    def _bracket(self, seen: Sequence[Probe]) -> tuple[int | None, int | None]:
        """Places on the grid of the highest rate that holds and the lowest that does not."""
        curve = attainment_curve(seen)
        held = [place for place, share in zip(curve.rates, curve.fit, strict=True)
                if share >= self.attainment]  # fmt: skip
        missed = [place for place in curve.rates if place not in held]
        low, high = max(held, default=None), min(missed, default=None)
        return (
            None if low is None else self._place(low),
            None if high is None else self._place(high),
        )

    def _place(self, rate: float) -> int:
        return round(math.log2(rate / self.start) * STEPS_PER_DOUBLING)

    def _rate(self, place: int) -> float:
        return float(self.start * 2 ** (place / STEPS_PER_DOUBLING))


@dataclass(frozen=True)
class Curve:
    """Attainment by rate; all arrays of one length, rates ascending."""

    rates: Array
    met: Array
    total: Array
    fit: Array  # isotonic: never rises
    effect: Array  # design effect: so many requests say as much as one independent one


def attainment_curve(probes: Sequence[Probe]) -> Curve:
    """Probes of the same rate put together, and the falling curve that fits them best."""
    by_rate: dict[float, list[tuple[Array, Array]]] = {}
    for probe in sorted(probes, key=lambda probe: probe.rate):
        if probe.met:
            by_rate.setdefault(probe.rate, []).append(probe.stretches())
    met = np.array([sum(part.sum() for part, _ in parts) for parts in by_rate.values()])
    total = np.array([sum(part.sum() for _, part in parts) for parts in by_rate.values()])
    fit = falling(met / total, total)
    return Curve(np.array(list(by_rate)), met, total, fit, _effect(by_rate.values(), fit))


def falling(values: Array, weights: Array) -> Array:
    """The sequence that never rises and is nearest to ``values`` (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        pool = (value, weight, 1)
        while pools and pools[-1][0] < pool[0]:
            mean, other, length = pools.pop()
            both = pool[1] + other
            pool = ((pool[0] * pool[1] + mean * other) / both, both, pool[2] + length)
        pools.append(pool)
    return np.array(list(chain.from_iterable([mean] * length for mean, _, length in pools)))


def max_rate(
    probes: Sequence[Probe], attainment: float = 0.9, rng: np.random.Generator | None = None
) -> Estimate:
    """The highest rate whose attainment holds, with a 95 % interval.

    Raises ValueError if no probe has a request whose outcome is known.
    """
    curve = attainment_curve(probes)
    if not len(curve.rates):
        raise ValueError("no request's outcome is known: there is nothing to estimate from")
    lows, highs = draw_brackets(curve, attainment, rng or np.random.default_rng(0))
    low = float(np.quantile(lows, 0.025, method="lower"))
    high = float(np.quantile(highs, 0.975, method="higher"))
    below, above = _bracket(curve.rates, curve.fit, attainment)
    if above == math.inf:
        return Estimate(below, min(low, below), math.inf, "above")
    if below == 0:
        return Estimate(above, 0.0, max(high, above), "below")
    return Estimate(_crossing(curve, attainment, below, above), min(low, below), max(high, above))


def draw_brackets(
    curve: Curve, attainment: float, rng: np.random.Generator, draws: int = DRAWS
) -> tuple[Array, Array]:
    """For each draw, between which rates it crosses: the highest that holds (0: none) and the
    lowest that does not (infinite: none).
    """
    met, total = curve.met / curve.effect, curve.total / curve.effect
    # 1/2: Jeffreys' prior, so that ten of ten is not certainty
    shares = rng.beta(met + 0.5, total - met + 0.5, (draws, len(curve.rates)))
    found = [_bracket(curve.rates, falling(share, total), attainment) for share in shares]
    return np.array([low for low, _ in found]), np.array([high for _, high in found])


def _bracket(rates: Array, fit: Array, attainment: float) -> tuple[float, float]:
    held = int((fit >= attainment).sum())  # the fit falls: these are the first
    return (
        float(rates[held - 1]) if held else 0.0,
        float(rates[held]) if held < len(rates) else math.inf,
    )


def _crossing(curve: Curve, attainment: float, below: float, above: float) -> float:
    """Between two rates, by a straight line over the logarithm of the rate."""
    a, b = (float(curve.fit[np.searchsorted(curve.rates, rate)]) for rate in (below, above))
    return float(below * (above / below) ** ((a - attainment) / (a - b)))


def _effect(by_rate: Iterable[Sequence[tuple[Array, Array]]], fit: Array) -> Array:
    """The design effect at each rate, from how the stretches of a rate vary, all rates pooled.

    Where all requests meet, or none, stretches do not vary: it is 1 there. But a rate next to one
    where they do may just have been lucky, so it is taken to vary like that neighbour.
    """
    varied = expected = 0.0
    for parts in by_rate:
        met, total = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        share = met.sum() / total.sum()
        freedom = len(met) / (len(met) - 1)
        varied += float(((met - total * share) ** 2).sum() * freedom)
        expected += float(share * (1 - share) * total.sum())
    pooled = max(1.0, varied / expected) if expected else 1.0
    doubt = fit * (1 - fit)
    doubt = np.maximum(doubt, np.append(doubt[1:], doubt[-1:]))
    scale = 0.09  # of an attainment of 90 %, where it matters
    return 1 + (pooled - 1) * np.minimum(1.0, doubt / scale)
