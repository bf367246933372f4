"""Blocks between two pools of one process: for tests and for serving without a second process.

The copy runs inside :meth:`MemoryTransport.pull`. Knows no sockets and no other process.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from kvtransfer.errors import PeerGone, TransportError
from kvtransfer.region import Region
from kvtransfer.ticket import AgentCard
from kvtransfer.transport import Completion, Part, Status, check_blocks, check_peer

_regions: dict[bytes, Region] = {}  # token in a card's metadata → registered pool
_lock = threading.Lock()


class MemoryTransport:
    """Copies between regions that are registered in this process."""

    name = "memory"

    def __init__(self) -> None:
        self._region: Region | None = None
        self._token = b""
        self._next_handle = 0
        self._done: list[Completion] = []

    def register(self, region: Region) -> bytes:
        """Put the pool into the process-wide table; the metadata is its key."""
        self._region, self._token = region, secrets.token_bytes(16)
        with _lock:
            _regions[self._token] = region
        return self._token

    def connect(self, peer: AgentCard) -> None:
        """Check that the peer is a pool of this process."""
        check_peer(self.name, self._local(), peer)
        self._remote(peer)

    def pull(self, peer: AgentCard, part: Part, blocks: Sequence[tuple[int, int]]) -> int:
        """Copy now; the completion waits for :meth:`poll`."""
        local, remote = self._local(), self._remote(peer)
        check_blocks(blocks, remote.num_blocks, local.num_blocks)
        for theirs, ours in blocks:
            if part is Part.KV:
                _copy(local.spans[ours], remote.spans[theirs])
            else:
                _copy(local.staging[ours], remote.seals[theirs])
        self._next_handle += 1
        self._done.append(Completion(self._next_handle, Status.DONE))
        return self._next_handle

    def poll(self) -> list[Completion]:
        """The copies since the last call."""
        done, self._done = self._done, []
        return done

    def moved(self, handle: int) -> int:
        """Nothing more: the copy is over."""
        return 0

    def abandon(self, handle: int) -> None:
        """Nothing to end: the copy is over."""

    def forget(self, peer: AgentCard) -> None:
        """Nothing to drop."""

    def close(self) -> None:
        """Take the pool out of the table."""
        with _lock:
            _regions.pop(self._token, None)
        self._region = None

    def _local(self) -> Region:
        if self._region is None:
            raise TransportError("the memory transport is closed, or has no pool registered")
        return self._region

    def _remote(self, peer: AgentCard) -> Region:
        with _lock:
            region = _regions.get(peer.metadata)
        if region is None:
            raise PeerGone(
                f"{peer.worker_id} has no pool in this process: it was closed, or runs in another "
                "process, which the memory transport cannot reach (use nixl or tcp)"
            )
        return region


def _copy(target: Tensor, source: Tensor) -> None:
    """On the host by numpy, in this thread alone: see :meth:`Region.checksum`."""
    if target.device.type == source.device.type == "cpu":
        np.copyto(target.numpy(), source.numpy())
    else:
        target.copy_(source)
