"""Early pull between two real workers: parts that P signs while it computes are passed on to D,
whose puller fetches and verifies them over a real transport.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvtransfer.hashing import pack_ids
from router import wire
from router.connection import Link
from router.link import connect_worker
from services.engine.config import EngineConfig
from services.settings import WorkerSettings
from services.worker import Worker
from tests.support.scrape import Page, scrape
from tests.support.tiny_model import save_model

SECRET = b"s" * 32
WAIT_S = 20.0
ENGINE = EngineConfig(
    kv_blocks=33,
    max_model_len=112,
    token_budget=16,
    chunk_budget=16,
    threads=1,
    dtype="float32",
    device="cpu",
)
IDS = [3 + i * i % 90 for i in range(70)]  # five steps: four of a block each, and the rest
SAMPLING = wire.Sampling(max_tokens=6, temperature=0.0)
NUM_BLOCKS = 5


class Conversation:
    """A router's end of both links."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[wire.Message] = asyncio.Queue()
        self.links: list[Link] = []
        self.workers: list[Worker] = []

    async def connect(self, worker: Worker) -> None:
        card = worker.card
        assert card is not None
        link = await connect_worker(
            "127.0.0.1", card.port, card.worker_id, card.epoch, "r", 1, SECRET, (),
            lambda link, message: self.heard.put_nowait(message), lambda link: None,
        )  # fmt: skip
        self.workers.append(worker)
        self.links.append(link)

    async def next(self, *kinds: type) -> wire.Message:
        async with asyncio.timeout(WAIT_S):
            while not isinstance(message := await self.heard.get(), kinds):
                pass
        return message

    async def load_of(self, worker: Worker) -> wire.Load:
        """The load after all that was said before."""
        done = asyncio.Event()
        loop = asyncio.get_running_loop()
        worker._loop.submit(lambda: loop.call_soon_threadsafe(done.set))
        await done.wait()
        return worker.roles.load()


@asynccontextmanager
async def two_workers(folder: Path, transport: str) -> AsyncIterator[Conversation]:
    save_model(folder)
    router = Conversation()
    try:
        for role in ("prefill", "decode"):
            worker = Worker(
                WorkerSettings(
                    worker_id=f"{role}-1",
                    role=role,
                    model_dir=str(folder),
                    served_model="tiny",
                    weights="digest",
                    host="127.0.0.1",
                    transport=transport,
                    secret=SECRET,
                    lease_s=30.0,
                    net_devices="lo",
                    checksums=True,
                    engine=ENGINE,
                )
            )
            await worker.start()
            await router.connect(worker)
        yield router
    finally:
        for link in router.links:
            link.close("the test is over")
            await link.wait_closed()
        for worker in router.workers:
            await worker.close()


async def answer(
    router: Conversation, request: bytes, early: bool
) -> tuple[list[int], wire.Pulled]:
    """A whole hand-off, as a router does it; the tokens, and what D said of its pulls."""
    p, d = router.links
    d.send(wire.Reserve(request, 0, pack_ids(IDS), salt=request))
    assert isinstance(await router.next(wire.Reserved, wire.Refused), wire.Reserved)
    card = router.workers[0].card
    assert card is not None
    d.send(wire.Peer(card.agents[0]))
    ids = pack_ids(IDS)
    p.send(wire.Prefill(request, 0, ids, len(IDS), SAMPLING, salt=request, early=early))
    while isinstance(said := await router.next(wire.TicketPart, wire.Prefilled), wire.TicketPart):
        d.send(said)
    assert isinstance(said, wire.Prefilled)
    tokens = [said.token]
    ids = pack_ids([*IDS, said.token])
    d.send(wire.Decode(request, 0, ids, len(IDS), SAMPLING, said.ticket, salt=request))
    pulled = await router.next(wire.Pulled, wire.Failed)
    assert isinstance(pulled, wire.Pulled), pulled
    p.send(wire.Release(said.ticket_id))
    while True:
        message = await router.next(wire.Tokens, wire.Failed)
        assert isinstance(message, wire.Tokens), message
        tokens += message.ids
        if message.finish:
            return tokens, pulled


