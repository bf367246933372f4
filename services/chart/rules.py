"""What the values of the chart may be, beyond the type of their defaults.

A rule is for every value whose path ends so: ``rdma.resource`` for that one, ``tolerations`` for
those of all roles, ``.config`` (with a dot before it) for the one at the top only; the longest that
fits holds. A rule with a ``type`` says all about its value, and nothing below it is looked at; any
other adds to what the default says. A description here is for values without a comment of their
own, which are those that Kubernetes has explained already.
"""

from typing import Any

from services.chart.config_schema import (
    Schema,
    app_schema,
    router_schema,
    scaling_schema,
    worker_schema,
)
from services.config import Limit

ROLES = ("router", "prefill", "decode", "mixed")
NAME = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$"  # of an object, or empty
WORD = r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
LABEL = {"type": "string", "pattern": rf"^({WORD})?$", "maxLength": 63}  # its value
KEY = rf"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?{WORD}$"  # of a label or an annotation
OURS_ONLY = r"^(baton/role|ray\.io/.*|app\.kubernetes\.io/(name|instance|component))$"  # labels
QUANTITY = r"^[0-9]+(\.[0-9]+)?([EPTGMK]i|[EPTGMkmun])?$"
DURATION = r"^([0-9]+(ms|[smhd]))*$"  # of Prometheus


def text(description: str = "", **limits: Any) -> Schema:
    """A text, with ``pattern``, ``enum`` or another limit."""
    return _described({"type": "string", **limits}, description)


def whole(low: int | None = None, high: int | None = None, null: bool = False) -> Schema:
    """A whole number from ``low`` to ``high``."""
    schema: Schema = {"type": ["integer", "null"] if null else "integer"}
    return schema | _span(Limit(low, high))


def closed(description: str = "", /, **keys: Schema) -> Schema:
    """A mapping that has no other keys than these."""
    schema = {"type": "object", "additionalProperties": False, "properties": keys}
    return _described(schema, description)


def mapping(of: Schema | None = None, description: str = "") -> Schema:
    """A mapping whose keys are the user's own."""
    schema: Schema = {"type": "object"} | ({} if of is None else {"additionalProperties": of})
    return _described(schema, description)


def labels(description: str = "") -> Schema:
    """Names and values as Kubernetes takes them for labels, of objects or of nodes."""
    return mapping(LABEL, description) | {"propertyNames": {"pattern": KEY}}


def free_labels(description: str = "") -> Schema:
    """The same, without those by which we and KubeRay know what is what."""
    names = {"pattern": KEY, "not": {"pattern": OURS_ONLY}}
    return mapping(LABEL, description) | {"propertyNames": names}


def annotations(description: str = "") -> Schema:
    """Names as Kubernetes takes them for annotations, and any text."""
    return mapping({"type": "string"}, description) | {"propertyNames": {"pattern": KEY}}


def several(of: Schema, description: str = "") -> Schema:
    """A list."""
    return _described({"type": "array", "items": of}, description)


def _described(schema: Schema, description: str) -> Schema:
    return schema | ({"description": description} if description else {})


def _span(limit: Limit) -> Schema:
    span = {"minimum": limit.low, "maximum": limit.high}
    return {name: value for name, value in span.items() if value is not None}


OBJECTS = several({"type": "object"})
SIZE: Schema = {"type": ["string", "integer"], "pattern": QUANTITY, "minimum": 0}
AMOUNTS = mapping({"type": ["string", "number"], "pattern": QUANTITY, "minimum": 0})
CIDRS = several(text(pattern=r"^[0-9a-fA-F.:]+/[0-9]{1,3}$"))
ENVIRONMENT = mapping({"type": ["string", "number", "boolean"]})
USER: Schema = {"type": ["integer", "null"], "minimum": 0}
SWITCH: Schema = {"type": ["boolean", "null"]}
PROBE = closed(
    "instead of the chart's own; {enabled: false}: none",
    enabled={"type": "boolean"},
    exec=mapping(),
    grpc=mapping(),
    httpGet=mapping(),
    tcpSocket=mapping(),
    initialDelaySeconds=whole(0),
    periodSeconds=whole(1),
    timeoutSeconds=whole(1),
    successThreshold=whole(1),
    failureThreshold=whole(1),
    terminationGracePeriodSeconds=whole(1),
)
SECURITY = {  # of a pod and of a container
    "runAsNonRoot": SWITCH,
    "runAsUser": USER,
    "runAsGroup": USER,
    "appArmorProfile": mapping(),
    "seLinuxOptions": mapping(),
    "seccompProfile": mapping(),
    "windowsOptions": mapping(),
}
VARIABLE: Schema = {"type": "object", "required": ["name"]}
CONTAINER: Schema = {
    "type": "object",
    "required": ["name"],
    "properties": {
        # Kubernetes would refuse the whole pod, and name none of its parts
        "env": several(VARIABLE | {"properties": {"value": {"type": "string"}}}),
    },
}
# No maxUnavailable and no share: Kubernetes cannot count what a RayCluster's pods should be.
BUDGET = closed(
    minAvailable=whole(0),
    unhealthyPodEvictionPolicy=text(enum=["AlwaysAllow", "IfHealthyBudget"]),
)

