"""When requests arrive: offsets in seconds from the start of a run, all known before it begins.

Written as text in flags and scenario files: ``constant``, ``poisson``, ``gamma:0.25``,
``bursts:4``, ``ramp:0.5..2``. Knows nothing of what arrives, nor of a clock.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadtest.lengths import positional

Times = NDArray[np.float64]
Numbers = tuple[float, ...]


@dataclass(frozen=True)
class Arrivals:
    """An arrival process, for any rate. Made by `parse_arrivals`."""

    kind: str
    numbers: Numbers = ()

    def times(self, rate: float, duration_s: float, rng: np.random.Generator) -> Times:
        """Sorted offsets in [0, duration_s), at ``rate`` per second on average.

        Ramps go from one end of the duration to the other.
        """
        check_rate(rate)
        if not 0 <= duration_s < math.inf:
            raise ValueError(f"a duration of {duration_s:g} s: want a number of 0 or more")
        found = _KINDS[self.kind].within(self.numbers, rate, duration_s, rng)
        return found[found < duration_s]

    def times_of(self, rate: float, n: int, rng: np.random.Generator) -> Times:
        """Sorted offsets of n arrivals, spread over ``n / rate`` seconds.

        Intervals that are drawn are stretched so that the last arrival comes at ``n / rate``, as
        ``vllm bench serve`` does: the rate is met exactly. At an infinite rate all come at once.
        """
        if rate == math.inf:
            return np.zeros(n)
        check_rate(rate)
        return _KINDS[self.kind].of(self.numbers, rate, n, rng)

    def __str__(self) -> str:
        numbers = [positional(number) for number in self.numbers]
        return ":".join(filter(None, [self.kind, "..".join(numbers)]))


POISSON = Arrivals("poisson")


def check_rate(rate: float) -> None:
    """Raises ValueError for a rate at which nothing can be scheduled."""
    if not 0 < rate < math.inf:
        raise ValueError(f"a rate of {rate:g} requests/s: want a number above 0")


def parse_arrivals(text: str) -> Arrivals:
    """Read an arrival process as it is written in flags and files.

    =====================  ========================================================================
    ``constant``           one each 1 / rate seconds
    ``poisson``            intervals are exponential: nobody knows of the others
    ``gamma:0.25``         intervals are gamma with this shape, the *burstiness* of ``vllm bench
                           serve``: 1 is Poisson, below it comes in clumps, above it more evenly
    ``bursts:4``           groups of 4 at once, each 4 / rate seconds
    ``poisson-bursts:4``   groups of 4 at once, the groups by a Poisson process
    ``ramp:0.5..2``        Poisson; the rate grows evenly from 0.5 to 2 times the rate given
    ``exp-ramp:0.5..2``    the same, growing by a constant factor per second
    =====================  ========================================================================

    Raises ValueError that names what is allowed.
    """
    written = text.strip()
    kind, _, rest = written.partition(":")
    if kind not in _KINDS:
        raise ValueError(f"arrivals {written!r}: no process {kind!r}; want {_FORMS}")
    form = _KINDS[kind].form
    if re.fullmatch(_KINDS[kind].pattern, written) is None:
        raise ValueError(f"arrivals {written!r}: want {form}")
    numbers = tuple(map(float, filter(None, rest.split(".." if "ramp" in kind else ":"))))
    if kind == "ramp" and max(numbers) == 0:
        raise ValueError(f"arrivals {written!r}: a ramp from 0 to 0 sends nothing")
    least = {"ramp": 0.0, "exp-ramp": 0.001, "gamma": 0.01}.get(kind, 1)
    if numbers and min(numbers) < least:
        raise ValueError(f"arrivals {written!r}: want {form} with numbers from {least:g} up")
    return Arrivals(kind, numbers)


# --- one at a time, at intervals -----------------------------------------------------------------


def _gamma_within(numbers: Numbers, rate: float, span: float, rng: np.random.Generator) -> Times:
    """A process that has run for a while before the start: no clump is sure to lie at 0."""
    (shape,) = numbers or (1.0,)
    before = 50 * max(1.0, 1 / shape) / rate
    at, times = -before, np.empty(0)
    while at < span:
        n = math.ceil((span - at) * rate * 1.1) + 16
        more = at + np.cumsum(rng.gamma(shape, 1 / (rate * shape), n))
        at, times = float(more[-1]), np.append(times, more)
    return times[times >= 0]


def _gamma_of(numbers: Numbers, rate: float, n: int, rng: np.random.Generator) -> Times:
    (shape,) = numbers or (1.0,)
    times = np.cumsum(rng.gamma(shape, 1 / (rate * shape), n))
    return times * (n / rate / times[-1]) if n and times[-1] > 0 else times


def _constant_within(numbers: Numbers, rate: float, span: float, _: np.random.Generator) -> Times:
    return _constant_of(numbers, rate, math.ceil(span * rate), _)


def _constant_of(numbers: Numbers, rate: float, n: int, _: np.random.Generator) -> Times:
    return np.asarray(np.arange(n) / rate, dtype=np.float64)


# --- groups at once ------------------------------------------------------------------------------


def _bursts_within(numbers: Numbers, rate: float, span: float, _: np.random.Generator) -> Times:
    """The first group comes half an interval in, when other classes of a mix are under way."""
    size = int(numbers[0])
    groups = math.ceil(span * rate / size - 0.5)
    return np.repeat((np.arange(max(0, groups)) + 0.5) * size / rate, size)


def _bursts_of(numbers: Numbers, rate: float, n: int, _: np.random.Generator) -> Times:
    size = int(numbers[0])
    return np.asarray((np.arange(n) // size + 0.5) * size / rate, dtype=np.float64)


def _poisson_bursts_within(
    numbers: Numbers, rate: float, span: float, rng: np.random.Generator
) -> Times:
    size = int(numbers[0])
    return np.repeat(_gamma_within((), rate / size, span, rng), size)


def _poisson_bursts_of(numbers: Numbers, rate: float, n: int, rng: np.random.Generator) -> Times:
    size = int(numbers[0])
    groups = _gamma_of((), rate / size, math.ceil(n / size), rng)
    return np.repeat(groups, size)[:n]


# --- ramps ---------------------------------------------------------------------------------------


def _ramp_growth(numbers: Numbers, share: Times) -> Times:
    """Where in a ramp [0, 1) a share of its arrivals has come: the inverse of their integral."""
    low, high = numbers
    if low == high:
        return share
    # low t + (high - low) t² / 2 = share (low + high) / 2
    root = np.sqrt(low * low + (high * high - low * low) * share)
    return (root - low) / (high - low)


def _exp_ramp_growth(numbers: Numbers, share: Times) -> Times:
    low, high = numbers
    if low == high:
        return share
    ratio = high / low
    return np.log1p((ratio - 1) * share) / math.log(ratio)


def _ramp_mean(numbers: Numbers) -> float:
    return (numbers[0] + numbers[1]) / 2


def _exp_ramp_mean(numbers: Numbers) -> float:
    low, high = numbers
    return low if low == high else (high - low) / math.log(high / low)


@dataclass(frozen=True)
class _Kind:
    form: str  # as shown to users
    pattern: str
    within: Callable[[Numbers, float, float, np.random.Generator], Times]
    of: Callable[[Numbers, float, int, np.random.Generator], Times]


def _ramp(
    form: str,
    growth: Callable[[Numbers, Times], Times],
    mean: Callable[[Numbers], float],
) -> _Kind:
    """Poisson arrivals of a rate that grows: their number, then each one's place by itself."""

    def spread(numbers: Numbers, n: int, span: float, rng: np.random.Generator) -> Times:
        return span * growth(numbers, np.sort(rng.random(n)))

    def within(numbers: Numbers, rate: float, span: float, rng: np.random.Generator) -> Times:
        return spread(numbers, rng.poisson(rate * mean(numbers) * span), span, rng)

    def of(numbers: Numbers, rate: float, n: int, rng: np.random.Generator) -> Times:
        return spread(numbers, n, n / (rate * mean(numbers)), rng)

    kind = form.partition(":")[0]
    return _Kind(form, rf"{kind}:{_REAL}\.\.{_REAL}", within, of)


_REAL = r"\d{1,9}(?:\.\d+)?"

_KINDS = {
    "constant": _Kind("constant", "constant", _constant_within, _constant_of),
    "poisson": _Kind("poisson", "poisson", _gamma_within, _gamma_of),
    "gamma": _Kind("gamma:SHAPE", rf"gamma:{_REAL}", _gamma_within, _gamma_of),
    "bursts": _Kind("bursts:N", r"bursts:\d{1,6}", _bursts_within, _bursts_of),
    "poisson-bursts": _Kind(
        "poisson-bursts:N", r"poisson-bursts:\d{1,6}", _poisson_bursts_within, _poisson_bursts_of
    ),
    "ramp": _ramp("ramp:A..B", _ramp_growth, _ramp_mean),
    "exp-ramp": _ramp("exp-ramp:A..B", _exp_ramp_growth, _exp_ramp_mean),
}
_FORMS = ", ".join(kind.form for kind in _KINDS.values())
