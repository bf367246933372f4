"""How late the event loop of this process runs what is due (asyncio).

A timer that is due ten times a second looks how late it is called. Whatever holds the loop up,
holds up every token that passes through it. What is due while the loop is held up counts as well,
each time by how late it was: so the values are of moments in time, and a share of them is a share
of the time, however long the loop stood still at once.
"""

from __future__ import annotations

import asyncio
import time

from router.buckets import LAG, Tally

EVERY_S = 0.1
MOST_AT_ONCE = 6000  # after a stop of hours, counting all of it would hold the loop up again


class LoopLag:
    """Lives on the running loop from :meth:`start` to :meth:`stop`; ``tally`` is for export."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        self.tally = Tally(LAG)  # seconds
        self._every_s = every_s
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to look. Does nothing when it looks already."""
        if self._timer is None:
            self._set(time.monotonic() + self._every_s)

    def stop(self) -> None:
        """Look no more. May be called again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, due: float) -> None:
        # The clock is not loop.time(): uvloop's stands still in between.
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, due - time.monotonic()), self._look, due)

    def _look(self, due: float) -> None:
        late = max(0.0, time.monotonic() - due)
        missed = int(late / self._every_s)  # further times that were due by now
        for times in range(max(0, missed + 1 - MOST_AT_ONCE), missed + 1):
            self.tally.add(max(0.0, late - times * self._every_s))
        self._set(due + (missed + 1) * self._every_s)
