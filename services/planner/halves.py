"""What each worker says of the profile, and how that is put together (pure).

A worker times what its own pool does: a prefill worker has the coefficients ``prefill_*``, a decode
worker ``decode_*``, a mixed one all six. It reports them as flat numbers among its others. The
planner's profile is the mean of all reports, each half of its own pool: models are linear in their
coefficients, so that is the mean of the times too. As long as nobody has said anything about one
half there is no profile. Who decides keeps the last one for when a pool has gone to zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from math import isfinite
from statistics import fmean

from services.planner.profile import Profile

Half = Mapping[str, float]
"""Coefficients by the names of Profile's fields; of one kind of step, or of both."""

FIELDS = {
    kind: tuple(f.name for f in fields(Profile) if f.name.startswith(f"{kind}_"))
    for kind in ("prefill", "decode")
}
PREFIX = "profile_"  # of a coefficient among a worker's numbers


def kinds_of(role: str) -> tuple[str, ...]:
    """The halves that workers of a role know."""
    return tuple(FIELDS) if role == "mixed" else (role,)


def as_stats(half: Half) -> dict[str, float]:
    """For a worker's report."""
    return {PREFIX + name: float(value) for name, value in half.items()}


def from_stats(reports: Iterable[Mapping[str, float]]) -> Profile | None:
    """Of the reports of all workers, whatever else is in them; None while a half is missing."""
    found: dict[str, list[float]] = {}
    for report in reports:
        for names in FIELDS.values():
            values = [report.get(PREFIX + name, -1.0) for name in names]
            if all(isfinite(value) and value >= 0 for value in values) and any(values):
                for name, value in zip(names, values, strict=True):
                    found.setdefault(name, []).append(value)
    return joined({name: fmean(values) for name, values in found.items()})


def joined(*halves: Half) -> Profile | None:
    """Both halves together; None if one is missing."""
    known = {name: value for half in halves for name, value in half.items()}
    names = [name for kind in FIELDS.values() for name in kind]
    return Profile(**{name: known[name] for name in names}) if known.keys() >= set(names) else None


def with_zeros(half: Half) -> Profile:
    """A profile that is right for steps of the half's kind only."""
    return Profile(**{f.name: half.get(f.name, 0.0) for f in fields(Profile)})
