"""Every quantisation that the ``gguf`` package decodes: the values, and a model made of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from safetensors.numpy import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from services import gguf_convert
from services.gguf_config import hf_name
from services.gguf_convert import ConvertError, convert
from services.gguf_file import supported_kinds
from tests.data.tiny_gguf import TOKENS, VOCABULARY, permute, write_file
from tests.support.engine_logits import engine_logits
from tests.support.gguf_writing import random_blocks

HIDDEN, MLP, HEADS, KV_HEADS = 256, 256, 4, 2  # the largest blocks hold 256 values
IDS = [(7 * i * i + i) % len(TOKENS) for i in range(24)]
FIELDS: dict[str, Any] = {
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": MLP,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    **VOCABULARY,
}
MATRICES = {
    "token_embd.weight": len(TOKENS),
    "blk.0.attn_q.weight": HIDDEN,
    "blk.0.attn_k.weight": HIDDEN // HEADS * KV_HEADS,
    "blk.0.attn_v.weight": HIDDEN // HEADS * KV_HEADS,
    "blk.0.attn_output.weight": HIDDEN,
    "blk.0.ffn_gate.weight": MLP,
    "blk.0.ffn_up.weight": MLP,
    "blk.0.ffn_down.weight": HIDDEN,
}
VECTORS = ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight")
CANNOT = (Kind.Q8_1, Kind.Q8_K, Kind.Q1_0, Kind.F64, Kind.I8, Kind.I16, Kind.I32, Kind.I64)
DECODED = [kind for kind in Kind if kind not in CANNOT]


@pytest.fixture(autouse=True, scope="module")
def calm() -> Iterator[None]:
    """Tensors this small are slower on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def blocks_of(kind: Kind) -> dict[str, NDArray[np.uint8]]:
    """Random matrices of one quantisation by GGUF name, rows in Hugging Face's order."""
    rng = np.random.default_rng(int(kind))
    return {
        name: random_blocks(kind, rows, 256, spread=0.08, rng=rng)
        for name, rows in MATRICES.items()
    }


def write(path: Path, kind: Kind, blocks: dict[str, NDArray[np.uint8]], **more: Any) -> None:
    """The GGUF of these matrices, as llama.cpp has it: whole rows of q and k change places."""
    tensors: dict[str, Any] = {}
    for name, data in blocks.items():
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2], 0)
        tensors[name] = (permute(data, heads) if heads else data, kind)  # type: ignore[arg-type]
    norms = {name: np.linspace(0.5, 1.5, HIDDEN, dtype=np.float32) for name in VECTORS}
    write_file(path, "llama", FIELDS, tensors | norms | more)


def theirs(tensors: dict[str, NDArray[np.float32]]) -> torch.Tensor:
    """Logits of ``transformers``' model with these weights, ``[len(IDS), vocabulary]``."""
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    state = {str(hf_name(name)): torch.tensor(value) for name, value in tensors.items()}
    for name in VECTORS:
        state[str(hf_name(name))] = torch.linspace(0.5, 1.5, HIDDEN)
    model.load_state_dict(state, strict=False)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([IDS])).logits[0]
    return logits


def test_all_that_the_package_decodes_are_here() -> None:
    assert set(DECODED) == supported_kinds()
    assert len(DECODED) == 26


@pytest.mark.parametrize("kind", DECODED, ids=lambda kind: str(kind.name))
def test_values_are_the_packages_and_the_model_runs(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_convert, "CHUNK", 40 * 256)  # several chunks, the last one shorter
    blocks = blocks_of(kind)
    expected = {name: gguf.dequantize(data, kind) for name, data in blocks.items()}
    sizes = [np.abs(values).mean() for values in expected.values()]
    assert 0.01 < min(sizes) <= max(sizes) < 1  # so that wrong values show in the logits
    write(tmp_path / "model.gguf", kind, blocks)
    convert(tmp_path / "model.gguf", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, values in expected.items():
        np.testing.assert_array_equal(tensors[str(hf_name(name))], values, err_msg=name)
    difference = engine_logits(tmp_path, IDS) - theirs(expected)
    assert difference.abs().max() < 1e-4


@pytest.mark.parametrize("kind", CANNOT, ids=lambda kind: str(kind.name))
def test_other_kinds_are_refused_by_name(kind: Kind, tmp_path: Path) -> None:
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = {
        name: np.zeros((rows, 256 // block * block_bytes), np.uint8)
        for name, rows in MATRICES.items()
    }
    write(tmp_path / "model.gguf", kind, blocks)
    with pytest.raises(ConvertError, match=f"unsupported quantisation {kind.name}; supported: F32"):
        convert(tmp_path / "model.gguf", tmp_path)


def test_one_scale_for_a_whole_tensor_multiplies_it(tmp_path: Path) -> None:
    blocks = blocks_of(Kind.NVFP4)
    scales = {
        "blk.0.attn_q.scale": np.array([0.125], np.float32),
        "blk.0.ffn_up.scale": np.array([3.0], np.float32),
        "blk.0.ffn_up.input_scale": np.array([7.0], np.float32),
    }
    write(tmp_path / "model.gguf", Kind.NVFP4, blocks, **scales)
    convert(tmp_path / "model.gguf", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, data in blocks.items():
        scale = {"blk.0.attn_q.weight": 0.125, "blk.0.ffn_up.weight": 3.0}.get(name, 1.0)
        expected = gguf.dequantize(data, Kind.NVFP4) * np.float32(scale)
        np.testing.assert_array_equal(tensors[str(hf_name(name))], expected, err_msg=name)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q4_K, Kind.Q8_0], ids=lambda kind: str(kind.name))
def test_values_that_are_no_numbers_are_damage(kind: Kind, tmp_path: Path) -> None:
    blocks = blocks_of(kind)
    blocks["blk.0.ffn_up.weight"][3, :2] = [0x00, 0x7E]  # a float16, not a number
    write(tmp_path / "model.gguf", kind, blocks)
    with pytest.raises(ConvertError, match=r"mlp\.up_proj\.weight holds values that are no number"):
        convert(tmp_path / "model.gguf", tmp_path)
