"""From what replicas report to an ``Observation`` (pure).

Replicas report flat numbers now and then: counters since they began, and what is so at the moment.
Reports may be lost, come late, twice, or in another order; replicas come, go, and begin again at
zero. So a rate is the growth of counters between two moments, by straight lines between reports,
each router's up to its own latest one. Who has said nothing new for ``FORGET_S`` is forgotten.
Moments (``at``) are of the replica's clock; only for ``late_s`` are they compared with another's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from math import exp, isfinite
from statistics import median

from services.planner.observation import Observation, PoolSeen, Seats, Window
from services.planner.profile import Profile

SHORT_S, LONG_S = 10.0, 60.0  # windows
LATELY_S = (5.0, 10.0, 20.0, 40.0, 80.0, 160.0)  # the same, each twice as long as the last
FORGET_S = 45.0  # without news; what workers were like is remembered all the same
RECENT_STARTS = 9  # of which the median says how long a start takes

ROLES = ("prefill", "decode")
COUNTERS = (
    "requests", "prompt_tokens", "prompt_squares", "answers", "answer_tokens",
    "ttft_good", "ttft_bad", "tpot_good", "tpot_bad",
)  # fmt: skip
"""Of a router, since it began. It also says ``queued`` and ``queued_tokens``, as of now."""

_INDEX = {name: index for index, name in enumerate(COUNTERS)}

PROFILE = tuple(f"profile_{each.name}" for each in fields(Profile))
"""Of a worker, which also says ``running``, ``waiting_tokens``, ``computed_prompt_tokens``,
``cached_prompt_tokens``, ``kv_use``, ``seqs``, ``kv_tokens`` and ``context``.
"""

ANSWERS_S = 120.0  # time over which answers' lengths are averaged
HISTORY_S = max(2 * LONG_S, *LATELY_S)

Stats = Mapping[str, float]
Totals = tuple[float, ...]
"""By counter."""


class Signals:
    """Of one deployment."""

    def __init__(self) -> None:
        self._routers: dict[str, _Router] = {}
        self._workers: dict[tuple[str, str], _Worker] = {}
        self._heard_at: float | None = None  # of any router; before, the first question
        self._cached = _CachedShare()
        self._starts = {role: _Starts() for role in ROLES}
        self._answer_tokens = 0.0
        self._seats = Seats()
        self._profile: dict[str, float] = {}

    def router(self, name: str, at: float, stats: Stats) -> None:
        """What a router says, as of ``at``. Repeated and overtaken reports change nothing."""
        if _is_sound(at, stats):
            self._routers.setdefault(name, _Router()).add(at, stats)

    def worker(self, role: str, name: str, at: float, stats: Stats) -> None:
        """The same of a worker."""
        if not _is_sound(at, stats):
            return
        worker = self._workers.setdefault((role, name), _Worker())
        computed, cached = worker.add(at, stats)
        if role == "prefill":
            self._cached.add(at, computed, cached)

    def here(self, role: str, names: Collection[str]) -> None:
        """Who there is of a role, "router" included. Others have ended: what they did or had is
        with those that are here.
        """
        if role == "router":
            self._routers = {name: its for name, its in self._routers.items() if name in names}
        else:
            self._workers = {
                key: its for key, its in self._workers.items() if key[0] != role or key[1] in names
            }

    def observe(
        self,
        now: float,
        targets: Mapping[str, int],
        ready: Mapping[str, int],
        start_failures: Mapping[str, int] | None = None,
    ) -> Observation:
        """Both pools at ``now``: by role, workers asked for, workers that take work, and starts
        that have failed in a row. Moments must not fall from call to call.
        """
        self._forget(now)
        routers = list(self._routers.values())
        uncached = 1 - self._cached.share
        running, context, kv_use = self._decoding()
        for role in ROLES:
            self._starts[role].see(now, targets.get(role, 0), ready.get(role, 0))
        waiting = sum(
            worker.stats.get("waiting_tokens", 0.0)
            for (role, _), worker in self._workers.items()
            if role == "prefill"
        )
        queued_tokens = sum(router.gauges["queued_tokens"] for router in routers)

        def pool(role: str, slo: str) -> PoolSeen:
            good, bad = (
                sum(router.grown(f"{slo}_{verdict}", LONG_S) for router in routers)
                for verdict in ("good", "bad")
            )
            return PoolSeen(
                target=targets.get(role, 0),
                ready=ready.get(role, 0),
                start_failures=(start_failures or {}).get(role, 0),
                start_s=self._starts[role].typical_s,
                good=good,
                bad=bad,
            )

        return Observation(
            at=now,
            prefill=pool("prefill", "ttft"),
            decode=pool("decode", "tpot"),
            short=_window(routers, SHORT_S, 0.0, uncached),
            long=_window(routers, LONG_S, 0.0, uncached),
            before=_window(routers, LONG_S, LONG_S, uncached),
            lately=tuple(_window(routers, seconds, 0.0, uncached) for seconds in LATELY_S),
            answer_tokens=self._mean_answer(routers),
            queued=round(sum(router.gauges["queued"] for router in routers)),
            queued_tokens=round(queued_tokens * uncached + waiting),
            running=round(running),
            context=context,
            kv_use=kv_use,
            seats=self._seats,
            late_s=self._late_s(now),
        )

    @property
    def profile(self) -> Profile | None:
        """As workers have measured it, each pool its own half; None until both are known."""
        names = [each.name for each in fields(Profile)]
        if not all(name in self._profile for name in names):
            return None
        return Profile(**{name: self._profile[name] for name in names})

    # --- parts -----------------------------------------------------------------------------------

    def _forget(self, now: float) -> None:
        for source in [*self._routers.values(), *self._workers.values()]:
            source.look(now)
        self._routers = {k: v for k, v in self._routers.items() if now - v.heard_at <= FORGET_S}
        self._workers = {k: v for k, v in self._workers.items() if now - v.heard_at <= FORGET_S}

    def _late_s(self, now: float) -> float:
        """Age of the youngest report of any router. As clocks differ, no more than ``FORGET_S`` of
        those that go on reporting; after that, how long they have been silent.
        """
        heard = [router.heard_at for router in self._routers.values()]
        if self._heard_at is None:
            heard.append(now)  # the first question
        self._heard_at = max(heard, default=self._heard_at)
        if self._routers:
            return min(max(0.0, now - max(r.at for r in self._routers.values())), FORGET_S)
        return now - (now if self._heard_at is None else self._heard_at)

    def _decoding(self) -> tuple[float, float, float]:
        """Answers at decode workers, their mean context, and the use of KV. What a worker can hold
        and how fast it is are noted as well: they are wanted when no worker is left.
        """
        for role in ROLES:
            self._note_profile(role)
        stats = [worker.stats for (role, _), worker in self._workers.items() if role == "decode"]
        if not stats:
            return 0.0, 0.0, 0.0
        seqs, kv_tokens = (
            sum(each.get(name, 0.0) for each in stats) / len(stats)
            for name in ("seqs", "kv_tokens")
        )
        self._seats = Seats(int(seqs), int(kv_tokens))
        running = sum(each.get("running", 0.0) for each in stats)
        weighted = sum(each.get("running", 0.0) * each.get("context", 0.0) for each in stats)
        kv_use = sum(each.get("kv_use", 0.0) for each in stats) / len(stats)
        return running, weighted / running if running > 0 else 0.0, min(kv_use, 1.0)

    def _note_profile(self, role: str) -> None:
        """The median of this role's workers: of the other role they know as well, second best."""
        told = [worker.stats for (its, _), worker in self._workers.items() if its == role]
        for name in PROFILE:
            plain = name.removeprefix("profile_")
            values = [each[name] for each in told if name in each]
            if values and (plain.startswith(role) or plain not in self._profile):
                self._profile[plain] = median(values)

    def _mean_answer(self, routers: list[_Router]) -> float:
        ended = sum(router.grown("answers", ANSWERS_S) for router in routers)
        if ended >= 1:
            tokens = sum(router.grown("answer_tokens", ANSWERS_S) for router in routers)
            self._answer_tokens = tokens / ended
        return self._answer_tokens


