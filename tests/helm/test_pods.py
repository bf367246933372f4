"""Every pod of the chart: who it runs as, what it may, how it is looked after, how it ends.

Of the list of faults: B119, B120, B122.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.chart import ROOT, Object, Rendered, refusal, render
from tests.support.chart_variants import VARIANTS, rendered

OWN = ("ray-head", "ray-worker", "test")  # the other containers are the user's
WORKERS = ("prefill", "decode", "mixed")
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


def own_containers(variant: str) -> Iterator[tuple[str, Object, Object]]:
    """Name, pod and container of all that the chart starts itself."""
    for name, spec in rendered(variant).pod_specs():
        for container in [*spec["containers"], *spec.get("initContainers", ())]:
            if container["name"] in OWN:
                yield f"{name} {container['name']}", spec, container


each_variant = pytest.mark.parametrize("variant", VARIANTS)


# --- what it may ---------------------------------------------------------------------------------


@each_variant
def test_nothing_runs_as_root(variant: str) -> None:
    names = []
    for name, spec, container in own_containers(variant):
        context = spec["securityContext"] | container["securityContext"]
        assert context["runAsNonRoot"] is True, name
        # OpenShift chooses the user; elsewhere it is the image's
        assert context.get("runAsUser") == (None if variant == "openshift" else 1000), name
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert context["allowPrivilegeEscalation"] is False, name
        assert "privileged" not in context, name
        names.append(name)
    assert len(names) == len(rendered(variant).pods()) + len(rendered(variant).all("Pod"))


@each_variant
def test_nothing_has_a_capability(variant: str) -> None:
    """Only with ``rdma.runAsRoot``, which is on in no variant; see test_rdma.py."""
    for name, _, container in own_containers(variant):
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}, name


@each_variant
def test_only_volumes_can_be_written(variant: str) -> None:
    for name, spec, container in own_containers(variant):
        assert container["securityContext"]["readOnlyRootFilesystem"] is True, name
        assert not [volume for volume in spec.get("volumes", ()) if "hostPath" in volume], name
        for key in ("hostPID", "hostIPC"):
            assert key not in spec, name


@each_variant
def test_only_the_head_of_an_autoscaling_cluster_has_a_token(variant: str) -> None:
    values = VARIANTS[variant]
    everywhere = values.get("serviceAccount", {}).get("automountToken", False)
    scales = values.get("autoscaling", {}).get("enabled", False)
    for name, spec in rendered(variant).pod_specs():
        wanted = everywhere and not name.startswith("Pod ")
        assert spec["automountServiceAccountToken"] == (wanted or (scales and name == "head")), name


def test_each_pod_has_the_secrets_that_it_reads() -> None:
    """Who builds the application, on any node of Ray, reads the cluster's and asks the hub."""
    secrets = {
        name: {"existingSecret": name.lower()} for name in ("clusterSecret", "apiKeys", "hubToken")
    }
    chart = render({"secrets": secrets, "mixed": {"replicas": 1}})
    has = {}
    for name, spec in chart.pod_specs():
        volumes = {v["secret"]["secretName"] for v in spec.get("volumes", ()) if "secret" in v}
        (container,) = spec["containers"]
        sources = [each.get("valueFrom", {}) for each in container.get("env", ())]
        has[name] = volumes | {s["secretKeyRef"]["name"] for s in sources if "secretKeyRef" in s}
    of_ray = {"clustersecret", "hubtoken"}
    assert has == {
        **dict.fromkeys(("head", *WORKERS), of_ray),
        "router": of_ray | {"apikeys"},
        "Pod baton-test": {"apikeys"},
    }


def test_the_account_of_everybody_gets_no_rights() -> None:
    """The namespace's default one, which pods of others have as well."""
    scales: Object = {"autoscaling": {"enabled": True}}
    for account in ({"create": False}, {"create": False, "name": "default"}):
        assert "the namespace's default account" in refusal(scales | {"serviceAccount": account})
    mine = {"serviceAccount": {"create": False, "name": "mine"}}
    (subject,) = render(scales | mine).one("RoleBinding")["subjects"]
    assert subject["name"] == "mine"
    theirs = {"serviceAccount": {"create": False}, "rbac": {"create": False}}
    assert not render(scales | theirs).all("RoleBinding")


