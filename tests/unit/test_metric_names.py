"""One list of names: what the processes export, what docs/observability.md lists, and what boards,
rules and alerts ask for.

B109: a board that asks for a metric or a label that does not exist. That each query returns data is
shown by ``tests/serve/test_prometheus.py``.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest
import yaml
from prometheus_client import CollectorRegistry

from router.config import RouterConfig, RouterSettings
from router.dispatch import Dispatcher
from router.ledger import Ledger
from router.metrics import RouterMetrics
from router.scraping import no_targets
from services.dashboards.boards import all_boards
from tests.support.promql import FOLDER, ROOT, Asked, board_queries, recorded, rule_queries, used
from tests.support.worker_box import Box

PAGE = ROOT / "docs" / "observability.md"
KINDS = {"C": "counter", "G": "gauge", "H": "histogram"}
OF_TARGETS = {"job", "instance", "role", "replica", "model"}  # as prometheus.yaml gives them
OF_PROMETHEUS = {"up", "scrape_duration_seconds"}


@dataclass(frozen=True)
class Metric:
    """A family: its kind, and the names of its labels."""

    kind: str
    labels: frozenset[str]


def listed() -> dict[str, Metric]:
    """The tables of the page."""
    found: dict[str, Metric] = {}
    common: frozenset[str] = frozenset()
    section = PAGE.read_text().split("## All metrics")[1].split("\n## ")[0]
    for line in section.splitlines():
        if line.startswith("### "):
            common = frozenset(re.findall(r"`(\w+)`", line))
        elif line.startswith("| `"):
            name, kind, labels = [cell.strip() for cell in line.split("|")[1:4]]
            own = {label.strip() for label in labels.split(",") if label.strip()}
            assert name.strip("`") not in found, f"{name} is listed twice"
            found[name.strip("`")] = Metric(KINDS[kind], common | own)
    return found


@cache
def exported() -> dict[str, Metric]:
    """The families of a router and of a worker that have done nothing yet."""
    return dict([*_families(router_registry()), *_families(Box("d1").registry())])


def router_registry() -> CollectorRegistry:
    settings = RouterSettings(RouterConfig(), "", "tiny", "r1", b"secret")
    return RouterMetrics(settings, Ledger(), [], Dispatcher(settings, no_targets)).registry


def _families(registry: CollectorRegistry) -> Iterator[tuple[str, Metric]]:
    for family in registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        labels |= set(family._labelnames)  # of one that has no samples yet
        yield name, Metric(family.type, frozenset(labels))


def series(metrics: dict[str, Metric]) -> dict[str, frozenset[str]]:
    """Names of series, as queries write them, and their labels."""
    found = {}
    for name, metric in metrics.items():
        if metric.kind == "histogram":
            found[f"{name}_bucket"] = metric.labels | {"le"}
            found[f"{name}_sum"] = found[f"{name}_count"] = metric.labels
        else:
            found[name] = metric.labels
    return found


QUERIES = board_queries() + rule_queries()


def test_the_page_lists_what_the_processes_export() -> None:
    page, code = listed(), exported()
    assert sorted(code.keys() - page.keys()) == [], "not in docs/observability.md"
    assert sorted(page.keys() - code.keys()) == [], "in docs/observability.md, but in no process"
    assert {n: m for n, m in code.items() if page[n] != m} == {}, "kind or labels differ"


@pytest.mark.parametrize("asked", QUERIES, ids=lambda asked: asked.where)
def test_b109_every_metric_and_label_of_a_query_exists(asked: Asked) -> None:
    known, made = series(exported()), recorded()
    found = used(asked.expr)
    assert found or asked.expr.startswith("vector("), "asks for nothing"
    for need in found:
        if need.name in made or need.name in OF_PROMETHEUS:
            continue
        assert need.name in known, f"{asked.where}: no process exports {need.name}"
        strange = need.labels - known[need.name] - OF_TARGETS
        assert not strange, f"{asked.where}: {need.name} has no label {sorted(strange)}"


def test_no_metric_is_left_out_of_all_boards() -> None:
    asked = {need.name for query in board_queries() for need in used(query.expr)}
    unused = {
        name for name, metric in exported().items() if not asked & series({name: metric}).keys()
    }
    print(f"\nmetrics that no board shows: {sorted(unused) or 'none'}")
    assert not unused


def test_a_name_or_label_that_does_not_exist_would_be_found() -> None:
    known = series(exported())
    (wrong,) = used('sum by (rolle) (rate(baton_workers{state="ready"}[1m]))')
    assert wrong.labels - known[wrong.name] == {"rolle"}
    assert used("baton_wrokers")[0].name not in known
    with pytest.raises(ValueError, match=r".*"):
        used("sum by (role")


def test_the_page_names_panels_that_exist() -> None:
    text = " ".join(PAGE.read_text().split())
    named = re.findall(r"\*\*([^*]+?) › ([^*]+?)\*\*", text)
    boards = {
        board.title.removeprefix("Baton: "): {panel.title for panel in board.panels()}
        for board in all_boards()
    }
    assert len(named) > 40
    assert [f"{b} › {p}" for b, p in named if p not in boards.get(b, ())] == []


def test_the_page_lists_every_alert_with_its_severity() -> None:
    rules = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    alerts = {
        rule["alert"]: rule["labels"]["severity"]
        for group in rules
        for rule in group["rules"]
        if "alert" in rule
    }
    section = PAGE.read_text().split("## Alerts")[1].split("\n## ")[0]
    assert dict(re.findall(r"`(Baton\w+)` \((\w+)\)", section)) == alerts
