"""An event loop for a client that measures: precise timers, and work that can wait.

Python's own loop sleeps in epoll, whose timeout is whole milliseconds, rounded up; a schedule of
1,000 requests per second would be kept a millisecond late. And it does things in the order in which
they came up, so that bytes which are there wait for the parsing of what came before them: what is
given to :func:`when_idle` is done when nothing else is to do. Knows nothing about requests.
"""

import asyncio
import select
import selectors
import sys
from collections import deque
from collections.abc import Callable

if sys.platform == "linux":
    _FD_SETSIZE = 1024  # select(2) knows no higher file numbers

    class _PreciseSelector(selectors.EpollSelector):
        """Waits in select(2), which counts microseconds, for the epoll object to have events."""

        def __init__(self) -> None:
            super().__init__()
            self.idle: deque[Callable[[], object]] = deque()

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            busy = timeout is not None and timeout <= 0
            if self.idle and not busy:
                if ready := super().select(0):
                    return ready
                self.idle.popleft()()  # one, then a look at what it brought about
                busy = True
            if busy:
                return super().select(0)
            if self.fileno() >= _FD_SETSIZE:
                return super().select(timeout)
            select.select((self.fileno(),), (), (), timeout)
            return super().select(0)

    class _Loop(asyncio.SelectorEventLoop):
        def __init__(self) -> None:
            selector = _PreciseSelector()
            self.idle = selector.idle
            super().__init__(selector)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """For ``asyncio.Runner(loop_factory=new_event_loop)``; the usual one outside Linux."""
    return _Loop() if sys.platform == "linux" else asyncio.new_event_loop()


def when_idle(call: Callable[[], object]) -> None:
    """Do it in the running loop once nothing else is to do, in order; in another loop, soon."""
    loop = asyncio.get_running_loop()
    if sys.platform == "linux" and isinstance(loop, _Loop):
        loop.idle.append(call)
    else:
        loop.call_soon(call)
