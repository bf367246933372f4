"""Boxes and routers without sockets, threads or a clock: every message waits until a test delivers
it, every pull until a test ends it.

A :class:`World` holds workers, routers and what is under way between them. It keeps a ledger: each
(request, attempt) that a worker opened must end there by exactly one terminal message.
"""

from __future__ import annotations

from collections import Counter

from kvtransfer.importer import Event
from router import wire
from services.roles import ends_sequences
from tests.support.scripted_router import Pipe, Router
from tests.support.worker_box import Box, Pull, is_terminal

OPENINGS = (wire.Reserve, wire.Prefill, wire.Decode, wire.Check)
GARBAGE = (-1, -1)

Call = tuple[int, bytes, int]  # link, request, attempt


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
        router = Router(name, self.clock)
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

    def clock(self) -> float:
        return self.now

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

    def step_and_hear(self, box: Box) -> None:
        """A step in whose pause all arrives that need not wait for its end."""

        def pause() -> None:
            for pipe in [pipe for pipe in self.live if pipe.box is box]:
                while pipe.to_box and not ends_sequences(pipe.to_box[0]):
                    self.to_box(pipe)
            for key in box.puller.keys(told=True):
                self.settle(box, key)
            for key in box.puller.keys(told=False):
                self.pull_ends(box, key, "arrive")

        box.runner.pause = pause
        self.step(box)
        box.runner.pause = lambda: None

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
        event: Event
        if how == "arrive" and producer is not None and intact(producer, pull):
            for index, local in pull.pairs:
                remote = producer.runner.kv[pull.ticket.block_ids[index]]
                box.runner.kv[local] = dict(remote)
            event = box.puller.arrived(key)
        else:
            scribble(box, pull)
            ends = box.puller.gave_up if pull.aborted else box.puller.failed
            event = ends(key, settled=how != "late")
        self._tell(box, event)

    def settle(self, box: Box, key: bytes) -> None:
        """The last bytes of a pull that was given up."""
        scribble(box, box.puller.pulls[key])
        self._tell(box, box.puller.settled(key))

    def _tell(self, box: Box, event: Event) -> None:
        box.now = self.now
        box.roles.on_events([event], self.now)
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
