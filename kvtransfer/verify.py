"""Are these the ticket's blocks? Asked after every pull, before a token is made of them (pure).

Three guards, each a function of its own. The trailer came with the data: it proves that the right
block arrived, filled. The seal was read after the data: it proves that the block had not been
handed out anew meanwhile. The checksum, where there is one, proves that no byte was damaged.

The memory compares all stamps at once with what it was told to expect before the pull: the caches
are cold after the data, and each Python object that need not be touched counts. Only when something
differs are the guards asked block by block, and say what.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from kvtransfer.layout import Stamp
from kvtransfer.ticket import Ticket


class BlockMemory(Protocol):
    """What a pull needs of the local pool; :class:`kvtransfer.region.Region` has it."""

    num_blocks: int
    span_bytes: int  # that move per block

    def expect(
        self, blocks: Sequence[int], epoch: int, generations: Sequence[int], ids: Sequence[int]
    ) -> Any:
        """Zero trailers and staged seals of ``blocks``, into which a peer's ``ids`` will come.

        What it returns is for :meth:`has`.
        """

    def has(self, expected: Any) -> bool:
        """Whether all trailers and staged seals are what was expected. False proves nothing."""

    def trailers(self, blocks: Sequence[int]) -> list[Stamp]:
        """What the blocks' trailers say."""

    def staged_seals(self, blocks: Sequence[int]) -> list[Stamp]:
        """What the producer's seals said, read after the data."""

    def checksum(self, blocks: Sequence[int]) -> list[int]:
        """Sum of each block's KV."""


def first_difference(
    ticket: Ticket,
    indices: Sequence[int],
    blocks: Sequence[int],
    memory: BlockMemory,
    expected: Any,
    checksums: bool,
) -> str:
    """Why the local ``blocks`` are not those at ``indices`` of the ticket, or ""."""
    if not checksums and memory.has(expected):
        return ""
    trailers = memory.trailers(blocks)
    seals = memory.staged_seals(blocks)
    for index, trailer, seal in zip(indices, trailers, seals, strict=True):
        block, generation = ticket.block_ids[index], ticket.generations[index]
        if not trailer_matches(trailer, ticket.epoch, generation, block):
            return f"block {block} of {ticket.worker_id} is not the ticket's: {trailer}"
        if not seal_matches(seal, ticket.epoch, generation):
            return f"block {block} of {ticket.worker_id} was reused meanwhile: {seal}"
    if checksums:
        for trailer, found in zip(trailers, memory.checksum(blocks), strict=True):
            if not checksum_matches(trailer, found):
                return f"block {trailer.block_id} arrived damaged: its checksum differs"
    return ""


def trailer_matches(trailer: Stamp, epoch: int, generation: int, block: int) -> bool:
    """Whether the arrived span is this block of this incarnation, in this generation."""
    return (trailer.epoch, trailer.generation, trailer.block_id) == (epoch, generation, block)


def seal_matches(seal: Stamp, epoch: int, generation: int) -> bool:
    """Whether the block still had this generation after its data was read."""
    return (seal.epoch, seal.generation) == (epoch, generation)


def checksum_matches(trailer: Stamp, found: int) -> bool:
    """Whether the KV adds up to what its producer computed, if it did."""
    return trailer.checksum in (0, found)
