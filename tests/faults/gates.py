"""Gates: places in a running deployment where a test holds it exactly there, as long as needed.

A gate sits at a seam that the product has anyway (the engine's step and runner, the KV transport,
the router's queue, what a worker's link delivers), so nothing in the product knows of it.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

import router.pending
import router.worker
import services.worker
from kvtransfer.ticket import AgentCard
from kvtransfer.transport import Completion, Part, Transport
from router import wire
from services.engine.engine import Engine
from services.engine.scheduler import Output, Plan
from services.worker import Worker

HELD_TOO_LONG_S = 60

Receive = Callable[[router.worker.Worker, wire.Message], None]


class EngineGate:
    """Holds one worker's engine: between steps, inside a step, or before its next commands."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.reached = threading.Event()
        self._opened = threading.Event()
        self._between: Callable[[Engine], bool] | None = None
        self._inside: Callable[[Plan], bool] | None = None
        engine = worker.engine
        self._step, self._run = engine.step, engine.runner.run
        engine.step = self._gated_step  # type: ignore[method-assign]
        engine.runner.run = self._gated_run  # type: ignore[method-assign]

    @property
    def engine(self) -> Engine:
        """The engine behind the gate."""
        return self.worker.engine

    @property
    def num_commands(self) -> int:
        """Commands that wait for the engine's thread."""
        return self.worker._loop._commands.qsize()

    def pause_when(self, condition: Callable[[Engine], bool]) -> None:
        """From the first step on before which this holds: commands are applied, no step is made."""
        self._close()
        self._between = condition

    def hold_when(self, condition: Callable[[Plan], bool]) -> None:
        """Stop inside the first step whose plan is like that; commands wait as well."""
        self._close()
        self._inside = condition

    def block(self) -> None:
        """Stop the engine's thread after the commands that it has been given so far."""
        self._close()
        self.worker._loop.submit(self._wait)

    def open(self) -> None:
        """Go on."""
        self._between = self._inside = None
        self._opened.set()

    async def check_integrity(self) -> None:
        """Assert, in the engine's thread, that its books agree."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        failure: list[BaseException] = []

        def check() -> None:
            try:
                self.engine.check_integrity()
                self.worker.roles._prefill.exporter.check_integrity()
            except BaseException as error:  # for the test's thread
                failure.append(error)
            loop.call_soon_threadsafe(done.set)

        self.worker._loop.submit(check)
        async with asyncio.timeout(10):
            await done.wait()
        if failure:
            raise failure[0]

    def _close(self) -> None:
        self.reached.clear()
        self._opened.clear()

    def _wait(self) -> None:
        self.reached.set()
        assert self._opened.wait(HELD_TOO_LONG_S), "a test has forgotten to open its gate"

    def _gated_step(self, now: float) -> list[Output]:
        between = self._between
        if between is not None and (self.reached.is_set() or between(self.engine)):
            self.reached.set()
            self.engine.stalled = True  # so that the loop waits for commands instead of spinning
            return []
        return self._step(now)

    def _gated_run(self, plan: Plan) -> list[int]:
        inside = self._inside
        if inside is not None and inside(plan):
            self._wait()
        return self._run(plan)


class TransportGate:
    """Stands before one worker's KV transport: holds posts, or the news of what has ended."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.num_posted = 0  # reads since the gate was closed
        self.posting = threading.Event()  # a post is being held
        self._polls_left: int | None = None  # completions that may still be told; None: all
        self._may_post = threading.Event()
        self._may_post.set()

    @staticmethod
    @contextlib.contextmanager
    def installed() -> Iterator[list["TransportGate"]]:
        """Every transport that a worker of this process opens; filled as they open them."""
        gates: list[TransportGate] = []
        real = services.worker.open_transport

        def opened(*args: Any, **kwargs: Any) -> TransportGate:
            gates.append(TransportGate(real(*args, **kwargs)))
            return gates[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(services.worker, "open_transport", opened)
            yield gates

    def hold_completions(self, after: int = 0) -> None:
        """Tell of ``after`` more reads that ended, then of none: the next one is in flight."""
        self.num_posted, self._polls_left = 0, after

    def hold_posts(self) -> None:
        """Stop the puller's thread just before its next read."""
        self.num_posted = 0
        self.posting.clear()
        self._may_post.clear()

    def open(self) -> None:
        """Go on."""
        self._polls_left = None
        self._may_post.set()

    def pull(self, peer: AgentCard, part: Part, blocks: Sequence[tuple[int, int]]) -> int:
        """As the transport's, when the gate is open."""
        if not self._may_post.is_set():
            self.posting.set()
            assert self._may_post.wait(HELD_TOO_LONG_S), "a test has forgotten to open its gate"
        handle = self._inner.pull(peer, part, blocks)
        self.num_posted += 1
        return handle

    def poll(self) -> list[Completion]:
        """As the transport's; nothing is asked of it while the gate is closed."""
        if self._polls_left is None:
            return self._inner.poll()
        if self._polls_left <= 0:
            return []
        done = self._inner.poll()
        self._polls_left -= len(done)
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class RouterGate:
    """Holds the router's queue, or messages on their way from a worker to it."""

    def __init__(self, receive: Receive) -> None:
        self.held: list[tuple[router.worker.Worker, wire.Message]] = []
        self._receive = receive
        self._queue = False
        self._match: Callable[[wire.Message], bool] | None = None

    @staticmethod
    @contextlib.contextmanager
    def installed() -> Iterator["RouterGate"]:
        """In front of every router of this process."""
        gate = RouterGate(router.worker.Worker.receive)
        pick = router.pending.pick

        def gated_pick(*args: Any) -> Any:
            return None if gate._queue else pick(*args)

        def gated_receive(worker: router.worker.Worker, message: wire.Message) -> None:
            gate._on_message(worker, message)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(router.pending, "pick", gated_pick)
            patch.setattr(router.worker.Worker, "receive", gated_receive)
            yield gate

    def hold_queue(self) -> None:
        """Nobody in the queue gets a pair."""
        self._queue = True

    def hold_message(self, match: Callable[[wire.Message], bool]) -> None:
        """From the first matching message on, nothing of that worker reaches the router."""
        self._match = match

    def open(self) -> None:
        """Go on; what was held arrives now, in order."""
        self._queue, self._match = False, None
        held, self.held = self.held, []
        for worker, message in held:
            self._receive(worker, message)

    def _on_message(self, worker: router.worker.Worker, message: wire.Message) -> None:
        behind = any(other is worker for other, _ in self.held)
        if behind or (self._match is not None and self._match(message)):
            self.held.append((worker, message))
        else:
            self._receive(worker, message)
