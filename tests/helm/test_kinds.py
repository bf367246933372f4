"""Every set of values, all that is optional on and off: Helm and Kubernetes take the chart.

Kinds of Kubernetes, and the pods inside of the RayService, are checked strictly by the schemas of
the three newest versions; kinds of other projects by small schemas of the fields that are used, and
by the projects' own CRDs if BATON_CRD_DIR names a folder that has them.
"""

import os
from pathlib import Path
from typing import Any

import helm_python
import pytest

from tests.support.chart import CHART, NAMESPACE, RELEASE, VALUE_SETS, lint, render
from tests.support.chart_variants import VARIANTS, rendered
from tests.support.kinds import (
    core_error,
    newest_versions,
    parts_errors,
    small_error,
    small_schemas,
    upstream_error,
    upstream_schemas,
)

CORE_GROUPS = ("", "apps", "batch", "networking.k8s.io", "policy", "rbac.authorization.k8s.io")
VERSIONS = newest_versions(3)
SETS = {"cpu-laptop", "gpu-single-node", "gpu-rdma", "gke", "eks-efa", "openshift", "autoscaling"}
LARGEST_PACKAGE = 300 * 1024  # Helm keeps it in a secret with each revision, which holds 1 MiB


def is_core(thing: dict[str, Any]) -> bool:
    group, _, _ = thing["apiVersion"].rpartition("/")
    return group in CORE_GROUPS


@pytest.mark.parametrize("variant", VARIANTS)
def test_helm_finds_nothing_to_complain_of(variant: str) -> None:
    assert lint(VARIANTS[variant]) == []


def test_b124_the_packaged_chart_is_the_one_of_the_folder(tmp_path: Path) -> None:
    archive = Path(helm_python.package(CHART, destination=tmp_path))
    assert archive.stat().st_size < LARGEST_PACKAGE
    values = VARIANTS["everything-on"] | {
        "secrets": {"clusterSecret": {"existingSecret": "given"}}  # one that is made is random
    }
    with helm_python.Chart.load_archive(archive.read_bytes()) as packaged:
        made = packaged.render(values, name=RELEASE, namespace=NAMESPACE)
        assert {each["name"] for each in packaged.files} >= {f"ci/{each}.yaml" for each in SETS}
    assert made == render(values).files


def test_there_are_all_sets_of_values() -> None:
    assert set(VALUE_SETS) == SETS


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_core_kinds_are_valid(variant: str, version: str) -> None:
    objects = rendered(variant).objects
    core = [thing for thing in objects if is_core(thing)]
    others = [thing for thing in objects if not is_core(thing)]
    assert core
    errors = [error for thing in core if (error := core_error(thing, version))]
    errors += [error for thing in others for error in parts_errors(thing, version)]
    assert errors == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_other_kinds_have_the_fields_of_the_small_schemas(variant: str) -> None:
    others = [thing for thing in rendered(variant).objects if not is_core(thing)]
    assert [error for thing in others if (error := small_error(thing))] == []


def test_every_small_schema_is_needed() -> None:
    objects = [thing for variant in VARIANTS for thing in rendered(variant).objects]
    assert {thing["kind"] for thing in objects if not is_core(thing)} == small_schemas().keys()


@pytest.fixture(scope="module")
def upstream() -> dict[tuple[str, str], dict[str, Any]]:
    folder = os.environ.get("BATON_CRD_DIR")
    if not folder:
        pytest.skip("BATON_CRD_DIR names no folder with the CRDs of KubeRay, Prometheus, Gateway")
    return upstream_schemas(Path(folder))


@pytest.mark.parametrize("kind", small_schemas())
def test_other_kinds_are_valid_by_their_projects_own_crds(
    kind: str, upstream: dict[tuple[str, str], dict[str, Any]]
) -> None:
    if kind not in {kind for _, kind in upstream}:
        pytest.skip(f"BATON_CRD_DIR has no CRD of {kind}")
    things = [thing for variant in VARIANTS for thing in rendered(variant).all(kind)]
    assert things
    assert [error for thing in things if (error := upstream_error(thing, upstream))] == []
    unknown = _fields(small_schemas()[kind]) - _fields(upstream[things[0]["apiVersion"], kind])
    assert not unknown, "the small schema has fields that upstream has not"


def _fields(schema: dict[str, Any], path: str = "") -> set[str]:
    """Paths of all fields; what is open has none inside."""
    found = set()
    for key, inner in schema.get("properties", {}).items():
        if key != "metadata":
            found |= {f"{path}.{key}"} | _fields(inner, f"{path}.{key}")
    return found | (_fields(schema["items"], path) if "items" in schema else set())


# --- the checks themselves find what they are for ------------------------------------------------


def test_a_field_that_there_is_not_is_found_in_each_way() -> None:
    version = VERSIONS[-1]
    service = {**rendered("defaults").one("Service")}
    assert core_error(service, version) is None
    service["spec"] = {**service["spec"], "portz": []}
    assert "portz" in str(core_error(service, version))

    ray = {**rendered("defaults").one("RayService")}
    ray["spec"] = {**ray["spec"], "serveConfig": ""}
    assert "serveConfig" in str(small_error(ray))


def test_a_wrong_field_of_a_pod_inside_is_found() -> None:
    pod = {"metadata": {}, "spec": {"containers": [{"name": "a", "imag": "b"}]}}
    ray = {"kind": "RayService", "metadata": {"name": "a"}, "spec": {"groups": [{"template": pod}]}}
    (error,) = parts_errors(ray, VERSIONS[-1])
    assert "imag" in error


def test_a_field_that_must_be_there_is_missed() -> None:
    rule = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule", "metadata": {}}
    assert "'spec' is a required property" in str(small_error(rule))
    rule["spec"] = {"groups": [{"name": "a", "rules": [{"alert": "b"}]}]}
    assert "'expr' is a required property" in str(small_error(rule))
