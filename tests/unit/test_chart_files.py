"""The files of the chart that are written by code: what is committed is what the code makes."""

import json
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
import yaml

from router.config import RouterConfig
from services.chart.__main__ import CHART, COPIES, OBSERVABILITY, files, stale
from services.chart.config_schema import SET_ELSEWHERE, app_schema, router_schema, worker_schema
from services.chart.schema import rule_for, schema_of, values_schema
from services.chart.values import ValuesError, read_values
from services.config import AppConfig, ConfigError, WorkerConfig, from_yaml, keys

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text()

SMALL = """\
# -- how many
# of them
count: 1  # at least one
# --- a line that divides -----

name: ""
block:
  # -- inner
  list: []
"""


@cache
def made() -> dict[Path, str]:
    return files(ROOT)


def test_what_is_committed_is_what_the_code_makes() -> None:
    old = [str(path) for path, text in made().items() if _read(path) != text]
    assert not old, f"run make chart: {old}"
    assert not stale(ROOT, made()), "run make chart"


def _read(path: Path) -> str:
    return (ROOT / path).read_text() if (ROOT / path).exists() else "(missing)"


def test_rules_and_boards_are_copied_whole() -> None:
    for pattern in ("rules.yaml", "alerts.yaml", "dashboards/*.json"):
        sources = list((ROOT / OBSERVABILITY).glob(pattern))
        assert sources
        for source in sources:
            assert made()[COPIES / source.relative_to(ROOT / OBSERVABILITY)] == source.read_text()


def test_chart_and_package_have_the_same_versions() -> None:
    chart = yaml.safe_load((ROOT / CHART / "Chart.yaml").read_text())
    values = yaml.safe_load((ROOT / CHART / "values.yaml").read_text())
    assert f'\nversion = "{chart["version"]}"\n' in PROJECT
    assert chart["appVersion"] == chart["version"]
    assert f'"ray[serve]=={values["rayVersion"]}"' in PROJECT


def test_comments_belong_to_the_key_below_or_beside_them() -> None:
    root = read_values(SMALL)
    count, name, block = root.children
    assert (count.note, count.default) == ("how many of them at least one", 1)
    assert (name.note, name.default) == ("", "")
    assert [(leaf.name, leaf.note, leaf.default) for leaf in block.leaves()] == [
        ("block.list", "inner", [])
    ]


def test_a_comment_sign_within_a_text_is_no_comment() -> None:
    (value,) = read_values('colour: "a # b"  # what it is\n').children
    assert (value.default, value.note) == ("a # b", "what it is")


def test_a_default_that_says_nothing_needs_a_rule() -> None:
    with pytest.raises(ValuesError, match=r"block\.list: its default, \[\], does not say"):
        schema_of(read_values(SMALL), {})


def test_a_rule_for_nothing_is_an_error() -> None:
    with pytest.raises(ValuesError, match="rules for values that there are not: block.lists"):
        values_schema(read_values(SMALL), {"block.lists": {}, "list": {"type": "array"}})


def test_the_longest_rule_holds_and_a_dot_means_the_top() -> None:
    rules = {"config": {}, ".config": {}, "router.config": {}, "fig": {}}
    assert rule_for(("config",), rules) == ".config"
    assert rule_for(("router", "config"), rules) == "router.config"
    assert rule_for(("mixed", "config"), rules) == "config"
    assert rule_for(("mixed",), rules) is None


def test_each_setting_of_the_code_has_a_key_in_the_chart() -> None:
    for cls, schema in (
        (AppConfig, app_schema()),
        (RouterConfig, router_schema()),
        (WorkerConfig, worker_schema()),
    ):
        has = set(schema["properties"]) | SET_ELSEWHERE[cls]
        assert keys(cls).keys() <= has, cls.__name__
        assert all(rule["description"] for rule in schema["properties"].values())
    assert {field.name for field in fields(RouterConfig)} <= keys(RouterConfig).keys()


@pytest.mark.parametrize(
    ("block", "schema"), [("router", router_schema()), ("prefill", worker_schema())]
)
def test_the_schema_refuses_what_the_code_refuses(block: str, schema: dict) -> None:
    """At each border of each number: one step beyond is refused by both, the border by neither."""
    for name, rule in schema["properties"].items():
        number, step = (int, 1) if rule["type"] == "integer" else (float, 0.001)
        for border, beyond in (("minimum", -step), ("maximum", step)):
            if border in rule:
                from_yaml({block: {name: number(rule[border])}})
                with pytest.raises(ConfigError):
                    from_yaml({block: {name: number(rule[border]) + beyond}})
        if "exclusiveMinimum" in rule:
            with pytest.raises(ConfigError):
                from_yaml({block: {name: rule["exclusiveMinimum"]}})
        for choice in rule.get("enum", ()):
            from_yaml({block: {name: choice}})
        if "enum" in rule:
            with pytest.raises(ConfigError):
                from_yaml({block: {name: "something else"}})


def test_defaults_in_the_schema_are_those_of_the_code() -> None:
    config = AppConfig()
    for schema, block in ((router_schema(), config.router), (worker_schema(), config.mixed)):
        for name, rule in schema["properties"].items():
            owner = block if hasattr(block, name) else block.engine
            assert rule["default"] == getattr(owner, name), name


def test_every_level_of_ours_is_closed() -> None:
    schema = json.loads(made()[CHART / "values.schema.json"])

    def open_levels(part: dict, path: str) -> list[str]:
        inner = [
            found
            for key, each in part.get("properties", {}).items()
            for found in open_levels(each, f"{path}.{key}")
        ]
        here = "properties" in part and part.get("additionalProperties") is not False
        return inner + [path] * here

    assert open_levels(schema, "") == []
    for name, part in schema["definitions"].items():
        assert open_levels(part, name) == []
