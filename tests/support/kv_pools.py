"""Pools that hand blocks to each other: producers, here or in their own processes, and consumers.

Run as a module, this is the host of producers: a process that has loaded torch once and forks one
for each request, since a start of its own takes seconds. A producer obeys a JSON command per line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from kvtransfer.exporter import Exporter
from kvtransfer.faults import Faults
from kvtransfer.importer import Event, Importer
from kvtransfer.layout import KVLayout
from kvtransfer.region import Region
from kvtransfer.ticket import AgentCard, Ticket
from kvtransfer.transport import Transport
from kvtransfer.transports import open_transport
from kvtransfer.ucx import UcxOptions

SECRET = b"of this test"
LAYOUT = KVLayout("w", 30, 3, 64, "rope", 16, "float32")  # the default model's: 720 KiB a block
NUM_BLOCKS = 160
PATIENCE_S = 60.0


def open_way(
    way: str, worker_id: str, epoch: int, build: int = 0, faults: Faults | None = None
) -> Transport:
    """A transport by its name, or NIXL over plain sockets: only there bytes can arrive late."""
    name, _, ucx_tls = way.partition("-")
    ucx = UcxOptions(ucx_tls or "auto")
    return open_transport(name, worker_id, epoch, ucx=ucx, build=build, faults=faults)


# --- the producer ---


def content(seed: int, block: int) -> np.ndarray[Any, Any]:
    """The KV bytes of a block."""
    words = LAYOUT.kv_bytes // 8
    return np.random.default_rng([seed, block]).integers(0, 2**63, words).view(np.uint8)


class Producer:
    """A pool that is written, sealed, exported and reused as the test says."""

    def __init__(self, transport: str, worker_id: str) -> None:
        self.epoch = secrets.randbits(64) | 1
        self.region = Region(LAYOUT, NUM_BLOCKS)
        self.transport = open_way(transport, worker_id, self.epoch)
        self.card = AgentCard(
            worker_id,
            self.epoch,
            LAYOUT.fingerprint(),
            NUM_BLOCKS,
            self.transport.name,
            self.transport.register(self.region),
        )
        self._exporter = Exporter(worker_id, self.epoch, LAYOUT.fingerprint(), SECRET, 30.0)

    def export(self, blocks: Sequence[tuple[int, int]], seed: int) -> bytes:
        """Write and seal ``(block, even generation)`` pairs; returns the packed ticket."""
        self.write([block for block, _ in blocks], seed)
        self.region.seal(self.epoch, blocks, checksums=True)
        return self._exporter.export("r", blocks, 16 * len(blocks), b"", 0.0).packed

    def reuse(self, blocks: Sequence[tuple[int, int]], seed: int) -> None:
        """Hand out the blocks again, with odd generations, and write them."""
        self.region.open(self.epoch, blocks)
        self.write([block for block, _ in blocks], seed)

    def write(self, blocks: Sequence[int], seed: int) -> None:
        spans = self.region.spans.numpy()
        for block in blocks:
            spans[block, : LAYOUT.kv_bytes] = content(seed, block)

    def close(self) -> None:
        self.transport.close()


class RemoteProducer:
    """The same, in a process of its own."""

    def __init__(self, transport: str, worker_id: str) -> None:
        self.pid, self._sock = host().fork(transport, worker_id)
        self._process = os.pidfd_open(self.pid)
        self._answers = self._sock.makefile("rb")
        fields = self._answer()
        metadata = bytes.fromhex(fields.pop("metadata"))
        fingerprint = bytes.fromhex(fields.pop("fingerprint"))
        self.card = AgentCard(**fields, metadata=metadata, fingerprint=fingerprint)

    def export(self, blocks: Sequence[tuple[int, int]], seed: int) -> bytes:
        return bytes.fromhex(self._call("export", blocks, seed))

    def reuse(self, blocks: Sequence[tuple[int, int]], seed: int) -> None:
        self._call("reuse", blocks, seed)

    def close_transport(self) -> None:
        self._call("close", [], 0)

    def signal(self, number: int) -> None:
        """Nothing when it has ended. After SIGSTOP each of its threads stands still."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, number)
        end = time.monotonic() + PATIENCE_S
        while number == signal.SIGSTOP and not self._stands_still():
            assert time.monotonic() < end

    def _stands_still(self) -> bool:
        stats = Path(f"/proc/{self.pid}/task").glob("*/stat")
        return all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in stats)

    def ended(self, timeout_s: float) -> bool:
        """Wait for the end of the process; whether it came."""
        return bool(select.select([self._process], [], [], timeout_s)[0])

    def close(self) -> None:
        if self._process < 0:
            return
        self.signal(signal.SIGKILL)
        assert self.ended(PATIENCE_S)
        self._answers.close()
        self._sock.close()
        os.close(self._process)
        self._process = -1

    def _call(self, what: str, blocks: Sequence[tuple[int, int]], seed: int) -> Any:
        self._sock.sendall(json.dumps([what, list(blocks), seed]).encode() + b"\n")
        return self._answer()

    def _answer(self) -> Any:
        ready, _, _ = select.select([self._sock], [], [], PATIENCE_S)
        assert ready, "the producer does not answer"
        line = self._answers.readline()
        assert line, "the producer has died"
        return json.loads(line)


