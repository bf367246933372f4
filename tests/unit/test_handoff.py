"""Leases and pulls, transition by transition."""

from __future__ import annotations

import dataclasses
from itertools import count

import pytest

from kvtransfer.errors import PeerGone, TransportError
from kvtransfer.exporter import Exporter
from kvtransfer.importer import Arrived, Event, Importer, PullAborted, PullFailed, Settled
from kvtransfer.layout import Stamp
from kvtransfer.pull_events import Cause, PullTimes
from kvtransfer.ticket import open_ticket
from kvtransfer.transport import Completion, Status, Transport
from tests.support.scripted_transport import (
    CARD,
    EPOCH,
    PlainMemory,
    ScriptedTransport,
    make_ticket,
)

SECRET = b"a secret of the deployment"
LEASE_S = 30.0


class Pair:
    """A producer with four sealed blocks and a consumer that pulls them."""

    def __init__(self, checksums: bool = False, broken: Exception | None = None) -> None:
        self.remote, self.local = PlainMemory(), PlainMemory()
        self.broken = broken  # why no other transport can be built
        self.refuse_next: Exception | None = None  # what the next one says to every pull
        for block in (3, 4, 5, 6):
            self.remote.write(block, 2, value=1000 + block)
        self.transport = ScriptedTransport(self.remote, self.local)
        self.importer = Importer(
            self.local, self.transport, checksums, stall_s=5.0, build=self.build, settle_s=60.0
        )
        self.ticket = make_ticket([(3, 2), (4, 2), (5, 2), (6, 2)])

    def build(self, number: int) -> Transport:
        assert self.transport.closed, "two transports at once"
        if self.broken is not None:
            raise self.broken
        self.transport = ScriptedTransport(self.remote, self.local)
        self.transport.refuse = self.refuse_next
        self.built = number
        return self.transport

    def start(self, key: bytes = b"k", deadline: float = 10.0) -> None:
        self.importer.start(key, self.ticket, CARD, [(1, 20), (3, 21)], deadline)

    def finish(self, status: Status = Status.DONE) -> None:
        (handle,) = self.transport.reads
        self.transport.finish(handle, status)

    def run(self) -> list[Event]:
        self.start()
        self.finish()
        assert self.importer.poll(0.0) == []
        self.finish()
        return self.importer.poll(0.0)

    def done(self) -> None:
        assert self.importer.num_in_flight == self.importer.num_unsettled == 0
        self.importer.check_integrity()


# --- exporter ---


def make_exporter() -> Exporter:
    ids = count()
    return Exporter(
        "p-0", EPOCH, b"layout", SECRET, LEASE_S, new_id=lambda n: next(ids).to_bytes(n, "big")
    )


def test_an_export_is_a_signed_ticket() -> None:
    export = make_exporter().export("r-0", [(3, 2), (9, 40)], 20, b"prefix", now=0.0)
    ticket = open_ticket(export.packed, SECRET)
    assert ticket.ticket_id == export.ticket_id
    assert (ticket.worker_id, ticket.epoch) == ("p-0", EPOCH)
    assert (ticket.block_ids, ticket.generations) == ((3, 9), (2, 40))
    assert (ticket.num_tokens, ticket.prefix) == (20, b"prefix")
    assert export.lease_s == LEASE_S


def test_an_unsealed_block_is_never_exported() -> None:
    with pytest.raises(AssertionError):
        make_exporter().export("r-0", [(3, 3)], 16, b"", now=0.0)


def test_release_gives_the_blocks_back_once() -> None:
    exporter = make_exporter()
    export = exporter.export("r-0", [(3, 2), (9, 4)], 20, b"", now=0.0)
    assert exporter.release(b"unknown") == []
    assert exporter.release(export.ticket_id) == [3, 9]
    assert exporter.release(export.ticket_id) == []
    assert exporter.expire(1e9) == []
    assert (exporter.num_leased, exporter.released_count, exporter.expired_count) == (0, 1, 0)
    exporter.check_integrity()


