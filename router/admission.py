"""Whether a request may wait for a pair, and who goes next (pure).

Refusing at the door is the kind way: what can never fit is told so at once and names the limit,
and what would wait behind too many others is told to come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.errors import BadRequest, QueueFull, RequestError, Unavailable
from router.policy import Demand, Pair, View, candidates, choose, has_room, usable_pairs

WINDOW = 64
"""Requests at the front of the queue that are looked at, which takes time whenever one ends."""

HELD_TOKENS = 4_000_000
"""Of prompts that wait for a worker to start: some 200 MB, however long each of them is."""

WAKE_RETRY_AFTER_S = 10
"""A worker that starts takes longer than one that is busy."""


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
        reason = "no prefill and decode workers that could serve this are ready"
        return Unavailable(reason).rejects("no_workers")
    best = max(pairs, key=lambda limits: (min(limits.context, limits.pool), limits.prompt))
    if num_prompt >= best.context:
        return BadRequest(
            f"the prompt has {num_prompt} tokens; with at least one token of answer it exceeds "
            f"the model's maximum context length of {best.context} tokens",
            param="prompt",
        ).rejects("too_long")
    if num_prompt > best.prompt or num_prompt >= best.pool:
        return BadRequest(
            f"the prompt has {num_prompt} tokens; the KV pools of this deployment hold "
            f"{min(best.prompt, best.pool - 1)}",
            param="prompt",
        ).rejects("too_long")
    room = best.context - num_prompt
    if max_tokens is None:
        room = min(room, best.pool - num_prompt)
    granted = room if max_tokens is None else min(max_tokens, room)
    if num_prompt + granted > best.pool:
        return BadRequest(
            f"{num_prompt} tokens of prompt and {granted} of answer do not fit the KV pool, which "
            f"holds {best.pool} tokens",
            param="max_tokens",
        ).rejects("too_long")
    if num_queued >= max_queue:
        full = QueueFull(f"{num_queued} requests are waiting already; try again")
        return full.rejects("queue_full")
    return Admitted(granted)


def hold(num_prompt: int, num_queued: int, held_tokens: int, max_queue: int) -> QueueFull | None:
    """None: a request may wait until there is a worker, though nobody can say yet if one could
    serve it. ``held_tokens``: of the prompts of those that wait so.
    """
    if num_queued < max_queue and held_tokens + num_prompt <= HELD_TOKENS:
        return None
    error = QueueFull(f"{num_queued} requests wait for workers to start already; try again")
    error.retry_after_s = WAKE_RETRY_AFTER_S
    return error.rejects("queue_full")


def max_context(view: View) -> int | None:
    """Longest prompt and answer that a usable pair takes; None when there is no pair."""
    return max((_limits(pair, view).context for pair in usable_pairs(view)), default=None)


@dataclass(frozen=True)
class Waiting:
    """A request in the queue; ``bypassed`` is how many later ones have gone before it while it
    waited for room.
    """

    demand: Demand
    bypassed: int


@dataclass(frozen=True)
class Picked:
    """Who goes next, where to, and which earlier ones it bypasses that wait for room. Requests are
    named by their index in the queue.
    """

    index: int
    pair: Pair
    bypassed: tuple[int, ...]


def window(max_bypass: int) -> int:
    """How many requests at the front of the queue are looked at."""
    return max(WINDOW, max_bypass + 1)


def pick(queue: Sequence[Waiting], view: View, max_bypass: int) -> Picked | None:
    """First come, first served, with two exceptions.

    A request that waits for more room than there is lets at most ``max_bypass`` later ones pass, so
    that it neither blocks light ones nor starves. A long prompt that waits only for its turn lets
    short ones pass that need not wait for it: its turn does not depend on them.
    """
    crowded: list[int] = []
    for index, waiting in enumerate(queue[: window(max_bypass)]):
        pair = choose(waiting.demand, view)
        if pair is not None:
            return Picked(index, pair, tuple(crowded))
        if not has_room(waiting.demand, view):
            if waiting.bypassed >= max_bypass:
                return None
            crowded.append(index)
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
