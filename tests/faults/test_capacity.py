"""Pools that are too small, storms of disconnects: everybody ends, nothing is used up.

B011 (P and D wait for each other), B032 and B048 (no room while decoding), B047 and B050 (what the
departed leave behind).
"""

import asyncio
import os
import random
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from router.api import create_api
from router.tokenizer import ByteTokenizer
from tests.faults.fleet import fleet
from tests.faults.rig import TINY, VOCAB, Stream, http_server, model_folder, rig, until

STALL_S = 5.0


def random_ids(drawn: random.Random, count: int) -> list[int]:
    return [drawn.randrange(VOCAB - 1) for _ in range(count)]


async def answers(folder: Path, asked: list[list[int]], num_tokens: int) -> list[list[int]]:
    """The right ones, from pools with room for all."""
    async with rig(folder, "memory") as roomy:
        return [await roomy.complete(prompt, num_tokens) for prompt in asked]


async def circular_wait(folder: Path, count: int) -> None:
    drawn = random.Random(11)
    asked = [random_ids(drawn, drawn.randint(5, 110)) for _ in range(20)]
    right = await answers(folder, asked, 12)
    tiny = {"max_model_len": 128, "kv_blocks": 13}  # one longest request and a half
    async with rig(folder, "tcp", **tiny) as deployed:
        other = replace(deployed.graph.settings, router_id="router-two")
        app = create_api(other, deployed.graph.discover, ByteTokenizer())
        async with http_server(app) as port:
            await until(lambda: app.state.front.dispatcher.ready, "the second router is ready")
            queue = [drawn.randrange(len(asked)) for _ in range(count)]

            async def client(at: int) -> None:
                while queue:
                    index = queue.pop()
                    stream = await Stream.post(at, asked[index], 12, cache_salt=f"{len(queue)}")
                    await stream.end(60)
                    assert (stream.error, stream.ids) == (None, right[index])
                    assert stream.longest_gap < STALL_S, "it stood still after its first token"

            ports = [deployed.port, port] * 8
            await asyncio.gather(*(client(at) for at in ports))
        await deployed.until_idle()


@pytest.mark.timeout(300)
def test_no_circular_wait(tmp_path: Path, full: bool) -> None:
    """B011: two routers, sixteen clients, pools of one request and a half on both sides."""
    asyncio.run(circular_wait(model_folder(tmp_path), 200 if full else 32))


async def preempted(folder: Path, num_requests: int) -> None:
    drawn = random.Random(32)
    asked = [random_ids(drawn, 34) for _ in range(num_requests)]
    right = await answers(folder, asked, 35)
    tiny = {"max_model_len": 112, "kv_blocks": 8, "prefix_cache": False}
    async with rig(folder, "memory", **tiny) as deployed:
        streams = [await Stream.post(deployed.port, prompt, 35) for prompt in asked]
        for stream, answer in zip(streams, right, strict=True):
            await stream.end(120)
            assert (stream.error, stream.ids) == (None, answer)
        assert deployed.decode.engine.scheduler.stats.preemptions > 0
        await deployed.until_idle()


@pytest.mark.parametrize("many", [False, True])
def test_preempted_after_a_pull(tmp_path: Path, full: bool, many: bool) -> None:
    """B032, B048: D has seven blocks; who was pulled is preempted, computed anew, and right."""
    asyncio.run(preempted(model_folder(tmp_path), (64 if full else 6) if many else 2))


async def storm(folder: Path, count: int) -> None:
    drawn = random.Random(47)
    sizes = {"max_model_len": 256, "kv_blocks": 200, "max_queue": 2 * count}
    async with fleet(folder, "tcp", prefill=2, decode=2, **sizes) as deployed:
        probe = random_ids(drawn, 60)
        right = await deployed.complete(probe, 8)
        streams = [
            await Stream.post(deployed.port, random_ids(drawn, drawn.randint(1, 200)), 40)
            for _ in range(count)
        ]
        await until(lambda: deployed.dispatcher.num_jobs > 10, "they have begun")
        for stream in streams:
            stream.client.cut(reset=drawn.random() < 0.5)
        await deployed.until_idle()

        def all_zero() -> bool:
            state = deployed.dispatcher.state()
            requests = state["requests"]
            workers = [w[gauge] for w in state["workers"] for gauge in ("running", "waiting")]
            return not any([requests["running"], requests["queued"], *workers])

        await until(all_zero, "the gauges are zero", 2)
        assert await deployed.complete(probe, 8) == right


def test_a_storm_of_disconnects(tmp_path: Path, full: bool) -> None:
    """B047: hundreds leave at once; every gauge is exactly zero afterwards."""
    folder = model_folder(tmp_path, replace(TINY, max_model_len=256))
    asyncio.run(storm(folder, 500 if full else 30))


def num_connections() -> int:
    """TCP connections of this process, where router and workers are."""
    links = psutil.Process(os.getpid()).net_connections("tcp")
    return sum(link.status == psutil.CONN_ESTABLISHED for link in links)


async def connections(folder: Path, count: int) -> None:
    drawn = random.Random(50)
    async with rig(folder, "tcp", max_num_seqs=10) as deployed:
        probe = random_ids(drawn, 40)
        right = await deployed.complete(probe, 8)
        before = num_connections()
        long = await Stream.post(deployed.port, random_ids(drawn, 40), 10 * count)
        await long.until_tokens(1)
        for _ in range(count):
            stream = await Stream.post(deployed.port, random_ids(drawn, 40), 100)
            await stream.until_tokens(1)
            stream.client.cut()
            assert await deployed.complete(probe, 8) == right
        await long.end()
        assert (long.error, len(long.ids)) == (None, 10 * count)
        await deployed.until_idle()
        await until(lambda: num_connections() == before, "no connection is left over")


def test_cancelled_streams_leave_no_connection(tmp_path: Path, full: bool) -> None:
    """B050: many cancelled streams beside a long one that stays whole."""
    asyncio.run(connections(model_folder(tmp_path), 50 if full else 12))
