"""One attempt at a request: the conversation with its prefill and its decode worker (asyncio).

::

    P:                        Prefill ──► computing ──Prefilled──► ticket ──┐
                                 ▲             │TicketPart …                 │Pulled: Release
    D:   Reserve ──► reserving ──┴─► reserved ─┴────► Peer, Decode ──────────┴─► Tokens … ──► end
             ▲                                   │lost, draining, failed before Pulled
             └───── another D, asked once ───────┘

Always D before P, so that nobody holds P's blocks while waiting for D's. The first token is passed
on as soon as P has it; the transfer hides behind it. Both workers' messages come together in one
inbox, so the end of one leg is noticed while the other is waited for: when P fails, D's reservation
is dropped; when D fails before it has the KV, P's work goes to another D that has room now.
Whether an attempt that failed is followed by another is decided in ``router.dispatch``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvtransfer.hashing import pack_ids
from router import wire
from router.errors import DeadlineExceeded
from router.job import AttemptFailed, Chunk, Job
from router.pending import DEADLINE
from router.worker import Call, Inbox, Worker, WorkerLost, common_agent

MAX_INTRODUCTIONS = 3  # answers to UnknownPeer, in one attempt

Replace = Callable[[Job, Worker, Worker, AttemptFailed], Worker | None]
"""(job, P, the D that failed, how): the D that takes its place, or None to give the attempt up."""


class Attempt:
    """Opens its calls at once, so that the next choice of a pair counts them; nothing is sent yet.

    ``prefill`` is None where ``decode`` computes everything itself.
    """

    def __init__(
        self, job: Job, prefill: Worker | None, decode: Worker, early: bool, replace: Replace
    ) -> None:
        job.num_attempts += 1
        demand = job.demand
        needs_decode = prefill is None or demand.max_tokens > 1
        self.number = job.num_attempts
        self._job = job
        self._early = early
        self._replace = replace
        self._inbox: Inbox = asyncio.Queue()
        self._num_tokens = demand.num_tokens  # that P computes, and that its ticket covers
        self._blocks = -(-(demand.num_tokens + 1) // decode.card.block_size)
        self._prefill: Call | None = None
        self._decode: Call | None = None
        self._begun = False
        self._reserved = False  # D has set blocks aside
        self._decoding = False  # Decode was sent to D
        self._answered = False  # P has
        self._heard = False  # D has sent tokens
        self._ticket: wire.Prefilled | None = None  # not released yet
        self._replaced = False
        self._introductions = 0
        self._marks = job.marks
        self._marks.began(
            prefill.card.worker_id if prefill is not None else "",
            decode.card.worker_id if needs_decode else "",
        )
        if prefill is None:
            self._decode = self._call(decode, demand.num_tokens, self._blocks)
            return
        self._prefill = self._call(prefill, demand.num_tokens, 0)
        if needs_decode:
            self._decode = self._call(decode, 0, self._blocks)

    def _call(self, worker: Worker, tokens: int, blocks: int) -> Call:
        return worker.call(self._job.id, self.number, self._inbox, tokens, blocks)

    async def next_chunk(self) -> Chunk:
        """The next new tokens. Raises AttemptFailed, or DeadlineExceeded."""
        if not self._begun:
            self._begun = True
            self._begin()
        while True:
            call, message = await self._next()
            if call is not self._prefill and call is not self._decode:
                continue  # of a D that was replaced
            try:
                chunk = self._on_message(call, message)
            except AttemptFailed as failure:
                self._replace_decode(failure)
                continue
            if chunk is not None:
                return chunk

    def end(self) -> None:
        """Leave nothing at the workers. Never waits, never fails; may be called again."""
        for call in (self._prefill, self._decode):
            if call is not None:
                call.abort()
        self._release()
        self._decode = None
        while not self._inbox.empty():  # an answer that nobody waits for any more
            call, message = self._inbox.get_nowait()
            if isinstance(message, wire.Prefilled) and message.ticket_id:
                call.worker.release(message.ticket_id)

    # --- what is said ----------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._prefill is None:
            self._send_decode(b"")
        elif self._decode is not None:
            self._send_reserve(self._decode)
        else:
            self._send_prefill(self._prefill)

    def _send_reserve(self, call: Call) -> None:
        job = self._job
        ids = (*job.request.ids, *job.delivered)[: self._num_tokens]
        message = wire.Reserve(
            job.id, self.number, pack_ids(ids), job.request.salt, job.deadline_ms, job.request.trace
        )
        call.send(message)

    def _send_prefill(self, call: Call) -> None:
        job = self._job
        self._marks.sent()
        call.send(
            wire.Prefill(
                job.id,
                self.number,
                job.ids,
                len(job.request.ids),
                job.sampling,
                job.request.salt,
                export=self._decode is not None,
                deadline_ms=job.deadline_ms,
                early=self._early and self._decode is not None,
                trace=job.request.trace,
            )
        )

    def _send_decode(self, ticket: bytes) -> None:
        assert self._decode is not None
        job = self._job
        self._decoding = True
        if ticket:
            self._introduce()
            self._marks.handed()
        else:
            self._marks.sent()
        self._decode.send(
            wire.Decode(
                job.id,
                self.number,
                job.ids,
                len(job.request.ids),
                job.sampling,
                ticket,
                job.request.salt,
                job.deadline_ms,
                job.request.trace,
            )
        )

    def _introduce(self, again: bool = False) -> None:
        """Tell D how to reach P's pool, once per incarnation of P and connection to D."""
        assert self._prefill is not None
        assert self._decode is not None
        producer, consumer = self._prefill.worker, self._decode.worker
        agent = common_agent(producer, consumer)
        if agent is not None and (again or producer.key not in consumer.peers):
            self._decode.send(wire.Peer(agent))
            consumer.peers.add(producer.key)
            consumer.introduced.add(producer.key)

    def _release(self) -> None:
        """The KV behind the ticket is not needed any more."""
        if self._ticket is not None:
            assert self._prefill is not None
            self._prefill.worker.release(self._ticket.ticket_id)
            self._ticket = None

    # --- what comes ------------------------------------------------------------------------------

    async def _next(self) -> tuple[Call, wire.Message | WorkerLost]:
        if not self._inbox.empty():
            return self._inbox.get_nowait()
        try:
            async with asyncio.timeout_at(self._job.deadline):
                return await self._inbox.get()
        except TimeoutError:
            raise DeadlineExceeded(DEADLINE) from None

    def _on_message(self, call: Call, message: wire.Message | WorkerLost) -> Chunk | None:
        side = "prefill" if call is self._prefill else "decode"
        name, key = call.worker.card.worker_id, call.worker.key
        match message:
            case WorkerLost(reason, kind):
                raise AttemptFailed(side, kind, f"{side} worker {name}: {reason}", key)
            case wire.Failed(kind="pull") if self._prefill is not None:
                producer = self._prefill.worker.key  # it is P that has to be replaced
                raise AttemptFailed("prefill", "pull", f"{name}: {message.message}", producer)
            case wire.Failed(kind="lost"):  # the worker is well, but knows nothing of it
                raise AttemptFailed(side, "unknown", f"{name}: {message.message}", key)
            case wire.Failed(kind="invalid"):
                raise AttemptFailed(side, "invalid", message.message)
            case wire.Failed():
                raise AttemptFailed(side, message.kind, f"{name}: {message.message}", key)
            case wire.Refused(retry=True):
                raise AttemptFailed(side, "refused", f"{name}: {message.reason}")
            case wire.Refused():
                raise AttemptFailed(side, "invalid", message.reason)
        if call is self._prefill:
            return self._from_prefill(call, message)
        return self._from_decode(call, message)

    def _from_prefill(self, call: Call, message: wire.Message) -> Chunk | None:
        match message:
            case wire.TicketPart():
                if self._decode is not None and self._reserved:
                    self._introduce()
                    self._decode.send(message)
                return None
            case wire.Prefilled():
                return self._prefilled(call, message)
            case wire.Expired():
                if self._ticket is None:
                    return None  # it was pulled, just in time
                reason = f"{call.worker.card.worker_id}: the lease ran out"
                raise AttemptFailed("prefill", "expired", reason, call.worker.key)
        raise _unexpected("prefill", call, message)

    def _prefilled(self, call: Call, message: wire.Prefilled) -> Chunk:
        self._answered = True
        self._marks.first(message.cached_tokens, message.prefill_ms)
        if message.ticket_id:
            self._ticket = message
            now = asyncio.get_running_loop().time()
            expired = wire.Expired((message.ticket_id,))
            call.worker.leases.add(
                message.ticket_id, message.lease_ms / 1000, now, lambda: call.put(expired)
            )
        if not (message.finish or message.ticket or self._decode is None):
            raise _unexpected("prefill", call, message)
        chunk = self._job.deliver((message.token,), message.finish, message.cached_tokens)
        if chunk.finish:
            self.end()
        elif self._reserved:
            self._send_decode(message.ticket)
        return chunk

    def _from_decode(self, call: Call, message: wire.Message) -> Chunk | None:
        job = self._job
        match message:
            case wire.Reserved() if not self._reserved and self._prefill is not None:
                self._reserved = True
                self._marks.reserved()
                if not self._prefill.sent:
                    self._send_prefill(self._prefill)
                elif self._ticket is not None:
                    self._send_decode(self._ticket.ticket)
                return None
            case wire.UnknownPeer() if (
                self._prefill is not None and self._introductions < MAX_INTRODUCTIONS
            ):
                self._introductions += 1
                self._introduce(again=True)
                if self._decoding and self._ticket is not None:
                    self._send_decode(self._ticket.ticket)
                return None
            case wire.Pulled() if self._decoding:
                job.pulled_bytes += message.num_bytes
                self._marks.pulled()
                self._release()
                return None
            case wire.Tokens(first_index=first) if self._decoding and first == len(job.delivered):
                call.worker.computed(call)
                if not self._heard:
                    self._first_tokens(message)
                chunk = job.deliver(message.ids, message.finish, message.cached_tokens)
                return chunk if chunk.ids or chunk.finish else None
        raise _unexpected("decode", call, message)

    def _first_tokens(self, message: wire.Tokens) -> None:
        self._heard = True
        if self._prefill is None:
            self._marks.first(message.cached_tokens, message.compute_ms)
        else:
            self._marks.next(message.queue_ms, message.compute_ms)

    def _replace_decode(self, failure: AttemptFailed) -> None:
        """Let another D take P's work over, which is not lost with this D; else raise."""
        useful = self._ticket is not None or (
            self._prefill is not None and self._prefill.sent and not self._answered
        )
        final = failure.kind in ("invalid", "deadline")
        if failure.side != "decode" or final or not useful or self._replaced:
            raise failure
        assert self._prefill is not None
        assert self._decode is not None
        failed = self._decode
        failed.abort()
        worker = self._replace(self._job, self._prefill.worker, failed.worker, failure)
        if worker is None:
            raise failure
        self._replaced = True
        self._marks.replaced(worker.card.worker_id)
        self._reserved = self._decoding = False
        self._decode = self._call(worker, 0, self._blocks)
        self._send_reserve(self._decode)


def _unexpected(side: str, call: Call, message: wire.Message) -> AttemptFailed:
    """A worker that breaks the conversation, a gap in its tokens included."""
    name = type(message).__name__
    if isinstance(message, wire.Tokens):
        name = f"tokens from {message.first_index} on"
    reason = f"{call.worker.card.worker_id}: unexpected answer: {name}"
    return AttemptFailed(side, "internal", reason, call.worker.key)
