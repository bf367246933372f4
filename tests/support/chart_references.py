"""What the objects of a rendered chart name, and whether there is such a thing.

Each function returns what is named and is nowhere: in no other object, not in the code, and not in
the user's values either, which may name what is in the cluster already.
"""

import re
from collections.abc import Iterator
from typing import Any

from tests.support.chart import Object, Rendered, chart_values
from tests.support.network import selects


def nodes(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Everything in a tree, with its path."""
    yield path, tree
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from nodes(value, f"{path}.{key}")
    elif isinstance(tree, list):
        for value in tree:
            yield from nodes(value, f"{path}[]")


def texts(tree: Any) -> set[str]:
    """All texts in a tree: what a user's values name, for instance."""
    return {value for _, value in nodes(tree) if isinstance(value, str)}


def all_nodes(chart: Rendered) -> Iterator[tuple[str, Any]]:
    """Of all objects; a path begins with the object's kind and name."""
    for thing in chart.objects:
        yield from nodes(thing, f"{thing['kind']} {thing['metadata']['name']}: ")


# --- objects that others name -------------------------------------------------------------------


def missing_secrets(chart: Rendered, values: Object) -> list[str]:
    """Secrets, and keys in them, that pods and others read."""
    made = {
        thing["metadata"]["name"]: {*thing.get("data", {}), *thing.get("stringData", {})}
        for thing in chart.all("Secret")
    }
    named = texts(values)
    lacking = []
    for path, node in all_nodes(chart):
        for name, key in _secret_uses(path, node):
            if name in made and (key is None or key in made[name]):
                continue
            if name not in named or name in made:
                lacking.append(f"{path} names the secret {name}, key {key}")
    return lacking


def _secret_uses(path: str, node: Any) -> Iterator[tuple[str, str | None]]:
    if not isinstance(node, dict):
        return
    if path.endswith((".secretKeyRef", ".credentials")):
        yield node["name"], node["key"]
    if path.endswith(".secretRef"):
        yield node["name"], None
    if path.endswith(".imagePullSecrets[]"):
        yield node["name"], None
    if "secretName" in node:
        yield node["secretName"], None
        for item in node.get("items", ()):
            yield node["secretName"], item["key"]


def missing_objects(chart: Rendered, values: Object) -> list[str]:
    """Claims, accounts, roles and config maps that others name."""
    made = {(thing["kind"], thing["metadata"]["name"]) for thing in chart.objects}
    named = texts(values) | {"default"}
    lacking = []
    for path, node in all_nodes(chart):
        if not isinstance(node, dict):
            continue
        uses = [
            ("PersistentVolumeClaim", node.get("claimName")),
            ("ServiceAccount", node.get("serviceAccountName")),
        ]
        if path.endswith((".roleRef", ".subjects[]", ".backendRefs[]", ".targetRef")):
            uses.append((node.get("kind", "Service"), node["name"]))
        if path.endswith((".configMap", ".configMapRef", ".configMapKeyRef")):
            uses.append(("ConfigMap", node["name"]))
        lacking += [
            f"{path} names the {kind} {name}"
            for kind, name in uses
            if name and (kind, name) not in made and name not in named
        ]
    return lacking


def lost_mounts(chart: Rendered) -> list[str]:
    """Mounts without a volume, and volumes that nothing mounts."""
    lost = []
    for pod, spec in chart.pod_specs():
        volumes = {volume["name"] for volume in spec.get("volumes", ())}
        mounts = {
            mount["name"]
            for container in [*spec["containers"], *spec.get("initContainers", ())]
            for mount in container.get("volumeMounts", ())
        }
        lost += [f"{pod}: {name}" for name in sorted(volumes ^ mounts)]
    return lost


# --- labels --------------------------------------------------------------------------------------


def pods_with_labels(chart: Rendered) -> list[tuple[str, Object, Object]]:
    """Name, labels and spec of all pods; those of the Ray cluster as KubeRay labels them."""
    cluster = [
        (name, template["metadata"]["labels"], template["spec"])
        for name, template in chart.pods().items()
    ]
    others = [
        (thing["metadata"]["name"], thing["metadata"]["labels"], thing["spec"])
        for thing in chart.all("Pod")
    ]
    return cluster + others


def selectors(chart: Rendered) -> Iterator[tuple[str, Object, str]]:
    """Where one stands, the selector, and what kind of object it is for."""
    for path, node in all_nodes(chart):
        kind = path.split(" ")[0]
        if not isinstance(node, dict):
            continue
        if path.endswith((".podSelector", ".labelSelector")):
            yield path, node, "Pod"
        elif path.endswith(": .spec.selector"):
            bare = kind == "Service"
            yield (
                path,
                {"matchLabels": node} if bare else node,
                ("Service" if kind == "ServiceMonitor" else "Pod"),
            )


def selectors_of_nothing(chart: Rendered, values: Object) -> list[str]:
    """Selectors that fit no pod of the chart (no service, for a ServiceMonitor)."""
    own = [node for _, node in [*nodes(values), *nodes(chart_values())]]
    pods = [labels for _, labels, _ in pods_with_labels(chart)]
    services = [thing["metadata"]["labels"] for thing in chart.all("Service")]
    return [
        f"{path}: {selector}"
        for path, selector, kind in selectors(chart)
        if selector not in own
        and not any(selects(selector, labels) for labels in (pods if kind == "Pod" else services))
    ]


def selected(chart: Rendered, selector: Object) -> list[Object]:
    """Specs of the pods that a selector fits."""
    return [spec for _, labels, spec in pods_with_labels(chart) if selects(selector, labels)]


# --- ports ---------------------------------------------------------------------------------------


def ports_of(spec: Object) -> set[str | int]:
    """Names and numbers of what a pod says that it listens on."""
    return {
        port[key]
        for container in spec["containers"]
        for port in container.get("ports", ())
        for key in ("name", "containerPort")
        if key in port
    }


def closed_ports(chart: Rendered) -> list[str]:
    """Ports that a service, monitor, policy or probe names and no pod behind it has.

    A probe by number needs no declared port: those are returned, for who knows what listens there.
    """
    return [
        f"{where}: {port}"
        for where, port, specs in _port_uses(chart)
        if not any(port in ports_of(spec) for spec in specs)
    ]


def _port_uses(chart: Rendered) -> Iterator[tuple[str, str | int, list[Object]]]:
    for service in chart.all("Service"):
        specs = selected(chart, {"matchLabels": service["spec"]["selector"]})
        for port in service["spec"]["ports"]:
            where = f"Service {service['metadata']['name']}"
            yield where, port.get("targetPort", port["port"]), specs
    for monitor in chart.all("PodMonitor"):
        for end in monitor["spec"]["podMetricsEndpoints"]:
            yield "PodMonitor", end["port"], selected(chart, monitor["spec"]["selector"])
    for pool in chart.all("InferencePool"):
        for target in pool["spec"]["targetPorts"]:
            yield "InferencePool", target["number"], selected(chart, pool["spec"]["selector"])
    for policy in chart.all("NetworkPolicy"):
        specs = selected(chart, policy["spec"]["podSelector"])
        for rule in policy["spec"].get("ingress", ()):
            for port in rule.get("ports", ()):
                yield f"NetworkPolicy {policy['metadata']['name']}", port["port"], specs
    for name, spec in chart.pod_specs():
        for container in spec["containers"]:
            for path, node in nodes(container, f"{name} {container['name']}"):
                if path.endswith((".httpGet", ".tcpSocket")):
                    yield path, node["port"], [spec]


def services_without_port(chart: Rendered, values: Object) -> list[str]:
    """Services, and ports of theirs, that an Ingress, a route, a monitor or an URL names."""
    made = {
        thing["metadata"]["name"]: {
            port.get(key) for port in thing["spec"]["ports"] for key in ("name", "port")
        }
        for thing in chart.all("Service")
    }
    named = texts(values)
    uses: list[tuple[str, str, str | int]] = []
    for path, node in all_nodes(chart):
        if path.endswith(".backend.service"):
            uses.append((path, node["name"], *node["port"].values()))
        elif path.endswith(".backendRefs[]") and node.get("kind", "Service") == "Service":
            uses.append((path, node["name"], node["port"]))
        elif isinstance(node, str):
            uses += [
                (path, name, int(port))
                for name, port in re.findall(r"http://([\w-]+)\.[\w-]+\.svc[\w.]*:(\d+)", node)
            ]
    return [
        f"{path}: {name}:{port}"
        for path, name, port in uses
        if name not in named and port not in made.get(name, ())
    ]
