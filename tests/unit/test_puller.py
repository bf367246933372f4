"""The thread around an importer: events in order, no silent end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from kvtransfer.errors import TransportError
from kvtransfer.importer import Arrived, Event, Importer, PullAborted, PullFailed, Settled
from kvtransfer.layout import Stamp
from kvtransfer.puller import Puller
from kvtransfer.ticket import AgentCard, Ticket
from kvtransfer.transport import Completion, Part, Status

CARD = AgentCard("p-0", 5, b"layout", 64, "double", b"")
TICKET = Ticket(b"t" * 16, "p-0", 5, (3,), (2,), b"layout", 16, b"prefix")
PATIENCE_S = 20.0


class Memory:
    """Always holds what the ticket says."""

    num_blocks = 64
    span_bytes = 100

    def expect(self, *args: Any) -> None:
        pass

    def has(self, expected: None) -> bool:
        return False

    def trailers(self, blocks: Sequence[int]) -> list[Stamp]:
        return [Stamp(5, 2, 3) for _ in blocks]

    def staged_seals(self, blocks: Sequence[int]) -> list[Stamp]:
        return [Stamp(5, 2) for _ in blocks]

    def checksum(self, blocks: Sequence[int]) -> list[int]:
        return [0 for _ in blocks]


class Transport:
    """Reads that end at once, never, or in an error of our own."""

    name = "double"

    def __init__(self) -> None:
        self.hangs = False
        self.settles = True  # when it is given up
        self.breaks: Exception | None = None
        self.close_breaks: Exception | None = None
        self.closed = False
        self.forgotten: list[AgentCard] = []
        self._handle = 0
        self._ended: list[Completion] = []

    def register(self, region: object) -> bytes:
        return b""

    def connect(self, peer: AgentCard) -> None:
        if self.closed:
            raise TransportError("the transport is closed")

    def pull(self, peer: AgentCard, part: Part, blocks: Sequence[tuple[int, int]]) -> int:
        self._handle += 1
        if not self.hangs:
            self._ended.append(Completion(self._handle, Status.DONE))
        return self._handle

    def poll(self) -> list[Completion]:
        if self.breaks is not None:
            raise self.breaks
        ended, self._ended = self._ended, []
        return ended

    def moved(self, handle: int) -> int:
        return 0

    def abandon(self, handle: int) -> None:
        if self.settles:
            self._ended.append(Completion(handle, Status.FAILED, "given up"))

    def forget(self, peer: AgentCard) -> None:
        self.forgotten.append(peer)

    def close(self) -> None:
        self.closed = True
        if self.close_breaks is not None:
            raise self.close_breaks


class Rig:
    def __init__(self) -> None:
        self.transport = Transport()
        self.broken: Exception | None = None  # why no other transport can be built
        self.importer = Importer(Memory(), self.transport, build=self.build)
        self.events: queue.Queue[Event] = queue.Queue()
        self.broken_receiver = False
        self.now = 0.0
        self.puller = Puller(self.importer, self.receive, clock=lambda: self.now)

    def build(self, number: int) -> Transport:
        assert threading.current_thread().name == "kv-puller"
        assert self.transport.closed
        if self.broken is not None:
            raise self.broken
        self.transport = Transport()
        return self.transport

    def lose(self) -> None:
        """A pull that is given up and never settles, long ago."""
        self.transport.hangs, self.transport.settles = True, False
        self.pull(b"lost", deadline=10.0)
        self.now = 10.0
        event = self.next()
        assert isinstance(event, PullFailed)
        assert not event.settled

    def receive(self, events: list[Event]) -> None:
        for event in events:
            self.events.put(event)
        if self.broken_receiver:
            raise RuntimeError("the receiver is broken")

    def pull(self, key: bytes, deadline: float = 10.0) -> None:
        self.puller.pull(key, TICKET, CARD, [(0, 20)], deadline)

    def next(self) -> Event:
        return self.events.get(timeout=PATIENCE_S)


@contextmanager
def running() -> Iterator[Rig]:
    rig = Rig()
    try:
        yield rig
    finally:
        rig.puller.close()
        assert rig.transport.closed
        assert rig.events.empty()
        rig.importer.check_integrity()


def test_pulls_arrive_in_order() -> None:
    with running() as rig:
        for n in range(20):
            rig.pull(bytes([n]))
        assert [rig.next() for _ in range(20)] == [
            Arrived(bytes([n]), (20,), 100) for n in range(20)
        ]
        assert rig.puller.failure == ""


def test_an_abort_reaches_a_read_that_hangs() -> None:
    with running() as rig:
        rig.transport.hangs = True
        rig.pull(b"k")
        rig.puller.abort(b"k")
        assert rig.next() == PullAborted(b"k", (20,), settled=False)
        assert rig.next() == Settled(b"k", (20,))


def test_a_deadline_needs_no_command() -> None:
    with running() as rig:
        rig.transport.hangs = True
        rig.pull(b"k", deadline=10.0)
        rig.now = 10.0
        event = rig.next()
        assert isinstance(event, PullFailed)
        assert not event.settled
        assert rig.next() == Settled(b"k", (20,))


def test_a_peer_is_forgotten_in_turn() -> None:
    with running() as rig:
        rig.puller.forget(CARD)
        rig.pull(b"k")
        assert isinstance(rig.next(), Arrived)
        assert rig.transport.forgotten == [CARD]


def test_closing_fails_what_is_in_flight() -> None:
    rig = Rig()
    rig.transport.hangs = True
    rig.pull(b"k")
    rig.puller.close()
    assert rig.next() == PullFailed(b"k", (20,), "the KV puller was closed", settled=True)
    rig.puller.close()
    assert rig.events.empty()


@pytest.mark.parametrize("closes", [True, False])
def test_a_broken_transport_fails_everything_aloud(
    closes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig()
    rig.transport.hangs = True
    if not closes:
        rig.transport.close_breaks = RuntimeError("still broken")
    rig.pull(b"a")
    rig.transport.breaks = ZeroDivisionError("a bug")
    event = rig.next()
    assert isinstance(event, PullFailed)
    assert (event.key, event.settled) == (b"a", closes)
    assert "a bug" in event.reason
    assert "a bug" in rig.puller.failure
    assert "a bug" in caplog.text
    rig.transport.breaks = None
    rig.pull(b"b")  # a later pull is answered as well
    event = rig.next()
    assert isinstance(event, PullFailed)
    assert "closed" in event.reason
    rig.puller.close()


def test_a_broken_receiver_does_not_end_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.broken_receiver = True
    rig.pull(b"a")
    assert isinstance(rig.next(), Arrived)
    rig.pull(b"b")
    event = rig.next()
    assert isinstance(event, PullFailed)
    assert "the receiver is broken" in rig.puller.failure
    rig.broken_receiver = False
    rig.puller.close()


def test_a_transport_that_does_not_settle_is_replaced() -> None:
    with running() as rig:
        rig.lose()
        old = rig.transport
        rig.now = 70.0
        assert rig.next() == Settled(b"lost", (20,))
        assert old.closed
        rig.pull(b"k", deadline=80.0)  # over the new one
        assert rig.next() == Arrived(b"k", (20,), 100)
        assert rig.puller.rebuild_count == 1
        assert rig.puller.failure == ""


def test_a_transport_that_cannot_be_replaced_is_a_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig()
    rig.broken = TransportError("no device is left")
    rig.lose()
    rig.now = 70.0
    assert rig.next() == Settled(b"lost", (20,))  # the old one is closed all the same
    rig.pull(b"k", deadline=80.0)
    event = rig.next()
    assert isinstance(event, PullFailed)
    assert event.settled
    assert "no device is left" in rig.puller.failure
    assert "no device is left" in caplog.text
    rig.puller.close()
