"""A worker's KV memory as the hand-off sees it: spans, trailers, seals.

One byte region of ``num_blocks`` spans, and beside it the *seal array*, one ``(epoch, generation)`` pair per block.
The trailer at the end of a span proves that the right block arrived, filled; the seal, read after the data, proves
that it was not reused meanwhile. Who may write what, and when, is the allocator's and the engine's business.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtransfer.layout import TRAILER_BYTES, KVLayout

_TRAILER_WORDS = TRAILER_BYTES // 8  # epoch, block id, generation, checksum or 0, then zeros


@dataclass(frozen=True)
class Stamp:
    """What a trailer or a seal says: this block of this incarnation, in this generation."""

    epoch: int
    generation: int
    block_id: int = -1  # -1 in a seal, which does not hold it
    checksum: int = 0


def _signed(value: int) -> int:
    """u64 to the int64 with the same bits (torch has no u64 arithmetic)."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _unsigned(value: int) -> int:
    return value & 0xFFFF_FFFF_FFFF_FFFF


class Region:
    """The memory of one pool, on any torch device.

    ``spans``   uint8 ``[num_blocks, span_bytes]``
    ``kv``      view in the KV dtype ``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``
    ``seals``   int64 ``[num_blocks, 2]``, readable by peers
    ``staging`` int64 ``[num_blocks, 2]``, where a peer's seals arrive, by local block
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: str = "cpu") -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        # Zeroed, so that slots nobody wrote hold finite numbers: attention masks them, but 0 * NaN is NaN.
        self.spans = torch.zeros((num_blocks, layout.span_bytes), dtype=torch.uint8, device=device)
        dtype = getattr(torch, layout.dtype)
        flat = self.spans.view(-1).view(dtype)
        stride = layout.span_bytes // dtype.itemsize
        inner = [1]
        for size in reversed(layout.shape[1:]):
            inner.insert(0, inner[0] * size)
        self.kv: Tensor = flat.as_strided((num_blocks, *layout.shape), (stride, *inner))
        self._trailers: Tensor = self.spans.view(-1).view(torch.int64).as_strided(
            (num_blocks, _TRAILER_WORDS), (layout.span_bytes // 8, 1), layout.kv_bytes // 8
        )
        self.seals = torch.zeros((num_blocks, 2), dtype=torch.int64, device=device)
        self.staging = torch.zeros((num_blocks, 2), dtype=torch.int64, device=device)

    def open(self, epoch: int, blocks: Sequence[tuple[int, int]]) -> None:
        """Publish the odd generation of ``(block id, generation)`` pairs, before the first write to those blocks."""
        if blocks:
            index = torch.tensor([b for b, _ in blocks])
            self.seals[index] = torch.tensor([[_signed(epoch), _signed(g)] for _, g in blocks], device=self.seals.device)

    def seal(self, epoch: int, blocks: Sequence[tuple[int, int]], checksums: bool = False) -> None:
        """Write trailer and seal of ``(block id, even generation)`` pairs, after their last write has retired."""
        if not blocks:
            return
        index = torch.tensor([b for b, _ in blocks])
        sums = self.checksum([b for b, _ in blocks]) if checksums else [0] * len(blocks)
        rows = [
            [_signed(epoch), b, _signed(g), _signed(s)] + [0] * (_TRAILER_WORDS - 4)
            for (b, g), s in zip(blocks, sums, strict=True)
        ]
        self._trailers[index] = torch.tensor(rows, dtype=torch.int64, device=self.spans.device)
        self.open(epoch, blocks)

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero the trailers and staged seals of ``blocks``, so that only a new arrival can match a ticket."""
        if blocks:
            index = torch.tensor(list(blocks))
            self._trailers[index] = 0
            self.staging[index] = 0

    def trailers(self, blocks: Sequence[int]) -> list[Stamp]:
        """What the trailers of local ``blocks`` say now."""
        rows = self._trailers[torch.tensor(list(blocks), dtype=torch.int64)].cpu().tolist()
        return [Stamp(_unsigned(e), _unsigned(g), b, _unsigned(s)) for e, b, g, s, *_ in rows]

    def staged_seals(self, blocks: Sequence[int]) -> list[Stamp]:
        """The peer's seals that arrived for local ``blocks``."""
        rows = self.staging[torch.tensor(list(blocks), dtype=torch.int64)].cpu().tolist()
        return [Stamp(_unsigned(e), _unsigned(g)) for e, g in rows]

    def checksum(self, blocks: Sequence[int]) -> list[int]:
        """u64 sum of each block's KV bytes read as little-endian u64 words (wrapping)."""
        words = self.layout.kv_bytes // 8
        flat = self.spans.view(-1).view(torch.int64)
        out = []
        for block in blocks:
            start = block * (self.layout.span_bytes // 8)
            out.append(_unsigned(int(flat[start : start + words].sum().item())))
        return out
