"""What a decode worker knows of the pulls that fill one reservation (pure).

A block of the reservation that the prefix cache did not have is in one of these states::

    missing ──start──► on its way ──Arrived──► there (verified)
       ▲                 │   └──failed or aborted, not settled──► lost, until Settled
       └─failed, settled─┘

Each pull has a number; several may be in flight, never two for one block. The reservation's blocks
may be used by others only once :attr:`Intake.settled` holds: no pull can write to any of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvtransfer.importer import Arrived, Event, PullAborted, PullFailed, Settled
from kvtransfer.ticket import AgentCard, Ticket
from services.engine.sequence import Key


class Pulls(Protocol):
    """The part of :class:`kvtransfer.puller.Puller` that is used here."""

    def pull(
        self,
        key: bytes,
        ticket: Ticket,
        peer: AgentCard,
        pairs: Sequence[tuple[int, int]],
        deadline: float,
    ) -> None: ...

    def abort(self, key: bytes) -> None: ...

    def forget(self, peer: AgentCard) -> None: ...


ENDS = ("ok", "failed", "stalled", "expired", "cancelled")
"""What can become of a pull, or of all pulls of a request."""


def _none_yet() -> dict[str, int]:
    return dict.fromkeys(ENDS, 0)


@dataclass
class PullStats:
    """Counters since the start. The dicts have all of ``ENDS`` always."""

    num_bytes: int = 0
    num_blocks: int = 0
    early_blocks: int = 0  # of num_blocks, those that came before the ticket
    failed: int = 0  # requests
    failed_parts: int = 0  # early pulls that came to nothing; they cost no request
    wrong_parts: int = 0  # TicketParts that were not for their request
    parts: dict[str, int] = field(default_factory=_none_yet)  # early pulls
    ends: dict[str, int] = field(default_factory=_none_yet)  # requests whose KV was handed to us

    def count(self, event: Event, early: bool) -> None:
        """The puller's word on a pull. ``early``: it began before the ticket came."""
        result = ""
        match event:
            case Arrived(blocks=blocks, num_bytes=num_bytes):
                result = "ok"
                self.num_bytes += num_bytes
                self.num_blocks += len(blocks)
                self.early_blocks += len(blocks) if early else 0
            case PullFailed(settled=settled, cause=cause):
                result = cause.value
                self.failed_parts += early and settled
            case PullAborted():
                result = "cancelled"
        if early and result:
            self.parts[result] += 1


class Intake:
    """The pulls of one request, by number."""

    def __init__(self, num_blocks: int, num_cached: int) -> None:
        self.num_blocks = 0  # that came by pulls
        self.num_bytes = 0
        self._missing = set(range(num_cached, num_blocks))  # indexes into the reservation
        self._on_their_way: dict[int, tuple[int, ...]] = {}
        self._unsettled: set[int] = set()  # their outcome was told, but not Settled
        self._started = 0

    @property
    def missing(self) -> list[int]:
        """Blocks that no pull has brought or is bringing, in order."""
        return sorted(self._missing)

    @property
    def in_flight(self) -> list[int]:
        """Pulls whose outcome is open."""
        return list(self._on_their_way)

    @property
    def lost(self) -> bool:
        """Whether bytes may land in blocks that were given up: they can never be admitted."""
        return bool(self._unsettled)

    @property
    def settled(self) -> bool:
        """Whether no pull can write to the blocks any more."""
        return not self._on_their_way and not self._unsettled

    def start(self, indexes: Sequence[int]) -> int:
        """A pull of these missing blocks begins; returns its number."""
        assert self._missing.issuperset(indexes)
        number = self._started
        self._started += 1
        self._missing.difference_update(indexes)
        self._on_their_way[number] = tuple(indexes)
        return number

    def on_event(self, number: int, event: Event) -> None:
        """The puller's word on one of these pulls."""
        if isinstance(event, Settled):
            self._unsettled.remove(number)
            return
        indexes = self._on_their_way.pop(number)
        match event:
            case Arrived(num_bytes=num_bytes):
                self.num_blocks += len(indexes)
                self.num_bytes += num_bytes
            case PullFailed(settled=True) | PullAborted(settled=True):
                self._missing.update(indexes)
            case _:
                self._unsettled.add(number)


def pull_key(key: Key, number: int) -> bytes:
    """Names a pull for the puller: request id, attempt, number."""
    return key[0] + key[1].to_bytes(4, "big") + number.to_bytes(4, "big")


def split_pull_key(data: bytes) -> tuple[Key, int]:
    """The inverse of :func:`pull_key`."""
    key = (data[:-8], int.from_bytes(data[-8:-4], "big"))
    return key, int.from_bytes(data[-4:], "big")
