"""What a decision is made of: both pools, and what arrives (pure).

Times are seconds, rates are per second, moments (``at``) are of one clock, whatever it starts from.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Window:
    """Answers that were asked for within some time."""

    seconds: float = 0.0  # how long that was; 0: nothing is known
    requests: float = 0.0
    prompt_tokens: float = 0.0  # of all of them, less what prefix caches hold
    prompt_squares: float = 0.0  # the sum of the squares of their prompts' tokens

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.requests / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class PoolSeen:
    """One pool now."""

    target: int = 0  # workers that were asked for
    ready: int = 0  # of them, those that take work
    start_failures: int = 0  # starts that failed, one after the other, since the last good one
    start_s: float = 0.0  # from the decision to a worker's first request, as seen; 0: never seen
    good: float = 0.0  # requests of the last minute that met this pool's objective ...
    bad: float = 0.0  # ... and those that did not

    @property
    def attainment(self) -> float | None:
        """Share of good requests; None when nobody can say, as in an idle minute."""
        judged = self.good + self.bad
        return self.good / judged if judged > 0 else None


@dataclass(frozen=True)
class Seats:
    """What one decode worker can hold."""

    seqs: int = 0  # sequences; 0: not known
    kv_tokens: int = 0  # tokens of KV; 0: not known


@dataclass(frozen=True)
class Observation:
    """Both pools and their load, at one moment."""

    at: float
    prefill: PoolSeen = PoolSeen()
    decode: PoolSeen = PoolSeen()
    short: Window = Window()  # the last seconds
    long: Window = Window()  # the last minute
    before: Window = Window()  # the minute before that
    lately: tuple[Window, ...] = ()  # up to now, the shortest first, each twice as long as the last
    answer_tokens: float = 0.0  # mean of the answers that have ended lately; 0: none has
    queued: int = 0  # answers that wait in routers for a pair
    queued_tokens: int = 0  # of prompts that are not computed, in routers and at prefill workers
    running: int = 0  # answers at decode workers, those with a reservation included
    context: float = 0.0  # mean tokens of the running ones; 0: none runs
    kv_use: float = 0.0  # share of decode workers' blocks that is not free
    seats: Seats = Seats()
    late_s: float = 0.0  # age of what is said here

    @property
    def is_idle(self) -> bool:
        """Nobody asks, waits or runs."""
        return not (self.queued or self.running or self.queued_tokens or self.short.requests)

    @property
    def known_s(self) -> float:
        """Length of the longest time over which it is known what arrived."""
        return max(window.seconds for window in (*self.lately, self.long))


@dataclass(frozen=True)
class PoolMemory:
    """What a decision leaves for the next one."""

    direction: int = 0  # of the last change: +1, -1, 0 for none yet
    changed_at: float = float("-inf")
    grown_at: float = float("-inf")  # the last increase
    reversed_at: float = float("-inf")
    needs: tuple[tuple[float, int], ...] = ()  # (at, workers that would have been enough), lately
    correction: float = 1.0  # the load is so many times what the profile says
    corrected_at: float = float("-inf")
    failures: int = 0  # start failures that were seen ...
    held_until: float = float("-inf")  # ... and because of which no more are started


@dataclass(frozen=True)
class Memory:
    """Of both pools; goes from each decision to the next."""

    prefill: PoolMemory = PoolMemory()
    decode: PoolMemory = PoolMemory()
    busy_at: float | None = None  # when something was last asked for


@dataclass(frozen=True)
class PoolDecision:
    """How many workers a pool is to have, and why."""

    target: int
    need: int  # workers that the load needs, before limits and cool-downs
    reason: str  # one of REASONS
    words: str  # the same as a sentence


@dataclass(frozen=True)
class Decision:
    """Of both pools."""

    prefill: PoolDecision
    decode: PoolDecision
    memory: Memory = field(repr=False)


REASONS = (
    "steady", "load", "backlog", "trend", "attainment", "kv", "idle", "wake", "cooldown", "budget",
    "limits", "start_failures", "fixed",
)  # fmt: skip
"""Why a target is what it is: values of a label."""
