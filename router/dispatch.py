"""One request, ids to ids: admit, wait for a pair, reserve, prefill, decode, release (asyncio).

A request goes through these states; each has the deadline of the request, and an edge to the end::

    admitted ──► queued ──pair──► reserving ──► prefilling ──► decoding ──► finished
                   ▲                  │refused      │failed        │failed
                   └──────────────────┴─────────────┴──────────────┘  with the tokens so far

The order is always D before P, so that nobody holds P's blocks while waiting for D's. The first
token is passed on as soon as P has it; the transfer hides behind it. An attempt that fails is
repeated elsewhere with ``ids = prompt + delivered tokens``: no token is sampled twice. Whatever way
a request ends, one ``finally`` aborts what is open at the workers and releases the ticket.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import Any

from router import wire
from router.admission import Admitted, admit
from router.config import RouterSettings
from router.errors import (
    BadRequest,
    DeadlineExceeded,
    InternalError,
    RequestError,
    Unavailable,
)
from router.job import AttemptFailed, Chunk, GenRequest, Job
from router.pending import DEADLINE, Queue
from router.policy import Pair, View, usable_pairs
from router.proof import Prover
from router.worker import Call, WorkerLost, common_agent
from router.workers import WorkerTable

DISCOVER_EVERY_S = 0.5
RENEW_EVERY_S = 10  # a third of a lease
MAX_PEER_ANSWERS = 3  # to UnknownPeer, in one attempt

log = logging.getLogger(__name__)


class Dispatcher:
    """Owns every request of one router, the queue, and the table of workers.

    ``discover`` returns the cards of all workers that are registered now.
    """

    def __init__(
        self,
        settings: RouterSettings,
        discover: Callable[[], Awaitable[Iterable[wire.WorkerCard]]],
    ) -> None:
        self.config = settings.config
        epoch = int.from_bytes(os.urandom(8), "big") | 1
        self.table = WorkerTable(settings, epoch, self._changed)
        self.prover = Prover(self.table, self._run, self._changed)
        self.queue = Queue(self.config, self._view, self._grant)
        self.counters: Counter[str] = Counter()
        self._discover = discover
        self._jobs: set[Job] = set()
        self._closing = False
        self._turn = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to look for workers."""
        self._tasks = [
            asyncio.create_task(self._poll_discovery()),
            asyncio.create_task(self._maintain()),
        ]

    async def close(self) -> None:
        """Stop; requests that still run end with an error."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.prover.close()
        await self.table.close()

    # --- for the API -----------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """At least one pair that has passed a real generation takes requests."""
        return bool(usable_pairs(self._view()))

    @property
    def num_jobs(self) -> int:
        """Requests that are neither finished, failed nor cancelled, proofs included."""
        return len(self._jobs)

    def state(self) -> dict[str, Any]:
        """For ``GET /internal/state``."""
        counted = ("finished", "failed", "refused", "cancelled", "retries")
        return {
            "workers": self.table.state(),
            "pairs": self.prover.state(),
            "requests": {
                "running": len(self._jobs) - len(self.queue),
                "queued": len(self.queue),
                **{name: self.counters[name] for name in counted},
            },
        }

    def max_context(self) -> int | None:
        """Longest prompt and answer that a usable pair takes; None when there is no pair."""
        view = self._view()
        return max(
            (
                min(view.workers[key].max_model_len for key in (pair.prefill, pair.decode) if key)
                for pair in usable_pairs(view)
            ),
            default=None,
        )

    async def generate(self, request: GenRequest) -> AsyncGenerator[Chunk, None]:
        """The answer, as it is made. Raises RequestError; closing it early cancels everywhere."""
        verdict = admit(
            len(request.ids),
            request.max_tokens,
            self._view(),
            len(self.queue),
            self.config.max_queue,
        )
        if not isinstance(verdict, Admitted):
            self.counters["refused"] += 1
            raise verdict
        deadline = asyncio.get_running_loop().time() + self.config.request_timeout_s
        job = Job(request, verdict.max_tokens, deadline)
        running = self._run(job)
        failed = False
        try:
            async for chunk in running:
                yield chunk
        except RequestError:
            failed = True
            raise
        finally:
            await running.aclose()
            outcome = "failed" if failed else "finished" if job.finish else "cancelled"
            self.counters[outcome] += 1
            log.debug(
                "request %s (%s): %s, %d and %d tokens, %d attempts",
                job.id.hex(), request.label, outcome, len(request.ids), len(job.delivered),
                job.attempt,
            )  # fmt: skip

    # --- one request -----------------------------------------------------------------------------

    async def _run(self, job: Job) -> AsyncGenerator[Chunk, None]:
        self._jobs.add(job)
        try:
            while not job.finish:
                yield await self._next_chunk(job)
        finally:
            job.end_attempt()
            self._jobs.discard(job)
            self.queue.serve()

    async def _next_chunk(self, job: Job) -> Chunk:
        """Go on until there are new tokens, through as many attempts as it takes."""
        while True:
            try:
                chunk = await (self._continue(job) if job.decoding else self._begin(job))
                if chunk is not None:
                    return chunk
            except AttemptFailed as failure:
                self._give_up_or_retry(job, failure)

    async def _begin(self, job: Job) -> Chunk | None:
        """A new attempt, up to its first token or, where one worker does all, up to Decode."""
        await self._take_place(job)
        if job.prefill is None:
            self._send_decode(job, b"")
            return None
        if job.decode is not None:
            await self._reserve(job, job.decode)
        return await self._prefill(job, job.prefill)

    async def _reserve(self, job: Job, call: Call) -> None:
        call.send(
            wire.Reserve(job.id, job.attempt, job.ids, job.request.salt, job.deadline_ms),
        )
        message = await self._answer(job, call, "decode")
        if not isinstance(message, wire.Reserved):
            raise _unexpected("decode", call, message)

    async def _prefill(self, job: Job, call: Call) -> Chunk:
        call.send(
            wire.Prefill(
                job.id,
                job.attempt,
                job.ids,
                len(job.request.ids),
                job.sampling,
                job.request.salt,
                export=job.decode is not None,
                deadline_ms=job.deadline_ms,
            )
        )
        message = await self._answer(job, call, "prefill")
        if not isinstance(message, wire.Prefilled):
            raise _unexpected("prefill", call, message)
        if message.ticket_id:
            job.ticket = (call.worker, message.ticket_id)
            call.worker.tickets.add(message.ticket_id)
        if not (message.finish or message.ticket or job.decode is None):
            raise _unexpected("prefill", call, message)
        self._deliver(job, (message.token,), message.finish, message.cached_tokens)
        if job.finish:
            job.end_attempt()
        else:
            self._introduce(job)
            self._send_decode(job, message.ticket)
        return Chunk((message.token,), job.finish, job.cached_tokens)

    def _send_decode(self, job: Job, ticket: bytes) -> None:
        assert job.decode is not None
        job.decoding = True
        job.decode_ticket = ticket
        job.decode.send(
            wire.Decode(
                job.id,
                job.attempt,
                job.ids,
                len(job.request.ids),
                job.sampling,
                ticket,
                job.request.salt,
                job.deadline_ms,
            )
        )

    def _introduce(self, job: Job, again: bool = False) -> None:
        """Tell D how to reach P's pool, once per incarnation of P and connection to D."""
        assert job.ticket is not None
        assert job.decode is not None
        producer, decode = job.ticket[0], job.decode.worker
        agent = common_agent(producer, decode)
        if agent is not None and (again or producer.key not in decode.peers):
            job.decode.send(wire.Peer(agent))
            decode.peers.add(producer.key)

    async def _continue(self, job: Job) -> Chunk | None:
        """The next message from D."""
        call = job.decode
        assert call is not None
        message = await self._answer(job, call, "decode")
        match message:
            case wire.Pulled():
                job.pulled_bytes += message.num_bytes
                job.release()
                return None
            case wire.UnknownPeer() if job.peer_answers < MAX_PEER_ANSWERS and job.ticket:
                job.peer_answers += 1
                self._introduce(job, again=True)
                self._send_decode(job, job.decode_ticket)
                return None
            case wire.Tokens(first_index=first) if first == len(job.delivered):
                call.worker.computed(call)
                self._deliver(job, message.ids, message.finish, message.cached_tokens)
                if not message.ids and not job.finish:
                    return None
                return Chunk(message.ids, job.finish, job.cached_tokens)
        raise _unexpected("decode", call, message)

    async def _answer(self, job: Job, call: Call, side: str) -> wire.Message:
        """The next message of a call that is not the end of its attempt."""
        try:
            message = await call.next(job.deadline)
        except TimeoutError:
            raise DeadlineExceeded(DEADLINE) from None
        key = call.worker.key
        match message:
            case WorkerLost(reason):
                name = call.worker.card.worker_id
                raise AttemptFailed(side, "lost", f"{side} worker {name}: {reason}", key)
            case wire.Failed(kind="pull"):
                producer = job.ticket[0].key if job.ticket else None
                raise AttemptFailed("prefill", "pull", message.message, producer)
            case wire.Failed():
                raise AttemptFailed(side, message.kind, message.message, key)
            case wire.Refused(retry=True):
                raise AttemptFailed(side, "refused", message.reason)
            case wire.Refused():
                raise AttemptFailed(side, "invalid", message.reason)
        return message

    def _deliver(self, job: Job, ids: tuple[int, ...], finish: str, cached_tokens: int) -> None:
        if not job.delivered:
            job.cached_tokens = cached_tokens
        job.delivered += ids
        job.finish = finish
        if not finish and len(job.delivered) >= job.sampling.max_tokens:
            job.finish = "length"

    def _give_up_or_retry(self, job: Job, failure: AttemptFailed) -> None:
        """Return when another attempt makes sense, else raise what the client is told."""
        job.end_attempt()
        if failure.kind == "invalid":
            raise BadRequest(failure.message)
        if failure.kind == "deadline":
            raise DeadlineExceeded(DEADLINE)
        if failure.kind == "refused" and job.only is None:
            return  # it took no room; back to the queue until there is some
        if failure.kind != "draining":
            job.failures[failure.side] += 1
        if failure.avoid is not None:
            job.avoid.add(failure.avoid)
        spent = (
            job.failures["prefill"] >= self.config.prefill_attempts
            or job.failures["decode"] >= self.config.decode_attempts
        )
        log.warning(
            "request %s (%s), attempt %d, %s: %s: %s",
            job.id.hex(), job.request.label, job.attempt, failure.side, failure.kind,
            failure.message,
        )  # fmt: skip
        if spent or job.only is not None:
            raise _final_error(job, failure)
        self.counters["retries"] += 1

    # --- the workers -----------------------------------------------------------------------------

    async def _take_place(self, job: Job) -> None:
        """Wait until a pair has room, and open the job's calls there."""
        if job.only is None:
            await self.queue.wait(job)
        elif job.only in self.table.possible_pairs():
            self._grant(job, job.only)
        else:
            raise Unavailable("the worker is gone")

    def _grant(self, job: Job, pair: Pair) -> None:
        workers = self.table.workers
        prefill = workers[pair.prefill] if pair.prefill is not None else None
        decode = workers[pair.decode]
        job.begin(prefill, decode)
        for worker in {decode, prefill or decode}:
            worker.last_turn = self._turn
        self._turn += 1

    def _view(self) -> View:
        return self.table.view(self.prover.proven)

    def _changed(self) -> None:
        """Workers came, went, or reported."""
        if self._closing:
            return
        self.prover.refresh()
        self.queue.serve()

    async def _poll_discovery(self) -> None:
        while True:
            try:
                self.table.update(await self._discover())
            except Exception as error:  # whatever it is, connected workers go on
                log.warning("discovery failed: %s", error)
            await asyncio.sleep(DISCOVER_EVERY_S)

    async def _maintain(self) -> None:
        seconds = 0
        while True:
            await asyncio.sleep(1)
            seconds += 1
            self.table.check_progress()
            if seconds % RENEW_EVERY_S == 0:
                self.table.renew()


def _unexpected(side: str, call: Call, message: wire.Message) -> AttemptFailed:
    """A worker that breaks the conversation, a gap in its tokens included."""
    name = type(message).__name__
    if isinstance(message, wire.Tokens):
        name = f"tokens from {message.first_index} on"
    return AttemptFailed(side, "internal", f"unexpected answer: {name}", call.worker.key)


def _final_error(job: Job, failure: AttemptFailed) -> RequestError:
    """503 where the client may simply try again, 500 where it would only see the same."""
    if failure.kind not in ("lost", "pull", "draining", "refused"):
        return InternalError(f"the request failed: {failure.message}")
    return Unavailable(f"the request failed: {failure.message}")
