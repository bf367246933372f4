"""The thread that runs an engine: commands in, steps, outputs out.

Everything that touches blocks happens in this thread: messages from routers, ends of pulls, aborts,
expiries. So nobody needs a lock. What may end a sequence of the step under way waits for the step's
end, so a block never changes hands under it. All else can be done in the pauses of a step: a pull
that had to wait for one to end before it starts, and for the next before its end is noticed, would
cost its sequence two steps.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.engine.engine import Engine
from services.engine.scheduler import Output, Row

log = logging.getLogger(__name__)

_STALLED_WAIT_S = 0.01  # work but no room: look for commands, then try again
_LONGEST_WAIT_S = 0.25  # between ticks of an idle engine


class Handler(Protocol):
    """What the loop drives; every call comes from the loop's thread."""

    def on_outputs(self, outputs: list[Output], now: float) -> None:
        """New tokens of a step."""

    def tick(self, now: float) -> None:
        """At least four times a second, and before each step: deadlines and leases."""

    def flush(self, now: float) -> None:
        """Pass on what commands, ticks and outputs have produced: before a step, in its pauses and
        after it.
        """

    def fail(self, reason: str) -> None:
        """The engine has failed; nothing will be called any more."""


@dataclass(frozen=True)
class _Command:
    run: Callable[[], None]
    within_step: bool


class EngineLoop:
    """Owns the thread; :meth:`submit` is the only way in."""

    def __init__(
        self,
        engine: Engine,
        handler: Handler,
        clock: Callable[[], float] = time.monotonic,
        observe: Callable[[Sequence[Row], float, float], None] = lambda rows, began, ended: None,
    ) -> None:
        """``observe`` hears of each turn once its tokens are passed on: which rows its step has
        computed, none without one, and from when to when that took.
        """
        self.failure = ""
        self.beats = 0  # rises at least four times a second, or the thread hangs
        self._engine = engine
        self._handler = handler
        self._clock = clock
        self._observe = observe
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._kept: tuple[_Command | None] | None = None  # taken in a pause, for after the step
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to step."""
        self._thread.start()

    def submit(self, command: Callable[[], None], within_step: bool = False) -> None:
        """Run ``command`` in the engine's thread between two steps. Thread-safe; order is kept.

        ``within_step``: or in a pause of one, since it ends no sequence that computes.
        """
        self._commands.put(_Command(command, within_step))

    def pause(self) -> None:
        """The runner is in the middle of a step: do what needs not wait for its end."""
        done = False
        while self._kept is None:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                break
            if command is not None and command.within_step:
                command.run()
                done = True
            else:
                self._kept = (command,)  # and all that come after it
        if done:
            self._handler.flush(self._clock())

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread after the step under way."""
        self._commands.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    @property
    def alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._apply_commands():
                self.beats += 1
                self._turn()
        except Exception as error:  # the one failure path: nothing of this engine is trusted now
            log.exception("the engine failed")
            self.failure = repr(error)
            self._handler.fail(f"the engine failed: {error!r}")

    def _turn(self) -> None:
        """Tick, then step if there is work; flush before and after."""
        now = ended = self._clock()
        rows: Sequence[Row] = ()
        self._handler.tick(now)
        if self._engine.has_work:
            self._handler.flush(now)  # nobody's answer waits for the step
            now = self._clock()
            outputs = self._engine.step(now)
            ended = self._clock()
            if self._engine.plan is not None:
                rows = self._engine.plan.rows
            self._handler.on_outputs(outputs, ended)
        self._handler.flush(self._clock())
        self._observe(rows, now, ended)

    def _apply_commands(self) -> bool:
        """Run what is queued, waiting for a command only without work; False to stop."""
        wait_s = 0.0
        if not self._engine.has_work:
            wait_s = _LONGEST_WAIT_S
        elif self._engine.stalled:
            wait_s = _STALLED_WAIT_S
        try:
            while (command := self._next(wait_s)) is not None:
                command.run()
                wait_s = 0.0
        except queue.Empty:
            return True
        return False

    def _next(self, wait_s: float) -> _Command | None:
        """The oldest command, None for the end; raises queue.Empty."""
        if self._kept is not None:
            (command,), self._kept = self._kept, None
            return command
        return self._commands.get(timeout=wait_s) if wait_s else self._commands.get_nowait()
