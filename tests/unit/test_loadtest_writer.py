"""Prompts: of the length asked for, shared where they should be, and nowhere else."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from loadtest.conversation import Text
from loadtest.words import WORDS
from loadtest.writer import (
    IdWriter,
    Key,
    WordWriter,
    Writer,
    prompt,
    rng_of,
)

WRITERS = [WordWriter(), IdWriter(49_152)]
KEYS = st.lists(st.integers(-(2**70), 2**70) | st.text(max_size=5), max_size=4).map(tuple)


def units(text: Text) -> list[str | int]:
    """Words, or ids: what is a token each."""
    return list(text.split() if isinstance(text, str) else text)


@settings(max_examples=40, deadline=None)
@given(writer=st.sampled_from(WRITERS), key=KEYS, n=st.integers(0, 300), less=st.integers(0, 300))
def test_a_text_has_its_length_and_a_shorter_one_begins_it(
    writer: Writer, key: Key, n: int, less: int
) -> None:
    whole = units(writer.write(key, n))
    assert len(whole) == n
    shorter = units(writer.write(key, min(less, n)))
    assert whole[: len(shorter)] == shorter
    assert writer.write(key, n) == writer.write(key, n)


@settings(max_examples=40, deadline=None)
@given(
    writer=st.sampled_from(WRITERS),
    parts=st.lists(st.tuples(KEYS, st.integers(0, 40)), max_size=5),
)
def test_parts_that_are_joined_stay_what_they_are(
    writer: Writer, parts: list[tuple[Key, int]]
) -> None:
    texts = [writer.write(key, n) for key, n in parts]
    assert units(writer.join(texts)) == [unit for text in texts for unit in units(text)]


@pytest.mark.parametrize("writer", WRITERS, ids=["words", "ids"])
def test_other_keys_give_other_texts_from_the_first_token_on(writer: Writer) -> None:
    """Two agree in a token only by chance; no two of 500 keys begin with the same three."""
    keys: list[Key] = [("a", i) for i in range(499)] + [("b", 0)]
    texts = [tuple(units(writer.write(key, 24))) for key in keys]
    assert len({text[:3] for text in texts}) == len(texts)
    firsts = [text[0] for text in texts]
    alike = sum(firsts.count(first) - 1 for first in set(firsts))
    # 500 draws of 1,024 words: 500²/2/1024 = 122 pairs are expected to agree; of 36,864 ids 3.4.
    assert alike < (180 if isinstance(writer, WordWriter) else 15)


def test_keys_do_not_run_into_one_another() -> None:
    writer = IdWriter(49_152)
    keys: list[Key] = [(1, 2), (12,), ("1", 2), (1, "2"), ("1,2",), (), (1, 2, "")]
    assert len({writer.write(key, 8) for key in keys}) == len(keys)
    assert len({float(rng_of(key).random()) for key in keys}) == len(keys)


def test_all_words_are_used_about_evenly() -> None:
    text = WordWriter().write(("many",), 100 * len(WORDS)).split()
    counts = [text.count(word) for word in WORDS[::50]]
    assert min(counts) > 50
    assert max(counts) < 150


def test_words_are_plain_and_different() -> None:
    assert len(WORDS) == len(set(WORDS)) == 1024
    assert all(word.isascii() and word.islower() and word.isalpha() for word in WORDS)


@pytest.mark.parametrize("vocab_size", [8, 100, 32_000, 128_256, 151_936])
def test_ids_are_of_the_vocabulary_and_leave_out_its_ends(vocab_size: int) -> None:
    ids = IdWriter(vocab_size).write(("x",), 5000)
    assert min(ids) >= vocab_size // 8
    assert max(ids) < vocab_size - vocab_size // 8
    assert len(set(ids)) > min(vocab_size // 2, 4000)


def test_a_vocabulary_can_be_too_small() -> None:
    with pytest.raises(ValueError, match="a vocabulary of 7 tokens is too small, want 8 or more"):
        IdWriter(7)


def test_words_of_several_tokens_make_shorter_texts() -> None:
    writer = WordWriter(tokens_per_word=1.25)
    assert len(writer.write(("x",), 100).split()) == 80
    assert len(writer.write(("x",), 1).split()) == 1
    assert writer.write(("x",), 0) == ""


def test_what_the_server_adds_is_taken_from_the_last_part() -> None:
    writer = WordWriter(overhead=30)
    shared, own = writer.write(("shared",), 64), writer.write(("own",), 70)
    assert prompt(writer, [(("shared",), 64), (("own",), 100)]) == f"{shared} {own}"
    # A token of it stays, else it would not be a prompt of its own.
    short = prompt(writer, [(("shared",), 64), (("own",), 10)])
    assert short == f"{shared} {own.split()[0]}"


# --- a tokenizer's own words ---------------------------------------------------------------------


def tiny_tokenizer(path: Path, words: list[str]) -> Path:
    """A tokenizer of whole words, for which all others are unknown letters."""
    entries = [" ", "\n", *words, *[f" {word}" for word in words], *"abcdefghijklmnopqrstuvwxyz"]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(entries))}
    tokenizer = Tokenizer(models.Unigram([(token, -1.0) for token in vocab]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_next")
    tokenizer.save(str(path))
    return path


def test_only_words_that_are_one_token_are_kept(tmp_path: Path) -> None:
    known = list(WORDS[:120])
    path = tiny_tokenizer(tmp_path / "tokenizer.json", known)
    writer = WordWriter.from_tokenizer(path, overhead=7)
    assert set(known) <= set(writer.words) < set(WORDS)
    assert writer.overhead == 7
    tokenizer = Tokenizer.from_file(str(path))
    assert len(tokenizer.encode(writer.write(("x",), 500)).ids) == 500
    # Which the unchecked words are not.
    assert len(tokenizer.encode(WordWriter().write(("x",), 500)).ids) > 700


def test_a_tokenizer_without_english_is_refused(tmp_path: Path) -> None:
    path = tiny_tokenizer(tmp_path / "tokenizer.json", ["un", "deux", "trois"])
    with pytest.raises(ValueError, match=r"tokenizer.json: only \d+ of 1024 common English words"):
        WordWriter.from_tokenizer(path)


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(ValueError, match=r"tokenizer.json: .*cannot be read"):
        WordWriter.from_tokenizer(path)
    path.write_text(json.dumps({"model": 3}))
    with pytest.raises(ValueError, match=r"tokenizer.json: .*cannot be read"):
        WordWriter.from_tokenizer(path)
