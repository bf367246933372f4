"""Who listens to the console's events: what they hear, and that nobody waits for them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from router.console import feed as feeds
from router.console.feed import MAX_ENDED, MAX_LISTENERS, MAX_WAITING, Feed, Listener
from router.errors import Unavailable
from router.events import KEEP
from router.ledger import Ledger, Objectives
from router.observation import Observation
from router.observe import Requests
from tests.support.observations import NOON, seen


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(10):
            await scenario()

    asyncio.run(main())


class Pictures:
    """What a router would say, and how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.live: list[Observation] = []
        self.limits: list[int] = []
        self.feed = Feed(self.picture, self.running, lambda: NOON)

    def picture(self) -> dict[str, Any]:
        self.asked += 1
        return {"model": "m", "asked": self.asked}

    def running(self, latest: int) -> list[Observation]:
        self.limits.append(latest)
        return self.live


async def heard(listener: Listener, want: str = "") -> tuple[str, dict[str, Any]]:
    """Name and data of the next event, or of the next one with this name."""
    while True:
        event = await listener.next()
        assert event is not None
        head, data, end, rest = event.decode().split("\n")
        assert (end, rest) == ("", "")
        name = head.removeprefix("event: ")
        if name == (want or name):
            return name, json.loads(data.removeprefix("data: "))


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "TICK_S", 0.01)
    monkeypatch.setattr(feeds, "SUMS_S", 0.0)


def test_a_listener_hears_what_was_and_then_what_is() -> None:
    async def scenario() -> None:
        at = Pictures()
        at.feed.ended(seen(NOON - 20, ttft=0.25))
        at.live = [seen(NOON - 1, ttft=None, end=None)]
        listener = at.feed.listen()
        name, hello = await heard(listener)
        assert name == "hello"
        assert [one["ttft"] for one in hello["ended"]] == [0.25]
        assert [point["ttft"]["n"] for point in hello["history"]] == [1]
        name, state = await heard(listener)
        assert (name, state["model"], state["t"]) == ("state", "m", NOON)
        assert state["now"]["ttft"]["p50"] == 0.25
        assert state["ended"] == []  # hello had it
        assert [one["end"] for one in state["live"]] == [None]
        at.feed.ended(seen(NOON - 10, ttft=0.5))
        states = [await heard(listener) for _ in range(4)]
        assert [one["ttft"] for _, state in states for one in state["ended"]] == [0.5]
        assert set(at.limits) == {feeds.MAX_LIVE}
        at.feed.leave(listener)

    run(scenario)


def test_nothing_is_made_while_nobody_listens() -> None:
    async def scenario() -> None:
        at = Pictures()
        await asyncio.sleep(0.05)
        assert at.asked == 0
        first, second = at.feed.listen(), at.feed.listen()
        await heard(first, "state")
        await heard(second, "state")
        at.feed.leave(first)
        await heard(second, "state")
        at.feed.leave(second)
        await asyncio.sleep(0)  # what was cancelled ends
        asked = at.asked
        await asyncio.sleep(0.05)
        assert at.asked == asked
        third = at.feed.listen()  # and begins again
        await heard(third, "state")
        at.feed.leave(third)

    run(scenario)


def test_everybody_gets_the_same_bytes_made_once() -> None:
    async def scenario() -> None:
        at = Pictures()
        listeners = [at.feed.listen() for _ in range(8)]
        for listener in listeners:
            await heard(listener, "hello")
        events = [await listener.next() for listener in listeners]
        assert len({id(event) for event in events}) == 1
        for listener in listeners:
            at.feed.leave(listener)

    run(scenario)


def test_a_slow_reader_loses_the_oldest_events_and_is_told() -> None:
    async def scenario() -> None:
        listener = Listener()
        for i in range(MAX_WAITING + 5):
            listener.put(feeds.encode("n", {"i": i}))
        assert await heard(listener) == ("lost", {"events": 5})
        numbers = [(await heard(listener))[1]["i"] for _ in range(MAX_WAITING)]
        assert numbers == list(range(5, MAX_WAITING + 5))

    run(scenario)