def produce(sock: socket.socket, transport: str, worker_id: str) -> None:
    """The producer's process."""

    def answer(value: object) -> None:
        sock.sendall(json.dumps(value).encode() + b"\n")

    producer = Producer(transport, worker_id)
    card = dataclasses.asdict(producer.card)
    answer(card | {name: card[name].hex() for name in ("metadata", "fingerprint")})
    for line in sock.makefile("rb"):
        what, blocks, seed = json.loads(line)
        pairs = [(block, generation) for block, generation in blocks]
        if what == "export":
            answer(producer.export(pairs, seed).hex())
        elif what == "reuse":
            producer.reuse(pairs, seed)
            answer(None)
        else:
            producer.close()
            answer(None)
    producer.close()


class Host:
    """The process from which producers are forked."""

    def __init__(self) -> None:
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=Path(__file__).parents[2],
            )

    def fork(self, transport: str, worker_id: str) -> tuple[int, socket.socket]:
        """A new producer: its process, and the socket to it."""
        ours, theirs = socket.socketpair()
        with theirs:
            request = json.dumps([transport, worker_id]).encode()
            socket.send_fds(self._sock, [request], [theirs.fileno()])
        return json.loads(self._sock.recv(100)), ours

    def close(self) -> None:
        """Producers that still run go on."""
        self._sock.close()
        self.process.wait(PATIENCE_S)


@lru_cache(maxsize=1)
def host() -> Host:
    """The one host of this process; who uses it closes it: :func:`close_host`."""
    return Host()


def close_host() -> None:
    """End the host, if there is one."""
    if host.cache_info().currsize:
        host().close()
        host.cache_clear()


def serve_forks(sock: socket.socket) -> None:
    """The host's process: fork a producer per request, until the socket ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody here waits for them
    while True:
        request, fds, _, _ = socket.recv_fds(sock, 1000, 1)
        if not request:
            return
        pid = os.fork()
        if pid == 0:
            sock.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            produce(socket.socket(fileno=fds[0]), *json.loads(request))
            return
        os.close(fds[0])
        sock.send(json.dumps(pid).encode())


AnyProducer = Producer | RemoteProducer


def start_producer(transport: str) -> AnyProducer:
    worker_id = f"p-{secrets.token_hex(4)}"
    return (
        Producer(transport, worker_id)
        if transport == "memory"
        else (RemoteProducer(transport, worker_id))
    )


# --- the consumer ---


class Consumer:
    """A pool, its transport, and an importer that the test drives itself."""

    def __init__(self, way: str, faults: Faults | None = None, **times: float) -> None:
        self.region = Region(LAYOUT, NUM_BLOCKS)
        self._way = (way, f"d-{secrets.token_hex(4)}", secrets.randbits(64) | 1)
        self._faults = faults
        first = self.build(0)
        self.importer = Importer(self.region, first, checksums=True, build=self.build, **times)

    @property
    def transport(self) -> Transport:
        return self.importer.transport

    def build(self, number: int) -> Transport:
        transport = open_way(*self._way, number, self._faults)
        transport.register(self.region)
        return transport

    def start(
        self,
        ticket: Ticket,
        card: AgentCard,
        pairs: Sequence[tuple[int, int]],
        key: bytes = b"k",
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.importer.start(key, ticket, card, pairs, time.monotonic() + patience_s)

    def events(self, count: int) -> list[Event]:
        """Poll until ``count`` events are there."""
        events: list[Event] = []
        end = time.monotonic() + PATIENCE_S + 10
        while len(events) < count:
            assert time.monotonic() < end, f"only {events}"
            events += self.importer.poll(time.monotonic())
        assert len(events) == count
        self.importer.check_integrity()
        return events

    def holds(self, local: int, seed: int, remote: int) -> bool:
        found = self.region.spans[local, : LAYOUT.kv_bytes].numpy()
        return bool((found == content(seed, remote)).all())


if __name__ == "__main__":
    serve_forks(socket.socket(fileno=int(sys.argv[1])))
