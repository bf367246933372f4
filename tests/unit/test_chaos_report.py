"""The chaos harness's verdict: each promise that is broken makes it fail."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from tests.chaos import exchange
from tests.chaos.exchange import Reply
from tests.chaos.fleet import Member, Sample, healthy_pairs, not_idle
from tests.chaos.inject import Injected
from tests.chaos.record import RIGHT, TIE, WRONG, Record
from tests.chaos.report import NOISE, Goal, Run, fault_counts, in_health, lines, verdict
from tests.chaos.schedule import KINDS, Fault, Kind

GOAL = Goal(answers=10, right_share=0.95, each_kind=1, noise=True)
KILL_ROUTER = next(kind for kind in KINDS if kind.name == "kill router")


def record(outcome: str, start_s: float = 1.0, end_s: float = 2.0) -> Record:
    return Record(0, 0, True, start_s, end_s, outcome, Reply())


def injected(kind: Kind, at_s: float) -> Injected:
    return Injected(Fault(at_s, kind, 0, 0.0, True), at_s, at_s, 1)


def member(**changes: Any) -> Member:
    return Member(psutil.Process(), "prefill", 0.0, **changes)


def good_run() -> Run:
    """One that keeps all promises, at 2 requests a second in 60 s."""
    records = [record(RIGHT, t / 2, t / 2 + 1) for t in range(120)]
    records += [record(TIE), record(exchange.CUT)]
    counters = Counter({f"{w} {k}": 3 for w in ("transfer", "message") for k in NOISE})
    counters["expired_leases"] = 1
    return Run(
        records=records,
        injected=[injected(kind, 40.0) for kind in KINDS],
        late=[],
        members=[member(), member(ended_s=9.0, end_expected="killed")],
        samples=[Sample(t / 2, healthy=True, whole=True, routers=2) for t in range(130)],
        counters=counters,
        left=[],
    )


def failed(run: Run) -> list[str]:
    assert list(lines(run, GOAL)), "every run can be printed"
    return [check.what for check in verdict(run, GOAL) if not check.ok]


def test_a_good_run_passes() -> None:
    assert failed(good_run()) == []


def break_by(outcome: str, number: int = 1) -> Callable[[Run], None]:
    def change(run: Run) -> None:
        run.records = [*run.records, *(record(outcome, 10, 11) for _ in range(number))]

    return change


def lose_a_process(run: Run) -> None:
    run.members = [*run.members, member(ended_s=3.0)]


def leave_blocks(run: Run) -> None:
    run.left = ["decode-1 has {'leased': 2}"]


def answer_little(run: Run) -> None:
    run.records = [*run.records[:5], record(exchange.CUT)]


def inject_nothing_of_a_kind(run: Run) -> None:
    run.injected = run.injected[1:]


def corrupt_no_transfer(run: Run) -> None:
    del run.counters["transfer corrupt"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (break_by(WRONG), "1 wrong texts"),
        (break_by(exchange.HANG), "1 hangs past the deadline"),
        (break_by(exchange.RESET), "1 connections cut that no dead router explains"),
        (break_by(exchange.BROKEN), "1 answers without one terminal event"),
        (lose_a_process, "1 processes ended that were not killed"),
        (leave_blocks, "1 things left or missing when idle"),
        (answer_little, "5 answers, at least 10"),
        (inject_nothing_of_a_kind, "each kind of fault at least 1 times: kill prefill 0"),
        (corrupt_no_transfer, "each kind of fault at least 1 times: transfer corrupt 0"),
        (break_by(exchange.FAILED, 20), "85.8% of 141 requests right while a healthy pair lived"),
    ],
)
def test_each_broken_promise_fails(change: Callable[[Run], None], complaint: str) -> None:
    run = good_run()
    change(run)
    (only,) = failed(run)
    assert only.startswith(complaint)


def test_errors_count_only_while_a_healthy_pair_lives() -> None:
    run = good_run()
    break_by(exchange.FAILED, 20)(run)
    run.samples = [Sample(s.at_s, healthy=s.at_s < 10, whole=False, routers=2) for s in run.samples]
    assert failed(run) == []


def test_a_reset_is_excused_by_a_router_that_was_killed_meanwhile() -> None:
    run = good_run()
    run.records = [*run.records, record(exchange.RESET, 39, 41)]
    assert failed(run) == []
    run.injected = [done for done in run.injected if done.fault.kind != KILL_ROUTER]
    run.injected += [injected(KILL_ROUTER, 50.0)]
    assert failed(run) == ["1 connections cut that no dead router explains"]


def test_what_dies_with_its_router_is_not_counted_as_wrong_in_health() -> None:
    run = good_run()
    torn = [record(exchange.RESET, 39, 41) for _ in range(20)]
    torn += [record(exchange.FAILED, 39, 41) for _ in range(20)]
    run.records = [*run.records, *torn]
    assert failed(run) == []
    for r in torn:
        r.reply.router = True  # an error that a router has made: that one lived
    (only,) = failed(run)
    assert "right while a healthy pair lived" in only


def test_over_ucx_tcp_a_resumed_producer_may_abort() -> None:
    run = good_run()
    run.members = [*run.members, member(ended_s=3.0, resumed=True)]
    assert failed(run) == ["1 processes ended that were not killed"]
    run.forgiven = True
    assert failed(run) == []


def test_noise_may_be_off() -> None:
    run = good_run()
    run.counters.clear()
    goal = Goal(answers=10, right_share=0.95, each_kind=1, noise=False)
    assert all(check.ok for check in verdict(run, goal))


def test_kinds_that_never_happened_are_counted_as_none() -> None:
    run = good_run()
    run.injected = []
    assert {fault_counts(run)[kind.name] for kind in KINDS} == {0}


@pytest.mark.parametrize(("ill_at", "expected"), [(2.0, False), (5.0, False), (9.0, True)])
def test_health_all_through_a_life(ill_at: float, expected: bool) -> None:
    samples = [Sample(t, healthy=t != ill_at, whole=True, routers=1) for t in (2.0, 5.0, 8.0, 9.0)]
    assert in_health(record(RIGHT, 3.0, 6.0), samples) is expected


# --- the server's own view ------------------------------------------------------------------------


def worker(role: str, pid: int, **changes: Any) -> dict[str, Any]:
    blocks = {"free": 30, "cached": 9, "active": 0, "leased": 0, "quarantined": 0}
    return {
        "id": f"{role}-{pid}", "pid": pid, "state": "ready", "running": 0, "waiting": 0,
        "tickets": 0, "open_calls": 0, "kv_blocks": 40, "blocks": blocks, **changes,
    }  # fmt: skip


def state(*workers: dict[str, Any], running: int = 0) -> dict[str, Any]:
    names = {w["id"].split("-")[0]: w["id"] for w in workers}
    pair = {"prefill": names["prefill"], "decode": names["decode"], "state": "proven"}
    requests = {"running": running, "queued": 0}
    return {"router": "router-1", "workers": list(workers), "pairs": [pair], "requests": requests}


def test_a_pair_is_healthy_if_it_is_proven_and_neither_worker_is_ill() -> None:
    view = state(worker("prefill", 1), worker("decode", 2))
    assert healthy_pairs(view, set()) == 1
    assert healthy_pairs(view, {1}) == 0
    assert healthy_pairs(state(worker("prefill", 1), worker("decode", 2, state="dead")), set()) == 0


def test_what_is_held_is_not_idle() -> None:
    prefill = worker("prefill", 1)
    assert not_idle({7: state(prefill, worker("decode", 2))}) == []
    assert not_idle({7: state(prefill, worker("decode", 2, tickets=1))})
    assert not_idle({7: state(prefill, worker("decode", 2), running=1)})
    for kind in ("active", "leased", "quarantined"):
        blocks = prefill["blocks"] | {kind: 1, "free": 29}
        assert not_idle({7: state(prefill, worker("decode", 2, blocks=blocks))})


def test_a_lost_block_is_found() -> None:
    lost = worker("decode", 2)
    lost["blocks"]["free"] -= 1
    (found,) = not_idle({7: state(worker("prefill", 1), lost)})
    assert "lost blocks" in found
