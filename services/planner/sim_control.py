"""Who decides in virtual time: the real planner, behind reports that are late or lost; or a
schedule that is known beforehand (pure).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random

from services.planner.config import ScalingConfig
from services.planner.observation import Decision, Memory
from services.planner.planner import decide
from services.planner.signals import Signals
from services.planner.sim_run import ROLES, Sizes
from services.planner.simulator import Simulation


@dataclass(frozen=True)
class Reports:
    """How reports get to the planner."""

    late_s: float = 0.0
    lost: float = 0.0  # share that never arrives
    seed: int = 1


class Planned:
    """The real ``decide`` on the real ``Signals``."""

    def __init__(self, config: ScalingConfig, reports: Reports = Reports()) -> None:
        self.interval_s = config.interval_s
        self.reasons: Counter[tuple[str, str, str]] = Counter()  # of changes: role, up|down, reason
        self.decisions: list[Decision] = []
        self._config = config
        self._reports = reports
        self._random = Random(f"reports {reports.seed}")
        self._signals = Signals()
        self._memory = Memory()

    def decide(self, sim: Simulation) -> Sizes:
        self._report(sim)
        now = sim.events.now
        targets = {role: pool.target for role, pool in sim.pools.items()}
        ready = {role: pool.num_ready for role, pool in sim.pools.items()}
        seen = self._signals.observe(now, targets, ready)
        decision = decide(seen, sim.world.profile, self._config, self._memory)
        self._memory = decision.memory
        self.decisions.append(decision)
        sizes = {"prefill": decision.prefill.target, "decode": decision.decode.target}
        for role, reason in (
            ("prefill", decision.prefill.reason),
            ("decode", decision.decode.reason),
        ):
            if sizes[role] != targets[role]:
                way = "up" if sizes[role] > targets[role] else "down"
                self.reasons[role, way, reason] += 1
        return sizes

    def _report(self, sim: Simulation) -> None:
        """Everybody who works says how it is."""
        now = sim.events.now
        self._send(sim, "", "router", now, sim.router_stats())
        for role, pool in sim.pools.items():
            for place in pool.places:
                if place.state != "starting":
                    self._send(sim, role, place.worker.key[0], now, place.worker.stats())

    def _send(
        self, sim: Simulation, role: str, name: str, at: float, stats: dict[str, float]
    ) -> None:
        def arrive() -> None:
            if role:
                self._signals.worker(role, name, at, stats)
            else:
                self._signals.router(name, at, stats)

        if self._reports.lost and self._random.random() < self._reports.lost:
            return
        if self._reports.late_s:
            sim.events.at(at + self._reports.late_s, arrive)
        else:
            arrive()


class Scheduled:
    """Sizes that were fixed beforehand: by role, (from when on, workers), in order."""

    interval_s = 5.0

    def __init__(self, schedule: dict[str, list[tuple[float, int]]]) -> None:
        self._schedule = schedule

    def decide(self, sim: Simulation) -> Sizes:
        now = sim.events.now
        return {
            role: [size for at, size in self._schedule[role] if at <= now][-1] for role in ROLES
        }