class _Source:
    """A replica; ``at`` is its latest report's, ``heard_at`` when that was first seen, ours."""

    def __init__(self) -> None:
        self.at = float("-inf")
        self.heard_at = float("-inf")
        self._seen_at = float("-inf")

    def look(self, now: float) -> None:
        if self.at != self._seen_at:
            self._seen_at, self.heard_at = self.at, now


class _Router(_Source):
    def __init__(self) -> None:
        super().__init__()
        self.gauges = {"queued": 0.0, "queued_tokens": 0.0}
        self._last: Totals = (0.0,) * len(COUNTERS)  # as reported
        self._times: list[float] = []  # of the reports of a while ...
        self._totals: list[Totals] = []  # ... and their counters, going on over restarts
        self._ago: dict[float, Totals] = {}  # looked up since the last report

    def add(self, at: float, stats: Stats) -> None:
        if at <= self.at:
            return
        self.at = at
        values = tuple(stats.get(name, 0.0) for name in COUNTERS)
        totals = values
        if self._totals:
            began_again = any(new < old for new, old in zip(values, self._last, strict=True))
            last = (0.0,) * len(values) if began_again else self._last
            totals = tuple(
                total + new - old
                for total, new, old in zip(self._totals[-1], values, last, strict=True)
            )
        self._last = values
        self.gauges = {name: stats.get(name, 0.0) for name in self.gauges}
        self._times.append(at)
        self._totals.append(totals)
        old = bisect_right(self._times, at - HISTORY_S) - 1
        if old > len(self._times) // 2:
            del self._times[:old], self._totals[:old]
        self._ago = {}

    def covered(self, seconds: float, until: float = 0.0) -> float:
        """How much of a window we have reports for; it ended ``until`` seconds before the last."""
        return min(max(0.0, self.at - until - self._times[0]), seconds)

    def grown(self, counter: str, seconds: float, until: float = 0.0) -> float:
        """By how much, within the part of the window that is covered."""
        index = _INDEX[counter]
        return self._total(until)[index] - self._total(until + seconds)[index]

    def _total(self, ago: float) -> Totals:
        """The counters so long before the last report."""
        found = self._ago.get(ago)
        if found is None:
            found = self._ago[ago] = self._look_up(self.at - ago)
        return found

    def _look_up(self, at: float) -> Totals:
        place = bisect_right(self._times, at)
        if place == 0:
            return self._totals[0]
        if place == len(self._times):
            return self._totals[-1]
        early, late = self._times[place - 1], self._times[place]
        share = (at - early) / (late - early)
        pairs = zip(self._totals[place - 1], self._totals[place], strict=True)
        return tuple(before + share * (after - before) for before, after in pairs)


