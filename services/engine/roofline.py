"""What a step costs, counted from its plan, and what a machine can do at best (pure).

A multiply-add is two operations. Counted is what no implementation can do without: the products
with weight matrices, one row of the head for each token that is sampled, and attention of each
query over what it sees, itself included; norms, rotary embedding, softmax and sampling are not.
Bytes are each weight once per step, and the keys and values that are read and written. Rows that
share blocks read them once each, and an embedding's rows are not counted.

Time by the larger of operations / ``flops_s`` and bytes / ``bytes_s`` is the roof of Williams,
Waterman and Patterson, "Roofline: an insightful visual performance model" (2009).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.engine.scheduler import Row


@dataclass(frozen=True)
class Ceilings:
    """What a machine can do: operations and bytes per second. 0: nobody has measured it."""

    flops_s: float = 0.0
    bytes_s: float = 0.0


@dataclass(frozen=True)
class Cost:
    """Operations, and bytes between memory and processor."""

    flops: int
    num_bytes: int


@dataclass(frozen=True)
class Weights:
    """Some weight matrices: how many numbers they have, and the memory these take."""

    count: int
    num_bytes: int


@dataclass(frozen=True)
class StepCosts:
    """What a model's steps cost.

    ``windows``: how many layers have which attention window, 0 for none.
    """

    layers: Weights  # of all of them
    head: Weights
    pair_flops: int  # of a query and a key that it sees, all heads of one layer
    kv_bytes: int  # keys and values of a token, one layer
    windows: tuple[tuple[int, int], ...]  # (window, layers)

    def of(self, rows: Sequence[Row]) -> Cost:
        """The cost of a plan's rows; nothing for none."""
        if not rows:
            return Cost(0, 0)
        num_tokens = sum(len(row.ids) for row in rows)
        num_sampled = sum(row.sample for row in rows)
        flops = 2 * (num_tokens * self.layers.count + num_sampled * self.head.count)
        num_bytes = self.layers.num_bytes + (self.head.num_bytes if num_sampled else 0)
        for window, num_layers in self.windows:
            seen = [attended(row.start, len(row.ids), window) for row in rows]
            flops += num_layers * self.pair_flops * sum(pairs for pairs, _ in seen)
            num_bytes += num_layers * self.kv_bytes * sum(positions for _, positions in seen)
        return Cost(flops, num_bytes)


def attended(start: int, count: int, window: int = 0) -> tuple[int, int]:
    """Of ``count`` tokens from position ``start`` on: pairs of a query and a key that it sees, and
    positions whose keys and values are read, or written and read.

    A query at position p sees p + 1 keys, at most ``window`` if that is not 0.
    """
    if not window or start + count <= window:
        return count * start + count * (count + 1) // 2, start + count
    narrow = max(0, window - 1 - start)  # queries that see fewer; the others see all of a window
    pairs = narrow * start + narrow * (narrow + 1) // 2 + (count - narrow) * window
    return pairs, min(start, window - 1) + count
