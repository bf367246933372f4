"""A transport whose reads go wrong by a plan: delayed, dropped, doubled, damaged, out of order.

Wraps any other one behind the same seam, for tests and chaos runs; without a plan it is not used.
It never lies about settlement: when a read is reported, nothing of it lands any more.

============  ======================================================================================
delay         the read is posted late, so its bytes land late; also after :meth:`abandon`
drop          it is never posted, and never reported: only :meth:`close` settles it
duplicate     it is done twice, and when both are over it is reported twice
corrupt       a byte of what arrived is changed before it is reported
reorder       it is reported after the next one, or after a while when none follows
============  ======================================================================================

A changed byte of KV is noticed by its checksum alone: use "corrupt" with checksums on. Knows no
tickets, and nothing of what its faults lead to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtransfer.errors import TransportError
from kvtransfer.faults import Faults
from kvtransfer.ticket import AgentCard
from kvtransfer.transport import Completion, Part, Status, Transport

if TYPE_CHECKING:
    from kvtransfer.region import Region

_STAMP_BYTES = 32  # of a trailer, the part that says something


@dataclass
class _Read:
    handle: int  # ours
    peer: AgentCard
    part: Part
    blocks: list[tuple[int, int]]
    fault: str
    due: float  # when it is posted, if it is not yet
    posted: list[int] = field(default_factory=list)  # handles of the inner transport, in flight
    ended: Completion | None = None  # the worst of them


class FaultTransport:
    """Passes reads on to ``inner``, except for the faults that ``faults`` draws."""

    def __init__(
        self, inner: Transport, faults: Faults, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = inner.name
        self.inner = inner
        self._faults = faults
        self._clock = clock
        self._region: Region | None = None
        self._reads: dict[int, _Read] = {}  # not reported yet
        self._inner_reads: dict[int, _Read] = {}
        self._held: list[tuple[float, Completion]] = []  # reordered ones, and their latest time
        self._next_handle = 0

    def register(self, region: Region) -> bytes:
        """Registers the memory; it is also where bytes are changed."""
        self._region = region
        return self.inner.register(region)

    def connect(self, peer: AgentCard) -> None:
        """Passed on."""
        self.inner.connect(peer)

    def pull(self, peer: AgentCard, part: Part, blocks: Sequence[tuple[int, int]]) -> int:
        """Draw a fault; post the read unless it is dropped or delayed."""
        fault = self._faults.draw()
        late = self._faults.delay_s() if fault == "delay" else 0.0
        self._next_handle += 1
        read = _Read(self._next_handle, peer, part, list(blocks), fault, self._clock() + late)
        if fault not in ("drop", "delay"):
            self._post(read)
        self._reads[read.handle] = read
        return read.handle

    def poll(self) -> list[Completion]:
        """Post what is due, and report what is over in the order that the faults make of it."""
        now = self._clock()
        failed = [c for read in list(self._reads.values()) if (c := self._post_late(read, now))]
        over = failed + [c for done in self.inner.poll() for c in self._on_inner(done, now)]
        due = [completion for until, completion in self._held if over or until <= now]
        if due:
            self._held = [held for held in self._held if held[1] not in due]
        return over + due

    def moved(self, handle: int) -> int:
        """What the inner transport says; nothing for a read that it does not have."""
        read = self._reads.get(handle)
        return sum(map(self.inner.moved, read.posted)) if read else 0

    def abandon(self, handle: int) -> None:
        """Passed on. A read that waits to be posted still will be."""
        read = self._reads.get(handle)
        for number in read.posted if read else ():
            self.inner.abandon(number)

    def forget(self, peer: AgentCard) -> None:
        """Passed on, unless reads of this peer are delayed or dropped here."""
        if any(read.peer == peer for read in self._reads.values()):
            raise TransportError(f"{peer.worker_id} has reads in flight")
        self.inner.forget(peer)

    def close(self) -> None:
        """Passed on; what waits here is never posted."""
        self.inner.close()
        self._reads.clear()
        self._inner_reads.clear()
        self._held.clear()

    def _post(self, read: _Read) -> None:
        """Start a read below, or two; raises TransportError when none was started."""
        for _ in range(2 if read.fault == "duplicate" else 1):
            try:
                number = self.inner.pull(read.peer, read.part, read.blocks)
            except TransportError:
                if not read.posted:
                    raise
                return
            read.posted.append(number)
            self._inner_reads[number] = read

    def _post_late(self, read: _Read, now: float) -> Completion | None:
        """Post a delayed read that is due; its completion, when it could not be started."""
        if read.fault != "delay" or read.posted or read.due > now:
            return None
        try:
            self._post(read)
        except TransportError as error:
            del self._reads[read.handle]
            return Completion(read.handle, Status.FAILED, str(error))
        return None

    def _on_inner(self, done: Completion, now: float) -> list[Completion]:
        """A read below is over; what is reported of it now."""
        read = self._inner_reads.pop(done.handle)
        read.posted.remove(done.handle)
        if read.ended is None or done.status is Status.FAILED:
            read.ended = done
        if read.posted:
            return []
        del self._reads[read.handle]
        completion = Completion(read.handle, read.ended.status, read.ended.reason)
        if read.fault == "corrupt" and completion.status is Status.DONE:
            self._damage(read)
        if read.fault == "reorder":
            self._held.append((now + self._faults.plan.delay_s, completion))
            return []
        return [completion] * (2 if read.fault == "duplicate" else 1)

    def _damage(self, read: _Read) -> None:
        """Change a byte of the KV or of its trailer, or a bit of a seal."""
        assert self._region is not None
        draw = self._faults.below
        _, local = read.blocks[draw(len(read.blocks))]
        if read.part is Part.SEALS:
            self._region.staging[local, draw(2)] ^= 1 << draw(63)
            return
        kv_bytes = self._region.layout.kv_bytes
        place = draw(kv_bytes) if draw(2) else kv_bytes + draw(_STAMP_BYTES)
        self._region.spans[local, place] ^= 1 + draw(255)
