"""Writes a small GGUF of the llama architecture with random weights, as llama.cpp makes them.

Tests run this file with ``runpy``, since the test folders are no packages.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, LAYERS = 64, 4, 2, 16, 96, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def alphabet() -> list[str]:
    """GPT-2's characters of the 256 bytes, by code point."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(c) for c in [*kept, *range(0x100, 0x100 + 256 - len(kept))]]


TOKENS = [*SPECIAL, *alphabet(), *(m.replace(" ", "") for m in MERGES)]
VOCABULARY: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)),
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": TEMPLATE,
}


def permute(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """llama.cpp's row order of q and k: the two dimensions of a rope pair side by side."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def random_weights(seed: int, tied: bool = True) -> dict[str, NDArray[np.float32]]:
    """Weights by GGUF name in Hugging Face's row order, ``[out, in]``."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (len(TOKENS), HIDDEN)}
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm": (HIDDEN,),
            f"blk.{i}.attn_q": (HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_output": (HIDDEN, HEADS * HEAD_DIM),
            f"blk.{i}.ffn_norm": (HIDDEN,),
            f"blk.{i}.ffn_gate": (MLP, HIDDEN),
            f"blk.{i}.ffn_up": (MLP, HIDDEN),
            f"blk.{i}.ffn_down": (HIDDEN, MLP),
        }
    shapes["output_norm"] = (HIDDEN,)
    if not tied:
        shapes["output"] = (len(TOKENS), HIDDEN)
    rng = np.random.default_rng(seed)
    return {
        f"{name}.weight": rng.standard_normal(shape, dtype=np.float32) * 0.3
        for name, shape in shapes.items()
    }


def write(
    path: Path,
    weights: dict[str, NDArray[np.float32]],
    quantized: frozenset[str] = frozenset(),
    change: dict[str, Any] | None = None,
) -> None:
    """Write ``weights``; ``change`` replaces (or, with None, drops) metadata fields.

    Tensors named in ``quantized`` become Q8_0.
    """
    fields: dict[str, Any] = {
        "llama.block_count": LAYERS,
        "llama.context_length": 512,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": MLP,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": HEAD_DIM,
        **VOCABULARY,
    }
    tensors: dict[str, Any] = {}
    for name, value in weights.items():
        if name.endswith("attn_q.weight"):
            value = permute(value, HEADS)
        elif name.endswith("attn_k.weight"):
            value = permute(value, KV_HEADS)
        if name in quantized:
            kind = gguf.GGMLQuantizationType.Q8_0
            tensors[name] = (gguf.quantize(value, kind), kind)
        else:
            tensors[name] = value
    write_file(path, "llama", fields | (change or {}), tensors)


def write_file(
    path: Path, arch: str, fields: Mapping[str, Any], tensors: Mapping[str, Any]
) -> None:
    """Write one GGUF: the fields that are not None, and arrays or pairs of bytes and their type."""
    writer = gguf.GGUFWriter(path, arch)
    add: dict[type, Any] = {bool: writer.add_bool, int: writer.add_uint32}
    add |= {float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    for name, value in fields.items():
        if value is not None:
            add[type(value)](name, value)
    for name, value in tensors.items():
        data, kind = value if isinstance(value, tuple) else (value, None)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
