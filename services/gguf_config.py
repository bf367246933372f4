"""The ``config.json`` of a GGUF model, and the tensors that its architecture has.

GGUF names a model by llama.cpp's architecture, whose computation is fixed but for the metadata.
What ``transformers``' class of that model would compute otherwise is refused by name. Knows
metadata and shapes: no weights, no tokenizer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.gguf_fields import ConvertError, Fields, count, get, number

Shape = tuple[int, ...]

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
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF's names of the parts of layer i, ``blk.i.NAME.weight``, and those of Hugging Face."""
ROPE_FACTORS = "rope_freqs.weight"
ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
MLP = ("ffn_gate", "ffn_up", "ffn_down")
NOPE_INTERVAL = 4  # every fourth layer of SmolLM3 has no rotary embedding; no file says so

NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.scale": (0,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "logit_scale": (0, 1),
    "rope.scaling.attn_factor": (0, 1),
    "expert_count": (0,),
}
"""Metadata that change the computation, with the values that do not."""


@dataclass(frozen=True)
class Family:
    """What differs between llama.cpp's architectures."""

    model: str  # the class's name in transformers, without ForCausalLM
    interleaved: bool  # q and k have rope's pairs side by side, not half a head apart
    rope_factors: bool = False  # may have a divisor for each frequency
    rope_scaling: bool = True  # may have one for all
    window: bool = False  # has the sliding window that the metadata give, in every layer
    qk_norm: bool = False
    qkv_bias: bool = False  # always; False: any part may have a bias


FAMILIES = {
    "llama": Family("Llama", interleaved=True, rope_factors=True, window=True),
    "mistral3": Family(
        "Llama", interleaved=True, rope_factors=True, rope_scaling=False, window=True
    ),
    "qwen2": Family("Qwen2", interleaved=False, qkv_bias=True),
    "qwen3": Family("Qwen3", interleaved=False, qk_norm=True),
    "smollm3": Family("SmolLM3", interleaved=True),
}


