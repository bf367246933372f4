"""Events for whoever has the console open: made while somebody listens, and only then (asyncio).

The state of the router twice a second, requests as they end. All listeners get the same bytes; each
has a queue of its own with an end: one who reads too slowly loses the oldest events and is told how
many, and nobody waits for him. Nothing here is called for a token.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from router.console.timeline import timeline
from router.errors import Unavailable
from router.events import KEEP, Recent
from router.observation import Observation

TICK_S = 0.5
SUMS_S = 1.0  # percentiles are as old as that: of thousands of requests they take milliseconds
MAX_LISTENERS = 32
MAX_WAITING = 256  # events of one listener
MAX_ENDED = 128  # requests in one event; of more, the newest
MAX_LIVE = 64  # of those that run; see Requests.seen

log = logging.getLogger(__name__)

Picture = Callable[[], dict[str, Any]]
Live = Callable[[int], Sequence[Observation]]


class Listener:
    """One open console."""

    def __init__(self) -> None:
        self._events: deque[bytes] = deque()
        self._news = asyncio.Event()
        self._lost = 0
        self._closed = False

    def put(self, event: bytes) -> None:
        """Never waits; the oldest event makes room."""
        if len(self._events) >= MAX_WAITING:
            self._events.popleft()
            self._lost += 1
        self._events.append(event)
        self._news.set()

    def close(self) -> None:
        """No more events; those that wait are still read."""
        self._closed = True
        self._news.set()

    async def next(self) -> bytes | None:
        """The next event; None when there will be no more."""
        while not self._events:
            if self._closed:
                return None
            self._news.clear()
            await self._news.wait()
        if self._lost:
            lost, self._lost = self._lost, 0
            return encode("lost", {"events": lost})
        return self._events.popleft()


class Feed:
    """Tells all listeners what is going on.

    ``picture()`` is what the page shows of router and workers, ``live(n)`` the requests that run
    now, of many only ``n``.
    """

    def __init__(
        self,
        picture: Picture,
        live: Live,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.recent = Recent()
        self._picture = picture
        self._live = live
        self._now = now
        self._listeners: set[Listener] = set()
        self._ended: deque[Observation] = deque(maxlen=MAX_ENDED)  # since the last tick
        self._ticking: asyncio.Task[None] | None = None
        self._sums: dict[str, Any] = {}
        self._sums_at = -inf
        self._closed = False

    def ended(self, seen: Observation) -> None:
        """A request has ended."""
        self.recent.add(seen)
        if self._listeners:
            self._ended.append(seen)

    def listen(self) -> Listener:
        """A new listener, to be left again by :meth:`leave`. Raises Unavailable."""
        if self._closed:
            raise Unavailable("this router stops")
        if len(self._listeners) >= MAX_LISTENERS:
            raise Unavailable(f"{MAX_LISTENERS} consoles are open already")
        listener = Listener()
        listener.put(self._hello())
        self._listeners.add(listener)
        if self._ticking is None or self._ticking.done():
            self._ended.clear()
            self._ticking = asyncio.create_task(self._tick(), name="console")
        return listener

    def leave(self, listener: Listener) -> None:
        """The last one who leaves ends the events."""
        self._listeners.discard(listener)
        if not self._listeners and self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None

    def close(self) -> None:
        """End all listeners, so that a server that stops need not wait for them."""
        self._closed = True
        for listener in self._listeners:
            listener.close()

    # --- what is said ----------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            try:
                event = self._state()
                for listener in self._listeners:
                    listener.put(event)
            except Exception:  # a console that stands still must not be one that never goes on
                log.exception("the console's events cannot be made")
            await asyncio.sleep(TICK_S)

    def _hello(self) -> bytes:
        now, live, ended = self._now(), self._live(MAX_LIVE), self.recent.ended
        return encode(
            "hello",
            {
                "t": now,
                "history": self.recent.history(now, live),
                "ended": [timeline(seen) for seen in ended],
                "cut": len(ended) >= KEEP,  # there may have been others before
            },
        )

    def _state(self) -> bytes:
        now, live = self._now(), self._live(MAX_LIVE)
        ended = [timeline(seen) for seen in self._ended]
        self._ended.clear()
        if not 0 <= now - self._sums_at < SUMS_S:  # the clock may have been set back
            self._sums_at = now
            self._sums = {
                "now": self.recent.summary(now, live),
                "history": self.recent.history(now, live, span_s=10.0),
            }
        return encode(
            "state",
            {
                "t": now,
                **self._picture(),
                **self._sums,
                "ended": ended,
                "live": [timeline(seen) for seen in live],
                "live_most": MAX_LIVE,
            },
        )


def encode(name: str, data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"event: {name}\ndata: {text}\n\n".encode()
