"""Conversations against a stub server: when they are sent, what later turns hold, how runs end."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from loadtest.client import Client, ClientOptions
from loadtest.conversation import Conversation, Text, Turn
from loadtest.event_loop import new_event_loop
from loadtest.record import INTERRUPTED, NO_IDS, SKIPPED, Record, RunResult
from loadtest.runner import run
from tests.support.stub_server import RunningStub, running_stub

MS = 1e-3


@pytest.fixture(scope="module")
def stub() -> Iterator[RunningStub]:
    with running_stub(ttft_ms=4, itl_ms=2) as running:
        yield running


@pytest.fixture(autouse=True)
def _empty_log(stub: RunningStub) -> None:
    stub.forget()


def talk(*texts: Text, at: float = 0.0, think: float = 0.0, tokens: int = 2) -> Conversation:
    """A conversation with these turns."""
    turns = [Turn(text, _count(text), tokens, think * bool(i)) for i, text in enumerate(texts)]
    return Conversation(at, "class", tuple(turns))


def _count(text: Text) -> int:
    return len(text.split()) if isinstance(text, str) else len(text)


def play(
    stub: RunningStub,
    conversations: Sequence[Conversation],
    endpoint: str = "chat",
    how: dict[str, Any] | None = None,
    stop_after: int = 0,
    **options: Any,
) -> RunResult:
    """Run them; ``stop_after`` so many were sent, it is stopped."""

    async def go() -> RunResult:
        stop, sent = asyncio.Event(), 0

        def on_sent() -> None:
            nonlocal sent
            sent += 1
            if sent == stop_after:
                # Once its chunks begin to come; the answer takes much longer than that.
                asyncio.get_running_loop().call_later(0.3, stop.set)

        extra = {"stub": how} if how else {}
        async with Client(ClientOptions(stub.url, "m", endpoint, extra_body=extra)) as client:
            return await run(conversations, client, stop=stop, on_sent=on_sent, **options)

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(go())


def test_open_loop_waits_for_nobody(stub: RunningStub) -> None:
    """All are sent at their times though each answer takes longer than the whole schedule."""
    times = [0.12, 0.0, 0.04, 0.08, 0.08]
    result = play(stub, [talk(f"p{at}", at=at) for at in times], how={"ttft_ms": 500})
    assert [record.due_s for record in result.records] == sorted(times)
    assert [record.index for record in result.records] == list(range(5))
    assert [record.conversation for record in result.records] == [1, 2, 3, 4, 0]
    arrived = [seen.arrived_s for seen in stub.requests()]
    assert [seen.prompt[0]["content"] for seen in stub.requests()][:2] == ["p0.0", "p0.04"]
    for record, at in zip(result.records, arrived, strict=True):
        assert record.sent_s >= record.due_s
        since_first = record.sent_s - result.records[0].sent_s
        assert at - arrived[0] == pytest.approx(since_first, abs=0.05)
    assert max(record.sent_s for record in result.records) < 0.5  # before the first answer
    assert (result.num_planned, result.interrupted) == (5, False)
    assert result.duration_s >= 0.12 + 0.5


def test_records_say_what_was_planned_and_what_came(stub: RunningStub) -> None:
    (record,) = play(stub, [talk("a b c d", tokens=3)]).records
    assert record.class_name == "class"
    assert (record.planned_tokens, record.prompt_tokens) == (4, 4)
    assert (record.max_tokens, record.output_tokens, len(record.chunk_s)) == (3, 3, 3)
    assert record.ttft_s >= 4 * MS
    assert record.latency_s >= 8 * MS
    (record,) = play(stub, [talk("a b c d")], how={"usage": False}).records
    assert record.prompt_tokens == 4  # as planned


def test_closed_loop_keeps_so_many_going(stub: RunningStub) -> None:
    result = play(stub, [talk(f"p{i}", at=99.0) for i in range(7)], concurrency=3)
    spans = [(record.sent_s, record.sent_s + record.latency_s) for record in result.records]
    running = [sum(a <= start < b for a, b in spans) for start, _ in spans]
    assert len(spans) == 7
    assert max(running) <= 3
    assert running[2] == 3
    assert all(0 <= record.lag_s < 0.5 for record in result.records)
    # When a place became free, not at once: a token after 4 ms, one more after 2.
    assert result.records[3].due_s >= min(end for _, end in spans[:3]) >= 6 * MS


def test_a_chat_grows_by_the_answers(stub: RunningStub) -> None:
    result = play(stub, [talk("one two", "three", "four", think=0.05)])
    assert [seen.prompt for seen in stub.requests()][2] == [
        {"role": "user", "content": "one two"},
        {"role": "assistant", "content": " w0 w1"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": " w0 w1"},
        {"role": "user", "content": "four"},
    ]
    assert [record.planned_tokens for record in result.records] == [2, 2 + 2 + 1, 5 + 2 + 1]
    assert [record.prompt_tokens for record in result.records] == [2, 5, 8]
    first, second, third = result.records
    thought = [b.due_s - a.sent_s - a.latency_s for a, b in ((first, second), (second, third))]
    assert min(thought) >= 0.05
    assert max(thought) < 0.5
    assert [record.turn for record in result.records] == [0, 1, 2]


def test_words_are_continued_word_for_word(stub: RunningStub) -> None:
    play(stub, [talk("one two", "three")], "completions")
    assert [seen.prompt for seen in stub.requests()] == ["one two", "one two w0 w1 three"]


def test_ids_are_continued_id_by_id(stub: RunningStub) -> None:
    play(stub, [talk((1, 2), (3,), tokens=3)], "completions")
    seen = stub.requests()
    assert [each.prompt for each in seen] == [[1, 2], [1, 2, 100, 101, 102, 3]]
    # Not asked for where nothing follows: a server may not know the field.
    assert [each.body.get("return_token_ids") for each in seen] == [True, None]


def test_without_the_answers_ids_the_next_turn_is_refused(stub: RunningStub) -> None:
    result = play(stub, [talk((1, 2), (3,), (4,))], "completions", {"token_ids": False})
    assert [record.error for record in result.records] == ["", NO_IDS, NO_IDS]
    assert "return_token_ids" in result.records[1].message
    assert len(stub.requests()) == 1


def test_a_failed_turn_ends_its_conversation_and_each_turn_counts(stub: RunningStub) -> None:
    done: list[Record] = []
    talks = [talk("a", "b", "c"), talk("d", at=0.01)]
    result = play(stub, talks, how={"status": 503}, on_record=done.append)
    errors = {(record.conversation, record.turn): record.error for record in result.records}
    assert errors == {
        (0, 0): "http 503",
        (0, 1): SKIPPED,
        (0, 2): SKIPPED,
        (1, 0): "http 503",
    }
    assert len(stub.requests()) == 2
    assert len(result.records) == result.num_planned
    assert sorted(done, key=lambda record: record.index) == list(result.records)
    assert not result.interrupted


def test_stop_keeps_what_there_is(stub: RunningStub) -> None:
    """What ended, what was cut off with its chunks, and nothing that was not sent."""
    talks = [talk("a"), talk("b", tokens=2000), talk("c", at=0.05, tokens=2000), talk("d", at=60)]
    result = play(stub, talks, stop_after=3)
    assert [record.error for record in result.records] == ["", INTERRUPTED, INTERRUPTED]
    assert 0 < len(result.records[1].chunk_s) < 1000
    assert result.records[1].output_tokens == len(result.records[1].chunk_s)
    assert (result.num_planned, result.interrupted) == (4, True)
    assert result.duration_s < 30


def test_grace_lets_what_is_in_flight_end(stub: RunningStub) -> None:
    """But no turn follows, not even one that waits already."""
    talks = [talk("a", "z", tokens=400), talk("b", "z", think=60), talk("c", "z", think=60)]
    result = play(stub, talks, stop_after=3, grace_s=60)
    assert [record.error for record in result.records] == ["", "", ""]
    assert len(result.records[0].chunk_s) == 400
    assert (len(stub.requests()), result.num_planned, result.interrupted) == (3, 6, True)


def test_a_stopped_closed_loop_takes_no_more(stub: RunningStub) -> None:
    talks = [talk(f"p{i}", tokens=400) for i in range(5)]
    result = play(stub, talks, stop_after=2, concurrency=2, grace_s=60)
    assert [record.error for record in result.records] == ["", ""]
    assert len(stub.requests()) == 2


def test_a_server_that_is_not_there_is_an_error_each(stub: RunningStub) -> None:
    nobody = RunningStub(port=1)
    result = play(nobody, [talk("a"), talk("b", at=0.01)])
    assert [record.error for record in result.records] == ["connect", "connect"]


def test_what_cannot_be_sent_is_said_before_anything_is(stub: RunningStub) -> None:
    with pytest.raises(ValueError, match="endpoint completions"):
        play(stub, [talk("a"), talk((1, 2))])
    with pytest.raises(ValueError, match="all words or all token ids"):
        play(stub, [talk("a", (1,))], "completions")
    assert stub.requests() == []


def test_a_hook_that_fails_ends_the_run(stub: RunningStub) -> None:
    def full(record: Record) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        play(stub, [talk("a"), talk("b", at=60)], on_record=full)
