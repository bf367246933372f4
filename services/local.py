"""The whole graph in one process: router, prefill and decode workers, memory transport, no Ray.

For ``baton local``, for tests, and for following a request in a debugger: the same router, the same
workers, the same wire over loopback TCP. Only placement, restarts and processes of their own are
missing.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from kvtransfer.layout import KVLayout
from router.config import RouterSettings
from router.scraping import Target, worker_targets
from router.wire import WorkerCard
from services.config import AppConfig
from services.fetch import fetch, pinned
from services.machine import model_facts, read_secret, this_machine
from services.model_cache import print_now
from services.resolve import resolve
from services.serve import DRAIN_S, check_port, mib, url
from services.settings import router_settings, worker_settings
from services.warm_kernels import warm_kernels
from services.worker import Worker


@dataclass(frozen=True)
class LocalGraph:
    """Running workers, and what a router needs to find them."""

    config: AppConfig  # resolved
    workers: list[Worker]
    settings: RouterSettings
    fronts: list[Any] = field(default_factory=list)  # of the applications that were made

    async def discover(self) -> list[WorkerCard]:
        """What the registry answers elsewhere."""
        here = [worker for worker in self.workers if worker.load().state != "left"]
        return [worker.card for worker in here if worker.card is not None]

    async def targets(self) -> list[Target]:
        """Every metrics port: one for each worker and each router, all in this process."""
        routers = [front.target for front in self.fronts if front.target is not None]
        return worker_targets(await self.discover()) + routers

    def api(self) -> Any:
        """A new ASGI application over these workers; its lifespan starts and stops the router."""
        from router.api import create_api

        api = create_api(self.settings, self.discover, targets=self.targets)
        self.fronts.append(api.state.front)
        return api


@asynccontextmanager
async def local_graph(config: AppConfig) -> AsyncIterator[LocalGraph]:
    """Start all workers of ``config`` here, and stop them at the end.

    Raises ConfigError, FetchError, and whatever the start of a worker raises.
    """
    model = await asyncio.to_thread(pinned, config.model)
    folder = await asyncio.to_thread(fetch, model)
    await asyncio.to_thread(warm_kernels, print_now)
    config = resolve(config, this_machine(one_process=True), model_facts(folder, model))
    secret = read_secret(config)
    workers: list[Worker] = []
    try:
        for role, pool in config.pools():
            for _ in range(pool.replicas):
                settings = worker_settings(role, config, folder, "127.0.0.1", secret)
                workers.append(Worker(settings))
                await workers[-1].start()
        yield LocalGraph(config, workers, router_settings(config, folder, secret))
    finally:
        for worker in workers:
            await worker.close()


def run_local(config: AppConfig) -> int:
    """``baton local``: serve until Ctrl-C; the exit status."""
    check_port(config.host, config.port)  # now, and not when the model is there
    return asyncio.run(_serve(config))


async def _serve(config: AppConfig) -> int:
    async with local_graph(config) as graph:
        for card in await graph.discover():
            pool_bytes = card.kv_blocks * KVLayout(**card.layout).span_bytes
            print(
                f"  {card.worker_id:<18} {card.host}:{card.port}  weights"
                f" {mib(card.weights_bytes)} (shared), KV pool {card.kv_blocks} blocks,"
                f" {mib(pool_bytes)}, step {card.token_budget} tokens"
            )
        api = graph.api()
        server = _server(api, config)
        ending = asyncio.create_task(_end_streams(server, api))
        await server.serve()
        ending.cancel()
    return 0


def _server(api: Any, config: AppConfig) -> Any:
    """A uvicorn server that says where it listens, once it does."""
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)  # returns when it listens; what fails ends the process
            print(f"  {url(config)}/console")
            print(f"  {url(config)}/v1  (Ctrl-C stops)", flush=True)

    return Server(uvicorn.Config(api, config.host, config.port, log_level="warning"))


async def _end_streams(server: Any, api: Any) -> None:
    """After Ctrl-C uvicorn waits for the streams: those that take too long end by an error."""
    while not server.should_exit:
        await asyncio.sleep(0.1)
    print(f"baton: stopping; requests have {DRAIN_S:g} s", flush=True)
    api.state.front.console.close()
    await asyncio.sleep(DRAIN_S)
    await api.state.front.dispatcher.close()
