"""Composition root for Ray Serve: which deployments there are, and what each replica starts.

::

    Router (ingress, FastAPI behind HAProxy)    PrefillWorker    DecodeWorker    MixedWorker
                          └───────────── Registry (named actor) ─────────────┘

Replicas find each other through the registry and talk directly over TCP; no request and no token
passes through a Serve handle. Serve places, restarts, checks and scales them. ``build_app`` is the
``import_path`` of a Serve config; :mod:`services.own_ray` uses ``build`` on a private, local Ray.
Ray is imported in these two, in :mod:`services.registry` and in :mod:`services.leave` only; torch
in worker replicas only, so that the router stays small.
"""

import asyncio
import contextlib
import gc
import logging
import secrets
import warnings
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.schema import LoggingConfig

from router import wire
from router.pools import SCALED, Pools, scaling_stats
from services.config import AppConfig, from_yaml, settled
from services.fetch import fetch, pinned
from services.machine import calm_openmp, model_facts, read_secret, this_machine
from services.planner.reports import worker_stats
from services.registry import HEARTBEAT_S, RegistryClient
from services.resolve import resolve_shared, resolve_worker
from services.settings import router_settings, worker_settings

APP_NAME = "baton"
CLOSE_S = 10.0  # a worker hands back what is left after ``drain_s``; so much later Serve kills it
PROVE_S = 10.0  # a replica that joins others waits so long until it has proven itself
POLL_S = 0.05
# A replica is unhealthy after three failed checks: 24 s when it does not answer at all.
HEALTH_PERIOD_S = 2.0
HEALTH_TIMEOUT_S = 8.0
DEPLOYMENTS = {"prefill": "PrefillWorker", "decode": "DecodeWorker", "mixed": "MixedWorker"}
# Serve's default of 2 s between looks at whether a replica has drained makes every stop that long.
SHUTDOWN_LOOP_S = 0.1
POLICY = "services.planner.policy:Autoscaler"  # who decides on the size of pools
REPORT_S = 1.0  # between two reports of a replica to Serve's controller
LOOK_BACK_S = 10.0  # Serve keeps them so long; only the latest counts
LAST_WORDS_S = 2.0  # for streams that were ended, to reach their clients, and for Serve to notice

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AppSpec:
    """What every replica is told."""

    config: AppConfig  # resolved; on a cluster what all agree on, and each worker does the rest
    secret: bytes = field(repr=False)
    one_host: bool

    @property
    def registry(self) -> str:
        """Name of the registry's actor: of those who share a secret, and of nobody else."""
        return f"registry-{sha256(b'registry' + self.secret).hexdigest()[:16]}"


class Router:
    """A router replica: the HTTP API, built where it runs."""

    def __init__(self, spec: AppSpec, workers: list[Any]) -> None:
        # ``workers`` are Serve handles; they make the pools part of the application, no more.
        _log_to_stderr()
        folder = fetch(spec.config.model, report=log.info, weights=False)
        host = "127.0.0.1" if spec.one_host else _node_ip()
        self._settings = router_settings(spec.config, folder, spec.secret, host, spec.one_host)
        self._registry = RegistryClient(spec.registry)
        self._scales = spec.config.autoscaling.scales
        self._stop: asyncio.Task[None] | None = None
        self._api: Any = None

    def __serve_build_asgi_app__(self) -> Any:
        """Called by Serve on the replica, after the constructor."""
        from router.api import create_api

        _answer_with_one_request_id()
        targets = self._registry.targets
        self._api = create_api(self._settings, self._discover, targets=targets)
        start_and_stop = self._api.router.lifespan_context

        @contextlib.asynccontextmanager
        async def lifespan(api: Any) -> AsyncIterator[Any]:
            async with start_and_stop(api) as state:
                await self._prove_a_pair()
                yield state
            await self._registry.leave(self._settings.router_id)

        self._api.router.lifespan_context = lifespan
        return self._api

    def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Called by Serve at the start, and when only this has changed: ``workers`` by role, and
        how many ``routers``.

        A Serve config that scales by ``num_replicas`` says here what routers shall expect.
        """
        workers = tuple((role, int(num)) for role, num in user_config["workers"].items())
        routers = int(user_config.get("routers", self._settings.routers))
        self._settings = replace(self._settings, replicas=workers, routers=routers)
        if self._api is not None:
            dispatcher = self._api.state.front.dispatcher
            dispatcher.wanted, dispatcher.wanted_routers = workers, routers

    async def _prove_a_pair(self) -> None:
        """A router that joins running workers takes requests when it could pass them on."""
        dispatcher = self._api.state.front.dispatcher
        if not await self._registry.reports():
            return  # the workers are starting as well
        await _until(lambda: dispatcher.ready, PROVE_S)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve for who scales the pools."""
        if self._api is None:  # not built yet
            return {}
        front = self._api.state.front
        failed = {failure.role: failure.in_a_row for failure in self._registry.pools.failures}
        # Each name each time: Serve keeps the last value of one that is not said any more.
        failures = {f"{role}_failures": float(failed.get(role, 0)) for role in SCALED}
        return scaling_stats(front.dispatcher, front.ledger) | failures

    async def _discover(self) -> list[wire.WorkerCard]:
        cards = await self._registry.discover(router=self._api.state.front.target)
        pools = self._registry.pools
        if not self._scales:  # what an earlier configuration wanted is nothing to us
            pools = Pools(failures=pools.failures, start_failures=pools.start_failures)
        self._api.state.front.dispatcher.pools = pools
        if self._registry.stops_in_s is not None and self._stop is None:
            self._stop = asyncio.create_task(self._end(self._registry.stops_in_s))
        return cards

    async def _end(self, in_s: float) -> None:
        """End what still runs by an error, while the way to the clients is still there."""
        self._api.state.front.console.close()
        await asyncio.sleep(in_s)
        await self._api.state.front.dispatcher.close()


