"""What a model computes, from its ``config.json`` (pure).

Architectures differ in a few parts only, and those are data: a :class:`Family` says what its class
in ``transformers`` decides by itself, the file says the rest. Whatever would be computed
differently there is refused by name. Knows no weights and no torch, so that a model which is not
supported is refused before any process starts.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Raw = Mapping[str, Any]
SLIDING, FULL = "sliding_attention", "full_attention"


class ModelError(Exception):
    """The model's folder cannot be used; the message says what is supported."""


@dataclass(frozen=True)
class RopeScaling:
    """How the frequencies of the rotary embedding are lowered, to reach further than the model was
    first trained to: all are divided by ``factor`` ("linear"), or, as Llama 3.1 does it ("llama3"),
    only those whose wave is long: one that fits into ``original_length`` less than ``low`` times is
    divided, more than ``high`` times is kept, and between these is something between. A model that
    was converted from GGUF has the outcome of that ("factors"): a divisor for each frequency.
    """

    factor: float
    low: float = 0.0
    high: float = 0.0
    original_length: int = 0  # 0: linear, or factors
    factors: tuple[float, ...] = ()  # head_dim / 2 of them


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model, and which optional parts it has."""

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
    intermediate_size: int = 0  # of the MLP; 0: what the weights of the first layer have
    rope_scaling: RopeScaling | None = None
    unrotated_layers: tuple[int, ...] = ()  # without rotary embedding ("NoPE")
    window: int = 0  # positions that a query sees in the layers below, its own included
    window_layers: tuple[int, ...] = ()
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norms over each query and key head, before the rotation

    @property
    def rope(self) -> str:
        """Canonical text of all that decides here what keys and values of equal weights mean: part
        of the KV's identity. What a layer does to its queries is in the KV of the next one.
        """
        told = {
            "theta": self.rope_theta,
            "scaling": self.rope_scaling,
            "unrotated": self.unrotated_layers,
            "window": self.window,
            "window_layers": self.window_layers,
            "heads": self.num_heads,
            "eps": self.rms_norm_eps,
            "biases": (self.qkv_bias, self.output_bias, self.mlp_bias),
            "qk_norm": self.qk_norm,
        }
        return " ".join(f"{name}={value}" for name, value in told.items())


@dataclass(frozen=True)
class Family:
    """What the class of an architecture decides, and its defaults for what the file leaves out."""

    models: str  # as people call them
    attention_bias: bool = False  # the file may ask for biases of q, k, v and the output
    mlp_bias: bool = False  # and for those of the MLP
    qkv_bias: bool = False  # q, k and v have biases, whatever the file says
    qk_norm: bool = False
    windows: Literal["never", "always", "asked for"] = "never"
    window: int = 0
    unrotated: bool = False  # the file may name layers without rotary embedding
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    rope_theta: float = 10000.0
    tied_head: bool = False


FAMILIES = {
    "LlamaForCausalLM": Family("Llama 2, 3 and 3.x, SmolLM2", attention_bias=True, mlp_bias=True),
    "MistralForCausalLM": Family("Mistral", windows="always", window=4096),
    "Qwen2ForCausalLM": Family("Qwen2, Qwen2.5", qkv_bias=True, windows="asked for", window=4096),
    "Qwen3ForCausalLM": Family(
        "Qwen3", attention_bias=True, qk_norm=True, windows="asked for", window=4096, head_dim=128
    ),
    "SmolLM3ForCausalLM": Family(
        "SmolLM3",
        attention_bias=True,
        mlp_bias=True,
        windows="asked for",
        unrotated=True,
        rope_theta=2e6,
        tied_head=True,
    ),
}
ROPE_TYPES = ("default", "linear", "llama3", "factors")
SUPPORTED = (
    ", ".join(f"{name} ({family.models})" for name, family in FAMILIES.items())
    + f", with SiLU, rope of type {', '.join(ROPE_TYPES)}, and weights that are not quantised"
)


def read_config(folder: Path) -> ModelConfig:
    """Parse a folder's ``config.json``, written by ``transformers`` 4 or 5; raises
    :class:`ModelError` for a model that is not supported.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{folder} has no config.json") from None
    except ValueError as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"cannot read {path}: it holds no JSON object")
    try:
        return parse_config(raw)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


