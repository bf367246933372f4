"""GGUF files as llama.cpp makes them: of a ``transformers`` model, and random blocks of every
quantisation. Written from llama.cpp's conventions, apart from the converter that is tested.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from transformers import PreTrainedModel

from tests.data.tiny_gguf import VOCABULARY, permute, write_file

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "smollm3": "smollm3",
}
PERMUTED = ("llama", "smollm3")
PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
TOPS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    """``model.layers.3.mlp.up_proj.weight`` is ``blk.3.ffn_up.weight``."""
    stem, _, kind = name.rpartition(".")
    if stem in TOPS:
        return f"{TOPS[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{PARTS[part]}.{kind}"


def checkpoint_fields(config: Any) -> dict[str, Any]:
    """The metadata of a model, but for its vocabulary."""
    arch = ARCHITECTURES[config.model_type]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    fields = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    if arch in PERMUTED:
        fields["rope.dimension_count"] = head_dim
    if config.model_type == "mistral" and config.sliding_window:
        fields["attention.sliding_window"] = config.sliding_window
    if config.rope_parameters["rope_type"] == "linear":
        fields["rope.scaling.type"] = "linear"
        fields["rope.scaling.factor"] = float(config.rope_parameters["factor"])
    return {f"{arch}.{name}": value for name, value in fields.items()}


def llama3_factors(rope: Mapping[str, Any], head_dim: int) -> NDArray[np.float32]:
    """What llama.cpp divides each frequency by, computed one by one."""
    factors = []
    for i in range(0, head_dim, 2):
        wave = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        fits = rope["original_max_position_embeddings"] / wave
        if fits > rope["high_freq_factor"]:
            factors.append(1.0)
        elif fits < rope["low_freq_factor"]:
            factors.append(rope["factor"])
        else:
            span = rope["high_freq_factor"] - rope["low_freq_factor"]
            share = (fits - rope["low_freq_factor"]) / span
            factors.append(1 / ((1 - share) / rope["factor"] + share))
    return np.array(factors, np.float32)


def checkpoint_tensors(model: PreTrainedModel) -> dict[str, NDArray[np.float32]]:
    """The weights of a model by GGUF name, in llama.cpp's row order."""
    config: Any = model.config
    heads = {"attn_q.": config.num_attention_heads, "attn_k.": config.num_key_value_heads}
    tensors = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        target, array = gguf_name(name), value.detach().float().numpy()
        for part, count in heads.items():
            if part in target and ARCHITECTURES[config.model_type] in PERMUTED:
                array = permute(array, count)
        tensors[target] = np.ascontiguousarray(array)
    if config.rope_parameters["rope_type"] == "llama3":
        head_dim = config.hidden_size // config.num_attention_heads
        tensors["rope_freqs.weight"] = llama3_factors(config.rope_parameters, head_dim)
    return tensors


def write_checkpoint(
    path: Path,
    model: PreTrainedModel,
    drop: tuple[str, ...] = (),
    change: Mapping[str, Any] | None = None,
) -> None:
    """Write ``model``, but for the fields and tensors whose names end with one of ``drop``.

    ``change`` replaces fields.
    """
    config: Any = model.config
    fields = {**checkpoint_fields(config), **VOCABULARY, **(change or {})}
    tensors = checkpoint_tensors(model)
    write_file(
        path,
        ARCHITECTURES[config.model_type],
        {name: value for name, value in fields.items() if not name.endswith(drop)},
        {name: value for name, value in tensors.items() if not name.endswith(drop)},
    )


# --- quantised blocks -----------------------------------------------------------------------------

HALVES = {  # where a block has its float16 scales
    **dict.fromkeys((Kind.Q4_0, Kind.Q5_0, Kind.Q8_0, Kind.IQ4_NL, Kind.IQ4_XS), (0,)),
    **dict.fromkeys((Kind.IQ2_XXS, Kind.IQ2_XS, Kind.IQ2_S, Kind.IQ3_XXS, Kind.IQ3_S), (0,)),
    Kind.IQ1_S: (0,),
    **dict.fromkeys((Kind.Q4_1, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K), (0, 2)),
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q6_K: (208,),
    Kind.TQ1_0: (52,),
    Kind.TQ2_0: (64,),
}


def random_blocks(
    kind: Kind, rows: int, columns: int, spread: float, rng: np.random.Generator
) -> NDArray[np.uint8]:
    """Random blocks ``[rows, bytes of a row]`` whose values are about ``spread`` large.

    All bits are random but for those of the scales: the package quantises to few kinds only.
    """
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if kind in (Kind.F32, Kind.F16, Kind.BF16):
        values = rng.standard_normal((rows, columns)).astype(np.float32) * np.float32(spread)
        return gguf.quantize(values, kind).view(np.uint8)
    blocks = rng.integers(0, 256, (rows * columns // block, block_bytes), np.uint8)
    if kind == Kind.MXFP4:  # a power of two, biased by 128 for values in halves
        blocks[:, 0] = 128 + round(math.log2(spread / 6)) - rng.integers(0, 3, len(blocks))
    elif kind == Kind.NVFP4:  # four scales with four bits of exponent and three of mantissa
        exponent = 7 + round(math.log2(spread / 6)) - rng.integers(0, 3, (len(blocks), 4))
        blocks[:, :4] = (exponent.clip(0, 14) << 3) | rng.integers(0, 8, (len(blocks), 4))
    else:
        set_scales(blocks, kind, np.ones(len(blocks)))
        size = np.abs(gguf.dequantize(blocks, kind)).mean()
        set_scales(blocks, kind, rng.uniform(0.5, 1.5, len(blocks)) * spread / size)
    return blocks.reshape(rows, -1)


def set_scales(blocks: NDArray[np.uint8], kind: Kind, scales: NDArray[np.float64]) -> None:
    """Write each block's float16 scale, and its minimum if it has one."""
    halves = scales.astype("<f2").view(np.uint8).reshape(-1, 2)
    if kind == Kind.IQ1_M:  # a nibble each, in the high bits of four numbers of 16 bits
        bits = scales.astype("<f2").view("<u2")
        packed = blocks[:, 48:56].copy().view("<u2")
        for i in range(4):
            packed[:, i] = packed[:, i] & 0x0FFF | (bits >> (4 * i) & 0xF) << 12
        blocks[:, 48:56] = packed.view(np.uint8)
    for at in HALVES.get(kind, ()):
        blocks[:, at : at + 2] = halves
