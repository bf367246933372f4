"""From what a request has seen to what the page draws (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from router.observation import AttemptSeen, Observation

MAX_ATTEMPTS = 16  # that are drawn of one request, the latest
MAX_ERROR = 300  # characters


@dataclass(frozen=True)
class Span:
    """One stage of a request, at a worker or (``worker`` is empty) in the router.

    Seconds since the request was read completely.
    """

    stage: str  # tokenize | queue | prefill | transfer | decode | lost (an attempt that failed)
    start_s: float
    end_s: float | None = None  # None: it goes on
    worker: str = ""


def timeline(seen: Observation) -> dict[str, Any]:
    """The request as it travels to the page; of several answers, the spans of the first."""
    choice = seen.choices[0] if seen.choices else None
    retries = _retries(choice.attempts) if choice else ()
    return {
        "id": seen.request_id,
        "at": round(seen.at, 4),
        "endpoint": seen.endpoint,
        "stream": seen.stream,
        "prompt": seen.prompt_tokens,
        "cached": seen.cached_tokens,
        "tokens": seen.tokens,
        "choices": len(seen.choices),
        "spans": [
            [span.stage, _rounded(span.start_s), _rounded(span.end_s), span.worker]
            for span in spans(seen)
        ],
        "retries": [[_rounded(at), why] for at, why in retries],
        "ttft": _rounded(seen.ttft_s),
        "tpot": _rounded(seen.tpot_s),
        "end": _rounded(seen.ended_at),
        "code": seen.code,
        "error": (seen.error or seen.error_type)[:MAX_ERROR],
        "good": seen.good,
    }


def spans(seen: Observation) -> list[Span]:
    """Where the request was, one stage after the other; empty ones are left out."""
    found = _all_spans(seen)
    return [span for span in found if span.end_s is None or span.end_s > span.start_s]


def _all_spans(seen: Observation) -> list[Span]:
    choice = seen.choices[0] if seen.choices else None
    if seen.tokenized_at is None:
        return [Span("tokenize", 0.0, seen.ended_at)]
    found = [Span("tokenize", 0.0, seen.tokenized_at)]
    end = seen.ended_at
    if seen.code == 200 and choice is not None and choice.last_at is not None:
        end = choice.last_at  # it may have waited for others of the same request
    since = seen.tokenized_at
    for attempt in choice.attempts[-MAX_ATTEMPTS:] if choice else ():
        until = end if attempt.ended_at is None else attempt.ended_at
        found += _of_attempt(attempt, since, until)
        since = found[-1].end_s if found[-1].end_s is not None else since
    if choice is None or not choice.attempts or choice.attempts[-1].ended_at is not None:
        found.append(Span("queue", since, end))
    return found


def _of_attempt(attempt: AttemptSeen, since: float, until: float | None) -> list[Span]:
    """From the queue to ``until``: its end, or None where it goes on."""
    failed = attempt.ended_at is not None
    maker, sent, first = attempt.made_first, attempt.sent_at, attempt.first_at
    if sent is None:
        return [Span("queue", since, until)]
    spans = [Span("queue", since, sent)]
    if first is None:
        return [*spans, Span("lost" if failed else "prefill", sent, until, maker)]
    # Its worker says how long it computed; what is before that is waiting there.
    began = max(sent, first - attempt.prefill_s) if attempt.prefill_s else sent
    spans += [Span("queue", sent, began, maker), Span("prefill", began, first, maker)]
    if until is not None and until <= first:
        return spans
    if not attempt.prefill or not attempt.decode:
        return [*spans, Span("decode", first, until, maker)]
    moved = _moved_at(attempt)
    if moved is None:
        return [*spans, Span("lost" if failed else "transfer", first, until, attempt.decode)]
    # Early parts may have moved all of it before the first token was even known.
    moved = max(first, moved)
    return [
        *spans,
        Span("transfer", first, moved, attempt.decode),
        Span("decode", moved, until, attempt.decode),
    ]


def _moved_at(attempt: AttemptSeen) -> float | None:
    """When D had the KV. As for the metrics it is what D's own clock leaves of the time until its
    first token, once that has come; until then, when we heard of it.
    """
    if attempt.next_at is not None and attempt.step_s:
        return attempt.next_at - attempt.step_s - attempt.admit_s
    return attempt.pulled_at if attempt.pulled_at is not None else attempt.next_at


def _retries(attempts: tuple[AttemptSeen, ...]) -> tuple[tuple[float, str], ...]:
    found = []
    for attempt in attempts:
        if attempt.replaced:
            found.append((attempt.began_at, f"{attempt.replaced} was replaced"))
        if attempt.ended_at is not None:
            found.append((attempt.ended_at, attempt.failure))
    return tuple(found)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)