KUBERNETES: dict[str, Schema] = {
    "podLabels": free_labels("further labels of these pods"),
    "podAnnotations": annotations("annotations of these pods"),
    "nodeSelector": labels("labels of the nodes that these pods may use"),
    "tolerations": several({"type": "object"}, "taints of nodes that these pods tolerate"),
    "affinity": mapping(description="affinity of these pods"),
    "topologySpreadConstraints": several({"type": "object"}, "how these pods are spread"),
    "priorityClassName": {"pattern": NAME, "description": "priority class of these pods"},
    "runtimeClassName": {"pattern": NAME, "description": "runtime class of these pods"},
    "hostNetwork": {
        "description": "these pods use their node's network, no two of a release the same"
    },
    "env": several(
        VARIABLE | {"properties": {"value": {"type": ["string", "number", "boolean"]}}},
        "further environment variables",
    ),
    "envFrom": several({"type": "object"}, "sources of further environment variables"),
    "extraVolumes": several({"type": "object", "required": ["name"]}, "further volumes"),
    "extraVolumeMounts": several(
        {"type": "object", "required": ["name", "mountPath"]}, "mounts of these volumes"
    ),
    "initContainers": several(CONTAINER, "containers that run before Ray's"),
    "sidecars": several(CONTAINER, "containers beside Ray's"),
    "startupProbe": PROBE,
    "livenessProbe": PROBE | {"description": "the same"},
    "readinessProbe": PROBE | {"description": "the same"},
    "resources": closed(
        "requests and limits of the container",
        requests=AMOUNTS,
        limits=AMOUNTS,
        claims=OBJECTS,
    ),
    "labels": labels("further labels"),
    "annotations": annotations("further annotations"),
    "podSecurityContext": closed(
        **SECURITY,
        fsGroup=USER,
        fsGroupChangePolicy=text(enum=["Always", "OnRootMismatch"]),
        supplementalGroups=several(USER),
        supplementalGroupsPolicy=text(enum=["Merge", "Strict"]),
        seLinuxChangePolicy=text(),
        sysctls=OBJECTS,
    ),
    "securityContext": closed(
        **SECURITY,
        allowPrivilegeEscalation=SWITCH,
        capabilities=closed(add=several(text()), drop=several(text())),
        privileged=SWITCH,
        procMount=text(),
        readOnlyRootFilesystem=SWITCH,
    ),
}

