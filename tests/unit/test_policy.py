"""Choosing a pair: proofs, limits, room, turns."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from router.policy import (
    Demand,
    Key,
    Pair,
    View,
    WorkerView,
    candidates,
    choose,
    has_room,
    other_decode,
    usable_pairs,
)

P1, P2, D1, D2, M1 = (("P1", 1), ("P2", 1), ("D1", 1), ("D2", 1), ("M1", 1))


def worker(key: Key, **changes: object) -> WorkerView:
    role = {"P": "prefill", "D": "decode", "M": "mixed"}[key[0][0]]
    view = WorkerView(
        key,
        role,
        usable=True,
        kv_blocks=65,
        block_size=16,
        max_model_len=1000,
        max_num_seqs=4,
        token_budget=256,
        free_blocks=64,
    )
    return replace(view, **changes)  # type: ignore[arg-type]


def view(*workers: WorkerView, policy: str = "least-loaded", alone: bool = False) -> View:
    known = {w.key: w for w in workers}
    proven = {Pair(p, d) for p in known for d in known if (p[0][0], d[0][0]) == ("P", "D")}
    proven |= {Pair(None, m) for m in known if m[0][0] == "M"}
    return View(known, frozenset(set() if alone else proven), policy)


SHORT = Demand(num_tokens=10, max_tokens=10)


def test_only_proven_pairs_of_usable_workers() -> None:
    assert choose(SHORT, view(worker(P1), worker(D1))) == Pair(P1, D1)
    assert choose(SHORT, view(worker(P1), worker(D1), alone=True)) is None
    assert usable_pairs(view(worker(P1, usable=False), worker(D1))) == []
    assert usable_pairs(view(worker(P1), worker(D1, usable=False))) == []
    gone = View({D1: worker(D1)}, frozenset({Pair(P1, D1)}))
    assert usable_pairs(gone) == []
    assert choose(SHORT, view(worker(M1))) == Pair(None, M1)


@pytest.mark.parametrize("policy", ["round-robin", "least-loaded"])
def test_turns_are_fair(policy: str) -> None:
    workers = {key: worker(key) for key in (P1, P2, D1, D2)}
    chosen: Counter[Pair] = Counter()
    for turn in range(40):
        pair = choose(SHORT, view(*workers.values(), policy=policy))
        assert pair is not None
        assert pair.prefill is not None
        chosen[pair] += 1
        for key in (pair.prefill, pair.decode):
            workers[key] = replace(workers[key], last_turn=turn)
    used = Counter[Key]()
    for pair, count in chosen.items():
        used[pair.decode] += count
        assert pair.prefill is not None
        used[pair.prefill] += count
    assert set(used.values()) == {20}


def test_least_loaded_looks_at_both_sides() -> None:
    busy = view(
        worker(P1, pending_short=10, pending_long=90),
        worker(P2, pending_short=12),
        worker(D1, num_seqs=1),
        worker(D2, num_seqs=2),
    )
    assert choose(SHORT, busy) == Pair(P2, D1)
    assert choose(SHORT, view(worker(P1), worker(D1), worker(M1, num_seqs=1))) == Pair(P1, D1)
    assert choose(SHORT, view(worker(P1), worker(D1, num_seqs=2), worker(M1))) == Pair(None, M1)


@pytest.mark.parametrize(
    "closed",
    [
        (worker(P1, pending_short=512), worker(D1)),
        (worker(P1), worker(D1, num_seqs=4)),
        (worker(P1), worker(D1, free_blocks=0)),
        (worker(M1, pending_short=512),),
        (worker(M1, free_blocks=0),),
    ],
)
def test_waits_for_room_but_stays_a_candidate(closed: tuple[WorkerView, ...]) -> None:
    assert choose(SHORT, view(*closed)) is None
    assert len(candidates(SHORT, view(*closed))) == 1


@pytest.mark.parametrize("role", ["prefill", "mixed"])
@pytest.mark.parametrize(
    ("num_tokens", "short", "long", "is_open"),
    [
        (256, 511, 5000, True),  # it fits one step, and less than two steps of such are there
        (256, 512, 0, False),
        (257, 5000, 511, True),
        (257, 0, 512, False),
    ],
)
def test_short_and_long_prompts_wait_for_their_own_kind(
    num_tokens: int, short: int, long: int, is_open: bool, role: str
) -> None:
    prefill = worker(P1 if role == "prefill" else M1, pending_short=short, pending_long=long)
    decode = worker(D1) if role == "prefill" else prefill
    demand = Demand(num_tokens, 10)
    assert (choose(demand, view(prefill, decode)) is not None) == is_open
    assert has_room(demand, view(prefill, decode))
    full = replace(decode, free_blocks=0)
    assert choose(demand, view(prefill, full)) is None
    assert not has_room(demand, view(prefill, full))
    assert has_room(replace(demand, max_tokens=1), view(prefill, full)) == (role == "prefill")


def test_one_token_does_not_wait_for_d() -> None:
    full = view(worker(P1), worker(D1, free_blocks=0, num_seqs=4))
    assert choose(Demand(10, 1), full) == Pair(P1, D1)
    assert choose(Demand(10, 1), view(worker(M1, free_blocks=0))) is None


def test_room_for_the_first_token_too() -> None:
    at = view(worker(P1), worker(D1, free_blocks=1))
    assert choose(Demand(15, 5), at) is not None
    assert choose(Demand(16, 5), at) is None


@pytest.mark.parametrize(
    ("p", "d", "fits"),
    [
        ({}, {}, True),
        ({"max_model_len": 119}, {}, False),
        ({}, {"max_model_len": 119}, False),
        ({"max_model_len": 120}, {"max_model_len": 120}, True),
        ({"kv_blocks": 7}, {}, False),  # 6 usable blocks: 96 tokens
        ({"kv_blocks": 8}, {}, True),  # 112: the prompt fits, the answer is D's
        ({}, {"kv_blocks": 8}, False),
        ({}, {"kv_blocks": 9}, True),
    ],
)
def test_limits_of_both(p: dict[str, int], d: dict[str, int], fits: bool) -> None:
    pairs = candidates(Demand(100, 20), view(worker(P1, **p), worker(D1, **d)))
    assert bool(pairs) == fits


def test_avoided_workers_and_recompute() -> None:
    both = view(worker(P1), worker(P2), worker(D1))
    demand = Demand(10, 10, avoid=frozenset({P1}))
    assert choose(demand, both) == Pair(P2, D1)
    alone = view(worker(P1), worker(D1))
    assert choose(demand, alone) is None
    assert choose(replace(demand, recompute=True), alone) == Pair(None, D1)
    nobody = replace(demand, recompute=True, avoid=frozenset({P1, D1}))
    assert candidates(nobody, alone) == []


def test_after_too_many_prefills_a_decode_worker_computes_it() -> None:
    both = view(worker(P1), worker(P2), worker(D1), worker(M1))
    demand = Demand(10, 10, recompute=True, no_prefill=True)
    assert candidates(demand, both) == [Pair(None, M1)]
    assert choose(demand, view(worker(P1), worker(D1))) == Pair(None, D1)


def test_local_prefill_only_when_nobody_else_is_there() -> None:
    """B042: decode workers take new prompts only if they may, and only without prefill workers."""
    local = Pair(None, D1)
    at = view(worker(P1), worker(D1), worker(M1))
    with_local = replace(at, proven=at.proven | {local})
    assert local not in usable_pairs(with_local)
    assert set(usable_pairs(with_local)) == {Pair(P1, D1), Pair(None, M1)}
    alone = view(worker(P1, usable=False), worker(D1))
    assert choose(SHORT, alone) is None
    assert choose(SHORT, replace(alone, proven=alone.proven | {local})) == local
    down = view(worker(P1, usable=False), worker(D1, usable=False))
    assert usable_pairs(replace(down, proven=down.proven | {local})) == []


def test_who_takes_a_ticket_over() -> None:
    at = view(worker(P1), worker(P2), worker(D1), worker(D2, num_seqs=1))
    demand = Demand(40, 10)
    assert other_decode(demand, P1, at) == D1
    assert other_decode(replace(demand, avoid=frozenset({D1})), P1, at) == D2
    assert other_decode(replace(demand, avoid=frozenset({D1, D2})), P1, at) is None
    assert other_decode(demand, P1, replace(at, proven=frozenset({Pair(P1, D2)}))) == D2
    assert other_decode(demand, P1, replace(at, proven=frozenset({Pair(P2, D2)}))) is None
    for change in ({"free_blocks": 2}, {"num_seqs": 4}, {"usable": False}, {"max_model_len": 49}):
        assert other_decode(demand, P1, view(worker(P1), worker(D1, **change))) is None
    # P takes no new work any more, but what it has computed can be pulled.
    assert other_decode(demand, P1, view(worker(P1, usable=False), worker(D1))) == D1
    assert other_decode(demand, P1, view(worker(D1))) is None
