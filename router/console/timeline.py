"""From what a request has seen to what the page draws (pure)."""

from __future__ import annotations

from router.events import Span, Timeline
from router.observation import AttemptSeen, ChoiceSeen, Observation

MAX_ATTEMPTS = 16  # that are drawn of one request, the latest


def timeline(seen: Observation) -> Timeline:
    """The request as the console shows it; of several answers, the spans of the first."""
    choice = seen.choices[0] if seen.choices else None
    return Timeline(
        id=seen.request_id,
        at=seen.at,
        endpoint=seen.endpoint,
        stream=seen.stream,
        prompt_tokens=seen.prompt_tokens,
        cached_tokens=seen.cached_tokens,
        tokens=seen.tokens,
        choices=len(seen.choices),
        spans=_spans(seen, choice),
        retries=_retries(choice.attempts) if choice else (),
        ttft_s=seen.ttft_s,
        tpot_s=seen.tpot_s,
        end_s=seen.ended_at,
        code=seen.code,
        error=seen.error or seen.error_type,
        good=seen.good,
    )


def _spans(seen: Observation, choice: ChoiceSeen | None) -> tuple[Span, ...]:
    tokenized = seen.tokenized_at
    spans = [Span("tokenize", 0.0, seen.ended_at if tokenized is None else tokenized)]
    if tokenized is None:
        return tuple(spans)
    # An answer that is over may be waiting for others of the same request.
    done = seen.ended_at is not None and seen.code < 400 and choice is not None
    end = choice.last_at if done and choice else seen.ended_at
    since = tokenized
    for attempt in choice.attempts[-MAX_ATTEMPTS:] if choice else ():
        until = end if attempt.ended_at is None else attempt.ended_at
        spans += _of_attempt(attempt, since, until)
        since = spans[-1].end_s if spans[-1].end_s is not None else since
    if choice is None or not choice.attempts or choice.attempts[-1].ended_at is not None:
        spans.append(Span("queue", since, end))
    return tuple(span for span in spans if span.end_s is None or span.end_s > span.start_s)


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
    moved = attempt.pulled_at if attempt.pulled_at is not None else attempt.next_at
    if moved is None:
        return [*spans, Span("lost" if failed else "transfer", first, until, attempt.decode)]
    # Early parts may have moved all of it before the first token was even known.
    moved = max(first, moved)
    return [
        *spans,
        Span("transfer", first, moved, attempt.decode),
        Span("decode", moved, until, attempt.decode),
    ]


def _retries(attempts: tuple[AttemptSeen, ...]) -> tuple[tuple[float, str], ...]:
    found = []
    for attempt in attempts:
        if attempt.replaced:
            found.append((attempt.began_at, f"{attempt.replaced} was replaced"))
        if attempt.ended_at is not None:
            found.append((attempt.ended_at, attempt.failure))
    return tuple(found)
