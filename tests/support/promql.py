"""Every query of the boards and rules, and what each asks for: metrics and labels.

Reads what is committed in ``deploy/observability``, as Grafana and Prometheus do. Grafana's
variables are filled in as it does for "All" and for a window of some scrapes.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import promql_parser
import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "observability"
BOARDS = FOLDER / "dashboards"


@dataclass(frozen=True)
class Asked:
    """One query, and where it stands."""

    where: str  # "baton-slo › Time to first token", or the name of a rule or alert
    expr: str


@dataclass(frozen=True)
class Used:
    """What a query needs of one metric: the names of labels that it selects by."""

    name: str
    labels: frozenset[str]


def filled(expr: str, window: str = "1m") -> str:
    """A board's query as Grafana sends it."""
    for variable, value in (
        ("$model", ".*"),
        ("$replica", ".*"),
        ("$__rate_interval", window),
        ("$__range", window),
    ):
        expr = expr.replace(variable, value)
    assert "$" not in expr, f"a variable that nobody fills in: {expr}"
    return expr


@cache
def board_queries(window: str = "1m") -> tuple[Asked, ...]:
    """Of all panels of all boards, and of the boards' variables."""
    asked = []
    for path in sorted(BOARDS.glob("*.json")):
        board = json.loads(path.read_text())
        for panel in board["panels"]:
            for target in panel.get("targets", []):
                where = f"{board['uid']} › {panel['title']}"
                asked.append(Asked(where, filled(target["expr"], window)))
        for variable in board["templating"]["list"]:
            choice = re.fullmatch(r"label_values\((.*), (\w+)\)", str(variable.get("query")))
            if choice:
                expr = f"count by ({choice[2]}) ({filled(choice[1], window)})"
                asked.append(Asked(f"{board['uid']} › ${variable['name']}", expr))
    assert asked, f"no boards in {BOARDS}"
    return tuple(asked)


@cache
def rule_queries() -> tuple[Asked, ...]:
    """Of all recording rules and alerts."""
    return tuple(
        Asked(rule.get("record") or rule["alert"], rule["expr"])
        for name in ("rules.yaml", "alerts.yaml")
        for group in yaml.safe_load((FOLDER / name).read_text())["groups"]
        for rule in group["rules"]
    )


def recorded() -> set[str]:
    """The names that recording rules make."""
    return {asked.where for asked in rule_queries() if ":" in asked.where}


def used(expr: str) -> list[Used]:
    """The metrics of an expression, each with the labels that are asked of it.

    Labels of an aggregation are asked of every metric inside. Raises ValueError for what is not
    PromQL.
    """
    return list(_used(promql_parser.parse(expr), frozenset()))


_MATCHING = r"(?:\s+(?:on|ignoring|group_left|group_right)\s*\([^()]*\))*"
_BETWEEN = re.compile(rf"\s*(?:\b(?:and|or|unless)\b|[=!<>]=|[<>]){_MATCHING}\s*")


def operands(expr: str) -> list[str]:
    """What an expression compares, or takes the union or difference of: parts that have data even
    where the comparison is false. Numbers are left out; of ``absent(x)`` it is ``x``.
    """
    expr = " ".join(expr.split())
    masked, depth, quoted = "", 0, False
    for char in expr:
        quoted ^= char == '"'
        depth -= not quoted and char in ")]}"
        masked += "_" if depth or quoted else char
        depth += not quoted and char in "([{"
    cuts = [match.span() for match in _BETWEEN.finditer(masked)]
    begins, ends = [0, *(end for _, end in cuts)], [*(begin for begin, _ in cuts), len(expr)]
    parts = [expr[begin:end] for begin, end in zip(begins, ends, strict=True)]
    return [
        part.removeprefix("absent(").removesuffix(")") if part.startswith("absent(") else part
        for part in parts
        if not re.fullmatch(r"[\d.]+", part)
    ]


def _used(node: Any, asked: frozenset[str]) -> Iterator[Used]:
    match node:
        case promql_parser.VectorSelector():
            assert node.name, "a selector without a metric's name"
            yield Used(node.name, asked | {m.name for m in node.matchers.matchers})
        case promql_parser.MatrixSelector():
            yield from _used(node.vector_selector, asked)
        case promql_parser.AggregateExpr():
            by = node.modifier is not None and str(node.modifier.type).endswith("By")
            yield from _used(node.expr, asked | set(node.modifier.labels) if by else asked)
        case promql_parser.BinaryExpr():
            yield from _used(node.lhs, asked)
            yield from _used(node.rhs, asked)
        case promql_parser.Call():
            for argument in node.args:
                yield from _used(argument, asked)
        case promql_parser.ParenExpr() | promql_parser.UnaryExpr() | promql_parser.SubqueryExpr():
            yield from _used(node.expr, asked)
