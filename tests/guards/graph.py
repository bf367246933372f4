"""The real router and real workers, in one process, with a tiny model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from router import wire
from router.config import RouterConfig, RouterSettings
from router.dispatch import Dispatcher
from router.errors import RequestError
from router.job import GenRequest
from services.engine.config import EngineConfig
from services.settings import WorkerSettings
from services.worker import Worker
from tests.support.tiny_model import save_model

SECRET = b"s" * 32
PROMPT = tuple(range(40, 70))
MAX_TOKENS = 24


def request() -> GenRequest:
    sampling = wire.Sampling(max_tokens=MAX_TOKENS, temperature=1.0, seed=11)
    return GenRequest(PROMPT, sampling, MAX_TOKENS)


async def worker(role: str, number: int, folder: Path, weights_dtype: str = "auto") -> Worker:
    engine = EngineConfig(
        kv_blocks=17,
        max_model_len=128,
        token_budget=64,
        threads=1,
        dtype="float32",
        weights_dtype=weights_dtype,
        device="cpu",
    )
    started = Worker(
        WorkerSettings(
            worker_id=f"{role}-{number}",
            role=role,
            model_dir=str(folder),
            served_model="tiny",
            weights="digest",
            host="127.0.0.1",
            transport="memory",
            secret=SECRET,
            lease_s=30.0,
            net_devices="lo",
            engine=engine,
        )
    )
    await started.start()
    return started


@asynccontextmanager
async def graph(folder: Path) -> AsyncIterator[tuple[Dispatcher, list[Worker]]]:
    """One prefill worker, two decode workers (the second in the pair), and a router."""
    save_model(folder)
    async with running(folder, ["prefill", "decode", "decode"]) as (dispatcher, workers):
        yield dispatcher, workers


@asynccontextmanager
async def running(
    folder: Path, roles: list[str], weights_dtype: str = "auto"
) -> AsyncIterator[tuple[Dispatcher, list[Worker]]]:
    """Workers of a model in a folder, and a router that has proven each pair of them."""
    workers = [await worker(role, i, folder, weights_dtype) for i, role in enumerate(roles)]

    async def discover() -> list[wire.WorkerCard]:
        return [w.card for w in workers if w.card is not None]

    settings = RouterSettings(RouterConfig(), str(folder), "tiny", "R", SECRET)
    dispatcher = Dispatcher(settings, discover)
    await dispatcher.start()
    num_pairs = roles.count("mixed") + roles.count("prefill") * roles.count("decode")
    try:
        async with asyncio.timeout(20):
            while len(dispatcher.prover.proven) < num_pairs:
                await asyncio.sleep(0.01)
        yield dispatcher, workers
    finally:
        await dispatcher.close()
        for w in workers:
            await w.close()


async def stream(dispatcher: Dispatcher) -> tuple[list[int], str]:
    """What a client gets: tokens, and the error that ends them if there is one."""
    tokens: list[int] = []
    try:
        async for chunk in dispatcher.generate(request()):
            tokens += chunk.ids
    except RequestError as error:
        return tokens, str(error)
    return tokens, ""
