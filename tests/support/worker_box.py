"""A whole worker but for tensors, threads and sockets, for tests of what it says and keeps.

The engine, the roles, the exporter and the tickets are real; the runner, the puller and the links
are small doubles, and the clock is a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from types import SimpleNamespace

from prometheus_client import CollectorRegistry

from kvtransfer.exporter import Exporter
from kvtransfer.hashing import pack_ids
from kvtransfer.importer import Arrived, Event, PullAborted, PullFailed, Settled
from kvtransfer.ticket import AgentCard, Ticket
from router import wire
from router.buckets import LAG, Tally
from services.decode import DecodeService
from services.engine.config import EngineConfig
from services.engine.engine import Engine
from services.engine.meter import StepMeter
from services.engine.roofline import Ceilings, Cost
from services.engine.scheduler import Row
from services.metrics import Sources, registry_of
from services.outbox import Outbox, Peer
from services.prefill import PrefillService
from services.roles import Roles
from services.tallies import WorkerTallies
from services.tracing import Record, WorkerTracing
from tests.support.fake_runner import VOCAB, FakeRunner

BLOCK = 4
SPAN = 100
SECRET = b"of this deployment"
LEASE_S = 30.0
MAX_LEN = 40
IDS = [1, 2, 3, 4, 5, 6]
SAMPLING = wire.Sampling(max_tokens=4)
TERMINAL = (wire.Refused, wire.Prefilled, wire.Failed)

Work = wire.Reserve | wire.Prefill | wire.Decode


@dataclass(eq=False)
class RecordingLink:
    """A router at the other end."""

    name: str = "router"
    sent: list[wire.Message] = field(default_factory=list)

    def send(self, *messages: wire.Message) -> None:
        self.sent += [wire.decode(wire.encode(message)[4:]) for message in messages]

    def take(self) -> list[wire.Message]:
        sent, self.sent = self.sent, []
        return sent


def is_terminal(message: wire.Message) -> bool:
    return isinstance(message, TERMINAL) or (
        isinstance(message, wire.Tokens) and bool(message.finish)
    )


@dataclass
class Pull:
    ticket: Ticket
    pairs: tuple[tuple[int, int], ...]
    deadline: float
    aborted: bool = False
    told: bool = False

    @property
    def blocks(self) -> tuple[int, ...]:
        return tuple(local for _, local in self.pairs)


class ScriptedPuller:
    """Keeps the puller's contract: one outcome per pull, one Settled after an unsettled one."""

    rebuild_count = 0

    def __init__(self) -> None:
        self.pulls: dict[bytes, Pull] = {}  # outcome or Settled still to come
        self.known: set[tuple[str, int]] = set()  # incarnations that the transport keeps
        self.most_known = 0
        self._leaving: set[tuple[str, int]] = set()

    def pull(
        self,
        key: bytes,
        ticket: Ticket,
        peer: AgentCard,
        pairs: Sequence[tuple[int, int]],
        deadline: float,
    ) -> None:
        assert key not in self.pulls, "this key is being pulled"
        assert (peer.worker_id, peer.epoch) == (ticket.worker_id, ticket.epoch)
        assert pairs, "a pull of nothing"
        assert all(0 <= index < len(ticket.block_ids) for index, _ in pairs)
        busy = {local for pull in self.pulls.values() for local in pull.blocks}
        assert not busy & {local for _, local in pairs}, "a block is the target of two pulls"
        self.pulls[key] = Pull(ticket, tuple(pairs), deadline)
        self.known.add((peer.worker_id, peer.epoch))
        self.most_known = max(self.most_known, len(self.known))

    def abort(self, key: bytes) -> None:
        if key in self.pulls:
            self.pulls[key].aborted = True

    def forget(self, peer: AgentCard) -> None:
        self._leaving.add((peer.worker_id, peer.epoch))
        self._forget_idle()

    def _forget_idle(self) -> None:
        busy = {(pull.ticket.worker_id, pull.ticket.epoch) for pull in self.pulls.values()}
        self.known -= self._leaving - busy
        self._leaving &= busy

    @property
    def num_in_flight(self) -> int:
        return len(self.keys())

    def keys(self, told: bool = False) -> list[bytes]:
        return [key for key, pull in self.pulls.items() if pull.told == told]

    def arrived(self, key: bytes) -> Arrived:
        assert not self.pulls[key].told
        pull = self.pulls.pop(key)
        self._forget_idle()
        return Arrived(key, pull.blocks, len(pull.pairs) * SPAN)

    def failed(self, key: bytes, settled: bool) -> PullFailed:
        return PullFailed(key, self._end(key, settled), "the seal differs", settled)

    def gave_up(self, key: bytes, settled: bool) -> PullAborted:
        return PullAborted(key, self._end(key, settled), settled)

    def settled(self, key: bytes) -> Settled:
        assert self.pulls[key].told
        blocks = self.pulls.pop(key).blocks
        self._forget_idle()
        return Settled(key, blocks)

    def _end(self, key: bytes, settled: bool) -> tuple[int, ...]:
        pull = self.pulls[key]
        assert not pull.told
        pull.told = True
        if settled:
            del self.pulls[key]
            self._forget_idle()
        return pull.blocks


