"""The HTTP API over uvicorn and real sockets, with scripted workers behind it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx2
import uvicorn

from router import wire
from router.api import Front, create_api
from router.config import RouterConfig, RouterSettings
from router.dispatch import Dispatcher
from router.scraping import Target
from router.tokenizer import ByteTokenizer
from tests.integration.fake_worker import MODEL, SECRET, Answer, FakeWorker


@dataclass
class Deployment:
    """Scripted workers, and the router's URL."""

    workers: list[FakeWorker]
    dispatcher: Dispatcher
    url: str
    http: httpx2.AsyncClient
    front: Front

    @property
    def p(self) -> FakeWorker:
        """The first of the workers; a prefill worker unless the test says otherwise."""
        return self.workers[0]

    @property
    def d(self) -> FakeWorker:
        """The last of the workers."""
        return self.workers[-1]

    def wake(self) -> None:
        """Workers have started."""
        for worker in self.workers:
            worker.registered = True

    async def post(self, path: str, body: object, **kwargs: Any) -> httpx2.Response:
        return await self.http.post(path, json=body, **kwargs)

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The data of a stream's events, ``[DONE]`` included; checks the framing."""
        response = await self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-accel-buffering"] == "no"
        assert response.headers["cache-control"] == "no-cache"
        assert response.text.endswith("data: [DONE]\n\n")
        events = response.text.removesuffix("\n\n").split("\n\n")
        assert all(event.startswith("data: ") for event in events)
        return [json.loads(e[6:]) if e != "data: [DONE]" else "[DONE]" for e in events]

    async def idle(self) -> None:
        for worker in self.workers:
            await worker.until(lambda worker=worker: worker.idle)
        assert self.dispatcher.num_jobs == 0


@contextlib.asynccontextmanager
async def deployed(
    text: str = "0123456789",
    roles: str = "PD",
    max_num_seqs: int = 8,
    tracing_endpoint: str = "",
    wakes: bool = False,
    make: Callable[..., FakeWorker] = FakeWorker,
    **config: Any,
) -> AsyncIterator[Deployment]:
    """One worker for each letter of ``roles``: P, D or M. With ``wakes`` pools may be at zero, and
    are, until :meth:`Deployment.wake`.
    """
    names = {"P": "prefill", "D": "decode", "M": "mixed"}
    workers = []
    for index, letter in enumerate(roles):
        name = f"{letter}{roles[:index].count(letter)}"
        worker = make(names[letter], name, Answer(text), max_num_seqs=max_num_seqs)
        worker.registered = not wakes
        workers.append(await worker.start())

    async def discover() -> list[wire.WorkerCard]:
        return [worker.card for worker in workers if worker.registered]

    settings = RouterSettings(
        RouterConfig(**{"comeback_s": 0.1, **config}),
        "",
        MODEL,
        "R",
        SECRET,
        tracing_endpoint=tracing_endpoint,
        wakes=wakes,
    )

    async def targets() -> list[Target]:
        target = app.state.front.target
        return [] if target is None else [target]

    app = create_api(settings, discover, ByteTokenizer(), targets)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on"))
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        url = f"http://127.0.0.1:{port}"
        try:
            async with httpx2.AsyncClient(base_url=url, timeout=20) as http:
                async with asyncio.timeout(10):
                    while True:
                        with contextlib.suppress(httpx2.TransportError):
                            known = "/health" if wakes else "/ready"
                            if (await http.get(known)).status_code == 200:
                                break
                        await asyncio.sleep(0.01)
                front: Front = app.state.front
                yield Deployment(workers, front.dispatcher, url, http, front)
        finally:
            server.should_exit = True
            await serving
            for worker in workers:
                await worker.stop()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(main())
