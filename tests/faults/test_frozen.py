"""What stops without dying: frozen processes, dead lines, engines that stand still.

B002 and B038 (SIGSTOP of D and of P), B022 (frozen, killed, unreachable), B055, B056.
"""

import asyncio
import contextlib
import json
import random
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

import router.worker
from tests.faults.fleet import Fleet, WorkerProcess, fleet
from tests.faults.rig import (
    TINY,
    VOCAB,
    HttpClient,
    Stream,
    completion_body,
    model_folder,
    rig,
    until,
)

NUM_TOKENS = 16
NOTICED_S = 8.0  # until a silent peer is out: 3 s without a word, and room for a busy machine
SIZES = {"max_model_len": 256, "kv_blocks": 33}


def a_prompt(seed: int, length: int = 120) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(VOCAB - 1) for _ in range(length)]


def small(tmp_path: Path) -> Path:
    return model_folder(tmp_path, replace(TINY, max_model_len=256))


async def ready(port: int) -> bool:
    """What GET /ready says."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    raw = await reader.read()
    writer.close()
    return b" 200 " in raw.split(b"\r\n")[0]


async def until_ready(port: int, wanted: bool, timeout_s: float) -> float:
    """Seconds until readiness is as wanted."""
    begin = time.monotonic()
    while await ready(port) != wanted:
        assert time.monotonic() - begin < timeout_s, f"not {wanted} within {timeout_s:g} s"
        await asyncio.sleep(0.05)
    return time.monotonic() - begin


# --- D stopped beyond the lease -------------------------------------------------------------------


async def decode_stopped(folder: Path) -> None:
    async with fleet(folder, "tcp", prefill=1, decode=2, lease_s=2.0, **SIZES) as deployed:
        prompt = a_prompt(1)
        right = await deployed.complete(prompt, NUM_TOKENS, cache_salt="undisturbed")
        for worker in deployed.of("decode"):
            worker.call("hold_posts")
        stream = await Stream.post(deployed.port, prompt, NUM_TOKENS)
        await stream.until_tokens(1)
        victim = deployed.serving("decode")
        await until(lambda: victim.call("posting"), "D is about to read")
        victim.send(signal.SIGSTOP)
        for worker in deployed.of("decode"):
            if worker is not victim:
                worker.call("open")
        await stream.end()
        assert (stream.error, stream.ids) == (None, right)
        for seed in range(50):  # P's 32 blocks are used again and again
            await deployed.complete(a_prompt(100 + seed), 2)
        victim.send(signal.SIGCONT)
        victim.call("open")  # it reads now, long after
        await deployed.until_ready()
        await deployed.until_idle()
        # Whoever it serves next gets the right text: nothing stale was kept.
        for _ in range(4):
            assert await deployed.complete(prompt, NUM_TOKENS) == right


def test_decode_stopped_beyond_the_lease(tmp_path: Path) -> None:
    """B002: D is frozen before its read and wakes when the blocks hold other prompts."""
    asyncio.run(decode_stopped(small(tmp_path)))


# --- P stopped in mid-transfer --------------------------------------------------------------------


async def prefill_stopped(folder: Path) -> None:
    stall_s = 1.0
    sizes = {**SIZES, "pull_stall_s": stall_s}
    async with fleet(folder, "tcp", prefill=2, decode=1, **sizes) as deployed:
        prompt = a_prompt(2)
        right = await deployed.complete(prompt, NUM_TOKENS, cache_salt="undisturbed")
        (decode,) = deployed.of("decode")
        decode.call("hold_posts")
        stream = await Stream.post(deployed.port, prompt, NUM_TOKENS)
        await stream.until_tokens(1)
        victim = deployed.serving("prefill")
        victim.send(signal.SIGSTOP)
        begin = time.monotonic()
        decode.call("open")  # the read is posted to one that does not answer
        await stream.end()
        assert (stream.error, stream.ids) == (None, right)
        assert stream.ended - begin < stall_s + 1, "its own deadline did not fire"
        assert decode.call("failed_pulls") == 1
        victim.send(signal.SIGCONT)
        await deployed.until_ready()
        await deployed.until_idle()
        assert await deployed.complete(prompt, NUM_TOKENS) == right


def test_prefill_stopped_in_mid_transfer(tmp_path: Path) -> None:
    """B038: the pull's own deadline ends it; the other P answers; late bytes stay fenced."""
    asyncio.run(prefill_stopped(small(tmp_path)))