def parse_config(raw: Raw) -> ModelConfig:
    """The model that a ``config.json`` describes; raises :class:`ModelError`."""
    _check_kinds(raw)
    architecture = (raw.get("architectures") or ["unknown"])[0]
    family = FAMILIES.get(architecture, Family(architecture))
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    _refuse_unknown(raw, architecture, rope, kind)
    num_layers = _count(raw, "num_hidden_layers")
    hidden_size, num_heads = _count(raw, "hidden_size"), _count(raw, "num_attention_heads")
    num_kv_heads = _count(raw, "num_key_value_heads", num_heads)
    head_dim = _count(raw, "head_dim", family.head_dim or hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(f"{num_heads} heads cannot share {num_kv_heads} key and value heads")
    if head_dim % 2:
        raise ModelError(f"a head_dim of {head_dim} cannot be rotated: it is odd")
    unrotated = _unrotated_layers(raw, num_layers) if family.unrotated else ()
    window, window_layers = _windows(raw, family, num_layers, unrotated)
    attention_bias = family.attention_bias and bool(raw.get("attention_bias"))
    return ModelConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=_count(raw, "vocab_size"),
        max_model_len=_count(raw, "max_position_embeddings"),
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        rope_theta=_number(rope, "rope_theta", _number(raw, "rope_theta", family.rope_theta)),
        tied_head=bool(raw.get("tie_word_embeddings", family.tied_head)),
        intermediate_size=_count(raw, "intermediate_size") if "intermediate_size" in raw else 0,
        rope_scaling=_rope_scaling(raw, rope, kind, head_dim),
        unrotated_layers=unrotated,
        window=window,
        window_layers=window_layers,
        qkv_bias=family.qkv_bias or attention_bias,
        output_bias=attention_bias,
        mlp_bias=family.mlp_bias and bool(raw.get("mlp_bias")),
        qk_norm=family.qk_norm,
    )


def _check_kinds(raw: Raw) -> None:
    """Raise unless what is not a number is of the kind that everybody writes."""
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"architectures must be a list of names, not {names!r}")
    for name in ("rope_scaling", "rope_parameters", "quantization_config"):
        if not isinstance(raw.get(name) or {}, Mapping):
            raise ModelError(f"{name} must be an object, not {raw[name]!r}")
    if not isinstance(raw.get("layer_types") or [], list):
        raise ModelError(f"layer_types must be a list, not {raw['layer_types']!r}")
    for name in ("tie_word_embeddings", "attention_bias", "mlp_bias"):
        if not isinstance(raw.get(name) or False, bool):
            raise ModelError(f"{name} must be true or false, not {raw[name]!r}")


def _refuse_unknown(raw: Raw, architecture: str, rope: Raw, kind: str) -> None:
    """Raise for everything at once that is not supported."""
    experts = next((raw[k] for k in ("num_local_experts", "num_experts") if raw.get(k)), 0)
    quantised = raw.get("quantization_config") or {}
    method = quantised.get("quant_method", "of an unknown kind")
    turned = rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1
    kinds = sorted({t for t in raw.get("layer_types") or () if t not in (FULL, SLIDING)})
    refused = [
        text
        for text, wrong in (
            (f"architecture {architecture}", architecture not in FAMILIES),
            (f"activation {raw.get('hidden_act')}", raw.get("hidden_act", "silu") != "silu"),
            (f"a mixture of {experts} experts", experts),
            (f"quantisation {method}", quantised),
            (f"rope of type {kind}", kind not in ROPE_TYPES),
            (f"rope over a part of each head ({turned})", turned != 1),
            ("rope that differs by layer", any(isinstance(v, Mapping) for v in rope.values())),
            (f"layers of type {', '.join(kinds)}", kinds),
        )
        if wrong
    ]
    if refused:
        raise ModelError(f"not supported: {'; '.join(refused)}; supported: {SUPPORTED}")


