"""Notices threads that hang: alive, and going nowhere."""

from collections.abc import Callable

LONGEST_LOOK_S = 2.0  # between two looks; whoever looks less often was stopped itself


class Watchdog:
    """Watches a counter that rises as long as its thread goes round its loop, idle or not.

    Only time in which the watchdog itself was awake counts. A whole process that was stopped, and
    goes on, has not hung.
    """

    def __init__(self, what: str, limit_s: float, beats: Callable[[], int]) -> None:
        self._what = what
        self._limit_s = limit_s
        self._beats = beats
        self._seen = -1
        self._stood_s = 0.0
        self._looked = 0.0

    def look(self, now: float) -> str:
        """To be called about once a second; what is wrong, or "". ``now``: a monotonic clock's."""
        seen, passed_s = self._beats(), min(now - self._looked, LONGEST_LOOK_S)
        self._stood_s = self._stood_s + passed_s if seen == self._seen else 0.0
        self._seen, self._looked = seen, now
        if self._stood_s < self._limit_s:
            return ""
        return f"{self._what} has not moved for {self._stood_s:.0f} s"
