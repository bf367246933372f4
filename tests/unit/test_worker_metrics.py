"""A worker's metrics, against what its conversation shows: each end counted once, and zero when
nothing is there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvtransfer.pull_events import Cause, PullTimes
from router import wire
from tests.support.scrape import Page
from tests.support.worker_box import (
    IDS,
    LEASE_S,
    SPAN,
    Box,
    Pair,
    decode,
    only,
    only_key,
    prefilled,
    reserve,
)

LONG = [1, 2, 3, 4, 5, 6, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 0]  # 3 steps of P, 5 blocks
BARE = {"baton_event_loop_lag_seconds", "baton_process_start_time_seconds"}
GAUGES = (
    "baton_engine_requests",
    "baton_engine_waiting_tokens",
    "baton_kv_cache_usage_ratio",
    "baton_kv_transfer_in_flight",
    "baton_kv_leases",
    "baton_kv_lease_age_seconds",
    "baton_model_flops_utilization_ratio",
    "baton_memory_bandwidth_utilization_ratio",
    "baton_arithmetic_intensity",
)


@pytest.fixture
def box() -> Box:
    return Box("w")


@pytest.fixture
def pair() -> Pair:
    return Pair()


def page(box: Box) -> Page:
    return Page(box.registry().collect())


def ends(box: Box) -> dict[str, float]:
    """Hand-offs by what became of them."""
    return page(box).values("baton_kv_transfers_total", "result")


def parts(box: Box) -> dict[str, float]:
    return page(box).values("baton_kv_transfer_parts_total", "result")


# --- what is there before anything happens --------------------------------------------------------


def test_every_series_says_whose_it_is(box: Box) -> None:
    for family in page(box).families.values():
        assert family.documentation
        for sample in family.samples:
            names = {"model": "tiny", "role": "decode", "replica": "w"}
            expected = {} if family.name in BARE else names
            own = {"state", "kind", "transport", "result", "phase", "side", "le"}
            own |= {"block_size", "num_blocks", "dtype"}
            assert {k: v for k, v in sample.labels.items() if k not in own} == expected


def test_all_that_can_happen_is_there_from_the_start(box: Box) -> None:
    """Else the first failure has no rate, and its alert no data."""
    now, zero = page(box), 0.0
    results = dict.fromkeys(("ok", "failed", "stalled", "expired", "cancelled"), zero)
    assert now.values("baton_kv_transfers_total", "result", zero=True) == results
    assert now.values("baton_kv_transfer_parts_total", "result", zero=True) == results
    assert now.values("baton_engine_requests", "state", zero=True) == {"running": 0, "waiting": 0}
    assert now.values("baton_kv_transfer_in_flight", "side", zero=True) == {"send": 0, "recv": 0}
    assert now.values("baton_engine_tokens_total", "kind", zero=True) == {
        "prompt": 0,
        "generated": 0,
    }
    blocks = now.values("baton_kv_blocks", "state", zero=True)
    assert blocks.keys() == {"free", "active", "cached", "leased", "quarantined"}
    assert sum(blocks.values()) == 32
    assert now.value("baton_engine_seats") == 4
    info = now.labels("baton_cache_config_info")
    assert [(i["block_size"], i["num_blocks"]) for i in info] == [("4", "33")]
    phases = now.values("baton_kv_transfer_seconds_count", "phase", zero=True)
    assert phases == dict.fromkeys(("queue", "wire", "seals", "total"), zero)


def check_idle(box: Box) -> None:
    """Later, every gauge of what happens now is exactly zero."""
    box.pass_time(60.0)
    for sample in page(box).samples:
        if sample.name in GAUGES:
            assert sample.value == 0, sample


# --- the engine -----------------------------------------------------------------------------------


def test_a_prompt_and_its_answer(box: Box) -> None:
    box.step_s = 0.5
    box.say(decode(LONG))
    assert page(box).values("baton_engine_requests", "state") == {"waiting": 1}
    assert page(box).value("baton_engine_waiting_tokens") == 20
    box.now += 0.25
    box.step()
    now = page(box)
    assert now.values("baton_engine_requests", "state") == {"running": 1}
    assert now.value("baton_engine_waiting_tokens") == 12
    assert now.value("baton_kv_cache_usage_ratio") == 5 / 32
    assert now.values("baton_kv_blocks", "state") == {"active": 5, "free": 27}
    box.run()
    now = page(box)
    assert now.value("baton_engine_steps_total") == 6  # three chunks, three tokens behind the first
    assert now.values("baton_engine_tokens_total", "kind") == {"prompt": 20, "generated": 4}
    assert now.value("baton_engine_step_seconds_count") == 6
    assert now.value("baton_engine_step_seconds_sum") == 3.0
    assert now.value("baton_engine_step_seconds_bucket", le="0.4") == 0
    assert now.value("baton_engine_step_seconds_bucket", le="0.5") == 6
    assert now.value("baton_engine_batch_tokens_sum") == 20 + 3
    assert now.value("baton_engine_batch_tokens_bucket", le="1.0") == 3
    assert now.value("baton_engine_batch_size_sum") == 6
    assert now.value("baton_engine_queue_seconds_sum") == 0.25
    assert now.value("baton_engine_prefill_seconds_sum") == 1.5
    assert now.value("baton_engine_prefill_seconds_count") == 1
    assert now.value("baton_preemptions_total") == 0
    check_idle(box)


def test_work_is_counted_from_the_plans(box: Box) -> None:
    box.step_s = 0.5
    box.say(decode(LONG))
    box.run()
    now = page(box)
    assert now.value("baton_engine_flops_total") == 1000 * 23
    assert now.value("baton_engine_bytes_total") == 500 * 6
    assert now.value("baton_engine_busy_seconds_total") == 3.0
    assert now.value("baton_roofline_peak_flops") == 1e5
    assert now.value("baton_roofline_peak_bytes_per_second") == 1e4
    assert now.value("baton_model_flops_utilization_ratio") == pytest.approx(23e3 / 3 / 1e5)
    assert now.value("baton_memory_bandwidth_utilization_ratio") == pytest.approx(0.1)
    assert now.value("baton_arithmetic_intensity") == pytest.approx(23 / 3)
    load = box.roles.load()
    assert (load.flops, load.bytes, load.busy_s) == (23_000, 3_000, 3.0)
    assert (load.peak_flops, load.peak_bytes) == (1e5, 1e4)
    before = now.value("baton_engine_idle_seconds_total")
    box.now += 7.0
    box.step()  # of a loop without work
    assert page(box).value("baton_engine_idle_seconds_total") == before + 7.0
    check_idle(box)


def test_what_the_prefix_cache_spared(box: Box) -> None:
    for request in (b"a", b"b"):
        box.say(decode(LONG, request))
        box.run()
    now = page(box)
    assert now.value("baton_prefix_cache_queried_tokens_total") == 40
    assert now.value("baton_prefix_cache_hit_tokens_total") == 16
    assert now.values("baton_engine_tokens_total", "kind")["prompt"] == 24


def test_preemptions_are_counted_but_their_look_ups_are_not() -> None:
    box, sampling = Box("w", blocks=8), wire.Sampling(max_tokens=8)
    box.say(decode(LONG[:10], b"a", sampling=sampling))
    box.say(decode([6, *LONG[1:10]], b"b", sampling=sampling))
    box.run()
    now = page(box)
    assert now.value("baton_preemptions_total") == box.engine.scheduler.stats.preemptions == 1
    assert now.value("baton_prefix_cache_queried_tokens_total") == 20
    assert now.value("baton_engine_prefill_seconds_count") == 2


# --- KV -------------------------------------------------------------------------------------------


def test_a_hand_off(pair: Pair) -> None:
    answer, key = pair.pulling(LONG)
    now = page(pair.p)
    assert now.value("baton_kv_leases") == 1
    assert now.values("baton_kv_transfer_in_flight", "side") == {"send": 1}
    assert now.values("baton_kv_blocks", "state")["leased"] == 5
    assert now.value("baton_engine_prefill_seconds_count") == 1
    now = page(pair.d)
    assert now.values("baton_kv_transfer_in_flight", "side") == {"recv": 1}
    assert now.value("baton_prefix_cache_queried_tokens_total") == 20
    pair.copy(key)
    arrived = replace(pair.d.puller.arrived(key), times=PullTimes(0.5, 0.25, 0.125))
    pair.d.event(arrived)
    pair.d.run()
    pair.p.say(wire.Release(answer.ticket_id))
    now = page(pair.d)
    assert ends(pair.d) == {"ok": 1}
    assert parts(pair.d) == {}
    assert now.labels("baton_kv_transfers_total")[0]["transport"] == "scripted"
    assert now.values("baton_kv_transfer_seconds_sum", "phase") == {
        "queue": 0.5,
        "wire": 0.25,
        "seals": 0.125,
        "total": 0.875,
    }
    assert now.value("baton_kv_transfer_bytes_sum") == 5 * SPAN
    assert now.value("baton_kv_transfer_blocks_sum") == 5
    assert now.value("baton_kv_transfer_blocks_bucket", le="5.0") == 1
    assert now.value("baton_engine_prefill_seconds_count") == 0, "the prompt was not computed here"
    assert page(pair.p).value("baton_kv_transfer_bytes_count") == 0
    for side in (pair.p, pair.d):
        check_idle(side)


def test_a_lease_that_nobody_wants_runs_out(pair: Pair) -> None:
    prefilled(pair.p)
    pair.p.pass_time(LEASE_S)
    now = page(pair.p)
    assert now.value("baton_kv_leases") == 0
    assert now.value("baton_kv_leases_expired_total") == 1


def test_the_age_of_the_oldest_lease(pair: Pair) -> None:
    """A ticket that is renewed for ever keeps its blocks, whatever other tickets do."""
    first = prefilled(pair.p)
    pair.p.pass_time(LEASE_S - 1)
    second = prefilled(pair.p, request=b"b")
    pair.p.say(wire.Renew((first.ticket_id,)))
    pair.p.pass_time(LEASE_S - 1)
    now = page(pair.p)
    assert now.value("baton_kv_leases") == 2
    assert now.value("baton_kv_lease_age_seconds") == 2 * (LEASE_S - 1)
    pair.p.say(wire.Release(first.ticket_id))
    assert page(pair.p).value("baton_kv_lease_age_seconds") == LEASE_S - 1
    pair.p.say(wire.Release(second.ticket_id))
    check_idle(pair.p)


def test_a_worker_says_when_it_began(box: Box) -> None:
    before = time.time()
    registry = box.registry()
    began = Page(registry.collect()).value("baton_process_start_time_seconds")
    assert before <= began <= time.time()
    assert Page(registry.collect()).value("baton_process_start_time_seconds") == began


def failed(cause: Cause) -> Callable[[Pair, bytes], object]:
    def act(pair: Pair, key: bytes) -> object:
        return pair.d.event(replace(pair.d.puller.failed(key, settled=True), cause=cause))

    return act


def lost(pair: Pair, key: bytes) -> None:
    pair.d.roles.disconnected(pair.d.link)
    pair.d.event(pair.d.puller.gave_up(key, settled=True))


def aborted(pair: Pair, key: bytes) -> None:
    pair.d.say(wire.Abort(b"a", 0))
    pair.d.event(pair.d.puller.gave_up(key, settled=False))
    pair.d.event(pair.d.puller.settled(key))


def late(pair: Pair, key: bytes) -> None:
    pair.d.pass_time(5.0)
    pair.d.event(pair.d.puller.gave_up(key, settled=True))


def crossed(pair: Pair, key: bytes) -> None:
    """All had arrived when the abort came."""
    pair.d.say(wire.Abort(b"a", 0))
    pair.arrive(key)


HAND_OFFS: dict[str, tuple[Callable[[Pair, bytes], object], str]] = {
    "damaged": (failed(Cause.FAILED), "failed"),
    "stands still": (failed(Cause.STALLED), "stalled"),
    "too late": (failed(Cause.EXPIRED), "expired"),
    "deadline": (late, "expired"),
    "aborted": (aborted, "cancelled"),
    "aborted too late": (crossed, "cancelled"),
    "the router is gone": (lost, "cancelled"),
}


@pytest.mark.parametrize("how", HAND_OFFS)
def test_a_hand_off_ends_once(pair: Pair, how: str) -> None:
    act, result = HAND_OFFS[how]
    _, key = pair.pulling(deadline_ms=5000)
    act(pair, key)
    assert ends(pair.d) == {result: 1}
    assert parts(pair.d) == {}
    assert page(pair.d).values("baton_kv_transfer_in_flight", "side") == {}
    assert page(pair.d).values("baton_kv_blocks", "state").keys() == {"free"}
    check_idle(pair.d)


def test_a_wrong_ticket_is_a_failed_hand_off(pair: Pair) -> None:
    pair.d.say(reserve())
    answer = prefilled(pair.p)
    damaged = answer.ticket[:-1] + bytes([answer.ticket[-1] ^ 1])
    pair.d.say(wire.Peer(pair.p.card), decode([*IDS, answer.token], num_prompt=6, ticket=damaged))
    assert ends(pair.d) == {"failed": 1}


def test_a_hand_off_to_one_that_has_all_is_one_without_bytes(pair: Pair) -> None:
    _, key = pair.pulling(LONG)
    pair.arrive(key)
    pair.d.run()
    answer = prefilled(pair.p, LONG[:8], request=b"b")
    pair.d.say(reserve(LONG[:8], request=b"b"))
    ids = [*LONG[:8], answer.token]
    pair.d.say(decode(ids, request=b"b", num_prompt=8, ticket=answer.ticket))
    assert ends(pair.d) == {"ok": 2}
    assert page(pair.d).value("baton_kv_transfer_bytes_count") == 1
    assert page(pair.d).value("baton_prefix_cache_hit_tokens_total") == 8


def test_an_attempt_that_never_had_a_ticket_is_no_hand_off(pair: Pair) -> None:
    pair.d.say(reserve())
    pair.d.say(wire.Abort(b"a", 0))
    pair.d.say(reserve(request=b"b"), decode(request=b"b"))
    pair.d.run()
    assert ends(pair.d) == {}


# --- early parts ----------------------------------------------------------------------------------


def test_early_parts_are_counted_beside_the_hand_off(pair: Pair) -> None:
    pair.computing(LONG)
    _, first = pair.part()
    pair.arrive(first)
    _, second = pair.part()
    pair.d.event(pair.d.puller.failed(second, settled=True))
    answer = only([m for m in pair.p.run() if isinstance(m, wire.Prefilled)])
    assert isinstance(answer, wire.Prefilled)
    pair.d.say(pair.decode(LONG, answer))
    pair.arrive(only_key(pair.d))
    assert ends(pair.d) == {"ok": 1}
    assert parts(pair.d) == {"ok": 1, "failed": 1}
    assert page(pair.d).value("baton_kv_transfer_bytes_count") == 2
    assert page(pair.d).value("baton_kv_transfer_blocks_sum") == 5


@pytest.mark.parametrize("how", ["gave up", "arrived"])
def test_a_part_that_is_given_up_is_cancelled_once(pair: Pair, how: str) -> None:
    """Also when it had arrived by then."""
    pair.computing(LONG)
    _, key = pair.part()
    pair.d.say(wire.Abort(b"a", 0))
    if how == "arrived":
        pair.arrive(key)
    else:
        pair.d.event(pair.d.puller.gave_up(key, settled=True))
    assert parts(pair.d) == {"cancelled": 1}
    assert ends(pair.d) == {}


def test_a_part_that_may_still_write_fails_the_hand_off(pair: Pair) -> None:
    pair.computing(LONG)
    _, key = pair.part()
    pair.d.event(replace(pair.d.puller.failed(key, settled=False), cause=Cause.STALLED))
    pair.d.event(pair.d.puller.settled(key))
    assert parts(pair.d) == {"stalled": 1}
    assert ends(pair.d) == {"stalled": 1}
