"""One suite for every transport; but for memory the producer is a process of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import signal
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

import msgpack
import psutil
import pytest
import torch

from kvtransfer import nccl_server
from kvtransfer.errors import TransportError
from kvtransfer.faults import KINDS, FaultPlan, Faults
from kvtransfer.importer import Arrived, Event, PullAborted, PullFailed, Settled
from kvtransfer.layout import Stamp
from kvtransfer.puller import Puller
from kvtransfer.region import Region
from kvtransfer.tcp_server import MAGIC, REQUEST, TOKEN_BYTES
from kvtransfer.ticket import AgentCard, Ticket, open_ticket
from kvtransfer.transport import Completion, Part, Status
from kvtransfer.transports import open_transport
from kvtransfer.ucx import UcxOptions
from tests.support.kv_pools import (
    LAYOUT,
    NUM_BLOCKS,
    PATIENCE_S,
    SECRET,
    AnyProducer,
    Consumer,
    Producer,
    RemoteProducer,
    close_host,
    start_producer,
)
from tests.support.shared_memory import shared_memory

TRANSPORTS = ["memory", "tcp", "nixl", "nixl-tcp", "nccl"]


@pytest.fixture(scope="module", autouse=True)
def producers_host() -> Iterator[None]:
    yield
    close_host()


@pytest.fixture(scope="module", params=TRANSPORTS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def producer(name: str) -> Iterator[AnyProducer]:
    producer = start_producer(name)
    yield producer
    producer.close()


@pytest.fixture(scope="module")
def shared_consumer(name: str) -> Iterator[Consumer]:
    consumer = Consumer(name)
    yield consumer
    consumer.transport.close()


@pytest.fixture
def consumer(shared_consumer: Consumer) -> Iterator[Consumer]:
    yield shared_consumer
    assert shared_consumer.importer.num_in_flight == 0
    assert shared_consumer.importer.num_unsettled == 0


def export(producer: AnyProducer, blocks: Sequence[tuple[int, int]], seed: int) -> Ticket:
    return open_ticket(producer.export(blocks, seed), SECRET)


def failure(consumer: Consumer) -> PullFailed:
    (event,) = consumer.events(1)
    assert isinstance(event, PullFailed)
    assert event.settled
    return event


def test_blocks_arrive_byte_for_byte(name: str, producer: AnyProducer, consumer: Consumer) -> None:
    if isinstance(producer, RemoteProducer):
        assert producer.pid != os.getpid()
    assert producer.card.transport == consumer.transport.name == name.partition("-")[0]
    ticket = export(producer, [(7, 2), (159, 4), (0, 6), (8, 2)], seed=1)
    before = consumer.region.spans.clone()
    consumer.start(ticket, producer.card, [(0, 11), (1, 0), (3, 159)])
    assert consumer.events(1) == [Arrived(b"k", (11, 0, 159), 3 * LAYOUT.span_bytes)]
    assert consumer.holds(11, 1, remote=7)
    assert consumer.holds(0, 1, remote=159)
    assert consumer.holds(159, 1, remote=8)
    touched = (consumer.region.spans != before).any(dim=1).nonzero().flatten().tolist()
    assert touched == [0, 11, 159]


def test_the_zeroed_block_is_not_taken_for_the_old_one(
    producer: AnyProducer, consumer: Consumer
) -> None:
    ticket = export(producer, [(3, 2)], seed=2)
    for _ in range(2):  # again into the same block: its stamps are not those of the first time
        consumer.region.spans[20, : LAYOUT.kv_bytes] = 0
        consumer.start(ticket, producer.card, [(0, 20)])
        assert isinstance(consumer.events(1)[0], Arrived)
        assert consumer.holds(20, 2, remote=3)


def test_another_generation_is_refused(producer: AnyProducer, consumer: Consumer) -> None:
    ticket = export(producer, [(3, 8), (4, 8)], seed=3)
    wrong = dataclasses.replace(ticket, generations=(8, 6))
    consumer.start(wrong, producer.card, [(0, 20), (1, 21)])
    assert "block 4" in failure(consumer).reason


def test_a_block_reused_since_the_ticket_is_refused(
    producer: AnyProducer, consumer: Consumer
) -> None:
    ticket = export(producer, [(3, 10), (4, 10)], seed=4)
    producer.reuse([(4, 11)], seed=5)
    consumer.start(ticket, producer.card, [(0, 20), (1, 21)])
    assert "block 4" in failure(consumer).reason
    export(producer, [(4, 12)], seed=5)
    consumer.start(ticket, producer.card, [(0, 20), (1, 21)])
    assert "block 4" in failure(consumer).reason
    consumer.start(ticket, producer.card, [(0, 20)])  # the other is as good as it was
    assert isinstance(consumer.events(1)[0], Arrived)


def test_a_block_reused_during_the_pull_is_refused(
    producer: AnyProducer, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = export(producer, [(3, 20), (4, 20)], seed=6)
    pull = consumer.transport.pull

    def pull_late(peer: AgentCard, part: Part, blocks: Sequence[tuple[int, int]]) -> int:
        if part is Part.SEALS:  # the data is here, and good; its owner reuses the block just now
            producer.reuse([(3, 21)], seed=7)
        return pull(peer, part, blocks)

    monkeypatch.setattr(consumer.transport, "pull", pull_late)
    consumer.start(ticket, producer.card, [(0, 20), (1, 21)])
    assert "block 3" in failure(consumer).reason


def test_damage_on_the_way_is_noticed(
    producer: AnyProducer, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = export(producer, [(3, 30)], seed=8)
    staged_seals = consumer.region.staged_seals

    def damage(blocks: Sequence[int]) -> list[Stamp]:  # called when all bytes are here
        consumer.region.spans[20, 1234] ^= 1
        return staged_seals(blocks)

    monkeypatch.setattr(consumer.region, "staged_seals", damage)
    consumer.start(ticket, producer.card, [(0, 20)])
    assert "checksum" in failure(consumer).reason


def test_a_block_outside_of_the_pool_is_refused(producer: AnyProducer, consumer: Consumer) -> None:
    ticket = export(producer, [(3, 40)], seed=9)
    outside = dataclasses.replace(ticket, block_ids=(NUM_BLOCKS,))
    consumer.start(outside, producer.card, [(0, 20)])
    assert "outside" in failure(consumer).reason
    consumer.start(ticket, producer.card, [(0, NUM_BLOCKS - 1)])
    assert isinstance(consumer.events(1)[0], Arrived)


def test_a_card_that_promises_too_many_blocks(name: str, producer: AnyProducer) -> None:
    consumer = Consumer(name)
    try:
        ticket = export(producer, [(3, 50)], seed=9)
        outside = dataclasses.replace(ticket, block_ids=(NUM_BLOCKS + 5,))
        card = dataclasses.replace(producer.card, num_blocks=10 * NUM_BLOCKS)
        consumer.start(outside, card, [(0, 20)])
        failure(consumer)
    finally:
        consumer.transport.close()
    test_ticket = export(producer, [(3, 52)], seed=9)  # the producer lives
    assert test_ticket.generations == (52,)


def test_another_transports_card_is_refused(producer: AnyProducer, consumer: Consumer) -> None:
    ticket = export(producer, [(3, 60)], seed=9)
    other = dataclasses.replace(producer.card, transport="pigeon", epoch=ticket.epoch + 1)
    consumer.start(dataclasses.replace(ticket, epoch=other.epoch), other, [(0, 20)])
    assert "pigeon" in failure(consumer).reason


def test_another_layout_is_refused(producer: AnyProducer, consumer: Consumer) -> None:
    ticket = export(producer, [(3, 62)], seed=9)
    other = dataclasses.replace(producer.card, fingerprint=b"x" * 16, epoch=ticket.epoch + 1)
    ticket = dataclasses.replace(ticket, epoch=other.epoch, fingerprint=other.fingerprint)
    consumer.start(ticket, other, [(0, 20)])
    assert "layout" in failure(consumer).reason


@pytest.mark.parametrize("metadata", [b"", b"\xc1", b"\x80", b"\xa3abc", bytes(99)])
def test_a_malformed_card_is_refused(
    metadata: bytes, producer: AnyProducer, consumer: Consumer
) -> None:
    ticket = export(producer, [(3, 64)], seed=9)
    other = dataclasses.replace(producer.card, metadata=metadata, epoch=ticket.epoch + 1)
    consumer.start(dataclasses.replace(ticket, epoch=other.epoch), other, [(0, 20)])
    failure(consumer)


def test_two_pulls_at_once(producer: AnyProducer, consumer: Consumer) -> None:
    tickets = [
        export(producer, [(block, 70) for block in range(base, base + 20)], seed=base)
        for base in (10, 50)
    ]
    for index, ticket in enumerate(tickets):
        pairs = [(i, 60 + 20 * index + i) for i in range(20)]
        consumer.start(ticket, producer.card, pairs, key=bytes([index]))
    assert consumer.importer.num_in_flight == 2
    assert {type(event) for event in consumer.events(2)} == {Arrived}
    for i in range(20):
        assert consumer.holds(60 + i, 10, remote=10 + i)
        assert consumer.holds(80 + i, 50, remote=50 + i)


def test_many_blocks(
    name: str,
    producer: AnyProducer,
    consumer: Consumer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    remote = [(37 * i) % NUM_BLOCKS for i in range(NUM_BLOCKS)]  # nothing contiguous
    ticket = export(producer, [(block, 80) for block in remote], seed=10)
    pairs = [(i, i) for i in range(NUM_BLOCKS)]
    rates = []
    for _ in range(3):
        begin = time.perf_counter()
        consumer.start(ticket, producer.card, pairs)
        (event,) = consumer.events(1)
        seconds = time.perf_counter() - begin
        assert isinstance(event, Arrived)
        rates.append(event.num_bytes / seconds / 2**30)
    for local, block in enumerate(remote):
        assert consumer.holds(local, 10, remote=block)
    with capsys.disabled():
        print(
            f"\n{name}: {event.num_bytes / 2**20:.0f} MiB in {NUM_BLOCKS} blocks, with both reads, "
            f"stamps and checksums: {', '.join(f'{rate:.2f}' for rate in rates)} GiB/s"
        )


def test_an_abort_in_flight_is_settled_later(producer: AnyProducer, consumer: Consumer) -> None:
    ticket = export(producer, [(block, 90) for block in range(40)], seed=11)
    pairs = [(i, 100 + i) for i in range(40)]
    consumer.start(ticket, producer.card, pairs)
    consumer.importer.abort(b"k")
    blocks = tuple(range(100, 140))
    assert consumer.events(2) == [PullAborted(b"k", blocks, settled=False), Settled(b"k", blocks)]
    consumer.region.spans[100:140] = 0
    assert consumer.importer.poll(time.monotonic()) == []
    assert not consumer.region.spans[100:140].any()  # nothing lands after Settled
    consumer.start(ticket, producer.card, pairs)  # and the peer is not harmed
    assert isinstance(consumer.events(1)[0], Arrived)
    assert consumer.holds(139, 11, remote=39)


def test_a_forgotten_peer_can_come_back(producer: AnyProducer, consumer: Consumer) -> None:
    ticket = export(producer, [(3, 92)], seed=12)
    consumer.transport.connect(producer.card)
    handle = consumer.transport.pull(producer.card, Part.KV, [(3, 20)])
    completions: list[Completion] = []
    while not completions:
        completions = consumer.transport.poll()
    assert [(c.handle, c.status) for c in completions] == [(handle, Status.DONE)]
    for _ in range(3):
        consumer.importer.forget(producer.card)
        consumer.importer.poll(time.monotonic())
        consumer.start(ticket, producer.card, [(0, 20)])
        assert isinstance(consumer.events(1)[0], Arrived)
    consumer.transport.abandon(handle)  # reported long ago
    assert consumer.transport.poll() == []


def test_an_unconnected_peer_is_an_error(name: str, producer: AnyProducer) -> None:
    consumer = Consumer(name)
    consumer.transport.close()
    with pytest.raises(TransportError):
        consumer.transport.pull(producer.card, Part.KV, [(3, 20)])
    with pytest.raises(TransportError, match="closed"):
        consumer.transport.connect(producer.card)
    consumer.transport.close()


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("connected", [False, True])
def test_a_producer_that_has_gone_fails_the_pull(
    name: str, crash: bool, connected: bool, consumer: Consumer
) -> None:
    producer = start_producer(name)
    ticket = export(producer, [(3, 2)], seed=13)
    if connected:
        consumer.start(ticket, producer.card, [(0, 20)])
        assert isinstance(consumer.events(1)[0], Arrived)
    if crash or isinstance(producer, Producer):
        producer.close()
    else:
        producer.close_transport()
    begin = time.monotonic()
    consumer.start(ticket, producer.card, [(0, 20)])
    assert "deadline" not in failure(consumer).reason
    assert time.monotonic() - begin < 20
    consumer.importer.forget(producer.card)
    assert consumer.importer.poll(time.monotonic()) == []
    producer.close()


def test_a_producer_killed_during_pulls(name: str, consumer: Consumer) -> None:
    producer = start_producer(name)
    ticket = export(producer, [(block, 2) for block in range(80)], seed=14)
    for index in range(4):
        key = bytes([index])
        consumer.start(ticket, producer.card, [(i, 80 + i) for i in range(80)], key)
        if index == 1:
            producer.close()
    events = consumer.events(4)
    assert sorted(event.key for event in events) == [bytes([index]) for index in range(4)]
    assert all(isinstance(event, Arrived | PullFailed) for event in events)
    assert isinstance(next(event for event in events if event.key == b"\3"), PullFailed)
    assert all(event.settled for event in events if isinstance(event, PullFailed))


def kept() -> set[str]:
    """What this process has mapped or open beyond its own files: memory and sockets of peers."""
    with open("/proc/self/maps") as maps:
        lines = [line.split(maxsplit=5) for line in maps]
    mapped = {words[0] for words in lines if len(words) > 5 and is_shared(words[5])}
    fds = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            fds.add(os.readlink(f"/proc/self/fd/{fd}"))
    return mapped | {fd for fd in fds if fd.startswith("socket:") or is_shared(fd)}


def is_shared(path: str) -> bool:
    return any(mark in path for mark in ("/dev/shm", "memfd", "SYSV", "/proc/"))


@pytest.mark.parametrize("settles", [True, False])
def test_nothing_of_a_dead_producer_is_kept(
    name: str, settles: bool, producer: AnyProducer
) -> None:
    """B041: neither memory nor sockets, once it is forgotten, whether or not a pull noticed."""
    if name == "memory":
        pytest.skip("a pool of this process has no process that can die")
    consumer = Consumer(name)
    shared_before = shared_memory()
    try:
        # What the first peer of all brings with it stays.
        consumer.start(export(producer, [(3, 2)], seed=22), producer.card, [(0, 20)])
        assert isinstance(consumer.events(1)[0], Arrived)
        before = kept()
        dead = start_producer(name)
        ticket = export(dead, [(3, 2)], seed=22)
        consumer.start(ticket, dead.card, [(0, 20)])
        assert isinstance(consumer.events(1)[0], Arrived)
        dead.close()
        if settles:
            consumer.start(ticket, dead.card, [(0, 20)])
            failure(consumer)
        consumer.importer.forget(dead.card)
        end = time.monotonic() + 5.0
        while kept() - before and time.monotonic() < end:
            consumer.importer.poll(time.monotonic())
        assert kept() - before == set()
        consumer.start(export(producer, [(3, 4)], seed=23), producer.card, [(0, 20)])
        assert isinstance(consumer.events(1)[0], Arrived)
    finally:
        consumer.transport.close()
    assert shared_memory() <= shared_before


def test_a_puller_serves_two_peers(name: str, producer: AnyProducer) -> None:
    consumer = Consumer(name)
    other = start_producer(name)
    arrived: list[Event] = []
    done = threading.Event()

    def on_events(events: list[Event]) -> None:
        arrived.extend(events)
        if len(arrived) == 8:
            done.set()

    puller = Puller(consumer.importer, on_events)
    try:
        for index in range(8):
            peer, seed = ((producer, 20), (other, 21))[index % 2]
            ticket = export(peer, [(100 + index, 2), (110 + index, 2)], seed)
            pairs = [(0, 2 * index), (1, 2 * index + 1)]
            deadline = time.monotonic() + PATIENCE_S
            puller.pull(bytes([index]), ticket, peer.card, pairs, deadline)
        assert done.wait(PATIENCE_S)
        assert {type(event) for event in arrived} == {Arrived}
        for index in range(8):
            assert consumer.holds(2 * index, 20 + index % 2, remote=100 + index)
    finally:
        puller.close()
        other.close()
    assert puller.failure == ""


def test_reads_that_go_wrong_never_pass_for_right(name: str, producer: AnyProducer) -> None:
    """Every kind of fault, real bytes: what arrives is right, and all blocks come back."""
    faults = Faults(FaultPlan(0.06, 0.15, 0.15, 0.15, 0.15, delay_s=0.1, seed=4))
    consumer = Consumer(name, faults, stall_s=0.4, settle_s=0.5)
    ticket = export(producer, [(block, 2) for block in range(4)], seed=24)
    spans = consumer.region.spans
    outcomes = Counter[str]()
    free: deque[int] = deque()

    def give_back(slot: int) -> None:
        spans[4 * slot : 4 * slot + 4] = slot  # somebody else's data
        free.append(slot)

    def poll() -> None:
        for event in consumer.importer.poll(time.monotonic()):
            outcomes[type(event).__name__] += 1
            slot = event.key[0]
            if isinstance(event, Arrived):
                assert all(consumer.holds(4 * slot + i, 24, i) for i in range(4))
            if isinstance(event, Arrived | Settled) or event.settled:
                give_back(slot)

    for slot in range(8):
        give_back(slot)
    end = time.monotonic() + PATIENCE_S
    try:
        for index in range(80):
            while len(free) < 3:
                assert time.monotonic() < end
                poll()
            slot = free.popleft()
            assert bool((spans[4 * slot : 4 * slot + 4] == slot).all()), "bytes came late"
            pairs = [(i, 4 * slot + i) for i in range(4)]
            consumer.start(ticket, producer.card, pairs, bytes([slot]), patience_s=2.0)
            if index % 8 == 0:
                consumer.importer.abort(bytes([slot]))
        while len(free) < 8:
            assert time.monotonic() < end
            poll()
    finally:
        consumer.transport.close()
    consumer.importer.check_integrity()
    assert consumer.importer.num_unsettled == 0
    assert set(faults.counts) == set(KINDS)
    assert consumer.importer.rebuild_count > 0  # of the dropped ones
    assert consumer.importer.stray_count > 0  # of the double ones
    assert outcomes["Arrived"] > outcomes["PullFailed"] > 0
    assert outcomes["Settled"] > 0


def test_unknown_transports_are_named() -> None:
    with pytest.raises(TransportError, match="'pigeon': known are memory, tcp, nixl, nccl"):
        open_transport("pigeon", "p", 1)


# --- nixl alone ---


def test_a_stopped_nixl_producer_keeps_the_blocks_in_quarantine() -> None:
    producer = RemoteProducer("nixl-tcp", f"p-{secrets.token_hex(4)}")
    consumer = Consumer("nixl-tcp")
    try:
        ticket = export(producer, [(block, 2) for block in range(8)], seed=18)
        pairs = [(i, i) for i in range(8)]
        blocks = tuple(range(8))
        consumer.start(ticket, producer.card, pairs)
        assert isinstance(consumer.events(1)[0], Arrived)
        assert consumer.holds(7, 18, remote=7)

        producer.signal(signal.SIGSTOP)
        consumer.start(ticket, producer.card, pairs)
        consumer.importer.abort(b"k")
        assert consumer.events(1) == [PullAborted(b"k", blocks, settled=False)]
        end = time.monotonic() + 1.0
        while time.monotonic() < end:  # bytes may still land, so it must not say otherwise
            assert consumer.importer.poll(time.monotonic()) == []
        with pytest.raises(TransportError, match="in flight"):
            consumer.transport.forget(producer.card)
        producer.signal(signal.SIGCONT)
        assert consumer.events(1) == [Settled(b"k", blocks)]

        producer.signal(signal.SIGSTOP)
        consumer.start(ticket, producer.card, pairs, patience_s=0.2)
        (event,) = consumer.events(1)
        assert isinstance(event, PullFailed)
        assert not event.settled
        assert "deadline" in event.reason
        consumer.transport.close()  # destroys the agent: this settles it
        assert consumer.importer.end("closed", settled=True) == [Settled(b"k", blocks)]
        before = consumer.region.spans.clone()
        # It wakes up owing bytes to an agent that is gone. Over tcp, UCX aborts its process then,
        # which is why "nixl" without shared memory or RDMA is never chosen by itself.
        producer.signal(signal.SIGCONT)
        producer.ended(2.0)
        assert consumer.region.spans.equal(before)
    finally:
        producer.signal(signal.SIGCONT)
        producer.close()
        consumer.transport.close()


def test_a_transport_that_does_not_settle_is_replaced() -> None:
    """B038: one producer stops for ever. Its blocks come back, and the other one's pulls go on."""
    stopped, living = (RemoteProducer("nixl-tcp", f"p-{secrets.token_hex(4)}") for _ in range(2))
    consumer = Consumer("nixl-tcp", stall_s=0.5, settle_s=1.0)
    pairs = [(i, i) for i in range(8)]
    try:
        tickets = [export(p, [(block, 2) for block in range(8)], 19) for p in (stopped, living)]
        for ticket, p in zip(tickets, (stopped, living), strict=True):
            consumer.start(ticket, p.card, pairs)
            assert isinstance(consumer.events(1)[0], Arrived)
        stopped.signal(signal.SIGSTOP)
        consumer.start(tickets[0], stopped.card, pairs)
        begin = time.monotonic()
        (event,) = consumer.events(1)
        assert isinstance(event, PullFailed)
        assert not event.settled
        assert "nothing arrived for 0.5 s" in event.reason
        assert time.monotonic() - begin < 10  # PATIENCE_S, the deadline, is far away
        consumer.importer.forget(stopped.card)
        assert consumer.events(1) == [Settled(b"k", tuple(range(8)))]
        assert consumer.importer.rebuild_count == 1
        consumer.start(tickets[1], living.card, pairs)  # through the new agent
        assert isinstance(consumer.events(1)[0], Arrived)
        consumer.region.spans[:] = 0xA5
        stopped.signal(signal.SIGCONT)  # it owes bytes to an agent that is gone
        stopped.ended(2.0)
        assert consumer.importer.poll(time.monotonic()) == []
        assert bool((consumer.region.spans == 0xA5).all())
        consumer.start(tickets[1], living.card, pairs)
        assert isinstance(consumer.events(1)[0], Arrived)
        assert consumer.holds(7, 19, remote=7)
    finally:
        stopped.signal(signal.SIGCONT)
        stopped.close()
        living.close()
        consumer.transport.close()