def model_family(fields: Fields) -> tuple[str, Family]:
    """The architecture's name, which is the prefix of its metadata, and what is known of it."""
    kind = get(fields, "general.type", "model")
    if kind != "model":
        raise ConvertError(f"the GGUF holds no model, but one's {kind!r}")
    arch = get(fields, "general.architecture")
    if arch not in FAMILIES:
        raise ConvertError(
            f"architecture {arch!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    return arch, FAMILIES[arch]


def model_config(
    fields: Fields, shapes: Mapping[str, Shape], rope_factors: list[float] | None
) -> dict[str, Any]:
    """The ``config.json``, without the tokenizer's part; raises :class:`ConvertError`.

    ``shapes`` are those of the tensors by GGUF name. ``rope_factors``: what each of rope's
    frequencies is divided by, for Llama 3.1 and its kin.
    """
    arch, family = model_family(fields)
    refuse_unknown(fields, arch)
    hidden = count(fields, f"{arch}.embedding_length")
    heads = count(fields, f"{arch}.attention.head_count")
    num_layers = count(fields, f"{arch}.block_count")
    length = count(fields, f"{arch}.context_length")
    if "token_embd.weight" not in shapes:
        raise ConvertError("the GGUF lacks the tensor token_embd.weight")
    if num_layers > len(shapes):  # before lists of that length are made
        raise ConvertError(f"the GGUF has {len(shapes)} tensors for {num_layers} layers")
    base = shortest(number(fields, f"{arch}.rope.freq_base", 10000.0))
    window = sliding_window(fields, arch, family, length)
    model = "Mistral" if window else family.model
    config = {
        "architectures": [f"{model}ForCausalLM"],
        "model_type": model.lower(),
        "hidden_size": hidden,
        "intermediate_size": count(fields, f"{arch}.feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": count(fields, f"{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim(fields, arch, hidden // heads),
        "vocab_size": shapes["token_embd.weight"][0],
        "max_position_embeddings": length,
        "rms_norm_eps": shortest(number(fields, f"{arch}.attention.layer_norm_rms_epsilon")),
        "rope_theta": base,
        "rope_parameters": {"rope_theta": base, **rope(fields, arch, family, rope_factors)},
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in shapes,
        "torch_dtype": "float32",
    }
    if not family.qkv_bias:
        config["attention_bias"] = has_bias(shapes, ATTENTION)
        config["mlp_bias"] = has_bias(shapes, MLP)
    if window:
        config["sliding_window"] = window
    elif not family.window:
        config["use_sliding_window"] = False
        config["layer_types"] = ["full_attention"] * num_layers
    if arch == "smollm3":
        config["no_rope_layer_interval"] = NOPE_INTERVAL
        config["no_rope_layers"] = [int((i + 1) % NOPE_INTERVAL > 0) for i in range(num_layers)]
    refuse_biases(config, model)
    return config


def refuse_unknown(fields: Fields, arch: str) -> None:
    """Raise for what the metadata ask for and no class here computes."""
    for name, neutral in NEUTRAL.items():
        value = fields.get(f"{arch}.{name}", neutral[0])
        if value not in neutral:
            what = "a mixture of experts: " if name == "expert_count" else ""
            raise ConvertError(f"{what}{arch}.{name} of {value!r} is not supported")


def refuse_biases(config: Mapping[str, Any], model: str) -> None:
    """Mistral's class has none at all, Qwen3's none in the MLP."""
    for name, models in (("attention_bias", ("Mistral",)), ("mlp_bias", ("Mistral", "Qwen3"))):
        if config.get(name) and model in models:
            raise ConvertError(f"a {model} model with {name.replace('_', ' ')} is not supported")


def head_dim(fields: Fields, arch: str, default: int) -> int:
    """The size of a head: one for queries, keys and values, rotated as a whole."""
    size = count(fields, f"{arch}.attention.key_length", default)
    values = count(fields, f"{arch}.attention.value_length", size)
    if values != size:
        raise ConvertError(f"heads with keys of {size} and values of {values} are not supported")
    rotated = count(fields, f"{arch}.rope.dimension_count", size)
    if rotated != size or size % 2:
        raise ConvertError(f"rope over {rotated} of {size} dimensions is not supported")
    return size


def sliding_window(fields: Fields, arch: str, family: Family, length: int) -> int:
    """How many positions a query sees; 0: all, as also with a window as long as the context."""
    window = get(fields, f"{arch}.attention.sliding_window", 0)
    if not window:
        return 0
    window = count(fields, f"{arch}.attention.sliding_window")
    if window >= length:
        return 0
    some_layers = f"{arch}.attention.sliding_window_pattern" in fields
    if some_layers or not family.window:
        raise ConvertError(f"a sliding window ({window} positions) is not supported for {arch}")
    return window


def rope(fields: Fields, arch: str, family: Family, factors: list[float] | None) -> dict[str, Any]:
    """How the rotary embedding's frequencies are lowered, for ``rope_parameters``."""
    kind = get(fields, f"{arch}.rope.scaling.type", "linear")  # llama.cpp's default
    if kind not in ("none", "linear"):
        raise ConvertError(
            f"rope scaling {kind!r} is not supported; supported: linear, and llama3's factors"
        )
    factor = 0.0
    if kind == "linear":
        old_name = number(fields, f"{arch}.rope.scale_linear", 0.0)
        factor = shortest(number(fields, f"{arch}.rope.scaling.factor", old_name))
    scaled = factor not in (0, 1)
    if factor < 0 or (scaled and not family.rope_scaling):
        raise ConvertError(f"rope scaling by {factor} is not supported for {arch}")
    if factors is None:
        return {"rope_type": "linear", "factor": factor} if scaled else {"rope_type": "default"}
    if not family.rope_factors:
        raise ConvertError(f"tensor {ROPE_FACTORS!r} is not supported for {arch}")
    return {"rope_type": "factors", "factors": [f * factor if scaled else f for f in factors]}


def has_bias(shapes: Mapping[str, Shape], parts: tuple[str, ...]) -> bool:
    """Whether some layer has a bias in one of these parts."""
    return any(f".{part}.bias" in name for name in shapes for part in parts)


def shortest(value: float) -> float:
    """The shortest decimal that is the same float32: GGUF's 9.999999747378752e-06 is 1e-05."""
    return float(str(np.float32(value)))


# --- tensors --------------------------------------------------------------------------------------


def hf_name(name: str) -> str | None:
    """Hugging Face's name of a GGUF tensor; None for one that no architecture here has."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    match name.split("."):
        case ["blk", layer, part, "weight" | "bias" as kind] if part in LAYER_NAMES:
            return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"
    return None


def expected_shapes(config: Mapping[str, Any], family: Family) -> dict[str, Shape]:
    """The shape of every tensor that the model has, by GGUF name."""
    hidden, mlp, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries = config["num_attention_heads"] * size
    keys = config["num_key_value_heads"] * size
    matrices = {
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_gate": (mlp, hidden),
        "ffn_up": (mlp, hidden),
        "ffn_down": (hidden, mlp),
    }
    vectors = {"attn_norm": hidden, "ffn_norm": hidden}
    if family.qk_norm:
        vectors |= {"attn_q_norm": size, "attn_k_norm": size}
    biased = list(ATTENTION if config.get("attention_bias") else ())
    biased += MLP if config.get("mlp_bias") else ()
    biased += ATTENTION[:3] if family.qkv_bias else ()
    one: dict[str, Shape] = {f"{part}.weight": shape for part, shape in matrices.items()}
    one |= {f"{part}.weight": (width,) for part, width in vectors.items()}
    one |= {f"{part}.bias": matrices[part][:1] for part in biased}
    shapes: dict[str, Shape] = {"token_embd.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in one.items()}
    shapes["output_norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["output.weight"] = shapes["token_embd.weight"]
    return shapes
