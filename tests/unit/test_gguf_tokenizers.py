"""Tokenizers made from GGUF files against llama.cpp's ids; its answers are kept as data."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer as Backend

from router.tokenizer import Detokenizer, Tokenizer
from services.gguf_fields import ConvertError
from services.gguf_pre_tokenizers import RULES
from services.gguf_tokenizer import build_tokenizer, read_vocabulary, write_tokenizer
from tests.data import tiny_vocabularies as tiny
from tests.data.tiny_gguf import write

REFERENCE = json.loads(tiny.REFERENCE.read_text())
TEXTS: list[str] = REFERENCE["texts"]
GROUPS = REFERENCE["groups"]


def fields_of(name: str, **change: Any) -> dict[str, Any]:
    """Metadata of one vocabulary; ``change`` replaces (or, with None, drops) ``tokenizer.ggml.*``.

    ``name`` is that of a pre-tokenizer, or begins with ``spm``.
    """
    if name.startswith("spm"):
        values = tiny.spm_fields(REFERENCE["pieces"], prefix=name == "spm")
    else:
        values = tiny.bpe_fields(REFERENCE["merges"], name)
    values |= {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    return {key: value for key, value in values.items() if value is not None}


def built(name: str, **change: Any) -> Backend:
    fields = fields_of(name, **change)
    return build_tokenizer(fields, read_vocabulary(fields))


backend = cache(built)


def ids_of(tokenizer: Backend, texts: list[str]) -> list[list[int]]:
    return [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]


def differing(name: str, expected: list[list[int]]) -> list[str]:
    """The texts that the tokenizer of ``name`` cuts into other ids."""
    found = ids_of(backend(name), TEXTS)
    return [t for t, ours, ids in zip(TEXTS, found, expected, strict=True) if ours != ids]


@pytest.mark.parametrize("group", GROUPS, ids=lambda g: str(g["names"][0]))
def test_ids_are_those_of_llama_cpp(group: dict[str, Any]) -> None:
    assert len(TEXTS) >= 200
    name, *alike = group["names"]
    assert not differing(name, group["ids"])
    assert all(RULES[other] is RULES[name] for other in alike)
    assert read_vocabulary(fields_of(name)).add_bos == group["adds_bos"]


@pytest.mark.parametrize("group", GROUPS, ids=lambda g: str(g["names"][0]))
def test_text_comes_back_and_streams(group: dict[str, Any]) -> None:
    name = group["names"][0]
    tokenizer = Tokenizer(backend(name))
    changed = ["▁", *tiny.SPECIAL] if name.startswith("spm") else []  # spaces are put after these
    for text, ids in zip(TEXTS, group["ids"], strict=True):
        if not any(token in text for token in changed):
            assert tokenizer.decode(ids, skip_special_tokens=False) == text
        detokenizer = Detokenizer(tokenizer)
        streamed = "".join(detokenizer.push([i]) for i in ids) + detokenizer.finish()
        assert streamed == tokenizer.decode(ids) == backend(name).decode(ids)


def test_every_supported_name_was_compared() -> None:
    names = {name for group in GROUPS for name in group["names"]}
    assert names == {*RULES, "spm", "spm without a space before"}


@pytest.mark.parametrize("group", GROUPS, ids=lambda g: str(g["names"][0]))
def test_any_other_rule_would_be_seen(group: dict[str, Any]) -> None:
    others = [g["names"][0] for g in GROUPS if g is not group]
    kind = group["names"][0].startswith("spm")
    for other in (name for name in others if name.startswith("spm") == kind):
        assert len(differing(other, group["ids"])) >= 3, other


def test_a_file_makes_a_folder_that_opens(tmp_path: Path) -> None:
    unsaid = {"tokenizer.ggml.add_bos_token": None}
    write(tmp_path / "tiny.gguf", {}, change=fields_of("llama-bpe") | unsaid)
    fields = gguf.GGUFReader(tmp_path / "tiny.gguf").fields
    write_tokenizer({name: f.contents() for name, f in fields.items() if f.data}, tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    (group,) = (g for g in GROUPS if "llama-bpe" in g["names"])
    assert [tokenizer.encode(t, add_special_tokens=False) for t in TEXTS] == group["ids"]
    assert tokenizer.encode("zebra") == [1, *tokenizer.encode("zebra", add_special_tokens=False)]
    assert tokenizer.encode_chat([{"role": "user", "content": "hello"}])[0] == 3


# --- what the file says, and what it does not -----------------------------------------------------


def added(name: str, **change: Any) -> tuple[int, int]:
    """How many ids are put before and after a text."""
    tokenizer = built(name, **change)
    plain = tokenizer.encode("zebra", add_special_tokens=False).ids
    full = tokenizer.encode("zebra").ids
    before = full.index(plain[0])
    assert full[before : before + len(plain)] == plain
    return before, len(full) - len(plain) - before


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("qwen2", {}, (0, 0)),
        ("qwen2", {"add_bos_token": True}, (1, 0)),
        ("llama-bpe", {}, (1, 0)),
        ("llama-bpe", {"add_bos_token": False}, (0, 0)),
        ("tekken", {}, (1, 0)),
        ("spm", {}, (1, 0)),
        ("spm", {"add_eos_token": True}, (1, 1)),
        ("spm", {"add_bos_token": False, "add_eos_token": True}, (0, 1)),
    ],
)
def test_bos_and_eos(name: str, change: dict[str, Any], expected: tuple[int, int]) -> None:
    assert added(name, **change) == expected


def test_the_same_token_may_begin_and_end() -> None:
    tokenizer = built("qwen2", add_bos_token=True, add_eos_token=True, bos_token_id=4)
    assert [tokenizer.encode("zebra").ids[i] for i in (0, -1)] == [4, 4]


@pytest.mark.parametrize(
    ("types", "change", "expected"),
    [
        ({}, {"eos_token_id": 4}, [4]),
        ({}, {"eos_token_id": 2}, [2, 4]),  # <|im_end|> by its text
        ({"<|im_end|>": 1}, {"eos_token_id": 2}, [2, 4]),  # mistyped
        ({}, {"eot_token_id": 3}, [4, 3]),
        ({}, {"eom_token_id": 5}, [4, 5]),
        ({}, {"padding_token_id": 5}, [4, 5]),
        ({}, {"padding_token_id": 0}, [4]),  # unknown, as Llama 2 pads
        ({}, {"padding_token_id": 4}, [4]),
    ],
)
def test_every_end_of_an_answer(
    tmp_path: Path, types: dict[str, int], change: dict[str, Any], expected: list[int]
) -> None:
    kinds = fields_of("qwen2")["tokenizer.ggml.token_type"]
    order = list(tiny.SPECIAL)
    kinds = [types.get(t, kind) for t, kind in zip(order, kinds, strict=False)] + kinds[
        len(order) :
    ]
    fields = fields_of("qwen2", token_type=kinds, **change)
    extra = {"general.architecture": "qwen2", "qwen2.context_length": 512}
    write_tokenizer(fields | extra, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": expected[0]}))
    assert Tokenizer.load(tmp_path).eos_ids == tuple(expected)
    assert (tmp_path / "generation_config.json").exists() == (len(expected) > 1)
    roles = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert roles["model_max_length"] == 512
    assert roles["bos_token"] == "<s>"


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("kimi-k2", {}, "pre-tokenizer 'kimi-k2' is not supported; supported: .*llama-bpe.*qwen2"),
        ("qwen2", {"pre": None}, r"does not say which pre-tokenizer .*smollm"),
        ("default", {}, "does not say which pre-tokenizer"),
        ("qwen2", {"model": "t5"}, "tokenizer model 't5' is not supported; supported: 'gpt2'"),
        ("qwen2", {"merges": ["q qq"]}, "merges do not fit"),
        ("qwen2", {"merges": ["q"]}, "merges do not fit"),
        ("qwen2", {"tokens": ["a", "a"], "token_type": None}, "out of the vocabulary"),
        ("qwen2", {"token_type": [1]}, "token_type has 1 values for"),
        ("llama-bpe", {"bos_token_id": None}, r"lacks .* tokenizer\.ggml\.bos_token_id"),
        ("spm", {"scores": [0.0]}, "scores has 1 values for"),
        ("spm", {"scores": None}, r"lacks .* tokenizer\.ggml\.scores"),
        ("spm", {"tokens": [1, 2]}, r"tokens has a value of another type"),
        ("spm", {"eos_token_id": 10**6}, "the eos token is 1000000"),
    ],
)
def test_what_is_wrong_is_named(name: str, change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConvertError, match=reason):
        built(name, **change)


def test_a_vocabulary_without_bytes_is_refused() -> None:
    tokens = [t.replace("<0x41>", "other") for t in fields_of("spm")["tokenizer.ggml.tokens"]]
    with pytest.raises(ConvertError, match="lacks 1 bytes, the first is <0x41>"):
        built("spm", tokens=tokens)


def test_a_token_named_twice_is_refused() -> None:
    tokens = list(fields_of("qwen2")["tokenizer.ggml.tokens"])
    tokens[-1] = tokens[-2]
    with pytest.raises(ConvertError, match="names some token twice"):
        built("qwen2", tokens=tokens)
