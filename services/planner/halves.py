"""What each worker says of the profile (pure).

A worker times what its own pool does: a prefill worker has the coefficients ``prefill_*``, a decode
worker ``decode_*``, a mixed one all six. It reports them as flat numbers among its others; who
decides takes each half of its own pool, see ``Signals.profile``, and remembers it when the pool has
gone to zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from math import isfinite

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


def from_stats(stats: Mapping[str, float]) -> dict[str, float]:
    """What a report says of the profile, whatever else is in it; a half that is not whole, or makes
    no sense, is left out.
    """
    found: dict[str, float] = {}
    for names in FIELDS.values():
        half = {name: stats.get(PREFIX + name, -1.0) for name in names}
        if all(isfinite(value) and value >= 0 for value in half.values()) and any(half.values()):
            found |= half
    return found


def with_zeros(half: Half) -> Profile:
    """A profile that is right for steps of the half's kind only."""
    return Profile(**{f.name: half.get(f.name, 0.0) for f in fields(Profile)})
