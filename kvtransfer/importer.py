"""The consumer's side of the hand-off: pull, verify, and know when a pull is over (pure).

One pull per key, in the puller's thread::

    start ──► KV_IN_FLIGHT ──done──► SEALS_IN_FLIGHT ──done, all stamps equal──► Arrived
                 │  │                    │  │
                 │  └──read failed───────┼──┴──or a stamp differs──────────────► PullFailed, settled
                 │                       │
                 └──abort, or deadline───┴──► DRAINING ──read settled──► Settled
                     (PullAborted or PullFailed, not settled, at once)

Each start gives exactly one of Arrived, PullFailed, PullAborted; each of these that was not settled
is followed by exactly one Settled. Until then a read may still write the local blocks, so their
owner keeps them in quarantine.

Knows no clock (time is an argument), no sockets, no tensors, no requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kvtransfer.errors import KVTransferError, TicketError, TransportError
from kvtransfer.layout import Stamp
from kvtransfer.ticket import AgentCard, Ticket
from kvtransfer.transport import Completion, Part, Status, Transport


class BlockMemory(Protocol):
    """What a pull needs of the local pool; :class:`kvtransfer.region.Region` has it."""

    @property
    def span_bytes(self) -> int:
        """Bytes that move per block."""

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero trailers and staged seals."""

    def trailers(self, blocks: Sequence[int]) -> list[Stamp]:
        """What the blocks' trailers say."""

    def staged_seals(self, blocks: Sequence[int]) -> list[Stamp]:
        """What the producer's seals said, read after the data."""

    def checksum(self, blocks: Sequence[int]) -> list[int]:
        """Sum of each block's KV."""


@dataclass(frozen=True)
class Arrived:
    """All blocks are here and verified."""

    key: bytes
    blocks: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True)
class PullFailed:
    """The blocks hold nothing of use. Not settled: bytes may still land in them."""

    key: bytes
    blocks: tuple[int, ...]
    reason: str
    settled: bool


@dataclass(frozen=True)
class PullAborted:
    """The caller gave up. Not settled: bytes may still land in the blocks."""

    key: bytes
    blocks: tuple[int, ...]
    settled: bool


@dataclass(frozen=True)
class Settled:
    """Nothing lands in the blocks of an unsettled pull any more."""

    key: bytes
    blocks: tuple[int, ...]


Event = Arrived | PullFailed | PullAborted | Settled


class PullStatus(Enum):
    """Where a pull is, as long as a read of it is not settled."""

    KV_IN_FLIGHT = "kv in flight"
    SEALS_IN_FLIGHT = "seals in flight"
    DRAINING = "draining"  # its outcome is told, its last read is not settled


@dataclass
class _Pull:
    key: bytes
    ticket: Ticket
    peer: AgentCard
    pairs: tuple[tuple[int, int], ...]  # (index into the ticket's blocks, local block)
    deadline: float
    status: PullStatus = PullStatus.KV_IN_FLIGHT
    handle: int = -1  # of the one read in flight; -1 before it was started

    @property
    def blocks(self) -> tuple[int, ...]:
        return tuple(local for _, local in self.pairs)

    @property
    def reads(self) -> list[tuple[int, int]]:
        """``(remote block, local block)`` pairs."""
        return [(self.ticket.block_ids[index], local) for index, local in self.pairs]