class WorkerReplica:
    """A worker of any role in a Serve replica: starts it, reports it, drains it."""

    async def __init__(self, role: str, spec: AppSpec) -> None:  # type: ignore[misc]  # Serve awaits it
        _log_to_stderr()
        calm_openmp()
        self._registry = RegistryClient(spec.registry)
        self._unwanted = False
        async with _announced(self._registry, role, lambda: self._unwanted):
            await self._start(role, spec)
        others = [card.role for card, _ in await self._registry.reports()]
        self._heart = asyncio.create_task(self._beat(), name="heartbeat")
        if role in others:  # one of these may be waiting for us, to go
            await _until(lambda: self._worker.load().steps > 0, PROVE_S)

    async def _start(self, role: str, spec: AppSpec) -> None:
        from services.worker import Worker

        config = spec.config
        folder = await asyncio.to_thread(fetch, config.model, report=log.info)
        host = "127.0.0.1" if spec.one_host else _node_ip()
        if not spec.one_host:
            facts = model_facts(folder, config.model)
            config = resolve_worker(role, config, replace(this_machine(), one_host=False), facts)
        self._drain_s = getattr(config, role).drain_s
        settings = worker_settings(role, config, folder, host, spec.secret, spec.one_host)
        self._worker = Worker(settings)
        self._state, self._news = "", asyncio.Event()
        self._worker.on_load = self._on_load
        await self._worker.start()
        gc.collect()
        gc.freeze()  # what is here stays: a full collection would look through it between steps

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve for who scales the pools."""
        card = self._worker.card
        assert card is not None  # Serve asks who has started
        return worker_stats(card, self._worker.load(), self._worker.profile)

    def _on_load(self, load: wire.Load) -> None:
        if load.state != self._state:
            self._state = load.state
            self._news.set()

    async def _beat(self) -> None:
        """Report each second and on each change of state, and leave with the worker."""
        card = self._worker.card
        assert card is not None
        while self._state != "left":
            self._news.clear()
            await self._registry.heartbeat(self._worker.card or card, self._worker.load())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), HEARTBEAT_S)
        await self._registry.leave(card.worker_id)

    async def check_health(self) -> None:
        """Called by Serve; an exception means that the replica must be replaced."""
        if self._worker.failure:
            raise RuntimeError(f"{self._worker.settings.worker_id}: {self._worker.failure}")
        if self._heart.done():
            self._heart.result()
            raise RuntimeError(f"{self._worker.settings.worker_id} was drained and has left")

    async def __del__(self) -> None:
        """Called by Serve before it ends the replica: scale-down, rollout, shutdown. Also when it
        has not started, or could not: then there is nobody to wait for.
        """
        if not hasattr(self, "_heart"):
            self._unwanted = True
            return
        await self._worker.drain(self._drain_s)
        await self._worker.close()
        await self._heart


@contextlib.asynccontextmanager
async def _announced(
    registry: RegistryClient, role: str, unwanted: Callable[[], bool]
) -> AsyncIterator[None]:
    """Let the registry know that a worker starts, that it has, or why it could not. One that is
    ``unwanted`` meanwhile has its constructor disturbed by Serve, which is no failure.
    """
    name = f"{role}-start-{secrets.token_hex(4)}"

    async def live() -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await registry.starting(name, role)

    # Before anything else: imports take seconds in which nothing can be said.
    await registry.starting(name, role)
    alive = asyncio.create_task(live())
    try:
        yield
    except Exception as error:
        alive.cancel()  # else it might say once more that it starts
        if unwanted():
            await registry.leave(name)
            raise
        log.exception("a %s worker could not start", role)
        await registry.failed(name, role, f"{type(error).__name__}: {error}")
        raise
    finally:
        alive.cancel()
    await registry.started(name, role)


async def _until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Wait for something that tells nobody when it happens, but not for ever."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(POLL_S)


def _log_to_stderr() -> None:
    """What this process says of itself goes to Ray's log file for it."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for package in ("kvtransfer", "router", "services"):
        logging.getLogger(package).setLevel(logging.INFO)


