"""Reads a model folder's safetensors, and makes tiny random weights for tests."""

import math
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.engine.model_config import ModelConfig, ModelError
from services.engine.weight_files import WeightFilesError, weight_files


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors by name, mapped from the files, not copied.

    Raises :class:`ModelError` where files are missing or damaged.
    """
    try:
        files = weight_files(folder)
    except WeightFilesError as error:
        raise ModelError(f"{folder}: {error}") from error
    if not files:
        raise ModelError(f"{folder} holds no *.safetensors file")
    weights: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                    weights[name] = tensors.get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"cannot read {file}: {error}") from error
    return weights


def random_weights(config: ModelConfig, intermediate_size: int, seed: int) -> dict[str, Tensor]:
    """Weights of a small model whose answers vary: for tests without a real one."""
    generator = torch.Generator().manual_seed(seed)
    hidden, dim = config.hidden_size, config.head_dim

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)

    weights = {
        "model.embed_tokens.weight": matrix(config.vocab_size, hidden) * math.sqrt(hidden),
        "model.norm.weight": torch.ones(hidden),
    }
    if not config.tied_head:
        weights["lm_head.weight"] = matrix(config.vocab_size, hidden) * 4
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}"
        heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
        for name, count in heads.items():
            weights[f"{prefix}.self_attn.{name}_proj.weight"] = matrix(count * dim, hidden)
        weights[f"{prefix}.self_attn.o_proj.weight"] = matrix(hidden, config.num_heads * dim)
        for name in ("gate", "up"):
            weights[f"{prefix}.mlp.{name}_proj.weight"] = matrix(intermediate_size, hidden)
        weights[f"{prefix}.mlp.down_proj.weight"] = matrix(hidden, intermediate_size)
        for name in ("input", "post_attention"):
            weights[f"{prefix}.{name}_layernorm.weight"] = torch.ones(hidden)
    return weights
