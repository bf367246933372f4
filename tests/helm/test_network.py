"""Which pod may talk to which: the network policies, for pods with the labels that they get.

KubeRay gives pods the labels of their templates. How a network carries out the policies is not
tested here: only a cluster could show it.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from tests.support.chart import NAMESPACE, ROOT, Rendered, refusal, render
from tests.support.network import Object, Party, allowed

API, METRICS, DASHBOARD, GCS = 8000, 9400, 8265, 6379
SOME = 31234  # Ray's workers, ours and NIXL listen on ports that nobody knows before
ALL_ROLES = {role: {"replicas": 1} for role in ("router", "prefill", "decode", "mixed")}
EVERYBODY = ("head", "router", "prefill", "decode", "mixed")
METERED = EVERYBODY[1:]

CLIENT = Party("a client", {"app": "chat"}, NAMESPACE)
STRANGER = Party("a pod elsewhere", {"app": "chat"}, "elsewhere")
PROMETHEUS = Party("Prometheus", {"app.kubernetes.io/name": "prometheus"}, "monitoring")
OPERATOR = Party("KubeRay", {"app.kubernetes.io/component": "kuberay-operator"}, "kuberay-system")
DNS = Party("DNS", {"k8s-app": "kube-dns"}, "kube-system")
PUBLIC = Party("a public address", address="151.101.0.223")
PUBLIC6 = Party("a public address", address="2606:4700::1")
PRIVATE = Party("a private address", address="10.0.7.9")
METADATA = Party("a cloud's metadata", address="169.254.169.254")


class World:
    """A release's pods and its policies."""

    def __init__(self, name: str = "baton", **values: Any) -> None:
        chart = render(ALL_ROLES | values, name)
        self.policies = chart.all("NetworkPolicy")
        self.pods = {role: pod(role, template) for role, template in chart.pods().items()}
        (test,) = chart.all("Pod")
        self.test = Party("helm test", test["metadata"]["labels"], NAMESPACE)

    def may(self, source: str | Party, target: str | Party, port: int) -> bool:
        """Whether a role or somebody else reaches a port."""
        source, target = (
            self.pods[who] if isinstance(who, str) else who for who in (source, target)
        )
        return allowed(self.policies, source, target, port)

    def reached_by(self, source: Party, port: int) -> set[str]:
        """The roles that somebody reaches on a port."""
        return {role for role in EVERYBODY if self.may(source, role, port)}


def pod(role: str, template: Object) -> Party:
    return Party(role, template["metadata"]["labels"], NAMESPACE)


@pytest.fixture(scope="module")
def world() -> World:
    return World()


@pytest.fixture(scope="module")
def narrow() -> World:
    """With clients and Prometheus named."""
    clients = [{"podSelector": {"matchLabels": {"app": "chat"}}}]
    monitoring = [
        {"namespaceSelector": {}, "podSelector": {"matchLabels": dict(PROMETHEUS.labels)}}
    ]
    return World(networkPolicy={"clients": clients, "monitoring": monitoring})


def test_pods_of_the_cluster_talk_to_each_other(world: World) -> None:
    for source, target in itertools.permutations(EVERYBODY, 2):
        for port in (GCS, API, SOME):
            assert world.may(source, target, port), (source, target, port)


@pytest.mark.parametrize("who", [CLIENT, STRANGER], ids=lambda who: who.name)
def test_others_reach_the_api_at_routers_and_nothing_else(world: World, who: Party) -> None:
    assert world.reached_by(who, API) == {"router"}
    assert world.reached_by(who, METRICS) == set(METERED)
    for port in (GCS, DASHBOARD, SOME, 10001, 8080, 52365, 8404, 9101):
        assert world.reached_by(who, port) == set(), port


def test_named_clients_reach_the_api_and_nobody_else(narrow: World) -> None:
    assert narrow.reached_by(CLIENT, API) == {"router"}
    assert narrow.reached_by(STRANGER, API) == set(), "the label is right, the namespace is not"
    assert narrow.reached_by(PROMETHEUS, API) == set()
    assert narrow.may(narrow.test, "router", API), "helm test is a client as well"


def test_named_monitors_read_metrics_and_nobody_else(narrow: World) -> None:
    assert narrow.reached_by(PROMETHEUS, METRICS) == set(METERED)
    assert narrow.reached_by(CLIENT, METRICS) == set()


def test_a_monitor_that_asks_a_router_for_targets_may_do_so() -> None:
    clients = [{"podSelector": {"matchLabels": {"app": "chat"}}}]
    monitoring = [
        {"namespaceSelector": {}, "podSelector": {"matchLabels": dict(PROMETHEUS.labels)}}
    ]
    policy = {"clients": clients, "monitoring": monitoring}
    world = World(networkPolicy=policy, monitoring={"scrapeConfig": {"enabled": True}})
    assert world.reached_by(PROMETHEUS, API) == {"router"}
    assert world.reached_by(STRANGER, API) == set()


