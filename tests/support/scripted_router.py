"""A router for tests of whole pairs: it follows the protocol as the real one does, but decides
nothing by itself. Where a request goes next, and when, is the test's choice.

Its messages go into pipes and wait there; see ``scripted_world``.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvtransfer.hashing import pack_ids
from router import wire
from tests.support.worker_box import Box, RecordingLink, is_terminal


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
    def is_open(self) -> bool:
        """Whether it has something at the workers."""
        return self.stage in ("reserving", "prefilling", "decoding")

    @property
    def is_over(self) -> bool:
        return self.stage in ("done", "cancelled", "late")


class Router:
    """Owns requests, and has a pipe to each box that it knows."""

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self.name = name
        self.clock = clock
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
            waits_for_p = request.p is box and request.stage != "decoding"
            if request.is_open and (request.d is box or waits_for_p):
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
        attempt = message.attempt  # type: ignore[union-attr]
        if request is None or not request.is_open or attempt != request.attempt:
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
            case wire.UnknownPeer():  # and the one who could be introduced has gone
                self._fail(request, "lost")
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
        return max(1, int((request.deadline - self.clock()) * 1000))

    def _send(self, box: Box, message: wire.Message) -> None:
        pipe = self.pipes.get(box)
        if pipe is not None:  # else it is lost, as what was under way is
            pipe.to_box.append(message)
            pipe.sent.append(message)
