"""Paged attention in plain torch: the reference that every faster path is compared with.

Queries of a step are flat, ``[num_tokens, num_heads, head_dim]``; keys and values lie in the blocks
of the pool. A :class:`AttentionPlan` is built once per step and used by every layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from services.engine.scheduler import Row


@dataclass(frozen=True)
class Group:
    """Rows that are computed together: some that decode (one query each), or one prefill chunk."""

    tokens: slice  # of the step's flat tokens
    num_rows: int
    blocks: Tensor  # [num_rows * num_blocks], padded with block 0
    mask: Tensor  # bool [num_rows, 1, num_queries, num_blocks * block_size]: which slots are seen


@dataclass(frozen=True)
class AttentionPlan:
    """Where this step's keys and values are written, and what its queries read."""

    slots: tuple[Tensor, Tensor]  # block and offset of each new token, [num_tokens] each
    groups: tuple[Group, ...]


def batch_order(rows: Sequence[Row]) -> list[int]:
    """The order in which :func:`plan_attention` wants rows: one-token ones first, by length."""
    return sorted(range(len(rows)), key=lambda i: (len(rows[i].ids) > 1, len(rows[i].blocks)))


def plan_attention(rows: Sequence[Row], block_size: int, device: torch.device) -> AttentionPlan:
    """Build the plan for rows that are in :func:`batch_order`."""
    positions = [range(row.start, row.end) for row in rows]
    blocks = [
        row.blocks[p // block_size] for row, ps in zip(rows, positions, strict=True) for p in ps
    ]
    offsets = [p % block_size for ps in positions for p in ps]
    groups = []
    first = 0
    for _, together in groupby(enumerate(rows), key=lambda item: _batch_key(*item)):
        members = [row for _, row in together]
        groups.append(_group(members, first, block_size, device))
        first += sum(len(row.ids) for row in members)
    slots = (torch.tensor(blocks, device=device), torch.tensor(offsets, device=device))
    return AttentionPlan(slots, tuple(groups))


def _batch_key(index: int, row: Row) -> tuple[int, int]:
    """Rows with equal keys are computed together. A chunk stands alone; rows that decode share a
    batch when their lengths are within a factor of two, so that padding at most doubles the work.
    """
    return (-1, index) if len(row.ids) > 1 else (len(row.blocks).bit_length(), 0)


def _group(rows: Sequence[Row], first: int, block_size: int, device: torch.device) -> Group:
    num_queries = len(rows[0].ids)
    width = max(len(row.blocks) for row in rows)
    table = [list(row.blocks) + [0] * (width - len(row.blocks)) for row in rows]
    starts = torch.tensor([row.start for row in rows], device=device)
    queries = starts[:, None] + torch.arange(num_queries, device=device)  # absolute positions
    keys = torch.arange(width * block_size, device=device)
    return Group(
        tokens=slice(first, first + len(rows) * num_queries),
        num_rows=len(rows),
        blocks=torch.tensor(table, device=device).view(-1),
        mask=(keys <= queries[:, :, None])[:, None],
    )


def write_kv(kv: Tensor, layer: int, plan: AttentionPlan, new_kv: Tensor) -> None:
    """Store ``new_kv`` ``[num_tokens, 2, num_kv_heads, head_dim]`` in the step's slots of one
    layer.

    ``kv`` is the pool, ``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``.
    """
    blocks, offsets = plan.slots
    kv[:, layer][blocks, :, :, offsets] = new_kv


def attend(kv: Tensor, layer: int, plan: AttentionPlan, queries: Tensor) -> Tensor:
    """Causal attention of ``queries`` ``[num_tokens, num_heads, head_dim]`` over their blocks."""
    out = torch.empty_like(queries)
    by_head = kv[:, layer].permute(1, 2, 0, 3, 4)  # [2, num_kv_heads, num_blocks, block_size, dim]
    _, num_kv_heads, _, _, head_dim = by_head.shape
    for group in plan.groups:
        q = queries[group.tokens]
        rows, num_queries = group.num_rows, len(q) // group.num_rows
        share = q.shape[1] // num_kv_heads  # query heads per KV head
        # The query heads of one KV head become more queries, so that keys need no repeating.
        q = q.view(rows, num_queries, num_kv_heads, share, head_dim)
        q = q.permute(0, 2, 3, 1, 4).reshape(rows, num_kv_heads, share * num_queries, head_dim)
        gathered = by_head.index_select(2, group.blocks).view(2, num_kv_heads, rows, -1, head_dim)
        k, v = gathered.transpose(1, 2)  # [rows, num_kv_heads, num_slots, head_dim] each
        mask = group.mask.repeat(1, 1, share, 1)
        o = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        o = o.view(rows, num_kv_heads, share, num_queries, head_dim).permute(0, 3, 1, 2, 4)
        out[group.tokens] = o.reshape(rows * num_queries, num_kv_heads * share, head_dim)
    return out
