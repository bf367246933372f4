"""The registry on a real Ray: reports, subscriptions, expiry, and its own death."""

import asyncio
import os
import signal
import time
from dataclasses import replace
from typing import Any

import pytest
import ray

from router import wire
from router.pools import Pools
from router.scraping import Target
from services.registry import LENGTH_BYTES, RegistryActor, RegistryClient

pytestmark = pytest.mark.usefixtures("local_ray")


def card(worker_id: str = "prefill-1", epoch: int = 1) -> wire.WorkerCard:
    return wire.WorkerCard(
        worker_id=worker_id, epoch=epoch, role="prefill", model="m", host="127.0.0.1", port=1,
        pid=2, layout={}, agents=(), kv_blocks=8, block_size=16, max_model_len=64, max_num_seqs=4,
        token_budget=32,
    )  # fmt: skip


def load(state: str = "ready") -> wire.Load:
    return wire.Load(
        state=state, transport="tcp", running=0, waiting=0, tickets=0, waiting_tokens=0, blocks={},
        steps=0, computed_prompt_tokens=0, cached_prompt_tokens=0, generated_tokens=0,
        pulled_bytes=0, pulled_blocks=0, preemptions=0, failed_pulls=0, expired_leases=0,
    )  # fmt: skip


def plan(**targets: int) -> dict[str, Any]:
    """What who scales the pools says."""
    return {"targets": targets, "reasons": {}, "words": {}, "decisions": {}}


def frames(worker: wire.WorkerCard) -> tuple[bytes, bytes]:
    return wire.encode(wire.Welcome(worker)), wire.encode(load())


@pytest.fixture
def client(request: pytest.FixtureRequest) -> Any:
    """A client of a registry of this test's own."""
    client = RegistryClient(request.node.name)
    yield client
    ray.kill(client.actor())


def test_reports_come_back_whole(client: RegistryClient) -> None:
    async def scenario() -> None:
        assert await client.discover() == []
        assert await client.heartbeat(card(), load("draining"))
        assert await client.discover() == [card()]
        assert await client.reports() == [(card(), load("draining"))]
        assert await client.leave("prefill-1")
        assert await client.discover() == []

    asyncio.run(scenario())


def test_a_reader_is_told_at_once(client: RegistryClient) -> None:
    async def scenario() -> None:
        reader = RegistryClient(client._name)
        await reader.discover()
        news = asyncio.create_task(reader.discover(patience_s=30))
        await client.heartbeat(card(), load())
        assert await asyncio.wait_for(news, 10) == [card()]
        news = asyncio.create_task(reader.discover(patience_s=30))
        await client.heartbeat(card(epoch=2), load())  # another incarnation under the same name
        assert await asyncio.wait_for(news, 10) == [card(epoch=2)]

    asyncio.run(scenario())


def test_all_readers_are_told_at_once_that_the_deployment_stops(client: RegistryClient) -> None:
    async def scenario() -> None:
        await client.heartbeat(card(), load())
        readers = [RegistryClient(client._name) for _ in range(2)]
        for reader in readers:
            assert await reader.discover() == [card()]
            assert reader.stops_in_s is None
        waiting = [asyncio.create_task(reader.discover(patience_s=30)) for reader in readers]
        assert await client.stop(5.0)
        for news, reader in zip(waiting, readers, strict=True):
            assert await asyncio.wait_for(news, 10) == [card()]
            assert reader.stops_in_s is not None
            assert 0 < reader.stops_in_s <= 5

    asyncio.run(scenario())


def test_routers_that_ask_are_targets_beside_the_workers(client: RegistryClient) -> None:
    async def scenario() -> None:
        worker, silent = replace(card(), metrics_port=9000), card("decode-1")
        here = Target("127.0.0.1", 9001, "router", "router-1", "m")
        there = replace(here, port=9002, replica="router-2")
        for known in (worker, silent):
            await client.heartbeat(known, load())
        other = RegistryClient(client._name)
        await client.discover(router=here)
        await other.discover(router=there)
        # whichever router is asked
        expected = [Target("127.0.0.1", 9000, "prefill", "prefill-1", "m"), here, there]
        assert await client.targets() == await other.targets() == expected
        await other.leave("router-2")
        assert await client.targets() == expected[:2]

    asyncio.run(scenario())


def test_without_news_the_reader_gets_the_same_after_its_patience(client: RegistryClient) -> None:
    async def scenario() -> None:
        await client.heartbeat(card(), load())
        assert await client.discover() == [card()]
        started = time.monotonic()
        assert await client.discover(patience_s=0.3) == [card()]
        assert time.monotonic() - started >= 0.3

    asyncio.run(scenario())


