"""The hand-off ticket and the transport card: what one worker must know of another's blocks.

Pure; msgpack. A ticket is opaque to the router and never accepted from clients. It names no
consumer and no attempt, so another decode worker may use it; it carries no wall-clock time, since
only the producer's monotonic clock ends a lease.
"""

import hmac
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any

import msgpack

from kvtransfer.errors import TicketError

TICKET_VERSION = 2
"""History: 1 first; 2 ``first_block``.

Bump when a field of :class:`Ticket` changes its meaning, or a new one must be understood.
"""

_MAC_BYTES = 32
_HASH_BLOCK = 64  # bytes that SHA-256 takes at once

_packer = msgpack.Packer()  # one of its own for each ticket would be a quarter of a MiB each time


class Hmac:
    """HMAC-SHA256 (RFC 2104) under one key, of which the hash states behind the key are kept.

    Tickets are signed when the caches are cold after a step: setting up OpenSSL's HMAC takes four
    times as long then as all the hashing.
    """

    def __init__(self, secret: bytes) -> None:
        key = secret if len(secret) <= _HASH_BLOCK else sha256(secret).digest()
        key = key.ljust(_HASH_BLOCK, b"\0")
        self._inner = sha256(bytes(byte ^ 0x36 for byte in key))
        self._outer = sha256(bytes(byte ^ 0x5C for byte in key))

    def digest(self, data: bytes) -> bytes:
        """32 bytes, those of ``hmac.digest``."""
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(data)
        outer.update(inner.digest())
        return outer.digest()


_keyed = lru_cache(maxsize=8)(Hmac)


@dataclass(frozen=True)
class AgentCard:
    """How to reach one worker's pool over one transport. A secret: its holder can read the pool."""

    worker_id: str
    epoch: int  # random u64 of this incarnation, never 0
    fingerprint: bytes  # of the KVLayout
    num_blocks: int
    transport: str
    metadata: bytes  # what the transport itself needs (NIXL metadata, host and port ...)


@dataclass(frozen=True)
class Ticket:
    """The right to pull one sequence's KV.

    ``generations`` are the even (sealed) values of ``block_ids``.
    """

    ticket_id: bytes  # 16 random bytes
    worker_id: str
    epoch: int
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]
    fingerprint: bytes
    num_tokens: int  # KV of this many tokens is filled; the last block may be partial
    prefix: bytes  # hashing.prefix_hash of exactly these tokens
    first_block: int = 0  # of an early part: ``block_ids`` begin at this block of the sequence
    key_id: str = "0"

    def sign(self, secret: bytes) -> bytes:
        """Packed ticket: msgpack bytes followed by HMAC-SHA256 over exactly those bytes."""
        return sign_ticket(vars(self), secret)


def sign_ticket(fields: dict[str, Any], secret: bytes) -> bytes:
    """The same of the fields by name, for whoever needs no :class:`Ticket`."""
    body: bytes = _packer.pack({"v": TICKET_VERSION, **fields})
    return body + _keyed(secret).digest(body)


def open_ticket(data: bytes, secret: bytes) -> Ticket:
    """Verify and unpack what :meth:`Ticket.sign` made; raises :class:`TicketError`."""
    body, mac = data[:-_MAC_BYTES], data[-_MAC_BYTES:]
    if not hmac.compare_digest(_keyed(secret).digest(body), mac):
        raise TicketError(
            "the ticket's signature does not match: forged, cut, or from another deployment"
        )
    fields: dict[str, Any] = msgpack.unpackb(body)
    if fields.pop("v", None) != TICKET_VERSION:
        raise TicketError(f"the ticket's version is not {TICKET_VERSION}")
    fields["block_ids"] = tuple(fields["block_ids"])
    fields["generations"] = tuple(fields["generations"])
    ticket = Ticket(**fields)
    if len(ticket.block_ids) != len(ticket.generations):
        raise TicketError("the ticket has not one generation per block")
    return ticket
