"""Who is here: a named Ray actor to which workers report and which routers ask.

::

    worker ──heartbeat(card, load) each second──► Registry ◄──wait(version) long poll── router

A router says with each poll where its own metrics are, so that any router can name all of them. The
registry owns nothing: an entry is a worker's last heartbeat, gone when none came for a while,
and what a restart of the actor loses, the next heartbeats bring back. Cards and loads travel as
``router.wire`` frames, so nothing of ours is pickled; what they say is not looked at here, except
for the id. The first who asks creates the actor.

It also passes on, to all routers at once, that the deployment is about to stop, how large its pools
are to be, and why workers do not start. One that dies while it starts cannot say so: it is missed.
The sizes of pools are said again and again; what is known of failed starts, routers bring back.
"""

import asyncio
import contextlib
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from router import wire
from router.pools import Pools, StartFailure
from router.scraping import Target, worker_targets

NAMESPACE = "baton"
EXPIRE_S = 5.0  # without a heartbeat
START_EXPIRE_S = 15.0  # the same for one that starts: its threads are busy, and so are others'
LATE_S = 2.0  # a replica that is not wanted any more may still say that it starts
SILENT_S = 5.0  # one that starts may be too busy to say so for so long
DIED = "nothing more was heard of it while it started: was its process killed, for its memory?"
HEARTBEAT_S = 1.0
CALL_TIMEOUT_S = 10.0  # a call to an actor that restarts may take this long, then it is repeated
LENGTH_BYTES = 4  # before a frame's body

log = logging.getLogger(__name__)


@dataclass
class _Start:
    """A worker that starts; moments of the table's clock."""

    role: str
    began_at: float
    heard_at: float = 0.0


