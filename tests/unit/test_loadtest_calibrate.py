"""Calibration: a server's own counts make prompts the length that was asked for."""

import asyncio
from dataclasses import dataclass, field

import pytest

from loadtest.calibrate import calibrate
from loadtest.words import WORDS
from loadtest.writer import WordWriter, prompt


@dataclass(frozen=True)
class Counted:
    prompt_tokens: int = 0
    error: str = ""
    message: str = ""


@dataclass
class Server:
    """Counts a token per word, two for some of them, and some around the prompt."""

    overhead: int = 31
    long_words: frozenset[str] = frozenset()
    context: int = 8192
    counts: bool = True
    asked: list[str] = field(default_factory=list)

    def count(self, text: str) -> int:
        words = text.split()
        return self.overhead + len(words) + sum(word in self.long_words for word in words)

    async def send(self, content: str, max_tokens: int) -> Counted:
        self.asked.append(content)
        if self.count(content) + max_tokens > self.context:
            return Counted(error="http 400", message="too long")
        return Counted(self.count(content) if self.counts else 0)


def test_a_server_of_one_token_per_word_is_met_to_the_token() -> None:
    server = Server()
    writer = asyncio.run(calibrate(server))
    assert (writer.tokens_per_word, writer.overhead) == (1.0, 31)
    assert server.count(str(prompt(writer, [(("a",), 64), (("b",), 100)]))) == 164
    assert len(server.asked) == 2
    assert writer.note == "tokens per word: 1, around a prompt: 31, as the server counts"


def test_longer_words_are_met_on_average() -> None:
    server = Server(overhead=12, long_words=frozenset(WORDS[::4]))
    writer = asyncio.run(calibrate(server))
    counts = [server.count(str(prompt(writer, [(("a", i), 400)]))) for i in range(200)]
    assert sum(counts) / 200 == pytest.approx(400, rel=0.03)
    uncalibrated = [server.count(str(prompt(WordWriter(), [(("a", i), 400)]))) for i in range(200)]
    assert sum(uncalibrated) / 200 > 490


def test_what_is_around_a_prompt_is_what_its_words_are_not() -> None:
    writer = asyncio.run(calibrate(Server(overhead=12, long_words=frozenset(WORDS))))
    assert (writer.tokens_per_word, writer.overhead) == (2.0, 12)


def test_a_small_context_is_asked_with_less() -> None:
    server = Server(context=128)
    writer = asyncio.run(calibrate(server))
    assert (writer.tokens_per_word, writer.overhead) == (1.0, 31)
    assert len(server.asked) == 4


def test_a_server_that_counts_nothing_leaves_all_as_it_was() -> None:
    writer = asyncio.run(calibrate(Server(counts=False)))
    assert (writer.tokens_per_word, writer.overhead) == (1.0, 0)
    assert writer.note == (
        "tokens per word: 1, around a prompt: 0, which is assumed:"
        " the server does not count prompt tokens"
    )


def test_a_server_that_fails_leaves_all_as_it_was_and_the_note_says_why() -> None:
    writer = asyncio.run(calibrate(Server(context=20)))
    assert (writer.tokens_per_word, writer.overhead) == (1.0, 0)
    assert writer.note.endswith("assumed: the server did not answer a probe (http 400: too long)")


def test_a_writers_own_words_are_kept_and_asked_for() -> None:
    server = Server()
    own = WordWriter(words=WORDS[:300])
    writer = asyncio.run(calibrate(server, own))
    assert writer.words == own.words
    assert set(" ".join(server.asked).split()) <= set(own.words)
