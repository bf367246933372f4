"""What the router knows of one worker, and the calls that it has open there (asyncio).

::

    (card) ──► starting ──ready reported──► ready ──► draining
                  ▲                           │           │
                  └────reconnected──── dead ◄─┴─TCP ends──┘

A record is one incarnation. Load is the worker's last report, corrected by what this router has
sent it and has seen end since, so that a report a second old neither floods nor starves it.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from dataclasses import dataclass
from typing import Any

from kvtransfer.layout import KVLayout
from kvtransfer.ticket import AgentCard
from router import wire
from router.leases import Leases
from router.link import Link
from router.policy import Key, WorkerView

STALLED_AFTER_S = 10.0  # an engine that has work and makes no step for so long hangs
SILENCE_S = 5.0  # a call that hears nothing for so long: does the worker still know of it?
MAX_ABORTED = 4096  # aborted calls whose end is awaited; beyond that, the oldest are forgotten

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerLost:
    """The worker of a call is gone, or hangs: no terminal message will come."""

    reason: str
    kind: str = "lost"  # or stalled


Inbox = asyncio.Queue["tuple[Call, wire.Message | WorkerLost]"]
"""Where the messages for the calls of one attempt come together, in the order of their arrival."""


class Call:
    """One (request, attempt) that is open at one worker; its messages go to ``inbox``."""

    def __init__(
        self, worker: Worker, request: bytes, attempt: int, inbox: Inbox, tokens: int, blocks: int
    ) -> None:
        self.worker = worker
        self.request = request
        self.attempt = attempt
        self.tokens = tokens  # that the worker has to compute for it
        self.blocks = blocks  # that it asked for
        self.open = True  # no terminal message yet
        self.sent = False  # the worker knows of it
        self._inbox = inbox
        self._stirred = True  # something was said since the last look
        self._quiet_since = 0.0

    def send(self, message: wire.Message) -> None:
        """To the worker; nothing when the call is over, as when the worker was lost meanwhile."""
        if self.open:
            self.sent = self._stirred = True
            self.worker.send(message)

    def put(self, message: wire.Message | WorkerLost) -> None:
        """The worker's word, or a word on the worker."""
        self._stirred = True
        self._inbox.put_nowait((self, message))

    def check(self, now: float) -> None:
        """To be called about once a second: ask the worker when all is quiet for long."""
        if self._stirred:
            self._stirred, self._quiet_since = False, now
        elif self.sent and now - self._quiet_since >= SILENCE_S:
            self._quiet_since = now
            self.worker.send(wire.Check(self.request, self.attempt))

    def abort(self) -> None:
        """Drop it on the worker, unless it is over. What still comes for it is ignored."""
        if self.open:
            self.worker.abort(self)


