"""What a router is told of pools that scale, what it makes of it, and what it reports."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from math import isfinite

import pytest

from router import wire
from router.admission import HELD_TOKENS, hold
from router.config import RouterConfig, RouterSettings
from router.dispatch import Dispatcher
from router.ledger import Ledger
from router.pools import MANY, REASONS, Asked, Pools, StartFailure, lacking, report, scaling_stats
from router.readiness import Readiness
from services.planner import observation

ONE = StartFailure("decode", "d-7", "exception", "no such model", at=100.0, in_a_row=1)
NOTHING = Pools(targets={"prefill": 0, "decode": 0}, reasons={"prefill": "idle", "decode": "idle"})
WAKING = Pools(targets={"prefill": 1, "decode": 1}, reasons={"prefill": "wake", "decode": "wake"})


async def _nobody() -> list[wire.WorkerCard]:
    return []


def settings(wakes: bool = True, replicas: tuple[tuple[str, int], ...] = ()) -> RouterSettings:
    return RouterSettings(RouterConfig(), "", "tiny", "R", b"s" * 32, replicas, wakes=wakes)


def dispatcher(replicas: tuple[tuple[str, int], ...] = ()) -> Dispatcher:
    return Dispatcher(settings(replicas=replicas), _nobody)


def test_the_reasons_of_changes_are_those_that_decisions_have() -> None:
    never_change_anything = {"steady", "cooldown", "fixed"}
    assert set(REASONS) == set(observation.REASONS) - never_change_anything


# --- what is told -------------------------------------------------------------------------------


def test_what_is_decided_replaces_what_the_configuration_says() -> None:
    made = dispatcher(replicas=(("prefill", 2), ("mixed", 1)))
    assert made.targets == {"prefill": 2, "mixed": 1}
    made.pools = Pools(targets={"prefill": 5, "decode": 3})
    assert made.targets == {"prefill": 5, "mixed": 1, "decode": 3}
    made.pools = NOTHING
    assert made.targets == {"prefill": 0, "mixed": 1, "decode": 0}


@pytest.mark.parametrize(
    ("pools", "at_zero"),
    [
        (Pools(), False),
        (NOTHING, True),
        (replace(NOTHING, targets={"prefill": 0, "decode": 1}), True),
        (WAKING, False),
        # Zero, as nothing that was started has lived: that is nobody's purpose.
        (replace(NOTHING, reasons=dict.fromkeys(NOTHING.targets, "start_failures")), False),
    ],
)
def test_at_zero_is_what_somebody_wants(pools: Pools, at_zero: bool) -> None:
    assert pools.at_zero is at_zero


def test_each_failure_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    made = dispatcher()
    again = replace(ONE, worker="d-8", at=130.0, in_a_row=2)
    other = replace(ONE, role="prefill", worker="", reason="died", message="killed?")
    with caplog.at_level(logging.ERROR, "router.dispatch"):
        for failures in ((ONE,), (ONE,), (again,), (again, other), (again, other), (), ()):
            made.pools = Pools(failures=failures)
    assert [record.getMessage() for record in caplog.records] == [
        "a decode worker did not start (d-7, exception, 1 in a row): no such model",
        "a decode worker did not start (d-8, exception, 2 in a row): no such model",
        "a prefill worker did not start (unknown, died, 1 in a row): killed?",
    ]


def test_what_is_missing_in_words() -> None:
    failing = Pools(failures=(replace(ONE, in_a_row=MANY),))
    assert lacking((), Pools()) == "no prefill worker and no decode worker has started"
    assert lacking({"prefill"}, Pools(failures=(ONE,))) == "no decode worker has started"
    assert lacking({"prefill"}, failing) == (
        "no decode worker has started; decode workers have failed to start 3 times in a row"
    )
    assert "proven" in lacking({"prefill", "decode"}, Pools())
    assert "no such model" not in lacking((), failing)  # a client need not know our files


def test_the_state_has_targets_and_what_there_is() -> None:
    pools = Pools(
        targets={"prefill": 3},
        reasons={"prefill": "load"},
        words={"prefill": "2.4 workers are busy"},
        failures=(ONE,),
    )
    actual = {("prefill", "ready"): 1, ("prefill", "starting"): 1, ("mixed", "ready"): 1}
    state = report(pools, {"prefill": 3, "decode": 2}, actual, now=112.34)
    assert state["pools"] == {
        "prefill": {
            "target": 3, "actual": {"ready": 1, "starting": 1}, "scales": True,
            "reason": "load", "words": "2.4 workers are busy",
        },
        "decode": {"target": 2, "actual": {}, "scales": False, "reason": "", "words": ""},
        "mixed": {"target": None, "actual": {"ready": 1}, "scales": False, "reason": "",
                  "words": ""},
    }  # fmt: skip
    assert state["start_failures"] == [
        {
            "role": "decode", "worker": "d-7", "reason": "exception", "message": "no such model",
            "in_a_row": 1, "seconds_ago": 12.3,
        }
    ]  # fmt: skip
    assert report(pools, {}, {}, now=90.0)["start_failures"][0]["seconds_ago"] == 0  # clocks differ


# --- whether it can serve -----------------------------------------------------------------------


def readiness(wakes: bool = True) -> Readiness:
    return Readiness(settings(wakes))


def test_asleep_from_zero_until_there_is_a_pair() -> None:
    async def scenario() -> None:
        at = readiness()
        assert not at.asleep(Pools()), "nothing was told yet"
        assert not at.asleep(WAKING), "a deployment that starts is not asleep"
        at.told(NOTHING)
        assert at.asleep(NOTHING)
        at.told(WAKING)
        assert at.asleep(WAKING), "still on the way up"
        failing = replace(WAKING, failures=(replace(ONE, in_a_row=MANY),))
        assert not at.asleep(failing), "it will not come up"
        assert at.asleep(replace(failing, failures=(ONE,)))
        at.looked(True)
        assert not at.asleep(WAKING)
        at.looked(False)
        assert not at.asleep(WAKING), "lost, not asleep"

    asyncio.run(scenario())


def test_who_has_no_pool_at_zero_is_never_asleep() -> None:
    at = readiness(wakes=False)
    at.told(NOTHING)
    assert not at.asleep(NOTHING)


def test_asleep_counts_as_settled() -> None:
    async def scenario() -> None:
        made = dispatcher()
        assert not made.settled(0)
        made.pools = NOTHING
        assert (made.ready, made.asleep, made.settled(3600)) == (False, True, True)

    asyncio.run(scenario())


# --- who may wait for a worker ------------------------------------------------------------------


def test_the_place_and_the_tokens_of_those_that_wait_are_bounded() -> None:
    assert hold(10, 255, 0, 256) is None
    for num_prompt, num_queued, held_tokens in ((10, 256, 0), (10, 1, HELD_TOKENS - 9)):
        full = hold(num_prompt, num_queued, held_tokens, 256)
        assert full is not None
        assert (full.status, full.rejection) == (429, "queue_full")
        assert int(full.headers()["retry-after"]) >= 5, "a worker takes its time to start"
    assert hold(10, 1, HELD_TOKENS - 10, 256) is None


# --- what is reported ---------------------------------------------------------------------------

NAMES = {
    "requests", "prompt_tokens", "prompt_squares", "answers", "answer_tokens",
    "ttft_good", "ttft_bad", "tpot_good", "tpot_bad", "queued", "queued_tokens", "oldest_wait_s",
}  # fmt: skip


def test_an_idle_router_reports_zeros() -> None:
    stats = scaling_stats(dispatcher(), Ledger())
    assert stats.keys() == NAMES
    assert set(stats.values()) == {0.0}
    assert all(type(value) is float and isfinite(value) for value in stats.values())


def test_what_was_asked_and_answered() -> None:
    asked = Asked()
    for tokens in (3, 4):
        asked.arrived(tokens)
    for tokens in (7, 0, 5):  # one ended before its first token: it says nothing of lengths
        asked.ended(tokens)
    assert asked == Asked(2, 7, 9 + 16, 2, 12)


def test_verdicts_are_the_ledgers() -> None:
    ledger = Ledger()
    for slo, verdict, number in (
        ("ttft", "good", 1), ("ttft", "bad", 2), ("tpot", "good", 3), ("tpot", "bad", 4),
        ("both", "bad", 9),
    ):  # fmt: skip
        ledger.verdicts[slo, verdict] = number
    stats = scaling_stats(dispatcher(), ledger)
    assert [stats[name] for name in ("ttft_good", "ttft_bad", "tpot_good", "tpot_bad")] == [
        1, 2, 3, 4
    ]  # fmt: skip
