"""The engine's thread: commands between steps, in order; one failure path; an end.

Real threads, no sleeping: the test waits on events and queues that the loop itself fills.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from services.engine.config import EngineConfig
from services.engine.engine import Engine
from services.engine.scheduler import Output, Plan, Row
from services.engine.sequence import SamplingParams
from services.engine_loop import EngineLoop
from tests.support.fake_runner import FakeRunner, naive

WAIT_S = 10.0


class GatedRunner(FakeRunner):
    """Each step waits for the test."""

    def __init__(self) -> None:
        super().__init__(4)
        self.entered: queue.SimpleQueue[Plan] = queue.SimpleQueue()
        self.gate = threading.Semaphore(0)
        self.error: Exception | None = None

    def run(self, plan: Plan) -> list[int]:
        self.entered.put(plan)
        assert self.gate.acquire(timeout=WAIT_S)
        if self.error is not None:
            raise self.error
        return super().run(plan)


class RecordingHandler:
    """What the loop told, in order; ``said`` wakes the test."""

    def __init__(self) -> None:
        self.said: queue.SimpleQueue[tuple[str, object]] = queue.SimpleQueue()
        self.threads: set[str] = set()
        self.ticks = 0
        self.stalled = threading.Event()
        self.on_flush: Callable[[], object] = lambda: None

    def on_outputs(self, outputs: list[Output], now: float) -> None:
        self.threads.add(threading.current_thread().name)
        if outputs:
            self.said.put(("outputs", outputs))
        else:
            self.stalled.set()

    def tick(self, now: float) -> None:
        self.ticks += 1

    def flush(self, now: float) -> None:
        self.on_flush()
        self.threads.add(threading.current_thread().name)

    def fail(self, reason: str) -> None:
        self.said.put(("fail", reason))


class Box:
    def __init__(self) -> None:
        self.runner = GatedRunner()
        self.engine = Engine(EngineConfig(9, 4, 32, 4, 8), self.runner)
        self.handler = RecordingHandler()
        self.observe: Callable[[Sequence[Row], float, float], object] = lambda *turn: None
        self.loop = EngineLoop(self.engine, self.handler, observe=self.told)

    def told(self, rows: Sequence[Row], began: float, ended: float) -> None:
        self.observe(rows, began, ended)

    def add(self, name: bytes, max_tokens: int = 1) -> None:
        params = SamplingParams(max_tokens)
        self.loop.submit(lambda: self.engine.add((name, 0), [1, 2], 2, params))


@pytest.fixture
def box() -> Iterator[Box]:
    box = Box()
    yield box
    box.runner.gate.release(1000)
    box.loop.stop(WAIT_S)
    assert not box.loop.alive


def test_commands_run_in_order_in_the_loops_thread(box: Box) -> None:
    ran: list[tuple[int, str]] = []
    done = threading.Event()
    for i in range(50):
        box.loop.submit(lambda i=i: ran.append((i, threading.current_thread().name)))  # type: ignore[misc]
    box.loop.submit(done.set)
    box.loop.start()
    assert done.wait(WAIT_S)
    assert ran == [(i, "engine") for i in range(50)]


def test_a_command_waits_for_the_step_under_way(box: Box) -> None:
    box.loop.start()
    box.add(b"a", max_tokens=2)
    box.runner.entered.get(timeout=WAIT_S)
    done = threading.Event()
    order: list[str] = []
    box.loop.submit(lambda: (order.append("command"), done.set()))  # type: ignore[func-returns-value]
    assert order == []  # the step holds the thread
    box.runner.gate.release()
    assert box.handler.said.get(timeout=WAIT_S)[0] == "outputs"
    box.runner.entered.get(timeout=WAIT_S)  # the second step began only after the command
    assert done.is_set()
    box.runner.gate.release()
    assert box.handler.said.get(timeout=WAIT_S)[0] == "outputs"
    assert box.handler.threads == {"engine"}


def test_a_pause_runs_what_may_come_within_a_step_and_keeps_the_order(box: Box) -> None:
    ran: list[str] = []
    paused, end = threading.Event(), threading.Event()

    def pause() -> None:
        box.loop.pause()
        paused.set()

    box.runner.pause = pause
    box.loop.start()
    box.add(b"a")
    box.runner.entered.get(timeout=WAIT_S)
    box.loop.submit(lambda: ran.append("first"), within_step=True)
    box.loop.submit(lambda: ran.append("second"), within_step=True)
    box.loop.submit(lambda: ran.append("after the step"))
    box.loop.submit(lambda: ran.append("behind it"), within_step=True)
    box.loop.submit(end.set)
    seen: list[list[str]] = []
    box.handler.on_flush = lambda: seen.append(list(ran))
    box.runner.gate.release()
    assert end.wait(WAIT_S)
    assert paused.is_set()
    assert seen[0] == ["first", "second"], "what came of them is sent at once"
    assert ran == ["first", "second", "after the step", "behind it"]


def test_what_a_command_has_to_say_does_not_wait_for_the_next_step(box: Box) -> None:
    ran: list[str] = []
    seen: list[list[str]] = []
    box.handler.on_flush = lambda: seen.append(list(ran))
    box.loop.submit(lambda: ran.append("pulled"))
    box.add(b"a")
    box.loop.start()
    box.runner.entered.get(timeout=WAIT_S)  # the step is under way, and waits for us
    assert ["pulled"] in seen


def test_an_end_that_is_met_in_a_pause_ends_the_loop(box: Box) -> None:
    box.runner.pause = box.loop.pause
    box.loop.start()
    box.add(b"a", max_tokens=20)
    box.runner.entered.get(timeout=WAIT_S)
    box.runner.gate.release()
    box.loop.stop(WAIT_S)
    assert not box.loop.alive
    assert not box.loop.failure


def test_an_abort_between_steps_stops_the_sequence(box: Box) -> None:
    box.loop.start()
    box.add(b"a", max_tokens=20)
    box.runner.entered.get(timeout=WAIT_S)
    box.loop.submit(lambda: box.engine.abort((b"a", 0)))
    idle = threading.Event()
    box.loop.submit(idle.set)
    box.runner.gate.release()
    assert idle.wait(WAIT_S)
    assert not box.engine.has_work
    assert box.engine.pool.num_available == box.engine.pool.num_usable
    assert box.runner.entered.empty()


def test_an_idle_loop_ticks_and_wakes_at_once_for_a_command(box: Box) -> None:
    box.loop.start()
    for _ in range(20):
        done = threading.Event()
        box.loop.submit(done.set)
        assert done.wait(WAIT_S)
    assert box.handler.ticks >= 1


def test_a_stalled_loop_still_takes_the_command_that_helps(box: Box) -> None:
    taken: list[int] = []

    def take_all() -> None:
        taken.extend(box.engine.pool.allocate(8) or [])
        box.runner.publish(box.engine.pool.take_opened(), [])

    box.loop.submit(take_all)
    box.add(b"a")
    box.loop.start()
    assert box.handler.stalled.wait(WAIT_S)
    assert box.runner.entered.empty(), "a step without rows was run"
    box.loop.submit(lambda: box.engine.pool.release(taken))
    box.runner.gate.release()
    kind, outputs = box.handler.said.get(timeout=WAIT_S)
    assert kind == "outputs"
    assert isinstance(outputs, list)
    assert outputs[0].token == naive([1, 2], 2, SamplingParams(1), 32)[0]


def test_a_failed_step_is_told_once_and_ends_the_thread(
    box: Box, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="services.engine_loop")
    box.runner.error = RuntimeError("out of memory")
    box.loop.start()
    box.add(b"a")
    box.runner.gate.release()
    kind, reason = box.handler.said.get(timeout=WAIT_S)
    assert (kind, reason) == ("fail", "the engine failed: RuntimeError('out of memory')")
    box.loop.stop(WAIT_S)
    assert not box.loop.alive
    assert "out of memory" in box.loop.failure
    assert box.handler.said.empty()


def test_each_turn_is_told_once_its_tokens_are_passed_on(box: Box) -> None:
    turns: queue.SimpleQueue[tuple[int, int, float, float]] = queue.SimpleQueue()
    flushed: list[bool] = []
    box.handler.on_flush = lambda: flushed.append(not box.handler.said.empty())

    def observe(rows: Sequence[Row], began: float, ended: float) -> None:
        if rows:  # flushed before its step, when nothing was said, and after it
            assert len(flushed) == 2, "a turn was not told, or before its flush"
            assert flushed[-1], "before its tokens were passed on"
        else:
            assert len(flushed) == 1, "a turn was not told, or before its flush"
        flushed.clear()
        turns.put((len(rows), sum(len(row.ids) for row in rows), began, ended))

    box.observe = observe
    box.loop.start()
    assert turns.get(timeout=WAIT_S)[:2] == (0, 0)  # the loop turns without work as well
    for name in (b"a", b"b"):
        box.add(name)
    box.runner.gate.release(2)
    computed, reached = 0, 0.0
    while computed < 4:
        rows, tokens, began, ended = turns.get(timeout=WAIT_S)
        assert reached <= began <= ended, "two turns overlap"
        assert tokens == 2 * rows
        reached, computed = ended, computed + tokens


def test_a_turn_without_room_is_told_without_rows(box: Box) -> None:
    rows_seen: queue.SimpleQueue[int] = queue.SimpleQueue()
    box.engine.reserve((b"all", 0), [1] * 32)
    box.observe = lambda rows, began, ended: rows_seen.put(len(rows))
    box.add(b"a")
    box.loop.start()
    assert box.handler.stalled.wait(WAIT_S)
    assert rows_seen.get(timeout=WAIT_S) == 0


def test_a_failed_command_is_a_failure_too(box: Box, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="services.engine_loop")

    def wrong() -> None:
        raise ValueError("a bug")

    box.loop.submit(wrong)
    box.loop.start()
    assert box.handler.said.get(timeout=WAIT_S) == (
        "fail",
        "the engine failed: ValueError('a bug')",
    )


def test_stop_runs_what_was_asked_before_and_nothing_after(box: Box) -> None:
    ran: list[int] = []
    box.loop.start()
    box.loop.submit(lambda: ran.append(1))
    box.loop.stop(WAIT_S)
    box.loop.submit(lambda: ran.append(2))
    box.loop.stop(WAIT_S)
    assert ran == [1]
    assert not box.loop.alive
    assert box.loop.failure == ""


def test_a_loop_that_never_started_can_be_stopped(box: Box) -> None:
    box.loop.stop(WAIT_S)
    assert not box.loop.alive
