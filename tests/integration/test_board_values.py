"""What some panels show, for series whose values are known: Prometheus's promtool computes them.

Those whose expression is more than a sum or a quantile: a wrong one would still parse, name metrics
that exist, and return data.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from services.dashboards.boards import all_boards
from tests.support.prometheus import need
from tests.support.promql import filled

MINUTES = 30
Samples = dict[str, float]  # value by labels, as Prometheus writes them


def expr(board: str, panel: str, query: int = 0) -> str:
    """One query of a panel, for "All" and a window of five minutes."""
    (found,) = [p for b in all_boards() if b.uid == board for p in b.panels() if p.title == panel]
    return filled(found.queries[query].expr, "5m")


def grows(name: str, per_minute: float, **labels: str) -> dict[str, str]:
    """A counter."""
    return {"series": _named(name, labels), "values": f"0+{per_minute}x{MINUTES}"}


def stays(name: str, value: float, **labels: str) -> dict[str, str]:
    """A gauge."""
    return {"series": _named(name, labels), "values": f"{value}x{MINUTES}"}


def _named(name: str, labels: dict[str, str]) -> str:
    inside = ",".join(f'{label}="{value}"' for label, value in {"model": "m", **labels}.items())
    return f"{name}{{{inside}}}"


def shows(folder: Path, expr: str, series: list[dict[str, str]], expected: Samples) -> None:
    samples = [{"labels": labels, "value": value} for labels, value in expected.items()]
    case: dict[str, Any] = {
        "interval": "1m",
        "input_series": series,
        "promql_expr_test": [{"expr": expr, "eval_time": "20m", "exp_samples": samples}],
    }
    file = folder / "case.yaml"
    file.write_text(json.dumps({"tests": [case]}))  # which is YAML
    done = subprocess.run(
        [need("promtool"), "test", "rules", str(file)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_requests_that_fail_by_our_fault_are_a_share_of_all(tmp_path: Path) -> None:
    outcomes = {"": 10, "overload": 3, "internal": 1, "validation": 1, "cancelled": 1}
    series = [grows("baton_requests_total", n, error_type=why) for why, n in outcomes.items()]
    shows(tmp_path, expr("baton-slo", "Failed by us"), series, {"{}": 0.25})


def test_no_failure_at_all_is_zero_and_not_nothing(tmp_path: Path) -> None:
    series = [grows("baton_requests_total", 5, error_type="")]
    shows(tmp_path, expr("baton-slo", "Failed by us"), series, {"{}": 0})


def test_the_budget_that_is_left(tmp_path: Path) -> None:
    judged = "baton_slo_requests_total"
    series = [
        grows(judged, 199, slo="ttft", verdict="good"),
        grows(judged, 1, slo="ttft", verdict="bad"),
        grows(judged, 49, slo="tpot", verdict="good"),
        grows(judged, 1, slo="tpot", verdict="bad"),
        grows(judged, 50, slo="both", verdict="bad"),
        {"series": 'baton:slo_budget:ratio{slo="ttft"}', "values": "0.01x30"},
        {"series": 'baton:slo_budget:ratio{slo="tpot"}', "values": "0.01x30"},
    ]
    left = {'{slo="ttft"}': 0.5, '{slo="tpot"}': -1}
    shows(tmp_path, expr("baton-slo", "Error budget left"), series, left)


def test_the_budget_of_errors_that_is_left(tmp_path: Path) -> None:
    outcomes = {"": 9995, "overload": 4, "internal": 1, "validation": 90, "cancelled": 900}
    series = [grows("baton_requests_total", n, error_type=why) for why, n in outcomes.items()]
    series += [
        {"series": 'baton:slo_budget:ratio{slo="ttft"}', "values": "0.01x30"},
        {"series": 'baton:slo_budget:ratio{slo="errors"}', "values": "0.001x30"},
    ]
    left = f"round({expr('baton-slo', 'Error budget left', 1)}, 0.001)"
    shows(tmp_path, left, series, {"{}": 0.5})


def test_what_several_routers_see_is_not_added_up(tmp_path: Path) -> None:
    series = [
        stays("baton_workers", count, role=role, state="ready", instance=router)
        for router, role, count in (
            ("r1", "prefill", 2),
            ("r1", "decode", 4),
            ("r2", "prefill", 2),
            ("r2", "decode", 1),  # it started a moment ago
        )
    ]
    title = "Ready prefill workers per decode worker"
    shows(tmp_path, expr("baton-pools", title), series, {"{}": 0.5})


def workers_of_two_models() -> list[dict[str, str]]:
    """As two routers of each see them; one of these has just started."""
    there = [
        ("m", "r1", "decode", 2), ("m", "r1", "mixed", 1), ("m", "r1", "prefill", 3),
        ("m", "r2", "decode", 1), ("m", "r2", "mixed", 1), ("m", "r2", "prefill", 3),
        ("n", "r3", "decode", 4), ("n", "r4", "decode", 4),
    ]  # fmt: skip
    return [
        one
        for model, router, role, number in there
        for one in (
            stays("baton_workers", number, model=model, role=role, state="ready", instance=router),
            stays(
                "baton_autoscale_replicas", number,
                model=model, role=role, kind="actual", instance=router,
            ),
            stays(
                "baton_autoscale_replicas", 2,
                model=model, role="router", kind="target", instance=router,
            ),
        )
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("board", "title", "shown"),
    [
        ("baton-pools", "Decode: workers", {'{state="ready"}': 7}),
        ("baton-pools", "Prefill: workers", {'{state="ready"}': 3}),
        ("baton-pools", "Decode: actual and target", {'{role="decode"}': 6, '{role="mixed"}': 1}),
        ("baton-pools", "Prefill: actual and target", {'{role="prefill"}': 3}),
        (
            "baton-router", "Workers by state",
            {
                '{role="decode", state="ready"}': 6,
                '{role="mixed", state="ready"}': 1,
                '{role="prefill", state="ready"}': 3,
            },
        ),
    ],
)  # fmt: skip
def test_workers_are_counted_over_roles_and_models_but_once(
    tmp_path: Path, board: str, title: str, shown: Samples
) -> None:
    unique = {one["series"]: one for one in workers_of_two_models()}
    shows(tmp_path, expr(board, title), list(unique.values()), shown)


def test_a_lost_worker_is_counted_once_whatever_routers_saw_it(tmp_path: Path) -> None:
    series = [
        grows("baton_worker_losses_total", 6, role="decode", reason=reason, instance=router)
        for router, reason in (("r1", "closed"), ("r2", "closed"), ("r3", "closed"), ("r1", "dead"))
    ]
    lost = {'{role="decode", reason="closed"}': 0.1, '{role="decode", reason="dead"}': 0.1}
    shows(tmp_path, expr("baton-router", "Workers lost"), series, lost)


def test_a_change_that_all_routers_tell_of_is_counted_once(tmp_path: Path) -> None:
    series = [
        grows(
            "baton_autoscale_decisions_total", number,
            role="prefill", direction=direction, reason="load", instance=router,
        )
        for router in ("r1", "r2")
        for direction, number in (("up", 2), ("down", 1))
    ]  # fmt: skip
    changes = {'{reason="load"}': 15}  # in five minutes
    shows(tmp_path, expr("baton-pools", "Prefill: changes of the target"), series, changes)


def test_starts_that_failed_are_counted_once(tmp_path: Path) -> None:
    series = [
        grows("baton_worker_start_failures_total", 1, role="decode", reason=why, instance=router)
        for router in ("r1", "r2")
        for why in ("died", "exception")
    ]
    failed = {
        '{role="decode", reason="died"}': 5,
        '{role="decode", reason="exception"}': 5,
    }
    shows(tmp_path, expr("baton-pools", "Starts that failed"), series, failed)


def test_routers_that_answer_and_that_should_be(tmp_path: Path) -> None:
    series = [
        {"series": f'up{{job="baton", role="router", instance="{router}"}}', "values": f"{up}x30"}
        for router, up in (("r1", 1), ("r2", 0))
    ]
    series += [
        stays("baton_autoscale_replicas", 2, role="router", kind="target", instance="r1"),
        stays("baton_autoscale_replicas", 1, role="decode", kind="target", instance="r1"),
    ]
    shows(tmp_path, expr("baton-router", "Routers"), series, {"{}": 1})
    shows(tmp_path, expr("baton-router", "Routers", 1), series, {"{}": 2})


def test_the_parts_of_a_first_token_are_means_that_add_up(tmp_path: Path) -> None:
    seconds = {"tokenize": 0.25, "route": 0.25, "queue": 1, "prefill": 2, "write": 0.5}
    seconds["kv_transfer"] = 4  # is in the other sum
    series = [
        one
        for stage, mean in seconds.items()
        for one in (
            grows("baton_stage_duration_seconds_sum", 8 * mean, stage=stage),
            grows("baton_stage_duration_seconds_count", 8, stage=stage),
        )
    ]
    parts = {f'{{stage="{stage}"}}': mean for stage, mean in list(seconds.items())[:5]}
    shows(tmp_path, expr("baton-router", "Parts of the time to the first token"), series, parts)


def test_transfers_that_were_cancelled_neither_fail_nor_succeed(tmp_path: Path) -> None:
    results = {"ok": 6, "failed": 1, "stalled": 1, "expired": 0, "cancelled": 30}
    series = [
        grows("baton_kv_transfers_total", n, result=result, replica="d1")
        for result, n in results.items()
    ]
    shows(tmp_path, expr("baton-kv-transfer", "Share that fails"), series, {"{}": 0.25})


@pytest.mark.parametrize("board", ["baton-pools", "baton-roofline"])
def test_the_share_of_time_within_steps(tmp_path: Path, board: str) -> None:
    worker = {"role": "prefill", "replica": "p1"}
    series = [
        grows("baton_engine_busy_seconds_total", 45, **worker),
        grows("baton_engine_idle_seconds_total", 15, **worker),
    ]
    pools = board == "baton-pools"
    title = ("Prefill: share" if pools else "Share") + " of the time within steps"
    shown = '{replica="p1"}' if pools else '{role="prefill"}'
    shows(tmp_path, expr(board, title), series, {shown: 0.75})


def test_the_roof_is_the_lower_one_at_the_intensity_of_the_work(tmp_path: Path) -> None:
    series = [
        stays(name, value, role=role, replica=role)
        for role, intensity in (("decode", 2), ("prefill", 50))
        for name, value in (
            ("baton_roofline_peak_flops", 100),
            ("baton_roofline_peak_bytes_per_second", 10),
            ("baton_arithmetic_intensity", intensity),
        )
    ]
    roofs = {
        '{role="decode", replica="decode"}': 20,
        '{role="prefill", replica="prefill"}': 100,
    }
    title = "Operations per second over operations per byte"
    shows(tmp_path, expr("baton-roofline", title, 2), series, roofs)
