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

import threading
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
from services.engine.compiled import compiled
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


class _Memory(threading.local):
    """What the kernel writes to besides its result, for each thread that calls it."""

    def __init__(self) -> None:
        self.scratch = torch.empty(0)
        self.parts = torch.empty(0)


class PagedAttention:
    """Attention of one engine, for float32 KV on a CPU; whichever threads call it."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self._share = num_heads // num_kv_heads
        self._item_tokens = max(1, CHUNK_ROWS // self._share // MAX_ROWS) * MAX_ROWS
        self._scratch_floats = scratch_floats(self._share, head_dim, self._item_tokens)
        self._memory = _Memory()

    def plan(self, rows: Sequence[Row], block_size: int) -> PagedPlan:
        """For rows in :func:`~services.engine.attention.batch_order`."""
        shapes = np.array([(len(row.ids), row.start, len(row.blocks)) for row in rows], np.int64)
        blocks = np.frombuffer(bytearray().join(_packed(row.blocks) for row in rows), np.int64)
        num_tokens, reached = shapes[:, 0], shapes[:, 1] // TILE + 1
        num_tiles = int(reached[num_tokens == 1].sum())
        slots = np.empty((int(num_tokens.sum()), 2), np.int64)
        most_items = num_tiles + int((num_tokens // self._item_tokens + 1).sum())
        items = np.empty((most_items, ITEM), np.int64)
        num_items = _list_items(shapes, blocks, block_size, self._item_tokens, slots, items)
        return PagedPlan(
            slots=slots,
            blocks=blocks,
            items=items[:num_items],
            num_tiles=num_tiles,
            done=np.zeros(1 + num_tiles * self.num_kv_heads, np.int64),
        )

    def addresses(self, plan: PagedPlan) -> tuple[int, ...]:
        """What the kernel wants to know of the plan and of our memory: ``blocks``, ``items``,
        ``num_items``, ``done``, ``parts``, ``scratch``, ``scratch_stride``, ``num_threads``.
        They hold until the next call.
        """
        num_threads = get_num_threads()
        memory = self._memory
        if len(memory.scratch) < num_threads * self._scratch_floats:
            memory.scratch = torch.empty(num_threads * self._scratch_floats)
        num_parts = plan.num_tiles * self.num_heads * (self.head_dim + 2)
        if len(memory.parts) < num_parts:
            memory.parts = torch.empty(2 * num_parts)
        return (
            plan.blocks.ctypes.data,
            plan.items.ctypes.data,
            len(plan.items),
            plan.done.ctypes.data,
            memory.parts.data_ptr(),
            memory.scratch.data_ptr(),
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
            np.float32(1 / sqrt(self.head_dim)),
            *memory,
        )
        return out


@compiled("int64(int64[:, ::1], int64[::1], int64, int64, int64[:, ::1], int64[:, ::1])")
def _list_items(shapes, blocks, block_size, item_tokens, slots, items):  # type: ignore[no-untyped-def]
    """Fill ``slots`` and ``items`` of :class:`PagedPlan`, and return the number of items, longest
    first. ``shapes``: tokens, position of the first one, and blocks of each row.
    """
    num_rows = len(shapes)
    before = np.zeros((num_rows + 1, 3), np.int64)  # tokens, blocks and tiles of other rows
    num_items = last_tile = 0
    for r in range(num_rows):
        count, start, num_blocks = shapes[r]
        token, table, tiles = before[r]
        for i in range(count):
            slots[token + i, 0] = blocks[table + (start + i) // block_size]
            slots[token + i, 1] = (start + i) % block_size
        if count == 1:
            last_tile = max(last_tile, start // TILE)
            tiles += start // TILE + 1
        before[r + 1] = token + count, table + num_blocks, tiles
    for r in range(num_rows - 1, -1, -1):
        count, start, _ = shapes[r]
        token, table, tiles = before[r]
        if count > 1:
            for skipped in range((count - 1) // item_tokens * item_tokens, -1, -item_tokens):
                tokens = min(item_tokens, count - skipped)
                items[num_items] = token + skipped, tokens, start + skipped, table, -1, 0
                num_items += 1
    # Tile by tile: rows with a common prefix have the same blocks there, and what one of them
    # brings into the cache the next one finds in it.
    for tile in range(last_tile + 1):
        for r in range(num_rows - 1, -1, -1):
            count, start, _ = shapes[r]
            token, table, tiles = before[r]
            if count == 1 and start // TILE >= tile:
                items[num_items] = token, 1, start, table, tile * TILE, tiles
                num_items += 1
    return num_items


@lru_cache(1024)
def _packed(blocks: tuple[int, ...]) -> bytes:
    """As int64. In most steps most rows have the blocks of the step before."""
    return pack(f"{len(blocks)}q", *blocks)
