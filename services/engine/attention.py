"""Paged attention in plain torch: the reference that every faster path is compared with.

Queries of a step are flat, ``[num_tokens, num_heads, head_dim]``; keys and values lie in the blocks
of the pool. A :class:`AttentionPlan` is built once per step and used by every layer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, groupby

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from services.engine.scheduler import Row


@dataclass(frozen=True)
class Group:
    """Rows that the reference computes together: some that decode (one query each), or one prefill
    chunk.
    """

    tokens: slice  # of the step's flat tokens
    blocks: Tensor  # [num_rows * num_blocks], padded with block 0
    queries: Tensor  # [num_rows, num_queries]: positions
    keys: Tensor  # [num_blocks * block_size]: positions of the slots
    _masks: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def mask(self, window: int) -> Tensor:
        """bool ``[num_rows, 1, num_queries, num_slots]``: which slots are seen. Layers share it."""
        if window not in self._masks:
            queries = self.queries[:, None, :, None]
            seen = self.keys <= queries
            self._masks[window] = seen & (self.keys > queries - window) if window else seen
        return self._masks[window]


@dataclass(frozen=True)
class AttentionPlan:
    """Where this step's keys and values are written, and what its queries read.

    Row ``r`` has the flat tokens ``firsts[r]`` to ``firsts[r + 1]``, at positions from
    ``starts[r]`` on. Its blocks, from position 0 on, are ``blocks[tables[r]]`` to
    ``blocks[tables[r + 1]]``.
    """

    rows: tuple[Row, ...]
    block_size: int
    slots: tuple[Tensor, Tensor]  # block and offset of each new token, [num_tokens] each
    firsts: Tensor  # [num_rows + 1]
    starts: Tensor  # [num_rows]
    blocks: Tensor  # of all rows
    tables: Tensor  # [num_rows + 1]

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """What the reference computes together; made when it is first asked for."""
        groups = []
        first = 0
        for _, together in groupby(enumerate(self.rows), key=lambda item: _batch_key(*item)):
            members = [row for _, row in together]
            groups.append(_group(members, first, self.block_size, self.blocks.device))
            first += sum(len(row.ids) for row in members)
        return tuple(groups)


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

    def tensor(values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), device=device)

    return AttentionPlan(
        rows=tuple(rows),
        block_size=block_size,
        slots=(tensor(blocks), tensor(offsets)),
        firsts=tensor(accumulate((len(row.ids) for row in rows), initial=0)),
        starts=tensor(row.start for row in rows),
        blocks=tensor(chain.from_iterable(row.blocks for row in rows)),
        tables=tensor(accumulate((len(row.blocks) for row in rows), initial=0)),
    )


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
    return Group(
        tokens=slice(first, first + len(rows) * num_queries),
        blocks=torch.tensor(table, device=device).view(-1),
        queries=starts[:, None] + torch.arange(num_queries, device=device),
        keys=torch.arange(width * block_size, device=device),
    )


def write_kv(kv: Tensor, layer: int, plan: AttentionPlan, new_kv: Tensor) -> None:
    """Store ``new_kv`` ``[num_tokens, 2, num_kv_heads, head_dim]`` in the step's slots of one
    layer.

    ``kv`` is the pool, ``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``.
    """
    blocks, offsets = plan.slots
    kv[:, layer][blocks, :, :, offsets] = new_kv


def attend(kv: Tensor, layer: int, plan: AttentionPlan, queries: Tensor, window: int = 0) -> Tensor:
    """Causal attention of ``queries`` ``[num_tokens, num_heads, head_dim]`` over their blocks.

    ``window``: how many positions a query sees, its own the last of them; 0: all.
    """
    out = torch.empty_like(queries)
    by_head = kv[:, layer].permute(1, 2, 0, 3, 4)  # [2, num_kv_heads, num_blocks, block_size, dim]
    _, num_kv_heads, _, _, head_dim = by_head.shape
    for group in plan.groups:
        q = queries[group.tokens]
        rows, num_queries = group.queries.shape
        share = q.shape[1] // num_kv_heads  # query heads per KV head
        # The query heads of one KV head become more queries, so that keys need no repeating.
        q = q.view(rows, num_queries, num_kv_heads, share, head_dim)
        q = q.permute(0, 2, 3, 1, 4).reshape(rows, num_kv_heads, share * num_queries, head_dim)
        gathered = by_head.index_select(2, group.blocks).view(2, num_kv_heads, rows, -1, head_dim)
        k, v = gathered.transpose(1, 2)  # [rows, num_kv_heads, num_slots, head_dim] each
        mask = group.mask(window).repeat(1, 1, share, 1)
        o = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        o = o.view(rows, num_kv_heads, share, num_queries, head_dim).permute(0, 3, 1, 2, 4)
        out[group.tokens] = o.reshape(rows * num_queries, num_kv_heads * share, head_dim)
    return out
