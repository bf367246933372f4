"""Loads of some hours, drawn from a seed: who asks when for what (pure).

Arrivals are a Poisson process of a rate that changes with time; lengths are log-normal. Two kinds
of requests are mixed, one heavy in its prompt and one in its answer, in shares that may change too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, pi, sin
from random import Random

Rate = Callable[[float], float]
"""Of a moment; requests per second, or a share."""


@dataclass(frozen=True)
class Kind:
    """A kind of requests, by its mean lengths in tokens."""

    prompt: float
    answer: float
    sigma: float = 0.5  # standard deviation of a length's logarithm
    longest: float = 2.5  # times the mean; what is drawn beyond it is drawn again


@dataclass(frozen=True)
class Arrival:
    """One request."""

    at: float
    prompt: int  # tokens
    answer: int  # tokens, two or more


@dataclass(frozen=True)
class Trace:
    """A load. ``rate`` and ``heavy`` are what it was drawn from, for plots."""

    name: str
    duration_s: float
    arrivals: tuple[Arrival, ...]
    rate: Rate
    heavy: Rate  # share of the first kind, heavy in its prompt


PROMPTS = Kind(prompt=1200, answer=80)
ANSWERS = Kind(prompt=300, answer=320)


def draw(
    name: str,
    duration_s: float,
    rate: Rate,
    heavy: Rate = lambda _: 0.5,
    kinds: tuple[Kind, Kind] = (PROMPTS, ANSWERS),
    seed: int = 1,
) -> Trace:
    """A trace of these rates. They are looked at once a second to find the highest."""
    random = Random(f"{name} {seed}")
    highest = max(rate(float(second)) for second in range(int(duration_s) + 1)) * 1.001
    arrivals = []
    at = random.expovariate(highest)
    while at < duration_s:
        if random.random() * highest < rate(at):  # thinned
            kind = kinds[0] if random.random() < heavy(at) else kinds[1]
            lengths = (_length(mean, kind, random) for mean in (kind.prompt, kind.answer))
            prompt, answer = lengths
            arrivals.append(Arrival(at, prompt, max(2, answer)))
        at += random.expovariate(highest)
    return Trace(name, duration_s, tuple(arrivals), rate, heavy)


def _length(mean: float, kind: Kind, random: Random) -> int:
    while True:
        drawn = mean * exp(random.gauss(-(kind.sigma**2) / 2, kind.sigma))
        if drawn <= kind.longest * mean:
            return max(1, round(drawn))


# --- rates ----------------------------------------------------------------------------------------


def steps(low: float, high: float, each_s: float) -> Rate:
    """Low, high, low ..., for so long each."""
    return lambda at: high if int(at / each_s) % 2 else low


def ramp(low: float, high: float, duration_s: float) -> Rate:
    """Evenly up, and down again from the middle on."""
    return lambda at: low + (high - low) * (1 - abs(2 * at / duration_s - 1))


def sine(low: float, high: float, period_s: float) -> Rate:
    """From the lowest point on."""
    return lambda at: low + (high - low) * (1 - sin(2 * pi * at / period_s + pi / 2)) / 2


def bursts(
    base: float, height: float, every_s: float, lasts_s: float, rise_s: float = 60.0
) -> Rate:
    """``height`` more than the base, now and then; it comes and goes within ``rise_s``."""

    def rate(at: float) -> float:
        within = at % every_s - (every_s - lasts_s) / 2
        edge = min(within, lasts_s - within) / rise_s
        return base + height * min(max(edge, 0.0), 1.0)

    return rate


def turns(low: float, high: float, period_s: float) -> Rate:
    """A share that goes from low to high and back, and stays a while at either end."""
    wave = sine(-0.3, 1.3, period_s)
    return lambda at: low + (high - low) * min(max(wave(at), 0.0), 1.0)
