"""What the operator says on the size of the pools (pure)."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

LARGEST_POOL = 512

SPANS: dict[str, tuple[float, float]] = {
    "min": (0, LARGEST_POOL),
    "max": (0, LARGEST_POOL),
    "objective_s": (0, 3600),
    "devices": (0, 1024),
    "up_cooldown_s": (0, 86_400),
    "down_after_s": (0, 86_400),
    "cooldown_s": (0, 86_400),
    "budget": (0, 1_000_000),
    "attainment": (0.5, 0.999),
    "interval_s": (0.1, 600),
    "idle_s": (1, 604_800),
    "start_s": (0, 3600),
}
"""The least and the most that each number below can be."""


@dataclass(frozen=True)
class PoolScaling:
    """One pool. Its size is fixed, and is ``replicas``, as long as ``max`` is 0."""

    min: int = 0  # workers there are at least; 0: none while nobody asks for anything
    max: int = 0  # workers there are at most; 0: the pool does not scale
    objective_s: float = 0.0  # prefill: TTFT, decode: TPOT; 0: the router's slo_ttft_s, slo_tpot_s
    devices: int = 1  # accelerators that one worker takes from the budget
    up_cooldown_s: float = 10.0  # between two increases
    down_after_s: float = 120.0  # fewer workers must have been enough for so long
    cooldown_s: float = 30.0  # between two changes of direction

    @property
    def scales(self) -> bool:
        """Whether its size is decided here."""
        return self.max > 0

    def __post_init__(self) -> None:
        _check_spans(self)
        if self.scales and self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")


@dataclass(frozen=True)
class ScalingConfig:
    """The block ``autoscaling``."""

    budget: int = 0  # accelerators of both pools together; 0: no limit
    attainment: float = 0.95  # share of requests that are to meet each objective
    interval_s: float = 2.0  # between two decisions
    idle_s: float = 300.0  # nobody asks for anything for so long: pools with min 0 go to none
    start_s: float = 30.0  # from the decision to a worker's first request, until one was measured
    prefill: PoolScaling = field(default_factory=PoolScaling)
    decode: PoolScaling = field(default_factory=PoolScaling)

    @property
    def scales(self) -> bool:
        """Whether any pool does."""
        return self.prefill.scales or self.decode.scales

    def __post_init__(self) -> None:
        _check_spans(self)


def check_budget(config: ScalingConfig, fixed: dict[str, int]) -> None:
    """Raise ValueError for a budget below what there is at least. ``fixed``: workers by role, of
    pools that do not scale.
    """
    least = {
        role: pool.devices * (max(pool.min, 1) if pool.scales else fixed.get(role, 0))
        for role, pool in (("prefill", config.prefill), ("decode", config.decode))
    }
    if config.budget and sum(least.values()) > config.budget:
        parts = " and ".join(f"{count} for {role}" for role, count in least.items())
        raise ValueError(
            f"budget is {config.budget} accelerators, but the smallest pools that serve take"
            f" {parts}: raise the budget, or lower min or devices"
        )


def _check_spans(block: PoolScaling | ScalingConfig) -> None:
    for name in (each.name for each in fields(block) if each.name in SPANS):
        value, (low, high) = getattr(block, name), SPANS[name]
        if not low <= value <= high:  # also NaN
            raise ValueError(f"{name} is {value!r}; it must be from {low:g} to {high:g}")
