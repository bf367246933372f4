"""A server that speaks OpenAI's API and computes nothing: it answers after known delays.

It stands for a real server where a test or a bench must know what the right figures are. Chunk k
of an answer is due ``ttft_ms + k * itl_ms`` after the request has arrived, whenever the chunk
before was sent; when each really went out is in its log (``GET /stub/requests``), on the clock
that all processes of a machine share (CLOCK_MONOTONIC). So a client's errors can be told from the
stub's. It also remembers the prompts it saw, and can misbehave in every way a server can.

How a request is answered: ``Answer``'s fields, set for all by flags of the same names
(``--ttft-ms 20``) and for one request by its body's field ``"stub": {"ttft_ms": 5}``. Tokens are
words here: a prompt of text has as many as it has words, of ids as it has ids.

Alone, for any client: ``python -m tests.support.stub_server --port 8123 --ttft-ms 50``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import json
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest.event_loop import new_event_loop, when_idle
from loadtest.receipt import Receipt

ROOT = Path(__file__).resolve().parents[2]
FIRST_ID = 100  # of the answers' token ids
MAX_HEAD = 65536  # bytes

FAULTS = {
    "": "none",
    "reset": "the connection is reset",
    "close": "the connection is closed in the middle of the body",
    "end": "the stream ends properly, but without finish_reason, usage and [DONE]",
    "garbage": "an event that is not JSON, then the stream goes on",
    "error": "an event with an error, as OpenAI's API writes it, then the stream ends",
    "silence": "nothing more is sent and the connection stays",
    "not-http": "the answer is no HTTP (at whatever chunk it is due)",
}


@dataclass(frozen=True)
class Answer:
    """How requests are answered."""

    ttft_ms: float = 20.0
    itl_ms: float = 10.0
    prompt_us: float = 0.0  # added to the first delay for each token of the prompt
    tokens_per_chunk: int = 1
    role_ms: float = -1.0  # chat: a first chunk with the role only, so late; negative: none
    empty_end: bool = False  # finish_reason in a chunk of its own without text, right after
    usage: bool = True  # as asked for by stream_options; False: never
    token_ids: bool = True  # as asked for by return_token_ids; False: never
    status: int = 200  # another: an error as the OpenAI API writes them
    fault: str = ""  # one of FAULTS
    fault_at: int = 0  # chunks sent before it; 0: even before the status line


@dataclass
class Seen:
    """One request in the log; times are of ``time.monotonic()``."""

    endpoint: str  # "chat" or "completions"
    prompt: Any  # as it came: text, token ids, or messages
    prompt_tokens: int
    max_tokens: int
    connection: int  # counts connections: the same for requests that shared one
    body: dict[str, Any]  # all other fields
    arrived_s: float
    sent_s: list[float] = field(default_factory=list)  # of each chunk with choices


class Stub(asyncio.BufferedProtocol):
    """One connection: parses requests and answers one at a time."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._buffer = b""
        self._busy = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._receipt = Receipt(transport.get_extra_info("socket").fileno())
        self.server.num_connections += 1
        self.number = self.server.num_connections

    def connection_lost(self, exc: Exception | None) -> None:
        self._receipt.close()
        if self._timer:
            self._timer.cancel()

    def get_buffer(self, sizehint: int) -> bytearray:
        self._arrived_s = self._receipt.next()
        return self.server.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._buffer += memoryview(self.server.buffer)[:nbytes]
        when_idle(self._next_request)  # what is due goes first

    def _next_request(self) -> None:
        if self._busy:
            return
        if self._buffer and not self._buffer[:1].isalpha():  # TLS, for example
            self.transport.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
            self.transport.close()
            return
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            if len(head) > MAX_HEAD:
                self.transport.close()
            return
        request_line, *lines = head.decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        if "transfer-encoding" in headers:
            self._buffer = b""
            self._json(411, _error(411, "this stub wants a Content-Length"))
            return
        length = int(headers.get("content-length", 0))
        if len(rest) < length:
            if headers.get("expect", "").lower() == "100-continue" and not rest:
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            return
        body, self._buffer = rest[:length], rest[length:]
        self._busy = True
        method, path, *_ = request_line.split(" ")
        self._handle(method, path.partition("?")[0], body)

    def _done(self) -> None:
        self._busy = False
        if self._buffer:
            self._next_request()

    # --- routes ----------------------------------------------------------------------------------

    def _handle(self, method: str, path: str, body: bytes) -> None:
        server = self.server
        if path == "/v1/chat/completions" and method == "POST":
            self._generate("chat", body)
        elif path == "/v1/completions" and method == "POST":
            self._generate("completions", body)
        elif path == "/v1/models":
            card = {"id": server.model, "object": "model", "created": 0, "owned_by": "stub"}
            card |= {"root": server.model, "max_model_len": 1 << 20}
            self._json(200, {"object": "list", "data": [card]})
        elif path in ("/health", "/ready", "/ping"):
            self._json(200, {})
        elif path == "/version":
            self._json(200, {"version": "stub"})
        elif path == "/tokenize" and method == "POST":
            asked = json.loads(body)
            count = _count(asked.get("prompt") or asked.get("messages") or "")
            ids = list(range(FIRST_ID, FIRST_ID + count))
            self._json(200, {"tokens": ids, "count": count, "max_model_len": 1 << 20})
        elif path == "/stub/requests" and method == "GET":
            self._json(200, [dataclasses.asdict(seen) for seen in server.log])
        elif path == "/stub/requests" and method == "DELETE":
            server.log.clear()
            self._json(200, {})
        else:
            self._json(404, _error(404, f"no route {method} {path}"))

    def _json(self, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        self.transport.write(
            f"HTTP/1.1 {status} {'OK' if status == 200 else 'Stub'}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        self._done()

    def _generate(self, endpoint: str, body: bytes) -> None:
        now = self._arrived_s
        try:
            fields = json.loads(body)
            answer = self.server.answer
            if changes := fields.pop("stub", None):
                answer = dataclasses.replace(answer, **changes)
            prompt = fields.pop("messages" if endpoint == "chat" else "prompt")
        except (ValueError, TypeError, KeyError) as error:
            self._json(400, _error(400, f"bad request: {error!r}"))
            return
        limit = fields.pop("max_completion_tokens", None) or fields.pop("max_tokens", None) or 16
        seen = Seen(endpoint, prompt, _count(prompt), limit, self.number, fields, now)
        if self.server.keeps_log:
            self.server.log.append(seen)
        Answering(self, answer, seen).begin(now)

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Call at a time of the loop's clock, unless the connection is lost before."""
        self._timer = asyncio.get_running_loop().call_at(when, call)


class Answering:
    """One answer on its way."""

    def __init__(self, connection: Stub, answer: Answer, seen: Seen) -> None:
        self.connection, self.answer, self.seen = connection, answer, seen
        self.stream = bool(seen.body.get("stream"))
        options = seen.body.get("stream_options") or {}
        self.with_usage = answer.usage and (not self.stream or options.get("include_usage", False))
        self.with_ids = answer.token_ids and seen.body.get("return_token_ids", False)
        self.num_tokens = 0  # sent
        self.num_chunks = 0  # sent, of tokens
        self.started = False  # the status line is out
        chat = seen.endpoint == "chat"
        kind = ("chat.completion" + ".chunk" * self.stream) if chat else "text_completion"
        common = {"id": "stub-1", "object": kind, "created": 0, "model": connection.server.model}
        self._front = json.dumps(common)[:-1]

    def begin(self, now: float) -> None:
        """Set the first timer; the whole answer follows from it."""
        answer = self.answer
        first_s = (answer.ttft_ms + answer.prompt_us * self.seen.prompt_tokens / 1000) / 1000
        self.first_at = now + first_s
        if not self.stream:
            # All at once, when the last chunk of a stream would come.
            chunks = -(-self.seen.max_tokens // answer.tokens_per_chunk)
            at = self.first_at + (chunks - 1) * answer.itl_ms / 1000
            self.connection.at(at, self._whole)
        elif self.seen.endpoint == "chat" and answer.role_ms >= 0 and answer.status == 200:
            self.connection.at(now + answer.role_ms / 1000, self._role)
        else:
            self.connection.at(self.first_at, self._step)

    def _whole(self) -> None:
        if self.answer.status != 200 or (self.answer.fault and self.answer.fault_at == 0):
            self._step()
            return
        count = self.seen.max_tokens
        text = "".join(f" w{i}" for i in range(count))
        entry: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": "length"}
        if self.seen.endpoint == "chat":
            entry["message"] = {"role": "assistant", "content": text}
        else:
            entry["text"] = text
        if self.with_ids:
            entry["token_ids"] = list(range(FIRST_ID, FIRST_ID + count))
        body = {**json.loads(self._front + "}"), "choices": [entry], "usage": self._usage(count)}
        self.seen.sent_s.append(time.monotonic())
        self.connection._json(200, body)

    def _role(self) -> None:
        """The chunk that says who speaks and no more."""
        entry = '{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": null}'
        self._send_choice(entry)
        self.connection.at(self.first_at, self._step)

    def _step(self) -> None:
        """Send what is due now, and set the timer for what is due next."""
        answer, connection = self.answer, self.connection
        if answer.status != 200:
            text = {429: "too many requests", 503: "overloaded"}.get(answer.status, "refused")
            connection._json(answer.status, _error(answer.status, text))
            return
        if answer.fault and self.num_chunks == answer.fault_at and self._misbehave():
            return
        if self._send_tokens():
            due = self.first_at + self.num_chunks * answer.itl_ms / 1000
            connection.at(due, self._step)
            return
        tail = b""
        if self.with_usage:
            usage = json.dumps(self._usage(self.num_tokens))
            tail += self._event(f'{self._front}, "choices": [], "usage": {usage}}}')
        self._write(tail + self._event("[DONE]") + b"0\r\n\r\n")
        connection._done()

    def _send_tokens(self) -> bool:
        """The next chunk; whether more are to come."""
        chat = self.seen.endpoint == "chat"
        count = min(self.answer.tokens_per_chunk, self.seen.max_tokens - self.num_tokens)
        indices = range(self.num_tokens, self.num_tokens + count)
        self.num_tokens += count
        self.num_chunks += 1
        last = self.num_tokens == self.seen.max_tokens
        text = "".join([f" w{i}" for i in indices])
        said = f'"delta": {{"content": "{text}"}}' if chat else f'"text": "{text}"'
        ids = f', "token_ids": {[FIRST_ID + i for i in indices]}' if self.with_ids else ""
        finish = '"length"' if last and not self.answer.empty_end else "null"
        self._send_choice(
            f'{{"index": 0, {said}{ids}, "logprobs": null, "finish_reason": {finish}}}'
        )
        if last and self.answer.empty_end:
            said = '"delta": {}' if chat else '"text": ""'
            self._send_choice(f'{{"index": 0, {said}, "finish_reason": "length"}}')
        return not last

    def _send_choice(self, entry: str) -> None:
        data = self._event(f'{self._front}, "choices": [{entry}]}}')
        self.seen.sent_s.append(time.monotonic())
        self._write(data)

    def _event(self, data: str) -> bytes:
        """A server-sent event in a chunk of its own, as HTTP's chunked encoding has it."""
        event = f"data: {data}\n\n"
        return f"{len(event):x}\r\n{event}\r\n".encode()

    def _write(self, data: bytes) -> None:
        if not self.started:
            self.started = True
            head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            data = head + b"Transfer-Encoding: chunked\r\n\r\n" + data
        self.connection.transport.write(data)

    def _misbehave(self) -> bool:
        """Do what ``fault`` says; whether that was the end of it."""
        transport, fault = self.connection.transport, self.answer.fault
        if fault == "garbage":
            self._write(self._event('{"choices": [{"text": '))
            return False
        if fault == "not-http":
            transport.write(b"220 stub ESMTP\r\n")
        elif fault == "error":
            self._write(self._event(json.dumps(_error(500, "the engine died"))) + b"0\r\n\r\n")
            self.connection._done()
        elif fault == "end":
            self._write(b"0\r\n\r\n")
            self.connection._done()
        elif fault == "close":
            transport.close()
        elif fault == "reset":
            linger = struct.pack("ii", 1, 0)  # closing then sends RST instead of FIN
            transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, linger
            )
            transport.abort()
        return True

    def _usage(self, num_tokens: int) -> dict[str, int]:
        prompt = self.seen.prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": num_tokens,
            "total_tokens": prompt + num_tokens,
        }


def _count(prompt: Any) -> int:
    """Tokens as this server has them: words of text, ids, or both in a list of messages."""
    if isinstance(prompt, str):
        return len(prompt.split())
    if prompt and isinstance(prompt[0], dict):
        return sum(_count(part.get("content") or part.get("text") or "") for part in prompt)
    return len(prompt)


def _error(status: int, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "stub_error", "param": None, "code": status}}


