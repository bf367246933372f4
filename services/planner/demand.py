"""How many workers a load needs by the profile, were they all there (pure).

What arrives is measured over the longest time in which it has not changed, so that few requests do
not look like many, and many are noticed at once. Prompts are served by the pool as customers by
clerks: their lengths and moments are random, so a pool that could just do the work would let them
wait for ever longer. What share waits longer than the objective leaves room for is taken from the
M/M/c queue, with the time scaled by the spread of the service as in the Allen-Cunneen approximation
of G/G/c. Decode workers serve all at once, the slower the more: there the objective bounds the
batch, and Little's law says how many run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, exp, log, sqrt

from services.planner.config import LARGEST_POOL
from services.planner.observation import Observation, Window
from services.planner.profile import Profile

SURPRISE = 3.0  # standard deviations by which what came lately must differ to be another load
UNSURE = 0.2  # share of the load by which chance may bend a trend that is looked at
GROWS = 1.05  # times the load of now, from which on a load grows
LEAST_S = 10.0  # what came in a shorter time counts as if it had come in this one
AT_MOST = 2.0  # times the load of now: as much as a trend is believed
BUSIEST = 0.9  # of a prefill pool's time, however patient its clients are
STEP_SHARE = 0.95  # of the decode objective that a full batch may take: batches are not all alike
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


# --- what arrives ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arriving:
    """What comes per second, in tokens or requests."""

    now: float
    later: float  # when workers that are started now will be there
    window: Window  # over which it was measured

    @property
    def grows(self) -> bool:
        return self.later > GROWS * self.now


def arriving(
    windows: tuple[Window, ...], ahead_s: float, amount: Callable[[Window], float], grain: float
) -> Arriving:
    """``windows`` end now and each is twice as long as the one before. ``amount``: what of a window
    is counted; it comes in portions of ``grain``, by a Poisson process as far as chance goes.
    """
    known: list[Window] = []
    for window in windows:
        if window.seconds > (known[-1].seconds if known else 0.0):
            known.append(window)
    if not known:
        return Arriving(0.0, 0.0, Window())
    counts = [amount(window) / grain if grain > 0 else 0.0 for window in known]
    lengths = [window.seconds for window in known]
    place = _steady(counts, lengths)
    now = counts[place] / max(lengths[place], LEAST_S)
    ahead_s += lengths[place] / 2  # from the middle of the window on
    later = min(now + _growth(counts, lengths, ahead_s), AT_MOST * now)
    return Arriving(now * grain, later * grain, known[place])


def _growth(counts: list[float], lengths: list[float], ahead_s: float) -> float:
    """By how much the rate will have grown after ``ahead_s``. A trend shows at all scales, from the
    halves of the longest window to those of the shortest in which it can be told from chance; after
    a sudden change it does not.
    """
    found = []
    for place in range(1, len(counts)):
        half = lengths[place - 1]
        new = counts[place - 1]
        old = (counts[place] - new) * half / (lengths[place] - half)
        by = ahead_s / half**2  # from counts to rates, and from one middle to the moment looked at
        if sqrt(new + old) * by <= UNSURE * counts[place] / lengths[place]:
            found.append((new - old) * by)
    return max(0.0, min(found, default=0.0))


def _steady(counts: list[float], lengths: list[float]) -> int:
    """Which of the windows is the longest within which nothing has changed."""
    place = len(counts) - 1
    while place:
        surprises = [
            _surprise(counts[part], lengths[part], counts[place], lengths[place])
            for part in range(place)
        ]
        largest = max(surprises)
        if largest <= SURPRISE:
            break
        place = surprises.index(largest)
    return place


def _surprise(part: float, part_s: float, whole: float, whole_s: float) -> float:
    """By how many standard deviations the end of a time differs from the rest of it: the square
    root of twice the logarithm of the likelihood ratio of Poisson processes.
    """
    rest, rest_s = max(0.0, whole - part), whole_s - part_s
    if whole <= 0 or rest_s <= 0:
        return 0.0
    mean = whole / whole_s
    ratio = sum(n * log(n / s / mean) for n, s in ((part, part_s), (rest, rest_s)) if n > 0)
    return sqrt(max(0.0, 2 * ratio))


# --- prompts --------------------------------------------------------------------------------------


def mean_prompt(windows: tuple[Window, ...]) -> tuple[float, float]:
    """Tokens to compute of the mean prompt, and the mean of their squares, over the longest time
    that is known.
    """
    for window in reversed(windows):
        if window.requests > 0:
            mean = window.prompt_tokens / window.requests
            return mean, max(mean**2, window.prompt_squares / window.requests)
    return 0.0, 0.0


def prefill_need(
    seen: Observation,
    profile: Profile,
    objective_s: float,
    attainment: float,
    more: float = 1.0,
) -> Need:
    """Of the prefill pool; ``more``: for so many times the load."""
    ahead_s = seen.prefill.start_s + seen.late_s
    mean, squares = mean_prompt(seen.lately)
    grain = squares / mean if mean else 1.0  # a token is likely to come with so many
    tokens = arriving(seen.lately, ahead_s, lambda window: window.prompt_tokens, grain)
    mean, squares = (
        mean_prompt((tokens.window,)) if tokens.window.requests >= 1 else (mean, squares)
    )
    each_s = profile.prefill_s(mean) + profile.prefill_pair * (squares - mean**2) / 2
    token_s = each_s / mean if mean else profile.prefill_token
    load = more * tokens.later * token_s
    spread_s = profile.prefill_s(sqrt(squares)) - profile.prefill_s(mean)  # of one deviation, about
    patience_s = max(objective_s - each_s - 2 * spread_s, objective_s / 10)
    variation = squares / mean**2 if mean else 1.0  # 1 + the squared coefficient of variation
    workers = _clerks(load, each_s * variation / 2, patience_s, (1 - attainment) / 2)
    words = (
        f"{tokens.later:.0f} prompt tokens/s, {each_s:.2g} s for each {mean:.0f}, keep {load:.2f}"
        " workers busy"
    )
    backlog_s = more * seen.queued_tokens * token_s
    behind = _catching_up(seen, backlog_s, load, objective_s, patience_s, ahead_s)
    if behind > workers:
        text = f"{seen.queued_tokens} tokens wait, {backlog_s:.1f} s of work"
        return Need(min(behind, LARGEST_POOL), load, "backlog", text)
    return Need(workers, load, "trend" if tokens.grows else "load", words)


def _catching_up(
    seen: Observation,
    backlog_s: float,
    load: float,
    objective_s: float,
    patience_s: float,
    ahead_s: float,
) -> int:
    """Workers with which, in about the time that it takes to start them, what waits then has been
    worked off so far that nobody waits any more for longer than he may:
    ``(workers - load) time >= backlog then - workers patience``.
    """
    ready = max(1, seen.prefill.ready)
    if backlog_s <= ready * patience_s:
        return 0
    meanwhile = (seen.prefill.ready + max(seen.prefill.ready, seen.prefill.target)) / 2
    then_s = max(0.0, backlog_s + (load - meanwhile) * ahead_s)
    time_s = ahead_s + objective_s
    return ceil((then_s + load * time_s) / (time_s + patience_s))


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


# --- answers --------------------------------------------------------------------------------------


def decode_need(seen: Observation, profile: Profile, objective_s: float, more: float = 1.0) -> Need:
    """Of the decode pool; ``more``: for so many times the load."""
    mean_prompt_tokens, _ = mean_prompt(seen.lately)
    context = max(seen.context, mean_prompt_tokens + seen.answer_tokens / 2)
    batch, bound = batch_limit(seen, profile, objective_s, context)
    ahead_s = seen.decode.start_s + seen.late_s
    answers = arriving(seen.lately, ahead_s, lambda window: window.requests, 1.0)
    expected = answers.later * seen.answer_tokens * profile.decode_s(batch, context)
    here = seen.running  # those that wait for a prompt's sake come when that has been computed
    most = more * max(here, expected + SPREAD * sqrt(expected))
    load = more * max(here, expected) / batch
    workers = min(ceil(most / batch), LARGEST_POOL)
    words = (
        f"{max(here, expected):.1f} answers run at {context:.0f} tokens, and {batch:.0f} a worker"
        f" are as many as {bound} allows"
    )
    ready = seen.decode.ready
    if seen.kv_use >= FREE_UNTIL and ready and workers <= ready:
        return Need(ready + 1, load, "kv", f"{100 * seen.kv_use:.0f} % of the KV blocks are in use")
    reason = "kv" if bound == "KV" else ("trend" if answers.grows and expected > here else "load")
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
