"""A request that goes on elsewhere, through the real router and real workers in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvtransfer.hashing import pack_ids
from router import wire
from router.config import RouterConfig, RouterSettings
from router.dispatch import Dispatcher, GenRequest
from router.errors import RequestError
from router.job import Job
from services.engine.config import EngineConfig
from services.engine.scheduler import Plan
from services.settings import WorkerSettings
from services.worker import Worker
from tests.support.tiny_model import save_model

SECRET = b"s" * 32
PROMPT = tuple(range(40, 70))
MAX_TOKENS = 24
STEPS_BEFORE_DEATH = 6


def request() -> GenRequest:
    sampling = wire.Sampling(max_tokens=MAX_TOKENS, temperature=1.0, seed=11)
    return GenRequest(PROMPT, sampling, MAX_TOKENS)


async def worker(role: str, number: int, folder: Path) -> Worker:
    engine = EngineConfig(
        kv_blocks=17, max_model_len=128, token_budget=64, threads=1, dtype="float32", device="cpu"
    )
    started = Worker(
        WorkerSettings(
            worker_id=f"{role}-{number}",
            role=role,
            model_dir=str(folder),
            served_model="tiny",
            weights="digest",
            host="127.0.0.1",
            transport="memory",
            secret=SECRET,
            lease_s=30.0,
            net_devices="lo",
            engine=engine,
        )
    )
    await started.start()
    return started


@asynccontextmanager
async def graph(folder: Path) -> AsyncIterator[tuple[Dispatcher, list[Worker]]]:
    """One prefill worker, two decode workers (the second in the pair), and a router."""
    save_model(folder)
    workers = [await worker(role, i, folder) for i, role in enumerate(["prefill"] + 2 * ["decode"])]

    async def discover() -> list[wire.WorkerCard]:
        return [w.card for w in workers if w.card is not None]

    settings = RouterSettings(RouterConfig(), str(folder), "tiny", "R", SECRET)
    dispatcher = Dispatcher(settings, discover)
    await dispatcher.start()
    try:
        async with asyncio.timeout(20):
            while len(dispatcher.prover.proven) < 2:
                await asyncio.sleep(0.01)
        yield dispatcher, workers
    finally:
        await dispatcher.close()
        for w in workers:
            await w.close()


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
    begin = Job.begin

    def begin_and_note(self: Job, *args: object) -> None:
        begin(self, *args)  # type: ignore[arg-type]
        self.base = len(self.delivered)  # type: ignore[attr-defined]

    def ids(self: Job) -> bytes:
        return pack_ids((*self.request.ids, *self.delivered[self.base :]))  # type: ignore[attr-defined]

    monkeypatch.setattr(Job, "begin", begin_and_note)
    monkeypatch.setattr(Job, "ids", property(ids))


async def stream(dispatcher: Dispatcher) -> tuple[list[int], str]:
    """What a client gets: tokens, and the error that ends them if there is one."""
    tokens: list[int] = []
    try:
        async for chunk in dispatcher.generate(request()):
            tokens += chunk.ids
    except RequestError as error:
        return tokens, str(error)
    return tokens, ""


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
