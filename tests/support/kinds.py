"""Whether rendered objects are what Kubernetes takes: three ways to look at one.

- ``core_error``: kinds of Kubernetes itself, and the pods and metadata inside of others', by
  kubernetes-validate, strictly: a field that there is not is an error.
- ``small_error``: kinds of other projects, by ``tests/data/small_schemas.yaml``.
- ``upstream_error``: the same by those projects' own CRDs, of which there is a folder. Rules in CEL
  are not evaluated, nor what an operator checks by code.
"""

import functools
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml
from kubernetes_validate import utils

Object = dict[str, Any]
Schema = dict[str, Any]

SMALL = Path(__file__).parents[1] / "data" / "small_schemas.yaml"
SCALARS = ("string", "integer", "boolean", "object", "number")

# It reads 2 MB of schemas anew for each object; they do not change.
utils.schema_contents = functools.cache(utils.schema_contents)


def newest_versions(number: int) -> list[str]:
    """The newest Kubernetes versions that there are schemas of."""
    return sorted(set(utils.all_versions()), key=lambda v: [int(part) for part in v.split(".")])[
        -number:
    ]


def core_error(thing: Object, version: str) -> str | None:
    """What is wrong with an object of a core kind, strictly."""
    try:
        kubernetes_validate.validate(thing, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{thing['kind']} at {'.'.join(map(str, error.path))}: {error.message}"
    except kubernetes_validate.SchemaNotFoundError as error:
        return str(error.message)
    return None


def parts_errors(thing: Object, version: str) -> list[str]:
    """What is wrong with the parts that are Kubernetes' own in an object that is not."""
    meta = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": thing["metadata"]}
    pods = [
        {"apiVersion": "v1", "kind": "Pod", **template} for template in pod_templates(thing["spec"])
    ]
    return [error for part in [meta, *pods] if (error := core_error(part, version))]


def pod_templates(tree: Any) -> list[Object]:
    """All values of keys ``template`` anywhere below."""
    if isinstance(tree, list):
        return [found for item in tree for found in pod_templates(item)]
    if not isinstance(tree, dict):
        return []
    here = [tree["template"]] if "template" in tree else []
    return here + [found for key in tree if key != "template" for found in pod_templates(tree[key])]


def small_error(thing: Object) -> str | None:
    """What is wrong with an object of another project's kind, by the small schemas."""
    schemas = small_schemas()
    if thing["kind"] not in schemas:
        return f"no small schema of {thing['kind']}"
    return _error(thing, schemas[thing["kind"]])


@functools.cache
def small_schemas() -> dict[str, Schema]:
    """By kind, as JSON schemas."""
    schemas = {}
    for kind, text in yaml.safe_load(SMALL.read_text()).items():
        schema = _expanded({"kind!": f"={kind}", "metadata!": "object", **text})
        schema["properties"]["apiVersion"] = {"const": text["apiVersion"]}
        schemas[kind] = schema
    return schemas


def _expanded(short: Any) -> Schema:
    """The JSON schema of the notation in the file."""
    if isinstance(short, list):
        (item,) = short
        return {"type": "array", "items": _expanded(item)}
    if isinstance(short, dict):
        if short.keys() == {"*"}:
            return {"type": "object", "additionalProperties": _expanded(short["*"])}
        return {
            "type": "object",
            "properties": {key.removesuffix("!"): _expanded(short[key]) for key in short},
            "required": [key.removesuffix("!") for key in short if key.endswith("!")],
            "additionalProperties": False,
        }
    if short.startswith("="):
        return {"enum": short.removeprefix("=").split("|")}
    kinds = short.split("|")
    if kinds == ["PodTemplate"]:
        return {"type": "object"}
    return {"type": kinds} if set(kinds) <= set(SCALARS) else {"const": short}


def upstream_schemas(folder: Path) -> dict[tuple[str, str], Schema]:
    """By apiVersion and kind, of all CRDs in a folder."""
    schemas = {}
    for path in sorted(folder.glob("*.yaml")):
        for crd in yaml.load_all(path.read_text(), yaml.CSafeLoader):
            spec = (crd or {}).get("spec", {})
            for version in spec.get("versions", ()):
                api = f"{spec['group']}/{version['name']}"
                schema = _closed(version["schema"]["openAPIV3Schema"])
                schema["properties"]["metadata"] = {"type": "object"}
                schemas[api, spec["names"]["kind"]] = schema
    return schemas


def upstream_error(thing: Object, schemas: dict[tuple[str, str], Schema]) -> str | None:
    """What is wrong with an object by its project's own CRD."""
    return _error(thing, schemas[thing["apiVersion"], thing["kind"]])


def _closed(schema: Schema) -> Schema:
    """A structural OpenAPI schema as JSON schema that refuses what the API server would drop."""
    made = {
        key: value
        for key, value in schema.items()
        if not key.startswith("x-") and key not in ("description", "format", "default", "nullable")
    }
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("anyOf", None)
        made["type"] = ["integer", "string"]
    if schema.get("nullable"):
        made["type"] = [made["type"], "null"]
    if "properties" in schema:
        made["properties"] = {key: _closed(each) for key, each in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            made.setdefault("additionalProperties", False)
    for key in ("items", "additionalProperties"):
        if isinstance(made.get(key), dict):
            made[key] = _closed(made[key])
    return made


def _error(thing: Object, schema: Schema) -> str | None:
    error = jsonschema.exceptions.best_match(
        jsonschema.Draft202012Validator(schema).iter_errors(thing)
    )
    if error is None:
        return None
    return f"{thing['kind']} at {'.'.join(map(str, error.path))}: {error.message}"
