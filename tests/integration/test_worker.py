"""One worker with a tiny model behind its real endpoint: what happens when its engine fails or
waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvtransfer.hashing import pack_ids
from router import wire
from router.connection import Link
from router.link import connect_worker
from services.engine.config import EngineConfig
from services.engine.scheduler import Plan
from services.settings import WorkerSettings
from services.worker import Worker
from tests.support.tiny_model import save_model

SECRET = b"s" * 32
WAIT_S = 10.0


class Router:
    """The other end of a link."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[wire.Message] = asyncio.Queue()
        self.closed = asyncio.Event()

    async def next(self, *kinds: type) -> wire.Message:
        """The next message of these kinds."""
        async with asyncio.timeout(WAIT_S):
            while not isinstance(message := await self.messages.get(), kinds):
                pass
        return message

    async def connect(self, worker: Worker) -> Link:
        assert worker.card is not None
        return await connect_worker(
            "127.0.0.1",
            worker.card.port,
            "w-1",
            worker.epoch,
            "r",
            1,
            SECRET,
            (),
            lambda link, message: self.messages.put_nowait(message),
            lambda link: self.closed.set(),
        )


@asynccontextmanager
async def running(folder: Path, kv_blocks: int = 33) -> AsyncIterator[tuple[Worker, Router, Link]]:
    save_model(folder)
    engine = EngineConfig(
        kv_blocks, max_model_len=64, token_budget=64, threads=1, dtype="float32", device="cpu"
    )
    settings = WorkerSettings(
        worker_id="w-1",
        role="prefill",
        model_dir=str(folder),
        served_model="tiny",
        weights="digest",
        host="127.0.0.1",
        transport="memory",
        secret=SECRET,
        lease_s=30.0,
        net_devices="lo",
        checksums=False,
        engine=engine,
    )
    worker, router = Worker(settings), Router()
    await worker.start()
    try:
        link = await router.connect(worker)
        yield worker, router, link
        link.close("the test is over")
        await link.wait_closed()
    finally:
        await worker.close()


def prefill(request: bytes, token: int = 7) -> wire.Prefill:
    ids = pack_ids([token] * 40)
    return wire.Prefill(request, 0, ids, 40, wire.Sampling(max_tokens=5, temperature=0.0))


async def fails(folder: Path) -> None:
    async with running(folder) as (worker, router, link):

        def broken(plan: Plan) -> list[int]:
            late = prefill(b"late")  # comes when nobody applies commands any more
            worker._asyncio.call_soon_threadsafe(link.send, late)
            raise RuntimeError("out of memory")

        worker.engine.runner.run = broken  # type: ignore[method-assign]
        link.send(prefill(b"a"))
        failed = await router.next(wire.Failed)
        assert isinstance(failed, wire.Failed)
        assert (failed.request, failed.kind) == (b"a", "internal")
        assert "out of memory" in failed.message
        async with asyncio.timeout(WAIT_S):
            await router.closed.wait()
        assert not worker.alive
        assert worker.load().state == "dead"


async def waits_for_a_lease(folder: Path) -> None:
    async with running(folder, kv_blocks=5) as (worker, router, link):
        link.send(prefill(b"a"))
        first = await router.next(wire.Prefilled)
        assert isinstance(first, wire.Prefilled)
        link.send(prefill(b"b", token=8))
        while True:
            load = await router.next(wire.Load)
            assert isinstance(load, wire.Load)
            if load.waiting:
                break
        assert worker.engine.stalled
        assert worker._progress() == (1, False), "waiting for room was taken for a hang"
        link.send(wire.Release(first.ticket_id))
        second = await router.next(wire.Prefilled)
        assert isinstance(second, wire.Prefilled)
        assert second.cached_tokens == 0
        link.send(wire.Release(second.ticket_id))
        assert await worker.drain(WAIT_S)


def test_a_failed_engine_fails_its_requests_and_closes_its_links(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="services.engine_loop")
    asyncio.run(fails(tmp_path))


def test_an_engine_that_waits_for_a_lease_does_not_look_hung(tmp_path: Path) -> None:
    asyncio.run(waits_for_a_lease(tmp_path))
