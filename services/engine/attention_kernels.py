"""Attention over blocks, for numba: what :mod:`services.engine.paged_attention` runs.

Addresses are plain integers, strides count floats, nothing is checked. ``count``, ``lo`` and ``hi``
are positions of one tile: ``lo`` to ``hi`` are those that any of some queries sees.
"""

from typing import NamedTuple

import numpy as np
from numba import njit, prange

from services.engine.compiled import compiled
from services.engine.intrinsics import exp_row, largest, prefetch, take, transpose
from services.engine.kernels import LANES, MAX_ROWS, floats, int64s, tile

TILE = 256  # positions whose scores are weighed at once
PANEL = 16  # keys side by side: two vectors
AHEAD = 32  # positions from what is computed to what is fetched from memory
ITEM = 6  # numbers of an item

_NOTHING = -1e30  # below any score

_tile, _tile_add, _half_add = tile(), tile(2, add=True), tile(1, add=True)


class _Cache(NamedTuple):
    """Keys and values of one row, layer and head; addresses are those in block 0."""

    keys: int
    values: int
    block_stride: int
    block_size: int
    head_dim: int
    table: int  # int64: the row's blocks, from position 0 on


class _Queries(NamedTuple):
    """Queries of the ``share`` heads of one KV head, of some tokens of a row."""

    address: int
    stride: int  # from token to token
    out: int
    out_stride: int
    position: int  # of the first token
    num_tokens: int
    share: int
    window: int  # positions that a query sees; 0: all
    factor: float  # of scores


class _Scratch(NamedTuple):
    """One thread's memory."""

    panels: int  # [TILE / PANEL, head_dim, PANEL] keys
    scores: int  # [max(MAX_ROWS, share), TILE]
    part: int  # [MAX_ROWS, head_dim] values, weighted by one tile's scores
    state: int  # [2, MAX_ROWS] and [2, num_queries]: largest scores and sums, of a tile and of all


@njit
def _scratch(address, share, head_dim):  # type: ignore[no-untyped-def]
    scores = address + 4 * TILE * head_dim
    part = scores + 4 * max(MAX_ROWS, share) * TILE
    return _Scratch(address, scores, part, part + 4 * MAX_ROWS * head_dim)


