"""One worker: model, KV memory, engine thread, puller thread, and the endpoint routers talk to.

Composition only; what a worker says and does is in ``roles``, ``prefill`` and ``decode``. Runs on
the caller's event loop: as a Ray Serve replica (``app``), or several in one process (``local``)::

    starting ──► ready ──drain──► draining ──► left         (a Drain frame, or its owner)
                   └──engine or puller fails or hangs──► dead
"""

import asyncio
import contextlib
import functools
import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, replace

import torch

from kvtransfer.exporter import Exporter
from kvtransfer.faults import Faults, parse_faults
from kvtransfer.importer import Event, Importer
from kvtransfer.layout import KVLayout
from kvtransfer.puller import Puller
from kvtransfer.region import Region
from kvtransfer.ticket import AgentCard
from kvtransfer.transport import Transport
from kvtransfer.transports import open_transport
from router import wire
from router.exposition import Exposition
from router.link import Link, WorkerServer, serve_worker
from router.loop_lag import LoopLag
from router.tracing import open_tracing
from router.vllm_names import worker_view
from services.budget import with_budgets
from services.ceilings import machine_ceilings
from services.decode import DecodeService
from services.engine.compiled import compile_all
from services.engine.engine import Engine
from services.engine.footprint import num_bytes
from services.engine.meter import StepMeter
from services.engine.pace import PacedRunner, parse_pace
from services.engine.runner import ModelRunner
from services.engine_loop import EngineLoop
from services.load_model import load_model
from services.machine import give_way
from services.metrics import Sources, registry_of
from services.outbox import Outbox, Peer
from services.planner.halves import as_stats
from services.planner.profiling import profile_of
from services.prefill import PrefillService
from services.roles import LAST_PULLS_S, Roles, ends_sequences
from services.settings import WorkerSettings
from services.tallies import WorkerTallies
from services.tracing import WorkerTracing
from services.watchdog import Watchdog

log = logging.getLogger(__name__)

_HEARTBEAT_S = 1.0
_ANSWER_S = 5.0  # for the engine to say that it has drained; a step may be under way
_ENDS = ("dead", "left")
_HUNG_S = 1.0  # to wait for the end of threads that do not move


class _Router:
    """A router at the other end of a link, as the roles know it."""

    def __init__(self, link: Link, router_id: str) -> None:
        self.name = router_id
        self.link = link

    def send(self, *messages: wire.Message) -> None:
        self.link.send(*messages)


