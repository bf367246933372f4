"""Blocks over plain sockets, for hosts without RDMA: from host memory to host memory.

The reading side; :mod:`kvtransfer.tcp_server` is the other one and describes the wire. Bytes go
from the socket right into the local spans. A read is ours to end: closing its socket settles it,
since nobody but :meth:`TcpTransport.poll` writes local memory. Knows no tickets and no deadlines.
"""

from __future__ import annotations

import errno
import secrets
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgpack

from kvtransfer.errors import TransportError
from kvtransfer.region import Region
from kvtransfer.tcp_server import (
    ANSWER,
    MAGIC,
    OK,
    PARTS,
    REQUEST,
    TOKEN_BYTES,
    Buffers,
    PoolServer,
    Rows,
)
from kvtransfer.ticket import AgentCard
from kvtransfer.transport import Completion, Part, Status, check_blocks, check_peer

_MAX_IDLE = 8  # open sockets kept per peer
_MAX_REASON_BYTES = 1024


class _Failed(Exception):
    """A read cannot go on."""


@dataclass
class _Peer:
    host: str
    port: int
    token: bytes
    idle: list[socket.socket] = field(default_factory=list)  # greeted, without a read


class _Read:
    """One request on its socket, and where its answer goes."""

    def __init__(
        self, peer: _Peer, sock: socket.socket, request: bytes, target: list[memoryview]
    ) -> None:
        self.peer = peer
        self.sock = sock
        self.received = 0  # bytes
        self._request = Buffers([memoryview(request)])
        self._head = bytearray(ANSWER.size)
        self._head_buffers = Buffers([memoryview(self._head)])
        self._num_bytes = sum(len(area) for area in target)
        self._target = Buffers(target)
        self._refusal: bytearray | None = None

    def step(self) -> bool:
        """Move what the socket allows; True at the end of the answer. Raises _Failed."""
        try:
            while self._request:
                self._request.advance(self.sock.sendmsg(self._request.head()))
            while self._head_buffers:
                self._receive(self._head_buffers)
                if not self._head_buffers:
                    self._on_head()
            while self._target:
                self._receive(self._target)
        except BlockingIOError:
            return False
        except OSError as error:
            raise _Failed(str(error)) from error
        if self._refusal is not None:
            raise _Failed("the peer refused: " + self._refusal.decode(errors="replace"))
        return True

    def _receive(self, buffers: Buffers) -> None:
        num_bytes = self.sock.recvmsg_into(buffers.head())[0]
        if num_bytes == 0:
            raise _Failed("the peer closed the connection")
        self.received += num_bytes
        buffers.advance(num_bytes)

    def _on_head(self) -> None:
        outcome, length = ANSWER.unpack(self._head)
        if outcome != OK and length <= _MAX_REASON_BYTES:
            self._refusal = bytearray(length)
            self._target = Buffers([memoryview(self._refusal)] if length else [])
        elif outcome != OK or length != self._num_bytes:
            raise _Failed(f"the peer answered {length} bytes instead of {self._num_bytes}")


