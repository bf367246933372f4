"""Wrong values are refused before anything is installed, by a message that says where and why."""

from collections import Counter, defaultdict
from functools import cache
from typing import Any

import pytest

from tests.support.chart import chart_values, refusal, render

Values = dict[str, Any]

UNKNOWN = "additional properties '{}' not allowed"

WRONG: list[tuple[Values, str, str]] = [
    # every key at the top: the wrong kind, or a key that it does not have
    ({"nameOverride": "Not A Name"}, "/nameOverride", "does not match pattern"),
    ({"fullnameOverride": 7}, "/fullnameOverride", "got number, want string"),
    ({"commonLabels": {"team": "a b"}}, "/commonLabels/team", "does not match pattern"),
    ({"commonLabels": {"long": "x" * 64}}, "/commonLabels/long", "maxLength: got 64, want 63"),
    ({"commonLabels": {"a b": "team"}}, "'a b'", "invalid propertyName"),
    ({"commonAnnotations": {"a": 1}}, "/commonAnnotations/a", "got number, want string"),
    ({"image": {"repo": "x"}}, "/image", UNKNOWN.format("repo")),
    ({"image": {"pullPolicy": "always"}}, "/image/pullPolicy", "must be one of 'Always'"),
    ({"image": {"digest": "latest"}}, "/image/digest", "does not match pattern"),
    ({"rayVersion": 2.6}, "/rayVersion", "got number, want string"),
    ({"config": {"modell": "x"}}, "/config", UNKNOWN.format("modell")),
    ({"config": {"port": 8001}}, "/config", UNKNOWN.format("port")),
    ({"config": {"metrics_port": 0}}, "/config/metrics_port", "got 0, want 1,024"),
    ({"config": {"metrics_compat": "sglang"}}, "/config/metrics_compat", "must be one of"),
    ({"config": {"tracing_ratio": 2}}, "/config/tracing_ratio", "got 2, want 1"),
    ({"config": {"tracing_endpoint": "otel:4318"}}, "/config/tracing_endpoint", "pattern"),
    ({"service": {"type": "ExternalName"}}, "/service/type", "must be one of 'ClusterIP'"),
    ({"service": {"port": 0}}, "/service/port", "got 0, want 1"),
    ({"service": {"port": "http"}}, "/service/port", "got string, want integer"),
    ({"kvTransfer": {"transport": "rdma"}}, "/kvTransfer/transport", "'auto', 'tcp', 'nixl'"),
    ({"kvTransfer": {"ucx": {"tls": "rc"}}}, "/kvTransfer/ucx", UNKNOWN.format("tls")),
    ({"rdma": {"enabled": "yes"}}, "/rdma/enabled", "got string, want boolean"),
    ({"rdma": {"resource": "ib"}}, "/rdma/resource", "does not match pattern"),
    ({"rdma": {"count": 0}}, "/rdma/count", "got 0, want 1"),
    ({"rdma": {"runAsRoot": 0}}, "/rdma/runAsRoot", "got number, want boolean"),
    ({"rdma": {"capabilities": "IPC_LOCK"}}, "/rdma/capabilities", "got string, want array"),
    ({"slo": {"ttft": 1}}, "/slo", UNKNOWN.format("ttft")),
    ({"slo": {"tpotSeconds": 0}}, "/slo/tpotSeconds", "exclusiveMinimum: got 0, want 0"),
    ({"secrets": {"apiKeys": {"create": "k"}}}, "/secrets/apiKeys/create", "want array"),
    ({"secrets": {"hubToken": {"token": "x"}}}, "/secrets/hubToken", UNKNOWN.format("token")),
    ({"secrets": {"clusterSecret": {"existingSecret": "A"}}}, "existingSecret", "pattern"),
    ({"modelCache": {"size": "50 GB"}}, "/modelCache/size", "does not match pattern"),
    ({"modelCache": {"mountPath": "cache"}}, "/modelCache/mountPath", "does not match"),
    ({"modelCache": {"accessModes": ["RWX"]}}, "/modelCache/accessModes/0", "must be one of"),
    ({"modelCache": {"accessModes": ["ReadOnlyMany"]}}, "/modelCache/accessModes/0", "one of"),
    ({"ray": {"version": "2"}}, "/ray", UNKNOWN.format("version")),
    ({"ray": {"upgradeStrategy": {"type": "Rolling"}}}, "/ray/upgradeStrategy/type", "one of"),
    ({"ray": {"upgradeStrategy": {"stepSizePercent": 0}}}, "/stepSizePercent", "got 0, want 1"),
    ({"ray": {"upgradeStrategy": {"maxSurgePercent": 0}}}, "/maxSurgePercent", "got 0, want 1"),
    ({"ray": {"gcsFaultTolerance": {"redis": "x"}}}, "gcsFaultTolerance", UNKNOWN.format("redis")),
    ({"autoscaling": {"upscalingMode": "Fast"}}, "/autoscaling/upscalingMode", "one of"),
    ({"autoscaling": {"minReplicas": 1}}, "/autoscaling", UNKNOWN.format("minReplicas")),
    ({"serviceAccount": {"automount": True}}, "/serviceAccount", UNKNOWN.format("automount")),
    ({"rbac": True}, "/rbac", "got boolean, want object"),
    ({"podSecurityContext": []}, "/podSecurityContext", "got array, want object"),
    ({"securityContext": "none"}, "/securityContext", "got string, want object"),
    ({"securityContext": {"capabilites": {}}}, "/securityContext", UNKNOWN.format("capabilites")),
    ({"podSecurityContext": {"runAsUser": "me"}}, "/podSecurityContext/runAsUser", "null or inte"),
    ({"networkPolicy": {"clients": {"a": 1}}}, "/networkPolicy/clients", "want array"),
    ({"podDisruptionBudget": {"router": {"min": 1}}}, "/router", UNKNOWN.format("min")),
    ({"podDisruptionBudget": {"decode": {"minAvailable": "half"}}}, "minAvailable", "integer"),
    ({"podDisruptionBudget": {"head": {}}}, "/podDisruptionBudget", UNKNOWN.format("head")),
    ({"ingress": {"host": "x"}}, "/ingress", UNKNOWN.format("host")),
    ({"ingress": {"hosts": ["example.com"]}}, "/ingress/hosts/0", "got string, want object"),
    ({"httpRoute": {"parentRefs": [{}]}}, "/httpRoute/parentRefs/0", "missing property 'name'"),
    ({"httpRoute": {"timeouts": {"request": 30}}}, "/httpRoute/timeouts/request", "want string"),
    ({"inferencePool": {"endpointPicker": {"port": 0}}}, "/endpointPicker/port", "got 0, want 1"),
    ({"monitoring": {"enabled": True}}, "/monitoring", UNKNOWN.format("enabled")),
    ({"monitoring": {"podMonitor": {"interval": "5"}}}, "/podMonitor/interval", "pattern"),
    ({"tests": {"enabled": 1}}, "/tests/enabled", "got number, want boolean"),
    ({"extraObjects": {"a": 1}}, "/extraObjects", "got object, want array"),
    ({"global": []}, "/global", "got array, want object"),
    ({"replicaCount": 3}, "at ''", UNKNOWN.format("replicaCount")),
    # every role's block
    ({"router": {"replicas": 0}}, "/router/replicas", "got 0, want 1"),
    ({"router": {"gpus": 1}}, "/router", UNKNOWN.format("gpus")),
    ({"router": {"config": {"policy": "random"}}}, "/router/config/policy", "'least-loaded'"),
    ({"router": {"config": {"max_queue": 0}}}, "/router/config/max_queue", "got 0, want 0"),
    ({"router": {"config": {"api_keys": ["k"]}}}, "/router/config", UNKNOWN.format("api_keys")),
    ({"router": {"config": {"kv_blocks": 9}}}, "/router/config", UNKNOWN.format("kv_blocks")),
    ({"router": {"config": {"link_faults": ""}}}, "/router/config", UNKNOWN.format("link_faults")),
    ({"router": {"podLabels": {"team": "x" * 64}}}, "/router/podLabels/team", "maxLength"),
    ({"prefill": {"replica": 2}}, "/prefill", UNKNOWN.format("replica")),
    ({"prefill": {"replicas": -1}}, "/prefill/replicas", "got -1, want 0"),
    ({"prefill": {"replicas": 1.5}}, "/prefill/replicas", "got number, want integer"),
    ({"prefill": {"gpus": 8}}, "/prefill/gpus", "got 8, want 1"),
    ({"prefill": {"gpuResource": "gpu"}}, "/prefill/gpuResource", "does not match pattern"),
    ({"prefill": {"config": {"dtype": "fp8"}}}, "/prefill/config/dtype", "'float32'"),
    ({"prefill": {"config": {"replicas": 2}}}, "/prefill/config", UNKNOWN.format("replicas")),
    ({"prefill": {"resources": {"limit": {}}}}, "/prefill/resources", UNKNOWN.format("limit")),
    ({"prefill": {"env": [{"value": "x"}]}}, "/prefill/env/0", "missing property 'name'"),
    ({"prefill": {"config": {"transport": "memory"}}}, "/prefill/config/transport", "'nccl'"),
    (
        {"prefill": {"config": {"pull_faults": ""}}},
        "/prefill/config",
        UNKNOWN.format("pull_faults"),
    ),
    (
        {"prefill": {"sidecars": [{"name": "a", "env": [{"name": "B", "value": 1}]}]}},
        "/prefill/sidecars/0/env/0/value",
        "got number, want string",
    ),
    ({"decode": {"shm": {"size": "2ki"}}}, "/decode/shm/size", "does not match pattern"),
    ({"decode": {"shm": {"size": "2GB"}}}, "/decode/shm/size", "does not match pattern"),
    ({"decode": {"config": {"drain_s": "1m"}}}, "/decode/config/drain_s", "want number"),
    ({"decode": {"tolerations": {"key": "x"}}}, "/decode/tolerations", "want array"),
    ({"decode": {"nodeSelector": {"gpu": True}}}, "/decode/nodeSelector/gpu", "want string"),
    ({"mixed": {"config": {"block_size": 2048}}}, "/mixed/config/block_size", "want 1,024"),
    ({"mixed": {"terminationGracePeriodSeconds": "30s"}}, "/mixed/termination", "want null or"),
    ({"mixed": {"readinessProbe": False}}, "/mixed/readinessProbe", "want object"),
    ({"mixed": {"livenessProbe": {"period": 3}}}, "/mixed/livenessProbe", UNKNOWN.format("period")),
    ({"mixed": {"startupProbe": {"periodSeconds": 0}}}, "/startupProbe/periodSeconds", "got 0"),
    # null takes a key away, and most are needed
    ({"prefill": {"shm": None}}, "/prefill", "missing property 'shm'"),
    ({"networkPolicy": {"dns": None}}, "/networkPolicy", "missing property 'dns'"),
    ({"securityContext": None}, "at ''", "missing property 'securityContext'"),
    ({"mixed": None}, "at ''", "missing property 'mixed'"),
    ({"head": {"replicas": 2}}, "/head", UNKNOWN.format("replicas")),
    ({"head": {"config": {}}}, "/head", UNKNOWN.format("config")),
    ({"head": {"resources": {"limits": {"memory": "4G B"}}}}, "/limits/memory", "pattern"),
]


