"""The seam between the hand-off and the wire that carries the bytes.

A transport reads spans and seals of a remote pool into the local one. It knows nothing of tickets, generations or
deadlines: :mod:`kvtransfer.handoff` decides what is read, verified and retried.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kvtransfer.region import Region
from kvtransfer.ticket import AgentCard


class Part(Enum):
    """Which memory a read touches."""

    KV = "kv"  # whole spans, trailer included, into the same-sized local spans
    SEALS = "seals"  # the peer's seal array entries, into the local staging array at the *local* block's index


class Status(Enum):
    """How a read ended. Only these settle it: nothing lands in local memory afterwards."""

    DONE = "done"
    FAILED = "failed"  # includes a remote that disconnected


@dataclass(frozen=True)
class Completion:
    """One finished read. ``reason`` says why it failed, empty when it is done."""

    handle: int
    status: Status
    reason: str = ""


class Transport(Protocol):
    """One-sided reads of remote blocks. Used from one thread, except :meth:`close`."""

    name: str

    def register(self, region: Region) -> bytes:
        """Make the pool and its seals readable by peers; returns the metadata for this worker's AgentCard."""

    def connect(self, peer: AgentCard) -> None:
        """Learn a peer (idempotent). Raises TransportError, or PeerGone when it is known to be dead."""

    def pull(self, peer: AgentCard, part: Part, blocks: Sequence[tuple[int, int]]) -> int:
        """Start reading ``(remote block, local block)`` pairs; returns a handle. Raises TransportError or PeerGone.

        Never blocks on the peer. A handle is reported by :meth:`poll` exactly once, however it ends.
        """

    def poll(self) -> list[Completion]:
        """Reads that ended since the last call. Never blocks."""

    def forget(self, peer: AgentCard) -> None:
        """Drop a peer that has no read in flight (raises TransportError otherwise)."""

    def close(self) -> None:
        """Stop serving and reading; settles everything. Idempotent."""
