"""A decoder-only transformer of the Llama family, as Hugging Face names its parts.

Functions over flat tokens: ``ids`` and ``positions`` are ``[num_tokens]``, hidden states
``[num_tokens, hidden_size]``. Where keys and values are kept is the attention's business.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from services.engine.attention import AttentionPlan, attend, write_kv
from services.engine.linear import Linear, Product, product

SUPPORTED = ("LlamaForCausalLM",)


class ModelError(Exception):
    """The model's folder cannot be used; the message says what is supported."""


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model, from its ``config.json``."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    rms_norm_eps: float
    rope_theta: float
    tied_head: bool

    @property
    def rope(self) -> str:
        """Canonical text of the rotary embedding: part of the KV's identity."""
        return f"theta={self.rope_theta:g}"


def read_config(folder: Path) -> ModelConfig:
    """Parse ``config.json``; raises :class:`ModelError` for a model that is not supported."""
    raw: dict[str, Any] = json.loads((folder / "config.json").read_text())
    architecture = (raw.get("architectures") or ["unknown"])[0]
    rope = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or rope
    refused = [
        text
        for text, wrong in (
            (f"architecture {architecture}", architecture not in SUPPORTED),
            (f"rope scaling {scaling}", scaling.get("rope_type", "default") != "default"),
            ("attention bias", raw.get("attention_bias", False)),
            ("MLP bias", raw.get("mlp_bias", False)),
            (f"activation {raw.get('hidden_act')}", raw.get("hidden_act", "silu") != "silu"),
        )
        if wrong
    ]
    if refused:
        raise ModelError(
            f"{folder}: not supported: {', '.join(refused)}; supported: {', '.join(SUPPORTED)} "
            "with SiLU, without biases or rope scaling"
        )
    num_heads = raw["num_attention_heads"]
    return ModelConfig(
        num_layers=raw["num_hidden_layers"],
        hidden_size=raw["hidden_size"],
        num_heads=num_heads,
        num_kv_heads=raw.get("num_key_value_heads", num_heads),
        head_dim=raw.get("head_dim") or raw["hidden_size"] // num_heads,
        vocab_size=raw["vocab_size"],
        max_model_len=raw["max_position_embeddings"],
        rms_norm_eps=raw["rms_norm_eps"],
        rope_theta=float(raw.get("rope_theta") or rope.get("rope_theta", 10000.0)),
        tied_head=raw.get("tie_word_embeddings", False),
    )


@dataclass(frozen=True)
class Layer:
    """Weights of one block; q, k, v and gate, up are stacked so that each is one product."""

    input_norm: Tensor
    qkv: Product  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]
    output: Product
    post_norm: Tensor
    gate_up: Product  # [2 * intermediate_size, hidden_size]
    down: Product


class Model:
    """Weights and the forward pass."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        int8: bool = False,
    ) -> None:
        """``weights`` by Hugging Face name; raises :class:`ModelError` when one is missing.

        ``int8``: see :class:`~services.engine.linear.PackedLinear`; for float32 on a CPU.
        """
        self.config = config
        make = functools.partial(product, int8=int8)

        def get(name: str) -> Tensor:
            if name not in weights:
                raise ModelError(f"the weights lack {name!r}")
            return weights[name].to(device=device, dtype=dtype)

        self.norm = get("model.norm.weight")
        self.head = make(get("model.embed_tokens.weight" if config.tied_head else "lm_head.weight"))
        self.embed = self.head if config.tied_head else Linear(get("model.embed_tokens.weight"))
        self.layers = [
            Layer(
                get(f"{p}.input_layernorm.weight"),
                make(torch.cat([get(f"{p}.self_attn.{x}_proj.weight") for x in ("q", "k", "v")])),
                make(get(f"{p}.self_attn.o_proj.weight")),
                get(f"{p}.post_attention_layernorm.weight"),
                make(torch.cat([get(f"{p}.mlp.{x}_proj.weight") for x in ("gate", "up")])),
                make(get(f"{p}.mlp.down_proj.weight")),
            )
            for p in (f"model.layers.{i}" for i in range(config.num_layers))
        ]
        # Angles in float32 also for lower dtypes: at thousands of positions they need the bits.
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
        frequencies = 1.0 / config.rope_theta ** (steps / config.head_dim)
        positions = torch.arange(config.max_model_len, dtype=torch.float32, device=device)
        angles = torch.outer(positions, frequencies)
        self.cos = torch.cat((angles.cos(), angles.cos()), -1)  # [max_model_len, head_dim]
        self.sin = torch.cat((-angles.sin(), angles.sin()), -1)

    def forward(self, ids: Tensor, positions: Tensor, kv: Tensor, plan: AttentionPlan) -> Tensor:
        """Hidden states ``[num_tokens, hidden_size]`` after the last norm; KV goes to ``kv``."""
        config = self.config
        eps, size = config.rms_norm_eps, (config.hidden_size,)
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        hidden = self.embed.rows(ids)
        for index, layer in enumerate(self.layers):
            x = rms_norm(hidden, size, layer.input_norm, eps)
            qkv = layer.qkv(x).view(len(ids), -1, config.head_dim)
            num_rotated = config.num_heads + config.num_kv_heads
            rotated = _rotate(qkv[:, :num_rotated], cos, sin)
            queries = rotated[:, : config.num_heads]
            keys, values = rotated[:, config.num_heads :], qkv[:, num_rotated:]
            write_kv(kv, index, plan, torch.stack((keys, values), 1))
            attended = attend(kv, index, plan, queries.contiguous())
            hidden = hidden + layer.output(attended.view(len(ids), -1))
            x = rms_norm(hidden, size, layer.post_norm, eps)
            gate, up = layer.gate_up(x).chunk(2, -1)
            hidden = hidden + layer.down(silu(gate) * up)
        return rms_norm(hidden, size, self.norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 ``[num_rows, vocab_size]`` of the chosen hidden states."""
        return self.head(hidden).float()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (Su et al., RoFormer) in the half-split form; ``x`` is [tokens, heads, dim].

    ``sin`` carries the sign of the first half.
    """
    swapped = x.roll(x.shape[-1] // 2, -1)
    return (x * cos + swapped * sin).to(x.dtype)
