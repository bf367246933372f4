"""Whether a request may wait for a pair, and who goes next (pure).

Refusing at the door is the kind way: what can never fit is told so at once and names the limit,
and what would wait behind too many others is told to come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.errors import BadRequest, QueueFull, RequestError, Unavailable
from router.policy import Demand, Pair, View, candidates, choose, usable_pairs


@dataclass(frozen=True)
class Admitted:
    """The request may wait for a pair. ``max_tokens`` is what it gets at most."""

    max_tokens: int


@dataclass(frozen=True)
class Limits:
    """What the best pair can hold, in tokens."""

    context: int  # prompt and answer: the smaller max_model_len of the pair
    prompt: int  # the prompt, in the prefill side's pool
    pool: int  # prompt and answer, in the decode side's pool


def admit(
    num_prompt: int, max_tokens: int | None, view: View, num_queued: int, max_queue: int
) -> Admitted | RequestError:
    """``max_tokens``: what the client asked for; None is as much as there is room for."""
    pairs = [_limits(pair, view) for pair in usable_pairs(view)]
    if not pairs:
        return Unavailable("no prefill and decode workers that could serve this are ready")
    best = max(pairs, key=lambda limits: (min(limits.context, limits.pool), limits.prompt))
    if num_prompt >= best.context:
        return BadRequest(
            f"the prompt has {num_prompt} tokens; with at least one token of answer it exceeds "
            f"the model's maximum context length of {best.context} tokens",
            param="prompt",
        )
    if num_prompt > best.prompt or num_prompt >= best.pool:
        return BadRequest(
            f"the prompt has {num_prompt} tokens; the KV pools of this deployment hold "
            f"{min(best.prompt, best.pool - 1)}",
            param="prompt",
        )
    room = best.context - num_prompt
    if max_tokens is None:
        room = min(room, best.pool - num_prompt)
    granted = room if max_tokens is None else min(max_tokens, room)
    if num_prompt + granted > best.pool:
        return BadRequest(
            f"{num_prompt} tokens of prompt and {granted} of answer do not fit the KV pool, which "
            f"holds {best.pool} tokens",
            param="max_tokens",
        )
    if num_queued >= max_queue:
        return QueueFull(f"{num_queued} requests are waiting already; try again")
    return Admitted(granted)


@dataclass(frozen=True)
class Waiting:
    """A request in the queue; ``bypassed`` is how many later ones have gone before it."""

    demand: Demand
    bypassed: int


def pick(queue: Sequence[Waiting], view: View, max_bypass: int) -> tuple[int, Pair] | None:
    """The index of the request that goes next, and its pair.

    First come, first served; but a request that waits for more room than there is lets at most
    ``max_bypass`` later ones pass, so that it neither blocks light ones nor starves.
    """
    for index, waiting in enumerate(queue[: max_bypass + 1]):
        pair = choose(waiting.demand, view)
        if pair is not None:
            return index, pair
        if waiting.bypassed >= max_bypass:
            return None
    return None


def hopeless(queue: Sequence[Waiting], view: View) -> list[int]:
    """Indices of the requests that no worker of now could ever serve."""
    return [i for i, waiting in enumerate(queue) if not candidates(waiting.demand, view)]


def _limits(pair: Pair, view: View) -> Limits:
    decode = view.workers[pair.decode]
    prefill = decode if pair.prefill is None else view.workers[pair.prefill]
    return Limits(
        context=min(prefill.max_model_len, decode.max_model_len),
        prompt=prefill.pool_tokens,
        pool=decode.pool_tokens,
    )