@cache
def refusals() -> list[str]:
    """The lines of all messages; values of different keys are tried at once."""
    turns: dict[int, Values] = defaultdict(dict)  # at each, one wrong value for each key
    seen: Counter[str] = Counter()
    for values, _, _ in WRONG:
        (key,) = values
        turns[seen[key]] |= values
        seen[key] += 1
    return [line for values in turns.values() for line in refusal(values).splitlines()]


@pytest.mark.parametrize(("values", "where", "why"), WRONG, ids=lambda each: str(each)[:60])
def test_b124_a_wrong_value_is_refused(values: Values, where: str, why: str) -> None:
    lines = [line for line in refusals() if where in line]
    assert lines, f"nothing is said of {values}"
    assert any(why in line for line in lines), lines


def test_there_is_one_for_each_top_level_key_and_each_role() -> None:
    wrong = {key for values, _, _ in WRONG for key in values}
    assert wrong >= chart_values().keys()


def test_several_mistakes_are_told_at_once() -> None:
    message = refusal({"prefill": {"replicas": "two"}, "slo": {"ttft": 1}})
    assert "/prefill/replicas" in message
    assert "/slo" in message


def test_what_the_messages_ask_for_is_taken() -> None:
    render(
        {
            "image": {"digest": "sha256:" + "0" * 64},
            "rdma": {"ibGidIndex": 3},
            "prefill": {"config": {"drain_s": 60, "dtype": "bfloat16"}, "replicas": 0},
            "mixed": {"replicas": 1, "terminationGracePeriodSeconds": 90},
            "decode": {"replicas": 0, "resources": {"limits": {"memory": 4294967296}}},
            "global": {"anything": 1},
        }
    )
    shm = {"router": {"shm": {"size": 104857600}}, "head": {"shm": {"size": "0.1Gi"}}}
    shm["decode"] = {"shm": {"size": "2097152Ki"}}
    render(shm | {"modelCache": {"mountPath": "/opt/batonic"}})