def test_a_lease_ends_by_the_clock_of_its_producer() -> None:
    exporter = make_exporter()
    exporter.export("r-0", [(3, 2)], 16, b"", now=0.0)
    late = exporter.export("r-0", [(4, 2)], 16, b"", now=5.0)
    assert exporter.next_expiry() == LEASE_S
    assert exporter.expire(LEASE_S - 0.001) == []
    assert exporter.expire(LEASE_S) == [[3]]
    assert exporter.expired_count == 1
    assert exporter.next_expiry() == 5.0 + LEASE_S
    assert exporter.release(late.ticket_id) == [4]
    assert exporter.next_expiry() is None


def test_a_renewal_extends_but_never_revives() -> None:
    exporter = make_exporter()
    ticket_id = exporter.export("r-0", [(3, 2)], 16, b"", now=0.0).ticket_id
    assert exporter.renew([ticket_id, b"unknown"], now=20.0) == [b"unknown"]
    assert exporter.expire(LEASE_S) == []
    # Over, though nobody has collected it yet.
    assert exporter.renew([ticket_id], now=20.0 + LEASE_S) == [ticket_id]
    assert exporter.expire(20.0 + LEASE_S) == [[3]]
    assert exporter.renew([ticket_id], now=20.0 + LEASE_S) == [ticket_id]
    assert exporter.release(ticket_id) == []


def test_a_router_that_comes_back_keeps_what_it_wants() -> None:
    exporter = make_exporter()
    kept, dropped, foreign = (
        exporter.export(owner, [(block, 2)], 16, b"", now=0.0).ticket_id
        for owner, block in (("r-0", 3), ("r-0", 4), ("r-1", 5))
    )
    assert exporter.release_unwanted("r-0", {kept}) == [[4]]
    assert exporter.renew([kept, dropped, foreign], now=1.0) == [dropped]


# --- importer ---


def test_a_pull_that_arrives() -> None:
    pair = Pair()
    assert pair.run() == [Arrived(b"k", (20, 21), 200)]
    assert pair.local.data == {20: 1004, 21: 1006}
    pair.done()


def test_a_pull_says_how_long_its_phases_took() -> None:
    """Post included: over shared memory the copy runs inside it."""
    pair, now = Pair(), [100.0]
    pair.importer = Importer(pair.local, pair.transport, clock=lambda: now[0])
    connect = pair.transport.connect

    def slowly(peer: object) -> None:
        connect(CARD)
        now[0] += 2.0

    pair.transport.connect = slowly  # type: ignore[method-assign]
    pair.importer.start(b"k", pair.ticket, CARD, [(1, 20)], 1000.0, asked=99.0)
    now[0] += 4.0
    pair.finish()
    assert pair.importer.poll(0.0) == []
    now[0] += 0.5
    pair.finish()
    (event,) = pair.importer.poll(0.0)
    assert isinstance(event, Arrived)
    assert event.times == PullTimes(queue_s=1.0, wire_s=6.0, seals_s=0.5)
    assert event.times.total_s == 7.5


def test_nothing_to_pull_arrives_at_once() -> None:
    pair = Pair()
    pair.transport.refuse = TransportError("must not be asked")
    pair.importer.start(b"k", pair.ticket, CARD, [], 10.0)
    assert pair.importer.poll(0.0) == [Arrived(b"k", (), 0)]
    pair.done()


@pytest.mark.parametrize("error", [TransportError("no device"), PeerGone("it has gone")])
def test_a_transport_that_refuses(error: TransportError) -> None:
    pair = Pair()
    pair.transport.refuse = error
    pair.start()
    assert pair.importer.poll(0.0) == [PullFailed(b"k", (20, 21), str(error), settled=True)]
    pair.done()


def test_a_transport_that_refuses_the_second_read() -> None:
    pair = Pair()
    pair.start()
    pair.finish()
    pair.transport.refuse = PeerGone("it has gone")
    assert pair.importer.poll(0.0) == [PullFailed(b"k", (20, 21), "it has gone", settled=True)]
    pair.done()


