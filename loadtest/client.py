"""Sends requests to an OpenAI-compatible server and notes when each piece of the answers comes.

Figures follow from what is noted here, so this is where they are made equal to those of
``vllm bench serve`` (its ``lib/endpoint_request_func.py``):

* the clock of a request starts when it is handed to HTTP: making a connection counts, if none is
  free (one is made ahead of each time at which a conversation is due);
* a *chunk* is any event that has ``choices`` which are not empty, whatever they hold. So a chat's
  first chunk that only names the role is the first token for TTFT, an empty text (special tokens,
  half of a character) counts, and so does a last chunk that only gives the ``finish_reason``:
  the end of the latency. An event that carries usage alone (no choices) is no chunk, nor is
  ``[DONE]``;
* chunks that are read together have the same time, that of the first; several tokens in one chunk
  are one chunk, for ITL too, while TPOT divides by tokens as the server's usage counts them.

Different on purpose, where vLLM's client has no figure or would hide an error: the time of a chunk
is when its bytes reached this machine (see ``loadtest.receipt``), not when they were read; usage is
also taken from a chunk that has choices; without usage the chunks that have text are counted; and a
stream that ends without ``finish_reason`` and ``[DONE]`` has failed.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import socket
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from loadtest.conversation import Text
from loadtest.http1 import Address, Broken, Http, NotHTTP
from loadtest.receipt import clock
from loadtest.sse import EventParser

Messages = Sequence[Mapping[str, Any]]

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
MAX_MESSAGE = 300  # characters of what a server says of an error
MODELS_TIMEOUT_S = 30.0
MAX_ERROR_BODY = 1 << 16  # bytes


class ServerUnusable(Exception):
    """There is nothing to measure: the message says what is wrong with the server or its URL."""


@dataclass(frozen=True)
class ClientOptions:
    """Which server, and what all requests have in common."""

    url: str  # with or without /v1
    model: str = ""  # empty: the first that /v1/models names
    endpoint: str = "chat"  # or "completions"
    api_key: str = ""
    ignore_eos: bool = True  # sent only when true: OpenAI's own API does not know it
    temperature: float = 0.0
    timeout_s: float = 600.0  # of a whole request
    extra_body: Mapping[str, Any] = field(default_factory=dict)  # None takes a field out

    def __post_init__(self) -> None:
        if self.endpoint not in PATHS:
            raise ValueError(f"endpoint {self.endpoint!r}: one of {', '.join(PATHS)}")
        self.address()
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s {self.timeout_s}: must be positive")

    def address(self) -> Address:
        """The server's; raises ValueError for a URL that is none."""
        return Address.parse(self.url.rstrip("/").removesuffix("/v1"))


@dataclass(frozen=True)
class Reply:
    """How one request went. Without an ``error`` the answer is complete."""

    error: str = ""  # kind, see Client
    message: str = ""  # what the server or the socket said of it
    prompt_tokens: int = 0  # 0 where the server gave no usage
    output_tokens: int = 0
    chunk_s: tuple[float, ...] = ()  # since the request was sent
    text: str = ""
    token_ids: tuple[int, ...] = ()  # of the answer, if asked for and given


class Exchange:
    """One request and what has come back so far; readable also after its sending was cancelled."""

    def __init__(self) -> None:
        self.sent_s = clock()
        self.error = self.message = ""
        self.chunk_s: list[float] = []
        self.ended = False  # a finish_reason or [DONE] came
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._usage: dict[str, Any] = {}
        self._events = EventParser()
        self._status = 0
        self._refusal = b""  # the body of an answer that is no 200

    def fail(self, error: str, message: str) -> None:
        """The first failure is the one that counts."""
        if not self.error:
            self.error, self.message = error, message[:MAX_MESSAGE]

    def receive(self, status: int, data: bytes, at: float) -> None:
        """A piece of the answer, read from the socket ``at``."""
        self._status = status
        if status != 200:
            self._refusal += data[: MAX_ERROR_BODY - len(self._refusal)]
            return
        self._last_at = at
        try:
            for event in self._events.feed(data):
                self._take(event, at)
        except UnicodeDecodeError as error:
            self.fail("malformed", f"the stream is not UTF-8: {error}")

    def close(self) -> None:
        """The answer has ended as HTTP has it."""
        if self._status == 200:
            self.receive(200, b"\n\n", self._last_at)  # the last event may lack its blank line
        else:
            self.fail(f"http {self._status}", said_in(self._refusal))
        if not self.ended:
            self.fail("incomplete", "the stream ended without finish_reason and [DONE]")
        elif not self.chunk_s:
            self.fail("empty", "the stream ended without a chunk of an answer")

    def _take(self, event: str, at: float) -> None:
        if event == "[DONE]":
            self.ended = True
            return
        try:
            body = json.loads(event)
            if body.get("error"):
                self.fail("error event", said_in(body))
                return
            if body.get("usage"):
                self._usage = body["usage"]
            if not body.get("choices"):
                return
            choice = body["choices"][0]
            text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            self._texts.append(text)
            self._ids.extend(choice.get("token_ids") or ())
            self.ended |= choice.get("finish_reason") is not None
        except (ValueError, TypeError, AttributeError, LookupError):
            self.fail("malformed", f"an event that is not of OpenAI's API: {event}")
            return
        self.chunk_s.append(at - self.sent_s)

    def reply(self) -> Reply:
        """All that is known by now."""
        counted = self._usage.get("completion_tokens")
        return Reply(
            error=self.error,
            message=self.message,
            prompt_tokens=self._usage.get("prompt_tokens") or 0,
            output_tokens=counted or len(self._ids) or sum(map(bool, self._texts)),
            chunk_s=tuple(self.chunk_s),
            text="".join(self._texts),
            token_ids=tuple(self._ids),
        )


