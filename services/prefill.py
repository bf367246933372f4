"""The prefill role of a worker: a prompt in, its first token and a ticket for its KV out.

::

                           ┌──┐ a step has sealed blocks (TicketPart, when the router asked for it)
                           ▼  │
    Prefill ──► queued / computing ──first token──► exported (Prefilled with a ticket)
                    │                     └──the answer ends with it──► done (Prefilled without one)
                    └──Abort, deadline, link lost──► dropped

A part promises nothing: its blocks are the sequence's, and when that ends or is preempted, their
seals differ, or they still hold what the part says. An exported ticket belongs to the
:class:`~kvtransfer.exporter.Exporter`: it outlives the request and the connection, until Release or
the end of its lease. All methods run in the engine's thread.
"""

from dataclasses import dataclass

from kvtransfer.exporter import Exporter
from kvtransfer.hashing import ID_BYTES, packed_prefix_hash, unpack_ids
from router import wire
from services.engine.engine import Engine
from services.engine.scheduler import ERROR, NOT_FINITE, Output
from services.engine.sequence import Key
from services.outbox import Outbox, Peer, sampling_params
from services.tallies import WorkerTallies
from services.tracing import NOT_TRACED, RequestSpans, WorkerTracing


@dataclass
class _Open:
    link: Peer
    message: wire.Prefill
    arrived: float
    deadline: float
    parted: int = 0  # blocks, from the first, that parts have named
    spans: RequestSpans | None = None  # when it is traced


class PrefillService:
    """Answers wire.Prefill, Release and Renew."""

    def __init__(
        self,
        engine: Engine,
        exporter: Exporter,
        outbox: Outbox,
        tracing: WorkerTracing = NOT_TRACED,
        tallies: WorkerTallies | None = None,
    ) -> None:
        self.exporter = exporter
        self._tracing = tracing
        self._tallies = tallies or WorkerTallies()
        self._engine = engine
        self._outbox = outbox
        self._open: dict[Key, _Open] = {}

    @property
    def num_open(self) -> int:
        """Requests that are queued or being computed."""
        return len(self._open)

    def knows(self, key: Key) -> bool:
        """Whether the request is queued or being computed here."""
        return key in self._open

    def prefill(self, link: Peer, message: wire.Prefill, now: float, deadline: float) -> None:
        """Queue a prompt. The message has been checked."""
        key = (message.request, message.attempt)
        params = sampling_params(message.sampling)
        ids = unpack_ids(message.ids)
        self._engine.add(key, ids, message.num_prompt, params, message.salt, hold=True)
        spans = self._tracing.follow(message)
        self._open[key] = _Open(link, message, now, deadline, spans=spans)

    def on_output(self, output: Output, now: float) -> bool:
        """The first token is there: export, unless nothing follows. False when it is not ours."""
        opened = self._open.pop(output.key, None)
        if opened is None:
            return False
        request, attempt = output.key
        if opened.spans is not None:
            opened.spans.token(output, now)
        if output.finish == ERROR:
            failed = wire.Failed(request, attempt, kind="internal", message=NOT_FINITE)
            self._outbox.put(opened.link, failed)
            return True
        queue_s, prefill_s = output.started - opened.arrived, now - output.started
        self._tallies.on_prompt(queue_s, prefill_s)
        ticket = b""
        ticket_id = b""
        lease_ms = num_tokens = 0
        if output.held and opened.message.export:
            blocks, ids = self._engine.take_held(output.key)
            prefix = packed_prefix_hash(opened.message.ids[: ID_BYTES * len(ids)])
            export = self.exporter.export(opened.link.name, blocks, len(ids), prefix, now)
            ticket, ticket_id = export.packed, export.ticket_id
            lease_ms, num_tokens = int(export.lease_s * 1000), len(ids)
        elif output.held:
            self._engine.abort(output.key)
        self._outbox.put(
            opened.link,
            wire.Prefilled(
                request,
                attempt,
                output.token,
                output.num_cached,
                output.finish,
                ticket,
                ticket_id,
                lease_ms,
                num_tokens,
                queue_ms=queue_s * 1000,
                prefill_ms=prefill_s * 1000,
            ),
        )
        return True

    def send_parts(self) -> None:
        """A step is over: name the blocks that are new of the prompts which are not finished."""
        for key, opened in self._open.items():
            if not (opened.message.early and opened.message.export):
                continue
            sealed = self._engine.sealed_blocks(key)
            first, end = opened.parted, len(sealed)
            if end <= first:
                continue
            opened.parted = end
            num_tokens = end * self._engine.config.block_size
            prefix = packed_prefix_hash(opened.message.ids[: ID_BYTES * num_tokens])
            ticket = self.exporter.sign_part(first, sealed[first:], num_tokens, prefix)
            self._outbox.put(opened.link, wire.TicketPart(*key, ticket))

    def release(self, ticket_id: bytes) -> None:
        """The router no longer needs this KV."""
        self._engine.end_lease(self.exporter.release(ticket_id))

    def release_unwanted(self, owner: str, wanted: set[bytes]) -> None:
        """A router has reconnected: it no longer wants its other tickets."""
        for blocks in self.exporter.release_unwanted(owner, wanted):
            self._engine.end_lease(blocks)

    def renew(self, link: Peer, message: wire.Renew, now: float) -> None:
        """Extend leases, and say which are over."""
        gone = self.exporter.renew(message.ticket_ids, now)
        if gone:
            self._outbox.put(link, wire.Expired(tuple(gone)))

    def abort(self, key: Key, why: str = "aborted") -> bool:
        """Drop a request that is not exported yet. False when it is not ours."""
        opened = self._open.pop(key, None)
        if opened is None:
            return False
        if opened.spans is not None:
            opened.spans.failed(why)
        self._engine.abort(key)
        return True

    def of_link(self, link: Peer) -> list[Key]:
        """Requests that came over this connection."""
        return [key for key, opened in self._open.items() if opened.link is link]

    def tick(self, now: float) -> list[tuple[Key, Peer]]:
        """End leases that ran out; returns the requests that are past their deadline."""
        for blocks in self.exporter.expire(now):
            self._engine.end_lease(blocks)
        return [(key, o.link) for key, o in self._open.items() if o.deadline <= now]
