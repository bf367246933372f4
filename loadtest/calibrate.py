"""Asks a server how many tokens words are, and how many it puts around a prompt.

Two requests tell: their prompts differ by a known number of words, and the usage that comes with
the answers by the tokens of these. Knows nothing of HTTP.
"""

from collections.abc import Awaitable
from dataclasses import replace
from typing import Protocol

from loadtest.writer import WordWriter, rng_of

NUM_SHORT = 4  # words of the shorter probe
NUM_MORE = (256, 64)  # how many more the longer one has: at first, and for small contexts


class Answer(Protocol):
    """What is read of an answer; `client.Reply` has it."""

    @property
    def error(self) -> str: ...
    @property
    def message(self) -> str: ...
    @property
    def prompt_tokens(self) -> int: ...


class Server(Protocol):
    """What is used of a client; `client.Client` has it."""

    def send(self, content: str, max_tokens: int, /) -> Awaitable[Answer]:
        """Ask for an answer; never raises for what the server does."""


async def calibrate(server: Server, writer: WordWriter | None = None) -> WordWriter:
    """The writer with the server's ``tokens_per_word`` and ``overhead``.

    A server that fails or counts nothing leaves the writer as it was; its ``note`` says what was
    found, for people.
    """
    writer = writer or WordWriter()
    order = rng_of(("calibrate",)).permutation(len(writer.words)).tolist()
    assumed = f"{_words(writer.tokens_per_word, writer.overhead)}, which is assumed"
    for num_more in NUM_MORE:
        answers = []
        for num_words in (NUM_SHORT, NUM_SHORT + num_more):
            text = " ".join(writer.words[i] for i in order[:num_words])
            answers.append(await server.send(text, 1))
        short, long = answers
        if not short.error and not long.error:
            break
    else:
        failed = short if short.error else long
        problem = f"the server did not answer a probe ({failed.error}: {failed.message})"
        return replace(writer, note=f"{assumed}: {problem}")
    if not 0 < short.prompt_tokens < long.prompt_tokens:
        return replace(writer, note=f"{assumed}: the server does not count prompt tokens")
    per_word = (long.prompt_tokens - short.prompt_tokens) / num_more
    overhead = max(0, round(short.prompt_tokens - NUM_SHORT * per_word))
    note = f"{_words(per_word, overhead)}, as the server counts"
    return replace(writer, tokens_per_word=per_word, overhead=overhead, note=note)


def _words(per_word: float, overhead: int) -> str:
    return f"tokens per word: {per_word:.3g}, around a prompt: {overhead}"
