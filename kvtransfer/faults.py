"""Which faults are injected, and when: drawn from a seed, so that a run can be repeated (pure).

Used by the fault wrapper around a transport and by the router's links; for tests and chaos runs.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class FaultPlan:
    """Probabilities per transfer or message, at most one fault each."""

    drop: float = 0.0
    delay: float = 0.0
    duplicate: float = 0.0
    corrupt: float = 0.0
    reorder: float = 0.0
    delay_s: float = 0.5  # a delay is drawn between 0 and this
    seed: int = 0


KINDS = ("drop", "delay", "duplicate", "corrupt", "reorder")


def parse_faults(text: str) -> FaultPlan | None:
    """The plan of "drop=0.01,delay=0.1,seed=7", None for an empty text; raises ValueError."""
    if not text.strip():
        return None
    types = {field.name: int if field.name == "seed" else float for field in fields(FaultPlan)}
    values: dict[str, float] = {}
    for item in text.split(","):
        name, _, value = item.strip().partition("=")
        if name not in types:
            raise ValueError(f"{name!r} is not one of {', '.join(types)}")
        try:
            values[name] = types[name](value)
        except ValueError:
            raise ValueError(f"{name}: {value!r} is not a number") from None
    plan = FaultPlan(**values)  # type: ignore[arg-type]  # seed is an int by its type above
    chances = [getattr(plan, kind) for kind in KINDS]
    if not (all(0 <= chance <= 1 for chance in chances) and sum(chances) <= 1):
        raise ValueError("the probabilities must lie between 0 and 1, and so must their sum")
    if not 0 <= plan.delay_s < float("inf"):
        raise ValueError(f"delay_s: {plan.delay_s} is not a time")
    return plan


class Faults:
    """Draws a fault for each transfer or message, and counts them by kind.

    ``who``: of several processes with one plan, each draws faults of its own.
    """

    def __init__(self, plan: FaultPlan, who: str = "") -> None:
        self.plan = plan
        self.counts: Counter[str] = Counter()
        self._random = random.Random(f"{plan.seed} {who}")

    def draw(self) -> str:
        """The kind of fault for the next one, or "" for none. Counted at once."""
        mark = self._random.random()
        for kind in KINDS:
            mark -= getattr(self.plan, kind)
            if mark < 0:
                self.counts[kind] += 1
                return kind
        return ""

    def delay_s(self) -> float:
        """How long a delayed one waits, in seconds."""
        return self._random.uniform(0, self.plan.delay_s)

    def below(self, bound: int) -> int:
        """An index, for what is corrupted."""
        return self._random.randrange(bound)
