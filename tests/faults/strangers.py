"""What may knock at an internal port: scanners, browsers, attackers, and peers of another time."""

import asyncio
import contextlib
import os
import pickle
import random
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from router.errors import LinkError
from router.link import connect_worker
from router.wire import PROTOCOL_VERSION, Hello, WorkerCard, encode
from tests.faults.fleet import PROCESSES

PATIENCE_S = 1.0  # of a stranger for an answer
Stranger = Callable[[int], Awaitable[None]]


@contextlib.asynccontextmanager
async def _connected(
    port: int,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def _say(port: int, *parts: bytes) -> None:
    """Send, and read what comes; a connection that ends is an answer."""
    with contextlib.suppress(OSError, TimeoutError):
        async with _connected(port) as (reader, writer), asyncio.timeout(PATIENCE_S):
            for part in parts:
                writer.write(part)
                await writer.drain()
            while await reader.read(65536):
                pass


def _client_hello() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    talk = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        talk.do_handshake()
    return outgoing.read()


class _Touch:
    """What its pickle does when it is loaded."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self._path),)


class Strangers:
    """All kinds of them. ``cards``: workers whose identity they know; ``trap``: must not appear."""

    def __init__(self, cards: list[WorkerCard], trap: Path, seed: int = 1) -> None:
        self.visits: Counter[str] = Counter()
        self._cards = {card.port: card for card in cards}
        self._pickle = pickle.dumps(_Touch(trap))
        self._tls = _client_hello()
        self._random = random.Random(seed)

    @property
    def kinds(self) -> tuple[Stranger, ...]:
        """One method each; the argument is the port."""
        return (
            self.garbage,
            self.http,
            self.tls,
            self.pickled,
            self.huge_header,
            self.half_open,
            self.crowd,
            self.wrong_secret,
            self.old_version,
        )

    async def visit(self, ports: list[int], seconds: float) -> None:
        """Knock at every port, with every kind, again and again."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while True:
            for kind in self.kinds:
                await asyncio.gather(*(kind(port) for port in ports))
                self.visits[kind.__name__] += len(ports)
            if loop.time() >= end:
                return

    async def garbage(self, port: int) -> None:
        """Random bytes."""
        await _say(port, self._random.randbytes(self._random.randint(1, 100_000)))

    async def http(self, port: int) -> None:
        """A browser that asks for a page that nobody has."""
        await _say(port, b"GET /no/such/page HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")

    async def tls(self, port: int) -> None:
        """The beginning of TLS."""
        await _say(port, self._tls)

    async def pickled(self, port: int) -> None:
        """A pickle that makes a folder, bare and framed."""
        await _say(port, self._pickle)
        await _say(port, len(self._pickle).to_bytes(4, "big"), self._pickle)

    async def huge_header(self, port: int) -> None:
        """Frames of 1 GiB and of nearly 4 GiB are announced, and begun."""
        for size in (1 << 30, (1 << 32) - 1):
            await _say(port, size.to_bytes(4, "big"), bytes(256 * 1024))

    async def half_open(self, port: int) -> None:
        """Some that say nothing, and one that stops in the middle of a frame."""
        with contextlib.suppress(OSError):
            async with contextlib.AsyncExitStack() as stack:
                for _ in range(5):
                    await stack.enter_async_context(_connected(port))
                await _say(port, b"\0\0\0\x20\x81")

    async def crowd(self, port: int) -> None:
        """Two hundred connections at once."""
        await asyncio.gather(*(_say(port, b"\0") for _ in range(200)))

    async def wrong_secret(self, port: int) -> None:
        """One that knows the protocol and the worker's name, not the secret."""
        card = self._cards.get(port)
        worker, epoch = (card.worker_id, card.epoch) if card else ("nobody", 1)
        try:
            link = await connect_worker(
                "127.0.0.1", port, worker, epoch, "stranger", 1, b"not the secret" * 3, (),
                lambda link, message: None, lambda link: None,
            )  # fmt: skip
        except LinkError:
            return
        raise AssertionError(f"port {port} let a stranger in: {link.peer_name}")

    async def old_version(self, port: int) -> None:
        """A router of the version before."""
        card = self._cards.get(port)
        worker, epoch = (card.worker_id, card.epoch) if card else ("nobody", 1)
        await _say(port, encode(Hello(PROTOCOL_VERSION - 1, "older", 1, worker, epoch, bytes(32))))


def besiege(
    cards: list[WorkerCard], trap: Path, ports: list[int], seconds: float, pipe: Connection
) -> None:
    """A process full of strangers; sends how many came, or why they could not."""
    strangers = Strangers(cards, trap)
    try:
        asyncio.run(strangers.visit(ports, seconds))
        pipe.send(strangers.visits.total())
    except Exception as error:  # for the test
        pipe.send(repr(error))


class Siege:
    """Strangers in a process of their own, so that they take no time from who is visited."""

    def __init__(
        self, cards: list[WorkerCard], trap: Path, ports: list[int], seconds: float
    ) -> None:
        self._pipe, theirs = PROCESSES.Pipe()
        self._process = PROCESSES.Process(
            target=besiege, args=(cards, trap, ports, seconds, theirs), daemon=True
        )
        self._process.start()
        theirs.close()

    @property
    def lasts(self) -> bool:
        """Whether they are still there."""
        return bool(self._process.is_alive())

    def visits(self) -> int:
        """How many came, once they have left."""
        self._process.join(60)
        visits = self._pipe.recv()
        self._pipe.close()
        assert isinstance(visits, int), visits
        return visits


def listening(pid: int) -> dict[int, str]:
    """Ports that a process listens on, and where it is bound."""
    return {
        link.laddr.port: link.laddr.ip
        for link in psutil.Process(pid).net_connections("tcp")
        if link.status == psutil.CONN_LISTEN
    }
