"""Streaming text: whole characters, stop strings wherever they lie, nothing lost at the end."""

from itertools import pairwise

import pytest
from hypothesis import example, given, strategies as st

from router.tokenizer import ByteTokenizer, Detokenizer

TOKENIZER = ByteTokenizer()
TEXTS = ["😀", "👩‍👩‍👧", "🇮🇹", "e\u0301é", "ďábelské", "漢字", "สวัสดี", "안녕하세요", "plain", ""]


def ids_of(text: str) -> list[int]:
    """One id per UTF-8 byte: every character of more than one byte is broken."""
    return list(text.encode())


def pieces(ids: list[int], cuts: list[int]) -> list[list[int]]:
    """``ids`` grouped at ``cuts``, as the engine's steps might."""
    borders = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[a:b] for a, b in pairwise(borders)]


def stream(detokenizer: Detokenizer, groups: list[list[int]]) -> list[str]:
    """All deltas, the last one from finish."""
    return [detokenizer.push(group) for group in groups] + [detokenizer.finish()]


def first_stop(text: str, stop: list[str], include: bool) -> tuple[str, str | None]:
    """The slow reference: look at every prefix of the text, the shortest first."""
    for end in range(len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


# --- characters (FAULTS B018) ---------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_characters_are_never_broken(text: str) -> None:
    deltas = stream(Detokenizer(TOKENIZER), [[i] for i in ids_of(text)])
    assert not any("\ufffd" in delta for delta in deltas)
    assert "".join(deltas) == text


@given(st.lists(st.integers(0, 256)), st.lists(st.integers(0, 1000)), st.booleans())
@example([0xF0, 0x9F, 0x98], [], True)  # ends within a character
@example([0xF0, 0x9F, 0x41, 0xE6], [1, 2], True)  # characters broken for good
@example([0xE6, 256, 0xBC, 0xA2], [1, 2], True)  # a skipped token within one
@example([0xE6, 256, 0xBC, 0xA2], [1, 2], False)
def test_deltas_join_to_decode_of_all(ids: list[int], cuts: list[int], skip: bool) -> None:
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=skip)
    deltas = stream(detokenizer, pieces(ids, cuts))
    assert "".join(deltas) == TOKENIZER.decode(ids, skip_special_tokens=skip)
    assert detokenizer.num_tokens == len(ids)


def test_an_incomplete_last_character_is_one_replacement_character() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    assert detokenizer.push([0x61, 0xF0, 0x9F, 0x98]) == "a"
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_a_replacement_character_that_the_model_wrote_is_sent_at_once() -> None:
    assert Detokenizer(TOKENIZER).push(ids_of("\ufffd")) == "\ufffd"


# --- stop strings (FAULTS B019) -------------------------------------------------------------------


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    "stop",
    [
        ["DEFGHIJ"],
        ["DE"],
        ["J"],
        [" C"],
        ["ABCX", "BCD"],
        ["CDEFX", "CDEFG", "CDEY"],
        ["A"],
        ["DEX"],
        ["XYZ"],
        ["😀", "G"],
        ["BCDE", "CD"],
        ["CDE", "DE"],
    ],
)
@pytest.mark.parametrize("text", ["ABCDEFGHIJKL", "AB CDE😀FGHIJ"])
def test_text_ends_at_the_first_stop(text: str, stop: list[str], include: bool) -> None:
    expected, which = first_stop(text, stop, include)
    ids = ids_of(text)
    for groups in ([[i] for i in ids], [ids], [ids[:1], ids[1:]], [ids[:5], ids[5:7], ids[7:]]):
        detokenizer = Detokenizer(TOKENIZER, stop, include_stop=include)
        assert "".join(stream(detokenizer, groups)) == expected
        assert detokenizer.stopped == which


@given(
    text=st.text("ab😀é", max_size=40),
    stop=st.lists(st.text("ab😀é", min_size=1, max_size=6), max_size=4),
    cuts=st.lists(st.integers(0, 1000), max_size=12),
    include=st.booleans(),
)
def test_stops_are_found_however_ids_are_grouped(
    text: str, stop: list[str], cuts: list[int], include: bool
) -> None:
    """B019."""
    detokenizer = Detokenizer(TOKENIZER, stop, include_stop=include)
    deltas = stream(detokenizer, pieces(ids_of(text), cuts))
    assert ("".join(deltas), detokenizer.stopped) == first_stop(text, stop, include)
    sent = ""
    for delta in deltas[:-1]:  # nothing is held but what may still become a stop string
        sent += delta
    rest = "".join(deltas)[len(sent) :]
    assert not rest or any(s.startswith(rest) and s != rest for s in stop)


def test_a_beginning_that_diverges_is_sent_in_full() -> None:
    detokenizer = Detokenizer(TOKENIZER, ["DEX"])
    assert [detokenizer.push([i]) for i in b"CDEDEF"] == ["C", "", "", "DE", "", "DEF"]


def test_nothing_follows_a_stop() -> None:
    detokenizer = Detokenizer(TOKENIZER, ["b"])
    assert detokenizer.push(ids_of("abcd")) == "a"
    assert detokenizer.num_tokens == 2  # c and d are not part of the answer
    assert detokenizer.push(ids_of("efg")) == ""
    assert detokenizer.finish() == ""
    assert detokenizer.num_tokens == 2


def test_a_stop_may_be_a_special_token_when_these_are_shown() -> None:
    detokenizer = Detokenizer(TOKENIZER, ["<eos>"], skip_special_tokens=False)
    assert detokenizer.push([97, 256, 98]) == "a"
    assert detokenizer.stopped == "<eos>"


def test_the_first_min_tokens_hold_no_stop() -> None:
    detokenizer = Detokenizer(TOKENIZER, ["b"], min_tokens=3)
    assert detokenizer.push(ids_of("abcabc")) == "abca"
    assert detokenizer.num_tokens == 5


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        Detokenizer(TOKENIZER, ["a", ""])


# --- what is held back (FAULTS B059, B061) --------------------------------------------------------


def test_what_was_held_is_flushed_at_the_end() -> None:
    detokenizer = Detokenizer(TOKENIZER, ["abcdef"])
    assert detokenizer.push(ids_of("abc")) == ""
    assert detokenizer.finish() == "abc"
    assert detokenizer.stopped is None
    assert detokenizer.finish() == ""


def test_a_stop_that_an_incomplete_character_completes() -> None:
    detokenizer = Detokenizer(TOKENIZER, ["a\ufffd"])
    assert detokenizer.push([0x78, 0x61, 0xF0]) == "x"
    assert detokenizer.finish() == ""
    assert detokenizer.stopped == "a\ufffd"


def test_a_stop_that_does_not_occur_delays_nothing() -> None:
    """B061."""
    detokenizer = Detokenizer(TOKENIZER, ["ZZZZZZZZZZ"])
    text = "The answer has no such string; Zed is sent with the next letter."
    deltas = [detokenizer.push([i]) for i in ids_of(text)]
    late = text.index("Z")
    assert deltas[:late] == list(text[:late])
    assert deltas[late : late + 2] == ["", "Ze"]
    assert deltas[late + 2 :] == list(text[late + 2 :])