class Table:
    """The registry's state: the last heartbeat of each worker (no ray, its clock is passed in)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, expire_s: float = EXPIRE_S):
        self._clock = clock
        self._expire_s = expire_s
        self._entries: dict[str, tuple[bytes, bytes, float]] = {}  # card, load, when
        self._routers: dict[str, tuple[dict[str, Any], float]] = {}  # fields of a Target, when
        self._starting: dict[str, _Start] = {}  # by name
        self._failures: dict[str, StartFailure] = {}  # the latest of each role
        self._start_failures: Counter[tuple[str, ...]] = Counter()  # by role and reason
        self._recalled: dict[tuple[str, ...], int] = {}  # of them, those before a restart
        self._has_started: set[str] = set()  # roles of which a worker has, since a restart
        self._lowered: dict[str, float] = {}  # by role: when its target last fell ...
        self._raised: dict[str, float] = {}  # ... and rose
        self.plan: dict[str, Any] = {}  # fields of Pools, as who scales the pools says
        # Starts anywhere: a reader that still has a version of before a restart must not match.
        self.version = self._first_version = int.from_bytes(os.urandom(6))

    def heartbeat(self, worker_id: str, card: bytes, load: bytes) -> bool:
        """Keep what a worker says; True if its card is new."""
        old = self._entries.get(worker_id)
        self._entries[worker_id] = (card, load, self._clock())
        return self._changed(old is None or old[0] != card)

    def present(self, target: dict[str, Any]) -> None:
        """Keep what a router says of itself; no news for anybody."""
        self._routers[target["replica"]] = (target, self._clock())

    def leave(self, name: str) -> bool:
        """A worker or router has ended, or a start; True if a worker did."""
        self._routers.pop(name, None)
        self._starting.pop(name, None)
        return self._changed(self._entries.pop(name, None) is not None)

    def expire(self) -> bool:
        """Drop who has not been heard of lately; True if there were workers among them."""
        oldest = self._clock() - self._expire_s
        self._routers = {
            name: (target, when) for name, (target, when) in self._routers.items() if when >= oldest
        }
        expired = [name for name, (_, _, when) in self._entries.items() if when < oldest]
        for name in expired:
            del self._entries[name]
        return self._changed(self._miss_starting() or bool(expired))

    # --- workers that start ----------------------------------------------------------------------

    def starting(self, name: str, role: str) -> None:
        """A worker that starts is alive; ``name`` is that of this start."""
        now = self._clock()
        self._starting.setdefault(name, _Start(role, now)).heard_at = now

    def started(self, name: str, role: str) -> bool:
        """It takes work: those of its role can start."""
        self._starting.pop(name, None)
        self._has_started.add(role)
        return self._changed(self._failures.pop(role, None) is not None)

    def failed(self, name: str, role: str, message: str, reason: str = "exception") -> bool:
        """It could not start."""
        self._starting.pop(name, None)
        before = self._failures.get(role)
        in_a_row = before.in_a_row + 1 if before is not None else 1
        self._failures[role] = StartFailure(role, name, reason, message, time.time(), in_a_row)
        self._start_failures[role, reason] += 1
        return self._changed(True)

    def recall(self, version: int, pools: Pools) -> bool:
        """What a reader with ``version`` knows of failed starts; True if it was forgotten here."""
        if not pools.start_failures or self._first_version <= version <= self.version:
            return False
        forgotten = {
            key: count
            for key, count in pools.start_failures.items()
            if count > self._recalled.get(key, 0)
        }
        self._recalled.update(forgotten)
        for failure in pools.failures:
            if failure.role not in self._has_started:
                self._failures.setdefault(failure.role, failure)
        return self._changed(bool(forgotten))

    def pools(self) -> dict[str, Any]:
        """Fields of Pools."""
        return {
            **self.plan,
            "failures": tuple(self._failures.values()),
            "start_failures": dict(self._start_failures + Counter(self._recalled)),
        }

    def tell(self, plan: dict[str, Any]) -> bool:
        """How large the pools are to be; True if that has changed."""
        before, targets = self.plan.get("targets", {}), plan["targets"]
        for role, target in targets.items():
            if target < before.get(role, 0):
                self._lowered[role] = self._clock()
            elif target > before.get(role, 0):
                self._raised[role] = self._clock()
        self.plan = plan
        return self._changed(targets != before)

    def _miss_starting(self) -> bool:
        """Who is not heard of any more while it starts has died, unless it was not wanted any more:
        when a pool shrinks, those that start are the first to go.
        """
        oldest = self._clock() - max(START_EXPIRE_S, 3 * self._expire_s)
        missed = {name: start for name, start in self._starting.items() if start.heard_at < oldest}
        for name, start in missed.items():
            del self._starting[name]
            if self._is_wanted(start):
                self.failed(name, start.role, DIED, "died")
        return bool(missed)

    def _is_wanted(self, start: _Start) -> bool:
        lowered, raised = (
            moments.get(start.role, -math.inf) for moments in (self._lowered, self._raised)
        )
        shrank = start.began_at - LATE_S <= lowered <= start.heard_at + SILENT_S
        return not shrank or lowered < raised <= start.began_at

    def reports(self) -> list[tuple[bytes, bytes]]:
        """(card, load) of each worker, as they came."""
        return [(card, load) for card, load, _ in self._entries.values()]

    def routers(self) -> list[dict[str, Any]]:
        """What each router says of itself."""
        return [target for target, _ in self._routers.values()]

    def _changed(self, changed: bool) -> bool:
        self.version += changed
        return changed


class RegistryActor:
    """The actor around a :class:`Table`."""

    def __init__(self, expire_s: float = EXPIRE_S) -> None:
        self._table = Table(expire_s=expire_s)
        self._period_s = expire_s / 10
        self._news = asyncio.Event()  # replaced at each change; waiters keep the one they found
        self._stop_at: float | None = None

    async def heartbeat(self, card: bytes, load: bytes) -> None:
        """A worker lives; ``card`` is a Welcome frame and ``load`` a Load frame."""
        self._tell(self._table.heartbeat(_card(card).worker_id, card, load))

    async def leave(self, name: str) -> None:
        """A worker or router says that it ends."""
        self._tell(self._table.leave(name))

    async def stop(self, in_s: float) -> None:
        """The deployment ends, and routers are to end their requests in so many seconds."""
        self._stop_at = time.monotonic() + in_s
        self._table.version += 1
        self._tell(True)

    async def starting(self, name: str, role: str) -> None:
        """A worker starts, and lives."""
        self._table.starting(name, role)

    async def started(self, name: str, role: str) -> None:
        """It has started."""
        self._tell(self._table.started(name, role))

    async def failed(self, name: str, role: str, message: str) -> None:
        """It could not."""
        self._tell(self._table.failed(name, role, message))

    async def plan(self, plan: dict[str, Any]) -> None:
        """How large the pools are to be: fields of Pools."""
        self._tell(self._table.tell(plan))

    async def cards(self) -> list[bytes]:
        """Welcome frames of the workers that are here."""
        return [card for card, _ in await self.reports()]

    async def reports(self) -> list[tuple[bytes, bytes]]:
        """(Welcome frame, Load frame) of the workers that are here."""
        self._tell(self._table.expire())
        return self._table.reports()

    async def targets(self) -> tuple[list[bytes], list[dict[str, Any]]]:
        """Cards of the workers that are here, and what the routers say of themselves."""
        return await self.cards(), self._table.routers()

    async def wait(
        self,
        version: int,
        timeout_s: float,
        router: dict[str, Any] | None = None,
        pools: Pools | None = None,
    ) -> tuple[int, list[bytes], float | None, dict[str, Any]]:
        """The cards, their version, the seconds until all stops (None: it does not) and the fields
        of Pools, as soon as the version is another one than ``version``, or after ``timeout_s``.

        ``router``: the fields of the asking router's Target; ``pools``: what it was told last.
        """
        if router is not None:
            self._table.present(router)
        if pools is not None:
            self._tell(self._table.recall(version, pools))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self._expire() and self._table.version == version:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._news.wait(), self._period_s)
        stops_in_s = None if self._stop_at is None else self._stop_at - time.monotonic()
        return self._table.version, await self.cards(), stops_in_s, self._table.pools()

    async def pid(self) -> int:
        """This actor's process."""
        return os.getpid()

    def _expire(self) -> bool:
        expired = self._table.expire()
        self._tell(expired)
        return expired

    def _tell(self, changed: bool) -> None:
        if changed:
            self._news.set()
            self._news = asyncio.Event()


