"""The producer's side of the hand-off: whose blocks a peer may read, and until when (pure).

One lease per ticket, in the engine thread::

    export ──► LEASED ──release──► RELEASED
                 │ renew: later deadline
                 └──deadline, by the producer's clock──► EXPIRED

Knows no clock (time is an argument), no sockets, no tensors, no requests. Freeing blocks and
setting generations is the engine's business; neither release nor expiry touches a generation, so a
block that was freed but not reused still verifies (:mod:`kvtransfer.importer`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from kvtransfer.ticket import sign_ticket

TICKET_ID_BYTES = 16


@dataclass(frozen=True)
class Export:
    """A signed ticket, and in clear what the router needs of it."""

    ticket_id: bytes
    packed: bytes
    lease_s: float


class LeaseStatus(Enum):
    """Where a lease is; the last two are final."""

    LEASED = "leased"
    RELEASED = "released"
    EXPIRED = "expired"


@dataclass
class _Lease:
    owner: str
    block_ids: list[int]
    since: float
    deadline: float


class Exporter:
    """The leases of one producer. Used from its engine thread, between steps."""

    def __init__(
        self,
        worker_id: str,
        epoch: int,
        fingerprint: bytes,
        secret: bytes,
        lease_s: float,
        new_id: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        assert epoch != 0
        self.lease_s = lease_s
        self._same = {"worker_id": worker_id, "epoch": epoch, "fingerprint": fingerprint}  # always
        self._secret = secret
        self._new_id = new_id
        self._leases: dict[bytes, _Lease] = {}
        self._ended = {LeaseStatus.RELEASED: 0, LeaseStatus.EXPIRED: 0}
        self._exported = 0

    @property
    def num_leased(self) -> int:
        """Tickets whose blocks the producer must keep."""
        return len(self._leases)

    @property
    def expired_count(self) -> int:
        """Leases that ran out since the start."""
        return self._ended[LeaseStatus.EXPIRED]

    @property
    def released_count(self) -> int:
        """Leases that were given back since the start."""
        return self._ended[LeaseStatus.RELEASED]

    def oldest_since(self) -> float | None:
        """When the oldest of the leases began; None without leases. From any thread."""
        return min((lease.since for lease in list(self._leases.values())), default=None)

    def next_expiry(self) -> float | None:
        """When :meth:`expire` is due next; None without leases."""
        return min((lease.deadline for lease in self._leases.values()), default=None)

    def export(
        self,
        owner: str,
        blocks: Sequence[tuple[int, int]],
        num_tokens: int,
        prefix: bytes,
        now: float,
    ) -> Export:
        """Lease sealed ``(block id, generation)`` pairs to ``owner`` and sign their ticket."""
        ticket_id = self._new_id(TICKET_ID_BYTES)
        assert ticket_id not in self._leases
        block_ids, packed = self._sign(ticket_id, 0, blocks, num_tokens, prefix)
        self._leases[ticket_id] = _Lease(owner, block_ids, now, now + self.lease_s)
        self._exported += 1
        return Export(ticket_id, packed, self.lease_s)

    def sign_part(
        self, first_block: int, blocks: Sequence[tuple[int, int]], num_tokens: int, prefix: bytes
    ) -> bytes:
        """Sign a ticket without a lease, for sealed blocks of a sequence that is still computed.

        It reaches from block ``first_block`` to the end of ``num_tokens``. Whoever gives the blocks
        up meanwhile need not care: then their seals differ.
        """
        ticket_id = self._new_id(TICKET_ID_BYTES)
        return self._sign(ticket_id, first_block, blocks, num_tokens, prefix)[1]

    def renew(self, ticket_ids: Sequence[bytes], now: float) -> list[bytes]:
        """Extend leases; returns those that are over or unknown. Never revives one."""
        gone: list[bytes] = []
        for ticket_id in ticket_ids:
            lease = self._leases.get(ticket_id)
            if lease is None or is_over(lease.deadline, now):
                gone.append(ticket_id)
            else:
                lease.deadline = now + self.lease_s
        return gone

    def release(self, ticket_id: bytes) -> list[int]:
        """End a lease; returns the blocks to free, none when it is over or unknown."""
        return self._end(ticket_id, LeaseStatus.RELEASED) if ticket_id in self._leases else []

    def release_unwanted(self, owner: str, wanted: set[bytes]) -> list[list[int]]:
        """End all leases of ``owner`` but the wanted ones: it has reconnected and told which."""
        unwanted = [
            ticket_id
            for ticket_id, lease in self._leases.items()
            if lease.owner == owner and ticket_id not in wanted
        ]
        return [self._end(ticket_id, LeaseStatus.RELEASED) for ticket_id in unwanted]

    def expire(self, now: float) -> list[list[int]]:
        """End the leases that ran out; returns the blocks to free, a list per lease."""
        over = [id_ for id_, lease in self._leases.items() if is_over(lease.deadline, now)]
        return [self._end(ticket_id, LeaseStatus.EXPIRED) for ticket_id in over]

    def check_integrity(self) -> None:
        """Every ticket is leased, released or expired: assert it."""
        assert self._exported == len(self._leases) + sum(self._ended.values())

    def _sign(
        self,
        ticket_id: bytes,
        first_block: int,
        blocks: Sequence[tuple[int, int]],
        num_tokens: int,
        prefix: bytes,
    ) -> tuple[list[int], bytes]:
        """The ids of ``blocks``, and a packed :class:`kvtransfer.ticket.Ticket` for them."""
        block_ids = [block for block, _ in blocks]
        generations = [generation for _, generation in blocks]
        assert not any(map((1).__and__, generations)), "an unsealed block has an odd generation"
        fields = {
            **self._same,
            "ticket_id": ticket_id,
            "block_ids": block_ids,
            "generations": generations,
            "num_tokens": num_tokens,
            "prefix": prefix,
            "first_block": first_block,
        }
        return block_ids, sign_ticket(fields, self._secret)

    def _end(self, ticket_id: bytes, status: LeaseStatus) -> list[int]:
        self._ended[status] += 1
        return self._leases.pop(ticket_id).block_ids


def is_over(deadline: float, now: float) -> bool:
    """Whether a lease has run out: from then on its blocks may be handed out anew."""
    return deadline <= now
