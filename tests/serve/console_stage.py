"""What the console is shown in front of: workers that go on, a router that may be restarted, load.

Scripted workers compute nothing, take their time, and report what they would have computed; with
real ones it is the graph of ``baton local``. All of it runs in a thread of the test's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, TypeVar

import httpx2
import uvicorn

from router import wire
from router.api import create_api
from router.config import RouterConfig, RouterSettings
from router.link import Link
from router.observe import App
from router.sse import Message, Receive, Send
from router.tokenizer import ByteTokenizer
from services.config import load
from services.local import local_graph
from tests.integration.fake_worker import MODEL, SECRET, Answer
from tests.integration.paced_worker import Pace, PacedWorker
from tests.support.serving import free_port

Api = Callable[..., Any]
"""(**fields of RouterConfig): a new router's ASGI application."""
Result = TypeVar("Result")

REPORT_S = 0.25
PARAMETERS = 135e6  # of the model that scripted workers pretend to run
PEAKS = {"peak_flops": 9e10, "peak_bytes": 1.9e10}
TEXT = "A baton is passed from hand to hand, and whoever holds it runs. " * 20
PROMPT_S = 0.0012  # for each byte of a prompt


class Busy(PacedWorker):
    """One prompt after the other, and reports of what was done."""

    def __init__(self, role: str, name: str, answer: Answer | None, pace: Pace) -> None:
        super().__init__(role, name, answer, pace, kv_blocks=512, max_model_len=4096)
        self._turn = asyncio.Lock()
        self._tokens_held: dict[tuple[bytes, int], int] = {}
        self._reporting: asyncio.Task[None] | None = None

    async def start(self, port: int = 0) -> Busy:
        """As any worker; and reports."""
        await super().start(port)
        self._reporting = asyncio.create_task(self._report_often())
        return self

    async def stop(self) -> None:
        """As any worker."""
        assert self._reporting is not None
        self._reporting.cancel()
        await super().stop()

    async def _prompt_times(self, message: wire.Prefill | wire.Decode) -> tuple[float, float]:
        clock = asyncio.get_running_loop().time
        arrived = clock()
        async with self._turn:
            began = clock()
            await asyncio.sleep(PROMPT_S * message.num_prompt)
        took = clock() - began
        self._computed(message.num_prompt, took, share=0.55)
        self.load = replace(
            self.load,
            computed_prompt_tokens=self.load.computed_prompt_tokens + message.num_prompt,
        )
        return (began - arrived) * 1000, took * 1000

    async def _tokens(
        self, link: Link, message: wire.Prefill | wire.Decode, fate: str, times: list[float]
    ) -> None:
        name = (message.request, message.attempt)
        self._tokens_held[name] = message.num_prompt
        try:
            await super()._tokens(link, message, fate, times)  # type: ignore[arg-type]
        finally:
            del self._tokens_held[name]

    def _computed(self, tokens: int, seconds: float, share: float) -> None:
        """``share`` of the peak of memory or compute, whichever binds so many tokens at once."""
        work = 2 * PARAMETERS * tokens
        moved = max(work / (PEAKS["peak_flops"] / PEAKS["peak_bytes"] * 8), 4 * PARAMETERS)
        best = max(work / PEAKS["peak_flops"], moved / PEAKS["peak_bytes"])
        scale = share * seconds / best
        self.load = replace(
            self.load,
            flops=self.load.flops + work * scale,
            bytes=self.load.bytes + moved * scale,
            busy_s=self.load.busy_s + seconds,
            **PEAKS,
        )

    async def _report_often(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            made = len(self._tokens_held)
            if made:
                self._computed(made, REPORT_S * 0.9, share=0.6)
            active = sum(-(-held // 16) + 2 for held in self._tokens_held.values())
            leased = 6 * len(self.tickets)
            cached = min(120, self.load.computed_prompt_tokens // 40)
            self.report(
                running=made if self.card.role == "decode" else int(self._turn.locked()),
                waiting=max(0, len(self.open) - 1) if self.card.role == "prefill" else 0,
                generated_tokens=self.load.generated_tokens + made * 9,
                pulled_bytes=self.load.pulled_bytes + made * 400_000,
                tickets=len(self.tickets),
                blocks={
                    "free": max(0, 511 - active - leased - cached),
                    "active": active,
                    "cached": cached,
                    "leased": leased,
                    "quarantined": 0,
                },
            )


class InFront:
    """Adds an id of its own to each answer, as Ray Serve's proxy and others do."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """As ASGI middleware."""

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", b"of-the-proxy")]
            await send(message)

        await self._app(scope, receive, sending)


@contextlib.asynccontextmanager
async def scripted(prefill: int = 2, decode: int = 2) -> AsyncIterator[Api]:
    """Workers of which each answers ``TEXT``, a byte a token."""
    pace = Pace(pull_s=0.03, admit_s=0.004, step_s=0.028)
    names = [("prefill", f"prefill-{0x3F1A + 7 * i:04x}") for i in range(prefill)]
    names += [("decode", f"decode-{0x9C02 + 5 * i:04x}") for i in range(decode)]
    workers = [await Busy(role, name, Answer(TEXT), pace).start() for role, name in names]

    async def discover() -> list[wire.WorkerCard]:
        return [worker.card for worker in workers]

    def api(**config: Any) -> Any:
        fields: dict[str, Any] = {"slo_ttft_s": 0.5, "slo_tpot_s": 0.05, **config}
        settings = RouterSettings(RouterConfig(**fields), "", MODEL, "router-1", SECRET)
        app = create_api(settings, discover, ByteTokenizer())
        app.add_middleware(InFront)
        return app

    try:
        yield api
    finally:
        for worker in workers:
            await worker.stop()


@contextlib.asynccontextmanager
async def real(prefill: int = 1, decode: int = 1) -> AsyncIterator[Api]:
    """The default model in real engines."""
    config = load(None, {"prefill": prefill, "decode": decode, "threads": 1})
    async with local_graph(config) as graph:

        def api(**fields: Any) -> Any:
            settings = replace(graph.settings, config=replace(graph.settings.config, **fields))
            return create_api(settings, graph.discover)

        yield api


class Stage:
    """Router and load, from the test's thread. ``url`` stays the same over restarts."""

    def __init__(self, workers: Callable[[], AbstractAsyncContextManager[Api]]) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self._workers = workers
        self._loop = asyncio.new_event_loop()
        self._stack = contextlib.AsyncExitStack()
        self._thread = threading.Thread(target=self._loop.run_forever, name="stage")
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._load: asyncio.Task[None] | None = None

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """In the stage's loop; the result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(120)

    def open(self) -> None:
        """Start workers and router."""
        self._thread.start()
        self._api = self.run(self._stack.enter_async_context(self._workers()))
        self.start_router()

    def close(self) -> None:
        """Stop everything."""
        if self._load is not None:
            self.end_load()
        if self._server is not None:
            self.stop_router()
        self.run(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def start_router(self, **config: Any) -> None:
        """A new one; returns when it is ready."""
        self.run(self._start_router(self._api(**config)))

    async def _start_router(self, app: Any) -> None:
        port = int(self.url.rsplit(":", 1)[1])
        config = uvicorn.Config(
            app, "127.0.0.1", port, log_level="critical", timeout_graceful_shutdown=1
        )
        self._server, self._app = uvicorn.Server(config), app
        self._serving = asyncio.create_task(self._server.serve())
        async with asyncio.timeout(60), httpx2.AsyncClient(base_url=self.url) as http:
            while True:
                with contextlib.suppress(httpx2.TransportError):
                    if (await http.get("/ready")).status_code == 200:
                        return
                await asyncio.sleep(0.02)

    def stop_router(self) -> None:
        """As a deployment that goes down; its port is free afterwards."""

        async def stop() -> None:
            assert self._server is not None
            assert self._serving is not None
            self._server.should_exit = True
            self._app.state.front.console.close()
            await self._serving
            self._server = None

        self.run(stop())

    @contextlib.contextmanager
    def listeners(self, count: int) -> Iterator[None]:
        """So many more consoles are open until the block ends."""
        stack = contextlib.AsyncExitStack()

        async def listen() -> None:
            http = await stack.enter_async_context(httpx2.AsyncClient(base_url=self.url))
            while count > len(heard):
                opened = http.stream("GET", "/internal/events")
                response = await opened.__aenter__()
                if response.status_code == 200:
                    stack.push_async_exit(opened)
                    heard.append(response)
                else:  # one that was closed has not left yet
                    await opened.__aexit__(None, None, None)
                    await asyncio.sleep(0.02)

        heard: list[httpx2.Response] = []
        self.run(listen())
        try:
            yield
        finally:
            self.run(stack.aclose())

    # --- load ------------------------------------------------------------------------------------

    def ask(self, count: int) -> None:
        """So many short completions, until they have ended."""

        async def ask() -> None:
            async with httpx2.AsyncClient(base_url=self.url, timeout=60) as http:
                for number in range(count):
                    body = {"prompt": f"please {number}", "max_tokens": 3}
                    (await http.post("/v1/completions", json=body)).raise_for_status()

        self.run(ask())

    def begin_load(self, rate: float, words: tuple[int, int], tokens: tuple[int, int]) -> None:
        """Completions at ``rate`` a second, by chance, with prompts and answers of such lengths."""

        async def begin() -> None:
            self._load = asyncio.create_task(self._ask(rate, words, tokens))

        self.run(begin())

    def end_load(self) -> None:
        """Cut what still runs."""

        async def end() -> None:
            assert self._load is not None
            self._load.cancel()
            await asyncio.gather(self._load, return_exceptions=True)
            self._load = None

        self.run(end())

    async def _ask(self, rate: float, words: tuple[int, int], tokens: tuple[int, int]) -> None:
        chance = random.Random(5)
        async with (
            httpx2.AsyncClient(base_url=self.url, timeout=60) as http,
            asyncio.TaskGroup() as group,
        ):
            while True:
                group.create_task(self._one(http, chance, words, tokens))
                await asyncio.sleep(chance.expovariate(rate))

    async def _one(
        self,
        http: httpx2.AsyncClient,
        chance: random.Random,
        words: tuple[int, int],
        tokens: tuple[int, int],
    ) -> None:
        kind = chance.random()
        fate = "lose-prefill" if kind < 0.03 else "lose-decode" if kind < 0.06 else "please"
        prompt = f"{fate} {chance.random()} " + "tell " * chance.randint(*words)
        body = {
            "prompt": prompt,
            "max_tokens": chance.randint(*tokens),
            "ignore_eos": True,
            "stream": True,
        }
        patience = 0.7 if 0.06 <= kind < 0.1 else 60
        with contextlib.suppress(httpx2.TransportError, TimeoutError):  # the router may be down
            async with (
                asyncio.timeout(patience),
                http.stream("POST", "/v1/completions", json=body) as response,
            ):
                async for _ in response.aiter_raw():
                    pass


@contextlib.contextmanager
def stage(workers: Callable[[], AbstractAsyncContextManager[Api]]) -> Iterator[Stage]:
    """Open until the block ends."""
    opened = Stage(workers)
    opened.open()
    try:
        yield opened
    finally:
        opened.close()
