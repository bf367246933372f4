"""Process groups of two, and the server that sends one pool's blocks through them.

The seam is a one-sided pull, NCCL and Gloo are two-sided. So a consumer asks over a control socket,
and the producer's end sends exactly the rows asked for, from a thread per consumer::

    consumer → producer  hello     8 bytes magic, 32 bytes token of the producer's card
    both ways            entries   u32, u32, key, value: the store by which the group is built
    consumer → producer  request   u8 part, u32 count, count x u32 block ids
    producer → consumer  answer    u8 OK, u64 length | u8 REFUSED, u64 length, a reason
    in the group         the rows, as one message

The store goes over the control socket, since a TCPStore is one more port and obeys anybody. Gloo's
own port cannot be avoided and asks nobody who he is (measured, torch 2.13). A stranger who comes
before the peer takes its place and gets what is sent: so each end first proves, inside of the
group, that it knows the token. Every visitor costs a file descriptor while the group lives, and
Gloo ends the process when there are none left: so the port goes deaf once the peer is there. What
remains is a millisecond per group in which a stranger who speaks Gloo can end the process: use it
in a closed network only. It is never chosen by itself. Linux only.

CUDA tensors travel by NCCL, on a stream of the group's own. That way is written but untested.
"""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import logging
import os
import secrets
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroupGloo, Work

from kvtransfer.errors import TransportError
from kvtransfer.region import Region
from kvtransfer.tcp_server import ANSWER, OK, PARTS, REFUSED, REQUEST
from kvtransfer.transport import Part

logger = logging.getLogger(__name__)

MAGIC = b"batonnc1"
PRODUCER, CONSUMER = 0, 1  # ranks
OPEN_S = 5.0  # each step of building a group
STALLED_S = 10.0  # one message, a few MiB

_HELLO_S = 2.0  # from accept to hello, and from the first to the last byte of a request
_MAX_STRANGERS = 64  # connections without a valid hello yet
_MAX_ENTRY_BYTES = 65536
_ENTRY = struct.Struct(">II")
_TAG, _NEVER = 0, 1  # nothing is ever sent with the second
_SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0)  # BPF: return 0 bytes of each packet


def receive(sock: socket.socket, num_bytes: int, within_s: float) -> bytes:
    """Exactly so many bytes; raises OSError when they do not come in time."""
    data = bytearray()
    deadline = time.monotonic() + within_s
    while len(data) < num_bytes:
        left = deadline - time.monotonic()
        try:
            if left <= 0:
                raise TimeoutError
            sock.settimeout(left)
            chunk = sock.recv(num_bytes - len(data))
        except TimeoutError:
            raise TimeoutError(f"the peer did not answer within {within_s:g} s") from None
        if not chunk:
            raise ConnectionError("the peer closed the connection")
        data += chunk
    return bytes(data)


def rows_of(region: Region, part: Part, staging: bool = False) -> Tensor:
    """The bytes of a part, a row per block; ``staging`` for seals that arrive."""
    if part is Part.KV:
        return region.spans
    return (region.staging if staging else region.seals).view(torch.uint8)


