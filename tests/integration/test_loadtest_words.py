"""Prompts of a load test, counted by the default model's own tokenizer."""

import asyncio
from dataclasses import dataclass

import pytest
from tokenizers import Tokenizer

from loadtest.calibrate import calibrate
from loadtest.conversation import Text
from loadtest.words import WORDS
from loadtest.writer import IdWriter, WordWriter, prompt, single_token_words
from router.tokenizer import Tokenizer as RouterTokenizer
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


@dataclass(frozen=True)
class Counted:
    prompt_tokens: int
    error: str = ""
    message: str = ""


@dataclass(frozen=True)
class ChatServer:
    """Counts as the router does."""

    tokenizer: RouterTokenizer

    def count(self, content: str) -> int:
        return len(self.tokenizer.encode_chat([{"role": "user", "content": content}]))

    async def send(self, content: str, max_tokens: int) -> Counted:
        return Counted(self.count(content))


def test_a_chat_prompt_is_as_long_as_asked_for() -> None:
    server = ChatServer(RouterTokenizer.load(fetch(DEFAULT_MODEL)))
    writer = asyncio.run(calibrate(server))
    assert writer.tokens_per_word == 1.0
    for n in (40, 64, 500):
        text = prompt(writer, [(("shared", n), 64), (("own", n), n)])
        assert server.count(str(text)) == 64 + n
