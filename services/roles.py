"""A worker's conversation: routes messages, tokens and pull events to the two roles.

Both roles are mounted on every worker; its role only tells routers what to send. All methods run in
the engine's thread. What is wrong with one message ends that request, never the worker.

A worker that leaves::

    ready ──drain──► draining ──nothing is left, or it was handed back──► drained

New work is refused at once. What runs may end until the deadline; then it is handed back to its
router, which goes on elsewhere with the tokens so far. Exported tickets are waited for as well,
some seconds longer: their pulls may be under way.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from kvtransfer.hashing import unpack_ids
from kvtransfer.importer import Event
from router import wire
from services.decode import DecodeService, Stage
from services.engine.engine import Engine
from services.engine.meter import StepMeter
from services.engine.scheduler import Output
from services.engine.sequence import Key
from services.outbox import Outbox, Peer
from services.prefill import PrefillService

log = logging.getLogger(__name__)

_NEVER = float("inf")
_MAX_SALT_BYTES = 255  # of a block's name
_REPORT_INTERVAL_S = 0.25  # between load reports of a busy worker
_LINGER_S = 0.25  # what crossed the news of the drain on its way is refused, not lost
LAST_PULLS_S = 2.0  # tickets are kept so much longer than the requests that were handed back

Work = wire.Prefill | wire.Reserve | wire.Decode
Transfers = tuple[int, Mapping[str, int]]
"""Of the KV transport: how often it was rebuilt, and faults that were injected, by kind."""


def ends_sequences(message: wire.Message) -> bool:
    """Whether a message may end a sequence that computes, and give its blocks to others. No other
    can: what they end or hand out is in no step.
    """
    return isinstance(message, wire.Abort)


class Roles:
    """The :class:`~services.engine_loop.Handler` of a worker's engine loop."""

    def __init__(
        self,
        engine: Engine,
        prefill: PrefillService,
        decode: DecodeService,
        outbox: Outbox,
        vocab_size: int,
        transport: str,
        on_load: Callable[[wire.Load], None],
        on_drained: Callable[[], None] = lambda: None,
        transfers: Callable[[], Transfers] = lambda: (0, {}),
        meter: StepMeter | None = None,
    ) -> None:
        self.state = "ready"
        self.drained = False
        self._engine = engine
        self._prefill = prefill
        self._decode = decode
        self._outbox = outbox
        self._vocab_size = vocab_size
        self._transport = transport
        self._on_load = on_load
        self._on_drained = on_drained
        self._transfers = transfers
        self._meter = meter or StepMeter()
        self._hand_back_at = _NEVER
        self._leave_from: float | None = None
        self._links: set[Peer] = set()
        self._reported = -_NEVER
        self._load: wire.Load | None = None

    @property
    def num_open(self) -> int:
        """Requests and tickets that a drain waits for."""
        leased = self._prefill.exporter.num_leased
        return self._prefill.num_open + self._decode.num_open + leased

    # --- connections ---------------------------------------------------------------------------

    def connected(self, link: Peer, tickets: tuple[bytes, ...]) -> None:
        """A router has (re)connected and still wants these of its tickets."""
        self._links.add(link)
        self._prefill.release_unwanted(link.name, set(tickets))

    def disconnected(self, link: Peer) -> None:
        """Abort all that came over the link; exported tickets live to their lease's end."""
        self._links.discard(link)
        for key in self._prefill.of_link(link):
            self._prefill.abort(key, "lost")
        for key in self._decode.of_link(link):
            self._decode.abort(key, "lost")

    def handle(self, link: Peer, message: wire.Message, now: float) -> None:
        """One message of a router; in a pause of a step unless it :func:`ends_sequences`."""
        if link not in self._links:
            return  # it came just before the link was lost
        match message:
            case wire.Prefill() | wire.Reserve() | wire.Decode():
                self._work(link, message, now)
            case wire.Release(ticket_id):
                self._prefill.release(ticket_id)
            case wire.Renew():
                self._prefill.renew(link, message, now)
            case wire.Abort(request, attempt):
                self._end((request, attempt), link, "aborted", "aborted by the router")
            case wire.Check(request, attempt):
                self._check((request, attempt), link)
            case wire.Peer(card):
                self._decode.peer(card)
            case wire.TicketPart():
                self._decode.part(message)
            case wire.Forget(worker_id, epoch):
                self._decode.forget(worker_id, epoch)
            case _:
                log.warning("a router sent %s, which it must not", type(message).__name__)

    def _work(self, link: Peer, message: Work, now: float) -> None:
        key = (message.request, message.attempt)
        if self._repeats(key, message):
            log.warning("ignored a %s of a request that is open", type(message).__name__)
            return
        refusal = self._refusal(key, message)
        if refusal is not None:
            self._outbox.put(link, refusal)
            return
        deadline = now + message.deadline_ms / 1000 if message.deadline_ms else _NEVER
        try:
            match message:
                case wire.Prefill():
                    self._prefill.prefill(link, message, now, deadline)
                case wire.Reserve():
                    self._decode.reserve(link, message, deadline)
                case wire.Decode():
                    self._decode.decode(link, message, now, deadline)
        except Exception as error:  # one request's fault stays its own
            log.exception("a %s could not be handled", type(message).__name__)
            if not (self._prefill.abort(key, "internal") or self._decode.abort(key, "internal")):
                self._engine.abort(key)
            reason = f"{type(message).__name__} failed: {error!r}"
            self._outbox.put(link, wire.Failed(*key, kind="internal", message=reason))

    def _repeats(self, key: Key, message: Work) -> bool:
        """Whether the request is open already and this does not continue it: a terminal message is
        on its way, and a second one must not be.
        """
        stage = self._decode.knows(key)
        if stage is Stage.RESERVED:
            return not isinstance(message, wire.Decode)
        return self._prefill.knows(key) or stage in (Stage.PULLING, Stage.DECODING)

    def _refusal(self, key: Key, message: Work) -> wire.Refused | wire.Failed | None:
        """Why this cannot be begun or continued."""
        reserved = self._decode.knows(key) is Stage.RESERVED
        if not reserved:
            if self.state == "draining":
                return wire.Refused(*key, reason="the worker is draining", retry=True)
            reason = ""
            if isinstance(message, wire.Decode) and message.ticket:
                reason = "a Decode with a ticket needs a Reserve"
            elif self._engine.knows(key):
                reason = "an earlier pull of this request and attempt has not ended"
            if reason:
                return wire.Failed(*key, kind="invalid", message=reason)
        reason = self._wrong(message)
        if not reason:
            return None
        if reserved:
            self._decode.abort(key)
        if isinstance(message, wire.Reserve):
            return wire.Refused(*key, reason=reason, retry=False)
        return wire.Failed(*key, kind="invalid", message=reason)

    def _wrong(self, message: Work) -> str:
        """What is wrong with the request itself, or ""."""
        if not 0 <= message.attempt < 1 << 32:
            return f"attempt {message.attempt} is not a u32"
        if len(message.salt) > _MAX_SALT_BYTES:
            return f"the salt has {len(message.salt)} bytes, more than {_MAX_SALT_BYTES}"
        try:
            ids = unpack_ids(message.ids)
        except ValueError:
            return "the token ids are not packed u32"
        if not ids:
            return "there are no token ids"
        if max(ids) >= self._vocab_size:
            return f"token id {max(ids)} is outside the vocabulary of {self._vocab_size}"
        if isinstance(message, wire.Reserve):
            return self._engine.never_fits(len(ids) + 1)
        if not 0 < message.num_prompt <= len(ids):
            return f"num_prompt {message.num_prompt} is not within the {len(ids)} token ids"
        sampling = message.sampling
        if sampling.max_tokens <= len(ids) - message.num_prompt:
            return "all tokens of the answer are there already"
        if any(not 0 <= stop < self._vocab_size for stop in sampling.stop_ids):
            return f"a stop id is outside the vocabulary of {self._vocab_size}"
        ranges_hold = (
            0 <= sampling.temperature < _NEVER
            and sampling.top_k >= 0
            and 0 < sampling.top_p <= 1
            and 0 <= sampling.min_p <= 1
            and 0 <= sampling.seed < 1 << 64
            and 0 <= sampling.choice < 1 << 32
        )
        if not ranges_hold:  # NaN fails as well
            return f"a sampling parameter is out of range: {sampling}"
        if isinstance(message, wire.Prefill):
            return self._engine.never_fits(len(ids) + 1)
        total = min(message.num_prompt + sampling.max_tokens, self._engine.config.max_model_len)
        return self._engine.never_fits(max(total, len(ids) + 1))

    def _end(self, key: Key, link: Peer, kind: str, reason: str) -> None:
        """Drop a request at any stage and say so; nothing when it is not open."""
        if self._prefill.abort(key, kind) or self._decode.abort(key, kind):
            self._outbox.put(link, wire.Failed(*key, kind=kind, message=reason))

    def _check(self, key: Key, link: Peer) -> None:
        """A router has waited for long: tell it if it waits for nothing."""
        if not self._prefill.knows(key) and self._decode.knows(key) is None:
            message = "the worker knows nothing of this request"
            self._outbox.put(link, wire.Failed(*key, kind="lost", message=message))

    # --- leaving -------------------------------------------------------------------------------

    def drain(self, deadline: float = _NEVER) -> None:
        """Take no new work from now on, and hand back at ``deadline`` what has not ended.

        Of several deadlines the earliest holds. ``on_drained`` is called when nothing is left.
        """
        self.state = "draining"
        self._hand_back_at = min(self._hand_back_at, deadline)

    def _tick_drain(self, now: float) -> None:
        if self._leave_from is None:
            self._leave_from = now + _LINGER_S
        if now >= self._hand_back_at:
            self._hand_back()
        if self.num_open and now < self._hand_back_at + LAST_PULLS_S:
            return
        if now >= self._leave_from:
            self.drained = True
            self._outbox.flush()  # before anybody closes a link
            self._on_drained()

    def _hand_back(self) -> None:
        for link in self._links:
            for key in self._prefill.of_link(link) + self._decode.of_link(link):
                self._end(key, link, "draining", "the worker is leaving")

    # --- engine loop ---------------------------------------------------------------------------

    def on_events(self, events: list[Event], now: float) -> None:
        """Ends of pulls."""
        for event in events:
            self._decode.on_event(event, now)

    def on_outputs(self, outputs: list[Output], now: float) -> None:
        """A step is over: its new tokens."""
        for output in outputs:
            if not self._prefill.on_output(output, now):
                self._decode.on_output(output, now)
        self._prefill.send_parts()

    def tick(self, now: float) -> None:
        """Leases, deadlines, and the way out."""
        for key, link in self._prefill.tick(now) + self._decode.tick(now):
            self._end(key, link, "deadline", "the request's deadline passed")
        if self.state == "draining" and not self.drained:
            self._tick_drain(now)

    def flush(self, now: float) -> None:
        """Send what has gathered; report the load when it changed, at most four times a second, and
        a new state at once.
        """
        if self._load is not None and self._load.state != self.state:
            self._report(now)  # before the refusals that follow from it
        self._outbox.flush()
        if now - self._reported >= _REPORT_INTERVAL_S or not self._engine.has_work:
            self._report(now)

    def _report(self, now: float) -> None:
        load = self.load()
        if load != self._load:
            self._reported = now
            self._load = load
            self._on_load(load)

    def fail(self, reason: str) -> None:
        """The engine is gone: every open request hears of it."""
        self.state = "dead"
        for link in self._links:
            for key in self._prefill.of_link(link) + self._decode.of_link(link):
                failed = wire.Failed(*key, kind="internal", message=reason)
                self._outbox.put(link, failed)
        self._outbox.flush()
        if self._load is not None:
            self._on_load(replace(self._load, state="dead"))

    def load(self) -> wire.Load:
        """What this worker is doing now."""
        scheduler = self._engine.scheduler
        stats = scheduler.stats
        rebuilds, faults = self._transfers()
        seqs = [*scheduler.running, *scheduler.waiting]
        work, ceilings = self._meter.total, self._meter.ceilings
        return wire.Load(
            state=self.state,
            transport=self._transport,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            tickets=self._prefill.exporter.num_leased,
            waiting_tokens=sum(seq.num_tokens - seq.num_computed for seq in seqs),
            blocks=self._engine.pool.counts(),
            steps=stats.steps,
            computed_prompt_tokens=stats.computed_prompt_tokens,
            cached_prompt_tokens=stats.cached_prompt_tokens,
            generated_tokens=stats.generated_tokens,
            pulled_bytes=self._decode.stats.num_bytes,
            pulled_blocks=self._decode.stats.num_blocks,
            preemptions=stats.preemptions,
            failed_pulls=self._decode.stats.failed,
            expired_leases=self._prefill.exporter.expired_count,
            early_blocks=self._decode.stats.early_blocks,
            owed_blocks=scheduler.num_owed,
            agent_rebuilds=rebuilds,
            faults=faults,
            flops=work.flops,
            bytes=work.num_bytes,
            busy_s=work.seconds,
            peak_flops=ceilings.flops_s,
            peak_bytes=ceilings.bytes_s,
        )
