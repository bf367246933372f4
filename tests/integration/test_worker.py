"""One worker with a tiny model behind its real endpoint: what happens when its engine fails, hangs
or waits, and how it leaves.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.hashing import pack_ids
from router import wire
from router.connection import Link
from router.errors import LinkError
from router.link import connect_worker
from services.engine.config import EngineConfig
from services.engine.scheduler import Plan
from services.engine.weights import read_weights
from services.settings import WorkerSettings
from services.worker import Worker
from tests.support.scrape import Page, scrape
from tests.support.tiny_model import save_model

SECRET = b"s" * 32
WAIT_S = 10.0


class Router:
    """The other end of a link."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[wire.Message] = asyncio.Queue()
        self.states: list[str] = []  # of its loads
        self.closed = asyncio.Event()

    async def next(self, *kinds: type) -> wire.Message:
        """The next message of these kinds."""
        async with asyncio.timeout(WAIT_S):
            while not isinstance(message := await self.messages.get(), kinds):
                pass
        return message

    def receive(self, link: Link, message: wire.Message) -> None:
        self.messages.put_nowait(message)
        if isinstance(message, wire.Load):
            self.states.append(message.state)

    async def connect(self, worker: Worker, name: str = "r") -> Link:
        assert worker.card is not None
        return await connect_worker(
            "127.0.0.1",
            worker.card.port,
            "w-1",
            worker.epoch,
            name,
            1,
            SECRET,
            (),
            self.receive,
            lambda link: self.closed.set(),
        )


ENGINE = EngineConfig(33, max_model_len=64, token_budget=64, chunk_budget=64, threads=1)
ENGINE = replace(ENGINE, dtype="float32", device="cpu")


@asynccontextmanager
async def running(
    folder: Path, engine: EngineConfig = ENGINE, **changes: Any
) -> AsyncIterator[tuple[Worker, Router, Link]]:
    save_model(folder)
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
    worker, router = Worker(replace(settings, **changes)), Router()
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
    async with running(folder, replace(ENGINE, kv_blocks=5)) as (worker, router, link):
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


class Gate:
    """Holds the engine's steps until it is opened."""

    def __init__(self, worker: Worker) -> None:
        self.entered, self._open = threading.Event(), threading.Event()
        self._run = worker.engine.runner.run
        worker.engine.runner.run = self._held  # type: ignore[method-assign]

    def _held(self, plan: Plan) -> list[int]:
        self.entered.set()
        self._open.wait()
        return self._run(plan)

    def open(self) -> None:
        self._open.set()


async def leaves(folder: Path) -> None:
    engine = replace(ENGINE, token_budget=16, chunk_budget=16)  # a prompt takes three steps
    async with running(folder, engine) as (worker, router, link):
        gate, control, told = Gate(worker), Router(), asyncio.Queue[float]()
        leave = worker.leave
        worker.leave = lambda in_s: (leave(in_s), told.put_nowait(in_s))  # type: ignore
        link.send(prefill(b"a"))
        await asyncio.to_thread(gate.entered.wait, WAIT_S)
        control_link = await control.connect(worker, "drain-1")
        control_link.send(wire.Drain(60_000))
        control_link.send(wire.Drain(0))  # the earlier deadline holds
        link.send(prefill(b"b"))
        async with asyncio.timeout(WAIT_S):
            assert [await told.get(), await told.get()] == [60, 0]
        gate.open()
        ends = [await router.next(wire.Failed, wire.Refused) for _ in range(2)]
        (failed,) = [m for m in ends if isinstance(m, wire.Failed)]
        assert (failed.request, failed.kind) == (b"a", "draining")
        (refused,) = [m for m in ends if isinstance(m, wire.Refused)]
        assert (refused.request, refused.retry) == (b"b", True)
        for side in (router, control):
            async with asyncio.timeout(WAIT_S):
                await side.closed.wait()
            assert side.states[-1] == "left"
        assert worker.load().state == "left"
        assert not worker.alive
        assert not worker.failure, "leaving is no failure"
        with pytest.raises(LinkError):
            await control.connect(worker)


async def hangs(folder: Path) -> None:
    async with running(folder, stall_s=1.0) as (worker, router, link):
        gate = Gate(worker)
        link.send(prefill(b"a"))
        async with asyncio.timeout(WAIT_S):
            await router.closed.wait()
        assert worker.failure.startswith("the engine has not moved for")
        assert router.states[-1] == "dead"
        assert not await worker.drain(0), "nobody was there to hand anything back"
        gate.open()


async def puller_hangs(folder: Path) -> None:
    async with running(folder, stall_s=1.0) as (worker, router, _):
        go_on = threading.Event()
        worker._puller._commands.put(lambda: go_on.wait() and None)
        async with asyncio.timeout(WAIT_S):
            await router.closed.wait()
        assert worker.failure.startswith("the KV puller has not moved for")
        go_on.set()


async def says_what_it_is(folder: Path) -> None:
    engine = replace(ENGINE, token_budget=0, chunk_budget=0, max_num_seqs=8)
    changes: dict[str, Any] = {"role": "decode", "local_prefill": True}
    async with running(folder, engine, **changes) as (worker, _, _):
        assert worker.card is not None
        assert worker.card.local_prefill
        config = worker.engine.config
        assert worker.card.token_budget == config.token_budget
        assert config.token_budget in range(64, 2049, config.block_size)
        assert config.chunk_budget == config.token_budget // 4
        assert worker.card.weights_bytes >= sum(
            tensor.nbytes for tensor in read_weights(folder).values()
        )
    changes = {"role": "mixed", "local_prefill": True, "transport": "nixl"}
    async with running(folder, **changes) as (worker, _, _):
        assert worker.card is not None
        assert not worker.card.local_prefill
        assert worker.load().transport == "memory", "a mixed worker opened a network for its KV"


