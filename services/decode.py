"""The decode role of a worker: reserve, pull, verify, admit, stream. Without a ticket: compute it
all.

::

               ┌──┐ TicketPart: an early pull, if it names blocks that are missing
               ▼  │
    Reserve ──► RESERVED ──Decode, ticket──► PULLING ──all blocks there──► DECODING ──► done
                  │                            │ │                            last token
                  │                            │ └──the last pull failed──► failed
                  ├────────────────────────────┴────any pull failed, not settled──► failed
                  └──Abort, deadline, link lost, at any stage──► dropped

    Decode without a ticket ──► DECODING        (a mixed worker; recompute)

While the prompt is computed, parts of its KV are pulled early. In PULLING, once those pulls are
over, a last one fetches exactly what is missing. An early pull that failed and settled costs
nothing. Blocks enter the prefix cache when all of them are there, never before.

However a request ends, it is gone at once, and its key with it. Blocks that a pull may still write
are quarantined until every pull of the request has settled; see ``pulls``. All methods run in the
engine's thread.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvtransfer.errors import TicketError
from kvtransfer.hashing import ID_BYTES, packed_prefix_hash, unpack_ids
from kvtransfer.importer import Arrived, Event, PullFailed
from kvtransfer.ticket import AgentCard, Ticket, open_ticket
from router import wire
from services.engine.engine import Engine, Reservation
from services.engine.scheduler import ERROR, NOT_FINITE, Output
from services.engine.sequence import Key
from services.outbox import Outbox, Peer, sampling_params
from services.pulls import Intake, Pulls, PullStats, pull_key, split_pull_key
from services.tallies import WorkerTallies
from services.tracing import NOT_TRACED, RequestSpans, WorkerTracing

log = logging.getLogger(__name__)

_ENDS = {"deadline": "expired", "internal": "failed"}  # why a request ended, as an end of its pulls


class Stage(Enum):
    """Where a request is on this worker."""

    RESERVED = "reserved"
    PULLING = "pulling"
    DECODING = "decoding"


@dataclass
class _Reserved:
    """What a request has before it decodes."""

    blocks: Reservation
    ids: bytes
    intake: Intake


@dataclass
class _Pulling:
    """What it has more, once its Decode has come."""

    message: wire.Decode
    ticket: Ticket
    started: float
    last: int = -1  # number of the pull that fetches the rest


@dataclass
class _Open:
    link: Peer
    deadline: float
    reserved: _Reserved | None = None
    pulling: _Pulling | None = None
    spans: RequestSpans | None = None  # when it is traced
    arrived: float | None = None  # a prompt to be computed here; until its first token
    admitted: float | None = None  # with KV that was pulled; until its first token here

    @property
    def stage(self) -> Stage:
        if self.reserved is None:
            return Stage.DECODING
        return Stage.RESERVED if self.pulling is None else Stage.PULLING


class DecodeService:
    """Answers wire.Reserve, TicketPart, Decode, Peer and Forget."""

    def __init__(
        self,
        engine: Engine,
        pulls: Pulls,
        outbox: Outbox,
        fingerprint: bytes,
        secret: bytes,
        tracing: WorkerTracing = NOT_TRACED,
        tallies: WorkerTallies | None = None,
    ) -> None:
        self.stats = PullStats()
        self._tallies = tallies or WorkerTallies()
        self._tracing = tracing
        self._engine = engine
        self._pulls = pulls
        self._outbox = outbox
        self._fingerprint = fingerprint
        self._secret = secret
        self._open: dict[Key, _Open] = {}
        self._settling: dict[Key, Intake] = {}  # their blocks are in quarantine
        self._peers: dict[str, AgentCard] = {}  # by worker id

    @property
    def num_open(self) -> int:
        """Requests that are not done here."""
        return len(self._open)

    # --- messages ------------------------------------------------------------------------------

    def peer(self, card: AgentCard) -> None:
        """Learn how to reach a prefill worker's pool; an older epoch of it is replaced."""
        known = self._peers.get(card.worker_id)
        if known is not None and known.epoch != card.epoch:
            self._pulls.forget(known)
        self._peers[card.worker_id] = card

    def forget(self, worker_id: str, epoch: int) -> None:
        """This incarnation of a prefill worker is gone."""
        known = self._peers.get(worker_id)
        if known is not None and known.epoch == epoch:
            self._pulls.forget(self._peers.pop(worker_id))

    def reserve(self, link: Peer, message: wire.Reserve, deadline: float) -> None:
        """Set blocks aside, or refuse for now."""
        key = (message.request, message.attempt)
        reservation = self._engine.reserve(key, unpack_ids(message.ids), message.salt)
        if reservation is None:
            reason = "no free KV blocks now"
            self._outbox.put(link, wire.Refused(*key, reason=reason, retry=True))
            return
        intake = Intake(len(reservation.blocks), reservation.num_cached)
        reserved = _Reserved(reservation, message.ids, intake)
        self._open[key] = _Open(link, deadline, reserved, spans=self._tracing.follow(message))
        cached = reservation.num_cached * self._engine.config.block_size
        self._outbox.put(link, wire.Reserved(*key, cached_tokens=cached))

    def part(self, message: wire.TicketPart) -> None:
        """Pull what is missing of an early part. One that comes late or is wrong is dropped: the
        final ticket covers its blocks as well.
        """
        key = (message.request, message.attempt)
        opened = self._open.get(key)
        if opened is None or opened.reserved is None or opened.pulling is not None:
            return
        try:
            ticket = self._checked_part(message.ticket, opened.reserved)
        except TicketError as error:
            self.stats.wrong_parts += 1
            log.warning("dropped an early part of %s: %s", key[0].hex(), error)
            return
        peer = self._peer_of(ticket)
        first, end = ticket.first_block, ticket.first_block + len(ticket.block_ids)
        missing = [index for index in opened.reserved.intake.missing if first <= index < end]
        if peer is not None and missing:
            self._pull(key, opened, ticket, peer, missing)

    def decode(self, link: Peer, message: wire.Decode, now: float, deadline: float) -> None:
        """Start the last pull, or the computation when there is no ticket."""
        key = (message.request, message.attempt)
        if message.ticket:
            self._decode_ticket(key, message, now)
            return
        self.abort(key)  # a reservation: it is computed here after all
        params = sampling_params(message.sampling)
        ids = unpack_ids(message.ids)
        self._engine.add(key, ids, message.num_prompt, params, message.salt)
        spans = self._tracing.follow(message)
        self._open[key] = _Open(link, deadline, spans=spans, arrived=now)

    def knows(self, key: Key) -> Stage | None:
        """The stage of a request that is open here."""
        opened = self._open.get(key)
        return opened.stage if opened else None

    def _decode_ticket(self, key: Key, message: wire.Decode, now: float) -> None:
        opened = self._open[key]
        assert opened.reserved is not None
        try:
            ticket = self._checked_ticket(message, opened.reserved)
        except TicketError as error:
            self._fail(key, "pull", str(error))
            return
        if self._peer_of(ticket) is None:
            self._outbox.put(opened.link, wire.UnknownPeer(*key, ticket.worker_id, ticket.epoch))
            return
        opened.pulling = _Pulling(message, ticket, now)
        if opened.spans is not None:
            opened.spans.ticket()
        self._go_on(key, opened, now)

    def _peer_of(self, ticket: Ticket) -> AgentCard | None:
        peer = self._peers.get(ticket.worker_id)
        return peer if peer is not None and peer.epoch == ticket.epoch else None

    # --- tickets -------------------------------------------------------------------------------

    def _checked_ticket(self, message: wire.Decode, reserved: _Reserved) -> Ticket:
        """The ticket, if it is for exactly this request's tokens and blocks; else TicketError."""
        ticket = self._opened_ticket(message.ticket)
        num_ids = len(message.ids) // ID_BYTES
        num_reserved = reserved.blocks.num_tokens
        if not message.ids.startswith(reserved.ids):  # its cached blocks hold other tokens' KV
            raise TicketError("the reservation is for other tokens")
        if ticket.num_tokens != num_reserved or ticket.num_tokens >= num_ids:
            raise TicketError(f"the ticket is for {ticket.num_tokens} tokens, not {num_reserved}")
        if ticket.prefix != packed_prefix_hash(message.ids[: ID_BYTES * ticket.num_tokens]):
            raise TicketError("the ticket is for other tokens")
        if ticket.first_block or len(ticket.block_ids) != len(reserved.blocks.blocks):
            raise TicketError("the ticket's blocks do not match the reservation")
        return ticket

    def _checked_part(self, packed: bytes, reserved: _Reserved) -> Ticket:
        """The ticket of an early part, if its blocks hold tokens of the reservation."""
        ticket = self._opened_ticket(packed)
        end = ticket.first_block + len(ticket.block_ids)
        if not 0 <= ticket.first_block < end <= len(reserved.blocks.blocks):
            raise TicketError("the part's blocks are not within the reservation")
        full = end * self._engine.config.block_size
        if ticket.num_tokens != full or ID_BYTES * full > len(reserved.ids):
            raise TicketError(f"the part ends at {ticket.num_tokens} tokens, not with a full block")
        if ticket.prefix != packed_prefix_hash(reserved.ids[: ID_BYTES * ticket.num_tokens]):
            raise TicketError("the part is for other tokens")
        return ticket

    def _opened_ticket(self, packed: bytes) -> Ticket:
        ticket = open_ticket(packed, self._secret)
        if ticket.fingerprint != self._fingerprint:
            raise TicketError("the ticket's KV layout differs from this worker's")
        return ticket

    # --- pulls ---------------------------------------------------------------------------------

    def _pull(
        self, key: Key, opened: _Open, ticket: Ticket, peer: AgentCard, indexes: Sequence[int]
    ) -> int:
        """Pull blocks of the reservation; returns the pull's number."""
        assert opened.reserved is not None
        blocks = opened.reserved.blocks.blocks
        pairs = [(index - ticket.first_block, blocks[index]) for index in indexes]
        number = opened.reserved.intake.start(indexes)
        if opened.spans is not None:
            opened.spans.pull()
        self._pulls.pull(pull_key(key, number), ticket, peer, pairs, opened.deadline)
        return number

    def on_event(self, event: Event, now: float) -> None:
        """The puller's word on a pull."""
        key, number = split_pull_key(event.key)
        settling = self._settling.get(key)
        if settling is not None:
            self._count(event, early=False)
            settling.on_event(number, event)
            if settling.settled:
                del self._settling[key]
                self._engine.settle(key)
            return
        opened = self._open[key]
        reserved, pulling = opened.reserved, opened.pulling
        assert reserved is not None
        early = pulling is None or number != pulling.last
        self._count(event, early)
        reserved.intake.on_event(number, event)
        harmless = isinstance(event, Arrived) or (early and not reserved.intake.lost)
        if not harmless:
            if isinstance(event, PullFailed):
                self._fail(key, "pull", event.reason, event.cause.value)
            else:
                self._fail(key, "pull", "the pull was given up", "cancelled")
        elif pulling is not None:
            self._go_on(key, opened, now)

    def _count(self, event: Event, early: bool) -> None:
        self.stats.count(event, early)
        if isinstance(event, Arrived):
            self._tallies.on_pull(event)

    def _go_on(self, key: Key, opened: _Open, now: float) -> None:
        """PULLING: once the early pulls are over, fetch the rest; with all blocks there, admit."""
        reserved, pulling = opened.reserved, opened.pulling
        assert reserved is not None
        assert pulling is not None
        intake = reserved.intake
        if intake.in_flight:
            return
        if intake.missing:
            assert pulling.last < 0
            peer = self._peer_of(pulling.ticket)
            if peer is None:  # forgotten since: a pull would make the transport know it again
                self._fail(key, "pull", f"{pulling.ticket.worker_id} is gone")
                return
            pulling.last = self._pull(key, opened, pulling.ticket, peer, intake.missing)
            return
        assert not intake.lost
        message = pulling.message
        params = sampling_params(message.sampling)
        self._engine.admit(key, unpack_ids(message.ids), message.num_prompt, params)
        opened.reserved = opened.pulling = None
        opened.admitted = now
        self.stats.ends["ok"] += 1
        if opened.spans is not None:
            opened.spans.admitted(intake)
        pull_ms = (now - pulling.started) * 1000
        pulled = wire.Pulled(*key, intake.num_blocks, intake.num_bytes, pull_ms)
        self._outbox.put(opened.link, pulled)

    # --- tokens and ends -----------------------------------------------------------------------

    def on_output(self, output: Output, now: float) -> bool:
        """A new token. False when the sequence is not ours."""
        opened = self._open.get(output.key)
        if opened is None:
            return False
        since = opened.admitted if opened.arrived is None else opened.arrived
        self._outbox.put(opened.link, _message(output, since, now))
        opened.admitted = None
        if opened.spans is not None:
            opened.spans.token(output, now)
        if opened.arrived is not None and output.finish != ERROR:
            self._tallies.on_prompt(output.started - opened.arrived, now - output.started)
            opened.arrived = None
        if output.finish:
            del self._open[output.key]
        return True

    def abort(self, key: Key, why: str = "aborted") -> bool:
        """Drop a request at any stage. False when it is not ours."""
        opened = self._open.pop(key, None)
        if opened is None:
            return False
        intake = opened.reserved.intake if opened.reserved is not None else None
        if opened.spans is not None:
            opened.spans.failed(why, intake)
        if opened.pulling is not None and why != "pull":
            self.stats.ends[_ENDS.get(why, "cancelled")] += 1
        if intake is None or intake.settled:
            self._engine.abort(key)
            return True
        self._engine.quarantine(key)
        self._settling[key] = intake
        last = -1 if opened.pulling is None else opened.pulling.last
        for number in intake.in_flight:
            self.stats.parts["cancelled"] += number != last
            self._pulls.abort(pull_key(key, number))
        return True

    def of_link(self, link: Peer) -> list[Key]:
        """Requests of this connection that still owe it a terminal message."""
        return [key for key, opened in self._open.items() if opened.link is link]

    def tick(self, now: float) -> list[tuple[Key, Peer]]:
        """Requests that are past their deadline."""
        return [(key, o.link) for key, o in self._open.items() if o.deadline <= now]

    def _fail(self, key: Key, kind: str, message: str, end: str = "failed") -> None:
        """End a request with a reason. ``end``: of ``pulls.ENDS``."""
        link = self._open[key].link
        self.abort(key, kind)
        if kind == "pull":
            self.stats.failed += 1
            self.stats.ends[end] += 1
        self._outbox.put(link, wire.Failed(*key, kind=kind, message=message))

    def check_integrity(self) -> None:
        """Assert that whoever is here holds something, and that what is in quarantine waits for a
        pull.
        """
        for key, opened in self._open.items():
            assert self._engine.knows(key)
            if opened.reserved is not None:
                assert not opened.reserved.intake.lost, "a lost block can still be admitted"
            if opened.reserved is not None and opened.pulling is not None:
                assert opened.reserved.intake.in_flight, "it waits for nothing"
        assert not any(intake.settled for intake in self._settling.values())
        assert self._settling.keys() == self._engine.quarantined


def _message(output: Output, since: float | None, now: float) -> wire.Tokens | wire.Failed:
    """``since``: when it was admitted here, for its first token."""
    if output.finish == ERROR:
        return wire.Failed(*output.key, kind="internal", message=NOT_FINITE)
    waited_ms = 0.0 if since is None else (output.started - since) * 1000
    computed_ms = 0.0 if since is None else (now - output.started) * 1000
    token, cached = (output.token,), output.num_cached
    return wire.Tokens(
        *output.key, output.index, token, output.finish, cached, waited_ms, computed_ms
    )
