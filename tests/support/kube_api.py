"""A Kubernetes API in memory, as much of it as Helm's engine needs to install, upgrade and remove.

    with KubeApi() as cluster:
        helm = cluster.helm("serving")
        helm.install(CHART, "baton", {})
        cluster.get("Secret", "baton-cluster-secret")

It keeps what is applied to it and gives it back, so ``lookup`` finds what is there. No controller
runs, nothing is checked, and an apply replaces the object. Helm keeps its releases in memory.
"""

from __future__ import annotations

import base64
import json
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import helm_python
import yaml

Object = dict[str, Any]

KINDS = {
    "v1": [
        "ConfigMap", "Namespace", "PersistentVolumeClaim", "Pod", "Secret", "Service",
        "ServiceAccount",
    ],
    "batch/v1": ["Job"],
    "gateway.networking.k8s.io/v1": ["HTTPRoute"],
    "inference.networking.k8s.io/v1": ["InferencePool"],
    "monitoring.coreos.com/v1": ["PodMonitor", "PrometheusRule", "ServiceMonitor"],
    "monitoring.coreos.com/v1alpha1": ["ScrapeConfig"],
    "networking.k8s.io/v1": ["Ingress", "NetworkPolicy"],
    "policy/v1": ["PodDisruptionBudget"],
    "ray.io/v1": ["RayService"],
    "rbac.authorization.k8s.io/v1": ["Role", "RoleBinding"],
}  # fmt: skip


def plural(kind: str) -> str:
    """The name of a kind in paths."""
    name = kind.lower()
    if name.endswith("y"):
        return name[:-1] + "ies"
    return name + ("es" if name.endswith("s") else "s")


@dataclass(frozen=True)
class Place:
    """Where a request goes: ``/apis/ray.io/v1/namespaces/serving/rayservices/baton``."""

    api: str
    namespace: str = ""
    kind: str = ""
    name: str = ""

    @classmethod
    def of(cls, path: str) -> Place | None:
        """None for what is no object's and no API's."""
        match path.strip("/").split("/"):
            case ["api", version, *rest]:
                api = version
            case ["apis", group, version, *rest]:
                api = f"{group}/{version}"
            case _:
                return None
        if api not in KINDS:
            return None
        namespace = ""
        if len(rest) > 2 and rest[0] == "namespaces":
            namespace, rest = rest[1], rest[2:]
        kinds = {plural(kind): kind for kind in KINDS[api]}
        if rest and rest[0] not in kinds:
            return None
        return cls(api, namespace, kinds[rest[0]] if rest else "", rest[1] if rest[1:] else "")


class KubeApi:
    """The server, with what is in the cluster; a context manager."""

    def __init__(self) -> None:
        self.objects: dict[Place, Object] = {}
        self._configs: list[helm_python.Config] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = False
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self) -> KubeApi:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for config in self._configs:
            config.close()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def helm(self, namespace: str) -> helm_python.Config:
        """Helm for this cluster, with releases of its own."""
        url = f"http://127.0.0.1:{self._server.server_address[1]}"
        config = helm_python.Config(
            kube_apiserver=url,
            namespace=namespace,
            storage_driver="memory",
            qps=1e4,
            burst_limit=10_000,
        )
        self._configs.append(config)
        return config

    def get(self, kind: str, name: str) -> Object | None:
        """An object of any namespace."""
        for place, thing in self.objects.items():
            if (place.kind, place.name) == (kind, name):
                return thing
        return None

    def remove(self, kind: str, name: str) -> None:
        """As somebody would by hand."""
        (place,) = (p for p in self.objects if (p.kind, p.name) == (kind, name))
        del self.objects[place]

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Object]:
        """Status and body of one request."""
        if path == "/version":
            return 200, {"major": "1", "minor": "37", "gitVersion": "v1.37.0"}
        if path.startswith("/openapi/v3"):
            return 200, _openapi(path.removeprefix("/openapi/v3/").removeprefix("apis/"))
        if path == "/api":
            return 200, {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            return 200, _groups()
        place = Place.of(path)
        if place is None:
            return 404, _status("NotFound", 404, f"no {path}")
        if not place.kind:
            return 200, _resources(place.api)
        return self._act(method, place, body)

    def _act(self, method: str, place: Place, body: bytes) -> tuple[int, Object]:
        if method in ("POST", "PATCH", "PUT"):
            thing = _stored(yaml.safe_load(body))
            at = Place(place.api, place.namespace, place.kind, thing["metadata"]["name"])
            created = at not in self.objects
            self.objects[at] = thing
            return 201 if created else 200, thing
        if not place.name:
            items = [
                thing
                for at, thing in self.objects.items()
                if (at.namespace, at.kind) == (place.namespace, place.kind)
            ]
            return 200, {"kind": f"{place.kind}List", "apiVersion": place.api, "items": items}
        if place not in self.objects:
            return 404, _status("NotFound", 404, f'{plural(place.kind)} "{place.name}" not found')
        return 200, self.objects.pop(place) if method == "DELETE" else self.objects[place]


def _stored(thing: Object) -> Object:
    """What the API server makes of an object before it keeps it."""
    if thing["kind"] == "Secret":
        plain = thing.pop("stringData", {})
        coded = {key: base64.b64encode(value.encode()).decode() for key, value in plain.items()}
        thing["data"] = thing.get("data", {}) | coded
    return thing


def _status(reason: str, code: int, message: str) -> Object:
    return {
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code,
        "message": message,
    }  # fmt: skip


def _groups() -> Object:
    groups: dict[str, list[Object]] = {}
    for api in KINDS:
        group, _, version = api.rpartition("/")
        if group:
            groups.setdefault(group, []).append({"groupVersion": api, "version": version})
    listed = [
        {"name": name, "versions": versions, "preferredVersion": versions[0]}
        for name, versions in groups.items()
    ]
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}


def _resources(api: str) -> Object:
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    resources = [
        {
            "name": plural(kind), "singularName": kind.lower(), "kind": kind, "verbs": verbs,
            "namespaced": kind != "Namespace",
        }
        for kind in KINDS[api]
    ]  # fmt: skip
    return {
        "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": api, "resources": resources
    }  # fmt: skip


def _openapi(api: str) -> Object:
    """That the server checks fields itself; or, for no API, where each says so."""
    api = api.removeprefix("api/")
    if api not in KINDS:
        roots = {("apis/" if "/" in each else "api/") + each for each in KINDS}
        return {"paths": {root: {"serverRelativeURL": f"/openapi/v3/{root}"} for root in roots}}
    group, _, version = api.rpartition("/")
    paths = {}
    for kind in KINDS[api]:
        named = {"group": group, "version": version, "kind": kind}
        checked = [{"name": "fieldValidation", "in": "query"}]
        patch = {"x-kubernetes-group-version-kind": named, "parameters": checked, "responses": {}}
        paths[f"/{plural(kind)}"] = {"patch": patch}
    return {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": "1"}, "paths": paths}


def _handler(api: KubeApi) -> type[BaseHTTPRequestHandler]:
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            body = self.rfile.read(length)
            with lock:
                status, made = api.answer(self.command, urlsplit(self.path).path, body)
            data = json.dumps(made).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = answer

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the tests say what went wrong."""

    return Handler
