"""What one HTTP request has seen, from its arrival to its end (pure).

Moments (``*_at``) are seconds since the request was read completely; of one that never was, since
it arrived. Durations end in ``_s``. The stages of the first token and of the second::

    read ─tokenize─► (queue) ─► pair found ─route─► reserved ─► (queue at P) ─prefill─► first token
    first token ─write─► first content written, or known where nothing is streamed
    written ─kv_transfer─► admitted at D ─decode_admit─► D's step ─first_decode─► second one written

Both sums are exact: what no worker accounts for, the way there and back included, is ``queue`` of
the first and ``kv_transfer`` of the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

FIRST_STAGES = ("tokenize", "route", "queue", "prefill", "write")
SECOND_STAGES = ("kv_transfer", "decode_admit", "first_decode")


@dataclass(frozen=True)
class AttemptSeen:
    """One attempt at one answer. ``prefill`` and ``decode`` are worker ids, "" for none."""

    prefill: str
    decode: str
    began_at: float  # a pair has room
    reserved_at: float | None = None  # D has set blocks aside
    sent_at: float | None = None  # the prompt went to the worker that computes it
    first_at: float | None = None  # the first token of this attempt is known
    handed_at: float | None = None  # D was told to decode
    pulled_at: float | None = None  # ... and has the KV
    next_at: float | None = None  # the first token from D is known, where P has made the first
    ended_at: float | None = None  # the attempt failed
    failure: str = ""  # why, as it is counted: "prefill lost", "pull", ...
    replaced: str = ""  # id of a D that failed, and whose place ``decode`` has taken
    prefill_s: float = 0.0  # computing the prompt, by the clock of the worker that did
    admit_s: float = 0.0  # from the KV's admission at D to the first step, by D's clock
    step_s: float = 0.0  # that step, by D's clock

    @property
    def made_first(self) -> str:
        """The worker that computes the prompt."""
        return self.prefill or self.decode


@dataclass(frozen=True)
class ChoiceSeen:
    """One answer of a request, over all its attempts."""

    prompt_tokens: int
    cached_tokens: int  # of them, not computed
    tokens: int  # made so far
    attempts: tuple[AttemptSeen, ...] = ()
    first_at: float | None = None  # first content was written; not streamed: was known
    last_at: float | None = None  # the same of the latest
    second_at: float | None = None  # the same of the second token, if each came by itself

    @property
    def retries(self) -> int:
        """Attempts that were followed by another, and workers that were replaced in one."""
        return max(0, len(self.attempts) - 1) + sum(bool(a.replaced) for a in self.attempts)


@dataclass(frozen=True)
class Observation:
    """One HTTP request for tokens. While it goes on, ``ended_at`` is None and ``code`` 0."""

    request_id: str  # "" when it was refused before it had one
    model: str
    endpoint: str  # chat | completions
    stream: bool
    at: float  # time of day (seconds since 1970) of moment 0
    origin: float  # moment 0 on time.monotonic
    arrived_at: float  # its headers were here; zero or less
    tokenized_at: float | None = None
    ended_at: float | None = None
    code: int = 0  # HTTP status; of a stream that broke, that of its error; 499: the client left
    error_type: str = ""  # see ERROR_TYPES
    error: str = ""  # what the client was told
    rejection: str = ""  # queue_full | queue_timeout | too_long | no_workers
    left_in: str = ""  # the client left in: queue | prefill | transfer | decode
    choices: tuple[ChoiceSeen, ...] = ()
    ttft_s: float | None = None
    tpot_s: float | None = None
    stages: Mapping[str, float] | None = None  # of the first token, all FIRST_STAGES
    next_stages: Mapping[str, float] | None = None  # of the second, all SECOND_STAGES
    ttft_good: bool | None = None  # None: says nothing about this objective
    tpot_good: bool | None = None
    good: bool | None = None  # all that can be said is good, and the request did not fail

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each once."""
        return sum(choice.prompt_tokens for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        """Of them, those that were not computed."""
        return sum(choice.cached_tokens for choice in self.choices)

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(choice.tokens for choice in self.choices)

    @property
    def retries(self) -> int:
        """How often another worker had to go on."""
        return sum(choice.retries for choice in self.choices)


STATUSES = (200, 400, 401, 404, 413, 429, 499, 500, 503, 504)
"""What a request for tokens can end by: 200, or an error of ``router.errors``."""

ERROR_TYPES = {
    401: "unauthorized", 404: "not_found", 413: "too_large", 429: "overload", 499: "cancelled",
    503: "unavailable", 504: "deadline",
}  # fmt: skip

WRONG_REQUESTS = ("validation", "unauthorized", "not_found", "too_large")
"""Types of errors that say something of the request, and nothing of us."""


def error_type(status: int) -> str:
    """The label of an HTTP status."""
    if status < 400:
        return ""
    return ERROR_TYPES.get(status) or ("validation" if status < 500 else "internal")


def is_our_fault(status: int) -> bool:
    """Whether a request that ends so has failed its user: refused for lack of room counts."""
    return status >= 500 or status == 429


def judged(seen: Observation, ttft_slo_s: float, tpot_slo_s: float) -> Observation:
    """Say of a request that has ended which objectives it met.

    One that failed by our fault is bad, for the objective that it was on the way to as well. A
    client that left counts for what it had seen, having waited for too long included. What is wrong
    with the request itself says nothing about us.
    """
    if seen.ended_at is None or seen.error_type in WRONG_REQUESTS:
        return seen
    ours, left = is_our_fault(seen.code), seen.error_type == "cancelled"
    ttft_good: bool | None = None
    tpot_good: bool | None = None
    if seen.ttft_s is not None:
        ttft_good = seen.ttft_s <= ttft_slo_s
    elif ours or (left and seen.tokenized_at is not None and seen.ended_at > ttft_slo_s):
        ttft_good = False
    if ours and seen.ttft_s is not None:
        tpot_good = False
    elif seen.tpot_s is not None:
        tpot_good = seen.tpot_s <= tpot_slo_s
    good = None if ttft_good is None else ttft_good and tpot_good is not False and not ours
    return replace(seen, ttft_good=ttft_good, tpot_good=tpot_good, good=good)


def first_stages(
    tokenized_at: float, attempt: AttemptSeen, written_at: float
) -> dict[str, float] | None:
    """How long each stage of the first token took; the sum is ``written_at``, which is the TTFT.

    ``attempt`` is the one that made it. Time in attempts before it is time in the queue.
    """
    if attempt.first_at is None or attempt.sent_at is None:
        return None
    known_at = min(attempt.first_at, written_at)
    reserved = attempt.reserved_at
    route = 0.0 if reserved is None else max(0.0, min(reserved, known_at) - attempt.began_at)
    prefill = max(0.0, min(attempt.prefill_s, known_at - attempt.sent_at))
    return {
        "tokenize": tokenized_at,
        "route": route,
        "queue": max(0.0, known_at - tokenized_at - route - prefill),
        "prefill": prefill,
        "write": written_at - known_at,
    }


def second_stages(attempt: AttemptSeen, choice: ChoiceSeen) -> dict[str, float] | None:
    """How long each stage of the second token took; the sum is the gap between the two, as they
    were written. Where one chunk holds both, it is the gap between what the router knew.

    Only where one pair made both, and D was not replaced in between.
    """
    if attempt.first_at is None or attempt.next_at is None or not attempt.prefill:
        return None
    if attempt.replaced:
        return None
    begin, end = attempt.first_at, attempt.next_at
    if choice.first_at is not None and choice.second_at is not None:
        begin, end = choice.first_at, max(choice.second_at, end)
    gap = max(0.0, end - begin)
    step = min(attempt.step_s + end - attempt.next_at, gap)
    admit = min(attempt.admit_s, gap - step)
    return {"kv_transfer": gap - step - admit, "decode_admit": admit, "first_decode": step}


def stage_of(attempts: tuple[AttemptSeen, ...]) -> str:
    """Where an answer is: queue, prefill, transfer or decode."""
    if not attempts or attempts[-1].ended_at is not None:
        return "queue"
    last = attempts[-1]
    if last.first_at is None:
        return "prefill"
    moved = not last.prefill or last.pulled_at is not None or last.next_at is not None
    return "decode" if moved else "transfer"
