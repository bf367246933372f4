"""The leases that a router keeps alive at one prefill worker (pure; time is an argument).

A lease ends by P's clock alone. The router renews it when a third of it has passed, so that two
renewals in a row may come late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

RENEWALS_PER_LEASE = 3


@dataclass
class _Lease:
    interval_s: float
    renew_at: float
    on_expired: Callable[[], None]


class Leases:
    """Tickets of one worker that are still wanted."""

    def __init__(self) -> None:
        self._leases: dict[bytes, _Lease] = {}

    @property
    def ids(self) -> tuple[bytes, ...]:
        return tuple(self._leases)

    def __contains__(self, ticket_id: bytes) -> bool:
        return ticket_id in self._leases

    def add(
        self, ticket_id: bytes, lease_s: float, now: float, on_expired: Callable[[], None]
    ) -> None:
        """Keep it, from now on; ``on_expired`` is called if it ends before it is removed."""
        interval_s = lease_s / RENEWALS_PER_LEASE
        self._leases[ticket_id] = _Lease(interval_s, now + interval_s, on_expired)

    def remove(self, ticket_id: bytes) -> None:
        """Nobody wants it any more."""
        self._leases.pop(ticket_id, None)

    def due(self, now: float) -> tuple[bytes, ...]:
        """Those to renew now; the caller does so, all in one message."""
        due = [(ticket_id, lease) for ticket_id, lease in self._leases.items()
               if lease.renew_at <= now]  # fmt: skip
        for _, lease in due:
            lease.renew_at = now + lease.interval_s
        return tuple(ticket_id for ticket_id, _ in due)

    def expired(self, ticket_ids: Iterable[bytes]) -> int:
        """The worker says that these have ended; how many of them were still wanted."""
        wanted = [lease for i in ticket_ids if (lease := self._leases.pop(i, None)) is not None]
        for lease in wanted:
            lease.on_expired()
        return len(wanted)