def test_only_kuberays_operator_deploys_at_the_head(world: World) -> None:
    assert world.reached_by(OPERATOR, DASHBOARD) == {"head"}
    assert world.reached_by(OPERATOR, GCS) == set()
    impostor = Party("impostor", {"app.kubernetes.io/component": "operator"}, NAMESPACE)
    assert world.reached_by(impostor, DASHBOARD) == set()
    # anybody may give his pods that label, in his own namespace
    for namespace in ("elsewhere", NAMESPACE):
        disguised = Party("disguised", dict(OPERATOR.labels), namespace)
        assert world.reached_by(disguised, DASHBOARD) == set(), namespace


def test_the_operator_is_where_the_page_installs_it() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    (command,) = re.findall(r"helm install kuberay-operator .*", page)
    assert f"--namespace {OPERATOR.namespace} " in command


def test_two_releases_are_strangers_to_each_other(world: World) -> None:
    other = World("other")
    policies = world.policies + other.policies
    for mine, theirs in itertools.product(world.pods.values(), other.pods.values()):
        for port in (GCS, DASHBOARD, SOME):
            assert not allowed(policies, theirs, mine, port), (theirs, mine, port)
            assert not allowed(policies, mine, theirs, port), (mine, theirs, port)
    # nor as clients: pods of Ray reach their own cluster, names and public addresses
    assert not allowed(policies, other.pods["decode"], world.pods["router"], API)


def test_the_test_pod_reaches_the_api_only(world: World) -> None:
    assert world.reached_by(world.test, API) == {"router"}
    for port in (METRICS, DASHBOARD, GCS, SOME):
        assert world.reached_by(world.test, port) == set()
    assert world.may(world.test, DNS, 53)
    assert not world.may(world.test, PUBLIC, 443)
    for who in (CLIENT, STRANGER, *world.pods.values()):
        assert not world.may(who, world.test, SOME)


@pytest.mark.parametrize("role", EVERYBODY)
def test_out_of_the_cluster_is_https_to_public_addresses(world: World, role: str) -> None:
    assert world.may(role, PUBLIC, 443)
    assert world.may(role, PUBLIC6, 443)
    assert not world.may(role, PUBLIC, 80)
    for who in (PRIVATE, METADATA, CLIENT, PROMETHEUS):
        assert not world.may(role, who, 443), who
    assert world.may(role, DNS, 53)
    assert allowed(world.policies, world.pods[role], DNS, 53, "UDP")


@pytest.mark.parametrize("role", EVERYBODY)
def test_without_the_internet_only_names_and_each_other(role: str) -> None:
    world = World(networkPolicy={"allowInternet": False, "dns": {"to": [at(DNS)]}})
    assert not world.may(role, PUBLIC, 443)
    assert world.may(role, DNS, 53)
    assert not world.may(role, PUBLIC, 53), "DNS is where dns.to says"


def test_the_head_reaches_kubernetes_with_autoscaling_and_redis_with_fault_tolerance() -> None:
    redis = Party("Redis", {"app": "redis"}, "storage")
    store = {"enabled": True, "redisAddress": "redis://redis.storage:6390"}
    other = Party("another namespace's", {"app": "redis"}, "elsewhere")
    plain = World()
    able = World(autoscaling={"enabled": True}, ray={"gcsFaultTolerance": store})
    assert not able.may("head", other, 6390)
    assert not plain.may("head", PRIVATE, 6443)
    assert not plain.may("head", redis, 6390)
    for port in (443, 6443):
        assert able.may("head", PRIVATE, port)
    assert able.may("head", redis, 6390)
    assert not able.may("head", redis, 6379)
    for role in METERED:
        assert not able.may(role, PRIVATE, 6443)
        assert not able.may(role, redis, 6390)


def test_without_the_internet_it_is_said_where_kubernetes_is() -> None:
    """Its port is that of everybody's HTTPS."""
    closed = {"allowInternet": False}
    scaling = {"enabled": True}
    message = refusal({"autoscaling": scaling, "networkPolicy": closed})
    assert "networkPolicy.apiServer.to" in message
    assert World(networkPolicy=closed).reached_by(CLIENT, API), (
        "without autoscaling it is no matter"
    )
    there = {"to": [{"ipBlock": {"cidr": f"{PRIVATE.address}/32"}}]}
    world = World(autoscaling=scaling, networkPolicy=closed | {"apiServer": there})
    assert world.may("head", PRIVATE, 6443)
    for port in (443, 6443):
        assert not world.may("head", PUBLIC, port)


def test_traces_reach_their_receiver() -> None:
    receiver = Party("a collector", {"app": "otel"}, "tracing")
    world = World(config={"tracing_endpoint": "http://otel.tracing:4318"})
    for role in METERED:
        assert world.may(role, receiver, 4318)
        assert not world.may(role, receiver, 4317)
        for who in (CLIENT, STRANGER, PRIVATE, PUBLIC):
            assert not world.may(role, who, 4318), who


