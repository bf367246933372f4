"""HTTP/1.1 as a load test needs it: cheap, and with the time at which bytes were read.

General clients spend half a millisecond on a request and wake a task for each piece of an answer;
at 1,000 requests per second that is what one would measure. Here a piece has the time at which the
kernel got it, see ``loadtest.receipt``, and is parsed when nothing else is to do.

Connections are kept and reused, one request at a time on each, as many as there are requests in
flight. There are no proxies, redirects, cookies or compressed answers. Knows nothing of JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

import httptools

from loadtest.event_loop import when_idle
from loadtest.receipt import Receipt, clock

TLS_TIMEOUT_S = 10.0  # of a handshake
PIECE = 1 << 18  # bytes that are read at once
KEEP_ALIVE_S = 4.0  # servers that close idle connections do so after 5 s or later


class Receiver(Protocol):
    """Where an answer goes to."""

    def receive(self, status: int, data: bytes, at: float) -> None:
        """A piece of the body that came ``at``; must not raise.

        The first piece is empty: it comes with the headers.
        """
        ...


class Broken(Exception):
    """The connection ended before the answer did."""


class NotHTTP(Exception):
    """The answer was no HTTP/1.1, or of a kind that was not asked for."""


@dataclass(frozen=True)
class Address:
    """Of a server, as a URL says it."""

    host: str
    port: int
    path: str  # without a slash at the end
    tls: bool

    @classmethod
    def parse(cls, url: str) -> Address:
        """Raises ValueError that says what is wrong with it."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ValueError(f"url {url!r}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or not url.isascii():
            raise ValueError(f"url {url!r}: want http://HOST:PORT or https://HOST")
        if parts.query or parts.fragment or parts.username:
            raise ValueError(f"url {url!r}: want a host, a port and a path, nothing else")
        tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if tls else 80), parts.path.rstrip("/"), tls)

    @property
    def netloc(self) -> str:
        """As the Host header has it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


class Http:
    """A server's connections."""

    def __init__(self, address: Address, headers: Mapping[str, str]) -> None:
        self.address = address
        lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
        self.buffer = bytearray(PIECE)  # of all connections: what is read is taken out at once
        self._headers = f"Host: {address.netloc}\r\n{''.join(lines)}"
        self._tls = ssl.create_default_context() if address.tls else None
        self._resolved: list[tuple[int, str]] = []  # family and IP, the one that works first
        self._idle: list[_Connection] = []  # the one used last at the end
        self._all: set[_Connection] = set()
        self._preparing: asyncio.Task[None] | None = None

    async def ask(self, method: str, path: str, body: bytes, receiver: Receiver) -> None:
        """Send a request; return when all of its answer has been given to ``receiver``.

        Raises OSError (and its kinds: socket.gaierror, ssl.SSLError, ConnectionRefusedError) if
        there is no connection, Broken and NotHTTP. A request that is cancelled loses its
        connection, which tells the server to stop.
        """
        head = f"{method} {path} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n\r\n"
        connection = self._idle.pop() if self._find_idle() else await self._connect()
        try:
            await connection.ask(head.encode("latin-1") + body, receiver)
        except BaseException:
            connection.abort()
            raise
        self._keep(connection)

    def prepare(self) -> None:
        """Make a connection in the background if none is free, for a request that is to come."""
        if not self._find_idle() and (self._preparing is None or self._preparing.done()):
            self._preparing = asyncio.create_task(self._add_idle())

    async def close(self) -> None:
        """End all connections."""
        if self._preparing:
            self._preparing.cancel()
            await asyncio.gather(self._preparing, return_exceptions=True)
        for connection in tuple(self._all):
            connection.abort()
        while self._all:
            await asyncio.sleep(0)

    def add(self, connection: _Connection) -> None:
        """It is open."""
        self._all.add(connection)

    def forget(self, connection: _Connection) -> None:
        """It is closed."""
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _keep(self, connection: _Connection) -> None:
        if connection.reusable:
            connection.idle_since = clock()
            self._idle.append(connection)
        else:
            connection.abort()

    def _find_idle(self) -> bool:
        """Whether there is a connection to reuse; those that are too old are closed."""
        while self._idle and clock() - self._idle[0].idle_since > KEEP_ALIVE_S:
            self._idle.pop(0).abort()
        return bool(self._idle)

    async def _add_idle(self) -> None:
        with contextlib.suppress(OSError):  # the request that needs it will meet that too
            self._keep(await self._connect())

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        if not self._resolved:
            found = await loop.getaddrinfo(
                self.address.host, self.address.port, type=socket.SOCK_STREAM
            )
            self._resolved = [(family, str(to[0])) for family, _, _, _, to in found]
        failures: list[OSError] = []
        for resolved in tuple(self._resolved):
            try:
                _, connection = await loop.create_connection(
                    lambda: _Connection(self),
                    resolved[1],
                    self.address.port,
                    family=resolved[0],
                    ssl=self._tls,
                    server_hostname=self.address.host if self._tls else None,
                    ssl_handshake_timeout=TLS_TIMEOUT_S if self._tls else None,
                )
            except OSError as error:
                failures.append(error)
            else:
                self._resolved.sort(key=lambda each: each != resolved)
                return connection
        raise failures[0]


