"""One framed, authenticated TCP connection between a router and a worker (asyncio).

Knows frames, the handshake and who is alive; it does not know what the messages mean. A connection
goes through these states, and from each of them to closed:

::

    router   hello sent ──Challenge──► proof sent ──Welcome──► open ──► closed
    worker   silent ──Hello──► challenged ──Proof──► open ──► closed

Both sides prove that they know the deployment's secret before anything else is said: an HMAC over
version, role, both nonces and both identities, so that a proof serves neither the other role nor
another connection. Whoever has not proven it yet may send 64 KiB frames, has 2 s, and is one of at
most 64. A peer that sends nothing for 3 s (it is pinged each second), or does not read what it is
sent, is dead. Bad frames close their own connection and nothing else.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
from collections.abc import Callable
from hashlib import sha256
from typing import Protocol

import msgpack

from kvtransfer.faults import Faults
from router import connection
from router.codec import LENGTH_BYTES
from router.connection import Link
from router.errors import LinkError
from router.link_faults import FaultyFrames
from router.wire import (
    PROTOCOL_VERSION,
    Challenge,
    Hello,
    Message,
    Proof,
    Rejected,
    Welcome,
    WireError,
    WorkerCard,
)

__all__ = ["Link", "OnConnect", "WorkerServer", "connect_worker", "prove", "serve_worker"]

MAX_UNAUTHENTICATED = 64  # sockets of one worker that have not proven the secret yet
NONCE_BYTES = 32

log = logging.getLogger(__name__)


def prove(secret: bytes, role: str, hello: Hello, worker_nonce: bytes) -> bytes:
    """What ``role`` ("router" or "worker") must send to show that it knows the secret."""
    parts = (
        "baton",
        PROTOCOL_VERSION,
        role,
        hello.nonce,
        worker_nonce,
        hello.worker_id,
        hello.epoch,
        hello.router_id,
        hello.router_epoch,
    )
    return hmac.digest(secret, msgpack.packb(parts), sha256)


# --- the router's side ---------------------------------------------------------------------------


class _RouterLink(Link):
    def __init__(
        self,
        hello: Hello,
        secret: bytes,
        tickets: tuple[bytes, ...],
        on_message: Callable[[Link, Message], None],
        on_close: Callable[[Link], None],
        faults: Faults | None,
    ) -> None:
        super().__init__()
        self.card: asyncio.Future[WorkerCard] = self._loop.create_future()
        self._hello = hello
        self._secret = secret
        self._tickets = tickets
        self._on_message = on_message
        self._on_close = on_close
        self._challenged = False
        self._faults = faults
        self._incoming: FaultyFrames | None = None
        self._outgoing: FaultyFrames | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._write((self._hello,))

    def _handshake(self, message: Message) -> None:
        match message:
            case Rejected(reason):
                self._abort(f"refused by the worker: {reason}")
            case Challenge() if not self._challenged:
                self._challenged = True
                if message.version != PROTOCOL_VERSION:
                    self._abort(_version_reason(message.version))
                    return
                expected = prove(self._secret, "worker", self._hello, message.nonce)
                if not hmac.compare_digest(message.proof, expected):
                    self._abort("the worker does not know this deployment's secret")
                    return
                proof = prove(self._secret, "router", self._hello, message.nonce)
                self._write((Proof(proof, self._tickets),))
            case Welcome(card) if self._challenged:
                self._opened()
                if not self.card.done():
                    self.card.set_result(card)
            case _:
                raise WireError(f"{type(message).__name__} during the handshake")

    def _deliver(self, message: Message) -> None:
        self._on_message(self, message)

    def _opened(self) -> None:
        if self._faults is not None:
            self._incoming = FaultyFrames(self._faults, self._process, 0)
            self._outgoing = FaultyFrames(self._faults, self._write_frame, LENGTH_BYTES)
        super()._opened()

    def _take(self, body: bytes) -> None:
        if self._incoming is None:
            super()._take(body)
        else:
            self._heard()
            self._incoming.push(body)

    def _emit(self, frames: list[bytes]) -> None:
        if self._outgoing is None:
            super()._emit(frames)
        else:
            for frame in frames:
                self._outgoing.push(frame)

    def _write_frame(self, frame: bytes) -> None:
        if not self._is_closing():
            super()._emit([frame])

    def _end(self, reason: str, kind: str = "closed") -> None:
        super()._end(reason, kind)
        for faulty in (self._incoming, self._outgoing):
            if faulty is not None:
                faulty.close()

    def _closed(self, was_open: bool) -> None:
        if not self.card.done():
            self.card.set_exception(LinkError(self.close_reason))
            self.card.exception()  # so that nobody complains when the caller has given up
        if was_open:
            self._on_close(self)


async def connect_worker(
    host: str,
    port: int,
    worker_id: str,
    epoch: int,
    router_id: str,
    router_epoch: int,
    secret: bytes,
    tickets: tuple[bytes, ...],
    on_message: Callable[[Link, Message], None],
    on_close: Callable[[Link], None],
    faults: Faults | None = None,
) -> Link:
    """An open link to exactly this incarnation of a worker; raises LinkError with the reason.

    ``tickets``: those still wanted from it; it releases all others of this router. Messages may
    arrive before this returns. ``on_close`` is called only for links that were open. ``faults``: to
    inject into the frames after the handshake, both ways.
    """
    hello = Hello(
        PROTOCOL_VERSION, router_id, router_epoch, worker_id, epoch, os.urandom(NONCE_BYTES)
    )
    loop = asyncio.get_running_loop()
    link: _RouterLink | None = None
    try:
        async with asyncio.timeout(2 * connection.HANDSHAKE_TIMEOUT_S):
            _, link = await loop.create_connection(
                lambda: _RouterLink(hello, secret, tickets, on_message, on_close, faults),
                host,
                port,
            )
            await link.card
    except BaseException as error:
        if link is not None:
            link._abort("given up")
        if isinstance(error, OSError):  # also the timeout
            reason = str(error) or "timeout"
            raise LinkError(f"worker {worker_id} at {host}:{port}: {reason}") from error
        if isinstance(error, LinkError):
            raise LinkError(f"worker {worker_id} at {host}:{port}: {error}") from error
        raise
    return link


# --- the worker's side ---------------------------------------------------------------------------


class OnConnect(Protocol):
    """A router has connected and proven itself; ``tickets`` are those it still wants."""

    def __call__(self, link: Link, hello: Hello, tickets: tuple[bytes, ...]) -> None: ...


class _WorkerLink(Link):
    def __init__(self, server: WorkerServer) -> None:
        super().__init__()
        self.hello: Hello | None = None
        self._server = server
        self._nonce = os.urandom(NONCE_BYTES)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if not self._server.welcome(self):
            self._abort(f"more than {MAX_UNAUTHENTICATED} unauthenticated connections")

    def _handshake(self, message: Message) -> None:
        if isinstance(message, Hello) and self.hello is None:
            self._challenge(message)
        elif isinstance(message, Proof) and self.hello is not None:
            expected = prove(self._server.secret, "router", self.hello, self._nonce)
            if not hmac.compare_digest(message.proof, expected):
                self._reject("you do not know this deployment's secret")
                return
            self._server.replace_older(self.hello.router_id)
            self._write((Welcome(self._server.card()),))
            self._opened()
            self._server.on_connect(self, self.hello, message.tickets)
        else:
            raise WireError(f"{type(message).__name__} during the handshake")

    def _challenge(self, hello: Hello) -> None:
        card = self._server.card()
        if hello.version != PROTOCOL_VERSION:
            self._reject(_version_reason(hello.version))
        elif (hello.worker_id, hello.epoch) != (card.worker_id, card.epoch):
            self._reject("the worker here is another one, or another incarnation")
        elif len(hello.nonce) != NONCE_BYTES:
            raise WireError(f"a nonce has {NONCE_BYTES} bytes")
        else:
            self.hello = hello
            proof = prove(self._server.secret, "worker", hello, self._nonce)
            self._write((Challenge(PROTOCOL_VERSION, self._nonce, proof),))

    def _reject(self, reason: str) -> None:
        self._write((Rejected(reason),))
        self.close(reason)

    def _progress(self) -> tuple[int, bool]:
        return self._server.progress()

    def _deliver(self, message: Message) -> None:
        self._server.on_message(self, message)

    def _closed(self, was_open: bool) -> None:
        self._server.links.discard(self)
        log.info("connection from %s ended: %s", self.peer_name, self.close_reason)
        if was_open:
            self._server.on_close(self)


class WorkerServer:
    """What :func:`serve_worker` returns: the listening socket and its connections."""

    def __init__(
        self,
        card: Callable[[], WorkerCard],
        secret: bytes,
        on_connect: OnConnect,
        on_message: Callable[[Link, Message], None],
        on_close: Callable[[Link], None],
        progress: Callable[[], tuple[int, bool]],
    ) -> None:
        self.card = card
        self.secret = secret
        self.on_connect = on_connect
        self.on_message = on_message
        self.on_close = on_close
        self.progress = progress
        self.links: set[_WorkerLink] = set()
        self.port = 0
        self._server: asyncio.Server | None = None

    async def listen(self, host: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _WorkerLink(self), host, port)
        self.port = self._server.sockets[0].getsockname()[1]

    def replace_older(self, router_id: str) -> None:
        """Close the older connection of a router that has just proven itself anew."""
        for link in list(self.links):
            if link.open and link.hello is not None and link.hello.router_id == router_id:
                link._abort("replaced by a newer connection of the same router")
                link._forget()  # now, so that the owner sees the end before the new beginning

    def welcome(self, link: _WorkerLink) -> bool:
        """Take a new connection in, unless too many have not proven themselves yet."""
        self.links.add(link)
        return sum(not other.open for other in self.links) <= MAX_UNAUTHENTICATED

    async def close(self) -> None:
        """Stop listening, flush and close all connections; ``on_close`` has run for each."""
        if self._server is None:
            return
        self._server.close()
        for link in list(self.links):
            link.close("the worker stops")
        await asyncio.gather(*(link.wait_closed() for link in list(self.links)))
        await self._server.wait_closed()


async def serve_worker(
    host: str,
    port: int,
    card: Callable[[], WorkerCard],
    secret: bytes,
    on_connect: OnConnect,
    on_message: Callable[[Link, Message], None],
    on_close: Callable[[Link], None],
    progress: Callable[[], tuple[int, bool]],
) -> WorkerServer:
    """Listen for routers (port 0: any free one, see ``.port``).

    ``card`` is asked at each handshake, so it may change after the port is known. ``progress`` is
    (the engine's step counter, whether it has work) and is asked for each pong.
    """
    server = WorkerServer(card, secret, on_connect, on_message, on_close, progress)
    await server.listen(host, port)
    return server


def _version_reason(theirs: int) -> str:
    return f"protocol version {PROTOCOL_VERSION} is spoken here, not {theirs}"
