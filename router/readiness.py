"""Whether a router can serve: now, since a moment ago, or as soon as somebody asks (asyncio)."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping

from router.config import RouterSettings
from router.pools import Pools


class Readiness:
    """Remembers when there was a usable pair of workers; ``looked`` is called at every change."""

    def __init__(self, settings: RouterSettings) -> None:
        self.first_at = math.inf  # when there was a pair for the first time, in loop time
        self._wakes = settings.wakes
        self._comeback_s = settings.config.comeback_s
        self._some_pair = asyncio.Event()  # set while a pair is usable ...
        self._no_pair_since = -math.inf  # ... and when there was none any more, in loop time
        self._was_complete = False
        self._slept = False  # pools have been at zero, and there was no pair since

    def looked(self, ready: bool) -> None:
        """``ready``: a pair is usable."""
        now = asyncio.get_running_loop().time()
        if ready:
            self.first_at = min(self.first_at, now)
            self._slept = False
            self._some_pair.set()
        elif self._some_pair.is_set():
            self._some_pair.clear()
            self._no_pair_since = now

    def told(self, pools: Pools) -> None:
        """What is wanted of the pools now."""
        self._slept |= pools.at_zero

    async def comeback(self) -> None:
        """Wait for a usable pair if there was one a moment ago: it may only be reconnecting.

        Not where requests wait for workers anyway.
        """
        if self._some_pair.is_set() or self._wakes:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._no_pair_since + self._comeback_s):
                await self._some_pair.wait()

    def asleep(self, pools: Pools) -> bool:
        """No pair is usable, on purpose: who asks for something wakes one up.

        Still so while the first workers start, unless they fail to again and again.
        """
        if not self._wakes or self._some_pair.is_set():
            return False
        return pools.at_zero or (self._slept and bool(pools.targets) and not pools.failing)

    def settled(
        self, there: Mapping[str, int], wanted: Mapping[str, int], patience_s: float
    ) -> bool:
        """See ``Dispatcher.settled``; a pair is usable. Both are workers by role."""
        self._was_complete |= all(there.get(role, 0) >= number for role, number in wanted.items())
        waited_s = asyncio.get_running_loop().time() - self.first_at
        return self._was_complete or waited_s >= patience_s
