"""B124: each value of values.yaml changes something that is rendered, alone.

Another value for each is found by its schema, and put over a deployment that has everything on. All
of them take half a minute: the short form tries every thirtieth, `--full` each.
"""

import copy
import re
from functools import reduce
from typing import Any

import pytest

from services.chart.schema import schema_at
from services.chart.values import Value, read_values
from tests.support.chart import CHART, Object, loaded, render
from tests.support.chart_variants import EVERYTHING_ON

WORDS = (
    "other", "other/thing", "9Gi", "7s", "/other", "1.2.3", "OTHER", "3", "other:1",
    "sha256:" + "0" * 64, "10.1.0.0/16",
)  # fmt: skip
"""Of these a text takes the first that its pattern lets through."""

LABELLED = {"podSelector": {"matchLabels": {"other": "thing"}}}
SAMPLES: dict[str, Any] = {
    "affinity": {"podAffinity": {}},
    "autoscaling.config": {"budget": 9},
    "clients": [LABELLED],
    "config": {"other": "thing"},
    "ucx.env": {"OTHER": "thing"},
    "rdma.env": {"OTHER": "thing"},
    "ray.env": {"OTHER": "thing"},
    "env": [{"name": "OTHER", "value": "thing"}],
    "envFrom": [{"secretRef": {"name": "other"}}],
    "extraEgress": [{"to": [LABELLED]}],
    "extraObjects": ["kind: ConfigMap\napiVersion: v1\nmetadata: {name: other}"],
    "extraVolumeMounts": [{"name": "other", "mountPath": "/other"}],
    "extraVolumes": [{"name": "other", "emptyDir": {}}],
    "hosts": [{"host": "other", "paths": [{"path": "/", "pathType": "Exact"}]}],
    "initContainers": [{"name": "other", "image": "other"}],
    "metricRelabelings": [{"action": "drop"}],
    "monitoring": [LABELLED],
    "operator": [LABELLED],
    "parentRefs": [{"name": "other"}],
    "relabelings": [{"action": "drop"}],
    "sidecars": [{"name": "other", "image": "other"}],
    "timeouts": {"request": "7s"},
    "tls": [{"secretName": "other"}],
    "to": [LABELLED],
    "tolerations": [{"key": "other"}],
    "topologySpreadConstraints": [{"topologyKey": "other"}],
    "startupProbe": {"periodSeconds": 3},
    "livenessProbe": {"periodSeconds": 3},
    "readinessProbe": {"periodSeconds": 3},
    "router.config": {"max_queue": 3},
    "ports": [54],
    "accessModes": ["ReadWriteOncePod"],
    "minReplicas": 2,
    "maxReplicas": 9,
    **{f"{role}.config": {"max_num_seqs": 3} for role in ("prefill", "decode", "mixed")},
    **{
        f"podDisruptionBudget.{role}": {"minAvailable": 2}
        for role in ("prefill", "decode", "mixed")
    },
    "gpus": 0,
    "ibGidIndex": "5",
}
"""Values whose schema leaves them to Kubernetes, or that depend on others."""


def monitor(kind: str) -> Object:
    kinds = ("podMonitor", "serviceMonitor", "scrapeConfig")
    return {"monitoring": {each: {"enabled": each == kind} for each in kinds}}


NODES = {"networkPolicy": {"nodeCIDRs": ["10.0.0.0/16"]}}
CONTEXTS: dict[str, Object] = {
    "image.tag": {"image": {"digest": ""}},
    "monitoring.serviceMonitor": monitor("serviceMonitor"),
    "monitoring.scrapeConfig": monitor("scrapeConfig"),
    "monitoring.serviceMonitor.enabled": monitor(""),
    "monitoring.scrapeConfig.enabled": monitor(""),
    "kvTransfer.transport": {role: {"gpus": 0} for role in ("prefill", "decode", "mixed")},
    "networkPolicy.nodeCIDRs": {"rdma": {"hostNetwork": True}, **NODES},
    "networkPolicy.allowInternet": {"networkPolicy": {"apiServer": {"to": [LABELLED]}}},
    "router.hostNetwork": NODES,
    "prefill.gpus": {"prefill": {"config": {"device": "cuda"}}},  # as decode is
    "decode.gpus": {"decode": {"config": {"device": "cuda"}}},
    "prefill.hostNetwork": NODES,
    "decode.hostNetwork": NODES,
    "mixed.hostNetwork": NODES,
    "rdma.hostNetwork": NODES,
    "rdma.capabilities": {"rdma": {"runAsRoot": True}},
    "autoscaling.enabled": {"ray": {"upgradeStrategy": {"type": "NewCluster"}}},
    "autoscaling.config": {"autoscaling": {"byLoad": True}},
    "config.metrics_compat": {"inferencePool": {"enabled": False}},
    "serviceAccount.create": {"serviceAccount": {"name": "given"}},
    "modelCache.size": {"modelCache": {"existingClaim": ""}},
}
"""What a value needs beside it; the longest path that it begins with holds."""


