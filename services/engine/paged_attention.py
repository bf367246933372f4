"""Paged attention for CPUs: keys and values are read in their blocks, scores never leave the cache.

The same sums as :mod:`services.engine.attention`, in one order that only a query's position
decides: neither the rows it is computed with, nor where its chunk begins, nor the number of threads
change a bit of its result. Keys are taken in *tiles* of ``TILE`` positions, the first from position
0 on. Softmax is that of a tile, and tiles are added up, in their order, by their largest scores
(Milakov and Gimelshein, "Online normalizer calculation for softmax"; Dao et al., FlashAttention).

Work is a list of *items*, which threads take one by one. A chunk's item is some of its tokens with
all tiles they see. A row that decodes has an item for each tile, so that one long row is work for
all threads; whoever finishes its last one adds them up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt
from struct import pack

import numpy as np
import torch
from numba import get_num_threads
from torch import Tensor

from services.engine.attention_kernels import ITEM, TILE, attend, scratch_floats
from services.engine.kernels import MAX_ROWS
from services.engine.scheduler import Row

CHUNK_ROWS = 96  # queries of a chunk's item, over all heads of one KV head: about

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True)
class PagedPlan:
    """What a step's kernels need. Layers run one after the other: they write to ``done``, and leave
    it fit for the next one.
    """

    slots: Ints  # [num_tokens, 2]: block, and offset in it, where each token's KV is written
    blocks: Ints  # of all rows, each from position 0 on
    items: Ints  # [num_items, ITEM]: see services.engine.attention_kernels.attend
    num_tiles: int  # of rows that decode
    done: Ints  # [1 + num_tiles * num_kv_heads]: items taken; tiles finished, at a row's first


class PagedAttention:
    """Attention of one engine, for float32 KV on a CPU; for one thread at a time."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self._share = num_heads // num_kv_heads
        self._item_tokens = max(1, CHUNK_ROWS // self._share // MAX_ROWS) * MAX_ROWS
        self._scratch_floats = scratch_floats(self._share, head_dim, self._item_tokens)
        self._scratch = torch.empty(0)
        self._parts = torch.empty(0)

    def plan(self, rows: Sequence[Row], block_size: int) -> PagedPlan:
        """Rows in any order; longer ones first divide better."""
        counts = np.array([len(row.ids) for row in rows])
        starts = np.array([row.start for row in rows])
        blocks = np.frombuffer(b"".join([_packed(row.blocks) for row in rows]), np.int64)
        tables = _before(np.array([len(row.blocks) for row in rows]))
        firsts = _before(counts)
        positions = np.repeat(starts - firsts, counts) + np.arange(counts.sum())
        found = blocks[np.repeat(tables, counts) + positions // block_size]

        decodes = counts == 1
        tiles = np.where(decodes, starts // TILE + 1, 0)
        num_items = np.where(decodes, tiles, -(-counts // self._item_tokens))
        row = np.repeat(np.arange(len(rows)), num_items)
        index = np.arange(len(row)) - np.repeat(_before(num_items), num_items)  # in its row
        skipped = np.where(decodes[row], 0, index * self._item_tokens)  # tokens
        items = np.empty((len(row), ITEM), np.int64)
        items[:, 0] = firsts[row] + skipped
        items[:, 1] = np.minimum(counts[row] - skipped, self._item_tokens)
        items[:, 2] = starts[row] + skipped
        items[:, 3] = tables[row]
        items[:, 4] = np.where(decodes[row], index * TILE, -1)
        items[:, 5] = _before(tiles)[row]
        # The longest first. Rows with a common prefix have the same blocks in the same tiles: what
        # one brings into the cache the next one finds there.
        order = np.lexsort((-items[:, 2], items[:, 4]))
        num_tiles = int(tiles.sum())
        return PagedPlan(
            slots=np.stack((found, positions % block_size), 1),
            blocks=blocks,
            items=items[order],
            num_tiles=num_tiles,
            done=np.zeros(1 + num_tiles * self.num_kv_heads, np.int64),
        )

    def addresses(self, plan: PagedPlan) -> tuple[int, ...]:
        """What the kernel wants to know of the plan and of our memory: ``blocks``, ``items``,
        ``num_items``, ``done``, ``parts``, ``scratch``, ``scratch_stride``, ``num_threads``.
        They hold until the next call.
        """
        num_threads = get_num_threads()
        if len(self._scratch) < num_threads * self._scratch_floats:
            self._scratch = torch.empty(num_threads * self._scratch_floats)
        num_parts = plan.num_tiles * self.num_heads * (self.head_dim + 2)
        if len(self._parts) < num_parts:
            self._parts = torch.empty(2 * num_parts)
        return (
            plan.blocks.ctypes.data,
            plan.items.ctypes.data,
            len(plan.items),
            plan.done.ctypes.data,
            self._parts.data_ptr(),
            self._scratch.data_ptr(),
            self._scratch_floats,
            num_threads,
        )

    def attend(
        self, kv: Tensor, layer: int, plan: PagedPlan, queries: Tensor, window: int = 0
    ) -> Tensor:
        """``[num_tokens, num_heads * head_dim]`` of queries ``[num_tokens, num_heads, head_dim]``,
        tokens at any distance; see :func:`services.engine.attention.attend`.
        """
        out = torch.empty(len(queries), self.num_heads * self.head_dim)
        block_stride, layer_stride, plane = kv.stride()[:3]
        blocks, items, num_items, *memory = self.addresses(plan)
        attend(
            kv.data_ptr() + 4 * layer * layer_stride,
            block_stride,
            plane,
            kv.shape[4],
            self.num_kv_heads,
            self._share,
            self.head_dim,
            queries.data_ptr(),
            queries.stride(0),
            out.data_ptr(),
            out.stride(0),
            blocks,
            items,
            num_items,
            window,
            1 / sqrt(self.head_dim),
            *memory,
        )
        return out


def _before(counts: Ints) -> Ints:
    """Sums of all that come before each."""
    return np.cumsum(counts) - counts


@lru_cache(1024)
def _packed(blocks: tuple[int, ...]) -> bytes:
    """As int64. In most steps most rows have the blocks of the step before."""
    return pack(f"{len(blocks)}q", *blocks)
