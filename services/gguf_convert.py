"""Converts one GGUF file of the llama architecture into a folder as Hugging Face lays it out.

Reading a GGUF takes seconds (every string of the vocabulary is parsed in Python) and its weights
are quantised; the folder holds float32 safetensors, ``tokenizer.json`` and the chat template, and
opens in well under a second. Whatever the converter does not know (another architecture, a rope
scaling, an unknown tensor or pre-tokenizer) it refuses by name: a model converted half right
answers nonsense. Knows no cache and no network (:mod:`services.fetch`, whose ``CONVERTER_VERSION``
says when to convert again), and needs no torch.
"""

import json
import re
from pathlib import Path
from typing import IO, Any

import gguf
import numpy as np
from numpy.typing import NDArray

from services.gguf_fields import ConvertError, get, write_json
from services.gguf_tokenizer import write_tokenizer

__all__ = ["ConvertError", "convert"]

TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


def convert(path: Path, folder: Path) -> None:
    """Write config, weights, tokenizer and chat template of the GGUF ``path`` into ``folder``.

    ``folder`` must exist. Raises :class:`ConvertError`; it may then hold some of the files.
    """
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, OverflowError) as error:
        raise ConvertError(f"{path} is not a complete GGUF file: {error}") from error
    fields = {name: field for name, field in reader.fields.items() if field.data}
    config = model_config(fields, {t.name: t for t in reader.tensors})
    # The cheap files first: what is not supported shows before half a gigabyte is written.
    write_tokenizer(fields, folder)
    write_json(folder / "config.json", config)
    write_weights(reader.tensors, config, folder / "model.safetensors")


# --- configuration --------------------------------------------------------------------------------


def model_config(fields: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    """``config.json`` of a ``LlamaForCausalLM``; refuses what that class computes differently."""
    arch = get(fields, "general.architecture")
    if arch != "llama":
        raise ConvertError(f"architecture {arch!r} is not supported, only 'llama'")
    hidden = get(fields, "llama.embedding_length")
    heads = get(fields, "llama.attention.head_count")
    head_dim = get(fields, "llama.attention.key_length", hidden // heads)
    rotated = get(fields, "llama.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ConvertError(f"rope over {rotated} of {head_dim} dimensions is not supported")
    scaling = get(fields, "llama.rope.scaling.type", "none")
    if scaling != "none":
        raise ConvertError(f"rope scaling {scaling!r} is not supported")
    if get(fields, "llama.expert_count", 0):
        raise ConvertError("a mixture of experts is not supported")
    if "token_embd.weight" not in tensors:
        raise ConvertError("the GGUF lacks the tensor token_embd.weight")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": get(fields, "llama.feed_forward_length"),
        "num_hidden_layers": get(fields, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get(fields, "llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "max_position_embeddings": get(fields, "llama.context_length"),
        "rms_norm_eps": shortest(get(fields, "llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": shortest(get(fields, "llama.rope.freq_base", 10000.0)),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": get(fields, "tokenizer.ggml.bos_token_id", None),
        "eos_token_id": get(fields, "tokenizer.ggml.eos_token_id"),
        "torch_dtype": "float32",
    }


def shortest(value: float) -> float:
    """The shortest decimal that is the same float32: GGUF's 9.999999747378752e-06 is 1e-05."""
    return float(str(np.float32(value)))


# --- weights --------------------------------------------------------------------------------------


def hf_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    match = LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in LAYER_NAMES:
        raise ConvertError(f"tensor {name!r} is not supported")
    return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.weight"


def unpermute(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's row order of q and k, ``[num_heads * head_dim, hidden]``.

    Rope rotates pairs of dimensions. llama.cpp keeps the two of a pair next to each other, Hugging
    Face half a head apart.
    """
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[1])  # [num_heads, head_dim / 2, 2, hidden]
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def dequantize(tensor: Any, config: dict[str, Any]) -> NDArray[np.float32]:
    """One tensor as float32 in Hugging Face's row order."""
    try:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    except NotImplementedError as error:
        kind = tensor.tensor_type.name
        raise ConvertError(f"tensor {tensor.name!r} has the unsupported type {kind}") from error
    if tensor.name.endswith(".attn_q.weight"):
        values = unpermute(values, config["num_attention_heads"])
    elif tensor.name.endswith(".attn_k.weight"):
        values = unpermute(values, config["num_key_value_heads"])
    return np.ascontiguousarray(values, dtype="<f4")


def write_weights(tensors: list[Any], config: dict[str, Any], path: Path) -> None:
    """Write one safetensors file, tensor by tensor: memory never holds the whole model."""
    names = {hf_name(t.name): t for t in tensors}
    check_complete(set(names), config)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in names.items():
        end = offset + 4 * int(tensor.n_elements)
        shape = [int(n) for n in reversed(tensor.shape)]  # GGUF names the fastest axis first
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    with path.open("wb") as file:
        write_header(file, header)
        for tensor in names.values():
            file.write(dequantize(tensor, config).data)


def write_header(file: IO[bytes], header: dict[str, Any]) -> None:
    """The head of a safetensors file: u64 length, and JSON padded so that the data is aligned."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)


def check_complete(names: set[str], config: dict[str, Any]) -> None:
    """Every tensor that the configuration promises is there, and no other."""
    top = {"model.embed_tokens.weight", "model.norm.weight"}
    if not config["tie_word_embeddings"]:
        top.add("lm_head.weight")
    layers = {
        f"model.layers.{i}.{part}.weight"
        for i in range(config["num_hidden_layers"])
        for part in LAYER_NAMES.values()
    }
    if missing := sorted((top | layers) - names):
        raise ConvertError(f"the GGUF lacks tensors for {', '.join(missing[:5])}")
    if extra := sorted(names - top - layers):
        raise ConvertError(f"the GGUF holds tensors beyond its layers: {', '.join(extra[:5])}")
