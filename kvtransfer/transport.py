"""The seam between the hand-off and the wire that carries the bytes.

A transport reads spans and seals of a remote pool into the local one. It knows nothing of tickets,
generations or deadlines: :mod:`kvtransfer.importer` decides what is read, verified and given up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from kvtransfer.errors import TransportError
from kvtransfer.ticket import AgentCard

if TYPE_CHECKING:  # region imports torch; whoever only names the seam should not
    from kvtransfer.region import Region


class Part(Enum):
    """Which memory a read touches."""

    KV = "kv"  # whole spans, trailer included, into the same-sized local spans
    SEALS = "seals"  # the peer's seals, into the local staging array at the *local* block's index


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

    def register(self, region: "Region") -> bytes:
        """Make the pool and its seals readable by peers; returns the metadata for the AgentCard."""

    def connect(self, peer: AgentCard) -> None:
        """Learn a peer (idempotent). Raises TransportError, or PeerGone when it is known dead."""

    def pull(self, peer: AgentCard, part: Part, blocks: Sequence[tuple[int, int]]) -> int:
        """Start reading ``(remote block, local block)`` pairs of a peer; returns a handle.

        Raises TransportError or PeerGone when nothing was started (also for a peer that was not
        connected before). Never blocks on the peer. A handle is reported by :meth:`poll` exactly
        once, when nothing can land any more.
        """

    def poll(self) -> list[Completion]:
        """Reads that ended since the last call. Never blocks."""

    def moved(self, handle: int) -> int:
        """A number that grows while bytes of this read arrive, or others that it waits behind.

        Only for a handle that :meth:`poll` has not reported. Never blocks.
        """

    def abandon(self, handle: int) -> None:
        """The bytes of this read are not wanted: end it early where that is possible.

        :meth:`poll` still reports it, once it is settled. A handle already reported is ignored.
        """

    def forget(self, peer: AgentCard) -> None:
        """Drop a peer that has no read in flight (raises TransportError otherwise)."""

    def close(self) -> None:
        """Stop serving and reading; settles everything. Idempotent."""


def check_peer(name: str, region: "Region", peer: AgentCard) -> None:
    """Raise TransportError unless ``peer`` speaks this transport and its KV has our layout."""
    if peer.transport != name:
        raise TransportError(
            f"{peer.worker_id} is reached over {peer.transport}, not {name}: start both workers "
            "with the same transport"
        )
    if peer.fingerprint != region.layout.fingerprint():
        raise TransportError(f"the KV layout of {peer.worker_id} is not ours")


def check_blocks(blocks: Sequence[tuple[int, int]], num_remote: int, num_local: int) -> None:
    """Raise TransportError unless all ``(remote block, local block)`` pairs lie in both pools."""
    for remote, local in blocks:
        if not (0 <= remote < num_remote and 0 <= local < num_local):
            raise TransportError(
                f"block {remote} → {local} is outside of the pools of {num_remote} and "
                f"{num_local} blocks"
            )
