"""The decode role of a worker: reserve, pull, verify, admit, stream. Without a ticket: compute it
all.

::

    Reserve ──► RESERVED ──Decode, ticket──► PULLING ──Arrived──► DECODING ──last token──► done
                  │                            │ └──PullFailed──► failed
                  │ Abort, deadline, link lost │ Abort …
                  └──► dropped                 └──► LEAVING ──the puller's word──► dropped

    Decode without a ticket ──► DECODING        (a mixed worker; recompute)

Blocks that a pull may still write are quarantined until the puller says Settled. All methods run in
the engine's thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kvtransfer.errors import TicketError
from kvtransfer.hashing import prefix_hash, unpack_ids
from kvtransfer.importer import Arrived, Event, PullAborted, PullFailed, Settled
from kvtransfer.ticket import AgentCard, Ticket, open_ticket
from router import wire
from services.engine.engine import Engine, Reservation
from services.engine.scheduler import Output
from services.engine.sequence import Key
from services.outbox import Outbox, Peer, sampling_params


class Pulls(Protocol):
    """The part of :class:`kvtransfer.puller.Puller` that is used here."""

    def pull(
        self,
        key: bytes,
        ticket: Ticket,
        peer: AgentCard,
        pairs: Sequence[tuple[int, int]],
        deadline: float,
    ) -> None: ...

    def abort(self, key: bytes) -> None: ...


class Stage(Enum):
    """Where a request is on this worker."""

    RESERVED = "reserved"
    PULLING = "pulling"
    DECODING = "decoding"
    LEAVING = "leaving"  # nobody wants it any more, but its pull has not ended


@dataclass
class _Open:
    link: Peer
    stage: Stage
    deadline: float
    reservation: Reservation | None = None
    reserved_ids: bytes = b""
    message: wire.Decode | None = None
    pull_started: float = 0.0


@dataclass
class PullStats:
    """Counters since the start."""

    num_bytes: int = 0
    num_blocks: int = 0
    failed: int = 0


class DecodeService:
    """Answers wire.Reserve, Decode and Peer."""

    def __init__(
        self,
        engine: Engine,
        pulls: Pulls,
        outbox: Outbox,
        fingerprint: bytes,
        secret: bytes,
    ) -> None:
        self.stats = PullStats()
        self._engine = engine
        self._pulls = pulls
        self._outbox = outbox
        self._fingerprint = fingerprint
        self._secret = secret
        self._open: dict[Key, _Open] = {}
        self._peers: dict[tuple[str, int], AgentCard] = {}

    @property
    def num_open(self) -> int:
        """Requests that hold something here."""
        return len(self._open)

    # --- messages ------------------------------------------------------------------------------

    def peer(self, card: AgentCard) -> None:
        """Learn how to reach a prefill worker's pool; an older epoch of it is replaced."""
        for worker_id, epoch in list(self._peers):
            if worker_id == card.worker_id and epoch != card.epoch:
                del self._peers[worker_id, epoch]
        self._peers[card.worker_id, card.epoch] = card

    def reserve(self, link: Peer, message: wire.Reserve, deadline: float) -> None:
        """Set blocks aside, or refuse for now."""
        key = (message.request, message.attempt)
        reservation = self._engine.reserve(key, unpack_ids(message.ids), message.salt)
        if reservation is None:
            reason = "no free KV blocks now"
            self._outbox.put(link, wire.Refused(*key, reason=reason, retry=True))
            return
        self._open[key] = _Open(link, Stage.RESERVED, deadline, reservation, message.ids)
        cached = reservation.num_cached * self._engine.config.block_size
        self._outbox.put(link, wire.Reserved(*key, cached_tokens=cached))

    def decode(self, link: Peer, message: wire.Decode, now: float, deadline: float) -> None:
        """Start the pull, or the computation when there is no ticket."""
        key = (message.request, message.attempt)
        if message.ticket:
            self._start_pull(key, message, now)
            return
        self.abort(key)  # a reservation: it is computed here after all
        params = sampling_params(message.sampling)
        ids = unpack_ids(message.ids)
        self._engine.add(key, ids, message.num_prompt, params, message.salt)
        self._open[key] = _Open(link, Stage.DECODING, deadline, message=message)

    def knows(self, key: Key) -> Stage | None:
        """The stage of a request that is open here."""
        opened = self._open.get(key)
        return opened.stage if opened else None

    def _start_pull(self, key: Key, message: wire.Decode, now: float) -> None:
        opened = self._open[key]
        assert opened.reservation is not None
        try:
            ticket = self._checked_ticket(message, opened.reservation, opened.reserved_ids)
        except TicketError as error:
            self._fail(key, "pull", str(error))
            return
        peer = self._peers.get((ticket.worker_id, ticket.epoch))
        if peer is None:
            self._outbox.put(opened.link, wire.UnknownPeer(*key, ticket.worker_id, ticket.epoch))
            return
        blocks = opened.reservation.blocks
        missing = range(opened.reservation.num_cached, len(blocks))
        pairs = [(index, blocks[index]) for index in missing]
        self._pulls.pull(_pull_key(key), ticket, peer, pairs, opened.deadline)
        opened.stage = Stage.PULLING
        opened.message = message
        opened.pull_started = now

    def _checked_ticket(
        self, message: wire.Decode, reservation: Reservation, reserved_ids: bytes
    ) -> Ticket:
        """The ticket, if it is for exactly this request's tokens and blocks; else TicketError."""
        ticket = open_ticket(message.ticket, self._secret)
        ids = unpack_ids(message.ids)
        if not message.ids.startswith(reserved_ids):  # its cached blocks hold other tokens' KV
            raise TicketError("the reservation is for other tokens")
        if ticket.fingerprint != self._fingerprint:
            raise TicketError("the ticket's KV layout differs from this worker's")
        if ticket.num_tokens != reservation.num_tokens or ticket.num_tokens >= len(ids):
            reserved = reservation.num_tokens
            raise TicketError(f"the ticket is for {ticket.num_tokens} tokens, not {reserved}")
        if ticket.prefix != prefix_hash(ids[: ticket.num_tokens]):
            raise TicketError("the ticket is for other tokens")
        if len(ticket.block_ids) != len(reservation.blocks):
            raise TicketError("the ticket's blocks do not match the reservation")
        return ticket

    # --- events --------------------------------------------------------------------------------

    def on_event(self, event: Event, now: float) -> None:
        """The puller's word on a pull."""
        key = (event.key[:-4], int.from_bytes(event.key[-4:], "big"))
        if isinstance(event, Settled):
            self._engine.settle(key)
            return
        opened = self._open[key]
        match event:
            case Arrived():
                self._arrived(key, opened, event, now)
            case PullFailed(settled=settled) | PullAborted(settled=settled):
                del self._open[key]
                if settled:
                    self._engine.abort(key)
                else:
                    self._engine.quarantine(key)
                if isinstance(event, PullFailed):
                    self.stats.failed += 1
                    if opened.stage is Stage.PULLING:
                        failed = wire.Failed(*key, kind="pull", message=event.reason)
                        self._outbox.put(opened.link, failed)

    def _arrived(self, key: Key, opened: _Open, event: Arrived, now: float) -> None:
        self.stats.num_bytes += event.num_bytes
        self.stats.num_blocks += len(event.blocks)
        if opened.stage is Stage.LEAVING:
            del self._open[key]
            self._engine.abort(key)
            return
        message = opened.message
        assert message is not None
        params = sampling_params(message.sampling)
        self._engine.admit(key, unpack_ids(message.ids), message.num_prompt, params)
        opened.stage = Stage.DECODING
        pull_ms = (now - opened.pull_started) * 1000
        self._outbox.put(
            opened.link,
            wire.Pulled(*key, len(event.blocks), event.num_bytes, pull_ms),
        )

    def on_output(self, output: Output, now: float) -> bool:
        """A new token. False when the sequence is not ours."""
        opened = self._open.get(output.key)
        if opened is None:
            return False
        tokens = wire.Tokens(
            *output.key, output.index, (output.token,), output.finish, output.num_cached
        )
        self._outbox.put(opened.link, tokens)
        if output.finish:
            del self._open[output.key]
        return True

    def abort(self, key: Key) -> bool:
        """Drop a request at any stage. False when it is not ours."""
        opened = self._open.get(key)
        if opened is None or opened.stage is Stage.LEAVING:
            return False
        if opened.stage is Stage.PULLING:
            opened.stage = Stage.LEAVING
            self._pulls.abort(_pull_key(key))
        else:
            del self._open[key]
            self._engine.abort(key)
        return True

    def of_link(self, link: Peer) -> list[Key]:
        """Requests of this connection that still owe it a terminal message."""
        return [
            key
            for key, opened in self._open.items()
            if opened.link is link and opened.stage is not Stage.LEAVING
        ]

    def tick(self, now: float) -> list[tuple[Key, Peer]]:
        """Requests that are past their deadline."""
        return [
            (key, opened.link)
            for key, opened in self._open.items()
            if opened.deadline <= now and opened.stage is not Stage.LEAVING
        ]

    def _fail(self, key: Key, kind: str, message: str) -> None:
        """End a request that has no pull in flight."""
        opened = self._open.pop(key)
        self._engine.abort(key)
        self.stats.failed += kind == "pull"
        self._outbox.put(opened.link, wire.Failed(*key, kind=kind, message=message))


def _pull_key(key: Key) -> bytes:
    return key[0] + key[1].to_bytes(4, "big")