class Worker:
    """Lives from :meth:`start` to :meth:`close`; one incarnation, with an epoch of its own."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.epoch = secrets.randbits(64) or 1
        self.card: wire.WorkerCard | None = None
        self.on_load: Callable[[wire.Load], None] = lambda load: None
        self._lag = LoopLag()
        self._load: wire.Load | None = None
        self._routers: dict[Link, _Router] = {}
        self._heartbeat: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._drained = asyncio.Event()  # or there is nothing that could be
        self._hung = ""
        self.profile: dict[str, float] = {}  # how long its steps take, as it reports it

    # --- life ----------------------------------------------------------------------------------

    async def start(self) -> wire.WorkerCard:
        """Load the model, open the KV transport and the endpoint; returns the card to publish.

        Raises ModelError, TransportError (also when NIXL is not usable here) and OSError.
        """
        self._asyncio = asyncio.get_running_loop()
        await asyncio.to_thread(self._build)
        settings, config = self.settings, self.engine.config
        self._server: WorkerServer = await serve_worker(
            settings.host,
            0,
            self._card,
            settings.secret,
            self._on_connect,
            self._on_message,
            self._on_close,
            self._progress,
        )
        host, port = settings.metrics_host or settings.host, settings.metrics_port
        self._exposition = await asyncio.to_thread(Exposition, self._shown, host, port)
        self.card = wire.WorkerCard(
            worker_id=settings.worker_id,
            epoch=self.epoch,
            role=settings.role,
            model=settings.served_model,
            host=settings.host,
            port=self._server.port,
            pid=os.getpid(),
            layout=asdict(self.layout),
            agents=(self._agent,),
            kv_blocks=config.kv_blocks,
            block_size=config.block_size,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            token_budget=config.token_budget,
            weights_bytes=self._weights_bytes,
            local_prefill=settings.local_prefill and settings.role == "decode",
            metrics_port=self._exposition.port,
            metrics_host=self._exposition.host,
        )
        self._loop.start()
        self._lag.start()
        self._heartbeat = asyncio.create_task(self._beat())
        return self.card

    def _build(self) -> None:
        settings, config = self.settings, self.settings.engine
        torch.set_num_threads(config.threads)
        int8 = config.weights_dtype == "int8"
        model = load_model(settings.model_dir, config.dtype, config.device, int8)
        shape = model.config
        self.layout = KVLayout(
            # Rounded weights make other keys and values: nobody else may use them.
            weights=f"{settings.weights}:int8" if int8 else settings.weights,
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            rope=shape.rope,
            block_size=config.block_size,
            dtype=config.dtype,
        )
        self.region = Region(self.layout, config.kv_blocks, config.device)
        plan = parse_faults(settings.pull_faults)
        self._faults = None if plan is None else Faults(plan, settings.worker_id)
        transport = self._open_transport()
        self._weights_bytes = num_bytes(model)
        log.info(
            "memory: %.0f MiB of weights, %.0f MiB of KV in %d blocks",
            self._weights_bytes / 2**20,
            config.kv_blocks * self.layout.span_bytes / 2**20,
            config.kv_blocks,
        )
        if config.device == "cpu":
            compile_all()  # here, where it may take half a minute, and not in the middle of serving
        runner = ModelRunner(model, self.region, self.epoch, settings.checksums)
        # Both are timed while nothing else runs here.
        costs = model.step_costs(self.region.kv.element_size())
        self._tallies = WorkerTallies(StepMeter(costs.of, machine_ceilings(config)))
        pace = parse_pace(settings.pace)
        steps = runner if pace is None else PacedRunner(runner, pace)
        settings = replace(settings, engine=with_budgets(settings, runner))
        if settings.profile:
            self.profile = as_stats(profile_of(settings, steps, self.region))
        self.engine = Engine(settings.engine, steps)
        self._build_roles(transport, shape.vocab_size)
        runner.pause = self._loop.pause

    def _build_roles(self, transport: Transport, vocab_size: int) -> None:
        """The threads, and what they say and count."""
        settings, tallies = self.settings, self._tallies
        fingerprint = self.layout.fingerprint()
        outbox = Outbox(lambda batch: self._call_soon(self._deliver, batch))
        importer = Importer(
            self.region,
            transport,
            settings.checksums,
            settings.pull_stall_s,
            self._open_transport,
            clock=time.monotonic,
        )
        self._puller = Puller(importer, self._on_events)
        exporter = Exporter(
            settings.worker_id, self.epoch, fingerprint, settings.secret, settings.lease_s
        )
        self._tracing = open_tracing(settings.tracing_endpoint, settings.role, settings.worker_id)
        record = self._tracing.record if self._tracing is not None else None
        tracing = WorkerTracing(settings.worker_id, record)
        prefill = PrefillService(self.engine, exporter, outbox, tracing, tallies)
        decode = DecodeService(
            self.engine, self._puller, outbox, fingerprint, settings.secret, tracing, tallies
        )
        self.roles = Roles(
            self.engine,
            prefill,
            decode,
            outbox,
            vocab_size,
            transport.name,
            lambda load: self._call_soon(self._report, load),
            lambda: self._call_soon(self._drained.set),
            self._transfers,
            tallies.meter,
        )
        self._load = self.roles.load()
        self._loop = EngineLoop(self.engine, self.roles, observe=tallies.on_turn)
        if settings.role == "prefill" and settings.engine.device == "cpu":
            # A reader waits for each token of a decode worker, but for all of a prompt at once.
            self._loop.submit(give_way)
        self._watchdogs = (
            Watchdog("the engine", settings.stall_s, lambda: self._loop.beats),
            Watchdog("the KV puller", settings.stall_s, lambda: self._puller.beats),
        )
        sources = Sources(
            self.engine, decode.stats, exporter, self._puller, tallies, self._lag.tally, self.load
        )
        registry = registry_of(settings, transport.name, sources)
        self._shown = worker_view(settings.metrics_compat, registry, settings.worker_id)

    def _open_transport(self, build: int = 0) -> Transport:
        """The KV transport, or another one in its place; how peers reach it goes into the card."""
        settings = self.settings
        transport = open_transport(
            # A mixed worker moves no KV: it needs no network for it.
            settings.transport if settings.role != "mixed" else "memory",
            settings.worker_id,
            self.epoch,
            settings.host,
            settings.ucx,
            build,
            self._faults,
        )
        agent = AgentCard(
            settings.worker_id,
            self.epoch,
            self.layout.fingerprint(),
            settings.engine.kv_blocks,
            transport.name,
            transport.register(self.region),
        )
        if self.card is not None:
            log.warning("%s: its KV transport was replaced", settings.worker_id)
            self.card = replace(self.card, agents=(agent,))
        self._agent = agent
        return transport

    def _transfers(self) -> tuple[int, dict[str, int]]:
        return self._puller.rebuild_count, dict(self._faults.counts) if self._faults else {}

    async def drain(self, deadline_s: float) -> bool:
        """Take no new work, wait for what is here, hand back at the deadline what is left of it.

        True when nothing is left, False when the engine does not answer. Ends at most seven seconds
        after the deadline. Of several drains the earliest deadline holds.
        """
        deadline = time.monotonic() + deadline_s
        self._loop.submit(functools.partial(self.roles.drain, deadline))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s + LAST_PULLS_S + _ANSWER_S):
                await self._drained.wait()
        return self.roles.drained

    def leave(self, deadline_s: float) -> None:
        """Drain and close; the state is "left" from then on."""
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._leave(deadline_s))
        else:
            deadline = time.monotonic() + deadline_s
            self._loop.submit(functools.partial(self.roles.drain, deadline))

    async def _leave(self, deadline_s: float) -> None:
        log.info("%s drains for %.0f s at most", self.settings.worker_id, deadline_s)
        await self.drain(deadline_s)
        await self.close()

    async def close(self) -> None:
        """End the endpoint, the threads and the transport. What is still open fails."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._lag.stop()
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        if self.card is None:
            return
        timeout_s = {"timeout_s": _HUNG_S} if self.failure else {}
        self._report(replace(self.load(), state="left"))
        await self._server.close()
        await asyncio.to_thread(self._loop.stop, **timeout_s)
        await asyncio.to_thread(self._puller.close, **timeout_s)
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
        await asyncio.to_thread(self._exposition.close)

    @property
    def failure(self) -> str:
        """Why this worker is of no use any more, or ""."""
        ended = "" if self._loop.alive or self._closing else "the engine has ended"
        return self._loop.failure or self._puller.failure or self._hung or ended

    @property
    def alive(self) -> bool:
        """Whether engine and puller still work."""
        return not self.failure and self._closing is None

    def load(self) -> wire.Load:
        """The latest report, at most a second old."""
        assert self._load is not None
        return self._load

    # --- endpoint, on the event loop -----------------------------------------------------------

    def _card(self) -> wire.WorkerCard:
        assert self.card is not None
        return self.card

    def _progress(self) -> tuple[int, bool]:
        # Without room the engine waits for a lease or a pull to end: that is not a hang.
        return self.engine.scheduler.stats.steps, self.engine.has_work and not self.engine.stalled

    def _on_connect(self, link: Link, hello: wire.Hello, tickets: tuple[bytes, ...]) -> None:
        router = self._routers[link] = _Router(link, hello.router_id)
        link.send(self.load())
        self._loop.submit(functools.partial(self.roles.connected, router, tickets))

    def _on_message(self, link: Link, message: wire.Message) -> None:
        if isinstance(message, wire.Drain):
            self.leave(message.deadline_ms / 1000)
            return
        router = self._routers[link]
        self._loop.submit(
            lambda: self.roles.handle(router, message, time.monotonic()),
            within_step=not ends_sequences(message),
        )

    def _on_close(self, link: Link) -> None:
        router = self._routers.pop(link)
        self._loop.submit(functools.partial(self.roles.disconnected, router))

    def _deliver(self, batch: list[tuple[Peer, list[wire.Message]]]) -> None:
        for peer, messages in batch:
            peer.send(*messages)

    def _report(self, load: wire.Load) -> None:
        if self.load().state in _ENDS and load.state not in _ENDS:
            return  # the engine's last words
        self._load = load
        self.on_load(load)
        for link in self._routers:
            link.send(load)
            if load.state == "dead":  # what came in too late to be answered must not wait for ever
                link.close("the engine failed")
        if load.state == "dead":
            self._drained.set()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            self._watch()
            self._report(replace(self.load(), state="dead") if self.failure else self.load())

    def _watch(self) -> None:
        """Notice threads that hang."""
        for watchdog in self._watchdogs:
            reason = watchdog.look(time.monotonic())
            if reason and not self.failure:
                log.error("%s: %s", self.settings.worker_id, reason)
                self._hung = reason

    # --- from the other threads ----------------------------------------------------------------

    def _on_events(self, events: list[Event]) -> None:
        self._loop.submit(lambda: self.roles.on_events(events, time.monotonic()), within_step=True)

    def _call_soon(self, function: Callable[..., None], *args: object) -> None:
        try:
            self._asyncio.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the event loop has ended: nobody is left to tell
            log.debug("dropped after the event loop's end: %s", args)
