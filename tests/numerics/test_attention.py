"""Paged attention against dense softmax attention written out, for random tables of blocks."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from services.engine.attention import attend, plan_attention, write_kv
from services.engine.scheduler import Row
from services.engine.sequence import SamplingParams

BLOCK, DIM, LAYERS, NUM_BLOCKS = 4, 8, 2, 40
CPU = torch.device("cpu")


def make_row(name: int, start: int, count: int, blocks: list[int]) -> Row:
    ids = tuple(range(count))
    params = SamplingParams(1)
    return Row((b"%d" % name, 0), ids, start, tuple(blocks), True, params, start + count)


def dense(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Causal attention of the last ``len(q)`` of ``len(k)`` positions, head by head."""
    out = torch.empty_like(q)
    share = q.shape[1] // k.shape[1]
    first = len(k) - len(q)
    for i in range(len(q)):
        for head in range(q.shape[1]):
            end = first + i + 1
            seen = slice(max(0, end - window) if window else 0, end)
            keys, values = k[seen, head // share], v[seen, head // share]
            weights = (keys @ q[i, head] / math.sqrt(DIM)).softmax(-1)
            out[i, head] = weights @ values
    return out


def check(
    shapes: list[tuple[int, int]],
    num_heads: int,
    num_kv_heads: int,
    seed: int,
    windows: tuple[int, ...] = (0,),
) -> None:
    """``shapes``: (start, count) of each row, those with one token first."""
    torch.manual_seed(seed)
    chance = random.Random(seed)
    blocks = list(range(1, NUM_BLOCKS))
    chance.shuffle(blocks)
    # What nobody wrote may hold anything finite.
    kv = torch.randn(NUM_BLOCKS, LAYERS, 2, num_kv_heads, BLOCK, DIM) * 100
    layer = chance.randrange(LAYERS)
    rows, keys, values, queries, new = [], [], [], [], []
    for name, (start, count) in enumerate(shapes):
        num = -(-(start + count) // BLOCK)
        own, blocks = blocks[:num], blocks[num:]
        rows.append(make_row(name, start, count, own))
        k, v = torch.randn(2, start + count, num_kv_heads, DIM)
        keys.append(k)
        values.append(v)
        for position in range(start):  # computed in earlier steps
            block, slot = own[position // BLOCK], position % BLOCK
            kv[block, layer, 0, :, slot], kv[block, layer, 1, :, slot] = k[position], v[position]
        queries.append(torch.randn(count, num_heads, DIM))
        new.append(torch.stack((k[start:], v[start:]), 1))
    plan = plan_attention(rows, BLOCK, CPU)
    before = kv.clone()
    write_kv(kv, layer, plan, torch.cat(new))
    assert torch.equal(kv[:, 1 - layer], before[:, 1 - layer]), "another layer was written"
    assert torch.equal(kv[0], before[0]), "the padding block was written"
    for window in windows:  # layers of one model may differ
        out = attend(kv, layer, plan, torch.cat(queries), window)
        parts = zip(queries, keys, values, strict=True)
        expected = torch.cat([dense(q, k, v, window) for q, k, v in parts])
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)


HEADS = [(2, 2), (3, 1), (6, 2), (9, 3)]


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_a_whole_prompt(length: int, num_heads: int, num_kv_heads: int) -> None:
    check([(0, length)], num_heads, num_kv_heads, seed=length)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
def test_a_batch_of_decode_rows_of_different_lengths(num_heads: int, num_kv_heads: int) -> None:
    check([(start, 1) for start in (0, 1, 3, 4, 5, 17, 30)], num_heads, num_kv_heads, seed=1)


@pytest.mark.parametrize("seed", range(8))
def test_decode_rows_and_chunks_together(seed: int) -> None:
    chance = random.Random(seed)
    single = [(chance.randrange(20), 1) for _ in range(chance.randrange(4))]
    chunks = [
        (chance.randrange(15), chance.randrange(2, 12)) for _ in range(chance.randrange(1, 4))
    ]
    check(single + chunks, *HEADS[seed % len(HEADS)], seed=seed)


def test_a_window_ends_where_it_should() -> None:
    """Windows of one token, less and more than a block, exactly one and two, and all there is."""
    shapes = [(start, 1) for start in (0, 3, 4, 7, 8, 30)] + [(0, 9), (5, 7), (13, 2)]
    check(shapes, 6, 2, seed=2, windows=(1, 3, BLOCK, 5, 2 * BLOCK, 31, 1000, 0))


def test_write_kv_touches_only_the_steps_slots() -> None:
    kv = torch.zeros(6, LAYERS, 2, 1, BLOCK, DIM)
    rows = [make_row(0, 5, 1, [3, 1]), make_row(1, 2, 4, [5, 4])]
    plan = plan_attention(rows, BLOCK, CPU)
    new = torch.arange(1.0, 1 + 5 * 2 * DIM).view(5, 2, 1, DIM)
    write_kv(kv, 1, plan, new)
    slots = [(1, 1), (5, 2), (5, 3), (4, 0), (4, 1)]
    for i, (block, slot) in enumerate(slots):
        assert torch.equal(kv[block, 1, :, :, slot], new[i])
        kv[block, 1, :, :, slot] = 0
    assert not kv.any()


def test_what_lies_behind_the_last_token_is_not_seen() -> None:
    torch.manual_seed(3)
    kv = torch.randn(4, LAYERS, 2, 1, BLOCK, DIM)
    plan = plan_attention([make_row(0, 4, 1, [1, 2]), make_row(1, 1, 1, [3])], BLOCK, CPU)
    queries = torch.randn(2, 3, DIM)
    before = attend(kv, 0, plan, queries)
    kv[2, 0, :, :, 1:] = 1e6
    kv[3, 0, :, :, 2:] = 1e6
    kv[0] = 1e6  # padding
    assert torch.equal(attend(kv, 0, plan, queries), before)
