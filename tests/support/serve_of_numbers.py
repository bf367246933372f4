"""A Serve of numbers around the real policies: ticks, reports, replicas that come and go.

Its clock is virtual. Prompts take a second of a prefill worker each, and answers are no trouble.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

from services.planner.autoscaler import Autoscaler
from services.planner.config import PoolScaling, ScalingConfig

TICK_S, REPORT_S = 0.25, 1.0
POOL = PoolScaling(min=0, max=10, objective_s=2.0, up_cooldown_s=5, down_after_s=30, cooldown_s=20)
CONFIG = ScalingConfig(idle_s=60, prefill=POOL, decode=replace(POOL, objective_s=0.1))
PROFILE = {
    "prefill": {"profile_prefill_step": 0.0, "profile_prefill_token": 0.01,
                "profile_prefill_pair": 0.0},
    "decode": {"profile_decode_step": 0.02, "profile_decode_seq": 0.005,
               "profile_decode_pair": 0.0},
}  # fmt: skip
PROMPT_TOKENS = 100  # a second of a prefill worker


@dataclass(frozen=True)
class Sample:
    """As Serve keeps it."""

    timestamp: float
    value: float


Metrics = dict[str, dict[str, list[Sample]]]


@dataclass
class Context:
    """What Serve hands to a policy, as far as it is read; metrics are looked up when they are."""

    target_num_replicas: int
    current_num_replicas: int
    metrics: Callable[[], Metrics] = dict

    @property
    def raw_metrics(self) -> Metrics:
        return self.metrics()


@dataclass
class Load:
    """What clients do."""

    rate: float = 0.0  # requests per second
    answer_tokens: int = 4


@dataclass
class Deployment:
    """One of Serve's: its policy, its size, and what its replicas have reported."""

    role: str
    policy: Autoscaler
    target: int
    ready: list[str] = field(default_factory=list)
    starting: list[tuple[float, str]] = field(default_factory=list)  # ready when, name
    heard: dict[str, tuple[float, dict[str, float]]] = field(default_factory=dict)
    changes: list[tuple[float, int]] = field(default_factory=list)
    born: int = 0

    def context(self) -> Context:
        return Context(self.target, len(self.ready), self.metrics)

    def metrics(self) -> Metrics:
        """As Serve shows them: of the replicas that run, and have reported."""
        metrics: Metrics = {}
        for name in self.ready:
            at, values = self.heard.get(name, (0.0, {}))
            for metric, value in values.items():
                metrics.setdefault(metric, {})[name] = [Sample(at - 1, -1.0), Sample(at, value)]
        return metrics


class World:
    """A deployment of ours on a Serve of numbers, and its clients."""

    def __init__(
        self,
        clock: Clock,
        config: ScalingConfig = CONFIG,
        registry: str = "registry-of-this-one",
        start_s: float = 5.0,
        sizes: tuple[int, int] = (1, 1),
        started: bool = True,
    ) -> None:
        self.clock, self.config, self.start_s = clock, config, start_s
        self.load = Load()
        self.late_s, self.lost = 0.0, 0.0  # of reports
        self.waiting = 0.0  # prompts
        self.failures = {"prefill": 0, "decode": 0}
        self._draw = random.Random(7)
        self._post: list[tuple[float, Deployment, str, float, dict[str, float]]] = []
        self._totals = dict.fromkeys(
            ("requests", "prompt_tokens", "prompt_squares", "answers", "answer_tokens",
             "ttft_good", "ttft_bad", "tpot_good", "tpot_bad"), 0.0
        )  # fmt: skip
        kwargs = json.loads(json.dumps({"config": asdict(config), "registry": registry}))
        self.router, self.prefill, self.decode = (
            Deployment(role, Autoscaler(role, **kwargs), size)
            for role, size in (("router", 1), ("prefill", sizes[0]), ("decode", sizes[1]))
        )
        for each in self.deployments if started else [self.router]:
            each.ready = [f"{each.role}-{n}" for n in range(each.target)]
            each.born = each.target

    @property
    def deployments(self) -> list[Deployment]:
        return [self.router, self.prefill, self.decode]

    def run(self, seconds: float) -> None:
        """Let time pass."""
        for _ in range(round(seconds / TICK_S)):
            self.clock.now += TICK_S
            self._work(TICK_S)
            if self.clock.now % REPORT_S < TICK_S:
                self._report()
            self._deliver()
            for each in self.deployments:
                number, state = each.policy(each.context())
                assert state == {}
                self._apply(each, number)

    def _work(self, seconds: float) -> None:
        came = self.load.rate * seconds
        done = min(self.waiting + came, len(self.prefill.ready) * seconds)
        self.waiting += came - done
        late = self.waiting > max(1, len(self.prefill.ready)) * self.config.prefill.objective_s
        tokens = self.load.answer_tokens
        for name, more in (
            ("requests", came), ("prompt_tokens", came * PROMPT_TOKENS),
            ("prompt_squares", came * PROMPT_TOKENS**2), ("answers", done),
            ("answer_tokens", done * tokens), ("ttft_bad" if late else "ttft_good", done),
            ("tpot_good", done),
        ):  # fmt: skip
            self._totals[name] += more

    def _report(self) -> None:
        at = self.clock.now
        failures = {f"{role}_failures": float(count) for role, count in self.failures.items()}
        queued = max(0.0, self.waiting - 2 * len(self.prefill.ready))  # workers have the others
        gauges = {"queued": queued, "queued_tokens": self.waiting * PROMPT_TOKENS}
        running = self.load.rate * self.load.answer_tokens * 0.025 if self.decode.ready else 0.0
        for each in self.deployments:
            for name in each.ready:
                values = {
                    "router": self._totals | gauges | failures,
                    "prefill": {"waiting_tokens": 0.0, "computed_prompt_tokens": 0.0}
                    | PROFILE["prefill"],
                    "decode": {
                        "running": running / max(1, len(self.decode.ready)), "context": 100.0,
                        "kv_use": 0.1, "seqs": 64.0, "kv_tokens": 100_000.0,
                    } | PROFILE["decode"],
                }[each.role]  # fmt: skip
                if self._draw.random() >= self.lost:
                    self._post.append((at + self.late_s, each, name, at, values))

    def _deliver(self) -> None:
        due = [report for report in self._post if report[0] <= self.clock.now]
        self._post = [report for report in self._post if report[0] > self.clock.now]
        for _, each, name, at, values in due:
            each.heard[name] = at, values

    def _apply(self, each: Deployment, number: int) -> None:
        """As Serve does: to none only from one, and who starts goes first."""
        if number == 0 and each.target > 1:
            number = 1
        if number != each.target:
            each.changes.append((self.clock.now, number))
        each.target = number
        while len(each.ready) + len(each.starting) < number:
            name = f"{each.role}-{each.born}"
            each.born += 1
            each.starting.append((self.clock.now + self.start_s, name))
        while len(each.ready) + len(each.starting) > number:
            (each.starting or each.ready).pop()
        each.ready += [name for at, name in each.starting if at <= self.clock.now]
        each.starting = [one for one in each.starting if one[0] > self.clock.now]


@dataclass
class Clock:
    """Of the controller, and of all replicas."""

    now: float = 1_000_000.0

    def time(self) -> float:
        return self.now