def cost(rows: Sequence[Row]) -> Cost:
    """1,000 operations for each token, 500 bytes for each step."""
    return Cost(1000 * sum(len(row.ids) for row in rows), 500)


class Box:
    """A whole worker but for tensors, threads and sockets."""

    def __init__(
        self,
        worker_id: str,
        epoch: int = 7,
        blocks: int = 33,
        chunk_budget: int = 0,
        record: Record | None = None,
    ) -> None:
        self.runner = FakeRunner(BLOCK, token_budget=8, chunk_budget=chunk_budget)
        config = EngineConfig(
            kv_blocks=blocks,
            block_size=BLOCK,
            max_model_len=MAX_LEN,
            max_num_seqs=4,
            token_budget=8,
            chunk_budget=chunk_budget,
        )
        self.engine = Engine(config, self.runner)
        self.puller = ScriptedPuller()
        self.now = 100.0
        self.loads: list[wire.Load] = []
        self.link = RecordingLink()
        ids = count()
        self.exporter = Exporter(
            worker_id,
            epoch,
            b"layout",
            SECRET,
            LEASE_S,
            lambda size: next(ids).to_bytes(size, "big"),
        )
        outbox = Outbox(self.deliver)
        self.tallies = WorkerTallies(StepMeter(cost, Ceilings(flops_s=1e5, bytes_s=1e4)))
        self.step_s = 0.0  # that a step takes
        tracing = WorkerTracing(worker_id, record, lambda: self.now)
        self.decode = DecodeService(
            self.engine, self.puller, outbox, b"layout", SECRET, tracing, self.tallies
        )
        self.roles = Roles(
            self.engine,
            PrefillService(self.engine, self.exporter, outbox, tracing, self.tallies),
            self.decode,
            outbox,
            VOCAB,
            "scripted",
            self.loads.append,
            meter=self.tallies.meter,
        )
        self.card = AgentCard(worker_id, epoch, b"layout", blocks, "scripted", b"")
        self.roles.connected(self.link, ())

    def registry(self, role: str = "decode") -> CollectorRegistry:
        """What a scrape would show now, and later."""
        sources = Sources(
            engine=self.engine,
            pulls=self.decode.stats,
            exporter=self.exporter,
            puller=self.puller,  # type: ignore[arg-type]
            tallies=self.tallies,
            lag=Tally(LAG),
            load=self.roles.load,
            clock=lambda: self.now,
        )
        names = {"served_model": "tiny", "role": role, "worker_id": self.card.worker_id}
        return registry_of(SimpleNamespace(**names), "scripted", sources)  # type: ignore[arg-type]

    def deliver(self, batch: list[tuple[Peer, list[wire.Message]]]) -> None:
        for peer, messages in batch:
            peer.send(*messages)

    def handle(self, message: wire.Message, link: RecordingLink | None = None) -> None:
        self.roles.handle(link or self.link, message, self.now)
        self.roles.flush(self.now)

    def say(self, *messages: wire.Message) -> list[wire.Message]:
        """Send messages; what comes back at once."""
        for message in messages:
            self.handle(message)
        return self.link.take()

    def event(self, event: Event) -> list[wire.Message]:
        self.roles.on_events([event], self.now)
        self.roles.flush(self.now)
        return self.link.take()

    def step(self) -> None:
        self.roles.tick(self.now)
        rows: Sequence[Row] = ()
        began = self.now
        if self.engine.has_work:
            outputs = self.engine.step(began)
            assert self.engine.plan is not None
            rows = self.engine.plan.rows
            self.now += self.step_s
            self.roles.on_outputs(outputs, self.now)
        self.roles.flush(self.now)
        self.tallies.on_turn(rows, began, self.now)
        self.check_integrity()

    def check_integrity(self) -> None:
        """What holds between any two messages."""
        self.engine.check_integrity()
        self.exporter.check_integrity()
        self.decode.check_integrity()
        writable = {local for pull in self.puller.pulls.values() for local in pull.blocks}
        waiting = [r.blocks[r.num_cached :] for r in self.engine._reserved.values()]
        fenced = {b for blocks in (*waiting, *self.engine._quarantined.values()) for b in blocks}
        assert writable <= fenced, "a pull can write to a block that somebody uses"

    def run(self) -> list[wire.Message]:
        """Step until there is no work; what was said."""
        for _ in range(500):
            if not self.engine.has_work:
                return self.link.take()
            self.step()
        raise AssertionError("the worker does not come to an end")

    def pass_time(self, seconds: float) -> list[wire.Message]:
        self.now += seconds
        self.roles.tick(self.now)
        self.roles.flush(self.now)
        return self.link.take()

    def check_idle(self) -> None:
        """Nothing is open and nothing is held."""
        self.check_integrity()
        counts = self.engine.pool.counts()
        held = {name: counts[name] for name in ("active", "leased", "quarantined")}
        assert held == {"active": 0, "leased": 0, "quarantined": 0}
        assert self.roles.num_open == 0
        assert not self.engine.has_work
        assert not self.puller.pulls
        assert not self.engine._seqs
        assert not self.engine._reserved
        assert not self.engine._quarantined


