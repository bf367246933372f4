"""A whole tiny deployment in the test's own event loop, with a real HTTP server in front.

Router, workers, wire and KV transport are the real ones; only the model is small and random. Since
all of it runs in this process, a test can hold any part of it (:mod:`tests.faults.gates`) and look
at both sides at the same instant.
"""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import uvicorn

from kvtransfer.faults import Faults, parse_faults
from router.api import create_api
from router.dispatch import Dispatcher
from router.tokenizer import ByteTokenizer
from services.config import load
from services.engine.model_config import ModelConfig
from services.local import LocalGraph, local_graph
from tests.faults.gates import EngineGate, RouterGate, TransportGate
from tests.faults.leftovers import worker_leftovers
from tests.support.tiny_model import SHAPE, save_model

VOCAB = 257  # of ByteTokenizer
LONGEST = 640  # tokens of prompt and answer
CHUNK = 32  # tokens of one step, so that prompts have several chunks
POLL_S = 0.001  # between looks at what happens in other threads


TINY = replace(SHAPE, vocab_size=VOCAB, max_model_len=LONGEST)
BIGGER = replace(TINY, num_layers=12, hidden_size=768, num_heads=12, num_kv_heads=4, head_dim=64)


def model_folder(parent: Path, shape: ModelConfig = TINY) -> Path:
    """A model folder whose vocabulary is that of :class:`ByteTokenizer`."""
    folder = parent / "model"
    save_model(folder, shape)
    (folder / "tokenizer.json").write_text("{}")  # only asked for; the rigs pass a tokenizer
    return folder


async def until(condition: Callable[[], Any], what: str, timeout_s: float = 20.0) -> None:
    """Wait for something that happens in another thread or on a socket."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(POLL_S)


class _Server(uvicorn.Server):
    """Without signal handlers: Ctrl-C is pytest's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def http_server(app: Any) -> AsyncIterator[int]:
    """Serve an ASGI application on a free loopback port, in this event loop."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = _Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    task = asyncio.create_task(server.serve([listener]))
    try:
        await until(lambda: server.started, "the HTTP server listens")
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task
        listener.close()


def completion_body(prompt: list[int], max_tokens: int, **options: Any) -> dict[str, Any]:
    """A completion of exactly ``max_tokens`` tokens, sampled so that it depends on every logit."""
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 1,
        "seed": 7,
        "ignore_eos": True,
        "return_token_ids": True,
        **options,
    }


class HttpClient:
    """One connection that sends one request, and may be cut at any moment."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.head = b""  # status line and headers of the answer

    @classmethod
    async def post(cls, port: int, body: dict[str, Any], headers: bytes = b"") -> "HttpClient":
        """Connect and send; the answer is read by :meth:`answer`."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        data = json.dumps(body).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Connection: close\r\n%sContent-Length: %d\r\n\r\n" % (headers, len(data)) + data
        )
        await writer.drain()
        return cls(reader, writer)

    def cut(self, reset: bool = False) -> None:
        """Only close the socket: nothing is said to the server. ``reset``: by RST, not FIN."""
        if self._writer.is_closing():
            return
        if reset:
            sock = self._writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self._writer.transport.abort() if reset else self._writer.close()

    async def answer(self) -> tuple[int, str]:
        """Status and body, read to the end of the connection."""
        try:
            raw = await self._reader.read()
        finally:
            self._writer.close()
        self.head, _, body = raw.partition(b"\r\n\r\n")
        if b"chunked" in self.head:
            body = _unchunked(body)
        return int(self.head.split()[1]), body.decode()

    def close(self) -> None:
        """The client has read everything."""
        self._writer.close()

    async def line(self) -> str:
        """The next line of the response, as it comes; empty at its end."""
        return (await self._reader.readline()).decode()


def _unchunked(body: bytes) -> bytes:
    parts = []
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        parts.append(body[:length])
        body = body[length + 2 :]
        if not length:
            break
    return b"".join(parts)


class Stream:
    """A streaming completion that is read while it runs."""

    def __init__(self, client: HttpClient) -> None:
        self.ids: list[int] = []
        self.finish = ""
        self.error: dict[str, Any] | None = None
        self.done = False  # [DONE] has come
        self.posted, self.first_token, self.ended = time.monotonic(), 0.0, 0.0
        self.longest_gap = 0.0  # seconds between two tokens
        self._last_token = 0.0
        self.client = client
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def post(cls, port: int, prompt: list[int], max_tokens: int, **options: Any) -> "Stream":
        """Send the request and begin to read."""
        body = completion_body(prompt, max_tokens, stream=True, **options)
        return cls(await HttpClient.post(port, body))

    async def until_tokens(self, count: int) -> None:
        """Until so many have come."""
        await until(lambda: len(self.ids) >= count or self._reading.done(), f"{count} tokens")
        assert len(self.ids) >= count, f"the stream ended: {self.error}"

    async def end(self, timeout_s: float = 30.0) -> None:
        """Until the connection ends; a stream must have had its terminal event by then."""
        async with asyncio.timeout(timeout_s):
            await self._reading
        assert self.done, "the stream ended without [DONE]"
        assert bool(self.finish) != bool(self.error), (self.finish, self.error)

    async def _read(self) -> None:
        while line := await self.client.line():
            if line.startswith("{"):  # an error before the first token: JSON, no event
                self.error, self.done = json.loads(line), True
            if not line.startswith("data: "):
                continue
            data = line.removeprefix("data: ").strip()
            assert not self.done, f"after [DONE]: {data}"
            if data == "[DONE]":
                self.done = True
                continue
            assert not self.error, f"after the error: {data}"
            event = json.loads(data)
            if "error" in event:
                self.error = event
                continue
            (choice,) = event["choices"]
            if choice.get("token_ids"):
                now = time.monotonic()
                self.first_token = self.first_token or now
                self.longest_gap = max(self.longest_gap, now - (self._last_token or now))
                self._last_token = now
                self.ids += choice["token_ids"]
            self.finish = choice["finish_reason"] or self.finish
        self.ended = time.monotonic()
        self.client.close()


async def complete(port: int, prompt: list[int], max_tokens: int, **options: Any) -> list[int]:
    """Token ids of a non-streaming completion of exactly ``max_tokens`` tokens."""
    body = completion_body(prompt, max_tokens, **options)
    status, text = await (await HttpClient.post(port, body)).answer()
    assert status == 200, text
    ids: list[int] = json.loads(text)["choices"][0]["token_ids"]
    assert len(ids) == max_tokens
    return ids


@dataclass
class Rig:
    """The deployment, its front door, and the gates in it."""

    graph: LocalGraph
    dispatcher: Dispatcher
    port: int
    router: RouterGate
    engines: dict[str, EngineGate] = field(default_factory=dict)
    transports: dict[str, TransportGate] = field(default_factory=dict)

    @property
    def prefill(self) -> EngineGate:
        """The only prefill worker."""
        return self.engines["prefill"]

    @property
    def decode(self) -> EngineGate:
        """The only decode worker."""
        return self.engines["decode"]

    @property
    def pulls(self) -> TransportGate:
        """The transport of the decode worker."""
        return self.transports["decode"]

    def open(self) -> None:
        """Let everything go on."""
        self.router.open()
        for gate in (*self.transports.values(), *self.engines.values()):
            gate.open()

    def steps(self) -> dict[str, int]:
        """Engine steps so far, by role."""
        return {
            role: gate.worker.engine.scheduler.stats.steps for role, gate in self.engines.items()
        }

    @property
    def injected(self) -> Faults:
        """The faults of D's transfers; only of a rig with ``pull_faults``."""
        faults = self.decode.worker._faults
        assert faults is not None
        return faults

    def leftovers(self) -> list[str]:
        """What is not idle, on any side; empty when all is."""
        left = router_leftovers(self.dispatcher)
        for role, gate in self.engines.items():
            left += [f"{role}: {text}" for text in worker_leftovers(gate.worker)]
        return left

    async def until_idle(self, timeout_s: float = 20.0) -> None:
        """Wait until nothing is left of any request, then check both engines' integrity."""
        end = time.monotonic() + timeout_s
        while left := self.leftovers():
            assert time.monotonic() < end, f"not idle after {timeout_s:g} s: {left}"
            await asyncio.sleep(POLL_S)
        await asyncio.gather(*(gate.check_integrity() for gate in self.engines.values()))

    async def complete(self, prompt: list[int], max_tokens: int, **options: Any) -> list[int]:
        """Token ids of an undisturbed, non-streaming completion."""
        return await complete(self.port, prompt, max_tokens, **options)


