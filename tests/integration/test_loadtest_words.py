"""Prompts of a load test, counted by the default model's own tokenizer."""

import pytest
from tokenizers import Tokenizer

from loadtest.conversation import Text
from loadtest.words import WORDS
from loadtest.writer import IdWriter, WordWriter, prompt, single_token_words
from services.fetch import DEFAULT_MODEL, fetch


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(fetch(DEFAULT_MODEL) / "tokenizer.json"))


def test_every_word_is_one_token_of_the_default_model(tokenizer: Tokenizer) -> None:
    assert single_token_words(tokenizer) == WORDS


def test_lengths_and_shared_parts_are_exact_in_tokens(tokenizer: Tokenizer) -> None:
    def ids(text: Text) -> list[int]:
        return list(tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>").ids)

    writer = WordWriter()
    around = len(ids(""))
    a = ids(prompt(writer, [(("shared",), 100), (("a",), 50)]))
    b = ids(prompt(writer, [(("shared",), 100), (("b",), 60)]))
    assert len(a) == around + 150
    assert len(b) == around + 160
    front = len(tokenizer.encode("<|im_start|>user\n").ids)
    assert a[: front + 100] == b[: front + 100]
    assert a[front + 100] != b[front + 100]


def test_ids_avoid_special_tokens_of_the_default_model(tokenizer: Tokenizer) -> None:
    special = set(tokenizer.get_added_tokens_decoder())
    ids = IdWriter(tokenizer.get_vocab_size()).write(("x",), 200_000)
    assert special
    assert special.isdisjoint(ids)
