"""The default model's tokenizer against llama.cpp's ids, and streaming with its real tokens."""

import json
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from router.tokenizer import Detokenizer, Tokenizer
from services.fetch import DEFAULT_MODEL, fetch

REFERENCE = json.loads(
    (Path(__file__).parents[1] / "data" / "smollm_llamacpp_tokens.json").read_text()
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(fetch(DEFAULT_MODEL))


def test_ids_are_those_of_llama_cpp(tokenizer: Tokenizer) -> None:
    entries = REFERENCE["round_trip"] + REFERENCE["lossy"]
    assert len(entries) >= 200
    wrong = [e["text"] for e in entries if tokenizer.encode(e["text"]) != e["ids"]]
    assert not wrong


def test_text_round_trips(tokenizer: Tokenizer) -> None:
    for entry in REFERENCE["round_trip"]:
        ids = tokenizer.encode(entry["text"])
        assert tokenizer.decode(ids, skip_special_tokens=False) == entry["text"]


def test_digits_stand_alone(tokenizer: Tokenizer) -> None:
    for digits in ("2024", "٢٠٢٤"):
        parts = [tokenizer.encode(digit) for digit in digits]
        assert tokenizer.encode(digits) == [i for part in parts for i in part]
        assert tokenizer.encode("in   " + digits) == tokenizer.encode("in   ") + tokenizer.encode(
            digits
        )


@pytest.mark.parametrize("skip", [True, False])
def test_streamed_text_is_the_text(tokenizer: Tokenizer, skip: bool) -> None:
    for entry in REFERENCE["round_trip"]:
        detokenizer = Detokenizer(tokenizer, stop=["\n\nUser:"], skip_special_tokens=skip)
        deltas = [detokenizer.push([i]) for i in entry["ids"]] + [detokenizer.finish()]
        assert "".join(deltas) == tokenizer.decode(entry["ids"], skip_special_tokens=skip)
        if "\ufffd" not in entry["text"]:
            assert not any("\ufffd" in delta for delta in deltas)


@given(ids=st.lists(st.integers(0, 49151), max_size=30))
def test_any_ids_stream_as_they_decode(tokenizer: Tokenizer, ids: list[int]) -> None:
    detokenizer = Detokenizer(tokenizer)
    text = "".join(detokenizer.push([i]) for i in ids) + detokenizer.finish()
    assert text == tokenizer.decode(ids)


def test_chat_prompt(tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert tokenizer.render_chat(messages) == expected
    ids = tokenizer.encode_chat(messages)
    assert ids == tokenizer.encode(expected)
    assert ids.count(1) == 3  # <|im_start|> is one token
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.vocab_size == 49152
