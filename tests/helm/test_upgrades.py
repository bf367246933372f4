"""Install, upgrade, roll back and remove, by Helm's engine, on a Kubernetes API in memory.

What rendering alone cannot show: that secrets are made once and kept, that a change of a value
changes what is in the cluster (B126), and that a broken one changes nothing (B118). What
controllers make of the objects is not shown here: none runs.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import helm_python
import pytest
import yaml

from tests.support.chart import CHART, render, value_set
from tests.support.kube_api import KubeApi

Object = dict[str, Any]

NAME = "baton"
CLUSTER_SECRET, API_KEYS, HUB_TOKEN = "baton-cluster-secret", "baton-api-keys", "baton-hub-token"
MODEL_CACHE = "baton-model-cache"


class Release:
    """One release in a cluster of its own."""

    def __init__(self, cluster: KubeApi) -> None:
        self.cluster = cluster
        self.helm = cluster.helm("serving")

    def install(self, values: Object | None = None) -> None:
        self.helm.install(CHART, NAME, values or {})

    def upgrade(self, values: Object | None = None) -> None:
        self.helm.upgrade(CHART, NAME, values or {}, reset_values=True)

    def secret(self, name: str) -> dict[str, str]:
        """The texts in a secret."""
        thing = self.cluster.get("Secret", name)
        assert thing is not None, f"there is no secret {name}"
        return {key: base64.b64decode(text).decode() for key, text in thing["data"].items()}

    def args(self) -> Object:
        """What the application in the cluster is told."""
        ray = self.cluster.get("RayService", NAME)
        assert ray is not None
        (application,) = yaml.safe_load(ray["spec"]["serveConfigV2"])["applications"]
        args: Object = application["args"]
        return args


@pytest.fixture
def release() -> Iterator[Release]:
    with KubeApi() as cluster:
        yield Release(cluster)


def test_the_clusters_secret_is_made_once_and_kept(release: Release) -> None:
    release.install()
    made = release.secret(CLUSTER_SECRET)
    assert len(made["secret"].encode()) >= 16
    release.upgrade({"router": {"replicas": 3}})
    assert release.secret(CLUSTER_SECRET) == made
    release.helm.rollback(NAME, version=1)
    assert release.secret(CLUSTER_SECRET) == made
    release.helm.uninstall(NAME)
    assert release.secret(CLUSTER_SECRET) == made, "pods of an old cluster may still use it"
    release.install()
    assert release.secret(CLUSTER_SECRET) == made


def test_a_secret_that_was_removed_is_made_anew_and_differs(release: Release) -> None:
    release.install()
    made = release.secret(CLUSTER_SECRET)["secret"]
    release.cluster.remove("Secret", CLUSTER_SECRET)
    release.upgrade({"secrets": {"clusterSecret": {"key": "other"}}})
    assert len(release.secret(CLUSTER_SECRET)["other"].encode()) >= 16
    assert release.secret(CLUSTER_SECRET)["other"] != made


def test_with_a_secret_of_the_users_none_is_made() -> None:
    chart = render({"secrets": {"clusterSecret": {"existingSecret": "theirs"}}})
    assert chart.all("Secret") == []
    volumes = chart.pods()["decode"]["spec"]["volumes"]
    assert "theirs" in [volume.get("secret", {}).get("secretName") for volume in volumes]


def test_given_keys_and_tokens_follow_the_values(release: Release) -> None:
    def secrets(keys: list[str], token: str) -> Object:
        return {"secrets": {"apiKeys": {"create": keys}, "hubToken": {"create": token}}}

    release.install(secrets(["one", "two"], "hf_a"))
    assert release.secret(API_KEYS)["api-keys"].split() == ["one", "two"]
    assert release.secret(HUB_TOKEN) == {"token": "hf_a"}
    release.upgrade(secrets(["three"], "hf_b"))
    assert release.secret(API_KEYS)["api-keys"].split() == ["three"]
    assert release.secret(HUB_TOKEN) == {"token": "hf_b"}
    release.upgrade()
    assert release.secret(API_KEYS), "it is kept: somebody may have it only there"
    assert "api_keys_file" not in release.args()["router"]


@pytest.mark.parametrize("keep", [True, False])
def test_what_outlives_the_release(release: Release, keep: bool) -> None:
    release.install({"modelCache": {"enabled": True, "keep": keep}})
    assert release.cluster.get("PersistentVolumeClaim", MODEL_CACHE) is not None
    release.helm.uninstall(NAME)
    left = {place.name for place in release.cluster.objects}
    assert left == ({CLUSTER_SECRET, MODEL_CACHE} if keep else {CLUSTER_SECRET})


def test_b126_a_changed_value_reaches_the_application_and_a_rollback_takes_it_back(
    release: Release,
) -> None:
    release.install()
    before = release.args()
    release.upgrade(
        {
            "config": {"served_model_name": "chat"},
            "router": {"config": {"max_queue": 7}},
            "decode": {"config": {"max_num_seqs": 9}},
            "slo": {"ttftSeconds": 3},
        }
    )
    after = release.args()
    assert after["served_model_name"] == "chat"
    assert after["router"]["max_queue"] == 7
    assert after["decode"]["max_num_seqs"] == 9
    assert after["router"]["slo_ttft_s"] == 3
    release.helm.rollback(NAME, version=1)
    assert release.args() == before


def test_b118_values_that_are_refused_leave_everything_as_it_is(release: Release) -> None:
    release.install()
    before = {place: dict(thing) for place, thing in release.cluster.objects.items()}
    for wrong in (
        {"decode": {"config": {"max_num_seq": 9}}},  # the schema
        {"ray": {"gcsFaultTolerance": {"enabled": True}}},  # a template: no address
    ):
        with pytest.raises(helm_python.HelmError):
            release.upgrade(wrong)
        assert release.cluster.objects == before


def test_without_room_for_two_clusters_none_is_made_beside_the_other() -> None:
    """KubeRay's word for it; then somebody must delete the old one, and the notes say how."""
    values: Object = {"ray": {"upgradeStrategy": {"type": "None"}}}
    chart = render(values, "one", "there")
    assert chart.one("RayService")["spec"]["upgradeStrategy"] == {"type": "None"}
    command = "kubectl -n there delete raycluster $(kubectl -n there get rayservice one-baton -o"
    assert command in chart.notes
    assert "delete raycluster" not in render({}).notes
    single = render(value_set("gpu-single-node")).one("RayService")["spec"]
    assert single["upgradeStrategy"]["type"] == "None", "its GPUs are all in use"


def test_whose_traffic_moves_step_by_step_is_said() -> None:
    """KubeRay's own Gateway's; the chart's route leads to the routers of both clusters."""
    chart = render(value_set("autoscaling"), "one", "there")
    assert "of its own Gateway one-baton-gateway step by step, and no other" in chart.notes
    assert "of the service one-baton, and of the HTTPRoute to it, reach all routers" in chart.notes
    (rule,) = chart.one("HTTPRoute")["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    selector = chart.one("Service", backend["name"])["spec"]["selector"]
    assert "ray.io/cluster" not in selector


def test_a_second_release_of_the_same_names_is_refused(release: Release) -> None:
    """Helm's usual names of "a" and of "a-baton" are the same."""
    release.helm.install(CHART, "a", {})
    with pytest.raises(helm_python.HelmError, match="invalid ownership metadata"):
        release.helm.install(CHART, "a-baton", {})