def test_roles_may_do_what_rays_autoscaler_does_and_no_more() -> None:
    role = rendered("autoscaling").one("Role")
    assert role["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]},
        {"apiGroups": ["ray.io"], "resources": ["rayclusters"], "verbs": ["get", "patch"]},
    ]
    assert not rendered("defaults").all("Role")
    for variant in VARIANTS:
        assert not rendered(variant).all("ClusterRole")
        assert not rendered(variant).all("ClusterRoleBinding")


@each_variant
def test_no_secret_stands_in_a_pod_or_in_the_application(variant: str) -> None:
    secrets = VARIANTS[variant].get("secrets", {})
    words = [
        *secrets.get("apiKeys", {}).get("create", []),
        secrets.get("hubToken", {}).get("create"),
    ]
    shown = str([each for each in rendered(variant).objects if each["kind"] != "Secret"])
    assert not [word for word in words if word and word in shown]


def test_the_pods_of_cpu_laptop_fit_a_node_of_8_gib() -> None:
    """And have what was measured (docs/kubernetes.md), with room: a worker's pod took 2.4 GB."""
    units = {"Mi": 1, "Gi": 1024}
    asked, most = {}, {}
    for name, spec in rendered("cpu-laptop").pod_specs():
        resources = spec["containers"][0]["resources"]
        for sizes, kind in ((asked, "requests"), (most, "limits")):
            size = resources[kind]["memory"]
            sizes[name] = int(size[:-2]) * units[size[-2:]]
    assert sum(asked.values()) <= 7 * 1024, "a node keeps some for itself"
    assert most["prefill"] == most["decode"] >= 2.4e9 / 2**20 * 1.2
    assert most["router"] >= 0.8e9 / 2**20 * 1.2
    assert most["head"] >= 2.0e9 / 2**20 * 1.2


# --- how it is looked after ----------------------------------------------------------------------


def test_b120_pods_without_a_replica_become_ready_by_ray_alone() -> None:
    for role, template in rendered("defaults").pods().items():
        (container,) = template["spec"]["containers"]
        ready = container["readinessProbe"]["httpGet"]
        alive = container["livenessProbe"]["httpGet"]
        assert alive == {"path": "/api/local_raylet_healthz", "port": 52365}, role
        if role == "router":
            assert ready["path"].startswith("/ready"), "it has the API, and takes requests by this"
        elif role == "head":
            assert ready["path"] == "/api/gcs_healthz"
        else:
            assert ready == alive, f"{role}: no Serve proxy or replica is asked"