@dataclass
class Server:
    """What all connections share."""

    answer: Answer
    model: str = "stub"
    keeps_log: bool = True
    log: list[Seen] = field(default_factory=list)
    num_connections: int = 0
    buffer: bytearray = field(default_factory=lambda: bytearray(1 << 18))  # of all connections


async def _serve(server: Server, host: str, port: int) -> None:
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(lambda: Stub(server), host, port, backlog=4096)
    print(listener.sockets[0].getsockname()[1], flush=True)
    await listener.serve_forever()


def main(argv: list[str] | None = None) -> None:
    """Serve until a signal comes; the first line printed is the port."""
    parser = argparse.ArgumentParser(description="an OpenAI server of known delays, for tests")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free one, which is printed")
    parser.add_argument("--model", default="stub", help="name")
    parser.add_argument("--no-log", action="store_true", help="remember no requests")
    for each in dataclasses.fields(Answer):
        kind = type(each.default)
        flag = "--" + each.name.replace("_", "-")
        if kind is bool:
            parser.add_argument(
                flag, action=argparse.BooleanOptionalAction, default=each.default, help=" "
            )
        else:
            choices = list(FAULTS) if each.name == "fault" else None
            parser.add_argument(flag, type=kind, default=each.default, choices=choices, help=" ")
    args = vars(parser.parse_args(argv))
    answer = Answer(**{each.name: args[each.name] for each in dataclasses.fields(Answer)})
    server = Server(answer, args["model"], not args["no_log"])
    gc.disable()
    with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=new_event_loop) as it:
        it.run(_serve(server, args["host"], args["port"]))


class RunningStub:
    """A stub in a process of its own, as seen by a test."""

    def __init__(self, port: int, pid: int = 0) -> None:
        self.port, self.pid = port, pid
        self.url = f"http://127.0.0.1:{port}"

    def requests(self) -> list[Seen]:
        """All it has seen, in the order of their arrival."""
        with urllib.request.urlopen(f"{self.url}/stub/requests", timeout=60) as response:
            return [Seen(**each) for each in json.load(response)]

    def forget(self) -> None:
        """Empty the log."""
        request = urllib.request.Request(f"{self.url}/stub/requests", method="DELETE")
        urllib.request.urlopen(request, timeout=60).close()


@contextlib.contextmanager
def running_stub(**flags: float | str | bool) -> Iterator[RunningStub]:
    """Start one on a free port and end it with the block: ``running_stub(ttft_ms=5)``."""
    command = [sys.executable, "-m", "tests.support.stub_server"]
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            command += [f"--{flag}", str(value)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        yield RunningStub(int(process.stdout.readline()), process.pid)
    finally:
        process.kill()
        process.communicate(timeout=30)


if __name__ == "__main__":
    main()
