"""Blocks over torch.distributed: NCCL between GPUs, Gloo between CPUs.

The reading side; :mod:`kvtransfer.nccl_server` is the other one and describes the wire. Each peer
that is read from has one group of two and one thread, its link, which receives pieces of a few MiB
into tensors of its own; only :meth:`NcclTransport.poll` copies them into spans and staging. So a
read that is given up is settled at once, whatever Gloo still has in flight. A peer that does not
move within ten seconds loses its link, with all reads of it; the next read makes a new one. Knows
no tickets and no deadlines. NCCL is untested, and needs the two workers on different GPUs.
"""

from __future__ import annotations

import queue
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgpack
import torch
from torch import Tensor

from kvtransfer.errors import TransportError
from kvtransfer.nccl_server import (
    CONSUMER,
    MAGIC,
    OPEN_S,
    STALLED_S,
    Group,
    PoolServer,
    own_stream,
    receive,
    rows_of,
)
from kvtransfer.region import Region
from kvtransfer.tcp_server import ANSWER, OK, PARTS, REFUSED, REQUEST, TOKEN_BYTES
from kvtransfer.ticket import AgentCard
from kvtransfer.transport import Completion, Part, Status, check_blocks, check_peer

_PIECE_BYTES = 4 << 20
_WINDOW = 2  # pieces per link that are received and not yet copied
_MAX_REASON_BYTES = 1024


@dataclass
class _Peer:
    host: str
    port: int
    token: bytes
    link: _Link | None = None


@dataclass(eq=False)
class _Read:
    """Written by the transport's thread, but for its link's progress."""

    handle: int
    link: _Link
    part: Part
    blocks: list[tuple[int, int]]
    num_placed: int = 0
    given_up: bool = False


@dataclass(frozen=True)
class _News:
    """From a link: rows of a read, its refusal, or (no read) the link's end."""

    link: _Link
    read: _Read | None
    rows: Tensor | None = None
    reason: str = ""


