"""The converted folder holds the model of its GGUF: a small random one, and the default one."""

import json
import runpy
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from router.tokenizer import Tokenizer
from services.fetch import DEFAULT_MODEL, fetch
from services.gguf_config import hf_name
from services.gguf_convert import ConvertError, convert
from tests.support.reference import default_model_judge

TINY: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[1] / "data" / "tiny_gguf.py"))
IDS = torch.tensor([[1, 40, 90, 263, 17, 200, 2, 5, 260]])


def converted(tmp_path: Path, weights: dict[str, Any], **kwargs: Any) -> Path:
    """The folder made from a GGUF that holds ``weights``."""
    TINY["write"](tmp_path / "tiny.gguf", weights, **kwargs)
    folder = tmp_path / "model"
    folder.mkdir()
    convert(tmp_path / "tiny.gguf", folder)
    return folder


def logits(model: torch.nn.Module, ids: torch.Tensor = IDS) -> torch.Tensor:
    """``[tokens, vocabulary]``."""
    with torch.inference_mode():
        out: torch.Tensor = model(ids).logits[0]
    return out


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_the_original_weights(tmp_path: Path, tied: bool) -> None:
    weights = TINY["random_weights"](seed=1, tied=tied)
    config = LlamaConfig(
        vocab_size=len(TINY["TOKENS"]),
        hidden_size=TINY["HIDDEN"],
        intermediate_size=TINY["MLP"],
        num_hidden_layers=TINY["LAYERS"],
        num_attention_heads=TINY["HEADS"],
        num_key_value_heads=TINY["KV_HEADS"],
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        max_position_embeddings=512,
    )
    original = LlamaForCausalLM(config).eval()
    state = {hf_name(name): torch.from_numpy(value) for name, value in weights.items()}
    original.load_state_dict(state, strict=not tied)
    folder = converted(tmp_path, weights)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert model.config.tie_word_embeddings is tied
    torch.testing.assert_close(logits(model), logits(original), rtol=0, atol=1e-5)


def test_quantized_tensors_are_dequantized_and_put_in_order(tmp_path: Path) -> None:
    weights = TINY["random_weights"](seed=2)
    names = frozenset({"blk.0.attn_q.weight", "blk.1.ffn_down.weight"})
    tensors = load_file(converted(tmp_path, weights, quantized=names) / "model.safetensors")
    assert set(tensors) == {hf_name(name) for name in weights}
    for name, value in weights.items():
        expected = value
        if name in names:  # quantisation works along rows, so the order of rows does not matter
            kind = gguf.GGMLQuantizationType.Q8_0
            expected = gguf.dequantize(gguf.quantize(value, kind), kind)
        np.testing.assert_array_equal(tensors[hf_name(name)], expected, err_msg=name)


def test_the_folder_names_what_the_gguf_names(tmp_path: Path) -> None:
    folder = converted(tmp_path, TINY["random_weights"](seed=3))
    config = json.loads((folder / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    assert (config["head_dim"], config["num_key_value_heads"]) == (16, 2)
    assert (folder / "chat_template.jinja").read_text() == TINY["TEMPLATE"]
    tokenizer = Tokenizer.load(folder)
    hello, space_hello = (TINY["TOKENS"].index(token) for token in ("hello", "Ġhello"))
    assert tokenizer.encode("hello hello<|im_end|>") == [hello, space_hello, 2]
    assert tokenizer.encode_chat([{"role": "user", "content": "hello"}]) == [1, hello, 2]


def test_bos_is_added_when_the_gguf_says_so(tmp_path: Path) -> None:
    change = {"tokenizer.ggml.add_bos_token": True, "tokenizer.chat_template": None}
    folder = converted(tmp_path, TINY["random_weights"](seed=4), change=change)
    tokenizer = Tokenizer.load(folder)
    hello = TINY["TOKENS"].index("hello")
    assert tokenizer.encode("hello") == [1, hello]
    assert tokenizer.encode("hello", add_special_tokens=False) == [hello]
    assert not (folder / "chat_template.jinja").exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"general.architecture": "gemma3"}, "architecture 'gemma3'.*llama, mistral3, qwen2"),
        ({"general.type": "adapter"}, "no model, but one's 'adapter'"),
        ({"tokenizer.ggml.pre": "kimi-k2"}, "pre-tokenizer 'kimi-k2'"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer model 't5'"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn'"),
        ({"llama.rope.dimension_count": 8}, "rope over 8 of 16"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.feed_forward_length": None}, "lacks the metadata field llama.feed_forward_length"),
        ({"llama.block_count": 3}, r"lacks the tensors blk\.2\.attn_q\.weight, "),
        ({"llama.block_count": 1}, r"beyond its layers or kind: blk\.1\."),
        ({"tokenizer.ggml.merges": ["q qq"]}, "merges do not fit"),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConvertError, match=reason):
        converted(tmp_path, TINY["random_weights"](seed=5), change=change)


@pytest.mark.parametrize("name", ["blk.0.attn_qkv.weight", "rope_factors_long.weight", "v.x"])
def test_unknown_tensors_are_refused(tmp_path: Path, name: str) -> None:
    weights = TINY["random_weights"](seed=6)
    weights[name] = np.zeros(64, dtype=np.float32)
    with pytest.raises(ConvertError, match=f"beyond what is supported: {name}"):
        converted(tmp_path, weights)


@pytest.mark.parametrize("keep", [0, 3, 100, -1000])
def test_a_damaged_file_is_named(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "cut.gguf"
    TINY["write"](path, TINY["random_weights"](seed=7))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ConvertError, match=r"cut\.gguf is not a complete GGUF file"):
        convert(path, tmp_path)


# --- the default model ----------------------------------------------------------------------------


def test_default_model_equals_transformers_own_reading_of_the_gguf() -> None:
    """Weight by weight and in its logits."""
    theirs = default_model_judge().model  # transformers takes long to open the GGUF: only once
    folder = fetch(DEFAULT_MODEL)
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert type(ours) is type(theirs)
    expected = theirs.state_dict()
    assert set(ours.state_dict()) == set(expected)
    for name, value in ours.state_dict().items():
        assert torch.equal(value, expected[name]), name
    ids = torch.tensor([Tokenizer.load(folder).encode("The first ten primes are 2, 3, 5, 7")])
    torch.testing.assert_close(logits(ours, ids), logits(theirs, ids), rtol=0, atol=1e-4)


def test_default_model_knows_the_capital_of_france() -> None:
    folder = fetch(DEFAULT_MODEL)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = Tokenizer.load(folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = torch.tensor([tokenizer.encode_chat(question)])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False
        )
    answer = out[0, ids.shape[1] :].tolist()
    assert tokenizer.decode(answer) == "The capital of France is Paris."
    assert answer[-1] in tokenizer.eos_ids
