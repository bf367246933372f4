"""The consumer's side of the hand-off: pull, verify, and know when a pull is over (pure).

One pull per key, in the puller's thread::

    start ──► KV_IN_FLIGHT ──done──► SEALS_IN_FLIGHT ──done, all stamps equal──► Arrived
                 │  │                    │  │
                 │  └──read failed───────┼──┴──or a stamp differs──────────────► PullFailed, settled
                 │                       │
                 └──abort, no progress,──┴──► DRAINING ──read settled──► Settled
                    or deadline
                     (PullAborted or PullFailed, not settled, at once)

Each start gives exactly one of Arrived, PullFailed, PullAborted; each of these that was not settled
is followed by exactly one Settled. Until then a read may still write the local blocks, so their
owner keeps them in quarantine.

A read that never settles would keep them for ever. So when one that was given up has not settled
for ``settle_s``, or such reads hold more than a quarter of the pool, the transport is closed, which
settles everything, and another one is built in its place. UCX/TCP may abort a living producer that
is in the middle of an answer then: so nothing is posted any more, and what still moves may end
first. Pulls that wait for that start in the new one, without a word to anybody. Peers cannot read
the local pool meanwhile: a consumer is not read by others.

Time is an argument; the clock that is passed in only says how long the phases of a pull took. Knows
no sockets, no tensors, no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kvtransfer.errors import KVTransferError, TicketError, TransportError
from kvtransfer.pull_events import (
    Arrived as Arrived,
    Cause,
    Event as Event,
    PullAborted as PullAborted,
    PullFailed as PullFailed,
    PullTimes,
    Settled as Settled,
)
from kvtransfer.ticket import AgentCard, Ticket
from kvtransfer.transport import Completion, Part, Status, Transport
from kvtransfer.verify import BlockMemory, first_difference

_MAX_DRAINING_SHARE = 0.25  # of the pool, in reads that were given up
_QUIET_S = 1.0  # a read of which nothing came for so long is not about to settle by itself


class PullStatus(Enum):
    """Where a pull is, as long as its outcome is open or its read is not settled."""

    WAITING = "kv not asked for"  # until the transport was replaced
    KV_IN_FLIGHT = "kv in flight"
    SEALS_IN_FLIGHT = "seals in flight"
    DRAINING = "draining"  # its outcome is told, its last read is not settled


@dataclass
class _Pull:
    key: bytes
    ticket: Ticket
    peer: AgentCard
    indices: tuple[int, ...]  # into the ticket's blocks ...
    blocks: tuple[int, ...]  # ... and the local block for each
    deadline: float
    asked: float  # when, on the importer's clock; so are the next two
    posted: float = 0.0  # its first read
    landed: float = 0.0
    reads: tuple[tuple[int, int], ...] = ()  # (remote block, local block)
    expected: Any = None  # see BlockMemory
    status: PullStatus = PullStatus.KV_IN_FLIGHT
    handle: int = -1  # of the one read in flight; -1 before it was started
    moved: int = -1  # what the transport last said of its progress
    progress: float | None = None  # when that changed; None until the next poll
    given_up: float | None = None  # when draining began


class Importer:
    """The pulls of one consumer. Used from the one thread that also owns the transport."""

    def __init__(
        self,
        memory: BlockMemory,
        transport: Transport,
        checksums: bool = False,
        stall_s: float = 5.0,
        build: Callable[[int], Transport] | None = None,
        settle_s: float = 60.0,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """``stall_s``: a pull of which nothing arrives for so long has failed.

        ``build(n)`` opens the n-th transport in place of ``transport``, n from 1, and registers the
        same memory; what it raises ends this importer. Without it reads are waited for for ever.
        """
        self.stray_count = 0  # completions of reads that nobody waits for: unknown or repeated
        self.rebuild_count = 0
        self.transport = transport
        self._memory = memory
        self._checksums = checksums
        self._stall_s = stall_s
        self._build = build
        self._settle_s = settle_s
        self._clock = clock
        self._pulls: dict[int, _Pull] = {}  # by the handle of the read in flight
        self._live: dict[bytes, _Pull] = {}  # those that owe their outcome, posted or waiting
        self._closing = False  # nothing is posted: the transport is about to be replaced
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
        asked: float | None = None,
    ) -> None:
        """Pull ``(index into the ticket's blocks, local block)`` pairs until ``deadline``. It was
        ``asked`` for then, on this importer's clock; None: now.

        The indices of a part's ticket are its own: they begin at 0, whatever its ``first_block``.
        Every outcome comes from :meth:`poll`. ``key`` is free again once its outcome was told and,
        if that was not settled, Settled as well.
        """
        assert all(pull.key != key for pull in self._pulls.values()), "this key is being pulled"
        self._started += 1
        if not pairs:
            self._tell(Arrived(key, (), 0))
            return
        indices, blocks = zip(*pairs, strict=True)
        asked = self._clock() if asked is None else asked
        pull = self._live[key] = _Pull(key, ticket, peer, indices, blocks, deadline, asked)
        self._read_kv(pull)

    def abort(self, key: bytes) -> None:
        """Give a pull up. Ignored when its outcome is decided already."""
        pull = self._live.get(key)
        if pull is not None:
            settled = pull.status is PullStatus.WAITING
            self._tell(PullAborted(key, pull.blocks, settled))
            self._drain(pull)

    def poll(self, now: float) -> list[Event]:
        """Follow the reads and the deadlines; returns what happened since the last call."""
        while completions := self.transport.poll():
            for completion in completions:
                pull = self._pulls.pop(completion.handle, None)
                if pull is None:
                    self.stray_count += 1
                else:
                    self._on_settled(pull, completion)
            if not self._pulls:
                break  # else again: what was posted may be done already
        for pull in list(self._pulls.values()):
            self._note_progress(pull, now)
        for pull in list(self._live.values()):
            self._give_up_late(pull, now)
        self._replace_transport(now)
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
            waits = pull.status is PullStatus.WAITING
            self._tell(PullFailed(pull.key, pull.blocks, reason, settled or waits))
        if settled:
            self._settle_draining()
        self._pulls.clear()
        events, self._events = self._events, []
        return events

    def check_integrity(self) -> None:
        """One read per pull, one outcome per start: assert it."""
        assert all(pull.handle == handle for handle, pull in self._pulls.items())
        live = [p for p in self._pulls.values() if p.status is not PullStatus.DRAINING]
        waiting = [p for p in self._live.values() if p.status is PullStatus.WAITING]
        assert {id(p) for p in live + waiting} == {id(p) for p in self._live.values()}
        assert self._closing or not waiting
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

    def _read_kv(self, pull: _Pull) -> None:
        """→ KV_IN_FLIGHT; or WAITING, while the transport is being replaced."""
        if self._closing:
            pull.status = PullStatus.WAITING
            return
        try:
            _check_pull(pull)
            ticket = pull.ticket
            ids = [ticket.block_ids[index] for index in pull.indices]
            generations = [ticket.generations[index] for index in pull.indices]
            pull.reads = tuple(zip(ids, pull.blocks, strict=True))
            pull.expected = self._memory.expect(pull.blocks, ticket.epoch, generations, ids)
            pull.posted = self._clock()  # some transports copy while they are told to
            self.transport.connect(pull.peer)
            self._follow(pull, Part.KV, PullStatus.KV_IN_FLIGHT)
        except KVTransferError as error:
            self._fail(pull, str(error))

    def _read_seals(self, pull: _Pull) -> None:
        """KV_IN_FLIGHT → SEALS_IN_FLIGHT: a seal proves something only if read after the data."""
        pull.landed = self._clock()
        try:
            self._follow(pull, Part.SEALS, PullStatus.SEALS_IN_FLIGHT)
        except KVTransferError as error:
            self._fail(pull, str(error))

    def _follow(self, pull: _Pull, part: Part, status: PullStatus) -> None:
        """Post the next read of ``pull``; raises what the transport raises."""
        pull.handle = self.transport.pull(pull.peer, part, pull.reads)
        pull.status, pull.moved, pull.progress = status, -1, None
        self._pulls[pull.handle] = pull

    def _note_progress(self, pull: _Pull, now: float) -> None:
        moved = self.transport.moved(pull.handle)
        if pull.progress is None or moved != pull.moved:
            pull.moved, pull.progress = moved, now
        if pull.status is PullStatus.DRAINING and pull.given_up is None:
            pull.given_up = now

    def _give_up_late(self, pull: _Pull, now: float) -> None:
        """Fail a pull that makes no progress, or is past its deadline."""
        settled = pull.status is PullStatus.WAITING
        stalled = pull.progress is not None and pull.progress + self._stall_s <= now
        if pull.deadline <= now:
            cause = Cause.EXPIRED
            reason = f"the pull's deadline passed with the {pull.status.value}"
        elif stalled and not settled:
            cause = Cause.STALLED
            reason = f"nothing arrived for {self._stall_s:g} s with the {pull.status.value}"
        else:
            return
        self._tell(PullFailed(pull.key, pull.blocks, reason, settled, cause))
        self._drain(pull, now)

    def _verify(self, pull: _Pull) -> None:
        """SEALS_IN_FLIGHT → arrived or failed."""
        reason = first_difference(
            pull.ticket, pull.indices, pull.blocks, self._memory, pull.expected, self._checksums
        )
        if reason:
            self._fail(pull, reason)
            return
        del self._live[pull.key]
        times = PullTimes(
            pull.posted - pull.asked, pull.landed - pull.posted, self._clock() - pull.landed
        )
        num_bytes = len(pull.blocks) * self._memory.span_bytes
        self._tell(Arrived(pull.key, pull.blocks, num_bytes, times))

    def _fail(self, pull: _Pull, reason: str) -> None:
        del self._live[pull.key]
        self._tell(PullFailed(pull.key, pull.blocks, reason, settled=True))

    def _drain(self, pull: _Pull, now: float | None = None) -> None:
        """→ DRAINING, after the outcome was told; Settled follows from :meth:`poll`.

        A pull that waits has nothing in flight: it is over.
        """
        del self._live[pull.key]
        if pull.status is not PullStatus.WAITING:
            pull.status, pull.given_up = PullStatus.DRAINING, now
            self.transport.abandon(pull.handle)

    def _tell(self, outcome: Arrived | PullFailed | PullAborted) -> None:
        self._told += 1
        self._events.append(outcome)

    # --- a transport that does not settle ---

    def _replace_transport(self, now: float) -> None:
        """Begin to, and do it once nothing moves any more; or go on when all has settled."""
        due = self._must_replace(now)
        if due and self._is_quiet(now):
            self._rebuild()
        elif self._closing and not due:
            self._closing = False
            self._start_waiting()
        else:
            self._closing = due

    def _must_replace(self, now: float) -> bool:
        """Whether reads that were given up, and do not move, hold too much or for too long."""
        if self._build is None or not self._pulls:
            return False
        draining = [
            (pull.given_up, len(pull.blocks))
            for pull in self._pulls.values()
            if pull.status is PullStatus.DRAINING
            and pull.given_up is not None
            and pull.given_up + _QUIET_S <= now
        ]
        num_blocks = sum(blocks for _, blocks in draining)
        return num_blocks > _MAX_DRAINING_SHARE * self._memory.num_blocks or any(
            given_up + self._settle_s <= now for given_up, _ in draining
        )

    def _is_quiet(self, now: float) -> bool:
        """Whether only reads are left that were given up and of which nothing comes."""
        return all(
            pull.status is PullStatus.DRAINING
            and pull.progress is not None
            and pull.progress + _QUIET_S <= now
            for pull in self._pulls.values()
        )

    def _rebuild(self) -> None:
        """Close the transport, which settles every read, and go on with another one."""
        assert self._build is not None
        self.transport.close()
        self._settle_draining()
        self._pulls.clear()
        self._leaving.clear()  # the other one knows nobody yet
        self.transport = self._build(self.rebuild_count + 1)
        self.rebuild_count += 1
        self._closing = False
        self._start_waiting()

    def _start_waiting(self) -> None:
        for pull in list(self._live.values()):
            if pull.status is PullStatus.WAITING:
                self._read_kv(pull)

    def _settle_draining(self) -> None:
        draining = [p for p in self._pulls.values() if p.status is PullStatus.DRAINING]
        self._events += [Settled(pull.key, pull.blocks) for pull in draining]

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
    if not 0 <= min(pull.indices) <= max(pull.indices) < num_blocks:
        raise TicketError(f"the ticket has {num_blocks} blocks, fewer than were asked for")