IN_TRACING = Party("a pod of the namespace tracing", {"app": "otel"}, "tracing")
OTHERS = [CLIENT, STRANGER, IN_TRACING, PRIVATE, PUBLIC, PUBLIC6]


@pytest.mark.parametrize(
    ("address", "reached"),
    [
        ("http://otel:4318", [CLIENT]),  # of this namespace
        ("http://otel.tracing:4318/v1/traces", [IN_TRACING]),
        ("https://otel.tracing.svc:4318", [IN_TRACING]),
        ("http://otel.tracing.svc.cluster.local:4318", [IN_TRACING]),
        ("http://10.0.7.9:4318", [PRIVATE]),
        ("http://[2606:4700::1]:4318", [PUBLIC6]),
        ("http://otel.example.com:4318", OTHERS),  # which may be anywhere
    ],
)
def test_an_address_says_where_it_is_as_far_as_it_does(address: str, reached: list[Party]) -> None:
    world = World(config={"tracing_endpoint": address})
    assert [who for who in OTHERS if world.may("decode", who, 4318)] == reached


def test_where_traces_and_redis_are_can_be_said() -> None:
    store = {"enabled": True, "redisAddress": "rediss://me:secret@redis.example.com:6390"}
    there = {"tracing": {"to": [at(CLIENT)]}, "redis": {"to": [at(PROMETHEUS)]}}
    world = World(
        config={"tracing_endpoint": "http://otel.tracing:4318"},
        ray={"gcsFaultTolerance": store},
        networkPolicy=there,
    )
    assert world.may("decode", CLIENT, 4318)
    assert not world.may("decode", IN_TRACING, 4318)
    assert world.may("head", PROMETHEUS, 6390)
    assert not world.may("head", PRIVATE, 6390)
    for who in (CLIENT, PROMETHEUS):
        assert not world.may("decode", who, 6390), "Redis is the head's"


def test_further_rules_are_added() -> None:
    proxy = Party("a proxy", {"app": "proxy"}, NAMESPACE)
    rule = {"to": [{"podSelector": {"matchLabels": dict(proxy.labels)}}], "ports": [{"port": 3128}]}
    world = World(networkPolicy={"extraEgress": [rule]})
    assert world.may("decode", proxy, 3128)
    assert not world.may("decode", proxy, 3129)


def test_pods_on_their_nodes_network_come_from_the_nodes() -> None:
    node, elsewhere = Party("a node", address="10.20.0.7"), Party("no node", address="10.30.0.7")
    on_nodes = ALL_ROLES | {"decode": {"replicas": 1, "hostNetwork": True}}
    assert "networkPolicy.nodeCIDRs" in refusal(on_nodes)
    rdma = {"enabled": True, "hostNetwork": True}
    assert "networkPolicy.nodeCIDRs" in refusal(ALL_ROLES | {"rdma": rdma})
    world = World(**on_nodes, networkPolicy={"nodeCIDRs": ["10.20.0.0/16"]})
    assert world.may(node, "head", GCS)
    assert world.may("head", node, SOME)
    assert not world.may(elsewhere, "head", GCS)


def test_the_test_pod_reaches_routers_that_are_on_their_nodes_network() -> None:
    node, elsewhere = Party("a node", address="10.20.0.7"), Party("no node", address="10.30.0.7")
    nodes = {"nodeCIDRs": ["10.20.0.0/16"]}
    world = World(router={"replicas": 1, "hostNetwork": True}, networkPolicy=nodes)
    assert world.may(world.test, node, API)
    assert not world.may(world.test, node, METRICS)
    assert not world.may(world.test, elsewhere, API)
    world = World(decode={"replicas": 1, "hostNetwork": True}, networkPolicy=nodes)
    assert not world.may(world.test, node, API), "routers are not there"


def test_kuberays_gateway_reaches_all_that_run_haproxy() -> None:
    gateway = Party("the gateway", {"app": "gateway"}, "gateways")
    upgrade = {"type": "NewClusterWithIncrementalUpgrade", "gatewayClassName": "some"}
    world = World(ray={"upgradeStrategy": upgrade}, autoscaling={"enabled": True})
    assert world.reached_by(gateway, API) == set(METERED)


def test_without_policies_nothing_is_closed() -> None:
    """The model itself: what says "no" above are the policies."""
    chart: Rendered = render(ALL_ROLES | {"networkPolicy": {"enabled": False}})
    assert not chart.all("NetworkPolicy")
    world = World()
    assert allowed([], STRANGER, world.pods["head"], GCS)
    without_ray = [each for each in world.policies if not each["metadata"]["name"].endswith("-ray")]
    assert not allowed(without_ray, world.pods["router"], world.pods["head"], GCS)


def at(party: Party) -> Object:
    """A peer that is this pod, wherever it is."""
    return {"namespaceSelector": {}, "podSelector": {"matchLabels": dict(party.labels)}}
