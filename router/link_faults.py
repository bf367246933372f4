"""Faults injected into a link's frames, for tests and chaos runs (asyncio).

Stands between the frames of one direction and whoever takes them next. TCP itself keeps order, so
a delayed frame holds up those behind it; ``reorder`` lets the next frame overtake.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from kvtransfer.faults import Faults


class FaultyFrames:
    """``deliver`` gets what is left of the frames that are pushed, some of it later.

    Of each frame, the first ``num_spared`` bytes are never changed.
    """

    def __init__(self, faults: Faults, deliver: Callable[[bytes], None], num_spared: int) -> None:
        self._faults = faults
        self._deliver = deliver
        self._num_spared = num_spared
        self._overtaken: bytes | None = None  # goes behind the next frame
        self._waiting: deque[tuple[float, bytes]] = deque()  # (loop time when due, frame)
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def push(self, frame: bytes) -> None:
        """The next frame of this direction."""
        due = self._loop.time()
        frames = [frame]
        match self._faults.draw():
            case "drop":
                return
            case "delay":
                due += self._faults.delay_s()
            case "duplicate":
                frames = [frame, frame]
            case "corrupt":
                frames = [self._corrupted(frame)]
            case "reorder" if self._overtaken is None:
                self._overtaken = frame
                return
        if self._overtaken is not None:
            frames.append(self._overtaken)
            self._overtaken = None
        if self._waiting:
            due = max(due, self._waiting[-1][0])
        self._waiting.extend((due, one) for one in frames)
        if self._timer is None:
            self._release()

    def close(self) -> None:
        """What has not been delivered is lost."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._waiting.clear()
        self._overtaken = None

    def _release(self) -> None:
        self._timer = None
        while self._waiting and self._waiting[0][0] <= self._loop.time():
            self._deliver(self._waiting.popleft()[1])
        if self._waiting:
            self._timer = self._loop.call_at(self._waiting[0][0], self._release)

    def _corrupted(self, frame: bytes) -> bytes:
        changed = bytearray(frame)
        index = self._num_spared + self._faults.below(len(frame) - self._num_spared)
        changed[index] ^= 1 + self._faults.below(255)
        return bytes(changed)
