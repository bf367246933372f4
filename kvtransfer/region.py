"""A worker's KV memory as the hand-off sees it: spans, trailers, seals.

One byte region of ``num_blocks`` spans, and beside it the *seal array*, one ``(epoch, generation)``
pair per block. The trailer at the end of a span proves that the right block arrived, filled; the
seal, read after the data, proves that it was not reused meanwhile. Who may write what, and when, is
the allocator's and the engine's business.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvtransfer.layout import KVLayout, Stamp
from kvtransfer.pool_memory import zeros

_U64 = 0xFFFF_FFFF_FFFF_FFFF

Index = np.ndarray[Any, np.dtype[np.int64]]  # block ids


class _Rows:
    """A few u64 per block, in a tensor of int64 (torch has no u64 arithmetic).

    On the host by numpy, in this thread alone: for a hundred rows that is several times cheaper.
    There a row is one item of a few bytes, for which numpy has its shortest ways.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._row = np.dtype((np.void, 8 * tensor.shape[1]))
        on_host = tensor.device.type == "cpu"
        self._array = tensor.numpy().view(self._row)[:, 0] if on_host else None
        self._zero = np.zeros((), self._row)

    def put(self, blocks: Sequence[int], rows: np.ndarray[Any, Any]) -> None:
        """Write ``rows``, u64 ``[len(blocks), width]``."""
        index = np.array(blocks, dtype=np.int64)
        if self._array is not None:
            self._array[index] = rows.view(self._row)[:, 0]
        else:
            values = torch.from_numpy(rows.view(np.int64)).to(self._tensor.device)
            self._tensor.index_copy_(0, self._index(index), values)

    def clear(self, blocks: Index) -> None:
        """Write zeros."""
        if self._array is not None:
            self._array[blocks] = self._zero
        else:
            self._tensor.index_fill_(0, self._index(blocks), 0)

    def read(self, blocks: Index) -> bytes:
        """What is there now, row by row."""
        if self._array is not None:
            return self._array[blocks].tobytes()
        found: bytes = self._tensor.index_select(0, self._index(blocks)).cpu().numpy().tobytes()
        return found

    def take(self, blocks: Sequence[int]) -> list[list[int]]:
        """The same as numbers."""
        found = np.frombuffer(self.read(np.array(blocks, dtype=np.int64)), dtype=np.uint64)
        values: list[list[int]] = found.reshape(len(blocks), self._tensor.shape[1]).tolist()
        return values

    def _index(self, blocks: Index) -> Tensor:
        return torch.from_numpy(blocks).to(self._tensor.device)


@dataclass(frozen=True)
class Expected:
    """The stamps that a pull must bring: the bytes of u64 rows, one of each per local block."""

    blocks: Index
    trailers: bytes  # epoch, block id, generation, 0
    seals: bytes  # epoch, generation


