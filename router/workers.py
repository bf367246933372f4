"""All workers: which there are, which may be paired, and a connection to each (asyncio).

A worker is dropped when its connection is dead or it says that it drains, never because discovery
came up empty. What the messages of a request mean is known to ``router.dispatch``, which opens a
:class:`~router.worker.Call` per worker and attempt.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

from kvtransfer.errors import LayoutMismatch
from kvtransfer.faults import Faults, parse_faults
from router import wire
from router.config import RouterSettings
from router.errors import LinkError
from router.ledger import Routing
from router.link import Link, connect_worker
from router.policy import Key, Pair, View
from router.worker import Worker, common_agent

BACKOFF_S = (0.1, 5.0)  # between connection attempts: first, longest
FORGET_DEAD_AFTER_S = 60.0  # and its card is gone
GONE_AFTER_S = 1.0  # without card and connection; its peers are told

log = logging.getLogger(__name__)


class WorkerTable:
    """All workers, each with a task that keeps it connected.

    ``on_change`` is called when a worker came, went or changed its state or load.
    """

    def __init__(
        self,
        settings: RouterSettings,
        router_epoch: int,
        on_change: Callable[[], None],
        routing: Routing | None = None,
    ) -> None:
        self.workers: dict[Key, Worker] = {}
        self.incompatible: dict[tuple[Key, Key], str] = {}  # (prefill, decode) → why
        self.registered: Counter[str] = Counter()  # cards by role, as discovery says
        self._routing = routing or Routing()
        self._settings = settings
        self._epoch = router_epoch
        self._on_change = on_change
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._rejected: set[Key] = set()  # cards that are of no use, to say so once
        plan = parse_faults(settings.config.link_faults)
        self.faults = Faults(plan, settings.router_id) if plan is not None else None

    def update(self, cards: Iterable[wire.WorkerCard]) -> None:
        """What discovery says now. Cards that are missing end nothing that is connected."""
        found = {(card.worker_id, card.epoch): card for card in cards}
        self.registered = Counter(card.role for card in found.values())
        for key, card in found.items():
            if key not in self.workers and key not in self._rejected:
                self._add(card)
        self._rejected &= found.keys()
        now = asyncio.get_running_loop().time()
        for key, worker in list(self.workers.items()):
            lately = worker.lost_at is not None and now - worker.lost_at < FORGET_DEAD_AFTER_S
            if key not in found and not worker.connected and not lately:
                self._drop(key)
        self._say_goodbye(found.keys(), now)

    def view(self, proven: Iterable[Pair]) -> View:
        """A frozen picture for the policy."""
        config = self._settings.config
        return View(
            workers={key: worker.view() for key, worker in self.workers.items()},
            proven=frozenset(proven),
            policy=config.policy,
            prefill_ahead=config.prefill_ahead,
        )

    def possible_pairs(self) -> list[Pair]:
        """Pairs of usable workers whose KV can be exchanged, and those that can do without one."""
        usable = [worker for worker in self.workers.values() if worker.usable]
        alone = [
            Pair(None, worker.key)
            for worker in usable
            if worker.card.role == "mixed"
            or (worker.card.role == "decode" and worker.card.local_prefill)
        ]
        return alone + [
            Pair(p.key, d.key)
            for p in usable
            for d in usable
            if (p.card.role, d.card.role) == ("prefill", "decode")
            and (p.key, d.key) not in self.incompatible
        ]

    def state(self) -> list[dict[str, Any]]:
        """One entry per worker, for ``GET /internal/state``."""
        return [worker.report() for worker in self.workers.values()]

    def conditions(self) -> Counter[tuple[str, str]]:
        """How many workers there are by role and state. Any thread may ask."""
        workers = list(self.workers.copy().values())
        return Counter((worker.card.role, worker.condition) for worker in workers)

    def tick(self) -> None:
        """To be called a few times a second: renew leases, notice engines that hang."""
        now = asyncio.get_running_loop().time()
        changed = [worker for worker in self.workers.values() if worker.tick(now)]
        for worker in changed:
            if worker.stalled:
                self._routing.losses[worker.card.role, "stalled"] += 1
        if changed:
            self._on_change()

    async def close(self) -> None:
        """Close all connections."""
        tasks = list(self._tasks.values())
        links = [worker.link for worker in self.workers.values() if worker.link is not None]
        for key in list(self.workers):
            self._drop(key)
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(link.wait_closed() for link in links))

    # --- inside ----------------------------------------------------------------------------------

    def _say_goodbye(self, found: Collection[Key], now: float) -> None:
        """Tell decode workers of the prefill workers that are gone, so that they let go of them.

        Gone is who is neither registered nor connected, for a moment: it may be reconnecting.
        """
        for worker in self.workers.values():
            for key in list(worker.introduced) if worker.connected else ():
                peer = self.workers.get(key)
                here = peer is not None and (
                    peer.connected or (peer.lost_at or 0) > now - GONE_AFTER_S
                )
                if key not in found and not here:
                    worker.send(wire.Forget(*key))
                    worker.introduced.discard(key)
                    worker.peers.discard(key)

    def _add(self, card: wire.WorkerCard) -> None:
        key = (card.worker_id, card.epoch)
        problem = ""
        if card.model != self._settings.served_model:
            problem = f"it serves {card.model!r}, this router {self._settings.served_model!r}"
        try:
            worker = Worker(card)
        except TypeError as error:
            problem = f"its KV layout is not understood: {error}"
        if problem:
            self._rejected.add(key)
            log.error("worker %s is not used: %s", card.worker_id, problem)
            return
        for other in self.workers.values():
            self._check_pair(worker, other)
            self._check_pair(other, worker)
        self.workers[key] = worker
        self._tasks[key] = asyncio.create_task(self._keep_connected(worker))

    def _check_pair(self, prefill: Worker, decode: Worker) -> None:
        if (prefill.card.role, decode.card.role) != ("prefill", "decode"):
            return
        reason = ""
        try:
            prefill.layout.check_compatible(decode.layout)
        except LayoutMismatch as mismatch:
            reason = str(mismatch)
        if not reason and common_agent(prefill, decode) is None:
            names = [sorted(a.transport for a in w.card.agents) for w in (prefill, decode)]
            reason = f"no transport in common: {names[0]} against {names[1]}"
        if reason:
            self.incompatible[prefill.key, decode.key] = reason
            log.error(
                "%s and %s are never paired: %s",
                prefill.card.worker_id,
                decode.card.worker_id,
                reason,
            )

    def _count_loss(self, worker: Worker, link: Link) -> None:
        """A connection has ended, and nobody wanted it to: neither this router nor a drain."""
        state = worker.load.state if worker.load is not None else ""
        if worker.key in self.workers and state != "left":
            reason = "dead" if state == "dead" else link.close_kind
            self._routing.losses[worker.card.role, reason] += 1

    def _drop(self, key: Key) -> None:
        worker = self.workers.pop(key)
        self._tasks.pop(key).cancel()
        if worker.link is not None:
            worker.link.close("no longer wanted")
        worker.lose("the router forgot it")
        self.incompatible = {p: why for p, why in self.incompatible.items() if key not in p}
        self._on_change()

    async def _keep_connected(self, worker: Worker) -> None:
        backoff, longest = BACKOFF_S
        while True:
            ended = asyncio.Event()
            try:
                await self._connect(worker, ended)
            except LinkError as error:
                log.info("%s", error)
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, longest)
                continue
            backoff = BACKOFF_S[0]
            await ended.wait()

    async def _connect(self, worker: Worker, ended: asyncio.Event) -> None:
        def on_message(link: Link, message: wire.Message) -> None:
            worker.link = link
            worker.receive(message)
            if isinstance(message, wire.Load):
                self._on_change()

        def on_close(link: Link) -> None:
            level = logging.WARNING if worker.key in self.workers else logging.DEBUG
            log.log(level, "connection to %s ended: %s", worker.card.worker_id, link.close_reason)
            self._count_loss(worker, link)
            worker.lost_at = asyncio.get_running_loop().time()
            worker.load = None
            worker.lose(link.close_reason)
            worker.aborted.clear()
            ended.set()
            self._on_change()

        worker.peers.clear()
        wanted = worker.tickets
        card = worker.card
        link = await connect_worker(
            card.host,
            card.port,
            card.worker_id,
            card.epoch,
            self._settings.router_id,
            self._epoch,
            self._settings.secret,
            wanted,
            on_message,
            on_close,
            self.faults,
        )
        worker.link = link
        worker.stalled = False
        if link.open:
            worker.lost_at = None
        for ticket_id in wanted:
            if ticket_id not in worker.leases:  # nobody wants it any more, since just now
                worker.release(ticket_id)
        log.info("connected to %s worker %s", card.role, card.worker_id)
