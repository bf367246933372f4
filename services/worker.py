"""One worker: model, KV memory, engine thread, puller thread, and the endpoint routers talk to.

Composition only; what a worker says and does is in ``roles``, ``prefill`` and ``decode``. Runs on
the caller's event loop: as a Ray Serve replica (``app``), or several in one process (``local``).
"""

import asyncio
import functools
import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch

from kvtransfer.exporter import Exporter
from kvtransfer.importer import Event, Importer
from kvtransfer.layout import KVLayout
from kvtransfer.puller import Puller
from kvtransfer.region import Region
from kvtransfer.ticket import AgentCard
from kvtransfer.transports import open_transport
from router import wire
from router.link import Link, WorkerServer, serve_worker
from services.decode import DecodeService
from services.engine.engine import Engine
from services.engine.model import Model, read_config
from services.engine.runner import ModelRunner
from services.engine.weights import read_weights
from services.engine_loop import EngineLoop
from services.outbox import Outbox, Peer
from services.prefill import PrefillService
from services.roles import Roles
from services.settings import WorkerSettings

log = logging.getLogger(__name__)

_HEARTBEAT_S = 1.0
_DRAIN_POLL_S = 0.05


class _Router:
    """A router at the other end of a link, as the roles know it."""

    def __init__(self, link: Link, router_id: str) -> None:
        self.name = router_id
        self.link = link

    def send(self, *messages: wire.Message) -> None:
        self.link.send(*messages)


@functools.lru_cache(maxsize=1)
def load_model(folder: str, dtype: str, device: str) -> Model:
    """The model of a folder; workers of one process share it."""
    path = Path(folder)
    kind = getattr(torch, dtype)
    return Model(read_config(path), read_weights(path), kind, torch.device(device))


class Worker:
    """Lives from :meth:`start` to :meth:`close`; one incarnation, with an epoch of its own."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.epoch = secrets.randbits(64) or 1
        self.card: wire.WorkerCard | None = None
        self.on_load: Callable[[wire.Load], None] = lambda load: None
        self._load: wire.Load | None = None
        self._routers: dict[Link, _Router] = {}
        self._heartbeat: asyncio.Task[None] | None = None

    # --- life ----------------------------------------------------------------------------------

    async def start(self) -> wire.WorkerCard:
        """Load the model, open the KV transport and the endpoint; returns the card to publish.

        Raises ModelError, TransportError (also when NIXL is not usable here) and OSError.
        """
        self._asyncio = asyncio.get_running_loop()
        agent = await asyncio.to_thread(self._build)
        settings, config = self.settings, self.settings.engine
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
        self.card = wire.WorkerCard(
            worker_id=settings.worker_id,
            epoch=self.epoch,
            role=settings.role,
            model=settings.served_model,
            host=settings.host,
            port=self._server.port,
            pid=os.getpid(),
            layout=asdict(self.layout),
            agents=(agent,),
            kv_blocks=config.kv_blocks,
            block_size=config.block_size,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            token_budget=config.token_budget,
        )
        self._loop.start()
        self._heartbeat = asyncio.create_task(self._beat())
        return self.card

    def _build(self) -> AgentCard:
        settings, config = self.settings, self.settings.engine
        torch.set_num_threads(config.threads)
        model = load_model(settings.model_dir, config.dtype, config.device)
        shape = model.config
        self.layout = KVLayout(
            weights=settings.weights,
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            rope=shape.rope,
            block_size=config.block_size,
            dtype=config.dtype,
        )
        fingerprint = self.layout.fingerprint()
        self.region = Region(self.layout, config.kv_blocks, config.device)
        transport = open_transport(
            settings.transport,
            settings.worker_id,
            self.epoch,
            settings.host,
            settings.net_devices,
        )
        metadata = transport.register(self.region)
        runner = ModelRunner(model, self.region, self.epoch, settings.checksums)
        self.engine = Engine(config, runner)
        outbox = Outbox(lambda batch: self._call_soon(self._deliver, batch))
        importer = Importer(self.region, transport, settings.checksums)
        self._puller = Puller(importer, self._on_events)
        exporter = Exporter(
            settings.worker_id, self.epoch, fingerprint, settings.secret, settings.lease_s
        )
        self.roles = Roles(
            self.engine,
            PrefillService(self.engine, exporter, outbox),
            DecodeService(self.engine, self._puller, outbox, fingerprint, settings.secret),
            outbox,
            shape.vocab_size,
            transport.name,
            lambda load: self._call_soon(self._report, load),
        )
        self._load = self.roles.load()
        self._loop = EngineLoop(self.engine, self.roles)
        return AgentCard(
            settings.worker_id,
            self.epoch,
            fingerprint,
            config.kv_blocks,
            transport.name,
            metadata,
        )

    async def drain(self, deadline_s: float) -> bool:
        """Take no new work and wait for what is here; whether all of it ended in time."""
        self._loop.submit(self.roles.drain)
        end = time.monotonic() + deadline_s
        while self.roles.state != "draining" or self.roles.num_open:
            if time.monotonic() >= end or not self.alive:
                return False
            await asyncio.sleep(_DRAIN_POLL_S)
        return True

    async def close(self) -> None:
        """End the endpoint, the threads and the transport. What is still open fails."""
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        if self.card is not None:
            await self._server.close()
            await asyncio.to_thread(self._loop.stop)
            await asyncio.to_thread(self._puller.close)

    @property
    def alive(self) -> bool:
        """Whether engine and puller still work."""
        return self._loop.alive and not self._puller.failure

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
        router = self._routers[link]
        self._loop.submit(lambda: self.roles.handle(router, message, time.monotonic()))

    def _on_close(self, link: Link) -> None:
        router = self._routers.pop(link)
        self._loop.submit(functools.partial(self.roles.disconnected, router))

    def _deliver(self, batch: list[tuple[Peer, list[wire.Message]]]) -> None:
        for peer, messages in batch:
            peer.send(*messages)

    def _report(self, load: wire.Load) -> None:
        self._load = load
        self.on_load(load)
        for link in self._routers:
            link.send(load)
            if load.state == "dead":  # what came in too late to be answered must not wait for ever
                link.close("the engine failed")

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            load = self.load()
            self._report(load if self.alive else replace(load, state="dead"))

    # --- from the other threads ----------------------------------------------------------------

    def _on_events(self, events: list[Event]) -> None:
        self._loop.submit(lambda: self.roles.on_events(events, time.monotonic()))

    def _call_soon(self, function: Callable[..., None], *args: object) -> None:
        try:
            self._asyncio.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the event loop has ended: nobody is left to tell
            log.debug("dropped after the event loop's end: %s", args)
