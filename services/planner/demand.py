"""How many workers a load needs by the profile, were they all there (pure).

Prompts are served by the pool as customers by clerks: their lengths and moments are random, so a
pool that could just do the work would let them wait for ever longer. What share waits longer than
the objective leaves room for is taken from the M/M/c queue, with the time scaled by the spread of
the service as in the Allen-Cunneen approximation of G/G/c. Decode workers serve all at once, the
slower the more there are: the objective bounds how many may run, and how many will is the balance
of those that come and of those that end.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, exp, sqrt

from services.planner.arriving import arriving
from services.planner.config import LARGEST_POOL
from services.planner.observation import Observation, Window
from services.planner.profile import Profile

BUSIEST = 0.9  # of a prefill pool's time, however patient its clients are
STEP_SHARE = 0.95  # of the decode objective that a full batch may take: batches are not all alike
SEAT_SHARE = 0.9  # of seats and blocks that are counted on
SPREAD = 1.0  # standard deviations that the number of answers may be above its mean
FREE_UNTIL = 0.95  # share of blocks in use at which answers wait for each other


@dataclass(frozen=True)
class Need:
    """Workers that are enough."""

    workers: int
    reason: str
    words: str


# --- prompts --------------------------------------------------------------------------------------


def mean_prompt(windows: tuple[Window, ...]) -> tuple[float, float]:
    """Tokens to compute of the mean prompt, and the mean of their squares, over the longest time
    that is known.
    """
    for window in reversed(windows):
        if window.requests >= 1:
            mean = window.prompt_tokens / window.requests
            return mean, max(mean**2, window.prompt_squares / window.requests)
    return 0.0, 0.0


@dataclass(frozen=True)
class PrefillLoad:
    """What the prefill pool has to do. Work is in seconds of one worker."""

    tokens: float  # of prompts, per second
    grows: bool
    mean: float  # tokens of a prompt
    each_s: float  # work of one
    variation: float  # 1 + the squared coefficient of its variation
    patience_s: float  # for so long a prompt may wait before its work begins
    waiting: int  # tokens
    ready: int
    coming: int  # workers, those that are ready included
    ahead_s: float  # until workers that are started now will be there
    objective_s: float
    late: float  # share of prompts that may wait for longer than that

    @property
    def token_s(self) -> float:
        """Work per token."""
        return self.each_s / self.mean if self.mean else 0.0

    def need(self, more: float = 1.0) -> Need:
        """For so many times the load."""
        load = more * self.tokens * self.token_s
        workers = self._clerks(load)
        backlog_s = more * self.waiting * self.token_s
        behind = self._behind(load, backlog_s)
        if behind > workers:
            text = f"{self.waiting} tokens wait, {backlog_s:.1f} s of work for one worker"
            return Need(min(behind, LARGEST_POOL), "backlog", text)
        words = (
            f"{self.tokens:.0f} prompt tokens/s, {self.each_s:.2g} s for each {self.mean:.0f}, keep"
            f" {load:.2f} workers busy"
        )
        return Need(workers, "trend" if self.grows else "load", words)

    def _clerks(self, load: float) -> int:
        """Fewest workers among whom no more wait for too long than may."""
        if load <= 0:
            return 0
        service_s = self.each_s * self.variation / 2
        workers = ceil(load / BUSIEST)
        while workers < LARGEST_POOL:
            leaves = exp(-(workers - load) * self.patience_s / service_s)
            if workers > load and waits(workers, load) * leaves <= self.late:
                break
            workers += 1
        return min(workers, LARGEST_POOL)

    def _behind(self, load: float, backlog_s: float) -> int:
        """Workers with which, in about the time that it takes to start them, what waits then has
        been worked off so far that nobody waits any more for longer than he may:
        ``(workers - load) time >= backlog then - workers patience``.
        """
        if backlog_s <= max(1, self.ready) * self.patience_s:
            return 0
        meanwhile = (self.ready + self.coming) / 2
        then_s = max(0.0, backlog_s + (load - meanwhile) * self.ahead_s)
        time_s = self.ahead_s + self.objective_s
        return ceil((then_s + load * time_s) / (time_s + self.patience_s))


def prefill_load(
    seen: Observation, profile: Profile, objective_s: float, attainment: float
) -> PrefillLoad:
    """What is seen, by the profile. Half of the requests that may be late may be so by waiting."""
    pool, windows = seen.prefill, seen.lately or (seen.long,)
    ahead_s = pool.start_s + seen.late_s
    mean, squares = mean_prompt(windows)
    grain = squares / mean if mean else 1.0  # a token is likely to come with so many
    tokens = arriving(windows, ahead_s, lambda window: window.prompt_tokens, grain)
    if tokens.window.requests >= 1:
        mean, squares = mean_prompt((tokens.window,))
    each_s = profile.prefill_s(mean) + profile.prefill_pair * (squares - mean**2) / 2
    spread_s = profile.prefill_s(sqrt(squares)) - profile.prefill_s(mean)  # of one deviation, about
    return PrefillLoad(
        tokens=tokens.later,
        grows=tokens.grows,
        mean=mean or 1.0,
        each_s=each_s if mean else profile.prefill_token,
        variation=squares / mean**2 if mean else 1.0,
        patience_s=max(objective_s - each_s - 2 * spread_s, objective_s / 10),
        waiting=seen.queued_tokens,
        ready=pool.ready,
        coming=max(pool.ready, pool.target),
        ahead_s=ahead_s,
        objective_s=objective_s,
        late=(1 - attainment) / 2,
    )


def prefill_need(
    seen: Observation, profile: Profile, objective_s: float, attainment: float, more: float = 1.0
) -> Need:
    """Of the prefill pool, for so many times the load."""
    return prefill_load(seen, profile, objective_s, attainment).need(more)


def waits(servers: int, load: float) -> float:
    """Share of customers who wait at all, for a load below ``servers`` (Erlang C)."""
    blocked = 1.0  # Erlang B, by its recursion over servers
    for count in range(1, servers + 1):
        blocked = load * blocked / (count + load * blocked)
    return servers * blocked / (servers - load * (1 - blocked))


# --- answers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DecodeLoad:
    """What the decode pool has to do."""

    tokens: float  # of answers, per second
    grows: bool
    here: float  # answers that run
    context: float  # mean tokens of one
    step_s: float  # of a step, whoever is in it ...
    each_s: float  # ... and for each that is
    batch: float  # answers that one worker may run
    bound: str  # by what: TPOT, seats or KV
    kv_use: float
    ready: int

    def need(self, more: float = 1.0) -> Need:
        """For so many times the load."""
        workers = max(self._sharers(more * self.tokens), self._holders(more * self.here))
        if self.kv_use >= FREE_UNTIL and self.ready and workers <= self.ready:
            text = f"{100 * self.kv_use:.0f} % of the KV blocks are in use"
            return Need(self.ready + 1, "kv", text)
        words = (
            f"{self.tokens:.0f} tokens/s of answers, of which {self.here:.0f} run at"
            f" {self.context:.0f} tokens; {self.batch:.0f} a worker are as many as {self.bound}"
            " allows"
        )
        reason = "kv" if self.bound == "KV" else ("trend" if self.grows else "load")
        return Need(workers, reason, words)

    def _sharers(self, tokens: float) -> int:
        """Fewest workers at which hardly ever more answers run than may. Each is the slower the
        more there are, which makes their number negative binomial.
        """
        if tokens <= 0:
            return 0
        workers = max(1, ceil(tokens * self.each_s))
        while workers < LARGEST_POOL:
            idle = 1 - tokens * self.each_s / workers
            if idle > 0:
                mean = tokens * self.step_s / idle
                if mean + SPREAD * sqrt(mean / idle) <= workers * self.batch:
                    break
            workers += 1
        return min(workers, LARGEST_POOL)

    def _holders(self, here: float) -> int:
        """Workers for those that run, less what may be so by chance: answers that have become
        longer are noticed by their number before the first of them ends.
        """
        return min(ceil(max(0.0, here - SPREAD * sqrt(here)) / self.batch), LARGEST_POOL)


def decode_load(seen: Observation, profile: Profile, objective_s: float) -> DecodeLoad:
    """What is seen, by the profile. Who waits for a prompt's sake comes when that is computed, and
    is counted then.
    """
    windows = seen.lately or (seen.long,)
    mean, _ = mean_prompt(windows)
    context = max(seen.context, mean + seen.answer_tokens / 2)
    batch, bound = batch_limit(seen, profile, objective_s, context)
    ahead_s = seen.decode.start_s + seen.late_s
    answers = arriving(windows, ahead_s, lambda window: window.requests, 1.0)
    return DecodeLoad(
        tokens=answers.later * seen.answer_tokens,
        grows=answers.grows,
        here=seen.running,
        context=context,
        step_s=profile.decode_step,
        each_s=profile.decode_seq + profile.decode_pair * context,
        batch=batch,
        bound=bound,
        kv_use=seen.kv_use,
        ready=seen.decode.ready,
    )


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