@pytest.mark.parametrize("reads_before", [0, 1])
def test_a_read_that_fails(reads_before: int) -> None:
    pair = Pair()
    pair.start()
    for _ in range(reads_before):
        pair.finish()
        assert pair.importer.poll(0.0) == []
    pair.finish(Status.FAILED)
    assert pair.importer.poll(0.0) == [
        PullFailed(b"k", (20, 21), "the peer disconnected", settled=True)
    ]
    pair.done()


@pytest.mark.parametrize(
    ("field", "value"), [("worker_id", "p-1"), ("epoch", 8), ("fingerprint", b"other")]
)
def test_a_card_that_is_not_the_producers(field: str, value: object) -> None:
    pair = Pair()
    card = dataclasses.replace(CARD, **{field: value})
    pair.importer.start(b"k", pair.ticket, card, [(0, 20)], 10.0)
    (event,) = pair.importer.poll(0.0)
    assert isinstance(event, PullFailed)
    assert event.settled
    assert field in event.reason
    assert not pair.transport.reads


def test_more_blocks_than_the_ticket_has() -> None:
    pair = Pair()
    pair.importer.start(b"k", pair.ticket, CARD, [(4, 20)], 10.0)
    (event,) = pair.importer.poll(0.0)
    assert isinstance(event, PullFailed)
    assert "4 blocks" in event.reason


def failed_reason(pair: Pair) -> str:
    (event,) = pair.run()
    assert isinstance(event, PullFailed)
    assert event.settled
    pair.done()
    return event.reason


def test_a_block_in_another_generation_is_refused() -> None:
    pair = Pair()
    pair.remote.write(4, 4, value=7)
    assert "block 4 of p-0 is not the ticket's" in failed_reason(pair)


def test_another_block_is_refused() -> None:
    pair = Pair()
    pair.remote.stamps[4] = Stamp(EPOCH, 2, block_id=5)
    assert "is not the ticket's" in failed_reason(pair)


def test_another_incarnation_is_refused() -> None:
    pair = Pair()
    pair.remote.stamps[4] = Stamp(EPOCH - 1, 2, 4)
    assert "is not the ticket's" in failed_reason(pair)


def test_a_block_that_was_opened_for_another_prompt_is_refused() -> None:
    pair = Pair()
    pair.remote.open(6, 3)  # its trailer is still the old one: only the seal tells
    assert "block 6 of p-0 was reused" in failed_reason(pair)


def test_a_read_that_said_done_but_moved_nothing_is_refused() -> None:
    pair = Pair()
    pair.local.write(20, 2, value=1)  # what an earlier pull left must not pass for an arrival
    pair.start()
    (handle,) = pair.transport.reads
    del pair.transport.reads[handle]
    pair.transport.completions.append(Completion(handle, Status.DONE))
    pair.importer.poll(0.0)
    pair.finish()
    (event,) = pair.importer.poll(0.0)
    assert isinstance(event, PullFailed)


def test_checksums_are_compared_when_they_are_on() -> None:
    for checksums, damaged in ((True, True), (False, True), (True, False)):
        pair = Pair(checksums)
        pair.remote.write(4, 2, value=1004 + damaged, checksum=1004)
        (event,) = pair.run()
        assert isinstance(event, PullFailed if checksums and damaged else Arrived)


@pytest.mark.parametrize("reads_before", [0, 1])
@pytest.mark.parametrize("status", list(Status))
def test_an_abort_leaves_the_blocks_in_quarantine(reads_before: int, status: Status) -> None:
    pair = Pair()
    pair.start()
    for _ in range(reads_before):
        pair.finish()
        pair.importer.poll(0.0)
    (handle,) = pair.transport.reads
    pair.importer.abort(b"k")
    pair.importer.abort(b"k")
    assert pair.importer.poll(0.0) == [PullAborted(b"k", (20, 21), settled=False)]
    assert pair.transport.abandoned == [handle]
    assert (pair.importer.num_in_flight, pair.importer.num_unsettled) == (0, 1)
    assert pair.importer.poll(50.0) == []  # its deadline means nothing any more
    pair.finish(status)
    assert pair.importer.poll(0.0) == [Settled(b"k", (20, 21))]
    assert not pair.transport.reads  # the seals are not read for nobody
    pair.done()