# --- frozen and unreachable -----------------------------------------------------------------------


async def frozen_worker(folder: Path) -> None:
    async with fleet(folder, "tcp", prefill=2, decode=2, **SIZES) as deployed:
        prompt = a_prompt(3)
        right = await deployed.complete(prompt, NUM_TOKENS)
        for role in ("decode", "prefill"):
            victim = deployed.of(role)[0]
            victim.send(signal.SIGSTOP)
            begin = time.monotonic()
            answers = await asyncio.gather(
                *(deployed.complete(prompt, NUM_TOKENS) for _ in range(8))
            )
            assert answers == [right] * 8
            assert time.monotonic() - begin < NOTICED_S
            assert await ready(deployed.port)
            begin = time.monotonic()
            assert await deployed.complete(prompt, NUM_TOKENS) == right
            assert time.monotonic() - begin < 1, "the frozen worker was chosen again"
            victim.send(signal.SIGCONT)
            await deployed.until_ready()
        for worker in deployed.of("prefill"):
            worker.send(signal.SIGSTOP)
        await until_ready(deployed.port, False, NOTICED_S)
        status, _ = await (
            await HttpClient.post(deployed.port, completion_body(prompt, NUM_TOKENS))
        ).answer()
        assert status == 503
        for worker in deployed.of("prefill"):
            worker.send(signal.SIGCONT)
        await until_ready(deployed.port, True, 10)
        assert await deployed.complete(prompt, NUM_TOKENS) == right
        await deployed.until_idle()


def test_frozen_workers_are_left_out(tmp_path: Path) -> None:
    """B022, B010: a frozen worker is noticed in seconds; with no pair left, readiness is red and
    new requests get 503 at once; all goes on by itself afterwards.
    """
    asyncio.run(frozen_worker(small(tmp_path)))


class Line:
    """A forwarded connection that can be cut without a word, as by a firewall that drops."""

    def __init__(self) -> None:
        self.port = 0
        self.accepted = 0
        self._dropped = asyncio.Event()

    def drop(self, new_ones_too: bool = True) -> None:
        """Forward nothing any more, in either direction, and close nothing."""
        self._dropped.set()
        if not new_ones_too:
            self._dropped = asyncio.Event()

    @contextlib.asynccontextmanager
    async def to(self, port: int) -> AsyncIterator["Line"]:
        """Listen, and forward to that port."""
        tasks: set[asyncio.Task[None]] = set()
        writers: list[asyncio.StreamWriter] = []

        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.append(writer)
            self.accepted += 1
            dropped = self._dropped
            if dropped.is_set():
                return
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
            writers.append(far_writer)
            tasks.add(asyncio.create_task(_pump(reader, far_writer, dropped)))
            tasks.add(asyncio.create_task(_pump(far_reader, writer, dropped)))

        server = await asyncio.start_server(accepted, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for writer in writers:
                writer.transport.abort()
            await asyncio.sleep(0)  # for the transports to end


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, dropped: asyncio.Event
) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            if dropped.is_set():
                await asyncio.Event().wait()
            writer.write(data)
            await writer.drain()
    writer.close()


@contextlib.asynccontextmanager
async def behind_a_line(deployed: Fleet, worker: WorkerProcess) -> AsyncIterator[Line]:
    """Register a new worker as being where a :class:`Line` to it begins."""
    async with Line().to(worker.card.port) as line:
        worker.card = replace(worker.card, port=line.port)
        deployed.cards.append(worker.card)
        yield line


