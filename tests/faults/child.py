"""A worker in a process of its own, with gates in it that the test works by a pipe.

What is sent over the pipe is the name of one of :class:`Control`'s methods and its arguments; the
answer is what it returned.
"""

import asyncio
import functools
import logging
import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import services.worker
from router.link import serve_worker
from services.settings import WorkerSettings
from services.worker import Worker
from tests.faults.gates import EngineGate, TransportGate
from tests.faults.leftovers import worker_leftovers


class Control:
    """The gates of this process's worker, by conditions that can be pickled."""

    def __init__(self, worker: Worker, transport: TransportGate) -> None:
        self.worker = worker
        self.engine = EngineGate(worker)
        self.transport = transport

    def pause(self, num_tokens: int = 0) -> None:
        """Make no step once a sequence has so many tokens."""
        scheduler = self.worker.engine.scheduler
        self.engine.pause_when(
            lambda engine: (
                not num_tokens or any(seq.num_tokens >= num_tokens for seq in scheduler.running)
            )
        )

    def hold(self, computed: int) -> None:
        """Stop inside a step of a sequence of which so many tokens are computed."""
        self.engine.hold_when(lambda plan: any(row.start >= computed for row in plan.rows))

    def block(self) -> None:
        """Stop the engine's thread before its next command."""
        self.engine.block()

    def hold_posts(self) -> None:
        """Post no read."""
        self.transport.hold_posts()

    def hold_completions(self, after: int = 0) -> None:
        """Tell of no read that ended, but of the first ``after``."""
        self.transport.hold_completions(after)

    def open(self) -> None:
        """Open all gates."""
        self.transport.open()
        self.engine.open()

    def reached(self) -> bool:
        """Whether the engine's gate holds it."""
        return self.engine.reached.is_set()

    def posting(self) -> bool:
        """Whether a read is held before its post."""
        return self.transport.posting.is_set()

    def num_posted(self) -> int:
        """Reads posted since the transport's gate was closed."""
        return self.transport.num_posted

    def computed(self) -> int:
        """Prompt tokens computed so far."""
        return self.worker.engine.scheduler.stats.computed_prompt_tokens

    def failed_pulls(self) -> int:
        """Pulls that have failed."""
        return self.worker.roles.load().failed_pulls

    def counters(self) -> int:
        """Work done: tokens computed and generated."""
        stats = self.worker.engine.scheduler.stats
        return stats.computed_prompt_tokens + stats.cached_prompt_tokens + stats.generated_tokens

    def leftovers(self) -> list[str]:
        """What is not idle."""
        return worker_leftovers(self.worker)

    async def check_integrity(self) -> None:
        """Assert that the engine's books agree."""
        await self.engine.check_integrity()


def main(settings: WorkerSettings, port: int, pipe: Connection) -> None:
    """The process: send the worker's card, then serve and obey until the pipe ends."""
    logging.basicConfig(level=logging.ERROR)
    # Numba makes a lock between processes. By this method, as in workers of Ray, its name is gone
    # at once; by that of our parent a worker that is killed would leave it.
    multiprocessing.set_start_method("fork", force=True)
    asyncio.run(_serve(settings, port, pipe))


async def _serve(settings: WorkerSettings, port: int, pipe: Connection) -> None:
    if port:  # the one of a worker that has died

        async def at_port(host: str, _: int, *rest: Any) -> Any:
            return await serve_worker(host, port, *rest)

        services.worker.serve_worker = functools.wraps(serve_worker)(at_port)
    with TransportGate.installed() as opened:
        worker = Worker(settings)
        pipe.send(await worker.start())
        control = Control(worker, opened[0])
        try:
            while True:
                name, args = await asyncio.to_thread(pipe.recv)
                answer = getattr(control, name)(*args)
                pipe.send(await answer if asyncio.iscoroutine(answer) else answer)
        except EOFError:
            control.open()
        finally:
            await worker.close()