def own_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream beside the engine's, None on a CPU."""
    if device.type == "cpu":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class ControlStore(Store):
    """The rendezvous of two: what one sets is sent to the other. For the thread that builds."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self.entries: dict[str, bytes] = {}
        self._sock = sock

    def set(self, key: str, value: str | bytes) -> None:
        """Keep an entry and send it."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.entries[key] = data
        name = key.encode()
        self._sock.settimeout(OPEN_S)
        self._sock.sendall(_ENTRY.pack(len(name), len(data)) + name + data)

    def get(self, key: str) -> bytes:
        """Wait for an entry, which the peer sends without being asked."""
        while key not in self.entries:
            sizes = _ENTRY.unpack(receive(self._sock, _ENTRY.size, OPEN_S))
            if max(sizes) > _MAX_ENTRY_BYTES:
                raise ConnectionError(f"an entry of {sizes} bytes")
            name, data = (receive(self._sock, size, OPEN_S) for size in sizes)
            self.entries[name.decode()] = data
        return self.entries[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for all of them."""
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all are here already."""
        return all(key in self.entries for key in keys)


class Group:
    """One end of a process group of two. One thread uses it; any may :meth:`interrupt` it."""

    def __init__(self, sock: socket.socket, rank: int, device: torch.device) -> None:
        self.sock = sock  # the control socket, greeted
        self._rank = rank
        self._device = device
        self._stream: Any = own_stream(device)
        self._pg: Any = None
        self._store = ControlStore(sock)  # lives as long as C++ may call it

    def open(self, host: str, token: bytes) -> None:
        """Find together with the peer; raises OSError or RuntimeError. Blocks, with limits."""
        if self._stream is not None:
            from torch.distributed import ProcessGroupNCCL

            torch.cuda.set_device(self._device)
            nccl = ProcessGroupNCCL.Options()
            nccl._timeout = timedelta(seconds=STALLED_S)
            self._pg = ProcessGroupNCCL(self._store, self._rank, 2, nccl)
        else:
            gloo: Any = ProcessGroupGloo  # the stubs know another Options
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=host)]
            options._threads = 1
            options._timeout = timedelta(seconds=OPEN_S / 5)  # connecting may take 5 times as long
            self._pg = gloo(self._store, self._rank, 2, options)
            _go_deaf(self._store.entries[f"0/{self._rank}"])
        self._prove(token)

    def send(self, rows: Tensor, blocks: Sequence[int]) -> None:
        """Send copies of these rows, and see them taken."""
        if self._stream is None:  # by numpy: torch would copy with threads of its own
            piece = torch.from_numpy(rows.numpy().take(blocks, axis=0))
        else:
            with torch.cuda.stream(self._stream):
                piece = rows.index_select(0, torch.tensor(blocks, device=self._device))
        self._finish(lambda: self._pg.send([piece], 1 - self._rank, _TAG))

    def receive(self, into: Tensor) -> None:
        """Fill a tensor."""
        self._finish(lambda: self._pg.recv([into], 1 - self._rank, _TAG))

    def interrupt(self) -> None:
        """End what another thread waits for here."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        pg = self._pg
        if pg is None:
            return
        with contextlib.suppress(RuntimeError):
            if self._stream is not None:
                pg.abort()
            else:  # Gloo's abort wakes nobody, but one operation that is late ends all of them
                late = pg.recv([torch.empty(1, dtype=torch.uint8)], 1 - self._rank, _NEVER)
                late.wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """For the thread that uses it."""
        self.sock.close()
        self._pg = None

    def _finish(self, post: Callable[[], Work]) -> None:
        limit = timedelta(seconds=STALLED_S)
        if self._stream is None:
            post().wait(limit)
            return
        deadline = time.monotonic() + STALLED_S
        with torch.cuda.stream(self._stream):
            post().wait()  # the stream waits, not this thread
            event = self._stream.record_event()
        while not event.query():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the peer did not move within {limit}")
            time.sleep(0.0002)

    def _prove(self, token: bytes) -> None:
        """Show each other, inside of the group, that nobody else has taken the peer's place."""
        peer = 1 - self._rank
        own = secrets.token_bytes(32)
        self._store.set(f"nonce/{self._rank}", own)
        theirs = self._store.get(f"nonce/{peer}")
        given = hmac.digest(token, bytes([self._rank]) + theirs, "sha256")
        expected = hmac.digest(token, bytes([peer]) + own, "sha256")
        proof = torch.frombuffer(bytearray(given), dtype=torch.uint8).to(self._device).view(1, -1)
        found = torch.empty_like(proof)
        if self._rank == CONSUMER:
            self.send(proof, [0])
        self.receive(found)
        if not hmac.compare_digest(found.cpu().numpy().tobytes(), expected):
            raise ConnectionError("somebody else took the peer's place in the group")
        if self._rank == PRODUCER:
            self.send(proof, [0])


