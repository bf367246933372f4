"""How many workers a load needs by the profile, were they all there (pure).

Prompts are served by the pool as customers by clerks: their lengths and moments are random, so a
pool that could just do the work would let them wait for ever longer. What share waits longer than
the objective leaves room for is taken from the M/M/c queue, with the time scaled by the spread of
the service as in the Allen-Cunneen approximation of G/G/c. Decode workers serve all at once, the
slower the more: there the objective bounds the batch, and Little's law says how many run.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, exp, sqrt

from services.planner.config import LARGEST_POOL
from services.planner.observation import Observation, Window
from services.planner.profile import Profile

SURPRISE = 2.0  # standard deviations by which a short window counts against a long one
AT_MOST = 2.0  # times the rate of now: as much as a trend is believed
BUSIEST = 0.85  # of a prefill pool's time, however patient its clients are
STEP_SHARE = (
    0.85  # of the decode objective that a full batch may take: prompts' first steps come in
)
SEAT_SHARE = 0.9  # of seats and blocks that are counted on
SPREAD = 1.65  # standard deviations of how many answers run, beyond the mean: 95 % of the time
FREE_UNTIL = 0.95  # share of blocks in use at which answers wait for each other


@dataclass(frozen=True)
class Need:
    """Workers that are enough. ``load`` is in workers' time, not rounded."""

    workers: int
    load: float
    reason: str
    words: str


def expected_rate(seen: Observation, ahead_s: float) -> tuple[float, bool]:
    """Requests per second that workers started now will meet, and whether a trend says so.

    A short window counts when it is more above the long one than chance explains; what the last
    minute grew by, it is expected to grow on by.
    """
    now = _rate_now(seen.short, seen.long)
    if not (seen.long.seconds and seen.before.seconds):
        return now, False
    noise = sqrt(seen.long.requests + seen.before.requests) / seen.long.seconds
    growth = seen.long.rate - seen.before.rate
    if growth <= SURPRISE * noise:
        return now, False
    later = min(now + growth * ahead_s / seen.long.seconds, AT_MOST * now)
    return max(now, later), later > now


def _rate_now(short: Window, long: Window) -> float:
    expected = long.rate * short.seconds
    if short.requests > expected + SURPRISE * sqrt(max(1.0, expected)):
        return short.rate
    if short.requests < expected - 2 * SURPRISE * sqrt(max(1.0, expected)):
        return short.rate  # it has ended; fewer workers are a matter of patience, not of noise
    return long.rate


def mean_prompt(seen: Observation) -> tuple[float, float]:
    """Tokens to compute of the mean prompt, and the mean of their squares."""
    window = seen.long if seen.long.requests else seen.short
    if not window.requests:
        return 0.0, 0.0
    mean = window.prompt_tokens / window.requests
    return mean, max(mean**2, window.prompt_squares / window.requests)


def prefill_need(
    seen: Observation,
    profile: Profile,
    objective_s: float,
    attainment: float,
    more: float = 1.0,
) -> Need:
    """Of the prefill pool; ``more``: for so many times the load."""
    ahead_s = seen.prefill.start_s
    rate, grows = expected_rate(seen, ahead_s)
    mean, squares = mean_prompt(seen)
    service_s = profile.prefill_s(mean) if mean else 0.0
    spread_s = profile.prefill_s(sqrt(squares)) - service_s  # of one deviation, about
    load = more * rate * service_s
    patience_s = max(objective_s - service_s - 2 * spread_s, objective_s / 10)
    variation = squares / mean**2 if mean else 1.0  # 1 + the squared coefficient of variation
    workers = _clerks(load, service_s * variation / 2, patience_s, (1 - attainment) / 2)
    words = (
        f"{rate:.2f} prompts/s of {mean:.0f} tokens, {service_s:.2g} s each, keep {load:.2f}"
        " workers busy"
    )
    backlog_s = more * seen.queued_tokens * _token_s(profile, mean)
    left_s = backlog_s - max(0.0, seen.prefill.ready - load) * ahead_s
    behind = ceil(load + left_s / max(objective_s, 1.0)) if left_s > objective_s else 0
    if behind > workers:
        text = f"{seen.queued_tokens} tokens wait, {backlog_s:.1f} s of work"
        return Need(min(behind, LARGEST_POOL), load, "backlog", text)
    return Need(workers, load, "trend" if grows else "load", words)


def _token_s(profile: Profile, mean: float) -> float:
    """Seconds per token of prompts that are about so long."""
    return profile.prefill_s(mean) / mean if mean else profile.prefill_token


def _clerks(load: float, service_s: float, patience_s: float, late: float) -> int:
    """Fewest workers among whom at most a share ``late`` waits longer than ``patience_s``."""
    if load <= 0:
        return 0
    workers = max(1, ceil(load / BUSIEST))
    while workers < LARGEST_POOL:
        free = workers - load
        if free > 0 and waits(workers, load) * exp(-free * patience_s / service_s) <= late:
            break
        workers += 1
    return min(workers, LARGEST_POOL)


def waits(servers: int, load: float) -> float:
    """Share of customers who wait at all, for a load below ``servers`` (Erlang C)."""
    blocked = 1.0  # Erlang B, by its recursion over servers
    for count in range(1, servers + 1):
        blocked = load * blocked / (count + load * blocked)
    return servers * blocked / (servers - load * (1 - blocked))


def decode_need(seen: Observation, profile: Profile, objective_s: float, more: float = 1.0) -> Need:
    """Of the decode pool; ``more``: for so many times the load."""
    mean_prompt_tokens, _ = mean_prompt(seen)
    context = max(seen.context, mean_prompt_tokens + seen.answer_tokens / 2)
    batch, bound = batch_limit(seen, profile, objective_s, context)
    rate, grows = expected_rate(seen, seen.decode.start_s)
    expected = rate * seen.answer_tokens * profile.decode_s(batch, context)
    here = seen.running + seen.queued
    runs = more * max(here, expected)
    load = runs / batch
    workers = min(ceil((runs + SPREAD * sqrt(expected * more)) / batch), LARGEST_POOL)
    words = (
        f"{max(here, expected):.1f} answers run at {context:.0f} tokens, and {batch:.0f} a worker"
        f" are as many as {bound} allows"
    )
    ready = seen.decode.ready
    if seen.kv_use >= FREE_UNTIL and ready and workers <= ready:
        return Need(ready + 1, load, "kv", f"{100 * seen.kv_use:.0f} % of the KV blocks are in use")
    reason = "kv" if bound == "KV" else ("trend" if grows and expected > here else "load")
    return Need(workers, load, reason, words)


def batch_limit(
    seen: Observation, profile: Profile, objective_s: float, context: float
) -> tuple[float, str]:
    """Answers that one worker may run, and what bounds them: TPOT, seats or KV."""
    limits = [(profile.batch_within(STEP_SHARE * objective_s, context), "TPOT")]
    if seen.seats.seqs:
        limits.append((SEAT_SHARE * seen.seats.seqs, "seats"))
    if seen.seats.kv_tokens and context:
        whole = max(context, 1.0) + seen.answer_tokens / 2
        limits.append((SEAT_SHARE * seen.seats.kv_tokens / whole, "KV"))
    limit, bound = min(limits)
    return max(1.0, min(limit, 4096.0)), bound
