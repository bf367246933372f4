"""What the router knows of a request that is over, as spans and attributes (pure).

Names follow OpenTelemetry's conventions for generative AI where they have one; they say nothing of
attempts, stages and objectives, which are ``baton.*``. Texts are never recorded, nor who asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from router.observation import AttemptSeen, Observation
from router.tracing import Attribute, Event, Span

if TYPE_CHECKING:
    from router.openai_api import GenerationFields

Attributes = dict[str, Attribute]


def span_name(endpoint: str, model: str) -> str:
    """Of a request's own span. ``endpoint``: chat or completions."""
    return f"{_operation(endpoint)} {model}"


def asked(request: GenerationFields, reply_id: str) -> Attributes:
    """What a client has asked for."""
    given: dict[str, Attribute | None] = {
        "gen_ai.request.max_tokens": request.limit,
        "gen_ai.request.temperature": request.temperature,
        "gen_ai.request.top_p": request.top_p,
        "gen_ai.request.top_k": request.top_k,
        "gen_ai.request.seed": request.seed,
        "gen_ai.request.choice.count": request.n,
        "gen_ai.response.id": reply_id,
    }
    return {name: value for name, value in given.items() if value is not None}


def answered(finish_reasons: Iterable[str | None]) -> Attributes:
    """How the answers ended, those that did."""
    reasons = tuple(reason for reason in finish_reasons if reason)
    return {"gen_ai.response.finish_reasons": reasons} if reasons else {}


def seen_of(seen: Observation) -> Attributes:
    """What became of the request."""
    about: dict[str, Attribute | None] = {
        "gen_ai.operation.name": _operation(seen.endpoint),
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": seen.model,
        "gen_ai.response.model": seen.model,
        "gen_ai.request.stream": seen.stream,
        "gen_ai.usage.input_tokens": seen.prompt_tokens,
        "gen_ai.usage.output_tokens": seen.tokens,
        "gen_ai.usage.cache_read.input_tokens": seen.cached_tokens,
        "gen_ai.response.time_to_first_chunk": seen.ttft_s if seen.stream else None,
        "http.request.method": "POST",
        "http.route": f"/v1/{'chat/completions' if seen.endpoint == 'chat' else seen.endpoint}",
        "http.response.status_code": seen.code,
        "baton.request.id": seen.request_id or None,
        "baton.retries": seen.retries,
        "baton.ttft": seen.ttft_s,
        "baton.tpot": seen.tpot_s,
        "baton.slo.good": seen.good,
        "baton.rejection": seen.rejection or None,
        "baton.left_in": seen.left_in or None,
    }
    for stages in (seen.stages, seen.next_stages):
        about |= {f"baton.stage.{name}": took for name, took in (stages or {}).items()}
    return {name: value for name, value in about.items() if value is not None}


def parts_of(seen: Observation) -> list[Span]:
    """The spans of the router's own work."""
    parts, origin = [], seen.origin
    if seen.tokenized_at is not None:
        parts.append(Span("tokenize", origin, origin + seen.tokenized_at))
    ended_at = seen.ended_at if seen.ended_at is not None else 0.0
    for index, choice in enumerate(seen.choices):
        # An answer that is complete may have waited for the others of its request.
        last = None if seen.error_type else choice.last_at
        end = ended_at if last is None else last
        about: Attributes = {"baton.choice": index} if len(seen.choices) > 1 else {}
        waits_from = seen.tokenized_at or 0.0
        for number, attempt in enumerate(choice.attempts, 1):
            began, ended = attempt.began_at, attempt.ended_at
            ids: Attributes = about | {"baton.attempt": number}
            parts.append(Span("queue", origin + waits_from, origin + began, ids))
            waits_from = ended if ended is not None else end
            parts.append(_attempt(attempt, origin, waits_from, ids))
        over = not choice.attempts or choice.attempts[-1].ended_at is not None
        if over and seen.error_type:  # it waited for another pair, in vain
            error = seen.error_type
            parts.append(Span("queue", origin + waits_from, origin + end, about, error))
    return parts


def _attempt(attempt: AttemptSeen, origin: float, end: float, ids: Attributes) -> Span:
    """One pair's work at one answer, as the router saw it; the workers have spans of their own."""
    workers: Attributes = {"baton.prefill": attempt.prefill, "baton.decode": attempt.decode}
    if attempt.replaced:
        workers["baton.replaced"] = attempt.replaced
    named: Attributes = {name: value for name, value in workers.items() if value}
    return Span(
        "attempt",
        origin + attempt.began_at,
        origin + end,
        ids | named,
        attempt.failure,
        tuple(_events(attempt, origin)),
    )


def _events(attempt: AttemptSeen, origin: float) -> Iterator[Event]:
    for name, at in (
        ("reserved", attempt.reserved_at),
        ("prompt_sent", attempt.sent_at),
        ("first_token", attempt.first_at),
        ("handed_off", attempt.handed_at),
        ("pulled", attempt.pulled_at),
        ("second_token", attempt.next_at),
    ):
        if at is not None:
            yield Event(name, origin + at)


def _operation(endpoint: str) -> str:
    return "chat" if endpoint == "chat" else "text_completion"
