"""One request, ids to ids: admit, wait for a pair, try, and try again elsewhere (asyncio).

A request goes through these states; each has the deadline of the request, and an edge to the end::

    admitted ──► queued ──pair──► an attempt ──last token──► finished
                   ▲                  │failed
                   └──────────────────┘  with the tokens so far

An attempt is in ``router.attempt``. The next one carries ``ids = prompt + delivered tokens``: no
token is sampled twice. When a prefill fails, another prefill worker follows; when there is none, or
too many have failed, a decode worker computes it all. When a decode fails, another decode worker
follows. Past the limits of ``RouterConfig`` there is one clear error. Whatever way a request ends,
one ``finally`` aborts what is open at the workers and releases the ticket.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any

from router import wire
from router.admission import max_context
from router.attempt import Attempt
from router.config import RouterSettings
from router.door import Door
from router.errors import (
    BadRequest,
    DeadlineExceeded,
    InternalError,
    RequestError,
    Unavailable,
)
from router.job import AttemptFailed, Chunk, Enough, GenRequest, Job
from router.ledger import Routing
from router.marks import Marks
from router.pending import DEADLINE, STOPPING, Queue
from router.policy import Key, Pair, View, members, other_decode, usable_pairs
from router.pools import Pools, lacking, report, targets
from router.proof import Prover
from router.readiness import Readiness
from router.worker import Worker
from router.workers import WorkerTable

DISCOVER_EVERY_S = 0.5
TICK_S = 0.25  # between looks at leases, silent calls and engines that hang

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
        self.readiness = Readiness(settings)
        epoch = int.from_bytes(os.urandom(8), "big") | 1
        self.routing = Routing()
        self.table = WorkerTable(settings, epoch, self._changed, self.routing)
        self.prover = Prover(self.table, self._run, self._changed)
        self.queue = Queue(settings, self._view, self._grant, self._lack)
        self.counters: Counter[str] = Counter()  # requests by outcome, and retries
        self.causes: Counter[str] = Counter()  # why attempts failed, and what was done instead
        self.door = Door(settings, self.queue, self._view, self.counters)
        self._router_id = settings.router_id
        self._discover = discover
        self._jobs: set[Job] = set()
        self._closing = False
        self._pools = Pools()
        self.wanted = settings.replicas  # workers by role; Serve may say others meanwhile
        self.wanted_routers = settings.routers  # the same
        self._turn = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to look for workers."""
        self._tasks = [
            asyncio.create_task(self._poll_discovery()),
            asyncio.create_task(self._maintain()),
        ]

    async def close(self) -> None:
        """Stop; requests that still run or wait end with an error. May be called again."""
        self._closing = True
        self.queue.close()
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

    def settled(self, patience_s: float) -> bool:
        """Ready, and once there were all workers that were asked for, or not within a time. Or
        asleep.

        For who decides when a new deployment takes its share beside an old one: with one pair of
        many it could not carry it. ``patience_s`` counts from the first moment of being ready; who
        has been settled is so whenever it is ready.
        """
        view = self._view()
        pairs = usable_pairs(view)
        if not pairs:
            return self.asleep
        there = Counter(view.workers[key].role for key in members(pairs))
        return self.readiness.settled(there, self.targets, patience_s)

    @property
    def asleep(self) -> bool:
        """Nothing is ready, on purpose: a request waits until workers have started for it."""
        return not self.ready and self.readiness.asleep(self._pools)

    @property
    def pools(self) -> Pools:
        """What is wanted of pools that scale, and how starting workers goes."""
        return self._pools

    @pools.setter
    def pools(self, pools: Pools) -> None:
        for one in pools.new_failures(self._pools):
            log.error(
                "a %s worker did not start (%s, %s, %d in a row): %s",
                one.role, one.worker or "unknown", one.reason, one.in_a_row, one.message,
            )  # fmt: skip
        self._pools = pools
        self.readiness.told(pools)

    @property
    def targets(self) -> dict[str, int]:
        """Workers that there should be, by role."""
        return targets(self.wanted, self._pools)

    @property
    def num_jobs(self) -> int:
        """Requests that are neither finished, failed nor cancelled, proofs included."""
        return len(self._jobs)

    @property
    def num_answering(self) -> int:
        """Answers that have a pair, proofs not included. Any thread may ask."""
        jobs = self._jobs.copy()
        return sum(job.current is not None and job.only is None for job in jobs)

    def state(self) -> dict[str, Any]:
        """For ``GET /internal/state``."""
        counted = ("finished", "failed", "refused", "cancelled", "retries")
        return {
            "router_id": self._router_id,
            "workers": self.table.state(),
            **report(self._pools, self.targets, self.table.conditions(), time.time()),
            "pairs": self.prover.state(),
            "requests": {
                "running": len(self._jobs) - len(self.queue),
                "queued": len(self.queue),
                **{name: self.counters[name] for name in counted},
                "causes": dict(self.causes),
            },
            "faults": dict(self.table.faults.counts) if self.table.faults else {},
        }

    def max_context(self) -> int | None:
        """Longest prompt and answer that a usable pair takes; None when there is no pair."""
        return max_context(self._view())

    async def generate(
        self, request: GenRequest, marks: Marks | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """The answer, as it is made. Raises RequestError; closing it early cancels everywhere, and
        so does throwing Enough into it. What happens when goes to ``marks``.
        """
        await self.readiness.comeback()
        max_tokens = self.door.enter(request)
        deadline = asyncio.get_running_loop().time() + self.config.request_timeout_s
        job = Job(request, max_tokens, deadline, marks=marks)
        running = self._run(job)
        outcome = "cancelled"
        try:
            async for chunk in running:
                yield chunk
            outcome = "finished"
        except Enough:
            outcome = "finished"
        except Exception:
            outcome = "failed" if job.let_in else "refused"
            raise
        finally:
            await running.aclose()
            self.counters[outcome] += 1
            self.door.asked.ended(len(job.delivered))
            log.debug(
                "request %s (%s): %s, %d and %d tokens, %d attempts",
                job.id.hex(), request.label, outcome, len(request.ids), len(job.delivered),
                job.num_attempts,
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
            if job.current is None:
                await self._take_place(job)
            assert job.current is not None
            try:
                return await job.current.next_chunk()
            except AttemptFailed as failure:
                self._give_up_or_retry(job, failure)

    async def _take_place(self, job: Job) -> None:
        """Wait until a pair has room, and open an attempt's calls there."""
        if job.only is None:
            await self.queue.wait(job)
        elif job.only in self.table.possible_pairs():
            self._grant(job, job.only)
        else:
            raise Unavailable("the worker is gone")

    def _give_up_or_retry(self, job: Job, failure: AttemptFailed) -> None:
        """Return when another attempt makes sense, else raise what the client is told."""
        job.end_attempt()
        if failure.kind == "refused":
            job.marks.refused()
        else:
            job.marks.failed(failure.cause)
        if failure.kind == "invalid":
            raise BadRequest(failure.message)
        if failure.kind == "deadline" or asyncio.get_running_loop().time() >= job.deadline:
            raise DeadlineExceeded(DEADLINE)
        if self._closing:
            raise Unavailable(STOPPING)
        if job.only is not None:
            raise _final_error(failure)
        if not self._count_failure(job, failure):
            raise _final_error(failure)
        if failure.kind != "refused":  # else it took no room, and waits until there is some
            self._count_retry(failure)

    def _replace_decode(
        self, job: Job, prefill: Worker, failed: Worker, failure: AttemptFailed
    ) -> Worker | None:
        """Another decode worker for what ``prefill`` has computed, if one has room now."""
        if job.only is not None or self._closing or not prefill.connected:
            return None
        last = job.num_failed("decode") + failure.counts >= self.config.decode_attempts
        demand = replace(job.demand, avoid=frozenset({*job.avoid, failed.key}))
        key = None if last else other_decode(demand, prefill.key, self._view())
        if key is None:
            return None
        self._count_failure(job, failure)
        self._count_retry(failure)
        self._count_failover("ticket reused")
        worker = self.table.workers[key]
        self._take_turn(worker)
        return worker

    def _count_retry(self, failure: AttemptFailed) -> None:
        self.counters["retries"] += 1
        self.routing.retries[failure.side, failure.kind] += 1

    def _count_failover(self, kind: str) -> None:
        self.causes[kind] += 1
        self.routing.failovers[kind,] += 1

    def _count_failure(self, job: Job, failure: AttemptFailed) -> bool:
        """Whether the request may be tried again."""
        self.causes[failure.cause] += 1
        if failure.kind != "refused":
            log.warning(
                "request %s (%s), attempt %d: %s: %s",
                job.id.hex(), job.request.label, job.num_attempts, failure.cause, failure.message,
            )  # fmt: skip
        return job.note(failure, self.config)

    # --- the workers -----------------------------------------------------------------------------

    def _grant(self, job: Job, pair: Pair) -> None:
        workers = self.table.workers
        prefill = workers[pair.prefill] if pair.prefill is not None else None
        decode = workers[pair.decode]
        if job.only is None:
            self._count_decision(job, prefill, decode)
        if prefill is None and decode.card.role == "decode" and job.only is None:
            self._count_local_prefill(job, decode)
        job.current = Attempt(job, prefill, decode, self.config.early_pull, self._replace_decode)
        self._take_turn(decode, prefill or decode)

    def _count_decision(self, job: Job, prefill: Worker | None, decode: Worker) -> None:
        kind = "disagg"
        if job.in_flight:
            kind = "retry"
        elif prefill is None:
            kind = "mixed" if decode.card.role == "mixed" else "decode_only"
        self.routing.decisions[kind,] += 1

    def _take_turn(self, *workers: Worker) -> None:
        for worker in workers:
            worker.last_turn = self._turn
        self._turn += 1

    def _count_local_prefill(self, job: Job, decode: Worker) -> None:
        """A decode worker computes a prompt: never in silence."""
        recompute = job.demand.recompute
        self._count_failover("recompute" if recompute else "local prefill")
        log.warning(
            "request %s (%s): %s computes %d tokens itself, %s",
            job.id.hex(), job.request.label, decode.card.worker_id, job.demand.num_tokens,
            "to go on" if recompute else "as no prefill worker is there",
        )  # fmt: skip

    def _lack(self) -> str:
        there = {worker.card.role for worker in self.table.workers.values() if worker.usable}
        return lacking(there, self._pools)

    def _view(self) -> View:
        return self.table.view(self.prover.proven)

    def _changed(self) -> None:
        """Workers came, went, or reported."""
        if self._closing:
            return
        for job in self._jobs:
            if job.failed:
                job.forgive(self._is_usable)
        self.prover.refresh()
        self.readiness.looked(self.ready)
        self.queue.serve()

    def _is_usable(self, key: Key) -> bool:
        worker = self.table.workers.get(key)
        return worker is not None and worker.usable

    async def _poll_discovery(self) -> None:
        while True:
            try:
                self.table.update(await self._discover())
            except Exception as error:  # whatever it is, connected workers go on
                log.warning("discovery failed: %s", error)
            await asyncio.sleep(DISCOVER_EVERY_S)

    async def _maintain(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self.table.tick()
            except Exception:  # leases must be renewed, whatever it was
                log.exception("a look at the workers failed")


def _final_error(failure: AttemptFailed) -> RequestError:
    """503 where the client may simply try again, 500 where it would only see the same."""
    if failure.kind == "internal":
        return InternalError(f"the request failed: {failure.message}")
    return Unavailable(f"the request failed: {failure.message}")
