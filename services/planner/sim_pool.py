"""A Serve deployment in virtual time: starts and drains replicas as it is told (pure)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from router.config import RouterConfig
from services.engine.config import EngineConfig
from services.engine.scheduler import Output
from services.planner.profile import Profile
from services.planner.sim_worker import Events, SimWorker


@dataclass(frozen=True)
class World:
    """What the deployment runs on."""

    profile: Profile
    prefill: EngineConfig
    decode: EngineConfig
    router: RouterConfig
    start_s: float = 30.0  # from the decision to a worker's first request
    start_spread: float = 0.2  # of that, either way
    handoff_s: float = 0.1  # from the first token until D has the KV
    seed: int = 1


@dataclass(eq=False)
class Place:
    """A replica: from the decision to start it until it is gone."""

    worker: SimWorker
    asked_at: float
    state: str = "starting"  # then ready, draining, gone
    gone_at: float | None = None


class Pool:
    """A Serve deployment: has as many replicas as it is told."""

    def __init__(
        self,
        role: str,
        world: World,
        events: Events,
        on_outputs: Callable[[SimWorker, list[Output]], None],
        on_change: Callable[[], None],
    ) -> None:
        self.role = role
        self.target = 0
        self.places: list[Place] = []  # not gone
        self.all: list[Place] = []
        self._world = world
        self._events = events
        self._on_outputs = on_outputs
        self._on_change = on_change  # who is ready has changed
        self._random = Random(f"{role} {world.seed}")

    def scale(self, target: int, at_once: bool = False) -> None:
        """Start or stop replicas. Who starts is stopped before who works, the youngest first;
        who works leaves when it has nothing more to do, and takes nothing new meanwhile.
        """
        self.target = target
        alive = [place for place in self.places if place.state in ("starting", "ready")]
        for _ in range(target - len(alive)):
            self._start(at_once)
        alive.sort(key=lambda place: (place.state == "starting", place.asked_at))
        for place in alive[target:]:
            place.state = "draining"
            self.leave_if_done(place)
        self._on_change()

    def _start(self, at_once: bool) -> None:
        world, now = self._world, self._events.now
        worker = SimWorker(
            (f"{self.role}{len(self.all)}", 1),
            self.role,
            world.prefill if self.role == "prefill" else world.decode,
            world.profile,
            self._events,
            self._on_outputs,
        )
        place = Place(worker, now)
        self.places.append(place)
        self.all.append(place)
        spread = world.start_spread * (2 * self._random.random() - 1)
        delay = 0.0 if at_once else world.start_s * (1 + spread)
        self._events.at(now + delay, lambda: self._ready(place))

    def _ready(self, place: Place) -> None:
        if place.state == "starting":
            place.state = "ready"
            self._on_change()

    def leave_if_done(self, place: Place) -> None:
        """To be called when something ended at a replica."""
        if place.state == "draining" and place.worker.is_empty:
            place.state = "gone"
            place.gone_at = self._events.now
            self.places.remove(place)

    @property
    def num_ready(self) -> int:
        return sum(place.state == "ready" for place in self.places)

    def hours(self, until: float) -> float:
        """Replica-hours so far: a replica counts from when it was asked for until it is gone."""
        ends = ((place, until if place.gone_at is None else place.gone_at) for place in self.all)
        return sum(max(0.0, min(end, until) - place.asked_at) for place, end in ends) / 3600