def router_leftovers(dispatcher: Dispatcher) -> list[str]:
    """What a router still knows of any request."""
    left = []
    if dispatcher.num_jobs or len(dispatcher.queue):
        left.append(f"router: {dispatcher.num_jobs} jobs")
    for record in dispatcher.table.workers.values():
        if record.calls or record.leases.ids:
            left.append(
                f"router's record of {record.card.worker_id}: {len(record.calls)} calls,"
                f" {len(record.leases.ids)} leases"
            )
    return left


@contextlib.asynccontextmanager
async def rig(
    folder: Path, transport: str, pull_faults: str = "", **flags: Any
) -> AsyncIterator[Rig]:
    """One prefill and one decode worker, gated, and ready.

    ``pull_faults`` begin once the pair is proven: a few unlucky proofs in a row, each later than
    the one before, would be all that a test sees.
    """
    plan = parse_faults(pull_faults)
    settings = {
        "model": str(folder),
        "transport": transport,
        "token_budget": CHUNK,
        "kv_blocks": 200,
        "lease_s": 30.0,
        "threads": 1,
        "pull_faults": f"seed={plan.seed}" if plan else "",
        **flags,
    }
    with TransportGate.installed() as opened, RouterGate.installed() as router:
        async with local_graph(load(None, settings)) as graph:
            app = create_api(graph.settings, graph.discover, ByteTokenizer())
            async with http_server(app) as port:
                deployed = Rig(graph, app.state.front.dispatcher, port, router)
                for worker, gate in zip(graph.workers, opened, strict=True):
                    deployed.engines[worker.settings.role] = EngineGate(worker)
                    deployed.transports[worker.settings.role] = gate
                await until(lambda: deployed.dispatcher.ready, "the pair is ready")
                await deployed.until_idle()
                if plan:
                    deployed.injected.plan = plan
                try:
                    yield deployed
                finally:
                    deployed.open()
