"""Serve's autoscaling policy of each deployment: gathers, asks ``decide``, passes on.

Lives in Serve's controller, which calls each policy about ten times a second with a context: the
target of now, the replicas that run, and what each of these has reported. The policies of one
deployment of ours share a :class:`Planner`, since pools are decided on together; it decides at its
own pace. What is decided goes back as the number that Serve wants, and to the registry, for routers
to show. Imports no Ray: contexts are told apart by their attributes.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from services.planner.config import PoolScaling, ScalingConfig
from services.planner.observation import Decision, Memory
from services.planner.planner import decide
from services.planner.signals import Signals

POOLS = ("prefill", "decode")

Publish = Callable[[dict[str, Any]], None]
Stats = Mapping[str, tuple[float, Mapping[str, float]]]
"""By replica: when it reported last, and what."""

log = logging.getLogger(__name__)


def scaling_of(raw: Mapping[str, Any]) -> ScalingConfig:
    """From what ``dataclasses.asdict`` made of one."""
    pools = {role: PoolScaling(**raw[role]) for role in POOLS}
    return ScalingConfig(**{**raw, **pools})


@dataclass
class _Told:
    """What a deployment's policy said last."""

    target: int
    ready: int
    at: float


class Planner:
    """Decides for one deployment. Everything it knows of the time is passed in."""

    def __init__(self, config: ScalingConfig, publish: Publish) -> None:
        self.config = config
        self._publish = publish
        self._signals = Signals()
        self._memory = Memory()
        self._told: dict[str, _Told] = {}
        self._targets: dict[str, int] = {}
        self._failures: dict[str, int] = {}  # starts that failed in a row, by role
        self._changes: Counter[tuple[str, str, str]] = Counter()  # role, direction, reason
        self._decided_at = float("-inf")
        self._begun = False  # pools have had the workers that they begin with

    def is_due(self, role: str, now: float) -> bool:
        """Whether it is time for what a deployment has to say."""
        told = self._told.get(role)
        return told is None or now - told.at >= self.config.interval_s / 2

    def tell(self, role: str, target: int, ready: int, stats: Stats, now: float) -> None:
        """What Serve knows of a deployment; ``role`` may be "router". ``stats``: of its replicas
        that run, those that have reported.
        """
        self._told[role] = _Told(target, ready, now)
        self._signals.here(role, stats)
        for name, (at, values) in stats.items():
            if role == "router":
                self._signals.router(name, at, values)
            else:
                self._signals.worker(role, name, at, values)
        if role == "router" and stats:
            told = [values for _, values in stats.values()]
            self._failures = {
                pool: int(max(values.get(f"{pool}_failures", 0) for values in told))
                for pool in POOLS
            }
        if now - self._decided_at >= self.config.interval_s and self._told.keys() >= {*POOLS}:
            self._decided_at = now
            self._decide(now)

    def target(self, role: str, current: int) -> int:
        """What the deployment is to have; what it has as long as nothing is decided."""
        return self._targets.get(role, current)

    def _decide(self, now: float) -> None:
        told = {role: self._told[role] for role in POOLS}
        # What was decided last is on its way, while Serve may still tell what was before.
        targets = {role: self.target(role, told[role].target) for role in POOLS}
        seen = self._signals.observe(
            now,
            targets=targets,
            ready={role: told[role].ready for role in POOLS},
            start_failures=self._failures,
        )
        if not self._begun:  # nobody could have asked for anything: that is not to be idle
            self._begun = all(each.ready >= min(1, each.target) for each in told.values())
            self._memory = replace(self._memory, busy_at=None)
        decision = decide(seen, self._signals.profile, self.config, self._memory)
        self._memory = decision.memory
        for role in POOLS:
            self._note(role, targets[role], decision, now)
        self._publish(
            {
                "targets": {role: self._targets[role] for role in self._scaled()},
                "most": {role: getattr(self.config, role).max for role in self._scaled()},
                "reasons": {role: getattr(decision, role).reason for role in self._scaled()},
                "words": {role: getattr(decision, role).words for role in self._scaled()},
                "decisions": dict(self._changes),
            }
        )

    def _note(self, role: str, before: int, decision: Decision, now: float) -> None:
        made = getattr(decision, role)
        self._targets[role] = made.target
        if made.target == before:
            return
        direction = "up" if made.target > before else "down"
        self._changes[role, direction, made.reason] += 1
        log.info("%s workers: %d → %d (%s): %s", role, before, made.target, made.reason, made.words)

    def _scaled(self) -> list[str]:
        return [role for role in POOLS if getattr(self.config, role).scales]


_PLANNERS: dict[str, Planner] = {}
"""By registry, which each deployment of ours has one of: policies of a process share them."""


class Autoscaler:
    """A policy as Serve wants it: made from JSON, called with a context. Serve gets at it by
    :mod:`services.planner.policy`.
    """

    def __init__(self, role: str, config: dict[str, Any], registry: str) -> None:
        from services.registry import RegistryClient

        _log_to_stderr()
        scaling = scaling_of(config)
        planner = _PLANNERS.get(registry)
        if planner is None or planner.config != scaling:
            planner = _PLANNERS[registry] = Planner(scaling, RegistryClient(registry).post)
        self._role, self._registry = role, registry

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The number of replicas; never fails, or no deployment of the cluster would scale."""
        planner, role, current = _PLANNERS[self._registry], self._role, context.target_num_replicas
        try:
            now = time.time()
            if planner.is_due(role, now):
                ready = context.current_num_replicas
                planner.tell(role, current, ready, latest(context.raw_metrics or {}), now)
        except Exception:
            log.exception("the size of the %s pool stays as it is", role)
        return planner.target(role, current), {}


def latest(metrics: Mapping[str, Mapping[Any, Any]]) -> dict[str, tuple[float, dict[str, float]]]:
    """The last report of each replica, from Serve's ``raw_metrics``: series by metric and replica.

    A replica records all of its metrics at one moment.
    """
    newest: dict[str, float] = {}
    values: dict[str, dict[str, float]] = {}
    for metric, by_replica in metrics.items():
        for replica, series in by_replica.items():
            if not series:
                continue
            name = str(replica)
            newest[name] = max(newest.get(name, 0.0), series[-1].timestamp)
            values.setdefault(name, {})[metric] = series[-1].value
    return {name: (at, values[name]) for name, at in newest.items()}


def _log_to_stderr() -> None:
    """Serve's controller shows the lines of its own loggers only."""
    ours = logging.getLogger("services.planner")
    if not ours.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        ours.addHandler(handler)
        ours.setLevel(logging.INFO)