class Worker:
    """One incarnation of a worker."""

    def __init__(self, card: wire.WorkerCard) -> None:
        self.card = card
        self.key: Key = (card.worker_id, card.epoch)
        self.layout = KVLayout(**card.layout)
        self.load: wire.Load | None = None
        self.link: Link | None = None
        self.lost_at: float | None = None  # loop time; None: connected, or never was
        self.stalled = False
        self.calls: dict[tuple[bytes, int], Call] = {}
        self.aborted: dict[tuple[bytes, int], None] = {}  # their terminal message is to come
        self.leases = Leases()  # of its tickets that the router wants to be kept
        self.peers: set[Key] = set()  # whose agent card this worker was sent on this connection
        self.introduced: set[Key] = set()  # ... and ever, if not told to forget them
        self.last_turn = -1
        self.refused_blocks: int | None = None  # it had no room for so many, just now
        self.refused_tokens = False  # it wanted no more prompts, just now
        self._sent = (0, 0, 0)  # own calls, their tokens and blocks, now ...
        self._sent_at_load = (0, 0, 0)  # ... and when the last report came
        self._steps, self._moved_at = -1, 0.0

    @property
    def condition(self) -> str:
        """Its state, or stalled."""
        return "stalled" if self.stalled and self.connected else self.state

    @property
    def state(self) -> str:
        """starting, ready, draining or dead."""
        if not self.connected:
            return "starting" if self.lost_at is None else "dead"
        return "starting" if self.load is None else self.load.state

    @property
    def tickets(self) -> tuple[bytes, ...]:
        """Those of its tickets that this router wants to be kept."""
        return self.leases.ids

    @property
    def connected(self) -> bool:
        return self.link is not None and self.link.open

    @property
    def usable(self) -> bool:
        return self.state == "ready" and not self.stalled

    def send(self, *messages: wire.Message) -> None:
        if self.link is not None:
            self.link.send(*messages)

    # --- calls -----------------------------------------------------------------------------------

    def call(
        self, request: bytes, attempt: int, inbox: Inbox, tokens: int = 0, blocks: int = 0
    ) -> Call:
        """Open a call; the caller sends its first message."""
        call = Call(self, request, attempt, inbox, tokens, blocks)
        self.calls[request, attempt] = call
        self._count(1, tokens, blocks)
        return call

    def computed(self, call: Call) -> None:
        """The worker has computed what this call brought."""
        if call.open:
            self._count(0, -call.tokens, 0)
            call.tokens = 0

    def forget(self, call: Call) -> None:
        """The call is over."""
        call.open = False
        if self.calls.pop((call.request, call.attempt), None) is not None:
            self._count(-1, -call.tokens, -call.blocks)
            self.refused_blocks, self.refused_tokens = None, False

    def abort(self, call: Call) -> None:
        """Drop an open call, on both sides."""
        self.forget(call)
        if call.sent:
            self._send_abort((call.request, call.attempt))

    def _send_abort(self, name: tuple[bytes, int]) -> None:
        self.aborted[name] = None
        if len(self.aborted) > MAX_ABORTED:  # its end was not news to the worker: it says nothing
            del self.aborted[next(iter(self.aborted))]
        self.send(wire.Abort(*name))

    def _refused(self, call: Call) -> None:
        """It has no room for this call now: send no such call before something changes there."""
        if call.tokens:
            self.refused_tokens = True
        if call.blocks:
            self.refused_blocks = call.blocks

    def _count(self, calls: int, tokens: int, blocks: int) -> None:
        self._sent = (self._sent[0] + calls, self._sent[1] + tokens, self._sent[2] + blocks)

    # --- what comes from the worker --------------------------------------------------------------

    def receive(self, message: wire.Message) -> None:
        """A message of this worker, for one of its calls; the others are dropped and aborted."""
        match message:
            case wire.Load():
                self.load = message
                self._sent_at_load = self._sent
                self.refused_blocks, self.refused_tokens = None, False
                return
            case wire.Expired(ticket_ids):
                wanted = self.leases.expired(ticket_ids)
                if wanted:
                    log.warning("%s: %d leases ran out", self.card.worker_id, wanted)
                return
            case (
                wire.Reserved() | wire.Refused() | wire.TicketPart() | wire.Prefilled()
                | wire.Pulled() | wire.UnknownPeer() | wire.Tokens() | wire.Failed()
            ):  # fmt: skip
                pass
            case _:
                raise wire.WireError(f"{type(message).__name__} from a worker")
        name = (message.request, message.attempt)
        call = self.calls.get(name)
        if call is not None:
            if _is_terminal(message):
                self.forget(call)
            if isinstance(message, wire.Refused) and message.retry:
                self._refused(call)
            call.put(message)
            return
        if isinstance(message, wire.Prefilled) and message.ticket_id:
            self.send(wire.Release(message.ticket_id))  # the answer crossed our Abort
        if _is_terminal(message):
            self.aborted.pop(name, None)
        elif name not in self.aborted:
            self._send_abort(name)

    def lose(self, reason: str, kind: str = "lost") -> None:
        """No answer is expected any more for the calls that are open."""
        for call in list(self.calls.values()):
            self.abort(call)
            call.put(WorkerLost(reason, kind))

    def release(self, ticket_id: bytes) -> None:
        """This KV is not needed any more."""
        self.leases.remove(ticket_id)
        self.send(wire.Release(ticket_id))

    def tick(self, now: float) -> bool:
        """To be called a few times a second. True when the worker stalled, or goes on again."""
        if not self.connected:
            return False
        due = self.leases.due(now)
        if due:
            self.send(wire.Renew(due))
        for call in list(self.calls.values()):
            call.check(now)
        return self.check_progress(now)

    def check_progress(self, now: float) -> bool:
        """Notice an engine that answers pings but makes no step. True when that has changed."""
        link = self.link
        if link is None:
            return False
        if not link.peer_busy or link.peer_steps != self._steps:
            self._steps, self._moved_at = link.peer_steps, now
        before, self.stalled = self.stalled, now - self._moved_at > STALLED_AFTER_S
        if self.stalled and not before:
            log.error("%s has work but made no step for %g s", self.card.worker_id, STALLED_AFTER_S)
            self.lose("its engine stands still", "stalled")
        return before != self.stalled

    # --- views -----------------------------------------------------------------------------------

    def view(self) -> WorkerView:
        """For the policy: the last report, corrected by what was sent and has ended since."""
        card, load = self.card, self.load
        calls, tokens, blocks = (
            now - then for now, then in zip(self._sent, self._sent_at_load, strict=True)
        )
        free = 0
        if load is not None:
            free = load.blocks.get("free", 0) + load.blocks.get("cached", 0)
            free -= load.owed_blocks + blocks
        if self.refused_blocks is not None:
            free = min(free, self.refused_blocks - 1)
        pending = tokens + (load.waiting_tokens if load else 0)
        short = sum(c.tokens for c in self.calls.values() if c.tokens <= card.token_budget)
        seqs = calls + (load.running + load.waiting if load else 0)
        return WorkerView(
            key=self.key,
            role=card.role,
            usable=self.usable,
            kv_blocks=card.kv_blocks,
            block_size=card.block_size,
            max_model_len=card.max_model_len,
            max_num_seqs=card.max_num_seqs,
            token_budget=card.token_budget,
            # What is reserved or pulled is in no report yet, but it is one of our calls.
            num_seqs=max(seqs, len(self.calls)),
            pending_short=sys.maxsize if self.refused_tokens else short,
            pending_long=sys.maxsize if self.refused_tokens else max(0, pending - short),
            free_blocks=min(free, card.kv_blocks - 1),
            last_turn=self.last_turn,
        )

    def report(self) -> dict[str, Any]:
        """For ``GET /internal/state``."""
        card, load = self.card, self.load or _NO_LOAD
        counters = {name: value for name, value in vars(load).items() if name != "state"}
        return {
            "id": card.worker_id,
            "epoch": card.epoch,
            "role": card.role,
            "state": self.state,
            "pid": card.pid,
            "host": card.host,
            "port": card.port,
            "model": card.model,
            "kv_blocks": card.kv_blocks,
            "block_size": card.block_size,
            "max_model_len": card.max_model_len,
            "stalled": self.stalled,
            "open_calls": len(self.calls),
            **counters,
        }


def common_agent(prefill: Worker, decode: Worker) -> AgentCard | None:
    """How ``decode`` reaches the pool of ``prefill``: the transport it uses now, if P has it."""
    spoken = {agent.transport for agent in decode.card.agents}
    agents = [agent for agent in prefill.card.agents if agent.transport in spoken]
    preferred = decode.load.transport if decode.load is not None else ""
    agents.sort(key=lambda agent: agent.transport != preferred)
    return agents[0] if agents else None


def _is_terminal(message: wire.Message) -> bool:
    match message:
        case wire.Refused() | wire.Prefilled() | wire.Failed():
            return True
        case wire.Tokens():
            return bool(message.finish)
    return False


_NO_LOAD = wire.Load(
    state="starting",
    transport="",
    running=0,
    waiting=0,
    tickets=0,
    waiting_tokens=0,
    blocks={"free": 0, "active": 0, "cached": 0, "leased": 0, "quarantined": 0},
    steps=0,
    computed_prompt_tokens=0,
    cached_prompt_tokens=0,
    generated_tokens=0,
    pulled_bytes=0,
    pulled_blocks=0,
    preemptions=0,
    failed_pulls=0,
    expired_leases=0,
)