def test_the_seals_of_a_large_pool_are_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.nixl_transport.WINDOW_ROWS", NUM_BLOCKS - 1)
    producer = RemoteProducer("nixl", f"p-{secrets.token_hex(4)}")
    consumer = Consumer("nixl")
    try:
        ticket = export(producer, [(3, 2), (9, 4), (4, 2)], seed=25)
        consumer.start(ticket, producer.card, [(0, 20), (2, 22)])
        assert isinstance(consumer.events(1)[0], Arrived)
        producer.reuse([(4, 3)], seed=26)
        consumer.start(ticket, producer.card, [(0, 20), (2, 22)])
        assert "block 4" in failure(consumer).reason
    finally:
        producer.close()
        consumer.transport.close()


def test_what_nixl_says_when_ucx_cannot_do_what_it_is_told() -> None:
    said = r"UCX_TLS=pigeon \(configuration, ucx_tls\), UCX_NET_DEVICES=lo"
    with pytest.raises(TransportError, match=said):
        open_transport("nixl", "p", 1, ucx=UcxOptions(tls="pigeon"))
    assert "UCX_TLS" not in os.environ


def test_nixl_uses_the_devices_that_its_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """With loopback, which a worker of one host would have otherwise, this would work."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "nowhere0")
    said = r"UCX_TLS=tcp \(environment\), UCX_NET_DEVICES=nowhere0 \(environment\)"
    with pytest.raises(TransportError, match=said):
        open_transport("nixl", "p", 1)
    open_transport("nixl", "p", 1, ucx=UcxOptions(net_devices="lo")).close()
    assert (os.environ["UCX_TLS"], os.environ["UCX_NET_DEVICES"]) == ("tcp", "nowhere0")


# --- tcp and nccl: their servers are ours ---


@pytest.fixture(scope="module", params=["tcp", "nccl"])
def socket_pair(request: pytest.FixtureRequest) -> Iterator[tuple[RemoteProducer, Consumer]]:
    producer = RemoteProducer(request.param, f"p-{secrets.token_hex(4)}")
    consumer = Consumer(request.param)
    yield producer, consumer
    producer.signal(signal.SIGCONT)
    producer.close()
    consumer.transport.close()


def test_a_stopped_producer_cannot_write_after_the_abort(
    socket_pair: tuple[RemoteProducer, Consumer],
) -> None:
    producer, consumer = socket_pair
    ticket = export(producer, [(block, 2) for block in range(40)], seed=15)
    pairs = [(i, i) for i in range(40)]
    producer.signal(signal.SIGSTOP)
    consumer.start(ticket, producer.card, pairs)
    assert consumer.importer.poll(time.monotonic()) == []
    with pytest.raises(TransportError, match="in flight"):
        consumer.transport.forget(producer.card)
    consumer.importer.abort(b"k")
    kinds = [type(event) for event in consumer.events(2)]
    assert kinds == [PullAborted, Settled]
    consumer.start(ticket, producer.card, pairs, patience_s=0.2)
    events = consumer.events(2)
    assert [type(event) for event in events] == [PullFailed, Settled]
    before = consumer.region.spans.clone()
    producer.signal(signal.SIGCONT)
    export(producer, [(50, 2)], seed=15)  # it is awake
    assert consumer.importer.poll(time.monotonic()) == []
    assert consumer.region.spans.equal(before)
    consumer.start(ticket, producer.card, pairs)
    assert isinstance(consumer.events(1)[0], Arrived)


@pytest.fixture(scope="module")
def address(socket_pair: tuple[RemoteProducer, Consumer]) -> tuple[str, int, bytes]:
    fields = msgpack.unpackb(socket_pair[0].card.metadata)
    return fields["host"], fields["port"], fields["token"]


MAGICS = {"tcp": MAGIC, "nccl": nccl_server.MAGIC}
GARBAGE = {
    "http": lambda magic, token: (
        b"GET / HTTP/1.1\r\nHost: example.org\r\nConnection: close\r\n\r\n"
    ),
    "wrong token": lambda magic, token: magic + bytes(TOKEN_BYTES),
    "no magic": lambda magic, token: b"batonkv9" + token,
    "half a hello": lambda magic, token: magic + token[:5],
    "nothing": lambda magic, token: b"",
    "half a request": lambda magic, token: magic + token + b"\0",
    "unknown part": lambda magic, token: magic + token + REQUEST.pack(9, 1) + bytes(4),
    "no blocks": lambda magic, token: magic + token + REQUEST.pack(0, 0),
    "4 billion blocks": lambda magic, token: magic + token + REQUEST.pack(0, 2**32 - 1) + bytes(99),
    "ids that never come": lambda magic, token: magic + token + REQUEST.pack(0, 2) + bytes(4),
}


@pytest.mark.parametrize("make", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_dropped_and_the_server_goes_on(
    make: Callable[[bytes, bytes], bytes],
    socket_pair: tuple[RemoteProducer, Consumer],
    address: tuple[str, int, bytes],
) -> None:
    producer, consumer = socket_pair
    host, port, token = address
    with socket.create_connection((host, port), timeout=10) as sock:
        sock.sendall(make(MAGICS[producer.card.transport], token))
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(4096):  # nccl sends its part of the rendezvous to who has the token
                pass  # closed, at the latest by the server's deadline
    ticket = export(producer, [(3, 2)], seed=16)
    consumer.start(ticket, producer.card, [(0, 20)])
    assert isinstance(consumer.events(1)[0], Arrived)


def test_strangers_do_not_keep_readers_out(
    socket_pair: tuple[RemoteProducer, Consumer], address: tuple[str, int, bytes]
) -> None:
    producer, consumer = socket_pair
    ticket = export(producer, [(3, 2)], seed=17)
    consumer.start(ticket, producer.card, [(0, 20)])
    assert isinstance(consumer.events(1)[0], Arrived)
    strangers = [socket.create_connection(address[:2], timeout=10) for _ in range(100)]
    try:
        consumer.start(ticket, producer.card, [(0, 20)])  # over the socket that it has
        assert isinstance(consumer.events(1)[0], Arrived)
        for stranger in strangers:
            assert stranger.recv(1) == b""
    finally:
        for stranger in strangers:
            stranger.close()


@pytest.mark.parametrize("name", ["tcp", "nccl"])
def test_an_address_that_peers_cannot_use(name: str) -> None:
    for host in ("0.0.0.0", "::"):
        with pytest.raises(TransportError, match="address of this host"):
            open_transport(name, "p", 1, host=host).register(Region(LAYOUT, 1))
    with pytest.raises(TransportError, match=r"192\.0\.2\.1"):
        open_transport(name, "p", 1, host="192.0.2.1").register(Region(LAYOUT, 1))


# --- nccl alone ---


def links() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "kv-nccl-link"}


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def nccl_pair() -> Iterator[tuple[RemoteProducer, Consumer]]:
    producer = RemoteProducer("nccl", f"p-{secrets.token_hex(4)}")
    consumer = Consumer("nccl")
    yield producer, consumer
    producer.close()
    consumer.transport.close()


def test_a_peer_that_hangs_fails_its_reads_and_a_new_group_follows(
    nccl_pair: tuple[RemoteProducer, Consumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = nccl_pair
    others = links()
    ticket = export(producer, [(block, 2) for block in range(20)], seed=20)
    consumer.start(ticket, producer.card, [(i, i) for i in range(20)])
    assert isinstance(consumer.events(1)[0], Arrived)
    files = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr("kvtransfer.nccl_transport.STALLED_S", 0.3)
    monkeypatch.setattr("kvtransfer.nccl_server.STALLED_S", 0.3)
    producer.signal(signal.SIGSTOP)
    for key in (b"0", b"1"):  # the second waits behind the first
        consumer.start(ticket, producer.card, [(0, 20 + key[0])], key)
    events = consumer.events(2)
    assert {event.key for event in events} == {b"0", b"1"}
    for event in events:
        assert isinstance(event, PullFailed)
        assert event.settled
        assert "did not answer within 0.3 s" in event.reason
    producer.signal(signal.SIGCONT)
    consumer.start(ticket, producer.card, [(3, 90)])
    assert isinstance(consumer.events(1)[0], Arrived)
    assert consumer.holds(90, 20, remote=3)
    wait_for(lambda: len(links() - others) == 1)
    wait_for(lambda: len(os.listdir("/proc/self/fd")) == files)


@pytest.mark.parametrize("known", [False, True])
def test_close_does_not_wait_for_a_peer_that_hangs(
    known: bool, nccl_pair: tuple[RemoteProducer, Consumer]
) -> None:
    producer, consumer = nccl_pair
    others = links()
    ticket = export(producer, [(block, 2) for block in range(20)], seed=21)
    if known:
        consumer.start(ticket, producer.card, [(0, 0)])
        assert isinstance(consumer.events(1)[0], Arrived)
    files = len(os.listdir("/proc/self/fd"))
    producer.signal(signal.SIGSTOP)
    consumer.start(ticket, producer.card, [(i, i) for i in range(20)])
    assert consumer.importer.poll(time.monotonic()) == []
    begin = time.monotonic()
    consumer.transport.close()
    assert time.monotonic() - begin < 2
    consumer.importer.end("closed", settled=True)
    assert links() <= others
    assert len(os.listdir("/proc/self/fd")) < files


def test_a_consumer_that_dies_or_hangs_costs_the_producer_nothing(
    nccl_pair: tuple[RemoteProducer, Consumer],
) -> None:
    """The consumers are the processes here, and one of them hangs while another is served."""
    producer, consumer = nccl_pair
    ticket = export(producer, [(block, 2) for block in range(100)], seed=22)
    consumer.start(ticket, producer.card, [(0, 0)])
    assert isinstance(consumer.events(1)[0], Arrived)
    process = psutil.Process(producer.pid)
    threads_before, files = process.num_threads(), process.num_fds()
    for _ in range(3):
        other = Consumer("nccl")
        other.start(ticket, producer.card, [(i, i) for i in range(100)])
        assert other.importer.poll(time.monotonic()) == []
        wait_for(lambda: process.num_threads() > threads_before)  # in the middle
        other.transport.close()
        consumer.start(ticket, producer.card, [(0, 0)])
        assert isinstance(consumer.events(1)[0], Arrived)
    wait_for(lambda: process.num_threads() == threads_before)
    wait_for(lambda: process.num_fds() == files)


def test_what_has_come_of_a_read_that_is_given_up_is_not_copied(
    nccl_pair: tuple[RemoteProducer, Consumer],
) -> None:
    producer, consumer = nccl_pair
    export(producer, [(block, 2) for block in range(40)], seed=24)
    transport = consumer.transport
    transport.connect(producer.card)
    handle = transport.pull(producer.card, Part.KV, [(i, i) for i in range(40)])
    wait_for(lambda: transport.moved(handle) > 0)
    transport.abandon(handle)
    (completion,) = transport.poll()
    assert (completion.handle, completion.status) == (handle, Status.FAILED)
    handle = transport.pull(producer.card, Part.KV, [(39, 40)])  # comes after all of the first
    completions: list[Completion] = []
    wait_for(lambda: bool(completions.extend(transport.poll()) or completions))
    assert [(c.handle, c.status) for c in completions] == [(handle, Status.DONE)]
    assert consumer.holds(40, 24, remote=39)
    assert not consumer.region.spans[:40].any()


def test_gloos_own_ports_are_deaf(nccl_pair: tuple[RemoteProducer, Consumer]) -> None:
    producer, consumer = nccl_pair
    ticket = export(producer, [(0, 2)], seed=23)
    consumer.start(ticket, producer.card, [(0, 0)])
    assert isinstance(consumer.events(1)[0], Arrived)
    control = msgpack.unpackb(producer.card.metadata)["port"]
    process = psutil.Process(producer.pid)
    found = [c.laddr for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert {host for host, _ in found} == {"127.0.0.1"}
    (port,) = [port for _, port in found if port != control]
    with pytest.raises(TimeoutError):
        socket.create_connection(("127.0.0.1", port), timeout=0.3)
    consumer.start(ticket, producer.card, [(0, 1)])
    assert isinstance(consumer.events(1)[0], Arrived)


def test_a_wait_inside_of_a_group_can_be_interrupted() -> None:
    """A peer that was stopped between its answer and its last byte."""
    ends = socket.socketpair()
    groups = [nccl_server.Group(ends[rank], rank, torch.device("cpu")) for rank in (0, 1)]
    token = secrets.token_bytes(TOKEN_BYTES)
    builder = threading.Thread(target=groups[0].open, args=("127.0.0.1", token))
    builder.start()
    groups[1].open("127.0.0.1", token)
    builder.join()
    errors: list[Exception] = []

    def wait() -> None:
        try:
            groups[1].receive(torch.empty(1 << 20, dtype=torch.uint8))
        except RuntimeError as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    groups[1].interrupt()
    waiter.join(nccl_server.STALLED_S / 2)
    assert not waiter.is_alive()
    assert len(errors) == 1
    for group in groups:
        group.close()


def test_who_takes_the_peers_place_in_a_group_is_sent_nothing() -> None:
    """He has a socket to the group, and does not know the token."""
    ends = socket.socketpair()
    errors: dict[int, Exception] = {}

    def build(rank: int) -> None:
        group = nccl_server.Group(ends[rank], rank, torch.device("cpu"))
        try:
            group.open("127.0.0.1", bytes([rank]) * TOKEN_BYTES)
        except (OSError, RuntimeError) as error:
            errors[rank] = error
        finally:
            group.close()

    workers = [threading.Thread(target=build, args=(rank,)) for rank in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert "place" in str(errors[nccl_server.PRODUCER])
    assert "place" not in str(errors[nccl_server.CONSUMER])  # no proof came, it was cut off