def _rope_scaling(raw: Raw, rope: Raw, kind: str, head_dim: int) -> RopeScaling | None:
    if kind == "default":
        return None
    if kind == "factors":
        values = rope.get("factors")
        if not isinstance(values, list) or len(values) != head_dim // 2:
            raise ModelError(f"rope: factors must be a list of {head_dim // 2} numbers")
        named = {f"rope factor {i}": value for i, value in enumerate(values)}
        return RopeScaling(1.0, factors=tuple(_number(named, name) for name in named))
    factor = _number(rope, "factor")
    if kind == "linear":
        return RopeScaling(factor)
    low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
    if low >= high:
        raise ModelError(
            f"rope: low_freq_factor {low:g} is not less than high_freq_factor {high:g}"
        )
    name = "original_max_position_embeddings"
    length = _count(raw, name, _count(rope, name, _count(raw, "max_position_embeddings")))
    return RopeScaling(factor, low, high, length)


def _unrotated_layers(raw: Raw, num_layers: int) -> tuple[int, ...]:
    """``no_rope_layers`` holds 0 for a layer without rotary embedding, and 1 for one with it."""
    rotated = raw.get("no_rope_layers")
    if rotated is None:
        interval = _count(raw, "no_rope_layer_interval", 4)
        return tuple(i for i in range(num_layers) if (i + 1) % interval == 0)
    _check_length("no_rope_layers", rotated, num_layers)
    return tuple(i for i in range(num_layers) if not rotated[i])


def _windows(
    raw: Raw, family: Family, num_layers: int, unrotated: tuple[int, ...]
) -> tuple[int, tuple[int, ...]]:
    """The window, and the layers that have it."""
    asked_for = family.windows == "always" or bool(raw.get("use_sliding_window"))
    size = raw.get("sliding_window", family.window) if asked_for else None
    if family.windows == "never" or (family.windows == "always" and not size):
        return 0, ()
    types = raw.get("layer_types") if family.windows == "asked for" else None
    layers: Sequence[int]
    if types is not None:
        _check_length("layer_types", types, num_layers)
        layers = [i for i in range(num_layers) if types[i] == SLIDING]
        if layers and not size:
            raise ModelError(f"layer_types names {SLIDING}, but there is no sliding_window")
    elif not size:
        layers = []
    elif family.windows == "always":
        layers = range(num_layers)
    elif family.unrotated:
        layers = unrotated
    else:
        layers = range(_count(raw, "max_window_layers", 28, least=0), num_layers)
    return (
        (_count({"sliding_window": size}, "sliding_window"), tuple(layers)) if layers else (0, ())
    )


def _check_length(name: str, values: Any, num_layers: int) -> None:
    if not isinstance(values, list) or len(values) < num_layers:
        raise ModelError(f"{name} must be a list with a value for each of {num_layers} layers")


def _count(raw: Raw, name: str, default: int | None = None, least: int = 1) -> int:
    """A whole number; what is missing or null is ``default``."""
    value = default if raw.get(name) is None else raw[name]
    if value is None:
        raise ModelError(f"it has no {name}")
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ModelError(f"{name} is {value!r}, not a whole number from {least} on")
    return value


def _number(raw: Raw, name: str, default: float | None = None) -> float:
    """A positive number; what is missing or null is ``default``."""
    value = default if raw.get(name) is None else raw[name]
    if value is None:
        raise ModelError(f"it has no {name}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"{name} is {value!r}, not a positive number")
    return float(value)
