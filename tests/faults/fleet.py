"""Workers in processes of their own, and a router in the test's: for kills and stops at one point.

Without Ray: who places and restarts processes does not matter here, and a worker that is forked
from a process that has its imports done starts in a moment. The registry is the list of cards,
which still holds the dead ones, as a slow registry does.
"""

import asyncio
import contextlib
import multiprocessing
import os
import secrets
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import router.dispatch
from router.api import create_api
from router.dispatch import Dispatcher
from router.job import Job
from router.tokenizer import ByteTokenizer
from router.wire import WorkerCard
from router.worker import Worker
from services.config import AppConfig, load
from services.machine import model_facts, this_machine
from services.resolve import resolve
from services.settings import router_settings, worker_settings
from tests.faults import child
from tests.faults.gates import RouterGate
from tests.faults.rig import (
    CHUNK,
    HttpClient,
    complete,
    http_server,
    router_leftovers,
    until,
)

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.faults.child"])


class WorkerProcess:
    """One worker, and the pipe to its gates."""

    def __init__(self, process: Any, pipe: Connection, card: WorkerCard) -> None:
        self.process, self.pipe, self.card = process, pipe, card
        self.frozen = False

    def call(self, name: str, *args: Any) -> Any:
        """A method of :class:`tests.faults.child.Control` there."""
        self.pipe.send((name, args))
        assert self.pipe.poll(20), f"{self.card.worker_id} does not answer {name}"
        return self.pipe.recv()

    def send(self, number: int) -> None:
        """A signal; SIGKILL returns when the process is gone."""
        os.kill(self.process.pid, number)
        self.frozen = number == signal.SIGSTOP
        if number == signal.SIGKILL:
            self.process.join(10)

    def kill(self) -> None:
        """kill -9."""
        self.send(signal.SIGKILL)

    @property
    def alive(self) -> bool:
        """Whether the process is there."""
        return bool(self.process.is_alive())


class Fleet:
    """The processes, the registry, and the router in front of them."""

    def __init__(self, config: AppConfig, folder: Path) -> None:
        self.config = config
        self.workers: list[WorkerProcess] = []
        self.cards: list[WorkerCard] = []  # what the registry says
        self.router = router_settings(config, folder, secrets.token_bytes(32))
        self.dispatcher: Dispatcher
        self.gate: RouterGate
        self.port = 0
        self._folder = folder

    async def discover(self) -> list[WorkerCard]:
        """The registry."""
        return list(self.cards)

    def of(self, role: str) -> list[WorkerProcess]:
        """The living workers of a role."""
        return [w for w in self.workers if w.card.role == role and w.alive]

    def serving(self, side: str) -> WorkerProcess:
        """The worker on that side of the only request."""
        (job,) = self.jobs
        assert job.current is not None
        call = job.current._prefill if side == "prefill" else job.current._decode
        assert call is not None
        return next(w for w in self.workers if w.card.worker_id == call.worker.card.worker_id)

    def record(self, worker: WorkerProcess) -> Worker:
        """What the router knows of a worker."""
        return self.dispatcher.table.workers[worker.card.worker_id, worker.card.epoch]

    @property
    def jobs(self) -> set[Job]:
        """Requests that the router knows of."""
        return self.dispatcher._jobs

    async def start(
        self, role: str, port: int = 0, worker_id: str = "", register: bool = True
    ) -> WorkerProcess:
        """A new worker; ``port`` and ``worker_id`` are those of one that has died."""
        settings = worker_settings(role, self.config, self._folder, "127.0.0.1", self.router.secret)
        if worker_id:
            settings = replace(settings, worker_id=worker_id)
        ours, theirs = PROCESSES.Pipe()
        process = PROCESSES.Process(target=child.main, args=(settings, port, theirs), daemon=True)
        process.start()
        theirs.close()
        assert await asyncio.to_thread(ours.poll, 60), f"the {role} worker did not start"
        worker = WorkerProcess(process, ours, ours.recv())
        self.workers.append(worker)
        if register:
            self.cards.append(worker.card)
        return worker

    async def restore(self) -> None:
        """As many living workers as there were at first, all of them in proven pairs, and idle."""
        self.gate.open()
        for worker in self.workers:
            if worker.frozen:
                worker.send(signal.SIGCONT)
        dead = [worker for worker in self.workers if not worker.alive]
        self.workers = [worker for worker in self.workers if worker.alive]
        self.cards = [worker.card for worker in self.workers]
        for worker in self.workers:
            worker.call("open")
        for worker in dead:
            await self.start(worker.card.role)
        await self.until_ready()
        await self.until_idle()

    async def until_ready(self) -> None:
        """Every pair of living workers is proven."""

        def proven() -> bool:
            pairs = {(pair.prefill, pair.decode) for pair in self.dispatcher.prover.proven}
            names = [[w.card for w in self.of(role)] for role in ("prefill", "decode")]
            return all(
                ((p.worker_id, p.epoch), (d.worker_id, d.epoch)) in pairs
                for p in names[0]
                for d in names[1]
            )

        await until(proven, "all pairs are proven", 60)

    async def until_idle(self, timeout_s: float = 10.0) -> None:
        """Nothing is left of any request, at the router and in every living worker."""

        def leftovers() -> list[str]:
            left = router_leftovers(self.dispatcher)
            for worker in self.workers:
                if worker.alive:
                    name = worker.card.worker_id
                    left += [f"{name}: {text}" for text in worker.call("leftovers")]
            return left

        end = asyncio.get_running_loop().time() + timeout_s
        while left := leftovers():
            assert asyncio.get_running_loop().time() < end, f"not idle: {left}"
            await asyncio.sleep(0.01)
        for worker in self.workers:
            if worker.alive:
                worker.call("check_integrity")

    async def post(self, body: dict[str, Any]) -> HttpClient:
        """Send a completion request."""
        return await HttpClient.post(self.port, body)

    async def complete(self, prompt: list[int], max_tokens: int, **options: Any) -> list[int]:
        """Token ids of an undisturbed completion."""
        return await complete(self.port, prompt, max_tokens, **options)

    def close(self) -> None:
        """End the processes, without ceremony."""
        for worker in self.workers:
            if worker.alive:
                worker.kill()
            worker.pipe.close()


@contextlib.asynccontextmanager
async def fleet(folder: Path, transport: str, **flags: Any) -> AsyncIterator[Fleet]:
    """Workers and a router, ready; ``flags`` are those of ``baton serve``."""
    settings = {
        "model": str(folder),
        "transport": transport,
        "token_budget": CHUNK,
        "kv_blocks": 200,
        "threads": 1,
        **flags,
    }
    config = resolve(load(None, settings), this_machine(), model_facts(folder, "tiny"))
    deployed = Fleet(config, folder)
    try:
        for role, pool in config.pools():
            for _ in range(pool.replicas):
                await deployed.start(role)
        app = create_api(deployed.router, deployed.discover, ByteTokenizer())
        with RouterGate.installed() as deployed.gate, pytest.MonkeyPatch.context() as patch:
            patch.setattr(router.dispatch, "DISCOVER_EVERY_S", 0.05)  # no need to wait for it here
            async with http_server(app) as deployed.port:
                deployed.dispatcher = app.state.front.dispatcher
                await deployed.until_ready()
                await deployed.until_idle()
                yield deployed
    finally:
        deployed.close()