class _Connection(asyncio.BufferedProtocol):
    """One connection, and the answer that is coming in on it."""

    def __init__(self, http: Http) -> None:
        self.reusable = True
        self.idle_since = 0.0
        self._http = http
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None  # for the end of the answer
        self._pieces: list[tuple[bytes, float]] = []  # read, not parsed
        self._began = False  # an answer, after any "100 Continue"
        self._until_close = False  # the end of the connection is the end of the answer

    async def ask(self, request: bytes, receiver: Receiver) -> None:
        self._receiver = receiver
        self._parser = httptools.HttpResponseParser(self)
        self._began = self._until_close = False
        self._waiter = self._loop.create_future()
        self._transport.write(request)
        try:
            await self._waiter
        finally:
            self._waiter = None

    def abort(self) -> None:
        """Close at once."""
        self.reusable = False
        self._transport.abort()

    # --- of asyncio ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._receipt = Receipt(transport.get_extra_info("socket").fileno())
        self._http.add(self)

    def get_buffer(self, sizehint: int) -> bytearray:
        self._came = self._receipt.next()
        return self._http.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._pieces.append((bytes(memoryview(self._http.buffer)[:nbytes]), self._came))
        if len(self._pieces) == 1:
            when_idle(self._parse)

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        self._receipt.close()
        self._http.forget(self)
        self._parse()
        if exc is None and self._began and self._until_close:
            self._end(None)
        else:
            when = "in the middle of the answer" if self._began else "before any answer"
            self._end(Broken(f"{exc or 'the server closed the connection'}, {when}"))

    # --- parsing ---------------------------------------------------------------------------------

    def _parse(self) -> None:
        pieces, self._pieces = self._pieces, []
        for data, at in pieces:
            if self._waiter is None or self._waiter.done():
                self.abort()  # nobody has asked for this
                return
            self._at = at
            try:
                self._parser.feed_data(data)
            except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
                cause = error.__context__ if isinstance(error.__context__, NotHTTP) else error
                # What is wrong may lie behind a good beginning that came with it.
                shown = repr(data) if len(data) <= 120 else f"{data[:60]!r} ... {data[-60:]!r}"
                self._end(NotHTTP(f"the answer is not HTTP/1.1: {cause}: {shown}"))
                self.abort()

    def _end(self, error: Exception | None) -> None:
        if self._waiter is None or self._waiter.done():
            return
        if error is None:
            self._waiter.set_result(None)
        else:
            self._waiter.set_exception(error)

    def on_message_begin(self) -> None:
        self._until_close = True

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._until_close = False
        elif name == b"content-encoding" and value.lower() != b"identity":
            raise NotHTTP(f"compressed ({value.decode('latin-1')})")

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        self._began = self._status >= 200  # else a mere 100 Continue
        if self._began:
            self._receiver.receive(self._status, b"", self._at)

    def on_body(self, body: bytes) -> None:
        self._receiver.receive(self._status, body, self._at)

    def on_message_complete(self) -> None:
        if self._began:
            self.reusable = self.reusable and self._parser.should_keep_alive()
            self._end(None)
