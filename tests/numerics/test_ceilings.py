"""What a machine can do, as a worker measures it; and what models say of their weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services import ceilings
from services.engine.config import EngineConfig
from services.engine.model import Model
from services.engine.model_config import ModelConfig
from services.engine.roofline import Ceilings, Weights
from services.engine.weights import random_weights
from tests.support.roofline import Shape
from tests.support.tiny_model import INTERMEDIATE, SHAPE

CONFIG = EngineConfig(threads=1, dtype="float32", device="cpu")
CPU = torch.device("cpu")
# Sizes that are whole vectors: nothing is padded.
WHOLE = replace(SHAPE, hidden_size=64, num_heads=4, head_dim=16, vocab_size=128)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(ceilings, "BOX_S", 0.0)
    monkeypatch.setattr(ceilings, "SHAPES", {"cpu": ((8, 8, 8), (8, 16, 32))})
    monkeypatch.setattr(ceilings, "READ_BYTES", 1 << 16)


@pytest.mark.usefixtures("small")
def test_both_are_measured_once_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ceilings.machine_ceilings(CONFIG)
    assert all(math.isfinite(value) and value > 0 for value in (found.flops_s, found.bytes_s))
    monkeypatch.setattr(ceilings, "gemm_flops", lambda device, dtype: 5.0)
    monkeypatch.setattr(ceilings, "read_bytes", lambda device: 6.0)
    assert ceilings.machine_ceilings(CONFIG) == found
    more = replace(CONFIG, threads=2)
    assert ceilings.machine_ceilings(more) == Ceilings(5.0, 6.0)
    half = replace(CONFIG, dtype="bfloat16")
    assert ceilings.machine_ceilings(half) == Ceilings(5.0, found.bytes_s)


@pytest.mark.usefixtures("small")
def test_what_a_quarter_of_the_tries_reach_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the fastest shape; neither one lucky try nor those that others disturb."""
    times: Iterator[float] = iter([0.5, 0.1, 0.25, 0.2, 0.25, 1.0])
    monkeypatch.setattr(ceilings, "BOX_S", 1.0)
    monkeypatch.setattr(ceilings, "_timed", lambda act, device: next(times))
    # 0.5 + 0.1 + 0.25 + 0.2 s of the small one, and 0.25 + 1 s of the other, which does more.
    assert ceilings.gemm_flops(CPU, torch.float32) == 2 * 8 * 16 * 32 / 0.25
    monkeypatch.setattr(ceilings, "SHAPES", {"cpu": ((8, 8, 8),)})
    times = iter([0.5, 0.1, 0.25, 0.2])
    monkeypatch.setattr(ceilings, "_timed", lambda act, device: next(times))
    assert ceilings.gemm_flops(CPU, torch.float32) == 2 * 8 * 8 * 8 / 0.2
    times = iter([0.75, 0.25])
    monkeypatch.setattr(ceilings, "_timed", lambda act, device: next(times))
    assert ceilings.read_bytes(CPU) == (1 << 16) / 0.25


def test_a_sum_reads_all_of_the_memory() -> None:
    """On this machine: more than a tenth of a GB and less than what no machine has."""
    assert 1e8 < ceilings.read_bytes(CPU) < 1e13


# --- weights --------------------------------------------------------------------------------------


def model(shape: ModelConfig, dtype: torch.dtype = torch.float32, int8: bool = False) -> Model:
    return Model(shape, random_weights(shape, INTERMEDIATE, 3), dtype, CPU, int8)


def as_shape(shape: ModelConfig) -> Shape:
    return Shape(
        shape.num_layers,
        shape.hidden_size,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        INTERMEDIATE,
        shape.vocab_size,
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["float32", "int8", "bfloat16"])
def test_a_model_knows_what_its_steps_cost(kind: str, tied: bool) -> None:
    config = replace(WHOLE, tied_head=tied)
    int8 = kind == "int8"
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    costs = model(config, dtype, int8).step_costs(kv_item_bytes=dtype.itemsize)
    shape = as_shape(config)
    head = shape.hidden * shape.vocab
    assert costs.layers.count == shape.num_layers * shape.layer_weights
    assert costs.head.count == head
    weight_bytes = shape.weight_bytes(int8) * dtype.itemsize // 4 if not int8 else None
    total = costs.layers.num_bytes + costs.head.num_bytes
    assert total == (weight_bytes if weight_bytes is not None else shape.weight_bytes(int8=True))
    assert shape.num_layers * costs.kv_bytes == shape.kv_bytes(1, dtype.itemsize)
    assert shape.num_layers * costs.pair_flops == shape.attention_flops(1)
    assert costs.windows == ((0, 3),)


def test_padding_is_read_but_computes_nothing() -> None:
    """36 outputs lie in panels of 48."""
    costs = model(SHAPE).step_costs(4)
    shape = as_shape(SHAPE)
    head = shape.hidden * shape.vocab
    assert costs.head == Weights(head, 4 * 36 * 112)
    assert costs.layers.count == shape.num_layers * shape.layer_weights
    assert costs.layers.num_bytes > 4 * costs.layers.count


def test_layers_with_a_window_are_told_apart() -> None:
    costs = model(replace(WHOLE, window=7, window_layers=(0, 2))).step_costs(4)
    assert sorted(costs.windows) == [(0, 1), (7, 2)]
