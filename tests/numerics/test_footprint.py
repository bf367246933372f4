"""The memory of a model: each byte that can be reached from it, once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.engine.footprint import num_bytes


@dataclass
class Layer:
    weight: torch.Tensor
    bias: torch.Tensor | None = None


class Model:
    def __init__(self) -> None:
        self.name = "a model"
        self.embed = torch.zeros(10, 8)
        self.head = self.embed  # tied
        self.layers = [Layer(torch.zeros(8, 8)), Layer(torch.zeros(8, 8, dtype=torch.int8))]


def test_each_tensor_counts_once() -> None:
    assert num_bytes(Model()) == 320 + 256 + 64


def test_a_copy_in_another_layout_counts() -> None:
    model = Model()
    model.layers.append(Layer(model.embed.t().contiguous()))
    assert num_bytes(model) == 320 + 256 + 64 + 320


def test_parts_of_one_memory_count_once() -> None:
    whole = torch.zeros(10, 8)
    parts = {"a": whole[:6], "b": (whole[4:8], [whole[6]]), "empty": torch.zeros(0, 8)}
    assert num_bytes(parts) == 8 * 8 * 4
    assert num_bytes([parts, whole.t()]) == 10 * 8 * 4
    assert num_bytes(whole[:, :1]) == (9 * 8 + 1) * 4  # up to its last element
