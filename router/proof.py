"""Proves pairs by a real generation before they get traffic (asyncio).

A pair is proven when two tokens came out of a prompt longer than one block, the second one on KV
that was pulled. The prompt's salt is random, so no prefix cache can stand in for the transfer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import AsyncGenerator, Callable
from typing import Any

from router import wire
from router.errors import RequestError
from router.job import Chunk, GenRequest, Job
from router.policy import Pair
from router.workers import WorkerTable

PROOF_TIMEOUT_S = 30.0
BACKOFF_S = (0.5, 10.0)  # between proofs of one pair: first, longest
HIGHEST_ID = 32  # ids that every vocabulary has

log = logging.getLogger(__name__)


class Prover:
    """Keeps one task for each pair that could be used and is not proven yet.

    ``run`` runs a job, ``on_change`` is called when a proof has ended.
    """

    def __init__(
        self,
        table: WorkerTable,
        run: Callable[[Job], AsyncGenerator[Chunk, None]],
        on_change: Callable[[], None],
    ) -> None:
        self.proven: set[Pair] = set()
        self._table = table
        self._run = run
        self._on_change = on_change
        self._tasks: dict[Pair, asyncio.Task[None]] = {}
        self._problems: dict[Pair, str] = {}

    def refresh(self) -> None:
        """Start what is missing, forget the pairs of workers that are gone."""
        known = self._table.workers
        self.proven = {
            pair
            for pair in self.proven
            if pair.decode in known and (pair.prefill is None or pair.prefill in known)
        }
        for pair in self._table.possible_pairs():
            if pair not in self.proven and pair not in self._tasks:
                self._tasks[pair] = asyncio.create_task(self._prove_until_proven(pair))

    def state(self) -> list[dict[str, Any]]:
        """One entry per pair: proven, unusable (proven once, but a worker of it is not ready now),
        unproven (with the last problem), or incompatible.
        """

        def entry(pair: Pair, state: str, reason: str = "") -> dict[str, Any]:
            prefill = pair.prefill[0] if pair.prefill else None
            return {
                "prefill": prefill, "decode": pair.decode[0], "state": state, "reason": reason,
            }  # fmt: skip

        usable = set(self._table.possible_pairs())
        return [
            *(entry(pair, "proven") for pair in self.proven & usable),
            *(entry(pair, "unusable", self._why(pair)) for pair in self.proven - usable),
            *(entry(pair, "unproven", self._problems.get(pair, "")) for pair in self._tasks),
            *(
                entry(Pair(p, d), "incompatible", reason)
                for (p, d), reason in self._table.incompatible.items()
            ),
        ]

    def _why(self, pair: Pair) -> str:
        """Which of the pair's workers takes no requests now."""
        keys = [key for key in (pair.prefill, pair.decode) if key is not None]
        workers = [self._table.workers[key] for key in keys]
        return ", ".join(
            f"{worker.card.worker_id} is {'stalled' if worker.stalled else worker.state}"
            for worker in workers
            if not worker.usable
        )

    async def close(self) -> None:
        """Stop proving."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _prove_until_proven(self, pair: Pair) -> None:
        backoff, longest = BACKOFF_S
        try:
            while pair in self._table.possible_pairs():
                problem = await self._prove(pair)
                if not problem:
                    log.info("proven: %s", _name(pair))
                    self.proven.add(pair)
                    return
                log.warning("%s has not passed its proof: %s", _name(pair), problem)
                self._problems[pair] = problem
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, longest)
        finally:
            del self._tasks[pair]
            self._problems.pop(pair, None)
            self._on_change()

    async def _prove(self, pair: Pair) -> str:
        """What went wrong; empty when nothing did."""
        block_size = self._table.workers[pair.decode].card.block_size
        ids = tuple(random.randrange(1, HIGHEST_ID) for _ in range(block_size + 2))
        sampling = wire.Sampling(max_tokens=2, min_tokens=2, temperature=0.0)
        request = GenRequest(ids, sampling, 2, salt=b"proof" + os.urandom(16), label="proof")
        deadline = asyncio.get_running_loop().time() + PROOF_TIMEOUT_S
        job = Job(request, 2, deadline, only=pair)
        try:
            async for _ in self._run(job):
                pass
        except RequestError as error:
            return error.message
        if len(job.delivered) != 2:
            return f"{len(job.delivered)} tokens came instead of 2"
        if pair.prefill is not None and job.pulled_bytes <= 0:
            return "no KV was pulled"
        return ""


def _name(pair: Pair) -> str:
    return f"{pair.prefill[0]} → {pair.decode[0]}" if pair.prefill else pair.decode[0]
