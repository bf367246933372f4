"""When a block may go to somebody else, and what happens when it goes too early."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import pytest

from kvtransfer.hashing import block_hashes, pack_ids
from router import wire
from services.engine.blocks import BlockPool
from services.engine.engine import Engine, Reservation
from services.engine.scheduler import Plan, Scheduler
from services.engine.sequence import Key
from services.engine_loop import EngineLoop
from services.roles import ends_sequences
from tests.guards.rig import ASKED, OTHER, SAMPLING, Answer, Worker, right
from tests.support.worker_box import RecordingLink

WAIT_S = 20.0


@pytest.mark.parametrize("guarded", [True, False])
def test_late_bytes_of_an_aborted_pull_reach_nobody(
    guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B003: quarantine. The client has gone in the middle of its pull; the blocks look free, but
    the read is still under way when another prompt is computed in them.
    """
    if not guarded:  # an abort frees at once
        monkeypatch.setattr(Engine, "quarantine", Engine.abort)
        monkeypatch.setattr(Engine, "settle", lambda self, key: None)
    p, d = Worker("p", 7, blocks=5), Worker("d", 9, blocks=4)
    gone, other = Answer(ASKED), Answer(OTHER, b"other")
    gone.ticket(d, p)
    gone.decode(d, p)
    d.say(wire.Abort(gone.request, gone.attempt))
    d.poll()
    assert d.engine.pool.counts()["quarantined"] == (2 if guarded else 0)

    other.decode(d)  # computed here: needs two of three blocks
    d.step(2)
    d.reads.land()  # the late bytes
    d.poll()
    other.finish(d)

    assert other.finished
    assert (other.tokens == right(OTHER)) is guarded
    if guarded:
        d.check_idle()


@pytest.mark.parametrize("guarded", [True, False])
def test_the_end_of_a_read_releases_nothing(guarded: bool) -> None:
    """Only the router releases, and only after Pulled. A producer that takes the end of the read
    for the end of the hand-off gives its blocks away before they are verified: then a hand-off
    fails with which nothing was wrong.
    """
    p, d = Worker("p", 7, blocks=3), Worker("d", 9, blocks=4)
    asked, other = Answer(ASKED), Answer(OTHER, b"other")
    asked.ticket(d, p)
    other.prefill(p)  # waits for room at P
    if not guarded:
        d.reads.on_read = lambda: asked.release(p)
    asked.decode(d, p)
    d.reads.land()  # the data
    p.step()
    d.poll()
    d.land()  # the seals
    asked.hear(d)

    if guarded:
        assert asked.pulled
        asked.release(p)
        asked.finish(d)
        assert asked.tokens == right(ASKED)
    else:
        assert "was reused meanwhile" in asked.failures[0].message
        assert not asked.pulled
    p.run()
    other.hear(p)
    other.release(p)
    p.check_idle()


