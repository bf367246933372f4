"""A worker's KV memory as the hand-off sees it: spans, trailers, seals.

One byte region of ``num_blocks`` spans, and beside it the *seal array*, one ``(epoch, generation)``
pair per block. The trailer at the end of a span proves that the right block arrived, filled; the
seal, read after the data, proves that it was not reused meanwhile. Who may write what, and when, is
the allocator's and the engine's business.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvtransfer.layout import TRAILER_BYTES, KVLayout, Stamp

_TRAILER_WORDS = TRAILER_BYTES // 8  # epoch, block id, generation, checksum or 0, then zeros


def _signed(value: int) -> int:
    """u64 to the int64 with the same bits (torch has no u64 arithmetic)."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _unsigned(value: int) -> int:
    return value & 0xFFFF_FFFF_FFFF_FFFF


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
        self._trailers = self._words[:, layout.kv_bytes // 8 :]
        self.seals = torch.zeros((num_blocks, 2), dtype=torch.int64, device=device)
        self.staging = torch.zeros((num_blocks, 2), dtype=torch.int64, device=device)

    def open(self, epoch: int, blocks: Sequence[tuple[int, int]]) -> None:
        """Publish ``(block id, odd generation)`` pairs, before the first write to the blocks."""
        if blocks:
            rows = torch.tensor(blocks, device=self.seals.device)  # [n, 2]: block id, generation
            self._publish(epoch, rows)

    def seal(self, epoch: int, blocks: Sequence[tuple[int, int]], checksums: bool = False) -> None:
        """Stamp ``(block id, even generation)`` pairs, after the last write to the blocks."""
        if not blocks:
            return
        rows = torch.tensor(blocks, device=self.spans.device)  # [n, 2]: block id, generation
        trailers = torch.zeros((len(blocks), _TRAILER_WORDS), dtype=torch.int64, device=rows.device)
        trailers[:, 0] = _signed(epoch)
        trailers[:, 1:3] = rows
        if checksums:
            sums = [_signed(s) for s in self.checksum([b for b, _ in blocks])]
            trailers[:, 3] = torch.tensor(sums, device=rows.device)
        self._trailers[rows[:, 0]] = trailers
        self._publish(epoch, rows)

    def _publish(self, epoch: int, rows: Tensor) -> None:
        seals = rows.clone()
        seals[:, 0] = _signed(epoch)
        self.seals[rows[:, 0]] = seals

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero the trailers and staged seals of ``blocks``: only a new arrival matches a ticket."""
        if blocks:
            index = torch.tensor(blocks, device=self.spans.device)
            self._trailers[index] = 0
            self.staging[index] = 0

    def trailers(self, blocks: Sequence[int]) -> list[Stamp]:
        """What the trailers of local ``blocks`` say now."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self.spans.device)
        rows = self._trailers[index].tolist()
        return [Stamp(_unsigned(e), _unsigned(g), b, _unsigned(s)) for e, b, g, s, *_ in rows]

    def staged_seals(self, blocks: Sequence[int]) -> list[Stamp]:
        """The peer's seals that arrived for local ``blocks``."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self.spans.device)
        rows = self.staging[index].tolist()
        return [Stamp(_unsigned(e), _unsigned(g)) for e, g in rows]

    def checksum(self, blocks: Sequence[int]) -> list[int]:
        """u64 sum of each block's KV bytes read as little-endian u64 words (wrapping)."""
        num_words = self.layout.kv_bytes // 8
        return [_unsigned(int(self._words[block, :num_words].sum().item())) for block in blocks]
