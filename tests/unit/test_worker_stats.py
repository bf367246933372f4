"""What a worker reports to who scales the pools."""

from dataclasses import replace
from math import isfinite

import pytest

from router import wire
from services.planner.reports import worker_stats
from services.planner.signals import PROFILE, Signals

CARD = wire.WorkerCard(
    worker_id="decode-1", epoch=1, role="decode", model="m", host="127.0.0.1", port=1, pid=2,
    layout={}, agents=(), kv_blocks=101, block_size=16, max_model_len=640, max_num_seqs=8,
    token_budget=32,
)  # fmt: skip
IDLE = wire.Load(
    state="ready", transport="tcp", running=0, waiting=0, tickets=0, waiting_tokens=0,
    blocks={"free": 100, "active": 0, "cached": 0, "leased": 0, "quarantined": 0}, steps=0,
    computed_prompt_tokens=0, cached_prompt_tokens=0, generated_tokens=0, pulled_bytes=0,
    pulled_blocks=0, preemptions=0, failed_pulls=0, expired_leases=0,
)  # fmt: skip
BUSY = replace(
    IDLE, running=4, waiting=1, waiting_tokens=70, computed_prompt_tokens=900,
    cached_prompt_tokens=300,
    blocks={"free": 20, "active": 50, "cached": 25, "leased": 3, "quarantined": 2},
)  # fmt: skip


def test_of_a_busy_worker() -> None:
    assert worker_stats(CARD, BUSY, {"profile_decode_step": 0.02}) == {
        "running": 5,  # those with a reservation included
        "waiting_tokens": 70,
        "computed_prompt_tokens": 900,
        "cached_prompt_tokens": 300,
        "kv_use": pytest.approx(0.55),  # what is cached is as good as free
        "seqs": 8,
        "kv_tokens": 1600,  # without the reserved block
        "context": 50 * 16 / 4,
        "profile_decode_step": 0.02,
    }


def test_an_idle_worker_says_zero_and_nothing_that_is_no_number() -> None:
    stats = worker_stats(CARD, IDLE, {})
    assert all(isinstance(value, int | float) and isfinite(value) for value in stats.values())
    assert stats["kv_use"] == stats["context"] == stats["running"] == 0
    # nor does one that has only begun
    stats = worker_stats(replace(CARD, kv_blocks=1), replace(IDLE, blocks={}), {})
    assert all(isfinite(value) for value in stats.values())
    assert stats["kv_use"] == 1.0


def test_free_blocks_that_are_owed_are_in_use() -> None:
    def use(owed: int) -> float:
        return worker_stats(CARD, replace(BUSY, owed_blocks=owed), {})["kv_use"]

    assert use(30) == pytest.approx(0.85)
    assert use(60) == 1.0  # more than there is: never above all


def test_it_is_understood() -> None:
    signals = Signals()
    profile = dict.fromkeys(PROFILE, 0.25)
    signals.worker("decode", "d", 1.0, worker_stats(CARD, BUSY, profile))
    prompts = worker_stats(CARD, replace(BUSY, waiting_tokens=7), profile)
    signals.worker("prefill", "p", 1.0, prompts)
    seen = signals.observe(2.0, {"prefill": 1, "decode": 1}, {"prefill": 1, "decode": 1})
    assert (seen.running, seen.context, seen.queued_tokens) == (5, 200, 7)
    assert seen.kv_use == pytest.approx(0.55)
    assert (seen.seats.seqs, seen.seats.kv_tokens) == (8, 1600)
    assert signals.profile is not None
    assert signals.profile.decode_step == 0.25