def merged(base: Object, over: Object) -> Object:
    """As Helm lays values over each other."""
    made = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(made.get(key), dict)
        made[key] = merged(made[key], value) if both else copy.deepcopy(value)
    return made


GIVEN = {"secrets": {"clusterSecret": {"existingSecret": "given"}}}  # a made one differs each time
BASE = merged(
    EVERYTHING_ON, merged(GIVEN, {"monitoring": {"scrapeConfig": {"apiKey": {"name": "k"}}}})
)


def at(values: Object, path: tuple[str, ...]) -> Any:
    """What a deployment with these values has there."""
    return reduce(lambda part, key: part.get(key) if isinstance(part, dict) else None, path, values)


def context(value: Value) -> Object:
    fitting = [key for key in CONTEXTS if f"{value.name}.".startswith(f"{key}.")]
    return CONTEXTS[max(fitting, key=len)] if fitting else {}


def another(value: Value, now: Any, schema: Object) -> Any:
    """A value that is taken, and is not the one that it has now."""
    suffixes = [".".join(value.path[n:]) for n in range(len(value.path))]
    for suffix in suffixes:
        if suffix in SAMPLES and SAMPLES[suffix] != now:
            return SAMPLES[suffix]
    try:
        rule = schema_at(schema, value.path)
    except KeyError:  # below what a rule is for
        rule = {"type": type(value.default).__name__}
    if "resources" in value.path:
        return "77Mi" if value.path[-1] == "memory" else "7"
    return _by_rule(rule, now)


def _by_rule(rule: Object, now: Any) -> Any:
    if "enum" in rule:
        return next(each for each in reversed(rule["enum"]) if each not in (now, ""))
    kinds = rule["type"] if isinstance(rule["type"], list) else [rule["type"]]
    if {"boolean", "bool"} & set(kinds):
        return not now
    if {"string", "str"} & set(kinds):
        pattern = rule.get("pattern", "")
        return next(word for word in WORDS if re.search(pattern, word) and word != now)
    if {"integer", "number", "int", "float"} & set(kinds):
        step = -1 if now is not None and now == rule.get("maximum") else 1
        return (now or rule.get("minimum", 1)) + step
    if {"array", "list"} & set(kinds):
        return [_by_rule(rule.get("items", {"type": "str"}), None)]
    return {"other": "thing"}


def leaves() -> list[Value]:
    return list(read_values((CHART / "values.yaml").read_text()).leaves())


def test_b124_each_value_changes_what_is_rendered(full: bool) -> None:
    schema = loaded().schema
    assert schema is not None
    without, before = [], ({}, render(BASE).files)
    for value in leaves()[:: 1 if full else 30]:
        if before[0] != context(value):
            before = context(value), render(merged(BASE, context(value))).files
        base = merged(BASE, context(value))
        changed: Any = another(value, at(loaded().merge_values(base), value.path), schema)
        for key in reversed(value.path):
            changed = {key: changed}
        if render(merged(base, changed)).files == before[1]:
            without.append((value.name, changed))
    assert without == []


def test_a_value_that_changes_nothing_is_noticed() -> None:
    assert render(BASE).files == render(merged(BASE, {"global": {"anything": 1}})).files


@pytest.mark.parametrize(
    ("rule", "now", "found"),
    [
        ({"type": "boolean"}, True, False),
        ({"type": "integer", "maximum": 100}, 100, 99),
        ({"type": ["integer", "null"], "minimum": 1}, None, 2),
        ({"type": "string", "pattern": r"^\d+s$"}, "5s", "7s"),
        ({"type": "string", "enum": ["", "a", "b"]}, "b", "a"),
    ],
)
def test_another_value_is_one_that_the_schema_takes(rule: Object, now: Any, found: Any) -> None:
    assert _by_rule(rule, now) == found
