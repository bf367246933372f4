"""The framed, authenticated connection, over real sockets: handshake, liveness, bad peers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import re
import socket
from collections.abc import Awaitable, Callable

import pytest

from kvtransfer.faults import FaultPlan, Faults
from router import connection, wire
from router.errors import LinkError
from router.link import Link, WorkerServer, connect_worker, serve_worker

SECRET = b"s" * 32
CARD = wire.WorkerCard(
    worker_id="P-1",
    epoch=7,
    role="prefill",
    model="m",
    host="127.0.0.1",
    port=0,
    pid=1,
    layout={},
    agents=(),
    kv_blocks=8,
    block_size=16,
    max_model_len=128,
    max_num_seqs=4,
    token_budget=64,
)
ABORT = wire.Abort(b"r" * 16, 1)
HELLO = wire.Hello(wire.PROTOCOL_VERSION, "R", 1, "P-1", 7, b"n" * 32)


class Side:
    """What happened on one side of a link, with a way to wait for it."""

    def __init__(self) -> None:
        self.log: list[tuple[str, object]] = []
        self._changed = asyncio.Event()

    def add(self, what: str, value: object) -> None:
        self.log.append((what, value))
        self._changed.set()

    async def until(self, what: str, count: int = 1) -> list[object]:
        async with asyncio.timeout(10):
            while len(found := [v for w, v in self.log if w == what]) < count:
                self._changed.clear()
                await self._changed.wait()
        return found

    def on_connect(self, link: Link, hello: wire.Hello, tickets: tuple[bytes, ...]) -> None:
        self.add("connect", (link, hello, tickets))

    def on_message(self, link: Link, message: wire.Message) -> None:
        self.add("message", message)

    def on_close(self, link: Link) -> None:
        self.add("close", link)


def run(scenario: Callable[[WorkerServer, Side], Awaitable[None]]) -> None:
    async def main() -> None:
        worker = Side()
        server = await serve_worker(
            "127.0.0.1",
            0,
            lambda: CARD,
            SECRET,
            worker.on_connect,
            worker.on_message,
            worker.on_close,
            lambda: (42, True),
        )
        try:
            await scenario(server, worker)
        finally:
            await server.close()

    asyncio.run(main())


async def connect(server: WorkerServer, side: Side, **changes: object) -> Link:
    arguments: dict[str, object] = {
        "host": "127.0.0.1",
        "port": server.port,
        "worker_id": "P-1",
        "epoch": 7,
        "router_id": "R",
        "router_epoch": 1,
        "secret": SECRET,
        "tickets": (),
        "on_message": side.on_message,
        "on_close": side.on_close,
    }
    return await connect_worker(**(arguments | changes))  # type: ignore[arg-type]


def test_messages_flow_both_ways_and_in_order() -> None:
    async def scenario(server: WorkerServer, worker: Side) -> None:
        router = Side()
        link = await connect(server, router, tickets=(b"t" * 16,))
        ((worker_link, hello, tickets),) = await worker.until("connect")
        assert hello.router_id == "R"
        assert tickets == (b"t" * 16,)
        many = [wire.Release(bytes([n]) * 16) for n in range(100)]
        link.send(ABORT, *many)
        assert await worker.until("message", 101) == [ABORT, *many]
        worker_link.send(wire.Expired((b"x",)))
        assert await router.until("message") == [wire.Expired((b"x",))]
        link.close()
        assert await worker.until("close") == [worker_link]
        assert await router.until("close") == [link]
        assert not link.open
        link.send(ABORT)  # dropped without a fuss

    run(scenario)


def test_pong_carries_progress() -> None:
    async def scenario(server: WorkerServer, worker: Side) -> None:
        link = await connect(server, Side())
        async with asyncio.timeout(3):
            while link.peer_steps == 0:
                await asyncio.sleep(0)
        assert (link.peer_steps, link.peer_busy) == (42, True)
        link.close()

    run(scenario)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"secret": b"wrong"}, "secret"),
        ({"epoch": 8}, "incarnation"),
        ({"worker_id": "P-2"}, "another one"),
    ],
)
def test_refused_with_a_reason(changes: dict[str, object], reason: str) -> None:
    async def scenario(server: WorkerServer, worker: Side) -> None:
        with pytest.raises(LinkError, match=reason):
            await connect(server, Side(), **changes)
        assert worker.log == []
        (await connect(server, Side())).close()

    run(scenario)


def test_wrong_version_is_named() -> None:
    async def scenario(server: WorkerServer, worker: Side) -> None:
        for version, number in ((99, 1), (99, None), (1, None)):  # version 1 knew no numbers
            hello = wire.Hello(version, "R", 1, "P-1", 7, b"n" * 32)
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(wire.encode(hello, number))
            data = await reader.read()
            answer = wire.decode(data[4:])
            assert isinstance(answer, wire.Rejected)
            assert f"version {wire.PROTOCOL_VERSION}" in answer.reason
            assert f"not {version}" in answer.reason
            writer.close()

    run(scenario)


def test_a_router_without_the_secret_is_not_let_in() -> None:
    async def scenario(server: WorkerServer, worker: Side) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(wire.encode(HELLO, 1))
        size = int.from_bytes(await reader.readexactly(4), "big")
        challenge = wire.decode(await reader.readexactly(size))
        assert isinstance(challenge, wire.Challenge)
        writer.write(wire.encode(wire.Proof(challenge.proof), 2))  # reflected
        rest = await reader.read()
        assert isinstance(wire.decode(rest[4:]), wire.Rejected)
        writer.close()
        assert worker.log == []

    run(scenario)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff\xff\xff\xff",
        b"\x00\x01\x00\x01",  # one byte above the limit before authentication
        b"\x00\x00\x00\x03abc",
        b"\x00\x00\x00\x00",
        b"\x80\x04\x95" + b"cposix\nsystem\n" * 10,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 500,  # TLS hello
        (1 << 30).to_bytes(4, "big") + b"x" * 100,
        wire.encode(ABORT, 1),
        wire.encode(wire.Proof(b""), 1),
        wire.encode(dataclasses.replace(HELLO, nonce=b"short"), 1),
        wire.encode(wire.Ping(1), 1),
        wire.encode(HELLO),  # no number
        wire.encode(HELLO, 2),
        wire.encode(HELLO, 1)[:-1] + b"?",  # a wrong checksum
    ],
)
def test_garbage_closes_its_own_socket_only(
    garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(server: WorkerServer, worker: Side) -> None:
        link = await connect(server, Side())
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(garbage)
        async with asyncio.timeout(1):  # before the handshake's own limit
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.close()
        link.send(ABORT)
        assert await worker.until("message") == [ABORT]
        link.close()

    with caplog.at_level(logging.INFO):
        run(scenario)
    assert "Traceback" not in caplog.text
    assert all(record.levelno < logging.WARNING for record in caplog.records)


def test_a_silent_socket_is_closed_and_too_many_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "HANDSHAKE_TIMEOUT_S", 0.3)

    async def scenario(server: WorkerServer, worker: Side) -> None:
        sockets = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(70)]
        async with asyncio.timeout(5):
            while len(server.links) < 64:
                await asyncio.sleep(0)
            while server.links:
                await asyncio.sleep(0)
        for sock in sockets:
            sock.close()
        (await connect(server, Side())).close()

    run(scenario)


def test_a_new_connection_of_the_same_router_closes_the_older() -> None:
    async def scenario(server: WorkerServer, worker: Side) -> None:
        old_side = Side()
        old = await connect(server, old_side)
        other = await connect(server, Side(), router_id="R2")
        new = await connect(server, Side(), router_epoch=2)
        await old_side.until("close")
        assert [what for what, _ in worker.log] == ["connect", "connect", "close", "connect"]
        assert (old.open, other.open, new.open) == (False, True, True)
        other.close()
        new.close()

    run(scenario)


def test_a_peer_that_says_nothing_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PING_INTERVAL_S", 0.1)
    monkeypatch.setattr(connection, "DEAD_AFTER_S", 0.3)

    async def scenario(server: WorkerServer, worker: Side) -> None:
        side = Side()
        link = await connect(server, side)
        ((worker_link, _, _),) = await worker.until("connect")
        worker_link._transport.pause_reading()  # hears no pings, as a stopped process
        worker_link._timer.cancel()
        monkeypatch.setattr(worker_link, "_write", lambda messages: None)
        await side.until("close")
        assert "nothing heard" in link.close_reason

    run(scenario)


def test_a_peer_that_trickles_within_a_frame_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes alone are no sign of life: only complete frames are."""
    monkeypatch.setattr(connection, "PING_INTERVAL_S", 0.1)
    monkeypatch.setattr(connection, "DEAD_AFTER_S", 0.4)

    async def scenario(server: WorkerServer, worker: Side) -> None:
        side = Side()
        link = await connect(server, side)
        ((worker_link, _, _),) = await worker.until("connect")
        worker_link._timer.cancel()
        monkeypatch.setattr(worker_link, "_write", lambda messages: None)
        transport = worker_link._transport
        transport.write((1 << 20).to_bytes(4, "big"))
        async with asyncio.timeout(5):
            while link.open:
                transport.write(b"x")
                await asyncio.sleep(0.02)
        assert "nothing heard" in link.close_reason
        transport.abort()

    run(scenario)


