"""A worker's KV memory as the hand-off sees it: spans, trailers, seals.

One byte region of ``num_blocks`` spans, and beside it the *seal array*, one ``(epoch, generation)``
pair per block. The trailer at the end of a span proves that the right block arrived, filled; the
seal, read after the data, proves that it was not reused meanwhile. Who may write what, and when, is
the allocator's and the engine's business.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvtransfer.layout import KVLayout, Stamp

_U64 = 0xFFFF_FFFF_FFFF_FFFF


def _tensor(rows: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """u64 values as an int64 tensor with the same bits (torch has no u64 arithmetic).

    By way of numpy: for a hundred rows that is several times faster than ``torch.tensor``.
    """
    return torch.from_numpy(np.array(rows, dtype=np.uint64).view(np.int64)).to(device)


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
        self.spans = torch.zeros((num_blocks, layout.span_bytes), dtype=torch.uint8, device=device)
        dtype = getattr(torch, layout.dtype)
        flat = self.spans.view(-1).view(dtype)
        stride = layout.span_bytes // dtype.itemsize
        inner = [1]
        for size in reversed(layout.shape[1:]):
            inner.insert(0, inner[0] * size)
        self.kv: Tensor = flat.as_strided((num_blocks, *layout.shape), (stride, *inner))
        self._words = self.spans.view(torch.int64)  # [num_blocks, span_bytes / 8]
        # u64 [num_blocks, 4]: epoch, block id, generation, checksum or 0; the rest stays zero.
        self._trailers = self._words[:, layout.kv_bytes // 8 :][:, :4]
        self.seals = torch.zeros((num_blocks, 2), dtype=torch.int64, device=device)
        self.staging = torch.zeros((num_blocks, 2), dtype=torch.int64, device=device)

    def open(self, epoch: int, blocks: Sequence[tuple[int, int]]) -> None:
        """Publish ``(block id, odd generation)`` pairs, before the first write to the blocks."""
        self._stamp(self.seals, blocks, [(epoch, g) for _, g in blocks])

    def seal(self, epoch: int, blocks: Sequence[tuple[int, int]], checksums: bool = False) -> None:
        """Stamp ``(block id, even generation)`` pairs, after the last write to the blocks."""
        sums = self.checksum([b for b, _ in blocks]) if checksums else [0] * len(blocks)
        rows = [(epoch, b, g, s) for (b, g), s in zip(blocks, sums, strict=True)]
        self._stamp(self._trailers, blocks, rows)
        self._stamp(self.seals, blocks, [(epoch, g) for _, g in blocks])

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero the trailers and staged seals of ``blocks``: only a new arrival matches a ticket."""
        if blocks:
            index = _tensor(blocks, self.spans.device)
            self._trailers.index_fill_(0, index, 0)
            self.staging.index_fill_(0, index, 0)

    def trailers(self, blocks: Sequence[int]) -> list[Stamp]:
        """What the trailers of local ``blocks`` say now."""
        return [Stamp(e, g, b, s) for e, b, g, s in self._rows(self._trailers, blocks)]

    def staged_seals(self, blocks: Sequence[int]) -> list[Stamp]:
        """The peer's seals that arrived for local ``blocks``."""
        return [Stamp(e, g) for e, g in self._rows(self.staging, blocks)]

    def checksum(self, blocks: Sequence[int]) -> list[int]:
        """u64 sum of each block's KV bytes read as little-endian u64 words (wrapping)."""
        rows = [self._words[block, : self.layout.kv_bytes // 8] for block in blocks]
        if self.spans.device.type == "cpu":
            # By numpy, in this thread alone: torch would share the sum among the threads that the
            # engine computes with, and wait for them a hundred times longer than the sum takes.
            return [int(row.numpy().sum()) & _U64 for row in rows]
        return [int(row.sum().item()) & _U64 for row in rows]

    def _stamp(
        self, where: Tensor, blocks: Sequence[tuple[int, int]], rows: Sequence[Sequence[int]]
    ) -> None:
        if blocks:
            if where.device.type == "cpu":  # numpy again: of so few rows torch takes the double
                where.numpy()[[b for b, _ in blocks]] = _tensor(rows, where.device).numpy()
                return
            index = _tensor([b for b, _ in blocks], where.device)
            where.index_copy_(0, index, _tensor(rows, where.device))

    def _rows(self, where: Tensor, blocks: Sequence[int]) -> list[list[int]]:
        if where.device.type == "cpu":
            rows = where.numpy()[list(blocks)]
        else:
            rows = where.index_select(0, _tensor(blocks, where.device)).cpu().numpy()
        values: list[list[int]] = rows.view(np.uint64).tolist()
        return values