def test_of_many_requests_at_once_the_latest_are_told() -> None:
    async def scenario() -> None:
        at = Pictures()
        listener = at.feed.listen()
        await heard(listener, "state")
        for i in range(MAX_ENDED + 10):
            at.feed.ended(seen(NOON - 200 + i, tokens=i))
        _, state = await heard(listener, "state")
        assert [one["tokens"] for one in state["ended"]] == list(range(10, MAX_ENDED + 10))
        at.feed.leave(listener)

    run(scenario)


def test_a_page_knows_what_it_was_not_told() -> None:
    async def scenario() -> None:
        at = Pictures()
        for i in range(KEEP - 1):
            at.feed.ended(seen(NOON - 200 + i))
        first = at.feed.listen()
        assert (await heard(first, "hello"))[1]["cut"] is False
        at.feed.ended(seen(NOON - 20))  # one more may push another out
        second = at.feed.listen()
        assert (await heard(second, "hello"))[1]["cut"] is True
        assert (await heard(second, "state"))[1]["live_most"] == feeds.MAX_LIVE
        at.feed.leave(first)
        at.feed.leave(second)

    run(scenario)


def test_of_many_that_run_the_first_and_the_latest_are_shown() -> None:
    """The latest alone would all wait at the router, and workers seem to be idle."""
    requests = Requests("m", Ledger(Objectives(1.0, 0.1)))
    for i in range(10):
        requests.begin(f"{i}")
    assert [one.endpoint for one in requests.seen(5)] == ["0", "1", "7", "8", "9"]
    assert [one.endpoint for one in requests.seen(10)] == [f"{i}" for i in range(10)]
    assert len(requests.seen()) == 10


def test_a_picture_that_fails_does_not_end_the_events(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        at = Pictures()
        broken = True

        def picture() -> dict[str, Any]:
            if broken:
                raise ValueError("no picture")
            return at.picture()

        at.feed._picture = picture
        listener = at.feed.listen()
        await heard(listener, "hello")
        while "cannot be made" not in caplog.text:
            await asyncio.sleep(0)
        broken = False
        await heard(listener, "state")
        at.feed.leave(listener)

    run(scenario)


def test_the_end() -> None:
    async def scenario() -> None:
        at = Pictures()
        listener = at.feed.listen()
        at.feed.close()
        events = []
        while (event := await listener.next()) is not None:
            events.append(event)
        assert events[0].startswith(b"event: hello")
        with pytest.raises(Unavailable, match="stops"):
            at.feed.listen()
        at.feed.leave(listener)

    run(scenario)


def test_consoles_are_few() -> None:
    async def scenario() -> None:
        at = Pictures()
        listeners = [at.feed.listen() for _ in range(MAX_LISTENERS)]
        with pytest.raises(Unavailable, match="32 consoles"):
            at.feed.listen()
        at.feed.leave(listeners.pop())
        listeners.append(at.feed.listen())
        for listener in listeners:
            at.feed.leave(listener)

    run(scenario)


def test_percentiles_are_made_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "SUMS_S", 1.0)
    at = Pictures()
    clock = NOON
    at.feed._now = lambda: clock

    def ended() -> int:
        event = at.feed._state().decode()
        return int(json.loads(event.split("data: ")[1])["now"]["ended"])

    at.feed.ended(seen(NOON - 10))
    assert ended() == 1
    at.feed.ended(seen(NOON - 5))
    clock += 0.5
    assert ended() == 1
    clock += 0.5
    assert ended() == 2
    at.feed.ended(seen(NOON - 4))
    clock -= 3600  # set back: they are not kept for an hour
    at.feed.recent = type(at.feed.recent)()
    assert ended() == 0