def test_a_deadline_fails_the_pull_but_does_not_settle_it() -> None:
    pair = Pair()
    pair.start(deadline=10.0)
    assert pair.importer.poll(9.9) == []
    (event,) = pair.importer.poll(10.0)
    assert isinstance(event, PullFailed)
    assert not event.settled
    assert "deadline" in event.reason
    pair.finish()
    assert pair.importer.poll(11.0) == [Settled(b"k", (20, 21))]
    pair.done()


def test_what_arrived_by_the_deadline_has_arrived() -> None:
    pair = Pair()
    pair.start(deadline=10.0)
    pair.finish()
    pair.importer.poll(9.0)
    pair.finish()
    assert pair.importer.poll(10.0) == [Arrived(b"k", (20, 21), 200)]


def test_completions_that_nobody_waits_for_are_counted() -> None:
    pair = Pair()
    pair.start()
    (handle,) = pair.transport.reads
    pair.transport.completions.append(Completion(999, Status.DONE))
    pair.finish()
    pair.transport.completions.append(Completion(handle, Status.DONE))
    assert pair.importer.poll(0.0) == []
    assert pair.importer.stray_count == 2
    pair.finish()
    assert pair.importer.poll(0.0) == [Arrived(b"k", (20, 21), 200)]
    pair.importer.abort(b"k")
    pair.importer.abort(b"never started")
    assert pair.importer.poll(0.0) == []


def test_a_peer_is_forgotten_once_its_reads_are_settled() -> None:
    pair = Pair()
    pair.start()
    pair.importer.forget(CARD)
    pair.importer.abort(b"k")
    pair.importer.poll(0.0)
    assert not pair.transport.forgotten
    pair.finish()
    pair.importer.poll(0.0)
    assert pair.transport.forgotten == [CARD]


@pytest.mark.parametrize("settled", [True, False])
def test_the_end_of_a_transport_fails_everything(settled: bool) -> None:
    pair = Pair()
    pair.start(b"live")
    pair.start(b"draining")
    pair.importer.abort(b"draining")
    pair.importer.poll(0.0)
    expected: list[Event] = [PullFailed(b"live", (20, 21), "closed", settled)]
    if settled:
        expected.append(Settled(b"draining", (20, 21)))
    assert pair.importer.end("closed", settled) == expected
    pair.done()


# --- parts ---


def test_a_part_is_pulled_by_its_own_indices() -> None:
    pair = Pair()
    part = make_ticket([(5, 2), (6, 2)], first_block=2)
    pair.importer.start(b"k", part, CARD, [(0, 30), (1, 31)], 10.0)
    pair.finish()
    assert pair.importer.poll(0.0) == []
    pair.finish()
    assert pair.importer.poll(0.0) == [Arrived(b"k", (30, 31), 200)]
    assert pair.local.data == {30: 1005, 31: 1006}
    pair.importer.start(b"k", part, CARD, [(2, 32)], 10.0)
    (event,) = pair.importer.poll(0.0)
    assert isinstance(event, PullFailed)
    assert "2 blocks" in event.reason
    pair.done()


def test_a_part_in_another_generation_is_refused() -> None:
    pair = Pair()
    pair.ticket = make_ticket([(3, 2), (4, 4), (5, 2), (6, 2)], first_block=7)
    assert "block 4 of p-0 is not the ticket's" in failed_reason(pair)


# --- pulls that make no progress ---