class Importer:
    """The pulls of one consumer. Used from the one thread that also owns the transport."""

    def __init__(self, memory: BlockMemory, transport: Transport, checksums: bool = False) -> None:
        self.stray_count = 0  # completions of reads that nobody waits for: unknown or repeated
        self.transport = transport
        self._memory = memory
        self._checksums = checksums
        self._pulls: dict[int, _Pull] = {}  # by the handle of the read in flight
        self._live: dict[bytes, _Pull] = {}  # those of them that still owe their outcome
        self._leaving: list[AgentCard] = []  # peers to forget once their reads are settled
        self._events: list[Event] = []
        self._started = 0
        self._told = 0  # outcomes

    @property
    def num_in_flight(self) -> int:
        """Pulls whose outcome is open."""
        return len(self._live)

    @property
    def num_unsettled(self) -> int:
        """Pulls with a read that may still write local memory, the draining ones included."""
        return len(self._pulls)

    def start(
        self,
        key: bytes,
        ticket: Ticket,
        peer: AgentCard,
        pairs: Sequence[tuple[int, int]],
        deadline: float,
    ) -> None:
        """Pull ``(index into the ticket's blocks, local block)`` pairs until ``deadline``.

        Every outcome comes from :meth:`poll`. ``key`` is free again once its outcome was told and,
        if that was not settled, Settled as well.
        """
        assert all(pull.key != key for pull in self._pulls.values()), "this key is being pulled"
        self._started += 1
        if not pairs:
            self._tell(Arrived(key, (), 0))
            return
        pull = self._live[key] = _Pull(key, ticket, peer, tuple(pairs), deadline)
        try:
            _check_pull(pull)
            self._memory.clear(pull.blocks)
            self.transport.connect(peer)
            pull.handle = self.transport.pull(peer, Part.KV, pull.reads)
        except KVTransferError as error:
            self._fail(pull, str(error))
        else:
            self._pulls[pull.handle] = pull

    def abort(self, key: bytes) -> None:
        """Give a pull up. Ignored when its outcome is decided already."""
        pull = self._live.get(key)
        if pull is not None:
            self._tell(PullAborted(key, pull.blocks, settled=False))
            self._drain(pull)

    def poll(self, now: float) -> list[Event]:
        """Follow the reads and the deadlines; returns what happened since the last call."""
        for completion in self.transport.poll():
            pull = self._pulls.pop(completion.handle, None)
            if pull is None:
                self.stray_count += 1
            else:
                self._on_settled(pull, completion)
        for pull in [p for p in self._live.values() if p.deadline <= now]:
            reason = f"the pull's deadline passed with the {pull.status.value}"
            self._tell(PullFailed(pull.key, pull.blocks, reason, settled=False))
            self._drain(pull)
        if self._leaving:
            self._forget_idle()
        events, self._events = self._events, []
        return events

    def forget(self, peer: AgentCard) -> None:
        """Drop a peer that is gone, as soon as no read from it is unsettled."""
        self._leaving.append(peer)

    def end(self, reason: str, settled: bool) -> list[Event]:
        """Fail every pull, since the transport is closed (settled) or broken; the last events."""
        for pull in list(self._live.values()):
            del self._live[pull.key]
            self._tell(PullFailed(pull.key, pull.blocks, reason, settled))
        if settled:
            draining = [p for p in self._pulls.values() if p.status is PullStatus.DRAINING]
            self._events += [Settled(pull.key, pull.blocks) for pull in draining]
        self._pulls.clear()
        events, self._events = self._events, []
        return events

    def check_integrity(self) -> None:
        """One read per pull, one outcome per start: assert it."""
        assert all(pull.handle == handle for handle, pull in self._pulls.items())
        live = [p for p in self._pulls.values() if p.status is not PullStatus.DRAINING]
        assert {id(p) for p in live} == {id(p) for p in self._live.values()}
        assert self._started == self._told + len(self._live)

    # --- transitions ---

    def _on_settled(self, pull: _Pull, completion: Completion) -> None:
        """The one read of ``pull`` is over."""
        if pull.status is PullStatus.DRAINING:
            self._events.append(Settled(pull.key, pull.blocks))
        elif completion.status is Status.FAILED:
            self._fail(pull, completion.reason)
        elif pull.status is PullStatus.KV_IN_FLIGHT:
            self._read_seals(pull)
        else:
            self._verify(pull)

    def _read_seals(self, pull: _Pull) -> None:
        """KV_IN_FLIGHT → SEALS_IN_FLIGHT: a seal proves something only if read after the data."""
        try:
            pull.handle = self.transport.pull(pull.peer, Part.SEALS, pull.reads)
        except KVTransferError as error:
            self._fail(pull, str(error))
            return
        pull.status = PullStatus.SEALS_IN_FLIGHT
        self._pulls[pull.handle] = pull

    def _verify(self, pull: _Pull) -> None:
        """SEALS_IN_FLIGHT → arrived or failed."""
        reason = self._first_difference(pull)
        if reason:
            self._fail(pull, reason)
            return
        del self._live[pull.key]
        self._tell(Arrived(pull.key, pull.blocks, len(pull.blocks) * self._memory.span_bytes))

    def _fail(self, pull: _Pull, reason: str) -> None:
        del self._live[pull.key]
        self._tell(PullFailed(pull.key, pull.blocks, reason, settled=True))

    def _drain(self, pull: _Pull) -> None:
        """→ DRAINING, after the outcome was told; Settled follows from :meth:`poll`."""
        pull.status = PullStatus.DRAINING
        del self._live[pull.key]
        self.transport.abandon(pull.handle)

    def _tell(self, outcome: Arrived | PullFailed | PullAborted) -> None:
        self._told += 1
        self._events.append(outcome)

    # --- checks ---

    def _first_difference(self, pull: _Pull) -> str:
        """Why the blocks are not those of the ticket; empty when they are."""
        ticket, blocks = pull.ticket, pull.blocks
        trailers = self._memory.trailers(blocks)
        seals = self._memory.staged_seals(blocks)
        for (index, _), trailer, seal in zip(pull.pairs, trailers, seals, strict=True):
            remote, generation = ticket.block_ids[index], ticket.generations[index]
            sealed = (ticket.epoch, generation)
            if (trailer.epoch, trailer.generation, trailer.block_id) != (*sealed, remote):
                return f"block {remote} of {ticket.worker_id} is not the ticket's: {trailer}"
            if (seal.epoch, seal.generation) != sealed:
                return f"block {remote} of {ticket.worker_id} was reused meanwhile: {seal}"
        if self._checksums:
            for trailer, found in zip(trailers, self._memory.checksum(blocks), strict=True):
                if trailer.checksum not in (0, found):
                    return f"block {trailer.block_id} arrived damaged: its checksum differs"
        return ""

    def _forget_idle(self) -> None:
        busy = {(p.peer.worker_id, p.peer.epoch) for p in self._pulls.values()}
        for peer in self._leaving:
            if (peer.worker_id, peer.epoch) not in busy:
                self.transport.forget(peer)
        self._leaving = [p for p in self._leaving if (p.worker_id, p.epoch) in busy]


def _check_pull(pull: _Pull) -> None:
    """Raise unless ticket, card and pairs fit together."""
    ticket, peer = pull.ticket, pull.peer
    for name in ("worker_id", "epoch", "fingerprint"):
        ours, theirs = getattr(ticket, name), getattr(peer, name)
        if ours != theirs:
            raise TransportError(f"ticket and peer differ in {name}: {ours!r} against {theirs!r}")
    num_blocks = len(ticket.block_ids)
    if not all(0 <= index < num_blocks for index, _ in pull.pairs):
        raise TicketError(f"the ticket has {num_blocks} blocks, fewer than were asked for")