def test_keys_without_a_value_are_as_if_they_were_not_there() -> None:
    """YAML's ``tolerations:`` with nothing behind it; people leave those in their files."""
    empty = dict.fromkeys(
        ("podLabels", "podAnnotations", "nodeSelector", "tolerations", "affinity", "env", "config")
    )
    roles = dict.fromkeys(("router", "prefill", "decode", "mixed"), empty)
    head = {key: None for key in empty if key != "config"}
    others = {"commonLabels": None, "commonAnnotations": None, "ray": {"env": None}}
    secret = {"secrets": {"clusterSecret": {"existingSecret": "given"}}}
    assert render({**roles, "head": head, **others, **secret}).objects == render(secret).objects


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"decode": {"replicas": 0}}, "needs at least one prefill and one decode worker"),
        ({"prefill": {"replicas": 0}}, "prefill.replicas 0, decode.replicas 1, mixed.replicas 0"),
        (
            {"prefill": {"replicas": 0}, "decode": {"replicas": 0}},
            "or none of both and a mixed one",
        ),
        (
            {"decode": {"replicas": 5, "maxReplicas": 4}, "autoscaling": {"enabled": True}},
            "decode: replicas 5 and minReplicas 5 must be at most maxReplicas 4",
        ),
        (
            {"ray": {"upgradeStrategy": {"type": "NewClusterWithIncrementalUpgrade"}}},
            "NewClusterWithIncrementalUpgrade needs autoscaling.enabled",
        ),
        (
            {
                "ray": {"upgradeStrategy": {"type": "NewClusterWithIncrementalUpgrade"}},
                "autoscaling": {"enabled": True},
            },
            "ray.upgradeStrategy.gatewayClassName",
        ),
        ({"ray": {"gcsFaultTolerance": {"enabled": True}}}, "gcsFaultTolerance.redisAddress"),
        (
            {"ray": {"upgradeStrategy": {"type": "None", "onConfigChange": "NewCluster"}}},
            "ray.upgradeStrategy.onConfigChange: NewCluster needs a type that starts new clusters",
        ),
        (
            {"decode": {"extraVolumeMounts": [{"name": "a", "mountPath": "/dev/shm/"}]}},
            "decode.extraVolumeMounts: something else is mounted at /dev/shm already",
        ),
        (
            {"router": {"extraVolumeMounts": [{"name": n, "mountPath": "/a"} for n in "bc"]}},
            "router.extraVolumeMounts: something else is mounted at /a already",
        ),
        (
            {"head": {"extraVolumes": [{"name": "cluster-secret", "emptyDir": {}}]}},
            "head.extraVolumes: there is a volume cluster-secret already",
        ),
        (
            {"router": {"shm": {"size": "99Mi"}}},
            "router.shm.size: 99Mi is less than Ray's object store",
        ),
        (
            {"head": {"shm": {"size": "0.1G"}}, "ray": {"objectStoreBytes": 100_000_001}},
            "head.shm.size: 0.1G is less",
        ),
        (
            {"prefill": {"gpus": 1}},
            "prefill.gpus 1, decode.gpus 0: KV goes from the one to the other",
        ),
        ({"modelCache": {"mountPath": "/opt/baton/models"}}, "would hide the program itself"),
        ({"modelCache": {"mountPath": "/opt/"}}, "would hide the program itself"),
        ({"modelCache": {"mountPath": "/tmp"}}, "modelCache.mountPath: something else"),
        (
            {
                "networkPolicy": {"clients": [{"podSelector": {}}]},
                "monitoring": {"scrapeConfig": {"enabled": True}},
            },
            "networkPolicy.monitoring: with monitoring.scrapeConfig",
        ),
        (
            {"autoscaling": {"enabled": True}, "serviceAccount": {"create": False}},
            "serviceAccount: with autoscaling the head's account gets rights",
        ),
        (
            {"decode": {"gpus": 1}, "kvTransfer": {"transport": "tcp"}},
            "set kvTransfer.transport to nixl",
        ),
    ],
    ids=str,
)
def test_values_that_do_not_go_together_are_refused(values: Values, message: str) -> None:
    assert message in refusal(values)
