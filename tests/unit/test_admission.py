"""Refusing at the door, and who goes next."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.admission import WINDOW, Admitted, Picked, Waiting, admit, hopeless, pick
from router.errors import BadRequest, QueueFull, Unavailable
from router.policy import Demand, Pair, View, WorkerView

P, D = ("P", 1), ("D", 1)


def worker(role: str, **changes: object) -> WorkerView:
    view = WorkerView(
        (role[0].upper(), 1),
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


def view(p: dict[str, object] | None = None, d: dict[str, object] | None = None) -> View:
    workers = {P: worker("prefill", **(p or {})), D: worker("decode", **(d or {}))}
    return View(workers, frozenset({Pair(P, D)}))


def test_gets_what_it_asks_for_or_what_is_left() -> None:
    assert admit(10, 5, view(), 0, 4) == Admitted(5)
    assert admit(10, None, view(), 0, 4) == Admitted(990)
    assert admit(10, 10**12, view(), 0, 4) == Admitted(990)
    assert admit(999, 5, view(), 0, 4) == Admitted(1)


@pytest.mark.parametrize("side", [0, 1])
def test_the_smaller_limit_of_the_pair_counts(side: int) -> None:
    """B013: P and D may differ."""
    sides: list[dict[str, object]] = [{}, {}]
    sides[side] = {"max_model_len": 50}
    refused = admit(50, 1, view(*sides), 0, 4)
    assert isinstance(refused, BadRequest)
    assert "50 tokens" in refused.message
    assert admit(49, 1, view(*sides), 0, 4) == Admitted(1)


def test_pools_smaller_than_the_context() -> None:
    small: dict[str, object] = {"kv_blocks": 5}  # 64 tokens
    for refused in (
        admit(65, 1, view(p=small), 0, 4),
        admit(64, 1, view(d=small), 0, 4),
        admit(40, 30, view(d=small), 0, 4),
    ):
        assert isinstance(refused, BadRequest)
        assert "KV pool" in refused.message
    assert admit(64, 30, view(p=small), 0, 4) == Admitted(30)
    assert admit(40, None, view(d=small), 0, 4) == Admitted(24)


def test_best_pair_decides() -> None:
    workers = {
        P: worker("prefill"),
        D: worker("decode", max_model_len=50),
        ("D2", 1): worker("decode", key=("D2", 1), max_model_len=500),
    }
    both = View(workers, frozenset({Pair(P, D), Pair(P, ("D2", 1))}))
    assert admit(10, None, both, 0, 4) == Admitted(490)


def test_nobody_and_too_many() -> None:
    nobody = admit(10, 5, View({}, frozenset()), 0, 4)
    assert isinstance(nobody, Unavailable)
    assert nobody.headers() == {"retry-after": "1"}
    assert isinstance(admit(10, 5, view(p={"usable": False}), 0, 4), Unavailable)
    full = admit(10, 5, view(), 4, 4)
    assert isinstance(full, QueueFull)
    assert full.status == 429


HEAVY, LIGHT = Demand(800, 10), Demand(10, 10)


def test_first_come_first_served() -> None:
    assert pick([Waiting(LIGHT, 0), Waiting(LIGHT, 0)], view(), 4) == Picked(0, Pair(P, D), ())
    assert pick([], view(), 4) is None


def test_light_ones_pass_a_heavy_one_but_not_for_ever() -> None:
    """B089."""
    little = view(d={"free_blocks": 5})
    queue = [Waiting(HEAVY, 0), Waiting(LIGHT, 0)]
    assert pick(queue, little, 2) == Picked(1, Pair(P, D), (0,))
    assert pick([Waiting(HEAVY, 1), *queue[1:]], little, 2) == Picked(1, Pair(P, D), (0,))
    assert pick([Waiting(HEAVY, 2), *queue[1:]], little, 2) is None
    assert pick([Waiting(HEAVY, 2), *queue[1:]], view(), 2) == Picked(0, Pair(P, D), ())
    assert pick(queue, little, 0) is None


def test_short_ones_pass_long_ones_that_wait_for_nothing_but_their_turn() -> None:
    busy = view(p={"pending_long": 512})
    queue = [Waiting(HEAVY, 2), Waiting(HEAVY, 0), Waiting(LIGHT, 0)]
    assert pick(queue, busy, 2) == Picked(2, Pair(P, D), ())
    assert pick(queue, view(p={"pending_short": 512}), 2) == Picked(0, Pair(P, D), ())


def test_who_waits_for_room_is_bypassed_whether_it_is_its_turn_or_not() -> None:
    for p in ({}, {"pending_long": 512}):
        tight = view(p, {"free_blocks": 5})
        assert pick([Waiting(HEAVY, 1), Waiting(LIGHT, 0)], tight, 2) == Picked(1, Pair(P, D), (0,))
        assert pick([Waiting(HEAVY, 2), Waiting(LIGHT, 0)], tight, 2) is None
    full = view({"pending_long": 512}, {"num_seqs": 4})
    assert pick([Waiting(HEAVY, 0), Waiting(LIGHT, 0)], full, 2) is None


def test_no_more_of_the_queue_is_looked_at_than_takes_little_time() -> None:
    busy = view(p={"pending_long": 512})
    long = [Waiting(HEAVY, 0)] * WINDOW
    assert pick([*long[1:], Waiting(LIGHT, 0)], busy, 2) == Picked(WINDOW - 1, Pair(P, D), ())
    assert pick([*long, Waiting(LIGHT, 0)], busy, 2) is None


def test_hopeless() -> None:
    queue = [Waiting(LIGHT, 0), Waiting(Demand(990, 20), 0), Waiting(LIGHT, 0)]
    assert hopeless(queue, view(d={"free_blocks": 0})) == [1]
    assert hopeless(queue, view(d={"usable": False})) == [0, 1, 2]
