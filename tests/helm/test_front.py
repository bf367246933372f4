"""How clients come in: service, ingress, route, pool. And budgets, notes, and helm test's pod."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.chart import Rendered, refusal, render
from tests.support.network import selects
from tests.support.stub_server import running_stub

ALL_ROLES = {role: {"replicas": 1} for role in ("router", "prefill", "decode", "mixed")}
COMPAT = {"config": {"metrics_compat": "vllm"}}
POOL = {"inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}}}


def selected(chart: Rendered, labels: dict[str, str]) -> set[str]:
    """The roles whose pods have these labels."""
    return {
        role
        for role, template in chart.pods().items()
        if selects({"matchLabels": labels}, template["metadata"]["labels"])
    }


def test_the_service_is_the_routers() -> None:
    chart = render(ALL_ROLES | {"service": {"port": 80, "type": "NodePort", "labels": {"a": "b"}}})
    service = chart.one("Service")
    assert selected(chart, service["spec"]["selector"]) == {"router"}
    assert service["spec"]["type"] == "NodePort"
    assert service["metadata"]["labels"]["a"] == "b"
    (port,) = service["spec"]["ports"]
    assert port["port"] == 80
    (container,) = chart.pods()["router"]["spec"]["containers"]
    named = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert named[port["targetPort"]] == chart.serve_config()["http_options"]["port"]


def test_a_load_balancers_settings() -> None:
    wanted = {"loadBalancerClass": "example.com/lb", "loadBalancerSourceRanges": ["192.0.2.0/24"]}
    spec = render({"service": {"type": "LoadBalancer"} | wanted}).one("Service")["spec"]
    assert wanted.items() <= spec.items()
    assert not wanted.keys() & render({"service": wanted}).one("Service")["spec"].keys()


def test_a_router_takes_requests_when_its_cluster_can_carry_them() -> None:
    """B118: a cluster that starts beside another one gets no requests before it can serve them."""
    chart = render()
    (container,) = chart.pods()["router"]["spec"]["containers"]
    probe = container["readinessProbe"]["httpGet"]
    path, _, query = probe["path"].partition("?")
    assert path == "/ready"
    assert float(query.removeprefix("settled=")) >= 60
    assert probe["port"] == chart.one("Service")["spec"]["ports"][0]["targetPort"]


def test_the_ingress_leads_to_the_service() -> None:
    tls = [{"secretName": "cert", "hosts": ["llm.example.com"]}]
    ingress = {
        "enabled": True, "className": "nginx", "tls": tls,
        "annotations": {"nginx.ingress.kubernetes.io/proxy-buffering": "off"},
        "hosts": [{"host": "llm.{{ .Release.Name }}.com"}, {"paths": [{"path": "/v1"}]}],
    }  # fmt: skip
    chart = render({"ingress": ingress}, "example")
    made = chart.one("Ingress")
    assert made["spec"]["ingressClassName"] == "nginx"
    assert made["spec"]["tls"] == tls
    assert made["metadata"]["annotations"] == ingress["annotations"]
    first, second = made["spec"]["rules"]
    assert first["host"] == "llm.example.com"
    assert "host" not in second, "any host"
    service = chart.one("Service")
    for rule, path in ((first, "/"), (second, "/v1")):
        (entry,) = rule["http"]["paths"]
        assert (entry["path"], entry["pathType"]) == (path, "Prefix")
        assert entry["backend"]["service"]["name"] == service["metadata"]["name"]
        assert entry["backend"]["service"]["port"] == {"name": service["spec"]["ports"][0]["name"]}


def test_the_route_leads_to_the_service_or_to_the_pool() -> None:
    route = {
        "enabled": True, "parentRefs": [{"name": "gateway", "namespace": "infra"}],
        "hostnames": ["llm.example.com"], "timeouts": {"request": "600s"},
    }  # fmt: skip
    chart = render({"httpRoute": route, "service": {"port": 81}})
    spec = chart.one("HTTPRoute")["spec"]
    assert spec["parentRefs"] == route["parentRefs"]
    assert spec["hostnames"] == route["hostnames"]
    (rule,) = spec["rules"]
    assert rule["timeouts"] == route["timeouts"]
    name = chart.one("Service")["metadata"]["name"]
    assert rule["backendRefs"] == [{"name": name, "port": 81}]
    chart = render({"httpRoute": route} | COMPAT | POOL)
    pool = chart.one("InferencePool")
    (rule,) = chart.one("HTTPRoute")["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    assert backend["kind"] == pool["kind"]
    assert pool["apiVersion"].startswith(backend["group"])
    assert backend["name"] == pool["metadata"]["name"]


def test_the_pool_is_the_routers() -> None:
    chart = render(ALL_ROLES | COMPAT | POOL)
    spec = chart.one("InferencePool")["spec"]
    assert selected(chart, spec["selector"]["matchLabels"]) == {"router"}
    assert spec["targetPorts"] == [{"number": chart.serve_config()["http_options"]["port"]}]
    assert spec["endpointPickerRef"]["name"] == "picker"
    assert spec["endpointPickerRef"]["port"] == {"number": 9002}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"httpRoute": {"enabled": True}}, "httpRoute.parentRefs"),
        ({"ingress": {"enabled": True, "hosts": []}}, "ingress.hosts"),
        (POOL, "config.metrics_compat"),
        (COMPAT | {"inferencePool": {"enabled": True}}, "inferencePool.endpointPicker.name"),
        (
            COMPAT | POOL | {"router": {"config": {"metrics_public": False}}},
            "router.config.metrics_public",
        ),
    ],
)
def test_what_is_missing_is_said(values: dict[str, Any], message: str) -> None:
    assert message in refusal(values)


def test_budgets_are_numbers_of_pods_that_stay() -> None:
    """Of pods that belong to a RayCluster, Kubernetes takes nothing else."""
    budget = {"decode": {"minAvailable": 2, "unhealthyPodEvictionPolicy": "IfHealthyBudget"}}
    chart = render({"decode": {"replicas": 3}, "podDisruptionBudget": budget})
    made = _budgets(chart)
    assert {role: spec["minAvailable"] for role, spec in made.items()} == {"router": 1, "decode": 2}
    for role, spec in made.items():
        assert selected(chart, spec["selector"]["matchLabels"]) == {role}
    assert made["router"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert made["decode"]["unhealthyPodEvictionPolicy"] == "IfHealthyBudget"
    assert not _budgets(render({"podDisruptionBudget": {"enabled": False}}))


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_no_budget_keeps_every_node_from_being_drained(replicas: int) -> None:
    """Neither of the head, nor of a role that has no pod to spare."""
    roles = {role: {"replicas": replicas} for role in ("router", "prefill", "decode")}
    budget = {"prefill": {"minAvailable": 2}, "mixed": {"minAvailable": 1}}
    made = _budgets(render(roles | {"podDisruptionBudget": budget}))
    for role, spec in made.items():
        assert replicas > spec["minAvailable"], role
    assert set(made) == {1: set(), 2: {"router"}, 3: {"router", "prefill"}}[replicas]


def test_a_pool_that_shrinks_has_its_least_to_spare() -> None:
    """Not what it begins with; a router's number stays."""
    roles = {role: {"replicas": 3, "maxReplicas": 4} for role in ("router", "prefill", "decode")}
    roles["prefill"]["minReplicas"], roles["decode"]["minReplicas"] = 1, 2
    roles["router"]["minReplicas"] = 1
    budget = {role: {"minAvailable": 1} for role in ("prefill", "decode")}
    for by_load, with_budget in ((True, {"router", "decode"}), (False, set(roles))):
        scaling = {"enabled": True, "byLoad": by_load}
        values = {"podDisruptionBudget": budget, "autoscaling": scaling}
        assert set(_budgets(render(roles | values))) == with_budget, scaling