OURS: dict[str, Schema] = {
    "global": mapping(description="Helm's own; the chart has no charts below it"),
    "commonLabels": free_labels(),
    "commonAnnotations": annotations(),
    "nameOverride": {"pattern": NAME},
    "fullnameOverride": {"pattern": NAME},
    "image.repository": text("where the image is", minLength=1),
    "image.tag": text(pattern=r"^[\w.-]*$"),
    "image.digest": text(pattern=r"^(sha256:[0-9a-f]{64})?$"),
    "image.pullPolicy": text("when it is pulled", enum=["Always", "IfNotPresent", "Never"]),
    "image.pullSecrets": several(text(pattern=NAME, minLength=1)),
    "rayVersion": text(pattern=r"^\d+\.\d+\.\d+$"),
    ".config": app_schema(),
    "service.type": text("its type", enum=["ClusterIP", "NodePort", "LoadBalancer"]),
    "loadBalancerSourceRanges": CIDRS,
    "port": whole(1, 65535) | {"description": "its port"},
    "replicas": whole(0, 512) | {"description": "pods; 0: none of this role"},
    ".router.replicas": whole(1, 64) | {"description": "pods"},
    "minReplicas": whole(0, 512, null=True) | {"description": "least pods, with autoscaling"},
    "maxReplicas": whole(1, 512, null=True) | {"description": "most pods, with autoscaling"},
    ".router.config": router_schema(),
    "config": worker_schema(),
    "gpus": whole(0, 1),
    "gpuResource": text("the resource that a GPU is", pattern=r"^[\w.-]+/[\w.-]+$"),
    "shm.size": SIZE | {"description": "of /dev/shm; it counts against the memory limit"},
    "terminationGracePeriodSeconds": whole(1, 86400, null=True)
    | {"description": "longest time to leave; null: Kubernetes' 30"},
    "kvTransfer.transport": text(enum=["auto", "tcp", "nixl"]),
    "kvTransfer.ucx.env": ENVIRONMENT,
    "rdma.resource": text(pattern=r"^([\w.-]+/[\w.-]+)?$"),
    "rdma.count": whole(1, 64),
    "rdma.capabilities": several(text(pattern="^[A-Z_]+$")),
    "rdma.annotations": annotations(),
    "rdma.ibGidIndex": {"type": ["string", "integer"], "pattern": "^[0-9]*$", "minimum": 0},
    "rdma.ibAddrType": text(enum=["", "auto", "ib_local", "ib_global", "eth"]),
    "rdma.env": ENVIRONMENT,
    "slo.ttftSeconds": {"exclusiveMinimum": 0, "description": "the first token within so long"},
    "slo.tpotSeconds": {"exclusiveMinimum": 0, "description": "each token after it, on average"},
    "existingSecret": text("name of a secret that is there already", pattern=NAME),
    "key": text("where in the secret it is", minLength=1, pattern=r"^[-\w.]+$"),
    "apiKeys.create": several(text(minLength=1, pattern=r"^\S+$")),
    "hubToken.create": text("a token for a secret of the chart", pattern=r"^\S*$"),
    "modelCache.existingClaim": text(pattern=NAME),
    "modelCache.storageClassName": text("empty: the cluster's default", pattern=NAME),
    "modelCache.accessModes": several(
        text(enum=["ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod"]),
        "of the claim; pods on several nodes need one for many",
    )
    | {"minItems": 1},
    "modelCache.size": SIZE | {"description": "of the claim"},
    "modelCache.mountPath": text("where pods have it", pattern="^/."),
    "gcsFaultTolerance.redisAddress": text("host:port, or redis://host:port"),
    "gcsFaultTolerance.externalStorageNamespace": text(pattern=r"^[\w.-]*$"),
    "upgradeStrategy.type": text(enum=["NewCluster", "NewClusterWithIncrementalUpgrade", "None"]),
    "upgradeStrategy.onConfigChange": text(enum=["InPlace", "NewCluster"]),
    "maxSurgePercent": whole(1, 100) | {"description": "how much larger it may be meanwhile"},
    "stepSizePercent": whole(1, 100)
    | {"description": "how much of its Gateway's traffic moves at once"},
    "intervalSeconds": whole(1) | {"description": "time between two moves of traffic"},
    "gatewayClassName": text("of the Gateway that moves the traffic", pattern=NAME),
    "clusterDeletionDelaySeconds": whole(0),
    "ray.objectStoreBytes": whole(78643200),
    "ray.env": ENVIRONMENT,
    "ray.logEncoding": text(enum=["TEXT", "JSON"]),
    "idleTimeoutSeconds": whole(1) | {"description": "a pod without replicas goes after so long"},
    "autoscaling.config": scaling_schema(),
    "autoscaling.upscalingMode": text(
        "how many pods are added at once", enum=["Default", "Aggressive", "Conservative"]
    ),
    "serviceAccount.name": text("empty: the release's name, or default", pattern=NAME),
    "networkPolicy.clients": OBJECTS,
    "networkPolicy.monitoring": OBJECTS,
    "networkPolicy.extraEgress": OBJECTS,
    "networkPolicy.operator": OBJECTS | {"minItems": 1},  # none would mean: everybody
    "nodeCIDRs": CIDRS,
    "tracing.to": OBJECTS,
    "redis.to": OBJECTS,
    "dns.to": OBJECTS,
    "apiServer.to": OBJECTS,
    "ports": several(whole(1, 65535)) | {"minItems": 1},  # none would mean: all of them
    **{
        f"podDisruptionBudget.{role}": BUDGET | {"description": "of these pods; empty: none"}
        for role in ROLES
    },
    "ingress.className": text("empty: the cluster's default", pattern=NAME),
    "ingress.hosts": several(
        closed(
            host=text(),
            paths=several(
                closed(
                    path=text(pattern="^/"),
                    pathType=text(enum=["Exact", "Prefix", "ImplementationSpecific"]),
                )
            ),
        ),
        "hosts, each with its paths",
    ),
    "ingress.tls": several(closed(secretName=text(), hosts=several(text())), "its certificates"),
    "httpRoute.parentRefs": several({"type": "object", "required": ["name"]}, "its gateways"),
    "httpRoute.hostnames": several(text(), "hosts that it is for; empty: those of the gateway"),
    "httpRoute.timeouts": closed(
        "its timeouts",
        request=text(pattern="^([0-9]{1,5}(h|m|s|ms)){1,4}$"),
        backendRequest=text(pattern="^([0-9]{1,5}(h|m|s|ms)){1,4}$"),
    ),
    "endpointPicker.name": text("service of the endpoint picker", pattern=NAME),
    "endpointPicker.failureMode": text(
        "what becomes of requests without it", enum=["FailOpen", "FailClose"]
    ),
    "interval": text("time between two scrapes", pattern=DURATION),
    "scrapeTimeout": text("empty: Prometheus' own", pattern=DURATION),
    "relabelings": several({"type": "object"}, "relabelings of targets"),
    "metricRelabelings": several({"type": "object"}, "relabelings of series"),
    "apiKey.name": text(pattern=NAME),
    "tests.timeoutSeconds": whole(1),
    "extraObjects": several({"type": ["object", "string"]}),
    "enabled": {"description": "whether there is one"},
    "create": {"description": "whether the chart makes one"},
}

RULES = KUBERNETES | OURS
