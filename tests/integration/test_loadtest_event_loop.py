"""The order in which a measuring client does things."""

import asyncio
import socket
import time

import pytest

from loadtest.event_loop import new_event_loop, when_idle


def test_idle_work_waits_for_all_else_and_keeps_its_order() -> None:
    order: list[str] = []
    ours, theirs = socket.socketpair()

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        when_idle(lambda: order.append("idle 1"))
        when_idle(lambda: order.append("idle 2"))
        when_idle(lambda: done.set_result(None))
        loop.add_reader(ours, lambda: (order.append("socket"), ours.recv(9)))
        loop.call_soon(lambda: order.append("callback"))
        loop.call_later(0, lambda: order.append("timer"))
        theirs.send(b"x")
        await done
        loop.remove_reader(ours)

    with asyncio.Runner(loop_factory=new_event_loop) as runner, ours, theirs:
        runner.run(scenario())
    assert sorted(order[:3]) == ["callback", "socket", "timer"]
    assert order[3:] == ["idle 1", "idle 2"]


def test_what_becomes_due_goes_before_idle_work() -> None:
    """Each piece is followed by a look at timers: ten pieces of 5 ms hold up one by 5 ms."""
    fired: list[float] = []
    left: list[int] = []

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        pieces = list(range(10))

        def piece() -> None:
            time.sleep(0.005)
            pieces.pop()
            if not pieces:
                done.set_result(None)

        for _ in range(10):
            when_idle(piece)
        loop.call_later(0.012, lambda: (fired.append(loop.time()), left.append(len(pieces))))
        await done

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(scenario())
    assert left[0] > 0


def test_idle_work_in_another_loop_is_done_soon() -> None:
    async def scenario() -> str:
        done = asyncio.get_running_loop().create_future()
        when_idle(lambda: done.set_result("done"))
        return str(await done)

    assert asyncio.run(scenario()) == "done"


def test_an_error_in_idle_work_is_not_swallowed() -> None:
    async def scenario() -> None:
        when_idle(lambda: 1 / 0)
        await asyncio.sleep(1)

    with (
        asyncio.Runner(loop_factory=new_event_loop) as runner,
        pytest.raises(ZeroDivisionError),
    ):
        runner.run(scenario())