async def pulls_early(folder: Path, transport: str) -> None:
    async with two_workers(folder, transport) as router:
        plain, _ = await answer(router, b"plain", early=False)
        d = router.workers[1]
        assert (await router.load_of(d)).early_blocks == 0
        tokens, pulled = await answer(router, b"early", early=True)
        assert tokens == plain
        load = await router.load_of(d)
        # All but the last step's blocks; the salts differ, so nothing was in the cache.
        assert (pulled.num_blocks, load.early_blocks) == (NUM_BLOCKS, NUM_BLOCKS - 1)
        assert load.failed_pulls == 0
        assert d.roles.load().blocks["quarantined"] == 0
        assert d.card is not None
        page = await asyncio.to_thread(scrape, d.card.host, d.card.metrics_port)
        check_pulls(page, transport, d)


def check_pulls(page: Page, transport: str, worker: Worker) -> None:
    """What two hand-offs leave in the metrics, the second one with early parts."""
    pulls = 2 + (NUM_BLOCKS - 1)
    assert page.values("baton_kv_transfers_total", "result") == {"ok": 2}
    assert page.value("baton_kv_transfers_total", result="ok", transport=transport) == 2
    assert page.values("baton_kv_transfer_parts_total", "result") == {"ok": NUM_BLOCKS - 1}
    assert page.value("baton_kv_transfer_bytes_count") == pulls
    assert page.value("baton_kv_transfer_blocks_sum") == 2 * NUM_BLOCKS
    moved = 2 * NUM_BLOCKS * worker.layout.span_bytes
    assert page.value("baton_kv_transfer_bytes_sum") == moved
    counts = page.values("baton_kv_transfer_seconds_count", "phase")
    assert counts == dict.fromkeys(("queue", "wire", "seals", "total"), pulls)
    seconds = page.values("baton_kv_transfer_seconds_sum", "phase")
    assert all(0 < seconds[phase] < WAIT_S for phase in ("queue", "wire", "seals"))
    assert sum(seconds.values()) == pytest.approx(2 * seconds["total"])
    assert page.values("baton_kv_transfer_in_flight", "side") == {}


async def aborts_at_each_part(folder: Path, transport: str) -> None:
    async with two_workers(folder, transport) as router:
        p, d = router.links
        card = router.workers[0].card
        assert card is not None
        d.send(wire.Peer(card.agents[0]))
        ids = pack_ids(IDS)
        for stop in range(1, NUM_BLOCKS):
            request = b"%d" % stop
            d.send(wire.Reserve(request, 0, ids, salt=request))
            p.send(wire.Prefill(request, 0, ids, len(IDS), SAMPLING, salt=request, early=True))
            for _ in range(stop):
                part = await router.next(wire.TicketPart)
                assert isinstance(part, wire.TicketPart)
                assert part.request == request
                d.send(part)
            for link in (d, p):
                link.send(wire.Abort(request, 0))
            ended = [await router.next(wire.Failed, wire.Prefilled) for _ in range(2)]
            for message in ended:
                if isinstance(message, wire.Prefilled):  # the abort came too late for P
                    p.send(wire.Release(message.ticket_id))
        tokens, _ = await answer(router, b"after", early=True)
        assert len(tokens) == SAMPLING.max_tokens
        async with asyncio.timeout(WAIT_S):
            for worker in router.workers:
                while True:
                    load = await router.load_of(worker)
                    held = [load.blocks[name] for name in ("active", "leased", "quarantined")]
                    if held == [0, 0, 0]:
                        break
        for worker in router.workers:
            worker.engine.check_integrity()


@pytest.mark.parametrize("transport", ["memory", "tcp", "nixl"])
def test_parts_are_pulled_while_the_prompt_is_computed(tmp_path: Path, transport: str) -> None:
    asyncio.run(pulls_early(tmp_path, transport))


@pytest.mark.parametrize("transport", ["memory", "tcp"])
def test_an_abort_between_parts_leaves_nothing(tmp_path: Path, transport: str) -> None:
    asyncio.run(aborts_at_each_part(tmp_path, transport))