def _go_deaf(address: bytes) -> None:
    """Let nobody else connect to the listening socket whose address Gloo has published."""
    code = ctypes.create_string_buffer(_DROP_ALL)
    program = struct.pack("@HP", 1, ctypes.addressof(code))
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            number = os.dup(int(name))
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                os.close(number)
                continue
            with socket.socket(fileno=number) as sock:
                if _listens_at(sock, address):
                    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
                    return
    raise ConnectionError("Gloo's listening socket was not found: strangers could use it")


def _listens_at(sock: socket.socket, address: bytes) -> bool:
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        return False
    if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return False
    host, port = sock.getsockname()[:2]
    flow = bytes(4) if sock.family == socket.AF_INET6 else b""
    sockaddr = struct.pack("@H", sock.family) + struct.pack(">H", port) + flow
    return sockaddr + socket.inet_pton(sock.family, host) in address


class PoolServer:
    """A listening control socket, its thread, and a thread per consumer."""

    def __init__(self, region: Region, token: bytes, host: str) -> None:
        self._region = region
        self._token = token
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, 0), family=family, backlog=128)
        except OSError as error:
            raise TransportError(f"cannot listen for KV reads on {host}: {error}") from error
        self.host, self.port = self._listener.getsockname()[:2]
        self._strangers = threading.Semaphore(_MAX_STRANGERS)
        self._groups: dict[threading.Thread, Group] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="kv-nccl-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Drop all consumers and stop. Idempotent. Waits a second at most for its threads."""
        self._closing.set()
        with contextlib.suppress(OSError):  # shut already
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        with self._lock:
            groups = dict(self._groups)
        for group in groups.values():
            group.interrupt()
        end = time.monotonic() + 1.0
        for thread in groups:
            thread.join(max(0.0, end - time.monotonic()))

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if not self._closing.wait(0.1):  # no file descriptors left
                    logger.warning("a KV connection was not accepted: %s", error)
                continue
            if not self._strangers.acquire(blocking=False):
                sock.close()
                continue
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            group = Group(sock, PRODUCER, self._region.spans.device)
            name = "kv-nccl-serve"
            thread = threading.Thread(target=self._serve, args=(group,), name=name, daemon=True)
            with self._lock:
                self._groups[thread] = group
            thread.start()
        self._listener.close()

    def _serve(self, group: Group) -> None:
        """The thread of one consumer."""
        try:
            if not self._greet(group.sock):
                return
            group.open(self.host, self._token)
            while not self._closing.is_set():
                self._answer(group)
        except Exception as error:  # the thread's edge: whatever went wrong, this peer is dropped
            logger.debug("a KV consumer is dropped: %s", error)
        finally:
            group.close()
            with self._lock:
                del self._groups[threading.current_thread()]

    def _greet(self, sock: socket.socket) -> bool:
        try:
            hello = receive(sock, len(MAGIC) + len(self._token), _HELLO_S)
            return hmac.compare_digest(hello, MAGIC + self._token)
        finally:
            self._strangers.release()

    def _answer(self, group: Group) -> None:
        """One request."""
        sock = group.sock
        sock.settimeout(None)
        first = sock.recv(1)
        if not first:
            raise ConnectionError("closed by the peer")
        part, count = REQUEST.unpack(first + receive(sock, REQUEST.size - 1, _HELLO_S))
        num_blocks = self._region.num_blocks
        if part >= len(PARTS) or not 0 < count <= num_blocks:
            raise ConnectionError(f"a request for {count} rows of part {part}")
        blocks = struct.unpack(f">{count}I", receive(sock, 4 * count, _HELLO_S))
        outside = [block for block in blocks if block >= num_blocks]
        sock.settimeout(STALLED_S)
        if outside:
            reason = f"block {outside[0]} is outside of the pool of {num_blocks}".encode()
            sock.sendall(ANSWER.pack(REFUSED, len(reason)) + reason)
            return
        rows = rows_of(self._region, PARTS[part])
        sock.sendall(ANSWER.pack(OK, count * rows.shape[1]))
        group.send(rows, blocks)
