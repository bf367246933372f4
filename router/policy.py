"""Which workers serve a request (pure: integers in, a pair out).

A pair is a prefill and a decode worker, or one mixed worker. It is a candidate when it has been
proven by a real generation, both workers take new work, and the request fits its limits. It is
open when, besides, it is the prompt's turn, as the prefill side is about to run out of work, and
the decode side has room. Prompts of one step and longer ones wait for their own kind only: a worker
computes the short ones first, and keeps half of its steps for the long ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Key = tuple[str, int]
"""A worker's incarnation: (worker_id, epoch)."""


@dataclass(frozen=True)
class Pair:
    """Who does what. ``prefill`` is None when ``decode`` computes everything itself."""

    prefill: Key | None
    decode: Key


@dataclass(frozen=True)
class WorkerView:
    """One worker, as well as the router knows: its last report and what was sent since."""

    key: Key
    role: str
    usable: bool  # connected, ready, and its engine moves
    kv_blocks: int  # block 0 is reserved
    block_size: int
    max_model_len: int
    max_num_seqs: int
    token_budget: int
    num_seqs: int = 0  # running and waiting there
    pending_short: int = 0  # tokens not yet computed there of this router's prompts of one step
    pending_long: int = 0  # ... and of all others
    free_blocks: int = 0  # free, or cached and evictable
    last_turn: int = -1  # when it was last chosen, in choices of this router

    @property
    def pool_tokens(self) -> int:
        """Tokens whose KV fits the empty pool."""
        return (self.kv_blocks - 1) * self.block_size

    @property
    def pending_tokens(self) -> int:
        """All that is not yet computed there."""
        return self.pending_short + self.pending_long


@dataclass(frozen=True)
class View:
    """What a choice is made of. ``proven``: pairs that have passed a real generation."""

    workers: dict[Key, WorkerView]
    proven: frozenset[Pair]
    policy: str = "least-loaded"
    prefill_ahead: float = 2.0  # see RouterConfig


@dataclass(frozen=True)
class Demand:
    """What a request needs. ``num_tokens`` have to be computed, ``max_tokens`` may follow."""

    num_tokens: int
    max_tokens: int
    avoid: frozenset[Key] = frozenset()  # workers at which this request failed before
    recompute: bool = False  # a decode worker may compute all of it, when no other pair is left
    no_prefill: bool = False  # ... and must: prefill workers have failed it too often


def usable_pairs(view: View) -> list[Pair]:
    """Proven pairs whose workers take new work.

    Decode workers that compute prompts themselves count only when there is nobody else.
    """
    pairs = [
        pair
        for pair in view.proven
        if _usable(pair.decode, view) and (pair.prefill is None or _usable(pair.prefill, view))
    ]
    return [pair for pair in pairs if not is_local(pair, view)] or pairs


def members(pairs: Iterable[Pair]) -> set[Key]:
    """The workers of these pairs."""
    return {key for pair in pairs for key in (pair.prefill, pair.decode) if key is not None}


def is_local(pair: Pair, view: View) -> bool:
    """Whether a decode worker does the work of a prefill worker."""
    return pair.prefill is None and view.workers[pair.decode].role == "decode"


def candidates(demand: Demand, view: View) -> list[Pair]:
    """Usable pairs that could ever serve this, however busy they are now."""
    pairs = [
        pair
        for pair in usable_pairs(view)
        if pair.decode not in demand.avoid
        and pair.prefill not in demand.avoid
        and not (demand.no_prefill and pair.prefill is not None)
        and fits(demand, pair, view)
    ]
    if pairs or not demand.recompute:
        return pairs
    alone = [
        Pair(None, key)
        for key, worker in view.workers.items()
        if worker.usable and worker.role != "prefill" and key not in demand.avoid
    ]
    return [pair for pair in alone if fits(demand, pair, view)]


def choose(demand: Demand, view: View) -> Pair | None:
    """The best open pair, or None when the request has to wait."""
    pairs = [pair for pair in candidates(demand, view) if _is_open(demand, pair, view)]
    if not pairs:
        return None
    order = _round_robin if view.policy == "round-robin" else _least_loaded
    return min(pairs, key=lambda pair: order(*_sides(pair, view)))


def has_room(demand: Demand, view: View) -> bool:
    """Whether some pair has room for the request, so that it waits for nothing but its turn."""
    return any(_has_place(demand, pair, view) for pair in candidates(demand, view))


def other_decode(demand: Demand, prefill: Key, view: View) -> Key | None:
    """The decode worker that takes over, now, what ``prefill`` computes or has computed."""
    if prefill not in view.workers:
        return None
    keys = [
        pair.decode
        for pair in view.proven
        if pair.prefill == prefill
        and pair.decode not in demand.avoid
        and _usable(pair.decode, view)
        and fits(demand, pair, view)
        and _has_room(demand, view.workers[pair.decode])
    ]
    order = _round_robin if view.policy == "round-robin" else _least_loaded
    return min(keys, key=lambda key: order(view.workers[prefill], view.workers[key]), default=None)


def fits(demand: Demand, pair: Pair, view: View) -> bool:
    """Whether prompt and answer fit the limits of both workers, were they empty."""
    total = demand.num_tokens + demand.max_tokens
    prefill, decode = _sides(pair, view)
    return (
        total <= min(prefill.max_model_len, decode.max_model_len)
        and demand.num_tokens <= prefill.pool_tokens
        and total <= decode.pool_tokens
    )


def _sides(pair: Pair, view: View) -> tuple[WorkerView, WorkerView]:
    decode = view.workers[pair.decode]
    return (decode if pair.prefill is None else view.workers[pair.prefill]), decode


def _usable(key: Key, view: View) -> bool:
    return key in view.workers and view.workers[key].usable


def _is_open(demand: Demand, pair: Pair, view: View) -> bool:
    prefill, _ = _sides(pair, view)
    short = demand.num_tokens <= prefill.token_budget
    pending = prefill.pending_short if short else prefill.pending_long
    in_turn = pending < view.prefill_ahead * prefill.token_budget
    return in_turn and _has_place(demand, pair, view)


def _has_place(demand: Demand, pair: Pair, view: View) -> bool:
    if demand.max_tokens == 1 and pair.prefill is not None:
        return True  # the first token is the whole answer: D is not touched
    return _has_room(demand, view.workers[pair.decode])


def _has_room(demand: Demand, decode: WorkerView) -> bool:
    blocks = -(-(demand.num_tokens + 1) // decode.block_size)
    return decode.num_seqs < decode.max_num_seqs and decode.free_blocks >= blocks


def _round_robin(prefill: WorkerView, decode: WorkerView) -> tuple[object, ...]:
    return prefill.last_turn, decode.last_turn, prefill.key, decode.key


def _least_loaded(prefill: WorkerView, decode: WorkerView) -> tuple[object, ...]:
    return (
        prefill.pending_tokens,
        decode.num_seqs,
        prefill.last_turn,
        -decode.free_blocks,
        decode.last_turn,
        prefill.key,
        decode.key,
    )