def reserve(ids: Sequence[int] = IDS, request: bytes = b"a", **changes: object) -> wire.Reserve:
    return replace(wire.Reserve(request, 0, pack_ids(ids)), **changes)  # type: ignore[arg-type]


def prefill(ids: Sequence[int] = IDS, request: bytes = b"a", **changes: object) -> wire.Prefill:
    message = wire.Prefill(request, 0, pack_ids(ids), len(ids), SAMPLING)
    return replace(message, **changes)  # type: ignore[arg-type]


def decode(ids: Sequence[int] = IDS, request: bytes = b"a", **changes: object) -> wire.Decode:
    message = wire.Decode(request, 0, pack_ids(ids), len(ids), SAMPLING)
    return replace(message, **changes)  # type: ignore[arg-type]


def only(messages: list[wire.Message]) -> wire.Message:
    assert len(messages) == 1, messages
    return messages[0]


def failure(messages: list[wire.Message], kind: str) -> str:
    """The text of the one Failed that was said."""
    message = only(messages)
    assert isinstance(message, wire.Failed), message
    assert message.kind == kind
    return message.message


def prefilled(box: Box, ids: Sequence[int] = IDS, **changes: object) -> wire.Prefilled:
    assert box.say(prefill(ids, **changes)) == []
    message = only(box.run())
    assert isinstance(message, wire.Prefilled)
    return message


class Pair:
    """A prefill and a decode worker, and what their router would do."""

    def __init__(self, record: Record | None = None) -> None:
        self.p, self.d = Box("p", record=record), Box("d", epoch=9, record=record)

    def pulling(self, ids: Sequence[int] = IDS, **changes: object) -> tuple[wire.Prefilled, bytes]:
        """Up to a pull in flight: what P said, and the pull's key."""
        assert isinstance(only(self.d.say(reserve(ids, **changes))), wire.Reserved)
        answer = prefilled(self.p, ids)
        message = self.decode(ids, answer)
        assert self.d.say(wire.Peer(self.p.card), message) == []
        return answer, only_key(self.d)

    def decode(self, ids: Sequence[int], answer: wire.Prefilled) -> wire.Decode:
        return decode([*ids, answer.token], num_prompt=len(ids), ticket=answer.ticket)

    def computing(self, ids: Sequence[int], **changes: object) -> None:
        """Reserved at D, begun at P with early parts; not a step was made."""
        assert isinstance(only(self.d.say(reserve(ids, **changes))), wire.Reserved)
        assert self.d.say(wire.Peer(self.p.card)) == []
        assert self.p.say(prefill(ids, early=True, **changes)) == []

    def step(self) -> list[wire.Message]:
        """A step of P; what it said."""
        self.p.step()
        return self.p.link.take()

    def part(self) -> tuple[wire.TicketPart, bytes]:
        """A step of P that makes a part, passed on to D: the part and the key of its pull."""
        message = only(self.step())
        assert isinstance(message, wire.TicketPart)
        before = set(self.d.puller.pulls)
        assert self.d.say(message) == []
        (key,) = set(self.d.puller.pulls) - before
        return message, key

    def copy(self, key: bytes) -> None:
        """The bytes of a pull: what P's blocks hold now."""
        pull = self.d.puller.pulls[key]
        for index, local in pull.pairs:
            remote = pull.ticket.block_ids[index]
            assert self.p.runner.generations[remote] == pull.ticket.generations[index]
            self.d.runner.kv[local] = dict(self.p.runner.kv[remote])

    def arrive(self, key: bytes) -> list[wire.Message]:
        self.copy(key)
        return self.d.event(self.d.puller.arrived(key))

    def check_idle(self) -> None:
        self.p.check_idle()
        self.d.check_idle()


def only_key(box: Box) -> bytes:
    (key,) = box.puller.pulls
    return key