def _answer_with_one_request_id() -> None:
    """Serve appends an ``x-request-id`` to every response of a replica's HTTP server, whether there
    is one or not: clients would read "ours, theirs", which names no request. The server starts
    after this, and there is no other way to this class of Serve's.
    """
    from ray.serve._private import http_util

    from router.responses import one_request_id

    serves: Any = http_util
    theirs: Any = serves.RequestIdMiddleware

    class OneRequestId(theirs):  # type: ignore[misc]
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await super().__call__(scope, receive, one_request_id(send))

    serves.RequestIdMiddleware = OneRequestId


def _node_ip() -> str:
    get: Any = ray.util.get_node_ip_address
    return str(get())


# --- building ----------------------------------------------------------------------------------


def build_app(args: Mapping[str, Any]) -> serve.Application:
    """The application of a Serve config; ``args`` has the keys of ``baton serve --config``."""
    config = settled(from_yaml(args))
    # Other nodes fetch the same commit by themselves; here its shape is enough.
    config = replace(config, model=pinned(config.model, report=log.info))
    facts = model_facts(fetch(config.model, report=log.info, weights=False), config.model)
    machine = replace(this_machine(), one_host=False)
    return build(AppSpec(resolve_shared(config, machine, facts), read_secret(config), False))


def build(spec: AppSpec) -> serve.Application:
    """The Serve application; roles without workers are left out."""
    common = {
        # Actors claim no CPU: threads are shared out by ``resolve``, and all must fit two cores.
        # On a cluster, the Serve config sets ``ray_actor_options`` for each deployment.
        "ray_actor_options": {"num_cpus": 0},
        "graceful_shutdown_wait_loop_s": SHUTDOWN_LOOP_S,
        # In a rollout one more, so that the last of its kind is replaced before it goes.
        "max_surge_percent": 1,
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "logging_config": LoggingConfig(enable_access_log=False),
    }
    worker: Any = serve.deployment(WorkerReplica)
    router: Any = serve.deployment(serve.ingress()(Router))
    workers = [
        worker.options(
            name=DEPLOYMENTS[role],
            graceful_shutdown_timeout_s=pool.drain_s + CLOSE_S,
            **_size(spec, role),
            **common,
        ).bind(role, spec)
        for role, pool in spec.config.pools()
    ]
    # The router has limits of its own, which answer 429; Serve's would answer 503.
    app: serve.Application = router.options(
        name="Router",
        **_size(spec, "router"),
        max_ongoing_requests=100_000,
        # It goes with its last request, and each of these has a deadline.
        graceful_shutdown_timeout_s=spec.config.router.request_timeout_s + CLOSE_S,
        **common,
    ).bind(spec, workers)
    return app


def _size(spec: AppSpec, role: str) -> dict[str, Any]:
    """How many replicas: a number, or who decides. When any pool scales, all report to the one who
    does, by the way that Serve has for that: so he has one for each, and some have no choice.
    """
    scaling, routers = spec.config.autoscaling, spec.config.routers
    num = routers if role == "router" else getattr(spec.config, role).replicas
    if not scaling.scales or role == "mixed":
        return {"num_replicas": num}
    pool = getattr(scaling, role, None)
    low, high = (pool.min, pool.max) if pool is not None and pool.scales else (num, num)
    told = {"role": role, "config": asdict(scaling), "registry": spec.registry}
    policy: Any = AutoscalingPolicy  # its constructor has no types
    with warnings.catch_warnings():
        # Said to be replaced by an environment variable, which this version does not read.
        warnings.simplefilter("ignore", DeprecationWarning)
        decides = AutoscalingConfig(
            min_replicas=low,
            # Serve would go back to it at each deploy, also to where it is now.
            initial_replicas=num if num > low else None,
            max_replicas=high,
            metrics_interval_s=REPORT_S,
            look_back_period_s=LOOK_BACK_S,
            upscale_delay_s=0,
            downscale_delay_s=0,
            downscale_to_zero_delay_s=0,
            policy=policy(policy_function=POLICY, policy_kwargs=told),
        )
    return {"autoscaling_config": decides}
