"""Serves the blocks of one pool over TCP, and the format of what goes over the wire.

A connection carries one read at a time::

    client → server   hello     8 bytes magic, 32 bytes token of the server's card
    client → server   request   u8 part, u32 count, count x u32 block ids
    server → client   answer    u8 OK, u64 length, the rows | u8 REFUSED, u64 length, a reason

One thread serves all peers and blocks on none of them. Rows go from the pool into the socket
without a copy of ours. Who has not sent the token in time, sends something else, stops in the
middle of a request or stops reading an answer, is dropped. Knows no tickets: who has the token may
read.
"""

from __future__ import annotations

import hmac
import logging
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence

from kvtransfer.errors import TransportError
from kvtransfer.region import Region
from kvtransfer.transport import Part

logger = logging.getLogger(__name__)

MAGIC = b"batonkv1"
TOKEN_BYTES = 32
REQUEST = struct.Struct(">BI")
ANSWER = struct.Struct(">BQ")
OK, REFUSED = 0, 1
PARTS = (Part.KV, Part.SEALS)  # their index goes over the wire

_HELLO_BYTES = len(MAGIC) + TOKEN_BYTES
_REQUEST_S = 2.0  # from accept to hello, and from the first to the last byte of a request
_STALLED_S = 30.0  # an answer of which the peer takes nothing
_MAX_STRANGERS = 64  # connections without a valid hello yet
_BATCH = 64  # buffers per system call


class Buffers:
    """A row of memory areas that is sent or filled piece by piece."""

    def __init__(self, areas: Sequence[memoryview] = ()) -> None:
        self._areas = deque(areas)

    def __bool__(self) -> bool:
        return bool(self._areas)

    def head(self) -> list[memoryview]:
        """The next areas, for one system call."""
        return [self._areas[i] for i in range(min(_BATCH, len(self._areas)))]

    def advance(self, num_bytes: int) -> None:
        """Skip what a system call has moved."""
        while num_bytes:
            area = self._areas.popleft()
            if num_bytes < len(area):
                self._areas.appendleft(area[num_bytes:])
                return
            num_bytes -= len(area)


class Rows:
    """The spans, seals and staging of a pool in host memory as bytes."""

    def __init__(self, region: Region) -> None:
        if region.spans.device.type != "cpu":
            raise TransportError(
                f"the tcp transport reads host memory, this pool is on {region.spans.device}: "
                "use the nixl transport"
            )
        self._spans = region.spans.numpy().reshape(-1).data
        self._seals = region.seals.numpy().reshape(-1).data.cast("B")
        self._staging = region.staging.numpy().reshape(-1).data.cast("B")
        self._num_blocks = region.num_blocks

    def source(self, part: Part, blocks: Sequence[int]) -> list[memoryview]:
        """What a peer reads."""
        return self._slice(self._spans if part is Part.KV else self._seals, blocks)

    def target(self, part: Part, blocks: Sequence[int]) -> list[memoryview]:
        """Where the rows of a peer go."""
        return self._slice(self._spans if part is Part.KV else self._staging, blocks)

    def _slice(self, memory: memoryview, blocks: Sequence[int]) -> list[memoryview]:
        n = len(memory) // self._num_blocks
        return [memory[block * n : (block + 1) * n] for block in blocks]


class _Garbage(Exception):
    """What a peer sent is not of this protocol."""


