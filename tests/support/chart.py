"""The chart rendered by Helm's own engine, as objects that tests can ask questions of.

    chart = render({"prefill": {"replicas": 2}}, name="one")
    chart.one("RayService")["spec"]["serveConfigV2"]
    chart.pods()["prefill"]["spec"]["containers"][0]
    chart.serve_args()  # what services.app.build_app gets

No cluster is asked: ``lookup`` finds nothing, and ``.Capabilities.APIVersions`` has the built-in
groups only. The engine is Go in a shared library, loaded with the first rendering.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "baton"
VALUE_SETS = tuple(sorted(path.stem for path in (CHART / "ci").glob("*.yaml")))
RELEASE, NAMESPACE = "baton", "serving"

Object = dict[str, Any]


@dataclass(frozen=True)
class Rendered:
    """What one ``helm template`` writes."""

    files: Mapping[str, str]  # path below helm/, "baton/templates/x.yaml", to its text
    objects: tuple[Object, ...]  # of all files but NOTES.txt, in the order of their paths

    @property
    def notes(self) -> str:
        """What ``helm install`` prints at its end."""
        return self.files["baton/templates/NOTES.txt"]

    def all(self, kind: str) -> list[Object]:
        """The objects of a kind."""
        return [each for each in self.objects if each["kind"] == kind]

    def one(self, kind: str, name: str | None = None) -> Object:
        """The only object of a kind, or the one of this name."""
        found = [
            each for each in self.all(kind) if name is None or each["metadata"]["name"] == name
        ]
        assert len(found) == 1, f"{len(found)} objects of kind {kind}, name {name}"
        return found[0]

    def cluster(self) -> Object:
        """The RayClusterSpec of the RayService."""
        spec: Object = self.one("RayService")["spec"]["rayClusterConfig"]
        return spec

    def pods(self) -> dict[str, Object]:
        """Pod templates of the Ray cluster: ``head`` and each worker group by its name."""
        cluster = self.cluster()
        groups = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
        return {"head": cluster["headGroupSpec"]["template"]} | {
            name: group["template"] for name, group in groups.items()
        }

    def pod_specs(self) -> Iterator[tuple[str, Object]]:
        """Every pod that the chart starts, with a name for messages; the test pod as well."""
        for name, template in self.pods().items():
            yield name, template["spec"]
        for each in self.objects:
            if each["kind"] == "Pod":
                yield f"Pod {each['metadata']['name']}", each["spec"]
            elif each["kind"] in ("Deployment", "Job", "StatefulSet", "DaemonSet"):
                name = f"{each['kind']} {each['metadata']['name']}"
                yield name, each["spec"]["template"]["spec"]

    def serve_config(self) -> Object:
        """``serveConfigV2``, parsed."""
        config: Object = yaml.safe_load(self.one("RayService")["spec"]["serveConfigV2"])
        return config

    def serve_args(self) -> Object:
        """The arguments of the application: the keys of AppConfig."""
        (application,) = self.serve_config()["applications"]
        args: Object = application["args"]
        return args


def render(
    values: Object | None = None,
    name: str = RELEASE,
    namespace: str = NAMESPACE,
    *,
    upgrade: bool = False,
) -> Rendered:
    """The chart with ``values`` over its own; raises HelmError with the engine's message."""
    files = loaded().render(
        values or {}, name=name, namespace=namespace, is_install=not upgrade, is_upgrade=upgrade
    )
    manifests = [text for path, text in sorted(files.items()) if path.endswith((".yaml", ".yml"))]
    objects = [each for text in manifests for each in yaml.load_all(text, _Loader) if each]
    return Rendered(files, tuple(objects))


@cache
def loaded() -> helm_python.Chart:
    """The chart as the engine has it; read once, and given back with the process."""
    return helm_python.Chart.load(CHART)


def chart_values() -> Object:
    """values.yaml."""
    values: Object = yaml.safe_load((CHART / "values.yaml").read_text())
    return values


def value_set(name: str) -> Object:
    """One of ``helm/baton/ci``."""
    values: Object = yaml.safe_load((CHART / "ci" / f"{name}.yaml").read_text())
    return values


def with_value(values: Object, path: str, value: Any) -> Object:
    """A copy of ``values`` in which the key at "a.b" is another."""
    changed = copy.deepcopy(values)
    *blocks, key = path.split(".")
    at = changed
    for block in blocks:
        at = at.setdefault(block, {})
    at[key] = value
    return changed


def lint(values: Object | None = None) -> list[str]:
    """What ``helm lint --strict`` finds: warnings and errors, none is good."""
    report = helm_python.lint(CHART, values or {}, strict=True)
    found = [f"{each['path']}: {each['error']}" for each in report["messages"] if _bad(each)]
    return found + list(report["errors"])


def _bad(message: Object) -> bool:
    return bool(message["severity"] >= 2)  # 1 is advice, as that on icons


def refusal(values: Object) -> str:
    """Why the chart does not take ``values``; fails where it takes them."""
    try:
        render(values)
    except helm_python.HelmError as error:
        return str(error)
    raise AssertionError(f"taken: {values}")


class _Loader(yaml.CSafeLoader):
    """Refuses a key that stands twice in a mapping, which YAML does not allow and PyYAML takes."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> Object:
    made: Object = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        assert key not in made, f"{key!r} stands twice:{key_node.start_mark}"
        made[key] = loader.construct_object(value_node, deep=True)
    return made


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
