"""The dataclasses of the configuration as JSON schemas (draft-07): the blocks ``config:`` (pure).

Names, types and defaults are the fields', descriptions the comments beside them, limits those that
:mod:`services.config`, :mod:`router.config` and :mod:`services.planner.config` check again when a
process starts.
"""

import types
import typing
from collections.abc import Collection
from dataclasses import fields, is_dataclass
from typing import Any

from router.config import ABOVE_ZERO, LARGEST, MAY_BE_ZERO, POLICIES, RouterConfig
from services.cli import field_notes
from services.config import LIMITS, ROLES, AppConfig, Limit, WorkerConfig
from services.engine.config import EngineConfig
from services.planner.config import SPANS, PoolScaling, ScalingConfig

Schema = dict[str, Any]

TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}

SYNTAX: dict[str, Schema] = {
    "metrics_compat": {"enum": ["", "vllm"]},
    "tracing_endpoint": {"pattern": r"^(https?://\S+)?$"},
}
"""What the fields with a syntax of their own look like; the code that reads them knows better."""

SET_ELSEWHERE = {
    AppConfig: {
        "host", "port", "routers", "secret_file", "workers_per_host", "router", *ROLES,
        "autoscaling",  # the chart has numbers of its own for pods, and replicas follow these
    },
    RouterConfig: {"api_keys", "api_keys_file", "link_faults"},
    WorkerConfig: {"replicas", "pull_faults", "pace"},
}  # fmt: skip
"""Fields that have a key of their own in the chart's values, that are secrets, or for tests."""

ONE_PROCESS = ("memory",)  # transports that reach no other pod


def app_schema() -> Schema:
    """The keys of a deployment that hold for all processes."""
    schema = _block(AppConfig, but=SET_ELSEWHERE[AppConfig])
    # 0, any free port, is none that a monitor could be told; those below 1024 are root's
    schema["properties"]["metrics_port"]["minimum"] = 1024
    schema["properties"]["model"]["minLength"] = 1
    return schema


def router_schema() -> Schema:
    """The keys of a router."""
    schema = _block(RouterConfig, but=SET_ELSEWHERE[RouterConfig])
    keys = schema["properties"]
    keys["policy"]["enum"] = list(POLICIES)
    for name in MAY_BE_ZERO:
        keys[name] |= {"minimum": 0, "maximum": LARGEST}
    for name in ABOVE_ZERO:
        keys[name] |= {"exclusiveMinimum": 0, "maximum": LARGEST}
    return schema


def worker_schema() -> Schema:
    """The keys of a worker, and of its engine, which stand beside them."""
    schema = _block(WorkerConfig, but=SET_ELSEWHERE[WorkerConfig])
    transports = schema["properties"]["transport"]["enum"]
    schema["properties"]["transport"]["enum"] = [t for t in transports if t not in ONE_PROCESS]
    schema["properties"] |= _block(EngineConfig)["properties"]
    return schema


def scaling_schema() -> Schema:
    """The keys of how pools scale, without those that follow from the numbers of pods."""
    schema = _block(ScalingConfig)
    pool = _block(PoolScaling, but=("min", "max", "devices"))
    for block in (schema, pool):
        for name, rule in block["properties"].items():
            rule["minimum"], rule["maximum"] = SPANS[name]
    for role in ("prefill", "decode"):
        schema["properties"][role] = pool
    return schema


def _block(cls: type[Any], but: Collection[str] = ()) -> Schema:
    notes, hints, defaults = field_notes(cls), typing.get_type_hints(cls), cls()
    properties = {}
    for field in fields(cls):
        default = getattr(defaults, field.name)
        if field.name in but or is_dataclass(default):
            continue
        described = {"description": notes[field.name], "default": default}
        properties[field.name] = described | _kind(hints[field.name]) | _limits(field.name)
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _kind(kind: Any) -> Schema:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        (some,) = (each for each in arguments if each is not type(None))
        return {"type": [TYPES[some], "null"]}
    if origin is tuple:
        return {"type": "array", "items": {"type": TYPES[arguments[0]]}}
    return {"type": TYPES[kind]}


def _limits(name: str) -> Schema:
    limit, schema = LIMITS.get(name, Limit()), dict(SYNTAX.get(name, {}))
    if limit.choices:
        schema["enum"] = list(limit.choices)
    if limit.low is not None:
        schema["minimum"] = limit.low
    if limit.high is not None:
        schema["maximum"] = limit.high
    return schema