def _card(frame: bytes) -> wire.WorkerCard:
    message = wire.decode(frame[LENGTH_BYTES:])
    if not isinstance(message, wire.Welcome):
        raise wire.WireError(f"a {type(message).__name__} is not a worker's card")
    return message.card


def _load(frame: bytes) -> wire.Load:
    message = wire.decode(frame[LENGTH_BYTES:])
    if not isinstance(message, wire.Load):
        raise wire.WireError(f"a {type(message).__name__} is not a worker's load")
    return message


class RegistryClient:
    """How workers and routers reach the registry of a deployment; survives its restarts."""

    def __init__(self, name: str) -> None:
        self.stops_in_s: float | None = None  # as the last ``discover`` found
        self.pools = Pools()  # the same
        self._name = name
        self._version = -1
        self._posted: Any = None  # the last plan's reference
        self._actor: Any = None

    def actor(self) -> Any:
        """The actor, created if it is not there. Detached: it outlives whoever was first."""
        if self._actor is None:
            # Ray types a class's handle only where it is decorated, hence Any
            remote_class: Any = ray.remote(RegistryActor)
            self._actor = remote_class.options(
                name=self._name,
                namespace=NAMESPACE,
                get_if_exists=True,
                lifetime="detached",
                num_cpus=0,
                max_restarts=-1,
                max_concurrency=1000,
            ).remote()
        return self._actor

    async def heartbeat(self, card: wire.WorkerCard, load: wire.Load) -> bool:
        """Report once; False if the registry did not answer, then the next one will tell it."""
        frames = wire.encode(wire.Welcome(card)), wire.encode(load)
        return await self._try("heartbeat", *frames) is not None

    async def leave(self, name: str) -> bool:
        """Say that a worker or router ends."""
        return await self._try("leave", name) is not None

    async def starting(self, name: str, role: str) -> bool:
        """Say that a worker starts, again and again until it has."""
        return await self._try("starting", name, role) is not None

    async def started(self, name: str, role: str) -> bool:
        """Say that it has started."""
        return await self._try("started", name, role) is not None

    async def failed(self, name: str, role: str, message: str) -> bool:
        """Say why it could not."""
        return await self._try("failed", name, role, message) is not None

    def post(self, plan: dict[str, Any]) -> None:
        """Tell how large the pools are to be, without waiting for anything. The next one will make
        up for one that gets lost.
        """
        try:
            done = ray.wait([self._posted], timeout=0)[0] if self._posted is not None else []
            ray.get(done)  # raises what the last one came to
            self._posted = self.actor().plan.remote(plan)
        except RayError as error:
            log.warning("the pools' targets were not passed on: %s", error)
            self._actor = self._posted = None

    async def stop(self, in_s: float) -> bool:
        """Tell all routers that the deployment ends."""
        return await self._try("stop", in_s) is not None

    async def discover(
        self, patience_s: float = HEARTBEAT_S, router: Target | None = None
    ) -> list[wire.WorkerCard]:
        """The workers that are here: at once at first, then on a change or after ``patience_s``.

        ``router``: the one that asks, where it wants to be found.
        """
        who = None if router is None else asdict(router)
        answer = await self._try("wait", self._version, patience_s, who, self.pools)
        if answer is None:
            return []
        self._version, frames, self.stops_in_s, pools = answer[0]
        self.pools = replace(self.pools, **pools)  # a registry that begins anew knows of no plan
        return [_card(frame) for frame in frames]

    async def reports(self) -> list[tuple[wire.WorkerCard, wire.Load]]:
        """Card and last load of each worker that is here."""
        answer = await self._try("reports")
        return [(_card(card), _load(load)) for card, load in answer[0]] if answer else []

    async def targets(self) -> list[Target] | None:
        """The metrics ports of all workers and routers; None if the registry does not answer."""
        answer = await self._try("targets")
        if answer is None:
            return None
        cards, routers = answer[0]
        return worker_targets(map(_card, cards)) + [Target(**fields) for fields in routers]

    async def _try(self, method: str, *args: object) -> tuple[Any] | None:
        """The answer in a tuple, or None if the registry is restarting or out of reach."""
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                return (await getattr(self.actor(), method).remote(*args),)
        except (RayActorError, TimeoutError):
            self._actor = None  # it restarts under the same name, or somebody removed it
            return None