@pytest.mark.parametrize("guarded", [True, False])
def test_kv_is_shared_only_once_it_is_verified(
    guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B037: a pull that brought nothing fails, and several requests begin with the same prompt. If
    its blocks had a name in the prefix cache from the start, all of them would read what lies
    there.
    """
    p, d = Worker("p", 7, blocks=5), Worker("d", 9, blocks=4)
    Answer(OTHER, b"before").hand_off(d, p)
    if not guarded:
        monkeypatch.setattr(Engine, "reserve", naming(Engine.reserve))
        monkeypatch.setattr(BlockPool, "discard", BlockPool.release)  # which keeps names

    asked = Answer(ASKED)
    d.reads.fault = lambda pairs: []
    asked.ticket(d, p)
    asked.decode(d, p)
    d.land()
    asked.hear(d)
    assert asked.failures
    d.reads.fault = lambda pairs: pairs

    for request in (b"second", b"third"):
        same = Answer(ASKED, request)
        same.decode(d)
        same.finish(d)
        assert same.finished
        assert (same.tokens == right(ASKED)) is guarded
    if guarded:
        asked.retry(d, p)
        assert asked.tokens == right(ASKED)
        d.check_idle()


def naming(reserve: Callable[..., Reservation | None]) -> Callable[..., Reservation | None]:
    """``Engine.reserve`` that enters the blocks into the prefix cache before the pull."""

    def reserve_and_name(
        self: Engine, key: Key, ids: list[int], salt: bytes = b""
    ) -> Reservation | None:
        reservation = reserve(self, key, ids, salt)
        if reservation is not None:
            names = block_hashes(ids, self.config.block_size, salt)
            for block, name in zip(reservation.blocks, names, strict=False):
                self.pool.seal(block)
                self.pool.name(block, name)
        return reservation

    return reserve_and_name


# --- commands within a step -----------------------------------------------------------------------


class Held:
    """An engine's thread that is held in the first pause of its first step."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.link = worker, WaitingLink()
        self.loop = EngineLoop(worker.engine, worker.roles, lambda: worker.now)
        self._entered, self._commands, self._go = (threading.Event() for _ in range(3))
        worker.runner.pause = self._pause
        worker.roles.connected(self.link, ())

    def _pause(self) -> None:
        self._entered.set()
        assert self._commands.wait(WAIT_S)
        self.loop.pause()
        assert self._go.wait(WAIT_S)

    def __enter__(self) -> Held:
        """Once ``OTHER`` computes here."""
        computed = wire.Decode(b"other", 0, pack_ids(OTHER), len(OTHER), SAMPLING)
        self.say(computed)
        self.loop.start()
        assert self._entered.wait(WAIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.hear_commands()
        self.end_step()
        self.loop.stop()

    def say(self, message: wire.Message, within_step: bool | None = None) -> None:
        allowed = not ends_sequences(message) if within_step is None else within_step
        self.loop.submit(
            lambda: self.worker.roles.handle(self.link, message, self.worker.now), allowed
        )

    def say_all_of(self, asked: Answer, p: Worker) -> None:
        """What D hears of a hand-off, and the end of its pull."""
        assert asked.prefilled is not None
        self.say(wire.Peer(p.card))
        self.say(wire.Reserve(b"asked", 0, pack_ids(ASKED)))
        ids = pack_ids(asked.so_far)
        self.say(wire.Decode(b"asked", 0, ids, len(ASKED), SAMPLING, asked.prefilled.ticket))
        self.loop.submit(self.worker.land, within_step=True)

    def hear_commands(self) -> None:
        """The pause goes on to what was said so far."""
        self._commands.set()

    def end_step(self) -> None:
        self._go.set()


class WaitingLink(RecordingLink):
    """A link whose messages can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: queue.SimpleQueue[wire.Message] = queue.SimpleQueue()

    def send(self, *messages: wire.Message) -> None:
        for message in messages:
            self.queue.put(message)

    def next_of(self, request: bytes) -> wire.Message:
        """The next message about a request."""
        while True:
            message = self.queue.get(timeout=WAIT_S)
            if getattr(message, "request", None) == request:
                return message

    def tokens(self, request: bytes) -> list[int]:
        """All tokens of a request, once it has ended."""
        tokens: list[int] = []
        while True:
            message = self.next_of(request)
            assert not isinstance(message, wire.Failed), message
            if isinstance(message, wire.Tokens):
                tokens += message.ids
                if message.finish:
                    return tokens


def tolerant(update: Callable[..., object]) -> Callable[..., object]:
    """``Scheduler.update`` that does not mind when sequences have gone during the step."""

    def update_those_left(self: Scheduler, plan: Plan, tokens: list[int]) -> object:
        keys = {seq.key for seq in self.running}
        left = [i for i, row in enumerate(plan.rows) if row.key in keys]
        rows = tuple(plan.rows[i] for i in left)
        return update(self, Plan(rows, plan.opened, plan.spoiled), [tokens[i] for i in left])

    return update_those_left


def handed_off(p: Worker) -> Answer:
    """An answer that P has begun."""
    asked = Answer(ASKED)
    asked.prefill(p)
    p.run()
    asked.hear(p)
    return asked


@pytest.mark.parametrize("guarded", [True, False])
def test_an_abort_waits_for_the_end_of_the_step(
    guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An abort comes while a step is under way that will write the request's blocks. If it took
    effect at once, another request would pull its KV into these blocks, and the step would then
    overwrite it.
    """
    p, d = Worker("p", 7, blocks=5), Worker("d", 9, blocks=4, chunk=30)  # room for one
    asked = handed_off(p)
    if not guarded:
        monkeypatch.setattr(Scheduler, "update", tolerant(Scheduler.update))
    with Held(d) as held:
        held.say(wire.Abort(b"other", 0), within_step=None if guarded else True)
        held.say_all_of(asked, p)
        held.hear_commands()
        held.end_step()
        tokens = [*asked.tokens, *held.link.tokens(b"asked")]
    assert (tokens == right(ASKED)) is guarded
    assert not held.loop.failure


def test_a_hand_off_does_not_wait_for_the_end_of_a_step() -> None:
    """Reserved, pulled and admitted while another sequence computes: right, both of them."""
    p, d = Worker("p", 7, blocks=5), Worker("d", 9, blocks=9, chunk=30)
    asked = handed_off(p)
    with Held(d) as held:
        held.say_all_of(asked, p)
        held.hear_commands()
        assert isinstance(held.link.next_of(b"asked"), wire.Reserved)
        assert isinstance(held.link.next_of(b"asked"), wire.Pulled)
        steps = d.engine.scheduler.stats.steps
        assert steps == 0, "the step is under way"
        held.end_step()
        tokens = [*asked.tokens, *held.link.tokens(b"asked")]
    assert tokens == right(ASKED)
    assert not held.loop.failure