@pytest.mark.parametrize("size", [connection.MAX_FRAME + 1, 1 << 30, (1 << 32) - 1])
def test_a_frame_that_is_too_large_is_refused_at_its_header(size: int) -> None:
    """B098: also of a peer that has proven itself, and before any of it is kept."""

    async def scenario(server: WorkerServer, worker: Side) -> None:
        link = await connect(server, Side())
        ((worker_link, _, _),) = await worker.until("connect")
        link._transport.write(size.to_bytes(4, "big"))  # type: ignore[union-attr]
        await worker.until("close")
        assert worker_link.close_reason.startswith(f"a frame of {size} bytes")
        assert len(worker_link._buffer) <= 4

    run(scenario)


@pytest.mark.parametrize("side", ["router", "worker"])
@pytest.mark.parametrize("kind", ["lost", "doubled", "overtaken", "changed", "unnumbered"])
def test_the_first_frame_out_of_line_closes_the_link(side: str, kind: str) -> None:
    async def scenario(server: WorkerServer, worker: Side) -> None:
        router = Side()
        link = await connect(server, router)
        ((worker_link, _, _),) = await worker.until("connect")
        sender, receiver = (link, worker_link) if side == "router" else (worker_link, link)
        heard = worker if side == "router" else router
        first, second, third = (wire.Expired((name,)) for name in (b"1", b"2", b"3"))
        sender.send(first)
        frames = sender._encode([second, third])
        match kind:
            case "lost":
                frames = frames[1:]
            case "doubled":
                frames = [frames[0], *frames]
            case "overtaken":
                frames.reverse()
            case "changed":
                frames[0] = frames[0].replace(b"2", b"3")  # still a message, but another one
            case "unnumbered":
                frames[0] = wire.encode(second)
        sender._transport.write(b"".join(frames))
        await heard.until("close")
        assert "lost, doubled or overtaken" in receiver.close_reason or kind == "changed"
        assert "checksum" in receiver.close_reason or kind != "changed"
        messages = [value for what, value in heard.log if what == "message"]
        assert messages == ([first, second] if kind == "doubled" else [first])
        assert not receiver.open

    run(scenario)


