"""Values for tests that look at the chart from all sides: all that is optional on, all off."""

from functools import cache
from typing import Any

from tests.support.chart import RELEASE, VALUE_SETS, Rendered, render, value_set

Object = dict[str, Any]

POD_EXTRAS: Object = {
    "podLabels": {"team": "serving"},
    "podAnnotations": {"example.com/owner": "serving"},
    "nodeSelector": {"pool": "serving"},
    "tolerations": [{"key": "dedicated", "operator": "Exists", "effect": "NoSchedule"}],
    "topologySpreadConstraints": [
        {
            "maxSkew": 1,
            "topologyKey": "topology.kubernetes.io/zone",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {"team": "serving"}},
        }
    ],
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [
                    {"matchExpressions": [{"key": "pool", "operator": "In", "values": ["serving"]}]}
                ]
            }
        }
    },
    "priorityClassName": "serving",
    "runtimeClassName": "nvidia",
    "env": [{"name": "TZ", "value": "UTC"}],
    "envFrom": [{"configMapRef": {"name": "proxies", "optional": True}}],
    "extraVolumes": [{"name": "scratch", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
    "initContainers": [{"name": "before", "image": "busybox:1.37", "command": ["true"]}],
    "sidecars": [{"name": "beside", "image": "busybox:1.37", "command": ["sleep", "inf"]}],
    "terminationGracePeriodSeconds": 120,
}

WORKER_EXTRAS: Object = POD_EXTRAS | {
    "replicas": 2,
    "minReplicas": 1,
    "maxReplicas": 4,
    "gpus": 1,
    "config": {"max_num_seqs": 48, "token_budget": 8192, "drain_s": 45},
}

MONITOR: Object = {
    "enabled": True,
    "interval": "10s",
    "scrapeTimeout": "5s",
    "labels": {"release": "prometheus"},
    "annotations": {"example.com/owner": "serving"},
    "relabelings": [{"action": "labeldrop", "regex": "pod_ip"}],
    "metricRelabelings": [{"action": "drop", "sourceLabels": ["__name__"], "regex": "python_.*"}],
}

EVERYTHING_ON: Object = {
    "commonLabels": {"cost-center": "serving"},
    "commonAnnotations": {"example.com/contact": "serving@example.com"},
    "image": {"digest": "sha256:" + "ab" * 32, "pullSecrets": ["registry"]},
    "config": {"tracing_endpoint": "http://otel:4318", "metrics_compat": "vllm"},
    "service": {"type": "LoadBalancer", "annotations": {"a": "b"}, "labels": {"a": "b"}},
    "router": POD_EXTRAS
    | {
        "replicas": 3,
        "minReplicas": 2,
        "maxReplicas": 4,
        # a number that Go would like to write as 1.6777216e+07
        "config": {"max_body_bytes": 16777216, "request_timeout_s": 120},
    },
    "prefill": WORKER_EXTRAS,
    "decode": WORKER_EXTRAS,
    "mixed": WORKER_EXTRAS,
    "head": POD_EXTRAS,
    "kvTransfer": {"transport": "nixl", "ucx": {"env": {"UCX_RNDV_THRESH": 0}}},
    "rdma": {
        "enabled": True,
        "networks": "rdma-net",
        "annotations": {"example.com/rdma": "yes"},
        "netDevices": "mlx5_0:1",
        "ibGidIndex": 3,
        "ibAddrType": "eth",
        "env": {"UCX_RC_TIMEOUT": "600s"},
    },
    "slo": {"ttftSeconds": 1, "tpotSeconds": 0.05},
    "secrets": {"apiKeys": {"create": ["key-one", "key-two"]}, "hubToken": {"create": "hf_x"}},
    "modelCache": {"enabled": True, "storageClassName": "fast"},
    "ray": {
        "gcsFaultTolerance": {
            "enabled": True,
            "redisAddress": "redis:6379",
            "existingSecret": "redis",
            "externalStorageNamespace": "serving-baton",
        },
        "upgradeStrategy": {
            "type": "NewClusterWithIncrementalUpgrade",
            "gatewayClassName": "istio",
        },
        "env": {"RAY_BACKEND_LOG_LEVEL": "warning"},
        "logEncoding": "JSON",
    },
    "autoscaling": {"enabled": True},
    "serviceAccount": {"annotations": {"a": "b"}, "automountToken": True},
    "networkPolicy": {
        "clients": [{"namespaceSelector": {"matchLabels": {"clients": "yes"}}}],
        "monitoring": [{"namespaceSelector": {"matchLabels": {"monitoring": "yes"}}}],
        "extraEgress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}],
    },
    "podDisruptionBudget": {role: {"minAvailable": 1} for role in ("prefill", "decode", "mixed")},
    "ingress": {"enabled": True, "className": "nginx", "tls": [{"hosts": ["baton.example.com"]}]},
    "httpRoute": {
        "enabled": True,
        "parentRefs": [{"name": "gateway"}],
        "hostnames": ["baton.example.com"],
        "timeouts": {"request": "600s"},
    },
    "inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}},
    "monitoring": {
        "podMonitor": MONITOR,  # the others exclude it, see VARIANTS
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
        "dashboards": {"enabled": True, "annotations": {"folder": "Baton"}},
    },
    "extraObjects": [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "extra"}, "data": {"a": "b"}}
    ],
}

EVERYTHING_OFF: Object = {
    "service": {"annotations": {}, "labels": {}},
    "router": {"replicas": 1},
    "prefill": {"replicas": 0},
    "decode": {"replicas": 0},
    "mixed": {"replicas": 1},
    "serviceAccount": {"create": False},
    "rbac": {"create": False},
    "networkPolicy": {"enabled": False},
    "podDisruptionBudget": {"enabled": False},
    "tests": {"enabled": False},
}

VARIANTS: dict[str, Object] = {
    "defaults": {},
    "everything-on": EVERYTHING_ON,
    "everything-off": EVERYTHING_OFF,
    "service-monitor": {"monitoring": {"serviceMonitor": MONITOR}},
    "scrape-config": {"monitoring": {"scrapeConfig": MONITOR}},
    **{name: value_set(name) for name in VALUE_SETS},
}

LONG = "a-team-with-a-name-that-is-just-as-long-as-helm-takes"  # 53 characters, Helm's limit


@cache
def rendered(variant: str, name: str = RELEASE) -> Rendered:
    """The chart with the values of a variant; not to be changed, many tests look at it."""
    return render(VARIANTS[variant], name)
