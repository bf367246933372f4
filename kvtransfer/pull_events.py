"""What an importer says of a pull (pure): what became of it, why, and how long its phases took."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


@dataclass(frozen=True)
class PullTimes:
    """Seconds of each phase of a pull that arrived, on the importer's clock."""

    queue_s: float = 0.0  # from when it was asked for to when its read was begun
    wire_s: float = 0.0  # the read of the blocks
    seals_s: float = 0.0  # that of their seals, and the comparison

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.queue_s + self.wire_s + self.seals_s


class Cause(Enum):
    """Of a failure, in one word."""

    FAILED = "failed"  # the read failed, or what it brought is not what the ticket says
    STALLED = "stalled"  # nothing arrived for long
    EXPIRED = "expired"  # the deadline passed


@dataclass(frozen=True)
class Arrived:
    """All blocks are here and verified."""

    key: bytes
    blocks: tuple[int, ...]
    num_bytes: int
    times: PullTimes = field(default=PullTimes(), compare=False)


@dataclass(frozen=True)
class PullFailed:
    """The blocks hold nothing of use. Not settled: bytes may still land in them."""

    key: bytes
    blocks: tuple[int, ...]
    reason: str
    settled: bool
    cause: Cause = Cause.FAILED


@dataclass(frozen=True)
class PullAborted:
    """The caller gave up. Not settled: bytes may still land in the blocks."""

    key: bytes
    blocks: tuple[int, ...]
    settled: bool


@dataclass(frozen=True)
class Settled:
    """Nothing lands in the blocks of an unsettled pull any more."""

    key: bytes
    blocks: tuple[int, ...]


Event = Arrived | PullFailed | PullAborted | Settled