def test_a_silent_worker_expires_and_its_reader_is_told(request: pytest.FixtureRequest) -> None:
    remote_class: Any = ray.remote(RegistryActor)
    actor = remote_class.options(num_cpus=0).remote(expire_s=0.5)
    try:
        ray.get(actor.heartbeat.remote(*frames(card())))
        version, cards, *_ = ray.get(actor.wait.remote(-1, 0))
        assert len(cards) == 1
        later, cards, *_ = ray.get(actor.wait.remote(version, 30))
        assert later != version
        assert cards == []
    finally:
        ray.kill(actor)


def test_what_a_killed_registry_forgot_the_next_heartbeats_bring_back(
    client: RegistryClient,
) -> None:
    async def scenario() -> None:
        await client.heartbeat(card("prefill-1"), load())
        await client.heartbeat(card("decode-1"), load())
        assert len(await client.discover()) == 2
        pid = await client.actor().pid.remote()
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 60
        seen: list[str] = []
        while seen != ["decode-1", "prefill-1"]:
            assert time.monotonic() < deadline, seen
            for name in ("prefill-1", "decode-1"):
                await client.heartbeat(card(name), load())
            seen = sorted(found.worker_id for found in await client.discover())
        assert await client.actor().pid.remote() != pid

    asyncio.run(scenario())


def test_routers_are_told_of_targets_and_of_failed_starts_at_once(client: RegistryClient) -> None:
    async def scenario() -> None:
        reader = RegistryClient(client._name)
        await reader.discover()
        assert reader.pools == Pools()
        news = asyncio.create_task(reader.discover(patience_s=30))
        client.post(plan(prefill=2))
        await asyncio.wait_for(news, 10)
        assert reader.pools.targets == {"prefill": 2}
        news = asyncio.create_task(reader.discover(patience_s=30))
        assert await client.starting("start-1", "prefill")
        assert await client.failed("start-1", "prefill", "MemoryError: all is full")
        await asyncio.wait_for(news, 10)
        (failure,) = reader.pools.failures
        assert (failure.role, failure.worker, failure.reason) == ("prefill", "start-1", "exception")
        assert (failure.message, failure.in_a_row) == ("MemoryError: all is full", 1)
        assert reader.pools.start_failures == {("prefill", "exception"): 1}
        assert reader.pools.targets == {"prefill": 2}

    asyncio.run(scenario())


def test_a_killed_registry_is_told_again_what_it_knew_of_the_pools(client: RegistryClient) -> None:
    """Targets by who decides on them, with the next decision; failed starts by routers."""

    async def scenario() -> None:
        reader = RegistryClient(client._name)
        for name in ("start-1", "start-2"):
            await client.failed(name, "decode", "FetchError: no such folder")
        client.post(plan(decode=3))
        await reader.discover()
        known = reader.pools
        os.kill(await client.actor().pid.remote(), signal.SIGKILL)
        deadline = time.monotonic() + 60
        while reader.pools.targets != {"decode": 3} or reader.pools is known:
            assert time.monotonic() < deadline, reader.pools
            client.post(plan(decode=3))
            await reader.discover()
        assert reader.pools == known
        await client.failed("start-3", "decode", "again")
        await reader.discover()
        assert reader.pools.failures[0].in_a_row == 3
        assert reader.pools.start_failures == {("decode", "exception"): 3}

    asyncio.run(scenario())


def test_plans_reach_a_registry_that_was_removed_and_made_again(client: RegistryClient) -> None:
    async def scenario() -> None:
        decider = RegistryClient(client._name)
        decider.post(plan(prefill=1))
        await client.discover()
        ray.kill(client.actor())
        deadline = time.monotonic() + 60
        while client.pools.targets != {"prefill": 2}:
            assert time.monotonic() < deadline
            decider.post(plan(prefill=2))
            await client.discover(patience_s=0.1)

    asyncio.run(scenario())


def test_frames_that_are_no_card_are_refused(client: RegistryClient) -> None:
    with pytest.raises(ray.exceptions.RayTaskError, match="not a worker's card"):
        ray.get(client.actor().heartbeat.remote(wire.encode(wire.Ping(1)), b""))


def test_cards_are_wire_frames() -> None:
    frame = frames(card())[0]
    assert wire.decode(frame[LENGTH_BYTES:]) == wire.Welcome(card())
