"""How much memory a model takes: all tensors that can be reached from it, each byte once.

So tied weights count once, and copies in another layout, which some kernels want, count as well.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass

import torch


def num_bytes(root: object) -> int:
    """Bytes of the tensors below ``root``: in its attributes, items, and theirs."""
    spans: list[tuple[str, int, int]] = []  # device, first byte, end
    seen: set[int] = set()
    pending = [root]
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            spans.append((str(item.device), item.data_ptr(), item.data_ptr() + _extent(item)))
        else:
            pending += _parts(item)
    return _union(spans)


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from its first element to the end of its last."""
    if not tensor.numel():
        return 0
    steps = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()


def _union(spans: list[tuple[str, int, int]]) -> int:
    total, device, reached = 0, "", 0
    for where, first, end in sorted(spans):
        if where != device:
            device, reached = where, 0
        total += max(0, end - max(first, reached))
        reached = max(reached, end)
    return total


def _parts(item: object) -> list[object]:
    if isinstance(item, Mapping):
        return list(item.values())
    if isinstance(item, (list, tuple)):
        return list(item)
    if is_dataclass(item):
        return [getattr(item, field.name) for field in fields(item)]
    return list(vars(item).values()) if hasattr(item, "__dict__") else []
