"""Routers and links without sockets, for whole pairs of ``worker_box``: every message waits until a
test delivers it.

A :class:`World` holds boxes, routers and what is under way between them. It keeps a ledger: each
(request, attempt) that a worker opened must end there by exactly one terminal message. The routers
follow the protocol as the real one does, but decide nothing by themselves: where a request goes
next, and when, is the test's choice.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvtransfer.hashing import pack_ids
from router import wire
from tests.support.worker_box import Box, Pull, RecordingLink, is_terminal

OPENINGS = (wire.Reserve, wire.Prefill, wire.Decode, wire.Check)
GARBAGE = (-1, -1)

Call = tuple[int, bytes, int]  # link, request, attempt


class Pipe:
    """One connection between a router and a box, both ways; order is kept."""

    def __init__(self, number: int, router: Router, box: Box) -> None:
        self.number = number
        self.router = router
        self.box = box
        self.link = RecordingLink(router.name)
        self.to_box: deque[wire.Message] = deque()
        self.to_router: deque[wire.Message] = deque()
        self.introduced: set[tuple[str, int]] = set()  # whose cards the box got over this
        self.sent: list[wire.Message] = []  # for what comes twice, or late


@dataclass(eq=False)
class Request:
    """A request as its router sees it."""

    name: bytes
    ids: list[int]
    sampling: wire.Sampling
    deadline: float
    stage: str = "queued"  # reserving, prefilling, decoding; done, cancelled, late
    attempt: int = 0
    tokens: list[int] = field(default_factory=list)
    p: Box | None = None
    d: Box | None = None
    ticket: tuple[Box, bytes] | None = None  # who leased it, and its id
    packed: bytes = b""
    failures: Counter[str] = field(default_factory=Counter)

    @property
    def so_far(self) -> list[int]:
        return [*self.ids, *self.tokens]

    @property
    def is_over(self) -> bool:
        return self.stage in ("done", "cancelled", "late")


class Router:
    """Owns requests, and has a pipe to each box that it knows."""

    def __init__(self, name: str, world: World) -> None:
        self.name = name
        self.world = world
        self.requests: dict[bytes, Request] = {}
        self.pipes: dict[Box, Pipe] = {}
        self.early = True

    # --- what it does of its own accord ---

    def ask(self, request: Request) -> None:
        self.requests[request.name] = request

    def begin(self, request: Request, p: Box | None, d: Box) -> None:
        """A new attempt: D first. Without P, D computes it all."""
        assert request.stage == "queued"
        request.attempt += 1
        request.p, request.d = p, d
        if p is None:
            request.stage = "decoding"
            self._decode(request, b"")
            return
        request.stage = "reserving"
        self.reserve(request)

    def reserve(self, request: Request) -> None:
        """Ask D for room."""
        assert request.d is not None
        ids, left = pack_ids(request.so_far), self._left_ms(request)
        self._send(request.d, wire.Reserve(request.name, request.attempt, ids, deadline_ms=left))

    def cancel(self, request: Request, stage: str = "cancelled") -> None:
        """The client has gone, or the deadline has passed."""
        if not request.is_over:
            self._end_attempt(request)
            request.stage = stage

    def renew(self) -> None:
        for box in self.pipes:
            ids = [t for owner, t in self._tickets() if owner is box]
            if ids:
                self._send(box, wire.Renew(tuple(ids)))

    def check(self, request: Request) -> None:
        """Nothing was heard for long."""
        box = request.p if request.stage == "prefilling" else request.d
        assert box is not None
        self._send(box, wire.Check(request.name, request.attempt))

    def lost(self, box: Box) -> None:
        """The connection to a box is gone: what was open there is tried again."""
        for request in list(self.requests.values()):
            if request.is_over or request.stage == "queued":
                continue
            if request.d is box or (request.p is box and request.stage != "decoding"):
                self._fail(request, "lost")

    def gone(self, box: Box) -> None:
        """The worker itself is gone: so are its tickets."""
        for request in self.requests.values():
            if request.ticket is not None and request.ticket[0] is box:
                request.ticket = None
        for other in self.pipes:
            self._send(other, wire.Forget(box.card.worker_id, box.card.epoch))

    def wanted(self, box: Box) -> tuple[bytes, ...]:
        return tuple(ticket for owner, ticket in self._tickets() if owner is box)

    # --- what it answers ---

    def hear(self, box: Box, message: wire.Message) -> None:
        """A message of a box. What is not for the present attempt is dropped."""
        if isinstance(message, wire.Load | wire.Expired):
            return
        request = self.requests.get(message.request)  # type: ignore[union-attr]
        stale = request is None or request.is_over or request.stage == "queued"
        if stale or message.attempt != request.attempt:  # type: ignore[union-attr]
            self._refuse(box, message)
            return
        match message:
            case wire.Reserved() if request.stage == "reserving":
                self._prefill(request)
            case wire.TicketPart() if request.stage == "prefilling":
                self._introduce(request)
                assert request.d is not None
                self._send(request.d, message)
            case wire.Prefilled() if request.stage == "prefilling":
                self._prefilled(request, box, message)
            case wire.UnknownPeer() if request.ticket is not None:
                self._introduce(request, again=True)
                self._decode(request, request.packed)
            case wire.Pulled():
                self._release(request)
            case wire.Tokens() if request.stage == "decoding":
                assert message.first_index == len(request.tokens), "a token is lost or repeated"
                self._deliver(request, message.ids, message.finish)
            case wire.Failed() | wire.Refused():
                kind = message.kind if isinstance(message, wire.Failed) else "refused"
                self._fail(request, kind)

    def _refuse(self, box: Box, message: wire.Message) -> None:
        """Nobody waits for this any more: leave nothing behind it."""
        if isinstance(message, wire.Prefilled) and message.ticket:
            self._send(box, wire.Release(message.ticket_id))
        if not is_terminal(message):
            self._send(box, wire.Abort(message.request, message.attempt))  # type: ignore[union-attr]

    # --- steps of a request ---

    def _prefill(self, request: Request) -> None:
        request.stage = "prefilling"
        assert request.p is not None
        self._send(
            request.p,
            wire.Prefill(
                request.name,
                request.attempt,
                pack_ids(request.so_far),
                len(request.ids),
                request.sampling,
                deadline_ms=self._left_ms(request),
                early=self.early,
            ),
        )

    def _prefilled(self, request: Request, box: Box, message: wire.Prefilled) -> None:
        if message.ticket:
            request.ticket, request.packed = (box, message.ticket_id), message.ticket
        self._deliver(request, (message.token,), message.finish)
        if not request.is_over:
            request.stage = "decoding"
            self._introduce(request)
            self._decode(request, message.ticket)

    def _decode(self, request: Request, ticket: bytes) -> None:
        assert request.d is not None
        self._send(
            request.d,
            wire.Decode(
                request.name,
                request.attempt,
                pack_ids(request.so_far),
                len(request.ids),
                request.sampling,
                ticket,
                deadline_ms=self._left_ms(request),
            ),
        )

    def _introduce(self, request: Request, again: bool = False) -> None:
        assert request.p is not None
        assert request.d is not None
        pipe, card = self.pipes.get(request.d), request.p.card
        if pipe is not None and (again or (card.worker_id, card.epoch) not in pipe.introduced):
            pipe.introduced.add((card.worker_id, card.epoch))
            self._send(request.d, wire.Peer(card))

    def _deliver(self, request: Request, ids: Sequence[int], finish: str) -> None:
        request.tokens += ids
        if finish:
            self._end_attempt(request)
            request.stage = "done"

    def _fail(self, request: Request, kind: str) -> None:
        request.failures[kind] += 1
        self._end_attempt(request)
        request.stage = "late" if kind == "deadline" else "queued"

    def _end_attempt(self, request: Request) -> None:
        """Leave nothing at the workers."""
        for box in (request.p, request.d):
            if box is not None:
                self._send(box, wire.Abort(request.name, request.attempt))
        self._release(request)
        request.p = request.d = None

    def _release(self, request: Request) -> None:
        if request.ticket is not None:
            box, ticket_id = request.ticket
            self._send(box, wire.Release(ticket_id))
            request.ticket = None

    def _tickets(self) -> Iterable[tuple[Box, bytes]]:
        return [r.ticket for r in self.requests.values() if r.ticket is not None]

    def _left_ms(self, request: Request) -> int:
        if request.deadline == float("inf"):
            return 0
        return max(1, int((request.deadline - self.world.now) * 1000))

    def _send(self, box: Box, message: wire.Message) -> None:
        pipe = self.pipes.get(box)
        if pipe is not None:  # else it is lost, as what was under way is
            pipe.to_box.append(message)
            pipe.sent.append(message)


class World:
    """Boxes, routers, what is under way, and the ledger of terminal messages."""

    def __init__(self) -> None:
        self.now = 100.0
        self.boxes: list[Box] = []
        self.routers: list[Router] = []
        self.pipes: list[Pipe] = []  # the broken ones too: their numbers are in the ledger
        self.opened: Counter[Call] = Counter()
        self.ended: Counter[Call] = Counter()
        self._incarnations: dict[tuple[str, int], Box] = {}

    @property
    def live(self) -> list[Pipe]:
        return [pipe for router in self.routers for pipe in router.pipes.values()]

    def add_box(self, box: Box) -> Box:
        box.now = self.now
        box.roles.disconnected(box.link)
        self.boxes.append(box)
        self._incarnations[box.card.worker_id, box.card.epoch] = box
        for router in self.routers:
            self.connect(router, box)
        return box

    def add_router(self, name: str) -> Router:
        router = Router(name, self)
        self.routers.append(router)
        for box in self.boxes:
            self.connect(router, box)
        return router

    def connect(self, router: Router, box: Box) -> None:
        pipe = Pipe(len(self.pipes), router, box)
        self.pipes.append(pipe)
        router.pipes[box] = pipe
        box.roles.connected(pipe.link, router.wanted(box))
        self._listen()

    def disconnect(self, router: Router, box: Box) -> None:
        """What is under way is lost; both ends notice."""
        pipe = router.pipes.pop(box)
        box.roles.disconnected(pipe.link)
        box.roles.flush(self.now)
        assert pipe.link.take() == [], "something was said to a lost link"
        router.lost(box)
        self._listen()

    def kill(self, box: Box) -> None:
        """The worker is gone, and with it its memory."""
        self.boxes.remove(box)
        self._incarnations.pop((box.card.worker_id, box.card.epoch))
        for router in self.routers:
            router.pipes.pop(box, None)
            router.lost(box)
            router.gone(box)

    def stop_router(self, router: Router) -> None:
        """The router is gone with all that it knew."""
        self.routers.remove(router)
        for box, pipe in router.pipes.items():
            box.roles.disconnected(pipe.link)
            box.roles.flush(self.now)

    # --- what moves ---

    def to_box(self, pipe: Pipe) -> None:
        """Deliver the next message to a worker."""
        message = pipe.to_box.popleft()
        if isinstance(message, OPENINGS):
            call = (pipe.number, message.request, message.attempt)
            if self.opened[call] == self.ended[call]:
                knows = isinstance(message, wire.Check) and self._knows(pipe, message)
                self.opened[call] += not knows
        pipe.box.now = self.now
        pipe.box.handle(message, pipe.link)
        self._listen()

    def _knows(self, pipe: Pipe, message: wire.Check) -> bool:
        """Another router's request of that name, which only a test could make."""
        key = (message.request, message.attempt)
        box = pipe.box
        return box.decode.knows(key) is not None or box.roles._prefill.knows(key)

    def to_router(self, pipe: Pipe) -> None:
        """Deliver the next message of a worker."""
        pipe.router.hear(pipe.box, pipe.to_router.popleft())

    def step(self, box: Box) -> None:
        box.now = self.now
        box.step()
        self._listen()

    def pass_time(self, seconds: float) -> None:
        """Workers tick; requests that are late end at their routers as well."""
        self.now += seconds
        for box in self.boxes:
            self.step(box)
        for router in self.routers:
            for request in list(router.requests.values()):
                if request.deadline <= self.now:
                    router.cancel(request, "late")

    def pull_ends(self, box: Box, key: bytes, how: str) -> None:
        """``arrive``, ``fail`` or ``late``. What cannot be verified any more fails."""
        pull = box.puller.pulls[key]
        producer = self._incarnations.get((pull.ticket.worker_id, pull.ticket.epoch))
        if how == "arrive" and producer is not None and intact(producer, pull):
            for index, local in pull.pairs:
                remote = producer.runner.kv[pull.ticket.block_ids[index]]
                box.runner.kv[local] = dict(remote)
            event = box.puller.arrived(key)
        else:
            scribble(box, pull)
            ends = box.puller.gave_up if pull.aborted else box.puller.failed
            event = ends(key, settled=how != "late")  # type: ignore[assignment]
        self._tell(box, event)

    def settle(self, box: Box, key: bytes) -> None:
        """The last bytes of a pull that was given up."""
        scribble(box, box.puller.pulls[key])
        self._tell(box, box.puller.settled(key))

    def _tell(self, box: Box, event: object) -> None:
        box.now = self.now
        box.roles.on_events([event], self.now)  # type: ignore[list-item]
        box.roles.flush(self.now)
        self._listen()

    def _listen(self) -> None:
        for pipe in self.live:
            for message in pipe.link.take():
                self._note(pipe, message)
                pipe.to_router.append(message)

    def _note(self, pipe: Pipe, message: wire.Message) -> None:
        if isinstance(message, wire.Load | wire.Expired):
            return
        call = (pipe.number, message.request, message.attempt)  # type: ignore[union-attr]
        assert self.opened[call] > self.ended[call], f"{message} after the terminal message"
        self.ended[call] += is_terminal(message)

    # --- without faults ---

    def settle_down(self, limit: int = 4000) -> None:
        """Without any more faults, until nothing moves."""
        for _ in range(limit):
            if not self.move():
                return
        raise AssertionError("the world does not come to rest")

    def move(self, pulls: bool = True) -> bool:
        """All that is under way arrives, pulls end well, every engine makes a step."""
        moved = self.deliver_to_boxes()
        for pipe in self.live:
            while pipe.to_router:
                self.to_router(pipe)
                moved = True
        for box in list(self.boxes):
            for key in box.puller.keys(told=True):
                self.settle(box, key)
                moved = True
            for key in box.puller.keys(told=False) if pulls else []:
                self.pull_ends(box, key, "arrive")
                moved = True
            if box.engine.has_work:
                self.step(box)
                moved = moved or not box.engine.stalled
        return moved

    def deliver_to_boxes(self) -> bool:
        """All that is under way to workers arrives; whether there was anything."""
        moved = False
        for pipe in self.live:
            while pipe.to_box:
                self.to_box(pipe)
                moved = True
        return moved

    def check_ledger(self) -> None:
        """Every opening over a live pipe was ended, once; over a lost one, at most once."""
        live = {pipe.number for pipe in self.live}
        for call, openings in self.opened.items():
            ended = self.ended[call]
            assert ended == openings if call[0] in live else ended <= openings, call

    def check_integrity(self) -> None:
        for box in self.boxes:
            box.check_integrity()


def intact(producer: Box, pull: Pull) -> bool:
    """Whether the producer's blocks still are those of the pull's ticket."""
    wanted = [(pull.ticket.block_ids[i], pull.ticket.generations[i]) for i, _ in pull.pairs]
    return all(producer.runner.generations[block] == generation for block, generation in wanted)


def scribble(box: Box, pull: Pull) -> None:
    """Bytes that came, but not those that were asked for."""
    for block in pull.blocks:
        box.runner.kv[block] = dict.fromkeys(range(box.runner.block_size), GARBAGE)
