"""One request while the router owns it, over all its attempts.

What comes next is decided in ``router.dispatch``. Everything that a request has open anywhere
belongs to its current :class:`~router.attempt.Attempt`, so :meth:`Job.end_attempt` is all that
there is to clean up.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvtransfer.hashing import pack_ids
from router import wire
from router.config import RouterConfig
from router.marks import Marks
from router.policy import Demand, Key, Pair

if TYPE_CHECKING:
    from router.attempt import Attempt

MAX_LOSSES = 4  # broken connections that one request survives, whether they came back or not


@dataclass(frozen=True)
class GenRequest:
    """A request as the workers see it. ``sampling.max_tokens`` is set at admission."""

    ids: tuple[int, ...]
    sampling: wire.Sampling
    max_tokens: int | None = None  # None: as much as there is room for
    salt: bytes = b""
    label: str = ""  # the client's id, for logs
    trace: str = ""  # traceparent of its span, for the workers; "" when it is not traced


class Enough(Exception):
    """Thrown into an answer by its reader, who has all that the client wanted: a stop string."""


@dataclass(frozen=True)
class Chunk:
    """New tokens. The last chunk has a ``finish`` ("stop" or "length")."""

    ids: tuple[int, ...]
    finish: str = ""
    cached_tokens: int = 0  # of the prompt, not computed by the worker that made the first token


class AttemptFailed(Exception):
    """An attempt ended without an answer; ``Dispatcher`` decides what comes next.

    ``kind``: those of wire.Failed, and: refused (no room now), expired (the lease ran out), stalled
    (the engine stands still), unknown (the worker knows nothing of it); lost is: the connection.
    """

    def __init__(self, side: str, kind: str, message: str, avoid: Key | None = None) -> None:
        super().__init__(message)
        self.side = side  # prefill or decode: who is to be replaced
        self.kind = kind
        self.message = message
        self.avoid = avoid

    @property
    def cause(self) -> str:
        """As it is counted."""
        return self.kind if self.kind in ("pull", "expired") else f"{self.side} {self.kind}"

    @property
    def counts(self) -> bool:
        """Whether it uses up one of the request's attempts: not when a worker only has no room,
        or leaves.
        """
        return self.kind not in ("refused", "draining")


class Job:
    """What is known of one request, over all its attempts."""

    def __init__(
        self,
        request: GenRequest,
        max_tokens: int | None,
        deadline: float,
        only: Pair | None = None,
        marks: Marks | None = None,
    ) -> None:
        self.request = request
        self.marks = marks or Marks()
        self.only = only  # a proof: on this pair or not at all, past the queue
        self.id = os.urandom(16)
        self.sampling = request.sampling
        self.let_in = False  # as long as no worker is there that says what it can serve
        if max_tokens is not None:
            self.admit(max_tokens)
        self.deadline = deadline  # loop time
        self.delivered: list[int] = []
        self.finish = ""
        self.num_attempts = 0
        self.current: Attempt | None = None
        self.bypassed = 0  # later requests that went before it while it waited for room
        self.failed: list[AttemptFailed] = []  # attempts, except those that were only refused
        self.num_losses = 0  # of connections to its workers
        self.in_flight = False  # a worker has begun with it, and may have to be replaced
        self.problem = ""  # of the attempt that failed last
        self.no_prefill = False  # its prefills have failed too often
        self.cached_tokens = 0
        self.pulled_bytes = 0

    def admit(self, max_tokens: int) -> None:
        """It can be served, with so many tokens at most."""
        self.sampling = replace(self.request.sampling, max_tokens=max_tokens)
        self.let_in = True

    @property
    def ids(self) -> bytes:
        """Prompt and delivered tokens, packed."""
        return pack_ids((*self.request.ids, *self.delivered))

    @property
    def num_tokens(self) -> int:
        """Of the prompt, and delivered."""
        return len(self.request.ids) + len(self.delivered)

    @property
    def demand(self) -> Demand:
        """What is left to do, for the policy."""
        return Demand(
            num_tokens=self.num_tokens,
            max_tokens=self.sampling.max_tokens - len(self.delivered),
            avoid=self.avoid,
            recompute=self.in_flight or bool(self.delivered),
            no_prefill=self.no_prefill,
        )

    @property
    def avoid(self) -> frozenset[Key]:
        """Workers at which it has failed."""
        return frozenset(failure.avoid for failure in self.failed if failure.avoid is not None)

    @property
    def deadline_ms(self) -> int:
        """Time left, as it travels."""
        return max(1, int((self.deadline - asyncio.get_running_loop().time()) * 1000))

    def deliver(self, ids: tuple[int, ...], finish: str, cached_tokens: int) -> Chunk:
        """New tokens for the client; they are never sampled again."""
        if not self.delivered:
            self.cached_tokens = cached_tokens
        self.delivered += ids
        self.finish = finish
        if not finish and len(self.delivered) >= self.sampling.max_tokens:
            self.finish = "length"
        return Chunk(ids, self.finish, self.cached_tokens)

    def note(self, failure: AttemptFailed, config: RouterConfig) -> bool:
        """Count a failed attempt; whether the request may be tried again.

        Prefills that have failed too often are followed by one computed by a decode worker. Not so
        if each of them took its worker along: that may be the request's own doing, and it is not
        passed on to more of them.
        """
        if failure.kind == "refused":
            return True
        self.failed.append(failure)
        self.in_flight = True
        self.problem = failure.message
        self.num_losses += failure.kind == "lost"
        self.no_prefill |= self.num_failed("prefill") >= config.prefill_attempts
        return (
            self.num_failed("prefill", ("lost", "stalled")) < config.prefill_attempts
            and self.num_failed("decode") < config.decode_attempts
            and self.num_losses < MAX_LOSSES
        )

    def num_failed(self, side: str, kinds: Collection[str] = ()) -> int:
        """Attempts that count as failed on this side; of all kinds when none is given."""
        return sum(
            failure.counts and failure.side == side and (not kinds or failure.kind in kinds)
            for failure in self.failed
        )

    def forgive(self, is_back: Callable[[Key], bool]) -> None:
        """Losses of workers that are back, the same incarnations: only the connection had broken.

        They do not count, and these workers may serve the request.
        """
        self.failed = [
            failure
            for failure in self.failed
            if not (failure.kind == "lost" and failure.avoid and is_back(failure.avoid))
        ]

    def end_attempt(self) -> None:
        """Leave nothing at the workers. Never waits, never fails; may be called again."""
        if self.current is not None:
            self.current.end()
            self.current = None
