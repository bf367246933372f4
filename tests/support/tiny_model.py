"""A folder with a tiny random Llama, as Hugging Face lays it out."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from services.engine.model_config import ModelConfig
from services.engine.weights import random_weights

INTERMEDIATE = 48
SHAPE = ModelConfig(
    num_layers=3,
    hidden_size=36,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=101,
    max_model_len=128,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    tied_head=False,
)


def save_model(folder: Path, shape: ModelConfig = SHAPE, seed: int = 3) -> dict[str, Tensor]:
    """Write ``config.json`` and the weights; returns the weights."""
    weights = random_weights(shape, INTERMEDIATE, seed)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_model_len,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": shape.tied_head,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return weights