@pytest.mark.parametrize("reads_before", [0, 1])
def test_a_pull_that_makes_no_progress_ends(reads_before: int) -> None:
    """B038: the request's deadline is far, but nothing arrives."""
    pair = Pair()
    pair.start(deadline=1000.0)
    for _ in range(reads_before):
        pair.finish()
    for now in (0.0, 4.9):
        assert pair.importer.poll(now) == []
    (event,) = pair.importer.poll(5.0)
    assert isinstance(event, PullFailed)
    assert not event.settled
    assert "nothing arrived for 5 s" in event.reason
    assert event.cause is Cause.STALLED
    assert pair.importer.poll(64.0) == []  # not settled, whatever the clock says
    pair.finish()
    assert pair.importer.poll(64.0) == [Settled(b"k", (20, 21))]
    pair.done()


def test_a_slow_pull_is_left_alone() -> None:
    pair = Pair()
    pair.start(deadline=1000.0)
    (handle,) = pair.transport.reads
    for step in range(4):  # both blocks, data and trailers
        assert pair.importer.poll(4.0 * step) == []
        pair.transport.land(handle, 0)
    pair.transport.end(handle, Status.DONE)
    assert pair.importer.poll(16.0) == []
    pair.finish()
    assert pair.importer.poll(16.0) == [Arrived(b"k", (20, 21), 200)]


def test_one_of_several_pieces_that_is_lost_ends_the_pull() -> None:
    pair = Pair()
    pair.start(deadline=1000.0)
    (handle,) = pair.transport.reads
    for _ in range(3):
        pair.transport.land(handle, 0)
    assert pair.importer.poll(0.0) == []
    (event,) = pair.importer.poll(5.0)
    assert isinstance(event, PullFailed)


# --- a transport that does not settle ---


class Losing(Pair):
    """A pair with a read that was given up at 2.0 and never settles."""

    def __init__(self, broken: Exception | None = None) -> None:
        super().__init__(broken=broken)
        self.start(b"lost", deadline=2.0)
        assert len(self.importer.poll(2.0)) == 1
        (self.lost,) = self.transport.reads
        self.first = self.transport

    def begin(self, key: bytes, local: int, deadline: float = 1000.0) -> None:
        self.importer.start(key, self.ticket, CARD, [(0, local)], deadline)

    def begin_moving(self) -> int:
        """A pull that makes progress when the transport should be replaced; its read."""
        assert self.importer.poll(61.0) == []
        self.begin(b"moves", 22)
        assert self.importer.poll(62.0) == []
        assert not self.first.closed
        (moving,) = set(self.transport.reads) - {self.lost}
        return moving


def test_a_read_that_never_settles_ends_with_its_transport() -> None:
    pair = Losing()
    assert pair.importer.poll(61.9) == []
    assert pair.importer.poll(62.0) == [Settled(b"lost", (20, 21))]
    assert (pair.importer.rebuild_count, pair.built) == (1, 1)
    assert pair.first.closed
    assert pair.run() == [Arrived(b"k", (20, 21), 200)]  # over the new one
    pair.done()


def test_what_moves_ends_before_its_transport_does() -> None:
    pair = Losing()
    moving = pair.begin_moving()
    for key, local, deadline in ((b"next", 23, 1000.0), (b"late", 24, 63.0), (b"gone", 25, 99.0)):
        pair.begin(key, local, deadline)
    assert set(pair.transport.reads) == {pair.lost, moving}  # nothing is posted any more
    pair.importer.abort(b"gone")
    pair.first.finish(moving)
    assert pair.importer.poll(63.0) == [
        PullAborted(b"gone", (25,), settled=True),
        PullFailed(
            b"late",
            (24,),
            "the pull's deadline passed with the kv not asked for",
            settled=True,
            cause=Cause.EXPIRED,
        ),
    ]
    (seals,) = set(pair.transport.reads) - {pair.lost}  # but what is in flight goes on to its end
    pair.first.finish(seals)
    assert pair.importer.poll(63.0) == [
        Arrived(b"moves", (22,), 100),
        Settled(b"lost", (20, 21)),
    ]
    assert pair.first.closed
    pair.finish()
    assert pair.importer.poll(63.0) == []
    pair.finish()
    assert pair.importer.poll(63.0) == [Arrived(b"next", (23,), 100)]
    pair.done()


