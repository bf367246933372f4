"""How late the event loop of this process runs what is due (asyncio).

A timer that is due ten times a second looks how late it is called. Whatever holds the loop up,
holds up every token that passes through it.
"""

from __future__ import annotations

import asyncio
import time

from router.buckets import LAG, Tally

EVERY_S = 0.1


class LoopLag:
    """Lives on the running loop from :meth:`start` to :meth:`stop`; ``tally`` is for export."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        self.tally = Tally(LAG)  # seconds
        self._every_s = every_s
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to look. Does nothing when it looks already."""
        if self._timer is None:
            self._set()

    def stop(self) -> None:
        """Look no more. May be called again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self) -> None:
        loop = asyncio.get_running_loop()
        due = time.monotonic() + self._every_s  # not loop.time(): uvloop's stands still in between
        self._timer = loop.call_later(self._every_s, self._look, due)

    def _look(self, due: float) -> None:
        self.tally.add(max(0.0, time.monotonic() - due))
        self._set()