def _budgets(chart: Rendered) -> dict[str, dict[str, Any]]:
    """By role."""
    return {
        each["metadata"]["labels"]["baton/role"]: each["spec"]
        for each in chart.all("PodDisruptionBudget")
    }


def test_extra_objects_are_templates() -> None:
    text = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: '{{ .Release.Name }}-b'}\n"
    mapping = {
        "apiVersion": "v1", "kind": "ConfigMap", "data": {"image": '{{ include "baton.image" . }}'},
        "metadata": {"name": "{{ .Release.Name }}-a"},
    }  # fmt: skip
    chart = render({"extraObjects": [mapping, text]}, "one")
    a, b = chart.one("ConfigMap", "one-a"), chart.one("ConfigMap", "one-b")
    assert a["data"]["image"].startswith("ghcr.io/")
    assert b["kind"] == "ConfigMap"


def test_notes_say_how_to_ask_and_what_is_open() -> None:
    keys = {"secrets": {"apiKeys": {"existingSecret": "my-keys", "key": "keys.txt"}}}
    closed = render(keys | {"networkPolicy": {"clients": [{"podSelector": {}}]}}, "one").notes
    assert "helm test one" in closed
    assert "Authorization: Bearer" in closed
    assert "get secret my-keys" in closed
    assert r"{.data.keys\.txt}" in closed
    assert "WARNING" not in closed
    open_ = render({"service": {"type": "LoadBalancer"}, "networkPolicy": {"enabled": False}}).notes
    assert "asks for no key" in open_
    assert "networkPolicy is off" in open_
    assert "Bearer" not in open_


