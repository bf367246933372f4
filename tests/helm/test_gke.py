"""What GKE needs besides: its load balancer's health check and times, its server of identities."""

from __future__ import annotations

import re

import pytest

from router.config import RouterConfig
from tests.support.chart import CHART, NAMESPACE, Object, Rendered, render, value_set
from tests.support.network import Party, allowed

METADATA = Party("GKE's metadata server", address="169.254.169.252")
METADATA_V2 = Party("the same, with Dataplane V2", address="169.254.169.254")


@pytest.fixture(scope="module")
def chart() -> Rendered:
    return render(value_set("gke"), "one")


def policy(chart: Rendered, kind: str) -> Object:
    """What a policy of GKE's sets, of the service that the route leads to."""
    spec: Object = chart.one(kind)["spec"]
    (rule,) = chart.one("HTTPRoute")["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    service = chart.one("Service", backend["name"])
    assert spec["targetRef"] == {"group": "", "kind": "Service", "name": backend["name"]}
    assert service["spec"]["selector"]["baton/role"] == "router"
    default: Object = spec["default"]
    return default


def test_the_load_balancer_asks_for_a_path_that_routers_answer(chart: Rendered) -> None:
    """Without a policy it asks for /, which is 404, and sends nobody anything."""
    check = policy(chart, "HealthCheckPolicy")["config"]
    assert check["type"] == "HTTP"
    # at the port that the service leads to, whatever its own
    assert check["httpHealthCheck"] == {
        "portSpecification": "USE_SERVING_PORT",
        "requestPath": "/health",
    }


def test_the_load_balancer_cuts_no_stream_that_a_router_would_not(chart: Rendered) -> None:
    """Its own limit of a whole answer is 30 s, and of those of a pod that goes nothing at all."""
    own = chart.serve_args()["router"]
    longest = own.get("request_timeout_s", RouterConfig.request_timeout_s)
    backend = policy(chart, "GCPBackendPolicy")
    assert backend["timeoutSec"] > longest
    assert 3600 >= backend["connectionDraining"]["drainingTimeoutSec"] > longest
    (rule,) = chart.one("HTTPRoute")["spec"]["rules"]
    assert "timeouts" not in rule, "one limit, said once"


@pytest.mark.parametrize("role", ["head", "router", "prefill", "decode"])
def test_pods_get_tokens_of_their_cloud_account(chart: Rendered, role: str) -> None:
    account = chart.one("ServiceAccount")["metadata"]["annotations"]
    assert "iam.gke.io/gcp-service-account" in account
    pod = Party(role, chart.pods()[role]["metadata"]["labels"], NAMESPACE)
    policies = chart.all("NetworkPolicy")
    for server, port in ((METADATA, 988), (METADATA_V2, 80)):
        assert allowed(policies, pod, server, port), server
    for server, port in ((METADATA, 80), (METADATA_V2, 443)):
        assert not allowed(policies, pod, server, port), server


def test_accounts_that_need_a_binding_are_named() -> None:
    scaled = render(value_set("gke") | {"autoscaling": {"enabled": True}}, "baton")
    accounts = {each["metadata"]["name"] for each in scaled.all("ServiceAccount")}
    text = (CHART / "ci" / "gke.yaml").read_text()
    assert set(re.findall(r"NAMESPACE/([\w-]+)", text)) == accounts == {"baton", "baton-head"}
    used = {pod["spec"]["serviceAccountName"] for pod in scaled.pods().values()}
    assert used == accounts


def test_elsewhere_no_pod_reaches_such_a_server() -> None:
    chart = render(value_set("gpu-rdma"))
    for role, template in chart.pods().items():
        pod = Party(role, template["metadata"]["labels"], NAMESPACE)
        for server, port in ((METADATA, 988), (METADATA_V2, 80)):
            assert not allowed(chart.all("NetworkPolicy"), pod, server, port), role
