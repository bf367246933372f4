"""Doubles of the hand-off: a pool of plain Python, and a transport that does what a test says.

A read of the transport lands move by move, in any order, as long as it is not over: data and
trailer of a block apart, as on a wire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from kvtransfer.errors import TransportError
from kvtransfer.layout import Stamp
from kvtransfer.ticket import AgentCard, Ticket
from kvtransfer.transport import Completion, Part, Status

EPOCH = 2**64 - 7
CARD = AgentCard("p-0", EPOCH, b"layout", 64, "scripted", b"")


class PlainMemory:
    """Stamps and data of a pool, as :class:`kvtransfer.region.Region` keeps them in tensors."""

    span_bytes = 100

    def __init__(self, num_blocks: int = 64) -> None:
        self.num_blocks = num_blocks
        self.data: dict[int, int] = {}
        self.stamps: dict[int, Stamp] = {}
        self.seals: dict[int, Stamp] = {}
        self.staging: dict[int, Stamp] = {}

    def write(self, block: int, generation: int, value: int, checksum: int = 0) -> None:
        self.data[block] = value
        self.stamps[block] = Stamp(EPOCH, generation, block, checksum)
        self.seals[block] = Stamp(EPOCH, generation)

    def open(self, block: int, generation: int) -> None:
        self.seals[block] = Stamp(EPOCH, generation)

    def expect(self, blocks: Sequence[int], *stamps: Any) -> None:
        for block in blocks:
            self.stamps[block] = self.staging[block] = Stamp(0, 0, 0)

    def has(self, expected: None) -> bool:
        return False  # ask block by block

    def trailers(self, blocks: Sequence[int]) -> list[Stamp]:
        return [self.stamps[block] for block in blocks]

    def staged_seals(self, blocks: Sequence[int]) -> list[Stamp]:
        return [self.staging[block] for block in blocks]

    def checksum(self, blocks: Sequence[int]) -> list[int]:
        return [self.data[block] for block in blocks]


@dataclass
class Read:
    """One read that is not over, and what of it has not landed yet."""

    part: Part
    blocks: list[tuple[int, int]]
    missing: list[tuple[str, int, int]]  # data, stamp or seal, from which block, to which one
    moved: int = 0


class ScriptedTransport:
    """Reads land and end when the test says so."""

    name = "scripted"

    def __init__(
        self,
        remote: PlainMemory,
        local: PlainMemory,
        on_land: Callable[[int, int], None] = lambda handle, block: None,
    ) -> None:
        self.remote, self.local = remote, local
        self.reads: dict[int, Read] = {}
        self.completions: list[Completion] = []
        self.abandoned: list[int] = []
        self.forgotten: list[AgentCard] = []
        self.refuse: Exception | None = None
        self.closed = False
        self._on_land = on_land
        self._handles = count(1)

    def register(self, region: object) -> bytes:
        return b""

    def connect(self, peer: AgentCard) -> None:
        if self.closed:
            raise TransportError("the transport is closed")

    def pull(self, peer: AgentCard, part: Part, blocks: Sequence[tuple[int, int]]) -> int:
        if self.refuse is not None:
            raise self.refuse
        handle = next(self._handles)
        kinds = ("data", "stamp") if part is Part.KV else ("seal",)
        missing = [(kind, theirs, ours) for theirs, ours in blocks for kind in kinds]
        self.reads[handle] = Read(part, list(blocks), missing)
        return handle

    def land(self, handle: int, index: int) -> None:
        """One move arrives: what the remote memory holds just now."""
        read = self.reads[handle]
        kind, theirs, ours = read.missing.pop(index)
        self._on_land(handle, ours)
        if kind == "data":
            self.local.data[ours] = self.remote.data[theirs]
        elif kind == "stamp":
            self.local.stamps[ours] = self.remote.stamps[theirs]
        else:
            self.local.staging[ours] = self.remote.seals[theirs]
        read.moved += 1

    def finish(
        self, handle: int, status: Status = Status.DONE, never: frozenset[int] = frozenset()
    ) -> None:
        """The rest arrives, except for the local blocks ``never``; the read is over."""
        read = self.reads[handle]
        for _ in range(len(read.missing)):
            if read.missing[0][2] in never:
                read.missing.pop(0)
            else:
                self.land(handle, 0)
        self.end(handle, status)

    def end(self, handle: int, status: Status) -> None:
        """The read is over, with what has arrived of it."""
        del self.reads[handle]
        reason = "" if status is Status.DONE else "the peer disconnected"
        self.completions.append(Completion(handle, status, reason))

    def poll(self) -> list[Completion]:
        completions, self.completions = self.completions, []
        return completions

    def moved(self, handle: int) -> int:
        return self.reads[handle].moved if handle in self.reads else 0

    def abandon(self, handle: int) -> None:
        self.abandoned.append(handle)

    def forget(self, peer: AgentCard) -> None:
        assert not self.reads
        self.forgotten.append(peer)

    def close(self) -> None:
        self.reads.clear()
        self.completions.clear()
        self.closed = True


def make_ticket(blocks: Sequence[tuple[int, int]], first_block: int = 0) -> Ticket:
    """The ticket of ``(block, generation)`` pairs."""
    ids, generations = tuple(b for b, _ in blocks), tuple(g for _, g in blocks)
    return Ticket(
        b"t" * 16,
        "p-0",
        EPOCH,
        ids,
        generations,
        b"layout",
        16 * (first_block + len(ids)),
        b"prefix",
        first_block,
    )
