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
from router.scraping import Target
from services.registry import LENGTH_BYTES, RegistryActor, RegistryClient, Table

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
        version, cards, _ = ray.get(actor.wait.remote(-1, 0))
        assert len(cards) == 1
        later, cards, _ = ray.get(actor.wait.remote(version, 30))
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


def test_frames_that_are_no_card_are_refused(client: RegistryClient) -> None:
    with pytest.raises(ray.exceptions.RayTaskError, match="not a worker's card"):
        ray.get(client.actor().heartbeat.remote(wire.encode(wire.Ping(1)), b""))


def test_the_table_expires_by_its_clock() -> None:
    now = [0.0]
    table = Table(clock=lambda: now[0], expire_s=5)
    version = table.version
    assert table.heartbeat("a", b"card", b"load 1")
    assert not table.heartbeat("a", b"card", b"load 2")  # only a card is news
    now[0] = 4
    table.heartbeat("b", b"card", b"load")
    assert not table.expire()
    now[0] = 6
    assert table.expire()
    assert table.reports() == [(b"card", b"load")]
    assert table.version == version + 3


def test_a_router_that_asks_no_more_expires_without_news_to_anybody() -> None:
    now = [0.0]
    table = Table(clock=lambda: now[0], expire_s=5)
    version = table.version
    table.present({"replica": "router-1"})
    now[0] = 4
    table.present({"replica": "router-2"})
    now[0] = 6
    assert not table.expire()
    assert table.routers() == [{"replica": "router-2"}]
    assert table.version == version


def test_cards_are_wire_frames() -> None:
    frame = frames(card())[0]
    assert wire.decode(frame[LENGTH_BYTES:]) == wire.Welcome(card())
