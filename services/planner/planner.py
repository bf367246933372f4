"""``decide``: how many workers each pool is to have (pure: no I/O, no clock, no Ray).

::

    need by the profile ─► times what attainment says ─► limits ─► budget ─► cool-downs ─► target

Both pools are looked at together: they share the budget, and first tokens that are late because
decode workers have no room are no reason for more prefill workers. Each part is a function of its
own. Going up is quick; going down waits until fewer would have been enough for ``down_after_s``; a
change of direction, until ``cooldown_s`` after the last one. From none to one nothing waits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, inf, sqrt

from services.planner.arriving import LEAST_S
from services.planner.config import PoolScaling, ScalingConfig
from services.planner.demand import DecodeLoad, Need, PrefillLoad, decode_load, prefill_load
from services.planner.observation import (
    Decision,
    Memory,
    Observation,
    PoolDecision,
    PoolMemory,
    PoolSeen,
)
from services.planner.profile import Profile

SLACK = 1.05  # a pool is left as it is while the load is within so much of what it is for
STALE_S = 60.0  # nothing was heard of for so long: nothing is known
JUDGED_S = 60.0  # time that attainment looks back
SURE = 3.0  # standard deviations by which attainment must be below what is wanted
CORRECT_BY, FORGET_BY = 1.15, 0.95  # the correction, when objectives are missed and when met
LARGEST_CORRECTION = 4.0
LASTING = ("idle", "limits", "budget")  # reasons that are said as long as they hold
FAILURES = 3  # starts that fail in a row, after which no more are tried for some time
HOLD_S = (60.0, 900.0)  # that time: at first, at most; it doubles


@dataclass(frozen=True)
class _Pool:
    """What concerns one pool."""

    role: str
    config: PoolScaling
    seen: PoolSeen
    past: PoolMemory
    up: Need  # for the load
    down: Need  # for ``SLACK`` times the load


def decide(
    seen: Observation, profile: Profile | None, config: ScalingConfig, past: Memory
) -> Decision:
    """Both targets. Without a profile nobody knows what a load needs, and without news not even
    the load: pools keep their size, and wake up when asked.
    """
    quiet = seen.is_idle and seen.late_s < STALE_S
    busy_at = past.busy_at if quiet and past.busy_at is not None else seen.at
    idle = seen.at - busy_at >= config.idle_s
    pools = [_pool(role, seen, profile, config, past) for role in ("prefill", "decode")]
    wanted = [_within_limits(pool, seen, idle) for pool in pools]
    shared = _share(wanted, pools, config.budget)
    decided, memories = [], []
    for pool, want in zip(pools, shared, strict=True):
        decision, memory = _settle(pool, want, seen.at, seen.known_s)
        decided.append(decision)
        memories.append(memory)
    decided = _fit(decided, pools, config.budget)
    memories = [
        _remember(memory, pool.seen.target, decision.target, seen.at)
        for memory, pool, decision in zip(memories, pools, decided, strict=True)
    ]
    return Decision(decided[0], decided[1], Memory(memories[0], memories[1], busy_at))


# --- what the load needs --------------------------------------------------------------------------


def _pool(
    role: str, seen: Observation, profile: Profile | None, config: ScalingConfig, past: Memory
) -> _Pool:
    own: PoolScaling = getattr(config, role)
    here: PoolSeen = getattr(seen, role)
    memory: PoolMemory = getattr(past, role)
    if profile is None or seen.late_s >= STALE_S:
        words = "no profile says what the load needs"
        if profile is not None:
            words = f"nothing was heard of routers for {seen.late_s:.0f} s"
        keep = Need(here.target, "steady", words)
        return _Pool(role, own, here, memory, keep, keep)
    here = replace(here, start_s=here.start_s or config.start_s)
    seen = replace(seen, prefill=here) if role == "prefill" else replace(seen, decode=here)
    memory = _corrected(role, seen, config, memory)
    load: PrefillLoad | DecodeLoad
    if role == "prefill":
        load = prefill_load(seen, profile, own.objective_s, config.attainment)
    else:
        load = decode_load(seen, profile, own.objective_s)
    up, down = load.need(memory.correction / SLACK), load.need(memory.correction * SLACK)
    if memory.correction > 1.05 and up.workers > here.target:
        text = f"{up.words}, times {memory.correction:.2f} as objectives are missed"
        up = replace(up, reason="attainment", words=text)
    return _Pool(role, own, here, memory, up, down)


def _corrected(
    role: str, seen: Observation, config: ScalingConfig, memory: PoolMemory
) -> PoolMemory:
    """What was measured corrects the profile, slowly, and only when the pool has been as it was
    wanted for as long as a verdict may be old: while workers start, or wait for accelerators,
    objectives are missed whatever the profile says.
    """
    pool: PoolSeen = getattr(seen, role)
    judged, wanted = pool.good + pool.bad, config.attainment
    answer_s = seen.answer_tokens * config.decode.objective_s  # verdicts come with the last token
    settled_s = JUDGED_S + answer_s + seen.late_s
    since = max(memory.grown_at + pool.start_s, memory.corrected_at)
    if not judged or seen.at - since < settled_s:
        return memory
    missed = pool.bad - (1 - wanted) * judged
    sure = missed > SURE * sqrt((1 - wanted) * wanted * judged)
    correction = memory.correction
    if not sure:
        correction = max(1.0, correction * FORGET_BY)
    elif pool.ready >= pool.target and not (role == "prefill" and _is_blocked(seen)):
        correction = min(correction * CORRECT_BY, LARGEST_CORRECTION)
    return replace(memory, correction=correction, corrected_at=seen.at)


def _is_blocked(seen: Observation) -> bool:
    """First tokens are late because decode workers have no room."""
    return seen.queued > 0 and seen.kv_use > 0.9


# --- limits and budget ----------------------------------------------------------------------------


def _within_limits(pool: _Pool, seen: Observation, idle: bool) -> PoolDecision:
    """The need within min and max, with no worker at all only when nobody wants one."""
    need, config = pool.up, pool.config
    if not config.scales:
        return PoolDecision(pool.seen.target, need.workers, "fixed", "its size is fixed")
    if idle:
        return PoolDecision(config.min, 0, "idle", "nobody has asked for anything lately")
    if pool.seen.target == 0 and not seen.is_idle:
        count = min(max(need.workers, config.min, 1), config.max)
        return PoolDecision(count, need.workers, "wake", f"{seen.queued} answers wait for a worker")
    least = max(config.min, 1 if pool.seen.target else 0)
    target = min(max(need.workers, least), config.max)
    if need.workers > config.max:
        words = f"{need.workers} are needed, max is {config.max}: {need.words}"
        return PoolDecision(target, need.workers, "limits", words)
    return PoolDecision(target, need.workers, need.reason, need.words)


def _share(wanted: list[PoolDecision], pools: list[_Pool], budget: int) -> list[PoolDecision]:
    """What each may want of the accelerators: the next one goes to who has least of its need."""
    costs = [pool.config.devices for pool in pools]
    if not budget or sum(c * w.target for c, w in zip(costs, wanted, strict=True)) <= budget:
        return wanted
    given = [
        min(want.target, max(pool.config.min, 1)) if pool.config.scales else want.target
        for want, pool in zip(wanted, pools, strict=True)
    ]
    left = budget - sum(c * g for c, g in zip(costs, given, strict=True))
    while True:
        open_ = [i for i in (0, 1) if given[i] < wanted[i].target and costs[i] <= left]
        if not open_:
            break
        i = min(open_, key=lambda i: given[i] / wanted[i].target)
        given[i] += 1
        left -= costs[i]
    return [
        want
        if count == want.target
        else PoolDecision(count, want.need, "budget", f"{want.target} wanted: {want.words}")
        for want, count in zip(wanted, given, strict=True)
    ]


def _fit(decided: list[PoolDecision], pools: list[_Pool], budget: int) -> list[PoolDecision]:
    """While one pool waits to shrink, the other cannot have its accelerators yet."""
    costs = [pool.config.devices for pool in pools]
    over = sum(c * d.target for c, d in zip(costs, decided, strict=True)) - budget
    if not budget or over <= 0:
        return decided
    fitted = list(decided)
    for i in (0, 1):
        grown = decided[i].target - pools[i].seen.target
        if grown > 0 and costs[i] and over > 0:
            back = min(grown, ceil(over / costs[i]))
            over -= back * costs[i]
            words = f"{decided[i].target} wanted, and accelerators are not free yet"
            fitted[i] = replace(
                decided[i], target=decided[i].target - back, reason="budget", words=words
            )
    return fitted


# --- cool-downs -----------------------------------------------------------------------------------


def _settle(
    pool: _Pool, want: PoolDecision, now: float, known_s: float
) -> tuple[PoolDecision, PoolMemory]:
    """When the pool may have what it wants, and what is remembered if that is not now."""
    config, seen, past = pool.config, pool.seen, _held(pool, now)
    if not config.scales:
        return want, past
    works = max(seen.ready, config.min)
    if now < past.held_until and max(want.target, seen.target) > works:
        words = f"{seen.start_failures} starts have failed in a row; the next is tried later"
        return PoolDecision(works, want.need, "start_failures", words), past
    enough = max(min(pool.down.workers, config.max), want.target)
    if known_s < LEAST_S:  # the load counts as less than it is, as after a controller's restart
        enough = max(enough, min(seen.target, config.max))
    if want.reason == "idle":
        enough = want.target
    if want.reason == "budget":
        enough = want.target  # the other pool is worse off
    past = replace(past, needs=_thinned([*past.needs, (now, enough)], now, config.down_after_s))
    target = want.target
    if target > seen.target:
        return _up(pool, want, past, now), past
    target = max(count for _, count in past.needs)
    watched = now - min(past.needs)[0] >= 0.9 * config.down_after_s
    if want.reason == "idle":
        target, watched = want.target, True  # for longer than that, nobody has asked
    if target >= seen.target or not watched:
        if want.target != seen.target:
            want = replace(want, target=seen.target, reason="cooldown")
        elif want.reason not in LASTING:
            want = replace(want, reason="steady")
        return want, past
    if not _may_turn(past, -1, config, now):
        return replace(want, target=seen.target, reason="cooldown"), past
    return replace(want, target=target), past


def _up(pool: _Pool, want: PoolDecision, past: PoolMemory, now: float) -> PoolDecision:
    config, seen = pool.config, pool.seen
    if want.reason == "wake":
        return want
    too_soon = past.direction > 0 and now - past.changed_at < config.up_cooldown_s
    if too_soon or not _may_turn(past, +1, config, now):
        return replace(want, target=seen.target, reason="cooldown")
    return want


def _may_turn(past: PoolMemory, direction: int, config: PoolScaling, now: float) -> bool:
    return past.direction in (0, direction) or now - past.reversed_at >= config.cooldown_s


def _held(pool: _Pool, now: float) -> PoolMemory:
    """Hold back further starts, the longer the more have failed."""
    past, failures = pool.past, pool.seen.start_failures
    if failures < FAILURES or failures <= past.failures:
        return replace(past, failures=failures)
    first, longest = HOLD_S
    hold_s = min(first * 2.0 ** min(failures - FAILURES, 10), longest)
    return replace(past, failures=failures, held_until=now + hold_s)


def _thinned(
    needs: list[tuple[float, int]], now: float, window_s: float
) -> tuple[tuple[float, int], ...]:
    """The largest need of each twentieth of the window: enough to know the largest of it. The last
    one before it stays as well: so far back is known, however rarely it is looked.
    """
    begins = max((at for at, _ in needs if now - at >= window_s), default=-inf)
    slots: dict[int, tuple[float, int]] = {}
    size = max(window_s / 20, 1e-9)
    for at, count in needs:
        if at >= begins:
            slot = int(at / size)
            first = slots.get(slot, (at, count))
            slots[slot] = (first[0], max(first[1], count))
    return tuple(slots.values())


def _remember(memory: PoolMemory, before: int, target: int, now: float) -> PoolMemory:
    if target == before:
        return memory
    direction = 1 if target > before else -1
    turned = memory.direction not in (0, direction)
    return replace(
        memory,
        direction=direction,
        changed_at=now,
        grown_at=now if direction > 0 else memory.grown_at,
        reversed_at=now if turned else memory.reversed_at,
    )
