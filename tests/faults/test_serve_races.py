"""The whole of ``baton serve`` under hasty clients and strangers: B025, and B098 again.

In full only: it takes two minutes, and the parts of it are tested one by one elsewhere.
"""

import asyncio
import random
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.faults.rig import HttpClient, completion_body
from tests.faults.strangers import Siege, listening
from tests.support.serving import Served, served, until

NUM_TOKENS = 8
PROMPT = list(range(1000, 1100))


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[Served]:
    if not request.config.getoption("--full"):
        pytest.skip("only in the full form")
    with served("--max-model-len", "512", "--kv-blocks", "100", "--max-num-seqs", "4") as server:
        yield server


async def hasty(port: int, count: int) -> None:
    drawn = random.Random(25)

    async def one(gate: asyncio.Semaphore) -> None:
        async with gate:
            body = completion_body([drawn.randrange(1000, 2000) for _ in range(20)], 50)
            client = await HttpClient.post(port, {**body, "stream": True})
            await asyncio.sleep(drawn.uniform(0, 0.05))  # the moment is what is being drawn
            client.cut(reset=drawn.random() < 0.5)

    gate = asyncio.Semaphore(16)
    await asyncio.gather(*(one(gate) for _ in range(count)))


@pytest.mark.timeout(600)
def test_cancelled_while_the_ingress_accepts(server: Served) -> None:
    """B025: two thousand streams are cut within 50 ms; nothing of them is left, and the workers
    take as many as before.
    """
    right = server.complete_ids(PROMPT, NUM_TOKENS)
    pids = {worker["pid"] for worker in server.workers()}
    port = urllib.parse.urlsplit(server.url).port
    assert port is not None
    asyncio.run(hasty(port, 2000))

    def idle() -> bool:
        _, state = server.get("/internal/state")
        return not state["requests"]["running"] and not state["requests"]["queued"]

    until(idle, "the router knows of no request", 10)
    server.idle_workers()
    assert {worker["pid"] for worker in server.workers()} == pids
    answers = server.at_once([lambda: server.complete_ids(PROMPT, NUM_TOKENS)] * 4)
    assert answers == [right] * 4


@pytest.mark.timeout(600)
def test_strangers_at_everything_that_serve_starts(server: Served, tmp_path: Path) -> None:
    """B098: workers, router, HAProxy, and the ports of Ray's own processes."""
    trap = tmp_path / "made by a pickle"
    family = psutil.Process(server.process.pid).children(recursive=True)
    names = {port: process.name() for process in family for port in listening(process.pid)}
    print("\n" + "\n".join(f"  {port:>6} {name}" for port, name in sorted(names.items())))
    right = server.complete_ids(PROMPT, NUM_TOKENS)
    siege = Siege([], trap, sorted(names), 60)
    answered = 0
    while siege.lasts:
        assert server.complete_ids(PROMPT, NUM_TOKENS) == right
        answered += 1
    visits = siege.visits()
    assert not trap.exists()
    server.idle_workers()
    print(f"{answered} answered while {visits} came")
    assert answered > 10