async def blocked_port(folder: Path) -> None:
    async with fleet(folder, "tcp", prefill=1, decode=1, **SIZES) as deployed:
        prompt = a_prompt(4)
        right = await deployed.complete(prompt, NUM_TOKENS)
        hidden = await deployed.start("decode", register=False)
        async with behind_a_line(deployed, hidden) as line:
            await deployed.until_ready()
            hidden.call("pause", len(prompt) + NUM_TOKENS // 2)
            streams = [await Stream.post(deployed.port, prompt, NUM_TOKENS) for _ in range(4)]
            await until(lambda: hidden.call("reached"), "one of them is at the worker behind it")
            line.drop()
            begin = time.monotonic()
            for stream in streams:
                await stream.end()
                assert (stream.error, stream.ids) == (None, right)
            assert time.monotonic() - begin < NOTICED_S
            hidden.call("open")
            await until(lambda: not hidden.call("leftovers"), "it has dropped what it had")
        await deployed.until_idle()


def test_a_port_that_drops(tmp_path: Path) -> None:
    """B022: packets to one worker vanish without a reset; its streams go on elsewhere."""
    asyncio.run(blocked_port(small(tmp_path)))


async def idle_line(folder: Path) -> None:
    async with fleet(folder, "tcp", prefill=1, decode=1, **SIZES) as deployed:
        prompt = a_prompt(7)
        right = await deployed.complete(prompt, NUM_TOKENS)
        deployed.of("decode")[0].kill()
        deployed.cards = [w.card for w in deployed.of("prefill")]
        hidden = await deployed.start("decode", register=False)
        async with behind_a_line(deployed, hidden) as line:
            await deployed.until_ready()
            accepted = line.accepted
            line.drop(new_ones_too=False)  # nobody says anything, as for hours
            await until(lambda: line.accepted > accepted, "the router has connected anew")
            await until_ready(deployed.port, True, NOTICED_S)
            assert await deployed.complete(prompt, NUM_TOKENS) == right
            await deployed.until_idle()


def test_an_idle_line_that_dies(tmp_path: Path) -> None:
    """B044: a connection is forgotten somewhere on its way while nobody uses it: pings notice, and
    the first request afterwards is answered.
    """
    asyncio.run(idle_line(small(tmp_path)))


# --- engines and deadlines ------------------------------------------------------------------------


async def engine_stands_still(folder: Path, limit_s: float) -> None:
    async with rig(folder, "memory", **SIZES) as deployed:
        prompt = a_prompt(5)
        right = await deployed.complete(prompt, NUM_TOKENS)
        deployed.decode.hold_when(lambda plan: plan.rows[0].end >= len(prompt) + 3)
        stream = await Stream.post(deployed.port, prompt, NUM_TOKENS)
        await until(deployed.decode.reached.is_set, "D's engine stands still")
        assert await ready(deployed.port)
        print(f"\nred after {await until_ready(deployed.port, False, limit_s + 5):.1f} s")
        deployed.open()
        await stream.end()
        assert stream.ids == right[: len(stream.ids)]
        await until_ready(deployed.port, True, 15)
        assert await deployed.complete(prompt, NUM_TOKENS) == right
        await deployed.until_idle()


def test_an_engine_that_stands_still(
    tmp_path: Path, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B055: pings are answered and HTTP lives, but nothing is computed: readiness turns red."""
    assert router.worker.STALLED_AFTER_S <= 10
    if not full:
        monkeypatch.setattr(router.worker, "STALLED_AFTER_S", 2.0)
    asyncio.run(engine_stands_still(small(tmp_path), router.worker.STALLED_AFTER_S))


async def one_deadline(folder: Path) -> None:
    async with rig(folder, "memory", request_timeout_s=2.0, **SIZES) as deployed:
        prompt = a_prompt(6)
        deployed.prefill.pause_when(lambda engine: True)
        begin = time.monotonic()
        client = await HttpClient.post(deployed.port, completion_body(prompt, NUM_TOKENS))
        await until(lambda: deployed.decode.worker.roles.num_open == 1, "D has reserved")
        status, text = await client.answer()
        assert status == 504, text
        assert "error" in json.loads(text)
        assert 1.9 < time.monotonic() - begin < 2.5
        await until(lambda: not deployed.decode.worker.roles.num_open, "D is free", 0.5)
        deployed.open()
        await deployed.until_idle()


def test_one_deadline_for_both_legs(tmp_path: Path) -> None:
    """B056: P stalls; the request's own deadline ends it at P and at D, at once."""
    asyncio.run(one_deadline(small(tmp_path)))
