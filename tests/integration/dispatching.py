"""A dispatcher over scripted workers, for tests of what becomes of requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from router import wire
from router.config import RouterConfig, RouterSettings
from router.dispatch import Chunk, Dispatcher, GenRequest
from tests.integration.fake_worker import EOS, MODEL, SECRET, FakeWorker

PROMPT = tuple(b"hello, who are you?")


def request(max_tokens: int | None = 5, **sampling: object) -> GenRequest:
    fields: dict[str, object] = {"max_tokens": 0, "stop_ids": (EOS,), "seed": 7}
    return GenRequest(PROMPT, wire.Sampling(**(fields | sampling)), max_tokens)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def serving(
    *workers: FakeWorker,
    ready: bool = True,
    replicas: tuple[tuple[str, int], ...] = (),
    wakes: bool = False,
    **config: object,
) -> AsyncIterator[Dispatcher]:
    for worker in workers:
        await worker.start()

    async def discover() -> list[wire.WorkerCard]:
        return [worker.card for worker in workers if worker.registered]

    router_config = RouterConfig(**config)  # type: ignore[arg-type]
    settings = RouterSettings(router_config, "", MODEL, "R", SECRET, replicas, wakes=wakes)
    dispatcher = Dispatcher(settings, discover)
    await dispatcher.start()
    try:
        if ready:
            await all_proven(dispatcher)
        yield dispatcher
    finally:
        await dispatcher.close()
        for worker in workers:
            await worker.stop()
        assert dispatcher.num_jobs == 0


async def all_proven(dispatcher: Dispatcher) -> None:
    async with asyncio.timeout(10):
        while not (
            dispatcher.table.workers
            and set(dispatcher.table.possible_pairs()) == dispatcher.prover.proven
            and dispatcher.ready
            and all(worker.usable for worker in dispatcher.table.workers.values())
        ):
            await asyncio.sleep(0.01)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(30):
            await scenario()

    asyncio.run(main())


async def collect(dispatcher: Dispatcher, what: GenRequest) -> list[Chunk]:
    return [chunk async for chunk in dispatcher.generate(what)]


def text(chunks: list[Chunk]) -> str:
    return bytes(i for chunk in chunks for i in chunk.ids if i < 256).decode()