def test_what_was_given_up_but_moves_ends_before_its_transport_does() -> None:
    pair = Losing()
    moving = pair.begin_moving()
    pair.importer.abort(b"moves")
    assert pair.importer.poll(62.5) == [PullAborted(b"moves", (22,), settled=False)]
    for now in (63.0, 63.9):
        pair.first.land(moving, 0)
        assert pair.importer.poll(now) == []
    assert pair.importer.poll(64.8) == []
    events = pair.importer.poll(64.9)  # a second without anything
    assert set(events) == {Settled(b"lost", (20, 21)), Settled(b"moves", (22,))}
    pair.done()


def test_a_transport_that_settles_after_all_stays() -> None:
    pair = Losing()
    moving = pair.begin_moving()
    pair.begin(b"next", 23)
    pair.first.finish(pair.lost)
    assert pair.importer.poll(62.5) == [Settled(b"lost", (20, 21))]
    assert pair.importer.rebuild_count == 0
    (posted,) = set(pair.transport.reads) - {moving}
    for handle in (moving, posted):
        pair.first.finish(handle)
    assert pair.importer.poll(62.5) == []
    for handle in list(pair.first.reads):
        pair.first.finish(handle)
    assert len(pair.importer.poll(62.5)) == 2
    pair.done()


def test_reads_given_up_do_not_hold_more_than_a_quarter_of_the_pool() -> None:
    pair = Pair()  # 64 blocks
    for start in (0, 4, 8, 12):
        pairs = [(index, start + index) for index in range(4)]
        pair.importer.start(bytes([start]), pair.ticket, CARD, pairs, 1.0)
    assert len(pair.importer.poll(1.0)) == 4
    assert pair.importer.poll(10.0) == []  # 16 of 64 is not more
    pair.importer.start(b"one more", pair.ticket, CARD, [(0, 20)], 11.0)
    assert len(pair.importer.poll(11.0)) == 1
    assert pair.importer.poll(11.9) == []  # a slow one has a second to settle by itself
    events = pair.importer.poll(12.0)
    assert [type(event) for event in events] == [Settled] * 5
    assert pair.importer.rebuild_count == 1
    pair.done()


def test_a_peer_that_should_be_forgotten_is_unknown_after_a_rebuild() -> None:
    pair = Pair()
    pair.start(deadline=1.0)
    pair.importer.forget(CARD)
    pair.importer.poll(1.0)
    old = pair.transport
    assert pair.importer.poll(61.0) == [Settled(b"k", (20, 21))]
    assert old.forgotten == pair.transport.forgotten == []
    pair.done()


def test_a_transport_that_cannot_be_replaced_ends_everything() -> None:
    pair = Losing(broken=TransportError("no device"))
    moving = pair.begin_moving()
    pair.begin(b"waits", 23)
    pair.first.finish(moving, Status.FAILED)
    with pytest.raises(TransportError, match="no device"):
        pair.importer.poll(63.0)
    assert pair.importer.end("no device", settled=True) == [
        PullFailed(b"moves", (22,), "the peer disconnected", settled=True),
        Settled(b"lost", (20, 21)),
        PullFailed(b"waits", (23,), "no device", settled=True),
    ]
    pair.done()


def test_a_pull_that_cannot_start_in_the_new_transport_fails() -> None:
    pair = Losing()
    moving = pair.begin_moving()
    pair.begin(b"waits", 23)
    pair.refuse_next = PeerGone("it has gone")
    pair.first.finish(moving, Status.FAILED)
    assert pair.importer.poll(63.0)[1:] == [
        Settled(b"lost", (20, 21)),
        PullFailed(b"waits", (23,), "it has gone", settled=True),
    ]
    pair.done()


def test_what_waits_when_everything_ends_was_never_in_flight() -> None:
    pair = Losing()
    pair.begin_moving()
    pair.begin(b"waits", 23)
    events = pair.importer.end("broken", settled=False)
    assert set(events) == {
        PullFailed(b"moves", (22,), "broken", settled=False),
        PullFailed(b"waits", (23,), "broken", settled=True),
    }