class _Link:
    """The thread and the group behind one peer. Reads are served in turn."""

    def __init__(self, peer: _Peer, host: str, region: Region, news: deque[_News]) -> None:
        self.address = f"{peer.host}:{peer.port}"
        self.ended = False
        self.num_bytes = 0  # received
        self.window = threading.Semaphore(_WINDOW)  # released by who has copied a piece
        self.reads: queue.SimpleQueue[_Read | None] = queue.SimpleQueue()
        self._peer = peer
        self._host = host
        self._device = region.spans.device
        self._row_bytes = {part: rows_of(region, part).shape[1] for part in Part}
        self._news = news
        self._stopping = False
        self._group: Group | None = None
        self._thread = threading.Thread(target=self._run, name="kv-nccl-link", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End soon. What it still receives is thrown away."""
        self._stopping = True
        self.reads.put(None)
        self.window.release()
        if self._group is not None:
            self._group.interrupt()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread; one that builds a group with a peer that hangs ends later."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        reason = "the link was closed"
        try:
            self._serve()
        except Exception as error:  # the thread's edge: all reads of the link hear of it
            reason = _short(error)
        finally:
            if self._group is not None:
                self._group.close()
            self.ended = True
            self._news.append(_News(self, None, None, reason))

    def _serve(self) -> None:
        sock = socket.create_connection((self._peer.host, self._peer.port), OPEN_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._group = group = Group(sock, CONSUMER, self._device)
        if self._stopping:  # before there was a group to interrupt
            return
        sock.sendall(MAGIC + self._peer.token)
        group.open(self._host, self._peer.token)
        while not self._stopping and (read := self.reads.get()) is not None:
            step = max(1, _PIECE_BYTES // self._row_bytes[read.part])
            for start in range(0, len(read.blocks), step):
                if not self._fetch(group, read, start, step):
                    break

    def _fetch(self, group: Group, read: _Read, start: int, step: int) -> bool:
        """One piece; False when there is no use for the next."""
        self.window.acquire()
        if read.given_up or self._stopping:
            self.window.release()
            return False
        remote = [block for block, _ in read.blocks[start : start + step]]
        group.sock.settimeout(STALLED_S)
        head = REQUEST.pack(PARTS.index(read.part), len(remote))
        group.sock.sendall(head + struct.pack(f">{len(remote)}I", *remote))
        outcome, length = ANSWER.unpack(receive(group.sock, ANSWER.size, STALLED_S))
        if outcome == REFUSED and length <= _MAX_REASON_BYTES:
            refusal = receive(group.sock, length, STALLED_S).decode(errors="replace")
            self.window.release()
            self._news.append(_News(self, read, None, f"the peer refused: {refusal}"))
            return False
        row_bytes = self._row_bytes[read.part]
        if outcome != OK or length != len(remote) * row_bytes:
            raise ConnectionError(f"{length} bytes were answered for {len(remote)} blocks")
        rows = torch.empty((len(remote), row_bytes), dtype=torch.uint8, device=self._device)
        group.receive(rows)
        self.num_bytes += length
        self._news.append(_News(self, read, rows))
        return True


def _short(error: Exception) -> str:
    """The first line of an error, without the place in Gloo's source that it begins with."""
    line = (str(error) or type(error).__name__).splitlines()[0]
    return line.partition("] ")[2] or line if line.startswith("[/") else line


class NcclTransport:
    """Serves the own pool and reads others' with threads that it never waits for."""

    name = "nccl"

    def __init__(self, host: str = "127.0.0.1") -> None:
        """``host``: the address of this host at which its peers reach it."""
        self._host = host
        self._server: PoolServer | None = None
        self._region: Region | None = None
        self._stream: torch.cuda.Stream | None = None
        self._peers: dict[tuple[str, int], _Peer] = {}
        self._links: set[_Link] = set()  # whose end is not known yet
        self._reads: dict[int, _Read] = {}
        self._news: deque[_News] = deque()
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
        self._stream = own_stream(region.spans.device)
        self._server = PoolServer(region, token, self._host)
        self._region = region
        fields = {"host": self._server.host, "port": self._server.port, "token": token}
        metadata: bytes = msgpack.packb(fields | {"device": region.spans.device.type})
        return metadata

    def connect(self, peer: AgentCard) -> None:
        """Note the peer's address; its link is made by the first read."""
        key = (peer.worker_id, peer.epoch)
        if key in self._peers:
            return
        if self._region is None:
            raise TransportError("the nccl transport is closed, or has no pool registered")
        check_peer(self.name, self._region, peer)
        try:
            fields = msgpack.unpackb(peer.metadata)
            found = _Peer(str(fields["host"]), int(fields["port"]), bytes(fields["token"]))
            device = fields["device"]
        except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
            raise TransportError(f"the nccl card of {peer.worker_id} is malformed") from error
        own = self._region.spans.device.type
        if device != own:
            raise TransportError(f"the pool of {peer.worker_id} is on {device}, ours on {own}")
        self._peers[key] = found

    def pull(self, peer: AgentCard, part: Part, blocks: Sequence[tuple[int, int]]) -> int:
        """Queue a read on the peer's link; a new one unless the last is alive."""
        known = self._peers.get((peer.worker_id, peer.epoch))
        if known is None or self._region is None:
            raise TransportError(f"{peer.worker_id} is not connected over nccl")
        check_blocks(blocks, peer.num_blocks, self._region.num_blocks)
        link = known.link
        if link is None or link.ended:
            link = known.link = _Link(known, self._host, self._region, self._news)
            self._links.add(link)
        self._next_handle += 1
        read = _Read(self._next_handle, link, part, list(blocks))
        self._reads[read.handle] = read
        link.reads.put(read)
        return read.handle

    def poll(self) -> list[Completion]:
        """Copy what the links have received, and hear which of them have ended."""
        while self._news:
            self._hear(self._news.popleft())
        ended, self._ended = self._ended, []
        return ended

    def moved(self, handle: int) -> int:
        """Bytes that its link has received."""
        read = self._reads.get(handle)
        return read.link.num_bytes if read else 0

    def abandon(self, handle: int) -> None:
        """Nothing of it is copied any more."""
        if handle in self._reads:
            self._fail(self._reads[handle], "given up")

    def forget(self, peer: AgentCard) -> None:
        """End the peer's link."""
        key = (peer.worker_id, peer.epoch)
        known = self._peers.get(key)
        if known is None:
            return
        if known.link is not None:
            if self._is_read(known.link):
                raise TransportError(f"{peer.worker_id} has reads in flight")
            known.link.stop()
        del self._peers[key]

    def close(self) -> None:
        """End links and server; waits a second at most for each kind of their threads."""
        self._region = None
        self._reads.clear()
        self._peers.clear()
        for link in self._links:
            link.stop()
        end = time.monotonic() + 1.0
        for link in self._links:
            link.join(max(0.0, end - time.monotonic()))
        self._links.clear()
        self._news.clear()
        if self._server is not None:
            self._server.close()

    def _is_read(self, link: _Link) -> bool:
        return any(read.link is link for read in self._reads.values())

    def _hear(self, news: _News) -> None:
        if news.read is None:
            self._links.discard(news.link)
            for read in [r for r in self._reads.values() if r.link is news.link]:
                self._fail(read, news.reason)
            return
        known = news.read.handle in self._reads
        if news.rows is None:
            if known:
                self._fail(news.read, news.reason)
            return
        if known:
            self._place(news.read, news.rows)
        news.link.window.release()

    def _place(self, read: _Read, rows: Tensor) -> None:
        assert self._region is not None
        pairs = read.blocks[read.num_placed : read.num_placed + len(rows)]
        local = [block for _, block in pairs]
        target = rows_of(self._region, read.part, staging=True)
        if self._stream is None:  # by numpy: torch would copy with threads of its own
            target.numpy()[local] = rows.numpy()
        else:
            with torch.cuda.stream(self._stream):
                target.index_copy_(0, torch.tensor(local, device=target.device), rows)
            self._stream.synchronize()
        read.num_placed += len(local)
        if read.num_placed == len(read.blocks):
            del self._reads[read.handle]
            self._ended.append(Completion(read.handle, Status.DONE))

    def _fail(self, read: _Read, reason: str) -> None:
        del self._reads[read.handle]
        read.given_up = True
        reason = f"the nccl read from {read.link.address} failed: {reason}"
        self._ended.append(Completion(read.handle, Status.FAILED, reason))
