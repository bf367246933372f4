"""How long prompts and answers are: numbers of tokens, fixed or drawn from a distribution.

Written as text in flags and scenario files: ``128``, ``uniform:64..256``, ``normal:128,32``,
``lognormal:128,0.8..1024``. Knows nothing of what is counted; turns are counted by it too.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Numbers = tuple[float, ...]
Floats = NDArray[np.float64]

_GRID = 4096  # points at which a distribution with a tail is averaged


@dataclass(frozen=True)
class Lengths:
    """A distribution of whole numbers, 1 at the least. Made by `parse_lengths`."""

    kind: str
    numbers: Numbers
    limit: int = 0  # what is drawn beyond it becomes this much; 0: no limit

    def sample(self, rng: np.random.Generator, n: int) -> NDArray[np.int64]:
        """Draw n lengths."""
        return self._at(rng.random(n))

    @functools.cached_property
    def mean(self) -> float:
        """Of what `sample` gives, that is rounded and clipped."""
        return float(self._at((np.arange(_GRID) + 0.5) / _GRID).mean())

    @property
    def maximum(self) -> int | None:
        """The longest there is; None for a distribution with a tail, which may be cut anywhere."""
        return None if _KINDS[self.kind].has_tail else round(max(self.numbers))

    def scaled(self, factor: float) -> "Lengths":
        """The same distribution of lengths ``factor`` times as long, still 1 at the least."""
        kind = _KINDS[self.kind]
        numbers = [max(1.0, self.numbers[0] * factor)]
        for number in self.numbers[1:]:
            numbers.append(number * factor if kind.scales else number)
        if not kind.has_tail:
            numbers = [max(1.0, float(round(number))) for number in numbers]
        limit = max(1, round(self.limit * factor)) if self.limit else 0
        return replace(self, numbers=tuple(numbers), limit=limit)

    def __str__(self) -> str:
        numbers = [positional(number) for number in self.numbers]
        if self.kind == "fixed":
            return numbers[0]
        joined = (".." if self.kind == "uniform" else ",").join(numbers)
        return f"{self.kind}:{joined}" + (f"..{self.limit}" if self.limit else "")

    def _at(self, quantile: Floats) -> NDArray[np.int64]:
        """Lengths at quantiles in [0, 1)."""
        raw = _KINDS[self.kind].lengths_at(self.numbers, quantile)
        return np.clip(np.rint(raw), 1, self.limit or None).astype(np.int64)


def parse_lengths(text: str | int) -> Lengths:
    """Read lengths as they are written in flags and files.

    ========================  =====================================================================
    ``128``                   always 128
    ``uniform:64..256``       each whole number of the range, both ends too, is as likely
    ``choice:64,64,512``      one of these; one that stands there twice is twice as likely
    ``normal:128,32``         mean and standard deviation
    ``lognormal:128,0.8``     mean, and standard deviation of the logarithm: a long tail
    ``exponential:128``       mean
    ========================  =====================================================================

    The last three may end in ``..MAX``: what is drawn beyond it becomes MAX. Raises ValueError that
    names what is allowed.
    """
    written = str(text).strip()
    kind, colon, rest = written.partition(":")
    if not colon:
        kind, rest = "fixed", written
    if kind not in _KINDS or (colon and kind == "fixed"):
        raise ValueError(f"lengths {written!r}: no distribution {kind!r}; want {_FORMS}")
    match = re.fullmatch(_KINDS[kind].pattern, rest.replace(" ", ""))
    if match is None:
        want = _KINDS[kind].form if colon else _FORMS
        raise ValueError(f"lengths {written!r}: want {want}")
    body, limit = match["body"], match.groupdict().get("limit")
    lengths = Lengths(kind, tuple(map(float, re.split(r",|\.\.", body))), int(limit or 0))
    _check(written, lengths, limit is not None)
    return lengths


def positional(number: float) -> str:
    """Without an exponent, and no digit more or less than it takes to read the same number."""
    return np.format_float_positional(number, trim="-")


def _check(written: str, lengths: Lengths, has_limit: bool) -> None:
    numbers = lengths.numbers
    shortest = numbers[0] if _KINDS[lengths.kind].has_tail else min(numbers)
    if shortest < 1:
        raise ValueError(f"lengths {written!r}: a length is 1 at the least")
    if lengths.kind == "uniform" and numbers[0] > numbers[1]:
        raise ValueError(f"lengths {written!r}: the range's end is before its beginning")
    if has_limit and lengths.limit < numbers[0]:
        raise ValueError(f"lengths {written!r}: the limit {lengths.limit} is below the mean")


@dataclass(frozen=True)
class _Kind:
    form: str  # as shown to users
    pattern: str  # of what follows the colon
    lengths_at: Callable[[Numbers, Floats], Floats]  # parameters, quantiles → lengths
    has_tail: bool = False  # the first number is the mean; otherwise all are lengths
    scales: bool = True  # the second number is in tokens too


def _fixed(numbers: Numbers, quantile: Floats) -> Floats:
    return np.full(quantile.shape, numbers[0])


def _uniform(numbers: Numbers, quantile: Floats) -> Floats:
    low, high = numbers
    return low + np.floor(quantile * (high - low + 1))


def _choice(numbers: Numbers, quantile: Floats) -> Floats:
    return np.array(numbers)[(quantile * len(numbers)).astype(np.int64)]


def _standard_normal(quantile: Floats) -> Floats:
    inv_cdf = NormalDist().inv_cdf
    return np.array([inv_cdf(q) for q in np.maximum(quantile, 1e-16).tolist()])


def _normal(numbers: Numbers, quantile: Floats) -> Floats:
    mean, deviation = numbers
    return mean + deviation * _standard_normal(quantile)


def _lognormal(numbers: Numbers, quantile: Floats) -> Floats:
    mean, sigma = numbers
    return mean * np.exp(sigma * _standard_normal(quantile) - sigma * sigma / 2)


def _exponential(numbers: Numbers, quantile: Floats) -> Floats:
    return -numbers[0] * np.log1p(-quantile)


_WHOLE = r"\d{1,9}"
_REAL = r"\d{1,9}(?:\.\d+)?"
_LIMIT = rf"(?:\.\.(?P<limit>{_WHOLE}))?"

_KINDS = {
    "fixed": _Kind("N", rf"(?P<body>{_WHOLE})", _fixed),
    "uniform": _Kind("uniform:A..B", rf"(?P<body>{_WHOLE}\.\.{_WHOLE})", _uniform),
    "choice": _Kind("choice:A,B,...", rf"(?P<body>{_WHOLE}(?:,{_WHOLE})*)", _choice),
    "normal": _Kind("normal:MEAN,STD[..MAX]", rf"(?P<body>{_REAL},{_REAL}){_LIMIT}", _normal, True),
    "lognormal": _Kind(
        "lognormal:MEAN,SIGMA[..MAX]",
        rf"(?P<body>{_REAL},{_REAL}){_LIMIT}",
        _lognormal,
        True,
        False,
    ),
    "exponential": _Kind(
        "exponential:MEAN[..MAX]", rf"(?P<body>{_REAL}){_LIMIT}", _exponential, True
    ),
}
_FORMS = ", ".join(kind.form for kind in _KINDS.values())