class _Worker(_Source):
    def __init__(self) -> None:
        super().__init__()
        self.stats: Stats = {}

    def add(self, at: float, stats: Stats) -> tuple[float, float]:
        """Prompt tokens that it has computed and found in its cache since the last report."""
        if at <= self.at:
            return 0.0, 0.0
        names = ("computed_prompt_tokens", "cached_prompt_tokens")
        old, new = ([each.get(name, 0.0) for name in names] for each in (self.stats, stats))
        if any(late < early for late, early in zip(new, old, strict=True)):
            old = [0.0, 0.0]
        self.at, self.stats = at, dict(stats)
        computed, cached = (late - early for late, early in zip(new, old, strict=True))
        return computed, cached


class _CachedShare:
    """Share of prompts' tokens that were found in caches, over about the last minute."""

    def __init__(self) -> None:
        self._at = float("-inf")
        self._computed = self._cached = 0.0

    def add(self, at: float, computed: float, cached: float) -> None:
        kept = exp(-max(0.0, at - self._at) / LONG_S)
        self._at = max(at, self._at)
        self._computed = self._computed * kept + computed
        self._cached = self._cached * kept + cached

    @property
    def share(self) -> float:
        both = self._computed + self._cached
        return min(self._cached / both, 0.99) if both > 0 else 0.0


@dataclass
class _Starts:
    """How long workers take from the decision until they take work."""

    target: int = 0
    ready: int = 0
    asked: list[float] = field(default_factory=list)  # moments of starts that are under way
    took: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STARTS))

    @property
    def typical_s(self) -> float:
        return median(self.took) if self.took else 0.0

    def see(self, now: float, target: int, ready: int) -> None:
        for _ in range(min(max(0, ready - self.ready), len(self.asked))):
            self.took.append(now - self.asked.pop(0))
        self.asked += [now] * (target - self.target)
        del self.asked[max(0, target - ready) :]
        self.target, self.ready = target, ready


def _window(routers: list[_Router], seconds: float, until: float, uncached: float) -> Window:
    """Of all routers; one that is known for a part of the window counts as if for all of it. A
    window far in the past of which less than half is known says nothing.
    """
    covered = [(router, router.covered(seconds, until)) for router in routers]
    covered = [
        (router, known) for router, known in covered if known > (seconds / 2 if until else 0)
    ]
    if not covered:
        return Window()
    longest = max(known for _, known in covered)
    requests, tokens, squares = (
        sum(router.grown(name, seconds, until) * longest / known for router, known in covered)
        for name in ("requests", "prompt_tokens", "prompt_squares")
    )
    return Window(longest, requests, tokens * uncached, squares * uncached**2)


def _is_sound(at: float, stats: Stats) -> bool:
    return isfinite(at) and all(isfinite(value) and value >= 0 for value in stats.values())
