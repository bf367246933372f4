"""Writes prompts of a wished number of tokens, of which chosen parts are really shared.

A part of a prompt has a key. The same key always gives the same text, so prompts that begin with
the same parts share their first tokens, which is what a server's prefix cache sees. Other keys give
other texts. Knows nothing of where the lengths come from.
"""

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from loadtest.conversation import Text
from loadtest.words import WORDS

Key = tuple[int | str, ...]


class Writer(Protocol):
    """Makes the parts of prompts, each from its key alone."""

    @property
    def overhead(self) -> int:
        """Tokens that the server adds to every prompt: the chat template's, a first token's."""

    def write(self, key: Key, num_tokens: int) -> Text:
        """A text of so many tokens. Of one key, a shorter text begins a longer one.

        Two keys' texts are drawn independently: they agree in their first token only by chance, 1
        in about 1,000 words or in as many ids as the vocabulary has.
        """

    def join(self, parts: Sequence[Text]) -> Text:
        """The parts one after another; the first parts' tokens stay what they are alone."""


def prompt(writer: Writer, parts: Sequence[tuple[Key, int]]) -> Text:
    """A whole prompt of parts (key, tokens), which the server counts as the sum of their tokens.

    What the server adds is taken from the last part, which should be one that nobody shares, but a
    token of it always stays.
    """
    *shared, (key, num_tokens) = parts
    texts = [writer.write(part, n) for part, n in shared]
    return writer.join([*texts, writer.write(key, max(1, num_tokens - writer.overhead))])


def rng_of(key: Key) -> np.random.Generator:
    """A generator of random numbers that depends on the key alone; keys need not be alike."""
    return np.random.default_rng(int.from_bytes(_digest(key, 16), "little"))


def _digest(key: Key, num_bytes: int) -> bytes:
    """Random bytes; of one key, fewer begin more."""
    plain = [part if isinstance(part, str) else int(part) for part in key]
    return hashlib.shake_128(json.dumps(plain).encode()).digest(num_bytes)


def _draw(key: Key, n: int, below: int) -> NDArray[np.int64]:
    """n numbers in [0, below); the bias of the remainder is under 1 in 1,000 for vocabularies."""
    bits = np.frombuffer(_digest(key, 4 * n), dtype="<u4")
    return (bits % np.uint32(below)).astype(np.int64)


@dataclass(frozen=True)
class WordWriter:
    """Common words with a space between them, for any server that takes text.

    Right to the token where each word is one token (`from_tokenizer`); otherwise right on average
    once `calibrate` has asked the server.
    """

    words: tuple[str, ...] = WORDS
    tokens_per_word: float = 1.0
    overhead: int = 0
    note: str = ""  # how the two numbers were found, for people

    @classmethod
    def from_tokenizer(cls, path: Path, overhead: int = 0) -> "WordWriter":
        """Only the words that are one token each for a ``tokenizer.json``: exact.

        Raises ValueError when there are too few of them, or the file cannot be read.
        """
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{path}: the tokenizer cannot be read: {error}") from None
        words = single_token_words(tokenizer)
        if len(words) < 100:
            raise ValueError(
                f"{path}: only {len(words)} of {len(WORDS)} common English words are single tokens"
                " for this tokenizer; calibrate with the server instead"
            )
        return cls(words=words, overhead=overhead, note=f"words are single tokens of {path.name}")

    def write(self, key: Key, num_tokens: int) -> str:
        num_words = max(1, round(num_tokens / self.tokens_per_word)) if num_tokens > 0 else 0
        chosen = _draw(key, num_words, len(self.words))
        return " ".join(_as_array(self.words)[chosen].tolist())

    def join(self, parts: Sequence[Text]) -> str:
        return " ".join(str(part) for part in parts if part)


@functools.lru_cache(maxsize=4)
def _as_array(words: tuple[str, ...]) -> NDArray[np.object_]:
    return np.array(words, dtype=object)


def single_token_words(tokenizer: Tokenizer, words: Sequence[str] = WORDS) -> tuple[str, ...]:
    """Those that are one token at the beginning, behind a space and behind a line's end."""

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    return tuple(
        word
        for word in words
        if count(word) == 1
        and count(f"{word} {word}") == 2
        and count(f"\n{word}") == count("\n") + 1
    )


@dataclass(frozen=True)
class IdWriter:
    """Token ids, for ``/v1/completions``: exact, without a tokenizer.

    Special tokens lie at either end of vocabularies, so an eighth at each end is left out.
    """

    vocab_size: int
    overhead: int = 0

    def __post_init__(self) -> None:
        if self.vocab_size < 8:
            raise ValueError(
                f"a vocabulary of {self.vocab_size} tokens is too small, want 8 or more"
            )

    def write(self, key: Key, num_tokens: int) -> tuple[int, ...]:
        margin = self.vocab_size // 8
        ids = _draw(key, max(0, num_tokens), self.vocab_size - 2 * margin) + margin
        return tuple(ids.tolist())

    def join(self, parts: Sequence[Text]) -> tuple[int, ...]:
        return tuple(token for part in parts for token in part if isinstance(token, int))
