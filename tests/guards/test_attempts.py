"""A request that goes on elsewhere, through the real router and real workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtransfer.hashing import pack_ids
from router.job import Job
from services.engine.scheduler import Plan
from services.worker import Worker
from tests.guards.graph import MAX_TOKENS, graph, stream

STEPS_BEFORE_DEATH = 6


def die_once(workers: list[Worker]) -> None:
    """The first of these that has made some steps for a request fails in the middle of it."""
    dead: list[Worker] = []

    def arm(victim: Worker) -> None:
        run: Callable[[Plan], list[int]] = victim.engine.runner.run
        steps = 0

        def run_or_die(plan: Plan) -> list[int]:
            nonlocal steps
            steps += 1
            if steps > STEPS_BEFORE_DEATH and not dead:
                dead.append(victim)
                raise RuntimeError("a part of the test: this engine dies")
            return run(plan)

        victim.engine.runner.run = run_or_die  # type: ignore[method-assign]

    for each in workers:
        arm(each)


def start_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every attempt begin at the prompt, without what was delivered before it."""
    attempts: dict[Job, tuple[int, int]] = {}  # the present one, and what was delivered before it

    def ids(self: Job) -> bytes:
        if attempts.get(self, (0, 0))[0] != self.num_attempts:
            attempts[self] = self.num_attempts, len(self.delivered)
        return pack_ids((*self.request.ids, *self.delivered[attempts[self][1] :]))

    monkeypatch.setattr(Job, "ids", property(ids))


@pytest.mark.parametrize("guarded", [True, False])
def test_a_delivered_token_is_never_sampled_again(
    guarded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode worker dies in mid-stream. The next attempt samples the position after the last
    delivered token; one that began at the prompt would send the first token a second time.
    """

    async def scenario() -> None:
        async with asyncio.timeout(60), graph(tmp_path) as (dispatcher, workers):
            undisturbed, error = await stream(dispatcher)
            assert not error
            assert len(undisturbed) == MAX_TOKENS
            die_once(workers[1:])
            if not guarded:
                start_over(monkeypatch)
            tokens, error = await stream(dispatcher)
            assert dispatcher.counters["retries"] > 0
            if guarded:
                assert tokens == undisturbed
                assert not error
            else:
                kept = 1 + STEPS_BEFORE_DEATH
                assert tokens[: kept + 1] == [*undisturbed[:kept], undisturbed[0]], "not doubled"

    asyncio.run(scenario())
