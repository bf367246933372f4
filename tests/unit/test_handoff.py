"""Leases and pulls: every interleaving ends with nothing leased and one outcome per pull."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import count

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtransfer.errors import PeerGone, TransportError
from kvtransfer.exporter import Exporter
from kvtransfer.importer import Arrived, Event, Importer, PullAborted, PullFailed, Settled
from kvtransfer.layout import Stamp
from kvtransfer.ticket import AgentCard, Ticket, open_ticket
from kvtransfer.transport import Completion, Part, Status

EPOCH = 2**64 - 7
SECRET = b"a secret of the deployment"
LEASE_S = 30.0
CARD = AgentCard("p-0", EPOCH, b"layout", 64, "scripted", b"")


# --- doubles: a pool of plain Python, and a transport that does what the test says ---


class PlainMemory:
    """Stamps and data of a pool, as :class:`kvtransfer.region.Region` keeps them in tensors."""

    num_blocks = 64
    span_bytes = 100

    def __init__(self) -> None:
        self.data: dict[int, int] = {}
        self.stamps: dict[int, Stamp] = {}
        self.seals: dict[int, Stamp] = {}
        self.staging: dict[int, Stamp] = {}

    def write(self, block: int, generation: int, value: int, checksum: int = 0) -> None:
        self.data[block] = value
        self.stamps[block] = Stamp(EPOCH, generation, block, checksum)
        self.seals[block] = Stamp(EPOCH, generation)

    def open(self, block: int, generation: int) -> None:
        self.seals[block] = Stamp(EPOCH, generation)

    def clear(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.stamps[block] = self.staging[block] = Stamp(0, 0, 0)

    def trailers(self, blocks: Sequence[int]) -> list[Stamp]:
        return [self.stamps[block] for block in blocks]

    def staged_seals(self, blocks: Sequence[int]) -> list[Stamp]:
        return [self.staging[block] for block in blocks]

    def checksum(self, blocks: Sequence[int]) -> list[int]:
        return [self.data[block] for block in blocks]


class ScriptedTransport:
    """Reads happen when the test calls :meth:`finish`, in any order, and end as it says."""

    name = "scripted"

    def __init__(self, remote: PlainMemory, local: PlainMemory) -> None:
        self.remote, self.local = remote, local
        self.reads: dict[int, tuple[Part, list[tuple[int, int]]]] = {}
        self.completions: list[Completion] = []
        self.abandoned: list[int] = []
        self.forgotten: list[AgentCard] = []
        self.refuse: Exception | None = None
        self._handles = count(1)

    def register(self, region: object) -> bytes:
        return b""

    def connect(self, peer: AgentCard) -> None:
        pass

    def pull(self, peer: AgentCard, part: Part, blocks: Sequence[tuple[int, int]]) -> int:
        if self.refuse is not None:
            raise self.refuse
        handle = next(self._handles)
        self.reads[handle] = (part, list(blocks))
        return handle

    def finish(self, handle: int, status: Status = Status.DONE) -> None:
        part, blocks = self.reads.pop(handle)
        for theirs, ours in blocks:
            if part is Part.KV:
                self.local.data[ours] = self.remote.data[theirs]
                self.local.stamps[ours] = self.remote.stamps[theirs]
            else:
                self.local.staging[ours] = self.remote.seals[theirs]
        reason = "" if status is Status.DONE else "the peer disconnected"
        self.completions.append(Completion(handle, status, reason))

    def poll(self) -> list[Completion]:
        completions, self.completions = self.completions, []
        return completions

    def moved(self, handle: int) -> int:
        return 0

    def abandon(self, handle: int) -> None:
        self.abandoned.append(handle)

    def forget(self, peer: AgentCard) -> None:
        assert not self.reads
        self.forgotten.append(peer)

    def close(self) -> None:
        self.reads.clear()


def make_ticket(blocks: Sequence[tuple[int, int]]) -> Ticket:
    ids, generations = tuple(b for b, _ in blocks), tuple(g for _, g in blocks)
    return Ticket(b"t" * 16, "p-0", EPOCH, ids, generations, b"layout", 16 * len(ids), b"prefix")


class Pair:
    """A producer with four sealed blocks and a consumer that pulls them."""

    def __init__(self, checksums: bool = False) -> None:
        self.remote, self.local = PlainMemory(), PlainMemory()
        for block in (3, 4, 5, 6):
            self.remote.write(block, 2, value=1000 + block)
        self.transport = ScriptedTransport(self.remote, self.local)
        self.importer = Importer(self.local, self.transport, checksums)
        self.ticket = make_ticket([(3, 2), (4, 2), (5, 2), (6, 2)])

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
    assert pair.importer.poll(1e9) == []  # its deadline means nothing any more
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


# --- every interleaving ---

KEYS = [bytes([n]) for n in range(4)]


class HandOff(RuleBasedStateMachine):
    """One producer, one consumer, a slow network, and a request that may go away at any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.remote, self.local = PlainMemory(), PlainMemory()
        self.transport = ScriptedTransport(self.remote, self.local)
        self.importer = Importer(self.local, self.transport)
        self.exporter = make_exporter()
        self.generations = dict.fromkeys(range(8), 0)
        self.leased: dict[bytes, list[int]] = {}
        self.tickets: list[tuple[Ticket, dict[int, int]]] = []  # with the data that it names
        self.pulls: dict[bytes, dict[int, int]] = {}  # key → local block: data it must hold
        self.outcomes: dict[bytes, int] = {}
        self.unsettled: dict[bytes, tuple[int, ...]] = {}
        self.serial = count(1)

    # producer

    @rule(blocks=st.sets(st.integers(0, 7), min_size=1, max_size=3))
    def export(self, blocks: set[int]) -> None:
        free = blocks - {block for lease in self.leased.values() for block in lease}
        if not free:
            return
        pairs, data = [], {}
        for block in sorted(free):  # hand out, write, seal
            self.generations[block] += 2
            data[block] = next(self.serial)
            self.remote.write(block, self.generations[block], data[block])
            pairs.append((block, self.generations[block]))
        export = self.exporter.export("r-0", pairs, 16, b"", self.now)
        self.leased[export.ticket_id] = sorted(free)
        self.tickets.append((open_ticket(export.packed, SECRET), data))

    @rule(block=st.integers(0, 7))
    def reuse(self, block: int) -> None:
        if any(block in lease for lease in self.leased.values()):
            return
        self.generations[block] += 2
        self.remote.open(block, self.generations[block] - 1)
        self.remote.data[block] = next(self.serial)  # written, not sealed yet

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        ticket, _ = data.draw(st.sampled_from(self.tickets))
        assert self.exporter.release(ticket.ticket_id) == self.leased.pop(ticket.ticket_id, [])

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        ticket, _ = data.draw(st.sampled_from(self.tickets))
        gone = self.exporter.renew([ticket.ticket_id], self.now)
        assert bool(gone) == (ticket.ticket_id not in self.leased)

    @rule(seconds=st.sampled_from([0.5, 3.0, LEASE_S]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for blocks in self.exporter.expire(self.now):
            (ticket_id,) = (t for t, lease in self.leased.items() if lease == blocks)
            del self.leased[ticket_id]

    # consumer

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), key=st.sampled_from(KEYS), refuse=st.booleans())
    def start(self, data: st.DataObject, key: bytes, refuse: bool) -> None:
        if key in self.pulls or key in self.unsettled:
            return
        ticket, content = data.draw(st.sampled_from(self.tickets))
        base = 10 * KEYS.index(key)
        pairs = [(index, base + index) for index in range(len(ticket.block_ids))]
        self.transport.refuse = TransportError("refused") if refuse else None
        self.importer.start(key, ticket, CARD, pairs, self.now + 5.0)
        self.transport.refuse = None
        self.pulls[key] = {base + i: content[b] for i, b in enumerate(ticket.block_ids)}

    @rule(key=st.sampled_from(KEYS))
    def abort(self, key: bytes) -> None:
        self.importer.abort(key)

    @precondition(lambda self: self.transport.reads)
    @rule(data=st.data(), status=st.sampled_from([Status.DONE, Status.DONE, Status.FAILED]))
    def finish(self, data: st.DataObject, status: Status) -> None:
        self.transport.finish(data.draw(st.sampled_from(sorted(self.transport.reads))), status)

    @precondition(lambda self: self.transport.completions)
    @rule()
    def duplicate(self) -> None:
        self.transport.completions.append(self.transport.completions[0])

    @rule(handle=st.integers(10**6, 10**6 + 3))
    def late_completion(self, handle: int) -> None:
        self.transport.completions.append(Completion(handle, Status.DONE))

    @rule()
    def poll(self) -> None:
        for event in self.importer.poll(self.now):
            if isinstance(event, Settled):
                assert self.unsettled.pop(event.key) == event.blocks
                continue
            expected = self.pulls.pop(event.key)  # KeyError: a second outcome
            assert set(event.blocks) == set(expected)
            if isinstance(event, Arrived):  # never another prompt's data
                assert {block: self.local.data[block] for block in event.blocks} == expected
            elif not event.settled:
                self.unsettled[event.key] = event.blocks

    @invariant()
    def integrity(self) -> None:
        self.exporter.check_integrity()
        self.importer.check_integrity()
        assert self.exporter.num_leased == len(self.leased)

    def teardown(self) -> None:
        self.pass_time(LEASE_S)
        while self.transport.reads or self.transport.completions or self.pulls:
            for handle in list(self.transport.reads):
                self.transport.finish(handle)
            self.poll()
        assert not self.pulls
        assert not self.unsettled
        assert self.exporter.num_leased == 0
        assert self.importer.num_in_flight == self.importer.num_unsettled == 0


TestHandOff = HandOff.TestCase
TestHandOff.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