class Client:
    """A server, as one that asks it sees it. ``async with Client(options) as client: ...``

    Sending never raises for what a server does; kinds of errors are ``connect`` (refused,
    unreachable), ``dns``, ``tls``, ``files`` (this process has no file descriptors left),
    ``timeout``, ``http STATUS``, ``reset`` (the connection ended in the middle), ``error event``
    (the server's own report within a stream), ``malformed`` (neither HTTP nor OpenAI's events),
    ``incomplete`` (the stream ended, the answer had not) and ``empty`` (no chunk came).
    """

    def __init__(self, options: ClientOptions) -> None:
        self.options = options
        self.model = options.model

    @property
    def is_chat(self) -> bool:
        """Whether prompts are lists of messages."""
        return self.options.endpoint == "chat"

    async def __aenter__(self) -> Client:
        """Raises ServerUnusable when no model was named and the server names none."""
        raise_file_limit()
        headers = {"Content-Type": "application/json", "Accept": "*/*"}
        if self.options.api_key:
            headers["Authorization"] = f"Bearer {self.options.api_key}"
        self._http = Http(self.options.address(), headers)
        try:
            self.model = self.model or await self._first_model()
        except BaseException:
            await self._http.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._http.close()

    def body(self, prompt: Text | Messages, max_tokens: int, want_ids: bool = False) -> bytes:
        """A request, ready to be sent; raises ValueError for token ids in a chat."""
        options = self.options
        fields: dict[str, Any] = {"model": self.model}
        if options.endpoint == "completions":
            fields["prompt"] = prompt
        elif isinstance(prompt, str):
            fields["messages"] = [{"role": "user", "content": prompt}]
        elif prompt and isinstance(prompt[0], Mapping):
            fields["messages"] = prompt
        else:
            raise ValueError("a chat takes words, not token ids; use endpoint completions")
        fields |= {
            "max_tokens": max_tokens,
            "temperature": options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.ignore_eos:
            fields["ignore_eos"] = True
        if want_ids:
            fields["return_token_ids"] = True
        fields |= options.extra_body
        return json.dumps({k: v for k, v in fields.items() if v is not None}).encode()

    async def send(self, prompt: Text | Messages, max_tokens: int, want_ids: bool = False) -> Reply:
        """Ask and wait for the whole answer. Text goes to a chat as the user's one message."""
        body = self.body(prompt, max_tokens, want_ids)
        exchange = Exchange()
        await self.perform(exchange, body)
        return exchange.reply()

    def prepare(self) -> None:
        """Have a connection free for a request that is to come soon."""
        self._http.prepare()

    async def perform(self, exchange: Exchange, body: bytes) -> None:
        """Send a request that :meth:`body` made; what comes goes into ``exchange``."""
        try:
            async with asyncio.timeout(self.options.timeout_s):
                await self._http.ask("POST", PATHS[self.options.endpoint], body, exchange)
        except TimeoutError:
            exchange.fail("timeout", f"no end within {self.options.timeout_s:g} s")
        except (OSError, Broken, NotHTTP) as error:
            exchange.fail(*kind_of(error))
        else:
            exchange.close()

    async def _first_model(self) -> str:
        where = f"{self.options.url}: /v1/models"
        answer = _Page()
        try:
            async with asyncio.timeout(MODELS_TIMEOUT_S):
                await self._http.ask("GET", "/v1/models", b"", answer)
        except TimeoutError:
            raise ServerUnusable(f"{where}: no answer within {MODELS_TIMEOUT_S:g} s") from None
        except (OSError, Broken, NotHTTP) as error:
            raise ServerUnusable(f"{self.options.url}: {': '.join(kind_of(error))}") from error
        if answer.status != 200:
            raise ServerUnusable(f"{where}: http {answer.status}: {said_in(answer.body)}")
        try:
            return str(json.loads(answer.body)["data"][0]["id"])
        except (ValueError, TypeError, LookupError) as error:
            raise ServerUnusable(f"{where} names no model; name the one to use") from error


class _Page:
    """An answer that is wanted as a whole."""

    status = 0
    body = b""

    def receive(self, status: int, data: bytes, at: float) -> None:
        self.status = status
        self.body += data


def kind_of(error: Exception) -> tuple[str, str]:
    """The kind of a failure below the API's, and its message."""
    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return "files", f"no file descriptors left: the limit is {soft} (ulimit -n, at most {hard})"
    if isinstance(error, socket.gaierror):
        return "dns", text
    if isinstance(error, ssl.SSLError):
        return "tls", text
    if isinstance(error, NotHTTP):
        return "malformed", text
    if isinstance(error, Broken):
        return "reset", text
    if isinstance(error, OSError) and error.errno:
        text = f"{os.strerror(error.errno).lower()} ({text})"
    return "connect", text


def said_in(body: object) -> str:
    """The message in an error's body: OpenAI's form, FastAPI's, or whatever it is."""
    if isinstance(body, bytes):
        try:
            return said_in(json.loads(body))
        except ValueError:
            return body.decode(errors="replace").strip()[:MAX_MESSAGE]
    if isinstance(body, dict):
        for name in ("error", "message", "detail"):
            if body.get(name):
                return said_in(body[name])
    return body[:MAX_MESSAGE] if isinstance(body, str) else json.dumps(body)[:MAX_MESSAGE]


def raise_file_limit() -> None:
    """Each request in flight takes a file descriptor: allow as many as the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
