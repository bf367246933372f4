"""Events come out whole, whatever the cuts between the pieces."""

import pytest
from hypothesis import given, strategies as st

from loadtest.sse import EventParser

EVENTS = ['{"a": "é\u2028"}', "two\nlines", " leading", "[DONE]"]
TEXT = (
    ": a comment\n\n"
    'event: message\nid: 1\ndata: {"a": "é\u2028"}\n\n'
    "data: two\ndata: lines\n\n"
    "\n"
    "data:  leading\n\n"
    "retry: 10\ndata\n\n"
    "data:[DONE]\n\n"
)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@given(cuts=st.lists(st.integers(0, len(TEXT.encode()) + 20)))
def test_any_cuts_give_the_same_events(end: str, cuts: list[int]) -> None:
    raw = TEXT.replace("\n", end).encode()
    edges = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    parser = EventParser()
    events = [
        event for a, b in zip(edges, edges[1:], strict=False) for event in parser.feed(raw[a:b])
    ]
    assert events + parser.close() == EVENTS


def test_an_event_comes_as_soon_as_its_blank_line() -> None:
    parser = EventParser()
    assert parser.feed(b"data: a\n") == []
    assert parser.feed(b"\n") == ["a"]
    assert parser.feed(b"data: b\n\ndata: c\n\ndata: ") == ["b", "c"]


def test_the_last_event_may_lack_its_blank_line() -> None:
    parser = EventParser()
    assert parser.feed(b"data: [DONE]") == []
    assert parser.close() == ["[DONE]"]
    assert parser.close() == []


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(UnicodeDecodeError):
        EventParser().feed(b"data: \xff\n\n")
