"""A trace replayed over HTTP: what arrives shares what the trace shares, at the trace's times."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from loadtest.client import Client, ClientOptions
from loadtest.conversation import Conversation, Text
from loadtest.record import RunResult
from loadtest.runner import run
from loadtest.sharing import prompt_sharing
from loadtest.traces import Selection, read_trace
from loadtest.writer import IdWriter, WordWriter, Writer
from tests.support.stub_server import RunningStub, running_stub


@pytest.fixture(scope="module")
def stub() -> Iterator[RunningStub]:
    with running_stub(ttft_ms=1, itl_ms=0) as running:
        yield running


def replayed(stub: RunningStub, endpoint: str, conversations: list[Conversation]) -> RunResult:
    async def play() -> RunResult:
        async with Client(ClientOptions(stub.url, endpoint=endpoint)) as client:
            return await run(conversations, client)

    stub.forget()
    result = asyncio.run(play())
    assert not any(record.error for record in result.records)
    return result


def arrived(stub: RunningStub) -> list[Text]:
    """Prompts as the server got them."""
    return [said(seen.prompt) for seen in stub.requests()]


def said(prompt: Any) -> Text:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt[0], int):
        return tuple(prompt)
    return " ".join(message["content"] for message in prompt)


@pytest.mark.parametrize(
    ("endpoint", "writer", "scale", "speed"),
    [
        ("chat", WordWriter(), 1 / 32, 60.0),
        ("chat", WordWriter(overhead=20), 1 / 32, 200.0),
        ("completions", WordWriter(), 1 / 16, 200.0),
        ("completions", IdWriter(32_000), 1 / 64, 60.0),
    ],
    ids=["chat", "chat-template", "text", "ids"],
)
def test_what_arrives_shares_what_the_trace_shares(
    stub: RunningStub, endpoint: str, writer: Writer, scale: float, speed: float
) -> None:
    own = read_trace("sample:mooncake").sharing().rate
    assert 0.3 < own < 0.6
    trace = read_trace("sample:mooncake", selection=Selection(length_scale=scale))
    result = replayed(stub, endpoint, trace.conversations(writer, speed=speed))
    seen = prompt_sharing(arrived(stub), trace.block)
    assert len(result.records) == 170
    assert seen.rate == pytest.approx(own, rel=0.01)
    # The trace's own times, so much faster; requests that are sent late would be seen here too.
    due = [request.at_s / speed for request in trace.requests]
    assert [record.due_s for record in result.records] == pytest.approx(due)
    assert sorted(record.max_tokens for record in result.records) == sorted(
        request.turns[0].output_tokens for request in trace.requests
    )


def test_conversations_of_real_texts_grow(stub: RunningStub) -> None:
    """ShareGPT: each turn is asked behind all that was said before it."""
    trace = read_trace("sample:sharegpt", selection=Selection(max_requests=5))
    conversations = trace.arriving([0.0] * 5).conversations(WordWriter())
    replayed(stub, "chat", conversations)
    asked = [
        [message["content"] for message in seen.prompt if message["role"] == "user"]
        for seen in stub.requests()
    ]
    texts = [[turn.text for turn in conversation.turns] for conversation in conversations]
    assert max(map(len, texts)) > 1
    assert sorted(asked) == sorted(
        turns[:end] for turns in texts for end in range(1, len(turns) + 1)
    )