# --- helm test -----------------------------------------------------------------------------------


def run_test_pod(
    url: str, keys: Path | None = None, patience_s: int = 30
) -> subprocess.CompletedProcess[str]:
    """What the pod of ``helm test`` runs, here, against another URL."""
    secret = {"apiKeys": {"existingSecret": "keys"}} if keys else {}
    (pod,) = render({"tests": {"timeoutSeconds": patience_s}, "secrets": secret}).all("Pod")
    (container,) = pod["spec"]["containers"]
    assert container["command"] == ["python3", "-c"]
    script, asked, seconds, *files = container["args"]
    assert asked == "http://baton.serving.svc:8000"
    assert len(files) == (1 if keys else 0)
    arguments = [script, url, seconds, *([str(keys)] if keys else [])]
    return subprocess.run(
        [sys.executable, "-c", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_helm_test_asks_for_a_completion_and_a_stream(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first\nsecond\n")
    with running_stub(model="m", ttft_ms=1.0, itl_ms=1.0) as stub:
        done = run_test_pod(f"http://127.0.0.1:{stub.port}", keys)
        assert done.returncode == 0, done.stderr
        whole, stream = stub.requests()
    assert not whole.body.get("stream")
    assert stream.body["stream"] is True
    assert whole.body["model"] == stream.body["model"] == "m"
    assert "one completion: ' w0" in done.stdout
    assert "one stream: ' w0" in done.stdout


@pytest.mark.parametrize(
    ("stub", "says"),
    [
        ({"status": 500}, "HTTP Error 500"),
        ({"fault": "end", "fault_at": 2}, "does not end as it should"),
        ({"fault": "error", "fault_at": 2}, "ends by an error"),
    ],
)
def test_helm_test_fails_where_the_api_does(stub: dict[str, Any], says: str) -> None:
    with running_stub(ttft_ms=1.0, itl_ms=1.0, **stub) as server:
        done = run_test_pod(f"http://127.0.0.1:{server.port}")
    assert done.returncode != 0
    assert says in done.stderr


def test_helm_test_fails_where_nobody_answers() -> None:
    done = run_test_pod("http://127.0.0.1:9", patience_s=1)
    assert done.returncode != 0
    assert "not ready within 1 s" in done.stderr


def test_the_test_pod_mounts_the_keys_and_no_more() -> None:
    keys = {"apiKeys": {"existingSecret": "keys", "key": "all"}}
    (pod,) = render({"secrets": keys}).all("Pod")
    spec = pod["spec"]
    (container,) = spec["containers"]
    (volume,), (mount,) = spec["volumes"], container["volumeMounts"]
    assert volume["secret"] == {"secretName": "keys", "items": [{"key": "all", "path": "all"}]}
    assert container["args"][-1] == f"{mount['mountPath']}/all"
    assert mount["readOnly"]
    assert spec["automountServiceAccountToken"] is False
    (plain,) = render().all("Pod")
    assert "volumes" not in plain["spec"]
    assert not render({"tests": {"enabled": False}}).all("Pod")
