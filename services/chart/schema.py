"""The JSON schema (draft-07) of the chart's values, from values.yaml and the rules (pure).

Keys that are not in values.yaml are refused at every level that is the chart's own. What belongs to
Kubernetes (an affinity, a toleration) is passed on, and checked by Kubernetes.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from services.chart.values import Value, ValuesError

Schema = dict[str, Any]

TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}
NESTED = ("array", "object")


def rule_for(path: tuple[str, ...], rules: Mapping[str, Schema]) -> str | None:
    """The key of the longest rule that fits a path."""
    whole = "." + ".".join(path)
    fitting = [key for key in rules if whole == key or whole.endswith("." + key.lstrip("."))]
    fitting = [key for key in fitting if not key.startswith(".") or whole == key]
    return max(fitting, key=lambda key: (key.startswith("."), key.count(".")), default=None)


def schema_of(value: Value, rules: Mapping[str, Schema], shared: Collection[str] = ()) -> Schema:
    """The schema of one value, all below it included; raises ValuesError where it must be told.

    Rules that are ``shared`` are only referred to.
    """
    key = rule_for(value.path, rules) if value.path else None
    rule = dict(rules[key]) if key else {}
    if key in shared:
        schema = {"$ref": f"#/definitions/{key}"}
        schema |= {"description": rule["description"]} if "description" in rule else {}
    else:
        schema = rule if "type" in rule else _by_default(value, rules, shared) | rule
    if value.note:
        schema["description"] = value.note
    return schema


def _by_default(value: Value, rules: Mapping[str, Schema], shared: Collection[str]) -> Schema:
    if value.children:
        keys = {child.path[-1]: schema_of(child, rules, shared) for child in value.children}
        closed = {"type": "object", "additionalProperties": False, "properties": keys}
        return closed | {"required": _required(value)}
    if type(value.default) in TYPES:
        return {"type": TYPES[type(value.default)]}
    raise ValuesError(
        f"{value.name}: its default, {value.default!r}, does not say what else it can be; give it a"
        " rule in services/chart/rules.py"
    )


def _required(value: Value) -> list[str]:
    """The keys that ``null`` may not take away: what is empty anyhow may be without one."""
    return [child.path[-1] for child in value.children if child.default not in (None, "", [], {})]


def values_schema(values: Value, rules: Mapping[str, Schema]) -> Schema:
    """The schema of a values.yaml; raises ValuesError for a rule that is for nothing in it.

    Rules for lists and mappings of several values stand in it once: Helm reads all of it each time.
    """
    uses = Counter(rule_for(value.path, rules) for value in _all(values))
    if unused := rules.keys() - uses.keys() - {"global"}:
        raise ValuesError(f"rules for values that there are not: {', '.join(sorted(unused))}")
    shared = [key for key, rule in rules.items() if uses[key] > 1 and rule.get("type") in NESTED]
    schema = schema_of(values, rules, shared)
    schema["properties"]["global"] = dict(rules["global"])
    definitions = {
        key: {name: part for name, part in rules[key].items() if name != "description"}
        for key in shared
    }
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Baton"}
    return head | schema | {"definitions": definitions}


def schema_at(schema: Schema, path: tuple[str, ...]) -> Schema:
    """The schema of a value; what it refers to is filled in."""
    definitions = schema["definitions"]
    for key in path:
        schema = schema["properties"][key]
        if "$ref" in schema:
            schema = definitions[schema["$ref"].removeprefix("#/definitions/")] | schema
    return schema


def _all(value: Value) -> list[Value]:
    return [value, *(each for child in value.children for each in _all(child))]
