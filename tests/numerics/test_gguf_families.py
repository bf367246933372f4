"""Every family out of a GGUF file gives ``transformers``' logits, and what the file says counts."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils.logging import disable_progress_bar

from services.engine.model_config import read_config
from services.gguf_convert import ConvertError, convert
from tests.data.tiny_gguf import TOKENS
from tests.support.engine_logits import engine_logits
from tests.support.families import FAMILIES
from tests.support.gguf_writing import ARCHITECTURES, PERMUTED, checkpoint_fields, write_checkpoint

TOLERANCE = 1e-4
IDS = [(7 * i * i + i) % len(TOKENS) for i in range(100)]
NAMES = ("llama2", "llama3", "llama-linear-biases", "mistral", "qwen2", "qwen3", "smollm3")

Saved = tuple[Any, torch.Tensor]
"""What ``transformers`` made, and its logits of ``IDS``."""


@pytest.fixture(autouse=True, scope="module")
def calm() -> Iterator[None]:
    """Tensors this small are slower on several threads."""
    disable_progress_bar()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """Checkpoints by name, made when first asked for."""

    @cache
    def make(name: str) -> Saved:
        family = FAMILIES[name]
        family = replace(family, changes={**family.changes, "vocab_size": len(TOKENS)})
        model = family.save(tmp_path_factory.mktemp(name))
        with torch.inference_mode():
            return model, model(torch.tensor([IDS])).logits[0]

    return make


def gap(tmp_path: Path, right: Saved, **kwargs: Any) -> float:
    """The largest difference of any logit, through a GGUF file that is written with ``kwargs``."""
    model, expected = right
    write_checkpoint(tmp_path / "model.gguf", model, **kwargs)
    folder = tmp_path / "model"
    folder.mkdir()
    convert(tmp_path / "model.gguf", folder)
    return float((engine_logits(folder, IDS) - expected).abs().max())


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(
    name: str, saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    assert gap(tmp_path, saved(name)) < TOLERANCE
    config = read_config(tmp_path / "model")
    assert config.tied_head == saved(name)[0].config.tie_word_embeddings
    assert config.unrotated_layers == ((3,) if name == "smollm3" else ())


@pytest.mark.parametrize(
    ("name", "drop"),
    [
        ("llama2", "rope.freq_base"),
        ("llama3", "rope_freqs.weight"),
        ("llama-linear-biases", "rope.scaling.factor"),
        ("llama-linear-biases", "attn_q.bias"),
        ("llama-linear-biases", "ffn_down.bias"),
        ("mistral", "attention.sliding_window"),
    ],
)
def test_what_the_file_leaves_out_changes_the_logits(
    name: str, drop: str, saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    """By what llama.cpp takes instead, so that the test above would see what is not read."""
    changed = {"llama.rope.freq_base": 500.0} if drop == "rope.freq_base" else None
    gaps = gap(tmp_path, saved(name), **({"change": changed} if changed else {"drop": (drop,)}))
    assert gaps > 10 * TOLERANCE


@pytest.mark.parametrize("name", ["llama2", "qwen2", "qwen3", "smollm3"])
def test_the_order_of_rows_goes_by_the_architecture(
    name: str, saved: Callable[[str], Saved], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = set(ARCHITECTURES.values()) - set(PERMUTED)
    monkeypatch.setattr("tests.support.gguf_writing.PERMUTED", wrong)
    assert gap(tmp_path, saved(name)) > 10 * TOLERANCE


@pytest.mark.parametrize(
    ("name", "drop"), [("qwen2", "attn_k.bias"), ("qwen3", "attn_q_norm.weight")]
)
def test_what_an_architecture_needs_is_asked_for(
    name: str, drop: str, saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    with pytest.raises(ConvertError, match=rf"lacks the tensors blk\.0\.{drop}, blk\.1\.{drop}"):
        gap(tmp_path, saved(name), drop=(drop,))


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("llama2", {"attention.value_length": 8}, "keys of 12 and values of 8"),
        ("llama2", {"attention.head_count": [4, 4, 2, 4]}, "head_count differs by layer"),
        ("llama2", {"rope.scaling.attn_factor": 1.5}, "attn_factor of 1.5"),
        ("llama2", {"attention.causal": False}, "causal of False"),
        ("llama2", {"rope.freq_base": "10000"}, "rope.freq_base is '10000', not a number"),
        ("llama2", {"embedding_length": 32}, r"shape \(264, 48\), expected \(264, 32\)"),
        ("llama2", {"attention.head_count_kv": 2}, r"'blk\.0\.attn_k.weight' has the shape"),
        ("qwen2", {"rope.scaling.type": "yarn"}, "rope scaling 'yarn' is not supported"),
        ("qwen3", {"expert_count": 4}, "mixture of experts"),
        ("qwen2", {"attention.sliding_window": 16}, r"window \(16 positions\).*for qwen2"),
        ("mistral", {"attention.sliding_window_pattern": 2}, r"window \(16 positions\)"),
    ],
)
def test_what_an_architecture_has_not_is_refused(
    name: str, change: dict[str, Any], reason: str, saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    arch = ARCHITECTURES[saved(name)[0].config.model_type]
    changed = {f"{arch}.{key}": value for key, value in change.items()}
    with pytest.raises(ConvertError, match=reason):
        gap(tmp_path, saved(name), change=changed)


def test_a_number_for_each_layer_may_be_a_list(
    saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    change = {"llama.attention.head_count_kv": [4] * 4, "llama.feed_forward_length": [40] * 4}
    assert gap(tmp_path, saved("llama2"), change=change) < TOLERANCE


def test_a_window_as_long_as_the_context_is_none(
    saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    change = {"qwen2.attention.sliding_window": 131072}
    assert gap(tmp_path, saved("qwen2"), change=change) < TOLERANCE


def test_mistral3_is_llama_without_its_new_parts(
    saved: Callable[[str], Saved], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ARCHITECTURES, "llama", "mistral3")
    monkeypatch.setattr("tests.support.gguf_writing.PERMUTED", ("mistral3",))
    fields = checkpoint_fields(saved("llama3")[0].config)
    assert all(name.startswith("mistral3.") for name in fields)
    assert gap(tmp_path, saved("llama3")) < TOLERANCE
    for name, value in (("attention.temperature_scale", 0.1), ("rope.scaling.factor", 4.0)):
        write_checkpoint(
            tmp_path / "new.gguf", saved("llama3")[0], change={f"mistral3.{name}": value}
        )
        with pytest.raises(ConvertError, match="is not supported"):
            convert(tmp_path / "new.gguf", tmp_path)
