"""What a simulation leaves behind: what became of each request, and of both pools (pure)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from router.policy import Demand
from services.planner.sim_pool import Place, World
from services.planner.workload import Arrival, Trace

ROLES = ("prefill", "decode")
Sizes = dict[str, int]
"""Workers by role."""


@dataclass(eq=False)
class Request:
    """One request and what became of it."""

    number: int
    asked: Arrival
    demand: Demand
    bypassed: int = 0
    prefill: Place | None = None
    decode: Place | None = None
    first_at: float | None = None
    last_at: float | None = None
    failed: str = ""

    @property
    def key(self) -> tuple[bytes, int]:
        return self.number.to_bytes(4, "little"), 1

    @property
    def ttft_s(self) -> float | None:
        """To the first token; None: it never came."""
        return None if self.first_at is None else self.first_at - self.asked.at

    @property
    def tpot_s(self) -> float | None:
        """Of each further token, on average."""
        if self.first_at is None or self.last_at is None:
            return None
        return (self.last_at - self.first_at) / (self.asked.answer - 1)


@dataclass(frozen=True)
class Sample:
    """Both pools at one moment."""

    at: float
    target: Sizes
    ready: Sizes
    alive: Sizes  # those that start or leave included
    queued: int


@dataclass
class Run:
    """What a simulation leaves behind."""

    trace: Trace
    world: World
    requests: list[Request]
    hours: dict[str, float]
    samples: list[Sample] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        """Share of requests with the first token in time. One that failed has none."""
        return self._share(self.ttft_good)

    @property
    def tpot(self) -> float:
        """Share of requests with further tokens in time."""
        return self._share(self.tpot_good)

    @property
    def both(self) -> float:
        """Share of requests that were in time in both."""
        return self._share(lambda r: self.ttft_good(r) and self.tpot_good(r))

    def ttft_good(self, request: Request) -> bool:
        ttft_s = request.ttft_s
        return ttft_s is not None and ttft_s <= self.world.router.slo_ttft_s

    def tpot_good(self, request: Request) -> bool:
        tpot_s = request.tpot_s
        return tpot_s is not None and tpot_s <= self.world.router.slo_tpot_s

    def _share(self, is_good: Callable[[Request], bool]) -> float:
        return sum(map(is_good, self.requests)) / max(1, len(self.requests))

    def changes(self, role: str) -> list[tuple[float, int]]:
        """(when, by how much) a target was changed."""
        pairs = zip(self.samples, self.samples[1:], strict=False)
        found = ((new.at, new.target[role] - old.target[role]) for old, new in pairs)
        return [(at, by) for at, by in found if by]