async def replaces_its_transport(folder: Path) -> None:
    async with running(folder, transport="tcp") as (worker, router, link):
        assert worker.card is not None
        before = worker.card
        worker._puller._commands.put(worker._puller._importer._rebuild)
        async with asyncio.timeout(WAIT_S):
            while (load := await router.next(wire.Load)) and not load.agent_rebuilds:  # type: ignore[attr-defined]
                pass
        (old,), (new,) = before.agents, worker.card.agents
        assert (new.worker_id, new.epoch, new.transport) == (old.worker_id, old.epoch, "tcp")
        assert new.metadata != old.metadata
        assert replace(worker.card, agents=(old,)) == before
        link.send(prefill(b"a"))
        first = await router.next(wire.Prefilled)
        assert isinstance(first, wire.Prefilled)
        link.send(wire.Release(first.ticket_id))


async def counts_what_it_does(folder: Path) -> None:
    async with running(folder, metrics_host="0.0.0.0") as (worker, router, link):
        assert worker.card is not None
        host, port = "127.0.0.2", worker.card.metrics_port
        assert (worker.card.host, worker.card.metrics_host) == ("127.0.0.1", "0.0.0.0")
        with pytest.raises(ConnectionRefusedError):  # there are its metrics and nothing else
            socket.create_connection((host, worker.card.port))

        async def page(when: Callable[[Page], bool] = lambda page: True) -> Page:
            async with asyncio.timeout(WAIT_S):
                while not when(now := await asyncio.to_thread(scrape, host, port)):
                    pass
            return now

        idle = await page()
        assert idle.value("baton_roofline_peak_flops") > 0
        assert idle.value("baton_roofline_peak_bytes_per_second") > 0
        assert idle.value("baton_model_flops_utilization_ratio") == 0
        assert idle.value("baton_engine_busy_seconds_total") == 0, "what was timed at start counts"
        assert idle.value("baton_kv_cache_usage_ratio") == 0
        link.send(prefill(b"a"))
        first = await router.next(wire.Prefilled)
        assert isinstance(first, wire.Prefilled)
        names = {"model": "tiny", "role": "prefill", "replica": "w-1"}
        now = await page(lambda page: page.value("baton_engine_step_seconds_count", **names) == 1)
        assert now.values("baton_engine_tokens_total", "kind") == {"prompt": 40, "generated": 1}
        assert now.values("baton_kv_transfer_in_flight", "side") == {"send": 1}
        cost = worker.engine.runner.model.step_costs(4).of(worker.engine.plan.rows)  # type: ignore
        assert now.value("baton_engine_flops_total") == cost.flops
        assert now.value("baton_engine_bytes_total") == cost.num_bytes
        busy = now.value("baton_engine_busy_seconds_total")
        share = cost.flops / busy / now.value("baton_roofline_peak_flops")
        assert now.value("baton_model_flops_utilization_ratio") == pytest.approx(share)
        assert now.value("baton_arithmetic_intensity") == pytest.approx(cost.flops / cost.num_bytes)
        link.send(wire.Release(first.ticket_id))
        now = await page(lambda page: page.value("baton_kv_cache_usage_ratio") == 0)
        assert now.value("baton_kv_leases") == 0
        load = worker.load()
        assert load.flops == cost.flops
        assert load.peak_flops == now.value("baton_roofline_peak_flops")
        await page(lambda page: page.value("baton_event_loop_lag_seconds_count") > 0)
        waited = now.value("baton_engine_idle_seconds_total")
        await page(lambda page: page.value("baton_engine_idle_seconds_total") > waited)


async def priorities(folder: Path) -> dict[str, int]:
    found = {}
    for role in ("prefill", "decode", "mixed"):
        async with running(folder, role=role) as (worker, *_):
            assert worker._loop._thread.native_id is not None
            found[role] = os.getpriority(os.PRIO_PROCESS, worker._loop._thread.native_id)
    return found


def test_on_shared_cores_decoding_goes_before_prefill(tmp_path: Path) -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    found = asyncio.run(priorities(tmp_path))
    assert found["decode"] == found["mixed"] == before
    assert found["prefill"] == min(19, before + 5)
    assert found["prefill"] > before or before == 19
    assert os.getpriority(os.PRIO_PROCESS, 0) == before, "its engine's thread only"


def test_a_failed_engine_fails_its_requests_and_closes_its_links(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="services.engine_loop")
    asyncio.run(fails(tmp_path))


def test_an_engine_that_waits_for_a_lease_does_not_look_hung(tmp_path: Path) -> None:
    asyncio.run(waits_for_a_lease(tmp_path))


def test_a_worker_that_is_told_to_drain_hands_back_and_leaves(tmp_path: Path) -> None:
    asyncio.run(leaves(tmp_path))


def test_an_engine_that_hangs_is_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="services.worker")
    asyncio.run(hangs(tmp_path))


def test_a_puller_that_hangs_is_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="services.worker")
    asyncio.run(puller_hangs(tmp_path))


def test_the_card_says_what_was_measured_and_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for how in ("measured in", "measured earlier"):
        caplog.clear()
        asyncio.run(says_what_it_is(tmp_path / "model"))
        assert how in caplog.text
        assert "MiB of weights" in caplog.text


def test_a_scrape_says_what_a_worker_did(tmp_path: Path) -> None:
    asyncio.run(counts_what_it_does(tmp_path))


def test_a_replaced_transport_is_in_the_card_and_in_the_load(tmp_path: Path) -> None:
    asyncio.run(replaces_its_transport(tmp_path))