def test_a_lost_last_frame_is_noticed_by_the_next_ping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PING_INTERVAL_S", 0.1)

    async def scenario(server: WorkerServer, worker: Side) -> None:
        link = await connect(server, Side())
        ((worker_link, _, _),) = await worker.until("connect")
        link._encode([ABORT])  # counted, never written
        await worker.until("close")
        assert "a Ping has number" in worker_link.close_reason

    run(scenario)


def test_what_cannot_be_packed_costs_nobody_else_anything() -> None:
    """It is its sender's error; the messages around it go on, over the same connection."""

    async def scenario(server: WorkerServer, worker: Side) -> None:
        link = await connect(server, Side())
        for attempt in (2**64, 2**70):
            with pytest.raises(TypeError):
                link.send(ABORT, wire.Abort(b"r" * 16, attempt))
        link.send(ABORT)
        assert await worker.until("message") == [ABORT]
        assert link.open

    run(scenario)


def test_a_replayed_handshake_is_refused() -> None:
    """B098: what a router once said proves nothing on another connection."""

    async def scenario(server: WorkerServer, worker: Side) -> None:
        said: list[bytes] = []

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection("127.0.0.1", server.port)

            async def copy(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
                while data := await source.read(1 << 16):
                    if source is reader:
                        said.append(data)
                    to.write(data)
                to.close()

            await asyncio.gather(copy(reader, back), copy(there, writer))

        tap = await asyncio.start_server(relay, "127.0.0.1", 0)
        link = await connect(server, Side(), port=tap.sockets[0].getsockname()[1])
        await worker.until("connect")
        link.close()
        await worker.until("close")
        tap.close()
        hello, proof = said[0], said[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(hello)
        size = int.from_bytes(await reader.readexactly(4), "big")
        assert isinstance(wire.decode(await reader.readexactly(size)), wire.Challenge)
        writer.write(proof)
        answer = wire.decode((await reader.read())[4:])
        assert answer == wire.Rejected("you do not know this deployment's secret")
        writer.close()
        assert [what for what, _ in worker.log] == ["connect", "close"]

    run(scenario)


@pytest.mark.parametrize("how", ["nothing", "half a frame", "a byte now and then"])
def test_half_open_sockets_do_not_last(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """B098: whoever has not proven itself in time is closed, however it fills the time."""
    monkeypatch.setattr(connection, "HANDSHAKE_TIMEOUT_S", 0.3)

    async def scenario(server: WorkerServer, worker: Side) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        frame = wire.encode(HELLO, 1)
        if how == "half a frame":
            writer.write(frame[: len(frame) // 2])
        ended = asyncio.ensure_future(reader.read())
        async with asyncio.timeout(2):
            while not ended.done():
                if how == "a byte now and then":
                    writer.write(b"\x00")
                await asyncio.wait((ended,), timeout=0.05)
        writer.close()
        assert not server.links
        with contextlib.suppress(ConnectionError):
            assert ended.result() == b""

    run(scenario)


def faulty(**chances: float) -> Faults:
    return Faults(FaultPlan(**chances))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["drop", "duplicate", "corrupt", "reorder"])
def test_each_injected_fault_ends_the_link_with_a_reason(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PING_INTERVAL_S", 0.05)

    async def scenario(server: WorkerServer, worker: Side) -> None:
        for seed in range(5):  # one in four, so that it is not always the first frame
            side, faults = Side(), faulty(**{kind: 0.25}, seed=seed)
            seen = len(worker.log)
            link = await connect(server, side, faults=faults)
            await worker.until("connect", seed + 1)
            wanted = [wire.Release(bytes([n]) * 16) for n in range(20)]
            for message in wanted:
                link.send(message)
            await side.until("close")
            await worker.until("close", seed + 1)
            worker_link = worker.log[-1][1]
            assert isinstance(worker_link, Link)
            reasons = f"{link.close_reason}; {worker_link.close_reason}"
            assert re.search(r"lost, doubled or overtaken|not a message", reasons), reasons
            assert faults.counts[kind] >= 1
            got = [value for what, value in worker.log[seen:] if what == "message"]
            assert got == wanted[: len(got)]  # what came is right, up to the end

    run(scenario)


def test_delayed_frames_keep_their_order() -> None:
    async def scenario(server: WorkerServer, worker: Side) -> None:
        faults = faulty(delay=0.3, delay_s=0.05)
        link = await connect(server, Side(), faults=faults)
        many = [wire.Release(bytes([n]) * 16) for n in range(50)]
        for message in many:
            link.send(message)
        assert await worker.until("message", 50) == many
        assert faults.counts["delay"] > 0
        assert link.open
        link.close()

    run(scenario)


def test_a_peer_that_does_not_read_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_UNSENT_BYTES", 1 << 20)

    async def scenario(server: WorkerServer, worker: Side) -> None:
        side = Side()
        link = await connect(server, side)
        link._transport.pause_reading()  # type: ignore[union-attr]
        ((worker_link, _, _),) = await worker.until("connect")
        big = wire.Reserve(b"r" * 16, 1, b"x" * (1 << 20))
        for _ in range(64):
            worker_link.send(big)
        await worker.until("close")
        assert "unread" in worker_link.close_reason
        link.close()

    run(scenario)


def test_a_handler_that_raises_closes_only_its_link() -> None:
    async def scenario(server: WorkerServer, worker: Side) -> None:
        def fail(link: Link, message: wire.Message) -> None:
            raise RuntimeError("handler")

        side = Side()
        server.on_message = fail
        link = await connect(server, side)
        other = await connect(server, Side(), router_id="R2")
        link.send(ABORT)
        await side.until("close")
        assert other.open
        other.close()

    run(scenario)


def test_nobody_listens() -> None:
    async def scenario(server: WorkerServer, worker: Side) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            with pytest.raises(LinkError, match=r"worker P-1 at 127\.0\.0\.1"):
                await connect(server, Side(), port=free.getsockname()[1])

    run(scenario)


def test_a_server_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HANDSHAKE_TIMEOUT_S", 0.2)

    async def scenario(server: WorkerServer, worker: Side) -> None:
        with (
            socket.create_server(("127.0.0.1", 0)) as silent,
            pytest.raises(LinkError, match=r"handshake|timeout"),
        ):
            await connect(server, Side(), port=silent.getsockname()[1])

    run(scenario)


def test_card_survives_the_wire() -> None:
    frame = wire.encode(wire.Welcome(dataclasses.replace(CARD, layout={"num_layers": 2})))
    assert wire.decode(frame[4:]) == wire.Welcome(
        dataclasses.replace(CARD, layout={"num_layers": 2})
    )
