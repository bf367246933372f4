"""What an engine has done, and in how much time (pure; time is an argument).

Written by the engine's thread, once per turn of its loop; anybody may read. Each attribute and each
slot is replaced as a whole, so readers need no lock and find numbers that are true, if not all of
the same moment. Time is either busy, within steps, or idle: together all of it since the start.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.engine.roofline import Ceilings, Cost
from services.engine.scheduler import Row

RECENT_S = 5
"""What :meth:`StepMeter.recent` looks back; whoever computed nothing meanwhile is idle."""


@dataclass(frozen=True)
class Work:
    """Operations, bytes moved, and the seconds within steps in which that was done."""

    flops: float = 0.0
    num_bytes: float = 0.0
    seconds: float = 0.0

    def plus(self, cost: Cost, seconds: float) -> "Work":
        """And a step."""
        return Work(
            self.flops + cost.flops, self.num_bytes + cost.num_bytes, self.seconds + seconds
        )


@dataclass(frozen=True)
class Utilisation:
    """Shares of the ceilings while steps ran, and operations by byte. All 0 for an idle engine; a
    share is 0 as well where its ceiling is not known.
    """

    flops: float
    bandwidth: float
    intensity: float


def no_cost(rows: Sequence[Row]) -> Cost:
    """Of a model of which nothing is known."""
    return Cost(0, 0)


class StepMeter:
    """Counters since the start, and the sums of the last seconds."""

    def __init__(
        self,
        cost: Callable[[Sequence[Row]], Cost] = no_cost,
        ceilings: Ceilings | None = None,
    ) -> None:
        self.ceilings = ceilings or Ceilings()
        self.total = Work()
        self.idle_s = 0.0
        self._cost = cost
        self._since: float | None = None  # all time before is counted
        # By second, modulo their number. One more than is summed up: the current one is not full.
        self._slots = [(-1, Work())] * (RECENT_S + 1)

    def waited(self, now: float) -> None:
        """No step ran since the last call, or since the step that was told last."""
        if self._since is not None:
            self.idle_s += now - self._since
        self._since = now

    def stepped(self, rows: Sequence[Row], began: float, ended: float) -> None:
        """A step of these rows has run."""
        self.waited(began)
        self._since = ended
        cost, seconds = self._cost(rows), ended - began
        self.total = self.total.plus(cost, seconds)
        second = int(ended)
        slot = second % len(self._slots)
        known, work = self._slots[slot]
        self._slots[slot] = (second, (work if known == second else Work()).plus(cost, seconds))

    def recent(self, now: float) -> Work:
        """The steps that ended in the last ``RECENT_S`` seconds, or up to one second more."""
        found = [work for second, work in list(self._slots) if second >= int(now) - RECENT_S]
        return Work(
            sum(work.flops for work in found),
            sum(work.num_bytes for work in found),
            sum(work.seconds for work in found),
        )

    def utilisation(self, now: float) -> Utilisation:
        """Of the recent steps."""
        work, ceilings = self.recent(now), self.ceilings
        return Utilisation(
            flops=_ratio(work.flops, work.seconds * ceilings.flops_s),
            bandwidth=_ratio(work.num_bytes, work.seconds * ceilings.bytes_s),
            intensity=_ratio(work.flops, work.num_bytes),
        )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
