"""A config.json with a value of the wrong kind is refused by the field's name."""

from typing import Any

import pytest

from services.engine.model_config import ModelError, parse_config

GOOD: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


def test_the_good_one() -> None:
    assert parse_config(GOOD).intermediate_size == 64


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("architectures", 5),
        ("architectures", "LlamaForCausalLM"),
        ("architectures", [5]),
        ("rope_scaling", "linear"),
        ("rope_parameters", [1]),
        ("quantization_config", "awq"),
        ("layer_types", 5),
        ("tie_word_embeddings", "false"),
        ("mlp_bias", 1),
        ("intermediate_size", None),
        ("intermediate_size", "64"),
    ],
)
def test_a_wrong_kind(name: str, value: Any) -> None:
    with pytest.raises(ModelError, match=name):
        parse_config({**GOOD, name: value})
