"""The load test's client against a stub server: figures as vllm bench serve has them, and whatever
goes wrong is an error of the request.
"""

import asyncio
import contextlib
import json
import math
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from loadtest.client import Client, ClientOptions, Exchange, Reply, ServerUnusable
from loadtest.event_loop import new_event_loop
from tests.support.stub_server import RunningStub, Seen, running_stub

MS = 1e-3


@pytest.fixture(scope="module")
def stub() -> Iterator[RunningStub]:
    with running_stub(ttft_ms=4, itl_ms=2) as running:
        yield running


@pytest.fixture(autouse=True)
def _empty_log(stub: RunningStub) -> None:
    stub.forget()


def ask(
    url: str, prompt: Any = "a b c", tokens: int = 3, ids: bool = False, **options: Any
) -> Reply:
    """One request with a client of its own; ``how`` goes to the stub."""
    how = options.pop("how", {})
    extra = options.pop("extra_body", {}) | ({"stub": how} if how else {})

    async def go() -> Reply:
        async with Client(ClientOptions(url, extra_body=extra, **options)) as client:
            return await client.send(prompt, tokens, ids)

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(go())


def only(stub: RunningStub) -> Seen:
    (seen,) = stub.requests()
    return seen


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_an_answer_is_taken_in_whole(stub: RunningStub, endpoint: str) -> None:
    reply = ask(stub.url, endpoint=endpoint, tokens=5)
    seen = only(stub)
    assert (reply.error, reply.text) == ("", " w0 w1 w2 w3 w4")
    assert (reply.prompt_tokens, reply.output_tokens, len(reply.chunk_s)) == (3, 5, 5)
    assert seen.endpoint == endpoint
    message = {"role": "user", "content": "a b c"}
    assert seen.prompt == ([message] if endpoint == "chat" else "a b c")
    assert seen.max_tokens == 5
    assert seen.body == {
        "model": "stub",
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_a_client_that_is_busy_does_not_make_the_server_slow(stub: RunningStub) -> None:
    """The process does something else from before the first chunk to after the last."""

    async def go() -> Reply:
        async with Client(ClientOptions(stub.url)) as client:
            await client.send("a b c", 1)  # the connection is there
            loop = asyncio.get_running_loop()
            loop.call_later(0.01, time.sleep, 0.4)
            return await client.send("a b c", 2)

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        reply = runner.run(go())
    *_, seen = stub.requests()
    assert len(reply.chunk_s) == 2
    if sys.platform == "linux":  # elsewhere it is when they were read
        assert reply.chunk_s[0] < seen.sent_s[-1] - seen.arrived_s + 0.2


def test_chunks_have_the_times_at_which_they_came(stub: RunningStub) -> None:
    """Between the stub's own times of sending: nothing arrives earlier than it was sent."""
    reply = ask(stub.url, tokens=20)
    sent = only(stub).sent_s
    lateness = [
        (at - reply.chunk_s[0]) - (true - sent[0])
        for at, true in zip(reply.chunk_s, sent, strict=True)
    ]
    assert sorted(map(abs, lateness))[10] < 1 * MS  # the median, as the machine may be busy
    assert reply.chunk_s[0] >= sent[0] - only(stub).arrived_s >= 4 * MS


def test_a_chunk_is_an_event_with_choices_whatever_they_hold(stub: RunningStub) -> None:
    """The role alone is the first token, the finish_reason alone the last; usage is none."""
    how = {"ttft_ms": 30, "role_ms": 0, "empty_end": True}
    reply = ask(stub.url, how=how)
    assert len(reply.chunk_s) == 1 + 3 + 1
    assert reply.output_tokens == 3
    assert reply.chunk_s[1] - reply.chunk_s[0] > 25 * MS
    assert reply.text == " w0 w1 w2"


def test_several_tokens_in_a_chunk_are_one_chunk(stub: RunningStub) -> None:
    reply = ask(stub.url, tokens=7, how={"tokens_per_chunk": 3})
    assert (len(reply.chunk_s), reply.output_tokens) == (3, 7)


def test_without_usage_chunks_with_text_are_tokens(stub: RunningStub) -> None:
    reply = ask(stub.url, how={"usage": False, "role_ms": 0, "empty_end": True})
    assert (reply.prompt_tokens, reply.output_tokens, len(reply.chunk_s)) == (0, 3, 5)


def test_token_ids_go_out_and_come_back(stub: RunningStub) -> None:
    reply = ask(stub.url, (7, 8, 9, 10), ids=True, endpoint="completions")
    assert only(stub).prompt == [7, 8, 9, 10]
    assert (reply.prompt_tokens, reply.token_ids) == (4, (100, 101, 102))
    with pytest.raises(ValueError, match="endpoint completions"):
        ask(stub.url, (7, 8), endpoint="chat")


def test_options_go_into_the_request(stub: RunningStub) -> None:
    options = {"ignore_eos": False, "temperature": 0.5, "api_key": "secret", "model": "other"}
    ask(stub.url + "/v1/", **options, extra_body={"top_k": 3, "stream_options": None})
    body = only(stub).body
    assert "ignore_eos" not in body
    assert "stream_options" not in body
    assert (body["temperature"], body["top_k"], body["model"]) == (0.5, 3, "other")


def test_connections_are_reused(stub: RunningStub) -> None:
    async def go() -> None:
        async with Client(ClientOptions(stub.url)) as client:
            for _ in range(3):
                assert not (await client.send("a", 2)).error
            await asyncio.gather(*(client.send("a", 2) for _ in range(2)))

    asyncio.run(go())
    numbers = [seen.connection for seen in stub.requests()]
    assert len(set(numbers[:3])) == 1
    assert len(set(numbers)) == 2


@pytest.mark.parametrize(
    ("how", "error", "message", "chunks"),
    [
        ({"status": 429}, "http 429", "too many requests", 0),
        ({"status": 503}, "http 503", "overloaded", 0),
        ({"status": 302}, "http 302", "refused", 0),
        ({"fault": "reset", "fault_at": 2}, "reset", "in the middle of the answer", 2),
        ({"fault": "reset"}, "reset", "before any answer", 0),
        ({"fault": "close", "fault_at": 2}, "reset", "closed the connection, in the middle", 2),
        ({"fault": "close"}, "reset", "closed the connection, before any", 0),
        ({"fault": "end", "fault_at": 2}, "incomplete", "without finish_reason and [DONE]", 2),
        ({"fault": "error", "fault_at": 1}, "error event", "the engine died", 1),
        ({"fault": "garbage", "fault_at": 1}, "malformed", '{"choices": [{"text"', 3),
        ({"fault": "not-http"}, "malformed", "220 stub ESMTP", 0),
        ({"fault": "not-http", "fault_at": 1}, "malformed", "220 stub ESMTP", 1),
        ({"fault": "silence", "fault_at": 2}, "timeout", "no end within 0.5 s", 2),
        ({"fault": "silence"}, "timeout", "no end within 0.5 s", 0),
    ],
)
def test_what_goes_wrong_is_an_error_with_the_chunks_before(
    stub: RunningStub, how: dict[str, Any], error: str, message: str, chunks: int
) -> None:
    reply = ask(stub.url, how=how, timeout_s=0.5 if error == "timeout" else 60)
    assert reply.error == error
    assert message in reply.message
    assert len(reply.chunk_s) == chunks


def test_a_good_request_follows_bad_ones(stub: RunningStub) -> None:
    """A broken connection is not used again, one that only refused is."""

    ways: list[dict[str, Any]] = [{"status": 429}, {"fault": "close"}, {"fault": "garbage"}, {}]

    async def go() -> list[str]:
        errors = []
        async with Client(ClientOptions(stub.url)) as client:
            for how in ways:
                exchange = Exchange()
                body = json.loads(client.body("a", 2)) | {"stub": how}
                await client.perform(exchange, json.dumps(body).encode())
                errors.append(exchange.reply().error)
        return errors

    assert asyncio.run(go()) == ["http 429", "reset", "malformed", ""]
    first, second, third, fourth = (seen.connection for seen in stub.requests())
    assert first == second != third == fourth


@contextlib.contextmanager
def bound() -> Iterator[int]:
    """A port that nobody listens at."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def test_no_server_is_an_error() -> None:
    with bound() as port:
        reply = ask(f"http://127.0.0.1:{port}", model="m")
        assert reply.error == "connect"
        assert "refused" in reply.message.lower()
        with pytest.raises(ServerUnusable, match=f"127.0.0.1:{port}: connect: connection refused"):
            ask(f"http://127.0.0.1:{port}")
    assert ask("http://name.invalid", model="m").error == "dns"


def test_no_tls_is_an_error(stub: RunningStub) -> None:
    assert ask(f"https://127.0.0.1:{stub.port}", model="m").error == "tls"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "127.0.0.1:8000"}, "want http://HOST:PORT"),
        ({"url": "http://a:b"}, "[Pp]ort"),
        ({"url": "http://a", "endpoint": "chats"}, "one of chat, completions"),
        ({"url": "http://a", "timeout_s": math.nan}, "timeout_s nan"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClientOptions(**options)


# --- answers that the stub does not give ---------------------------------------------------------


def answered(raw: list[bytes], **options: Any) -> Reply:
    """Ask a server that sends these pieces, one after another, and then closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        with contextlib.closing(writer), contextlib.suppress(asyncio.CancelledError):
            for piece in raw:
                writer.write(piece)
                await asyncio.sleep(0.002)  # so that pieces are read apart; nothing depends on it

    async def go() -> Reply:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with (
            server,
            Client(ClientOptions(f"http://127.0.0.1:{port}", model="m", **options)) as client,
        ):
            return await client.send("a", 2)

    return asyncio.run(go())


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
EVENT = (
    b'data: {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": null}]}\r\n\r\n'
)
LAST = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\n'


def test_the_end_of_the_connection_may_be_the_end_of_the_answer() -> None:
    reply = answered([HEAD + b"\r\n" + EVENT, EVENT, b"data: [DONE]"])
    assert (reply.error, reply.text, len(reply.chunk_s)) == ("", "xx", 2)
    assert answered([HEAD + b"\r\n" + EVENT]).error == "incomplete"


def test_done_may_be_missing_after_a_finish_reason() -> None:
    assert answered([HEAD + b"\r\n" + EVENT + LAST]).error == ""


def test_bytes_may_come_one_by_one() -> None:
    body = EVENT + LAST
    chunks = b"".join(b"1\r\n" + body[i : i + 1] + b"\r\n" for i in range(len(body)))
    raw = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    reply = answered([raw[i : i + 7] for i in range(0, len(raw), 7)])
    assert (reply.error, reply.text, len(reply.chunk_s)) == ("", "x", 2)


@pytest.mark.parametrize(
    ("raw", "error", "message"),
    [
        (b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"\r\n" + EVENT + LAST, "", ""),
        (HEAD + b"Content-Length: 9\r\n\r\n" + EVENT[:5], "reset", "in the middle"),
        (HEAD + b"Content-Length: 14\r\n\r\ndata: [DONE]\n\n", "empty", "without a chunk"),
        (HEAD + b"Content-Encoding: gzip\r\n\r\n" + EVENT, "malformed", "gzip"),
        (HEAD + b"\r\ndata: \xff\n\n", "malformed", "UTF-8"),
        (HEAD + b"\r\ndata: [1]\n\n", "malformed", "[1]"),
        (HEAD + b'\r\ndata: {"choices": [3]}\n\n', "malformed", "[3]"),
        (b"HTTP/1.1 404 X\r\n\r\nno such thing", "http 404", "no such thing"),
        (b'HTTP/1.1 400 X\r\n\r\n{"detail": "bad"}', "http 400", "bad"),
        (b'HTTP/1.1 500 X\r\n\r\n{"error": {"message": "m"}}', "http 500", "m"),
        (b"HTTP/1.1 502 X\r\nContent-Length: 0\r\n\r\n", "http 502", ""),
    ],
)
def test_odd_answers(raw: bytes, error: str, message: str) -> None:
    reply = answered([raw])
    assert reply.error == error
    assert message in reply.message