class _Connection:
    """One peer's socket: hello, then requests and answers in turn."""

    def __init__(self, sock: socket.socket, token: bytes, rows: Rows, num_blocks: int) -> None:
        self.sock = sock
        self.trusted = False
        self.answer = Buffers()
        self.deadline: float | None = time.monotonic() + _REQUEST_S
        self._token = token
        self._rows = rows
        self._num_blocks = num_blocks
        self._received = bytearray()
        self._wanted = _HELLO_BYTES

    def on_readable(self) -> None:
        """Take what is there, at most to the end of the current message."""
        data = self.sock.recv(self._wanted - len(self._received))
        if not data:
            raise ConnectionError("closed by the peer")
        if self.deadline is None:
            self.deadline = time.monotonic() + _REQUEST_S
        self._received += data
        if len(self._received) < self._wanted:
            return
        if not self.trusted:
            self._on_hello()
        elif self._wanted == REQUEST.size:
            self._on_request_head()
        else:
            self._on_request()

    def on_writable(self) -> None:
        """Send what the socket takes."""
        self.answer.advance(self.sock.sendmsg(self.answer.head()))
        self.deadline = time.monotonic() + _STALLED_S if self.answer else None

    def _on_hello(self) -> None:
        magic, token = self._received[: len(MAGIC)], self._received[len(MAGIC) :]
        if magic != MAGIC or not hmac.compare_digest(token, self._token):
            raise _Garbage("no valid hello")
        self.trusted = True
        self._expect_request()

    def _on_request_head(self) -> None:
        part, count = REQUEST.unpack(self._received)
        if part >= len(PARTS) or not 0 < count <= self._num_blocks:
            raise _Garbage(f"a request for {count} rows of part {part}")
        self._wanted += 4 * count

    def _on_request(self) -> None:
        part, count = REQUEST.unpack_from(self._received)
        blocks = struct.unpack_from(f">{count}I", self._received, REQUEST.size)
        outside = [block for block in blocks if block >= self._num_blocks]
        if outside:
            reason = f"block {outside[0]} is outside of the pool of {self._num_blocks}".encode()
            areas = [memoryview(ANSWER.pack(REFUSED, len(reason)) + reason)]
        else:
            rows = self._rows.source(PARTS[part], blocks)
            length = sum(len(row) for row in rows)
            areas = [memoryview(ANSWER.pack(OK, length)), *rows]
        self.answer = Buffers(areas)
        self._expect_request()
        self.deadline = time.monotonic() + _STALLED_S

    def _expect_request(self) -> None:
        self._received.clear()
        self._wanted = REQUEST.size
        self.deadline = None


class PoolServer:
    """A listening socket and the thread behind it."""

    def __init__(self, region: Region, token: bytes, host: str) -> None:
        self._rows = Rows(region)
        self._num_blocks = region.num_blocks
        self._token = token
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, 0), family=family, backlog=128)
        except OSError as error:
            raise TransportError(f"cannot listen for KV reads on {host}: {error}") from error
        self._listener.setblocking(False)
        self.host, self.port = self._listener.getsockname()[:2]
        self._connections: set[_Connection] = set()
        self._selector = selectors.DefaultSelector()
        self._waker, wakee = socket.socketpair()
        self._wakee = wakee
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(wakee, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="kv-tcp-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Drop all peers and stop. Idempotent."""
        self._waker.close()  # seen as readable by the thread
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._serve_ready():
                self._drop_late()
        except Exception:  # the thread's edge; peers see their sockets closed
            logger.exception("the KV server failed")
        finally:
            for connection in list(self._connections):
                self._drop(connection, "the server closes")
            self._selector.close()
            self._listener.close()
            self._wakee.close()

    def _serve_ready(self) -> bool:
        waiting = any(connection.deadline is not None for connection in self._connections)
        for key, events in self._selector.select(_REQUEST_S / 4 if waiting else None):
            if key.fileobj is self._wakee:
                return False
            if key.fileobj is self._listener:
                self._accept()
            else:
                self._serve(key.data, events)
        return True

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:  # gone already, or no file descriptors left
            logger.warning("a KV connection was not accepted: %s", error)
            return
        if sum(not connection.trusted for connection in self._connections) >= _MAX_STRANGERS:
            sock.close()
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection = _Connection(sock, self._token, self._rows, self._num_blocks)
        self._connections.add(connection)
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _serve(self, connection: _Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                connection.on_readable()
            if connection.answer:  # mostly the socket takes it at once
                connection.on_writable()
        except BlockingIOError:
            pass
        except (_Garbage, OSError) as error:
            self._drop(connection, str(error))
            return
        interest = selectors.EVENT_WRITE if connection.answer else selectors.EVENT_READ
        if self._selector.get_key(connection.sock).events != interest:
            self._selector.modify(connection.sock, interest, connection)

    def _drop_late(self) -> None:
        now = time.monotonic()
        for connection in list(self._connections):
            if connection.deadline is not None and connection.deadline <= now:
                self._drop(connection, "it stopped in the middle of a message")

    def _drop(self, connection: _Connection, reason: str) -> None:
        logger.debug("a KV connection is dropped: %s", reason)
        self._connections.discard(connection)
        self._selector.unregister(connection.sock)
        connection.sock.close()
