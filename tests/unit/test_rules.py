"""The rules and alerts that we ship: each has its cases, says something, and is documented.

Whether the cases hold is promtool's business: ``tests/integration/test_promtool.py``.
"""

import re
from functools import cache
from typing import Any

import pytest
import yaml

from router.observation import ERROR_TYPES, WRONG_REQUESTS
from tests.support.promql import FOLDER, ROOT, operands, recorded, rule_queries, used

SEVERITIES = {"page", "ticket"}


def rules(file: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / file).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


@cache
def cases() -> list[tuple[str, bool, str]]:
    """(alert, whether it is to fire, which test) of all test files."""
    return [
        (case["alertname"], bool(case["exp_alerts"]), test["name"])
        for file in sorted(FOLDER.glob("*_test.yaml"))
        for test in yaml.safe_load(file.read_text())["tests"]
        for case in test["alert_rule_test"]
    ]


ALERTS = rules("alerts.yaml")
NAMES = [alert["alert"] for alert in ALERTS]


@pytest.mark.parametrize("name", NAMES)
def test_an_alert_has_a_case_that_fires_and_one_that_does_not(name: str) -> None:
    found = [(fires, test) for alert, fires, test in cases() if alert == name]
    assert {fires for fires, _ in found} == {True, False}
    # ... apart from the idle system, in which everything is silent
    assert any(not fires and test != "idle" for fires, test in found)
    assert any(not fires and test == "idle" for fires, test in found)


def test_no_case_is_about_an_alert_that_is_gone() -> None:
    assert {alert for alert, _, _ in cases()} == set(NAMES)
    assert len(set(NAMES)) == len(NAMES)


def test_burn_rates_have_cases_for_each_objective() -> None:
    burning = {
        (case["alertname"], alert["exp_labels"]["slo"])
        for test in yaml.safe_load((FOLDER / "slo_test.yaml").read_text())["tests"]
        for case in test["alert_rule_test"]
        for alert in case["exp_alerts"]
    }
    assert {slo for _, slo in burning} == {"ttft", "tpot", "errors"}
    assert {name for name, _ in burning} == {name for name in NAMES if "Budget" in name}


@pytest.mark.parametrize("alert", ALERTS, ids=NAMES)
def test_an_alert_says_how_urgent_it_is_and_what_to_do(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in SEVERITIES
    assert set(alert["annotations"]) == {"summary", "description"}
    assert alert["alert"] in (ROOT / "docs" / "observability.md").read_text()


def test_rules_use_only_recorded_names_that_there_are() -> None:
    names = {one.name for asked in rule_queries() for one in used(asked.expr)}
    assert {name for name in names if ":" in name} <= recorded()


def test_what_counts_as_no_error_of_ours_is_called_as_the_routers_call_it() -> None:
    assert set(WRONG_REQUESTS) - {"validation"} <= set(ERROR_TYPES.values())
    left_out = re.findall(r'error_type!~"([^"]+)"', (FOLDER / "rules.yaml").read_text())
    assert left_out
    for pattern in left_out:
        assert sorted(pattern.split("|")) == sorted([*WRONG_REQUESTS, "cancelled"])


def test_every_window_of_the_burn_rates_is_recorded_from_counters_of_that_window() -> None:
    for rule in rules("rules.yaml"):
        window = re.search(r"rate(\d+\w)$", rule["record"])
        if window:
            ranges = set(re.findall(r"\[(\w+)\]", rule["expr"]))
            recorded_ranges = set(re.findall(r"rate(\d+\w)\b", rule["expr"]))
            assert ranges | recorded_ranges == {window[1]}, rule["record"]


@pytest.mark.parametrize(
    ("expr", "parts"),
    [
        ("a", ["a"]),
        ("a / b > 0.5", ["a / b"]),
        ('up{job="x>y"} == 0', ['up{job="x>y"}']),
        ("a > 14.4 and b > 14.4 and on (m, n) sum by (m) (c) > 10", ["a", "b", "sum by (m) (c)"]),
        ("max by (m) (a)\n < on (m) max by (m) (b)", ["max by (m) (a)", "max by (m) (b)"]),
        ("a > 0 unless on (m) increase(b[5m]) > 0", ["a", "increase(b[5m])"]),
        ('absent(up{role="router"})', ['up{role="router"}']),
        ("1 - (a or 0 * b) / b", ["1 - (a or 0 * b) / b"]),
    ],
)
def test_operands_are_found_at_the_top_only(expr: str, parts: list[str]) -> None:
    assert operands(expr) == parts


def test_what_is_of_days_is_not_computed_at_every_scrape() -> None:
    for group in yaml.safe_load((FOLDER / "rules.yaml").read_text())["groups"]:
        ranges = {
            found for rule in group["rules"] for found in re.findall(r"\[(\w+)\]", rule["expr"])
        }
        longest = "1m" if ranges & {"6h", "3d"} else "30s" if ranges & {"30m", "1h"} else None
        assert group.get("interval") == longest, group["name"]


def test_cases_evaluate_all_groups_in_the_order_of_the_files() -> None:
    """promtool takes them in any order; what one uses of another would be of the time before."""
    groups = [
        group["name"]
        for file in ("rules.yaml", "alerts.yaml")
        for group in yaml.safe_load((FOLDER / file).read_text())["groups"]
    ]
    for file in FOLDER.glob("*_test.yaml"):
        assert yaml.safe_load(file.read_text())["group_eval_order"] == groups, file.name
