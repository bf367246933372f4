"""Workers that come back, on the same address and under the same name: B008, B052; B041 beside it.

Under steady load, with two workers of each role. A request whose worker is killed goes on
elsewhere, so none may fail; and whoever had to do with the dead one must not be poisoned by it.
"""

import asyncio
import random
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from router.api import create_api
from router.tokenizer import ByteTokenizer
from tests.faults.fleet import Fleet, WorkerProcess, fleet
from tests.faults.rig import (
    TINY,
    VOCAB,
    HttpClient,
    complete,
    completion_body,
    http_server,
    model_folder,
    until,
)
from tests.support.shared_memory import shared_memory

NUM_TOKENS = 8
RECOVERED_S = 10.0


class Load:
    """Requests that arrive at a steady pace, each checked against the right answer."""

    def __init__(self, deployed: Fleet, right: dict[tuple[int, ...], list[int]]) -> None:
        self.answered = 0
        self.failed: list[str] = []
        self._deployed, self._right = deployed, right
        self._drawn = random.Random(8)
        self._calls: set[asyncio.Task[None]] = set()
        self._pacing = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """No new ones; wait for the others."""
        self._pacing.cancel()
        await asyncio.gather(*self._calls)

    async def _run(self) -> None:
        while True:
            call = asyncio.create_task(self._one())
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
            await asyncio.sleep(0.1)  # ten a second

    async def _one(self) -> None:
        prompt = self._drawn.choice(list(self._right))
        try:
            answer = await complete(self._deployed.port, list(prompt), NUM_TOKENS)
        except AssertionError as error:
            self.failed.append(str(error))
            return
        if answer != self._right[prompt]:
            self.failed.append(f"wrong: {answer}")
        self.answered += 1


def new_prompts(count: int) -> list[tuple[int, ...]]:
    drawn = random.Random(2)
    return [
        tuple(drawn.randrange(VOCAB - 1) for _ in range(drawn.randint(5, 150)))
        for _ in range(count)
    ]


async def restart(deployed: Fleet, victim: WorkerProcess) -> WorkerProcess:
    """kill -9, and a new incarnation with the same name on the same port."""
    card = victim.card
    victim.kill()
    deployed.workers.remove(victim)
    victim.pipe.close()
    deployed.cards.remove(card)
    return await deployed.start(card.role, card.port, card.worker_id)


async def restarts(folder: Path, transport: str, rounds: int, probes: int) -> None:
    sizes = {"max_model_len": 256, "kv_blocks": 100, "policy": "round-robin"}
    async with fleet(folder, transport, prefill=2, decode=2, **sizes) as deployed:
        right = {p: await deployed.complete(list(p), NUM_TOKENS) for p in new_prompts(10)}
        everybody = {w.process.pid for w in deployed.workers}
        load = Load(deployed, right)
        for turn in range(rounds):
            role = ("prefill", "decode")[turn % 2]
            victim = deployed.of(role)[turn // 2 % 2]
            everybody.discard(victim.process.pid)
            new = await restart(deployed, victim)
            if turn % 4 == 3:  # once more, before anybody can have noticed
                new = await restart(deployed, new)
            begin = time.monotonic()
            await deployed.until_ready()
            assert time.monotonic() - begin < RECOVERED_S
            everybody.add(new.process.pid)
            before = {w.card.worker_id: w.call("counters") for w in deployed.workers}
            prompt, answer = next(iter(right.items()))
            for _ in range(probes):
                assert await deployed.complete(list(prompt), NUM_TOKENS) == answer
            for worker in deployed.workers:
                moved = worker.call("counters") - before[worker.card.worker_id]
                assert moved > 0, f"no probe went over {worker.card.worker_id}"
        await load.stop()
        await deployed.until_idle()
        assert {w.process.pid for w in deployed.workers if w.alive} == everybody
        print(f"\n{transport}: {load.answered} answered, {len(load.failed)} failed")
        assert not load.failed
        assert load.answered > 10


@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["nixl", "tcp"])
def test_restart_on_the_same_address(tmp_path: Path, full: bool, transport: str) -> None:
    """B008, B052: all pairs work again within seconds, and no request fails meanwhile."""
    if transport == "tcp" and not full:
        pytest.skip("only in the full form")
    folder = model_folder(tmp_path, replace(TINY, max_model_len=256))
    asyncio.run(restarts(folder, transport, 20 if full else 2, 100 if full else 12))


async def residue(folder: Path) -> None:
    before = shared_memory()
    sizes = {"max_model_len": 256, "kv_blocks": 100}
    async with fleet(folder, "nixl", prefill=2, decode=1, **sizes) as deployed:
        prompt = list(new_prompts(1)[0])
        right = await deployed.complete(prompt, NUM_TOKENS)
        (decode,), victim = deployed.of("decode"), deployed.of("prefill")[0]
        await deployed.complete(prompt, NUM_TOKENS, cache_salt="once more")
        files = {
            entry.path
            for entry in psutil.Process(victim.process.pid).memory_maps()
            if entry.path.startswith("/dev/shm")
        }
        victim.kill()
        ports = {victim.card.port}
        process = psutil.Process(decode.process.pid)

        def clean() -> bool:
            maps = {entry.path.removesuffix(" (deleted)") for entry in process.memory_maps()}
            far = {link.raddr.port for link in process.net_connections() if link.raddr}
            return not (maps & files) and not (far & ports)

        await until(clean, "D has let go of the dead one's memory", 10)
        assert await deployed.complete(prompt, NUM_TOKENS) == right
        for worker in deployed.workers:
            if worker.alive:
                worker.kill()
        assert shared_memory() <= before


def test_nothing_of_the_dead_remains(tmp_path: Path) -> None:
    """B041: D unmaps what was P's; and kill -9 of all leaves nothing in /dev/shm."""
    asyncio.run(residue(model_folder(tmp_path, replace(TINY, max_model_len=256))))


async def hammered_from_the_start(folder: Path) -> None:
    sizes = {"max_model_len": 256, "kv_blocks": 100}
    async with fleet(folder, "tcp", prefill=1, decode=1, **sizes) as deployed:
        prompt = list(new_prompts(1)[0])
        right = await deployed.complete(prompt, NUM_TOKENS)
        for worker in deployed.workers:
            worker.kill()
        deployed.cards = []
        another = replace(deployed.router, router_id="another router")
        app = create_api(another, deployed.discover, ByteTokenizer())
        async with http_server(app) as port:  # a router that is there before any worker

            async def ask() -> tuple[bool, int, bytes]:
                was_ready = app.state.front.dispatcher.ready
                client = await HttpClient.post(port, completion_body(prompt, NUM_TOKENS))
                return was_ready, (await client.answer())[0], client.head

            async def hammer() -> list[tuple[bool, int, bytes]]:
                seen = []
                while sum(was_ready for was_ready, *_ in seen) < 20:
                    seen.append(await ask())
                return seen

            hammering = asyncio.create_task(hammer())
            for role in ("prefill", "decode"):
                await deployed.start(role)
            seen = await hammering
            assert {status for was_ready, status, _ in seen if was_ready} == {200}
            early = [(status, head) for was_ready, status, head in seen if not was_ready]
            assert early
            assert all(status in (200, 503) for status, _ in early)
            assert all(b"retry-after" in head for status, head in early if status == 503)
            assert await complete(port, prompt, NUM_TOKENS) == right


def test_ready_when_a_generation_has_passed(tmp_path: Path) -> None:
    """B053: before, 503 with Retry-After; from the first green /ready on, no error."""
    asyncio.run(hammered_from_the_start(model_folder(tmp_path, replace(TINY, max_model_len=256))))
