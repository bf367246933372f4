"""config.json as models are published with it, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.config import ConfigError
from services.engine.model_config import ModelError, RopeScaling, parse_config, read_config
from services.machine import model_facts

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
LLAMA3_SCALING = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
MISTRAL = {
    **LLAMA,
    "architectures": ["MistralForCausalLM"],
    "max_position_embeddings": 32768,
    "rope_theta": 10000.0,
    "vocab_size": 32000,
}
QWEN2 = {
    **LLAMA,
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "hidden_size": 896,
    "max_window_layers": 21,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3 = {
    **QWEN2,
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "sliding_window": None,
}
SMOLLM3 = {
    **LLAMA,
    "architectures": ["SmolLM3ForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "layer_types": ["full_attention"] * 36,
    "mlp_bias": False,
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
}


def without(raw: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in raw.items() if name not in names}


def test_llama() -> None:
    config = parse_config(LLAMA)
    assert (config.num_layers, config.head_dim, config.max_model_len) == (32, 128, 8192)
    assert (config.rope_theta, config.rope_scaling, config.window) == (500000.0, None, 0)
    assert not any((config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm))
    oldest = parse_config(without(LLAMA, "num_key_value_heads", "rope_theta", "rope_scaling"))
    assert (oldest.num_kv_heads, oldest.rope_theta) == (32, 10000.0)
    biased = parse_config({**LLAMA, "attention_bias": True, "mlp_bias": True})
    assert all((biased.qkv_bias, biased.output_bias, biased.mlp_bias))


def test_llama_3_rope_scaling() -> None:
    """The context stays what the file says: it is what the scaling reaches."""
    scaling = RopeScaling(32.0, 1.0, 4.0, 8192)
    raw = {**LLAMA, "max_position_embeddings": 131072}
    old = parse_config({**raw, "rope_scaling": LLAMA3_SCALING})
    assert (old.rope_scaling, old.max_model_len) == (scaling, 131072)
    new = without(raw, "rope_scaling", "rope_theta")
    new["rope_parameters"] = {**LLAMA3_SCALING, "rope_theta": 500000.0}
    assert parse_config(new) == old
    linear = parse_config({**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}})
    assert linear.rope_scaling == RopeScaling(4.0)


def test_mistral_has_its_window_in_every_layer() -> None:
    config = parse_config({**MISTRAL, "sliding_window": 4096})
    assert (config.window, config.window_layers) == (4096, tuple(range(32)))
    assert parse_config(MISTRAL) == config, "the default of transformers"
    later = parse_config({**MISTRAL, "sliding_window": None})
    assert (later.window, later.window_layers) == (0, ())


def test_qwen() -> None:
    two, three = parse_config(QWEN2), parse_config(QWEN3)
    assert (two.qkv_bias, two.output_bias, two.qk_norm, two.window) == (True, False, False, 0)
    assert (three.qkv_bias, three.output_bias, three.qk_norm) == (False, False, True)
    assert (two.head_dim, three.head_dim) == (64, 128)
    assert parse_config(without(QWEN3, "head_dim")).head_dim == 128
    both = parse_config({**QWEN3, "attention_bias": True})
    assert (both.qkv_bias, both.output_bias) == (True, True)


@pytest.mark.parametrize("raw", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
def test_qwen_may_have_a_window_in_its_later_layers(raw: dict[str, Any]) -> None:
    raw = {**raw, "use_sliding_window": True, "sliding_window": 512}
    config = parse_config(raw)
    assert (config.window, config.window_layers) == (512, (21, 22, 23))
    types = ["sliding_attention", "full_attention"] * 12
    config = parse_config({**raw, "layer_types": types})
    assert config.window_layers == tuple(range(0, 24, 2))
    with pytest.raises(ModelError, match="sliding_attention, but there is no sliding_window"):
        parse_config({**raw, "layer_types": types, "use_sliding_window": False})


def test_smollm3_leaves_layers_unrotated() -> None:
    config = parse_config(SMOLLM3)
    assert config.unrotated_layers == tuple(range(3, 36, 4))
    assert parse_config(without(SMOLLM3, "no_rope_layers")) == config
    other = parse_config({**SMOLLM3, "no_rope_layers": [0] + [1] * 35})
    assert other.unrotated_layers == (0,)
    windows = {"use_sliding_window": True, "sliding_window": 128}
    config = parse_config({**without(SMOLLM3, "layer_types"), **windows})
    assert (config.window, config.window_layers) == (128, config.unrotated_layers)
    bare = parse_config(without(SMOLLM3, "rope_theta", "tie_word_embeddings"))
    assert (bare.rope_theta, bare.tied_head) == (2e6, True)


def test_whatever_changes_the_kv_of_equal_weights_is_in_its_identity() -> None:
    config = parse_config(LLAMA)
    changes: list[dict[str, Any]] = [
        {"rope_theta": 500000.01},
        {"rope_scaling": RopeScaling(8.0)},
        {"rope_scaling": RopeScaling(8.0, 1.0, 4.0, 8192)},
        {"rope_scaling": RopeScaling(8.0, 1.0, 4.0, 4096)},
        {"unrotated_layers": (3,)},
        {"unrotated_layers": (4,)},
        {"window": 16, "window_layers": (1,)},
        {"window": 16, "window_layers": (2,)},
        {"window": 17, "window_layers": (2,)},
        {"num_heads": 16},
        {"rms_norm_eps": 1e-6},
        {"qkv_bias": True},
        {"output_bias": True},
        {"mlp_bias": True},
        {"qk_norm": True},
    ]
    texts = {replace(config, **change).rope for change in changes}
    assert len(texts | {config.rope}) == len(changes) + 1
    assert replace(config, max_model_len=100, tied_head=True).rope == config.rope


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel"),
        ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 8}, "a mixture of 8 exper"),
        ({"architectures": None}, "architecture unknown"),
        ({"hidden_act": "gelu"}, "activation gelu"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantisation fp8"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantisation awq"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope of type yarn"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope of type dynamic"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope of type longrope"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope that differs by lay"),
        ({"partial_rotary_factor": 0.5}, r"rope over a part of each head \(0.5\)"),
        ({"layer_types": ["chunked_attention"] * 32}, "layers of type chunked_attention"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelError, match=f"not supported: .*{text}.*; supported: .*Qwen2.5"):
        parse_config({**LLAMA, **changes})


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (without(LLAMA, "hidden_size"), "it has no hidden_size"),
        ({**LLAMA, "vocab_size": "many"}, "vocab_size is 'many', not a whole number"),
        ({**LLAMA, "num_hidden_layers": True}, "num_hidden_layers is True"),
        ({**LLAMA, "rope_theta": -1}, "rope_theta is -1, not a positive number"),
        ({**LLAMA, "num_key_value_heads": 5}, "32 heads cannot share 5"),
        ({**LLAMA, "head_dim": 65}, "head_dim of 65"),
        ({**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 8}}, "no low_freq_factor"),
        (
            {**LLAMA, "rope_scaling": {**LLAMA3_SCALING, "low_freq_factor": 4}},
            "low_freq_factor 4 is not less than high_freq_factor 4",
        ),
        ({**SMOLLM3, "no_rope_layers": [1, 0]}, "no_rope_layers must be a list .* of 36"),
        ({**SMOLLM3, "no_rope_layers": None, "no_rope_layer_interval": 0}, "interval is 0"),
        (
            {**QWEN2, "use_sliding_window": True, "max_window_layers": -1},
            "max_window_layers is -1, not a whole number from 0 on",
        ),
        ({**QWEN2, "layer_types": ["full_attention"]}, "layer_types must be a list .* of 24"),
    ],
)
def test_what_makes_no_sense_is_named(raw: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelError, match=text):
        parse_config(raw)


def test_a_model_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        read_config(tmp_path)
    file = tmp_path / "config.json"
    for text, problem in (("{", "cannot read"), ("[]", "holds no JSON object")):
        file.write_text(text)
        with pytest.raises(ModelError, match=problem):
            read_config(tmp_path)
    file.write_text(json.dumps({**LLAMA, "architectures": ["FalconForCausalLM"]}))
    with pytest.raises(ConfigError, match="tiny: .*architecture FalconForCausalLM; supported: Ll"):
        model_facts(tmp_path, "tiny")
    file.write_text(json.dumps(QWEN3))
    facts = model_facts(tmp_path, "tiny")
    assert (facts.max_model_len, facts.num_layers) == (8192, 24)
    assert (facts.num_kv_heads, facts.head_dim) == (8, 128)