def test_b120_a_slow_first_start_is_the_startup_probes_matter() -> None:
    for role, template in rendered("defaults").pods().items():
        (container,) = template["spec"]["containers"]
        startup = container["startupProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 300, role


def with_probes(**probes: Object) -> dict[str, Object]:
    """The first container of each group, with these values for the probes of all groups."""
    values = {role: dict(probes) for role in ("head", "router", *WORKERS)}
    values["mixed"]["replicas"] = 1
    pods = render(values).pods()
    assert pods.keys() == values.keys()
    return {role: template["spec"]["containers"][0] for role, template in pods.items()}


def test_b120_the_probes_of_each_group_can_be_replaced() -> None:
    given = {"exec": {"command": ["true"]}, "periodSeconds": 7}
    for role, container in with_probes(**dict.fromkeys(PROBES, given)).items():
        assert [container[probe] for probe in PROBES] == [given] * 3, role


@pytest.mark.parametrize("probe", PROBES)
def test_b120_each_probe_can_be_left_out(probe: str) -> None:
    for role, container in with_probes(**{probe: {"enabled": False}}).items():
        assert {*PROBES} & container.keys() == {*PROBES} - {probe}, role


def test_b119_with_redis_a_head_may_be_lost() -> None:
    """What KubeRay needs to start one that knows of the cluster, and to see that one is gone."""
    chart = rendered("autoscaling")
    assert chart.cluster()["gcsFaultToleranceOptions"] == {
        "redisAddress": "redis://redis.redis.svc:6379",
        "redisPassword": {"valueFrom": {"secretKeyRef": {"name": "redis", "key": "password"}}},
    }
    (head,) = chart.pods()["head"]["spec"]["containers"]
    assert head["livenessProbe"], "one that hangs is started anew"
    assert head["readinessProbe"]["httpGet"]["path"] == "/api/gcs_healthz"
    # and requests need no head: their way has no process of it in it
    service = chart.one("Service")["spec"]["selector"]
    assert service["baton/role"] == "router"
    assert chart.one("RayService")["spec"]["excludeHeadPodFromServeSvc"] is True
    without = refusal({"ray": {"gcsFaultTolerance": {"enabled": True}}})
    assert "ray.gcsFaultTolerance.redisAddress" in without


def test_b122_it_needs_no_gpu_no_token_and_no_storage() -> None:
    chart = rendered("defaults")
    kinds = {thing["kind"] for thing in chart.objects}
    assert "PersistentVolumeClaim" not in kinds
    assert kinds <= {
        "RayService", "Service", "ServiceAccount", "Secret", "NetworkPolicy",
        "PodDisruptionBudget", "Pod",
    }  # fmt: skip
    text = str(chart.objects)
    for word in ("nvidia.com/gpu", "rdma/", "HF_TOKEN", "persistentVolumeClaim", "api-keys"):
        assert word not in text, word
    for role in ("prefill", "decode"):
        assert chart.serve_args()[role]["device"] == "cpu"


# --- how it ends ---------------------------------------------------------------------------------


def grace(chart: Rendered, role: str) -> tuple[int, int]:
    """Seconds until a pod is killed, and those that its work gets of them."""
    spec = chart.pods()[role]["spec"]
    command = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    seconds: int = spec["terminationGracePeriodSeconds"]
    return seconds, int(command[command.index("--deadline") + 1])


@pytest.mark.parametrize("drain_s", [None, 0, 45, 0.5, 300])
def test_a_worker_has_the_time_of_a_drain(drain_s: float | None) -> None:
    config = {} if drain_s is None else {"drain_s": drain_s}
    seconds, leave = grace(render({"decode": {"config": config}}), "decode")
    drain = 30 if drain_s is None else drain_s
    assert leave >= drain + 10, "Serve gives a worker ten seconds more"
    assert seconds >= leave + 10, "and Ray has to end after that"


@pytest.mark.parametrize("timeout_s", [None, 20, 300, 7200])
def test_a_router_has_the_time_of_its_longest_request_up_to_a_cap(timeout_s: int | None) -> None:
    config = {} if timeout_s is None else {"request_timeout_s": timeout_s}
    seconds, leave = grace(render({"router": {"config": config}}), "router")
    assert leave >= min(timeout_s or 600, 870)
    assert leave < seconds <= 960


def pre_stop(chart: Rendered, role: str) -> dict[str, str]:
    """The flags of `baton leave` in a role's pods; empty if there is none."""
    (container,) = chart.pods()[role]["spec"]["containers"]
    if "lifecycle" not in container:
        return {}
    program, command, *flags = container["lifecycle"]["preStop"]["exec"]["command"]
    assert (program, command) == ("baton", "leave")
    return dict(zip(flags[::2], flags[1::2], strict=True))


NOTICE_S = 20  # services/leave.py, which imports Ray: until it is known whether all go
SPARE_S = 15  # the start of the command, and the end of Ray


@pytest.mark.parametrize("seconds", [None, 5, 25, 60, 104, 105, 106, 300, 700, 2000])
@pytest.mark.parametrize("role", ["head", "router", "decode"])
def test_what_happens_before_a_pod_ends_fits_the_time_that_is_given(
    role: str, seconds: int | None
) -> None:
    chart = render({role: {"terminationGracePeriodSeconds": seconds}})
    given = chart.pods()[role]["spec"]["terminationGracePeriodSeconds"]
    assert given == (seconds or given)
    flags = pre_stop(chart, role)
    most = int(flags.get("--deadline", 0)) + int(flags.get("--patience", 0))
    assert most + NOTICE_S * ("--after" in flags) <= max(1, given - SPARE_S)


def test_a_shorter_end_takes_from_the_wait_for_others_first() -> None:
    def leave(seconds: int | None) -> dict[str, str]:
        return pre_stop(render({"decode": {"terminationGracePeriodSeconds": seconds}}), "decode")

    assert f"NOTICE_S = {NOTICE_S}.0" in (ROOT / "services" / "leave.py").read_text()
    usual = leave(None)
    assert int(usual["--deadline"]) == 60
    assert int(usual["--patience"]) > 600
    assert leave(5000) == usual
    assert leave(205) == usual | {"--patience": "100"}
    assert leave(105) == usual | {"--patience": "0"}
    assert leave(104) == {"--deadline": "60"}, "no time to find out whether others go"
    assert leave(40) == {"--deadline": "25"}