def scratch_floats(share: int, head_dim: int, max_tokens: int) -> int:
    """What :class:`_Scratch` takes, for items of at most ``max_tokens`` tokens."""
    states = 2 * MAX_ROWS + 2 * share * max_tokens
    size = (TILE + MAX_ROWS) * head_dim + max(MAX_ROWS, share) * TILE + states
    return -(-size // PANEL) * PANEL


# --- keys and values ------------------------------------------------------------------------------


@njit
def _place(plane, cache, position):  # type: ignore[no-untyped-def]
    """Address of a position's key or value."""
    block = int64s(cache.table, position // cache.block_size + 1)[position // cache.block_size]
    slot = position % cache.block_size
    return plane + 4 * (block * cache.block_stride + slot * cache.head_dim)


@njit
def _pack_keys(cache, position, count, panel, ahead):  # type: ignore[no-untyped-def]
    """At most ``PANEL`` keys, from ``position`` on, a multiple of it, side by side. Columns behind
    them may get anything. ``ahead``: what to fetch meanwhile, as much; 0: nothing.
    """
    dim = cache.head_dim
    for i in range(0, count, LANES):
        if cache.block_size % LANES == 0:
            source = _place(cache.keys, cache, position + i)
            for d in range(0, dim, LANES):
                if ahead:
                    for line in range(0, 4 * LANES * LANES, 64):
                        prefetch(ahead + 4 * (i * dim + d * LANES) + line)
                transpose(source + 4 * d, dim, panel + 4 * (PANEL * d + i), PANEL)
            continue
        for j in range(i, min(i + LANES, count)):
            key = floats(_place(cache.keys, cache, position + j), dim)
            column = floats(panel + 4 * j, PANEL * dim)
            for d in range(dim):
                column[PANEL * d] = key[d]


@njit
def _weigh(scores, rows, values, out, dim, count, ahead):  # type: ignore[no-untyped-def]
    """``out[rows, dim] += scores[rows, count] @ values[count, dim]``; ``ahead``: as above."""
    for column in range(0, dim - 15, 16):
        v, o = values + 4 * column, out + 4 * column
        if ahead:
            for line in range(count):
                prefetch(ahead + 4 * column * count + 64 * line)
        _tile_add(rows, scores, TILE, v, dim, o, dim, count)
    if dim % 16:
        v, o = values + 4 * (dim - LANES), out + 4 * (dim - LANES)
        _half_add(rows, scores, TILE, v, dim, o, dim, count)


@njit
def _weigh_blocks(scores, rows, cache, first, lo, hi, out, fetch):  # type: ignore[no-untyped-def]
    """``out = scores[:, lo:hi] @ values`` of one tile, block by block."""
    floats(out, rows * cache.head_dim)[:] = 0
    while lo < hi:
        count = min(cache.block_size - (first + lo) % cache.block_size, hi - lo)
        values = _place(cache.values, cache, first + lo)
        ahead = _place(cache.values, cache, first + min(lo + AHEAD, hi - 1)) if fetch else 0
        _weigh(scores + 4 * lo, rows, values, out, cache.head_dim, count, ahead)
        lo += count


# --- softmax --------------------------------------------------------------------------------------


@njit
def _seen(first, count, position, last, window):  # type: ignore[no-untyped-def]
    """``lo`` and ``hi`` of a tile's keys for queries at ``position`` to ``last``."""
    lo = max(0, position + 1 - window - first) // PANEL * PANEL if window else 0
    return lo, min(count, last + 1 - first)


@njit
def _softmax(scores, rows, at, step, lo, hi, window, factor, most, sums):  # type: ignore[no-untyped-def]
    """Turn rows of scores into their exponentials, below the largest; 0 for what a row does not
    see. ``at``: the first row's own position in this tile, the next one's is ``step`` further.
    """
    end = (hi + LANES - 1) // LANES * LANES
    for r in range(rows):
        row, own = floats(scores + 4 * r * TILE, TILE), at + r * step
        for i in range(max(lo, min(own + 1, hi)), end):
            row[i] = -np.inf
        if window:
            for i in range(lo, min(own + 1 - window, end)):
                row[i] = -np.inf
        start = scores + 4 * (r * TILE + lo)
        most[r] = largest(start, end - lo, np.float32(_NOTHING))
        sums[r] = exp_row(start, end - lo, most[r], factor)


@njit
def _add_tile(out, all_most, all_sums, at, part, most, total, factor, dim):  # type: ignore[no-untyped-def]
    """Add one tile's weighted values to those of the tiles before it, of one query."""
    top = max(all_most[at], most)
    before, now = np.exp((all_most[at] - top) * factor), np.exp((most - top) * factor)
    all_most[at] = top
    all_sums[at] = all_sums[at] * before + total * now
    x, y = floats(out, dim), floats(part, dim)
    for d in range(dim):
        x[d] = x[d] * before + y[d] * now


@njit
def _divide(out, by, dim):  # type: ignore[no-untyped-def]
    x = floats(out, dim)
    for d in range(dim):
        x[d] /= by


# --- items ----------------------------------------------------------------------------------------


@njit
def _attend_chunk(cache, queries, scratch):  # type: ignore[no-untyped-def]
    """Some tokens, over all tiles that they see; ``out`` holds the sums on the way."""
    dim, window, num = cache.head_dim, queries.window, queries.share * queries.num_tokens
    most, sums = floats(scratch.state, MAX_ROWS), floats(scratch.state + 4 * MAX_ROWS, MAX_ROWS)
    all_most = floats(scratch.state + 8 * MAX_ROWS, num)
    all_sums = floats(scratch.state + 8 * MAX_ROWS + 4 * num, num)
    all_most[:], all_sums[:] = _NOTHING, 0
    for t in range(queries.num_tokens):
        floats(queries.out + 4 * t * queries.out_stride, queries.share * dim)[:] = 0
    end = queries.position + queries.num_tokens
    begin = max(0, queries.position + 1 - window) // TILE * TILE if window else 0
    for first in range(begin, end, TILE):
        count = min(TILE, end - first)
        for i in range(0, count, PANEL):
            keys = min(PANEL, count - i)
            _pack_keys(cache, first + i, keys, scratch.panels + 4 * i * dim, 0)
        for head in range(queries.share):
            for t in range(0, queries.num_tokens, MAX_ROWS):
                rows = min(MAX_ROWS, queries.num_tokens - t)
                position = queries.position + t
                lo, hi = _seen(first, count, position, position + rows - 1, window)
                if lo >= hi:
                    continue
                q = queries.address + 4 * (t * queries.stride + head * dim)
                for i in range(lo, hi, PANEL):
                    panel = scratch.panels + 4 * i * dim
                    _tile(rows, q, queries.stride, panel, PANEL, scratch.scores + 4 * i, TILE, dim)
                _softmax(
                    scratch.scores, rows, position - first, 1, lo, hi, window, queries.factor,
                    most, sums,
                )  # fmt: skip
                _weigh_blocks(scratch.scores, rows, cache, first, lo, hi, scratch.part, False)
                for r in range(rows):
                    out = queries.out + 4 * ((t + r) * queries.out_stride + head * dim)
                    _add_tile(
                        out, all_most, all_sums, head * queries.num_tokens + t + r,
                        scratch.part + 4 * r * dim, most[r], sums[r], queries.factor, dim,
                    )  # fmt: skip
    for head in range(queries.share):
        for t in range(queries.num_tokens):
            out = queries.out + 4 * (t * queries.out_stride + head * dim)
            _divide(out, all_sums[head * queries.num_tokens + t], dim)


@njit
def _attend_tile(cache, queries, first, scratch, part):  # type: ignore[no-untyped-def]
    """One token, over one tile. To ``part``: weighted values ``[share, head_dim]``, largest scores
    and sums ``[share]``. It waits for memory more than for anything else.
    """
    dim, share, position = cache.head_dim, queries.share, queries.position
    count = min(TILE, position + 1 - first)
    lo, hi = _seen(first, count, position, position, queries.window)
    if lo >= hi:
        return
    end = (hi + PANEL - 1) // PANEL * PANEL
    for i in range(lo, hi, PANEL):
        ahead = i + AHEAD
        if ahead < hi:
            fetched = _place(cache.keys, cache, first + ahead)
        else:  # values are next
            fetched = _place(cache.values, cache, first + min(ahead - end + lo, hi - 1))
        _pack_keys(cache, first + i, min(PANEL, hi - i), scratch.panels, fetched)
        for head in range(0, share, MAX_ROWS):
            rows = min(MAX_ROWS, share - head)
            q, scores = queries.address + 4 * head * dim, scratch.scores + 4 * (head * TILE + i)
            _tile(rows, q, dim, scratch.panels, PANEL, scores, TILE, dim)
    for head in range(0, share, MAX_ROWS):
        rows = min(MAX_ROWS, share - head)
        scores = scratch.scores + 4 * head * TILE
        most = floats(part + 4 * (share * dim + head), rows)
        sums = floats(part + 4 * (share * dim + share + head), rows)
        at, window, factor = position - first, queries.window, queries.factor
        _softmax(scores, rows, at, 0, lo, hi, window, factor, most, sums)
        _weigh_blocks(scores, rows, cache, first, lo, hi, part + 4 * head * dim, True)


@njit
def _add_tiles(parts, part_stride, queries, dim):  # type: ignore[no-untyped-def]
    """Add up what :func:`_attend_tile` left of a token's tiles, as :func:`_attend_chunk` does."""
    share, position, window = queries.share, queries.position, queries.window
    state = np.empty((2, share), np.float32)
    state[0], state[1] = _NOTHING, 0
    floats(queries.out, share * dim)[:] = 0
    begin = max(0, position + 1 - window) // TILE if window else 0
    for index in range(begin, position // TILE + 1):
        part = parts + 4 * index * part_stride
        most, sums = (
            floats(part + 4 * share * dim, share),
            floats(part + 4 * share * (dim + 1), share),
        )
        for head in range(share):
            at = 4 * head * dim
            _add_tile(
                queries.out + at, state[0], state[1], head, part + at, most[head], sums[head],
                queries.factor, dim,
            )  # fmt: skip
    for head in range(share):
        _divide(queries.out + 4 * head * dim, state[1, head], dim)


@njit
def _work(  # type: ignore[no-untyped-def]
    kv, block_stride, plane, block_size, num_kv_heads, share, head_dim, q, q_stride, out,
    out_stride, blocks, items, num_items, window, factor, done, parts, scratch,
):  # fmt: skip
    """Take items until there are none."""
    own = _scratch(scratch, share, head_dim)
    part_stride = share * (head_dim + 2)
    while True:
        index = take(done)
        if index >= num_items * num_kv_heads:
            return
        head = index // num_items
        item = int64s(items + 8 * ITEM * (index % num_items), ITEM)
        token, num_tokens, position = item[0], item[1], item[2]
        table, first, row_parts = item[3], item[4], item[5]
        keys = kv + 4 * head * block_size * head_dim
        cache = _Cache(
            keys, keys + 4 * plane, block_stride, block_size, head_dim, blocks + 8 * table
        )
        at = head * share * head_dim
        queries = _Queries(
            q + 4 * (token * q_stride + at), q_stride, out + 4 * (token * out_stride + at),
            out_stride, position, num_tokens, share, window, factor,
        )  # fmt: skip
        if first < 0:
            _attend_chunk(cache, queries, own)
            continue
        # Parts of a row and head lie side by side, and so many others before them.
        num_tiles = position // TILE + 1
        place = row_parts * num_kv_heads + head * num_tiles
        row = parts + 4 * place * part_stride
        _attend_tile(cache, queries, first, own, row + 4 * (first // TILE) * part_stride)
        finished = done + 8 * (1 + place)
        if take(finished) == num_tiles - 1:
            int64s(finished, 1)[0] = 0
            _add_tiles(row, part_stride, queries, head_dim)


_SIGNATURE = f"void({'int64, ' * 15} float32, {', '.join(['int64'] * 5)})"


@compiled(_SIGNATURE, parallel=True)
def attend(  # type: ignore[no-untyped-def]
    kv, block_stride, plane, block_size, num_kv_heads, share, head_dim, q, q_stride, out,
    out_stride, blocks, items, num_items, window, factor, done, parts, scratch, scratch_stride,
    num_threads,
):  # fmt: skip
    """One layer of a step. ``kv``: its keys in block 0; values lie ``plane`` behind. ``items``
    ``[num_items, ITEM]``: first token, tokens, position of the first, where in ``blocks`` its row's
    begin, the tile's first position or -1 for all, tiles of decoding rows before this one.
    """
    int64s(done, 1)[0] = 0
    for thread in prange(num_threads):
        _work(
            kv, block_stride, plane, block_size, num_kv_heads, share, head_dim, q, q_stride, out,
            out_stride, blocks, items, num_items, window, factor, done, parts,
            scratch + 4 * thread * scratch_stride,
        )  # fmt: skip
