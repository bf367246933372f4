"""The state of one request while the router owns it, and what it holds at the workers.

What to do next is decided in ``router.dispatch``. Everything that a request has open anywhere is in
its two calls and its ticket, so :meth:`Job.end_attempt` is all that there is to clean up.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, replace

from kvtransfer.hashing import pack_ids
from router import wire
from router.policy import Demand, Key, Pair
from router.worker import Call, Worker


@dataclass(frozen=True)
class GenRequest:
    """A request as the workers see it. ``sampling.max_tokens`` is set at admission."""

    ids: tuple[int, ...]
    sampling: wire.Sampling
    max_tokens: int | None = None  # None: as much as there is room for
    salt: bytes = b""
    label: str = ""  # the client's id, for logs


@dataclass(frozen=True)
class Chunk:
    """New tokens. The last chunk has a ``finish`` ("stop" or "length")."""

    ids: tuple[int, ...]
    finish: str = ""
    cached_tokens: int = 0  # of the prompt, not computed by the worker that made the first token


class AttemptFailed(Exception):
    """An attempt ended without an answer; ``Dispatcher`` decides what comes next."""

    def __init__(self, side: str, kind: str, message: str, avoid: Key | None = None) -> None:
        super().__init__(message)
        self.side = side  # prefill or decode
        self.kind = kind  # those of wire.Failed, and: lost, refused
        self.message = message
        self.avoid = avoid


class Job:
    """The state of one request. All that it holds at workers is in its calls and its ticket."""

    def __init__(
        self, request: GenRequest, max_tokens: int, deadline: float, only: Pair | None = None
    ) -> None:
        self.request = request
        self.only = only  # a proof: on this pair or not at all, past the queue
        self.id = os.urandom(16)
        self.sampling = replace(request.sampling, max_tokens=max_tokens)
        self.deadline = deadline  # loop time
        self.delivered: list[int] = []
        self.finish = ""
        self.attempt = 0
        self.bypassed = 0  # later requests that went before it while it waited
        self.prefill: Call | None = None
        self.decode: Call | None = None
        self.decoding = False  # Decode was sent in this attempt
        self.peer_answers = 0
        self.ticket: tuple[Worker, bytes] | None = None  # its producer and id, if not released
        self.decode_ticket = b""  # as it was sent to D
        self.avoid: set[Key] = set()
        self.failures = {"prefill": 0, "decode": 0}
        self.cached_tokens = 0
        self.pulled_bytes = 0

    @property
    def ids(self) -> bytes:
        """Prompt and delivered tokens, packed."""
        return pack_ids((*self.request.ids, *self.delivered))

    @property
    def demand(self) -> Demand:
        """What is left to do, for the policy."""
        return Demand(
            num_tokens=len(self.request.ids) + len(self.delivered),
            max_tokens=self.sampling.max_tokens - len(self.delivered),
            avoid=frozenset(self.avoid),
            recompute=bool(self.delivered or any(self.failures.values())),
        )

    @property
    def deadline_ms(self) -> int:
        """Time left, as it travels."""
        return max(1, int((self.deadline - asyncio.get_running_loop().time()) * 1000))

    def begin(self, prefill: Worker | None, decode: Worker) -> None:
        """Open this attempt's calls, so that the next choice counts them. Nothing is sent yet."""
        self.attempt += 1
        demand = self.demand
        blocks = -(-(demand.num_tokens + 1) // decode.card.block_size)
        if prefill is None:
            self.decode = decode.call(self.id, self.attempt, demand.num_tokens, blocks)
            return
        self.prefill = prefill.call(self.id, self.attempt, tokens=demand.num_tokens)
        if demand.max_tokens > 1:
            self.decode = decode.call(self.id, self.attempt, blocks=blocks)

    def release(self) -> None:
        """The KV behind the ticket is not needed any more."""
        if self.ticket is not None:
            producer, ticket_id = self.ticket
            producer.tickets.discard(ticket_id)
            producer.send(wire.Release(ticket_id))
            self.ticket = None

    def end_attempt(self) -> None:
        """Leave nothing at the workers. Never waits, never fails; may be called again."""
        for call in (self.prefill, self.decode):
            if call is not None:
                call.abort()
        self.release()
        self.prefill = self.decode = None
        self.decoding = False
        self.peer_answers = 0
