"""An event loop whose timers are precise to some hundredths of a millisecond.

Python's own loop sleeps in epoll, whose timeout is whole milliseconds, rounded up; a schedule of
1,000 requests per second would be kept a millisecond late. Knows nothing about requests.
"""

import asyncio
import select
import selectors
import sys

if sys.platform == "linux":
    _FD_SETSIZE = 1024  # select(2) knows no higher file numbers

    class _PreciseSelector(selectors.EpollSelector):
        """Waits in select(2), which counts microseconds, for the epoll object to have events."""

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            if self.fileno() >= _FD_SETSIZE:
                return super().select(timeout)
            if timeout is None or timeout > 0:
                select.select((self.fileno(),), (), (), timeout)
            return super().select(0)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """For ``asyncio.Runner(loop_factory=new_event_loop)``; the usual one outside Linux."""
    if sys.platform == "linux":
        return asyncio.SelectorEventLoop(_PreciseSelector())
    return asyncio.new_event_loop()