class TcpTransport:
    """Serves the own pool in a thread, reads others' without blocking."""

    name = "tcp"

    def __init__(self, host: str = "127.0.0.1") -> None:
        """``host``: the address of this host at which its peers reach it."""
        self._host = host
        self._server: PoolServer | None = None
        self._region: Region | None = None
        self._rows: Rows | None = None
        self._peers: dict[tuple[str, int], _Peer] = {}
        self._reads: dict[int, _Read] = {}
        self._ended: list[Completion] = []
        self._next_handle = 0

    def register(self, region: Region) -> bytes:
        """Listen for readers of the pool; the metadata is the address and a random token."""
        if self._host in ("0.0.0.0", "::", ""):
            raise TransportError(
                f"peers cannot connect to {self._host!r}: give the address of this host at which "
                "other workers reach it"
            )
        token = secrets.token_bytes(TOKEN_BYTES)
        self._region, self._rows = region, Rows(region)
        self._server = PoolServer(region, token, self._host)
        fields = {"host": self._server.host, "port": self._server.port, "token": token}
        metadata: bytes = msgpack.packb(fields)
        return metadata

    def connect(self, peer: AgentCard) -> None:
        """Note the peer's address; sockets are opened by its reads."""
        key = (peer.worker_id, peer.epoch)
        if key in self._peers:
            return
        if self._region is None:
            raise TransportError("the tcp transport is closed, or has no pool registered")
        check_peer(self.name, self._region, peer)
        try:
            fields = msgpack.unpackb(peer.metadata)
            found = _Peer(str(fields["host"]), int(fields["port"]), bytes(fields["token"]))
        except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
            raise TransportError(f"the tcp card of {peer.worker_id} is malformed") from error
        self._peers[key] = found

    def pull(self, peer: AgentCard, part: Part, blocks: Sequence[tuple[int, int]]) -> int:
        """Send a request, over a new socket unless an idle one is left."""
        known = self._peers.get((peer.worker_id, peer.epoch))
        if known is None or self._region is None or self._rows is None:
            raise TransportError(f"{peer.worker_id} is not connected over tcp")
        check_blocks(blocks, peer.num_blocks, self._region.num_blocks)
        request = REQUEST.pack(PARTS.index(part), len(blocks))
        request += struct.pack(f">{len(blocks)}I", *(remote for remote, _ in blocks))
        sock = _take_idle(known)
        if sock is None:
            sock = _open_socket(known, peer.worker_id)
            request = MAGIC + known.token + request
        self._next_handle += 1
        target = self._rows.target(part, [local for _, local in blocks])
        self._reads[self._next_handle] = _Read(known, sock, request, target)
        self._step(self._next_handle)
        return self._next_handle

    def poll(self) -> list[Completion]:
        """Read what has come for each."""
        for handle in list(self._reads):
            self._step(handle)
        ended, self._ended = self._ended, []
        return ended

    def moved(self, handle: int) -> int:
        """Bytes that have come."""
        read = self._reads.get(handle)
        return read.received if read else 0  # 0: over, and about to be reported

    def abandon(self, handle: int) -> None:
        """Close the socket of a read: nothing of it can land any more."""
        if handle in self._reads:
            self._end(handle, "given up")

    def forget(self, peer: AgentCard) -> None:
        """Close the idle sockets to a peer."""
        key = (peer.worker_id, peer.epoch)
        known = self._peers.get(key)
        if known is None:
            return
        if any(read.peer is known for read in self._reads.values()):
            raise TransportError(f"{peer.worker_id} has reads in flight")
        del self._peers[key]
        for sock in known.idle:
            sock.close()

    def close(self) -> None:
        """Close every socket and stop the server."""
        for read in self._reads.values():
            read.sock.close()
        for known in self._peers.values():
            for sock in known.idle:
                sock.close()
        self._reads.clear()
        self._peers.clear()
        self._region = None
        if self._server is not None:
            self._server.close()

    def _step(self, handle: int) -> None:
        read = self._reads[handle]
        try:
            done = read.step()
        except _Failed as error:
            self._end(handle, str(error))
            return
        if done:
            del self._reads[handle]
            self._ended.append(Completion(handle, Status.DONE))
            if len(read.peer.idle) < _MAX_IDLE:
                read.peer.idle.append(read.sock)
            else:
                read.sock.close()

    def _end(self, handle: int, reason: str) -> None:
        read = self._reads.pop(handle)
        read.sock.close()
        address = f"{read.peer.host}:{read.peer.port}"
        reason = f"the tcp read from {address} failed: {reason}"
        self._ended.append(Completion(handle, Status.FAILED, reason))


def _take_idle(peer: _Peer) -> socket.socket | None:
    """A greeted socket that the peer has not closed meanwhile."""
    while peer.idle:
        sock = peer.idle.pop()
        try:
            sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return sock
        except OSError:
            pass
        sock.close()  # closed by the peer, or it sent what nobody asked for
    return None


def _open_socket(peer: _Peer, worker_id: str) -> socket.socket:
    """A socket that is about to connect; a refusal shows at the first send."""
    sock = socket.socket(socket.AF_INET6 if ":" in peer.host else socket.AF_INET)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = sock.connect_ex((peer.host, peer.port))
    except OSError as error:
        sock.close()
        raise TransportError(f"cannot connect to {worker_id}: {error}") from error
    if code not in (0, errno.EINPROGRESS):
        sock.close()
        raise TransportError(f"cannot connect to {worker_id}: {errno.errorcode.get(code, code)}")
    return sock
