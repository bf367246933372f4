"""Frames that are changed or lost on their way, through the real router, links and workers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from kvtransfer.hashing import pack_ids
from router import codec, connection, wire
from router.connection import Link
from router.link import connect_worker
from services.worker import Worker
from tests.guards.graph import MAX_TOKENS, PROMPT, SECRET, graph, stream, worker
from tests.support.tiny_model import save_model

PING_S = 0.05


def change_a_token(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One bit of one token, in the middle of an answer, changes on its way to the router."""
    process, middle = Link._process, MAX_TOKENS // 2
    changed: list[int] = []

    def process_changed(self: Link, body: bytes) -> None:
        message, number = wire.unpack(body)
        if isinstance(message, wire.Tokens) and message.first_index == middle and not changed:
            changed.append(message.ids[0] ^ 1)
            other = replace(message, ids=tuple(changed))
            body = wire.encode(other, number)[4:-4] + body[-4:]
        process(self, body)

    monkeypatch.setattr(Link, "_process", process_changed)
    return changed


@pytest.mark.parametrize("guarded", [True, False])
def test_a_token_that_changed_on_its_way_reaches_no_client(
    guarded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames have a checksum; without it, the client would get the other token."""

    async def scenario() -> None:
        async with asyncio.timeout(60), graph(tmp_path) as (dispatcher, _):
            undisturbed, error = await stream(dispatcher)
            assert not error
            if not guarded:
                monkeypatch.setattr(codec, "_checksum", lambda body: bytes(body[-4:]))
            changed = change_a_token(monkeypatch)
            tokens, error = await stream(dispatcher)
            assert not error
            if guarded:
                assert tokens == undisturbed
                assert dispatcher.counters["retries"] > 0
            else:
                assert changed[0] in tokens
                assert tokens != undisturbed

    asyncio.run(scenario())


def lose(link: Link, message: wire.Message) -> None:
    """Send a message that never arrives."""
    emit = link._emit
    link._emit = lambda frames: None  # type: ignore[method-assign]
    link.send(message)
    link._emit = emit  # type: ignore[method-assign]


@pytest.mark.parametrize("guarded", [True, False])
def test_a_lost_abort_leaves_nothing_behind(
    guarded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames are numbered: the next ping tells that one is missing, and the end of the link aborts
    what came over it. Else the blocks of a request that nobody wants would stay reserved.
    """
    monkeypatch.setattr(connection, "PING_INTERVAL_S", PING_S)
    if not guarded:
        monkeypatch.setattr(Link, "_check_number", lambda self, message, number: None)

    async def scenario() -> None:
        save_model(tmp_path)
        d = await worker("decode", 0, tmp_path)
        try:
            answers: asyncio.Queue[wire.Message] = asyncio.Queue()
            closed = asyncio.Event()
            assert d.card is not None
            link = await connect_worker(
                "127.0.0.1",
                d.card.port,
                d.card.worker_id,
                d.epoch,
                "R",
                1,
                SECRET,
                (),
                lambda link, message: answers.put_nowait(message),
                lambda link: closed.set(),
            )
            link.send(wire.Reserve(b"r" * 16, 1, pack_ids(PROMPT)))
            while not isinstance(await answers.get(), wire.Reserved):
                pass
            assert held(d) == 2
            pongs = count_pongs(link, monkeypatch)
            lose(link, wire.Abort(b"r" * 16, 1))
            if guarded:
                await closed.wait()
                while held(d):
                    await asyncio.sleep(PING_S)
            else:
                for _ in range(3):  # the first may answer an earlier ping
                    await pongs.acquire()
                assert not closed.is_set()
                assert held(d) == 2, "it is given back without numbers as well"
        finally:
            await d.close()

    async def main() -> None:
        async with asyncio.timeout(20):
            await scenario()

    asyncio.run(main())


def held(d: Worker) -> int:
    return d.engine.pool.counts()["active"]


def count_pongs(link: Link, monkeypatch: pytest.MonkeyPatch) -> asyncio.Semaphore:
    """Released for each pong that comes over the link from now on."""
    pongs = asyncio.Semaphore(0)
    receive = Link._receive

    def receive_and_count(self: Link, message: wire.Message) -> None:
        receive(self, message)
        if self is link and isinstance(message, wire.Pong):
            pongs.release()

    monkeypatch.setattr(Link, "_receive", receive_and_count)
    return pongs
