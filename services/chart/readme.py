"""The chart's README: every value with its default, what it may be and what it is (pure)."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from router.config import LARGEST
from services.chart.schema import Schema, schema_at
from services.chart.values import Value, ValuesError

HEAD = """\
# The chart

Installs Baton on Kubernetes: a KubeRay `RayService` with one group of pods for each role (routers,
prefill workers, decode workers), and what belongs around it. How to install, upgrade, scale and
check it, step by step: [docs/kubernetes.md](../../docs/kubernetes.md).

Written by `make chart` from `values.yaml`, `services/chart/` and the dataclasses of the
configuration: change it there.

    helm install baton helm/baton --namespace baton --create-namespace

needs KubeRay's operator (1.7 or later) and Kubernetes {kube_version}, and neither GPU nor token nor
storage class. Monitoring, Gateway API and autoscaling are off until they are enabled: they need
CRDs of others.
"""

SETS = """
## Sets of values

For kinds of clusters: `helm install baton helm/baton -f helm/baton/ci/NAME.yaml`.

| file | for |
|---|---|
"""

VALUES = """
## Values

A key that is not here is refused, and so is a wrong value, before anything is installed
(`values.schema.json`).
"""

CONFIG = """
## What stands below `config`

The keys of `baton serve --config`, unchanged. A change of these alone restarts replicas in their
pods, unless `ray.upgradeStrategy.onConfigChange` says otherwise.
"""

SAME_AS = {"decode": "prefill", "mixed": "prefill"}
"""Blocks with the keys of another one: of these only what differs is listed."""

CONFIG_BLOCKS = {
    "`config`: all processes": ("config",),
    "`router.config`": ("router", "config"),
    "`prefill.config`, `decode.config`, `mixed.config`": ("prefill", "config"),
}
"""The blocks ``config`` by their titles; those of workers have the same keys."""


def to_markdown(values: Value, schema: Schema, kube_version: str, sets: Mapping[str, str]) -> str:
    """The page; ``sets`` are the names of the value sets with what each is for."""
    parts = [HEAD.format(kube_version=kube_version), SETS]
    parts += [f"| [{name}](ci/{name}.yaml) | {about} |\n" for name, about in sets.items()]
    parts.append(VALUES)
    blocks = [value for value in values.children if next(_listed(value, schema)) != value]
    top = [value for value in values.children if value not in blocks]
    parts += ["\n", *_table(_row(value, schema, ()) for value in top)]
    for block in blocks:
        parts += _block(block, values, schema)
    parts.append(CONFIG)
    for title, path in CONFIG_BLOCKS.items():
        rows = _config_rows(schema_at(schema, path), _value_at(values, path).default)
        parts += [f"\n### {title}\n\n", *_table(rows)]
    return "".join(parts)


def _block(block: Value, values: Value, schema: Schema) -> list[str]:
    name = block.path[0]
    parts = [f"\n### `{name}`\n\n"]
    if block.note:
        parts.append(f"{_sentence(block.note)}\n\n")
    leaves = list(_listed(block, schema))
    if name in SAME_AS:
        like = _value_at(values, (SAME_AS[name],))
        defaults = {leaf.path[1:]: leaf.default for leaf in _listed(like, schema)}
        leaves = [leaf for leaf in leaves if defaults.get(leaf.path[1:], ...) != leaf.default]
        parts.append(f"The keys of `{SAME_AS[name]}`; of these have another default:\n\n")
        if not leaves:
            parts[-1] = f"The keys and defaults of `{SAME_AS[name]}`.\n"
            return parts
    return parts + _table(_row(leaf, schema, block.path) for leaf in leaves)


def _listed(value: Value, schema: Schema) -> Iterator[Value]:
    """What has a row of its own: all whose schema is not made of their children's."""
    rule = schema_at(schema, value.path)
    inner = {child.path[-1] for child in value.children}
    if inner and inner == rule.get("properties", {}).keys():
        for child in value.children:
            yield from _listed(child, schema)
    else:
        yield value


def _row(value: Value, schema: Schema, below: tuple[str, ...]) -> tuple[str, str, str]:
    rule = schema_at(schema, value.path)
    if "description" not in rule:
        raise ValuesError(f"{value.name}: describe it, by a comment in values.yaml")
    name = ".".join(value.path[len(below) :])
    return name, _code(value.default), _about(rule)


def _config_rows(schema: Schema, values: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """The chart sets some of them itself; the others have the defaults of the code."""
    for name, rule in schema["properties"].items():
        yield name, _code(values.get(name, rule["default"])), _about(rule)


def _value_at(values: Value, path: tuple[str, ...]) -> Value:
    for key in path:
        child = values.child(key)
        if child is None:
            raise ValuesError(f"values.yaml has no {'.'.join(path)}")
        values = child
    return values


def _about(rule: Schema) -> str:
    allowed = _allowed(rule)
    about = rule["description"].replace("|", "\\|")
    return f"{about} ({allowed})" if allowed else about


def _allowed(rule: Schema) -> str:
    if "enum" in rule:
        return ", ".join(_code(each) for each in rule["enum"])
    low, high = rule.get("minimum"), rule.get("maximum")
    if "exclusiveMinimum" in rule:
        return f"above {rule['exclusiveMinimum']:g}"
    if low is not None and high is not None and high < LARGEST:
        return f"{low:g} to {high:g}"
    return "" if low in (None, 0) else f"at least {low:g}"


def _code(value: Any) -> str:
    return f"`{json.dumps(value, ensure_ascii=False)}`".replace("|", "\\|")


def _sentence(note: str) -> str:
    return note[0].upper() + note[1:] + ("" if note.endswith(".") else ".")


def _table(rows: Iterator[tuple[str, str, str]]) -> list[str]:
    lines = [f"| `{name}` | {default} | {about} |\n" for name, default, about in rows]
    return ["| key | default | what it is |\n|---|---|---|\n", *lines]