class Region:
    """The memory of one pool, on any torch device.

    ``spans``   uint8 ``[num_blocks, span_bytes]``
    ``kv``      view in the KV dtype ``[num_blocks, *layout.shape]``, without the trailers
    ``seals``   int64 ``[num_blocks, 2]``, readable by peers
    ``staging`` int64 ``[num_blocks, 2]``, where a peer's seals arrive, by local block
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: str = "cpu") -> None:
        if layout.kv_bytes % 8:
            raise ValueError(f"a block's KV must be whole 8-byte words, not {layout.kv_bytes} B")
        self.layout = layout
        self.num_blocks = num_blocks
        self.span_bytes = layout.span_bytes
        # Zeroed, so that slots nobody wrote hold finite numbers: attention masks them, but
        # 0 * NaN is NaN.
        memory = zeros(num_blocks * layout.span_bytes, device)
        self.spans = memory.view(num_blocks, layout.span_bytes)
        dtype = getattr(torch, layout.dtype)
        flat = self.spans.view(-1).view(dtype)
        stride = layout.span_bytes // dtype.itemsize
        inner = [1]
        for size in reversed(layout.shape[1:]):
            inner.insert(0, inner[0] * size)
        self.kv: Tensor = flat.as_strided((num_blocks, *layout.shape), (stride, *inner))
        self._words = self.spans.view(torch.int64)  # [num_blocks, span_bytes / 8]
        self.seals = torch.zeros((num_blocks, 2), dtype=torch.int64, device=device)
        self.staging = torch.zeros((num_blocks, 2), dtype=torch.int64, device=device)
        # Per block: epoch, block id, generation, checksum or 0; the rest stays zero.
        self._trailer_rows = _Rows(self._words[:, layout.kv_bytes // 8 :][:, :4])
        self._seal_rows = _Rows(self.seals)
        self._staging_rows = _Rows(self.staging)

    def open(self, epoch: int, blocks: Sequence[tuple[int, int]]) -> None:
        """Publish ``(block id, odd generation)`` pairs, before the first write to the blocks."""
        ids, generations = _columns(blocks)
        self._seal_rows.put(ids, _table(epoch, generations))

    def seal(self, epoch: int, blocks: Sequence[tuple[int, int]], checksums: bool = False) -> None:
        """Stamp ``(block id, even generation)`` pairs, after the last write to the blocks."""
        ids, generations = _columns(blocks)
        sums = self.checksum(ids) if checksums else 0
        self._trailer_rows.put(ids, _table(epoch, ids, generations, sums))
        self._seal_rows.put(ids, _table(epoch, generations))

    def expect(
        self, blocks: Sequence[int], epoch: int, generations: Sequence[int], ids: Sequence[int]
    ) -> Expected:
        """What a pull of the peer's blocks ``ids`` into ``blocks`` must bring, for :meth:`has`.

        Zeroes the trailers and staged seals of ``blocks``: only a new arrival matches a ticket.
        """
        index = np.array(blocks, dtype=np.int64)
        self._trailer_rows.clear(index)
        self._staging_rows.clear(index)
        rows = np.zeros((len(index), 4), dtype=np.uint64)
        rows[:, 0] = epoch
        rows[:, 1:3] = np.array([ids, generations], dtype=np.uint64).T
        return Expected(index, rows.tobytes(), rows[:, 0:3:2].tobytes())

    def has(self, expected: Expected) -> bool:
        """Whether all of it is there, without checksums."""
        return (
            self._trailer_rows.read(expected.blocks) == expected.trailers
            and self._staging_rows.read(expected.blocks) == expected.seals
        )

    def trailers(self, blocks: Sequence[int]) -> list[Stamp]:
        """What the trailers of local ``blocks`` say now."""
        return [Stamp(e, g, b, s) for e, b, g, s in self._trailer_rows.take(blocks)]

    def staged_seals(self, blocks: Sequence[int]) -> list[Stamp]:
        """The peer's seals that arrived for local ``blocks``."""
        return [Stamp(e, g) for e, g in self._staging_rows.take(blocks)]

    def checksum(self, blocks: Sequence[int]) -> list[int]:
        """u64 sum of each block's KV bytes read as little-endian u64 words (wrapping)."""
        rows = [self._words[block, : self.layout.kv_bytes // 8] for block in blocks]
        if self.spans.device.type == "cpu":
            # By numpy, in this thread alone: torch would share the sum among the threads that the
            # engine computes with, and wait for them a hundred times longer than the sum takes.
            return [int(row.numpy().sum()) & _U64 for row in rows]
        return [int(row.sum().item()) & _U64 for row in rows]


def _columns(blocks: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Block ids, and their generations."""
    return [block for block, _ in blocks], [generation for _, generation in blocks]


def _table(epoch: int, first: Sequence[int], *more: Sequence[int] | int) -> np.ndarray[Any, Any]:
    """u64 rows of the epoch and one value of each column."""
    rows = np.empty((len(first), 2 + len(more)), dtype=np.uint64)
    for place, column in enumerate((epoch, first, *more)):
        rows[:, place] = column
    return rows
