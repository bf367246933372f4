"""A real Ray cluster on this host whose nodes stand for the pods of the chart.

Each has an address of its own (127.0.0.x), one CPU and the label of its role, as KubeRay would
start it; the Serve config goes to the head's dashboard, as KubeRay sends it. What a pod has besides
is missing, a network and a file system of its own: HAProxy listens at the head only.
"""

import contextlib
import json
import os
import shutil
import tempfile
import urllib.request
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.serve import ray_environment, short_folder
from tests.support.serving import Client, free_port, until

OBJECT_STORE_BYTES = 80 * 2**20
HEAD_IP = "127.0.0.2"


@dataclass
class RayPods(Client):
    """A head that runs no work and nodes of roles; as a client, their API."""

    api_port: int
    secret_file: Path
    cluster: Any
    dashboard: str
    token: str
    ips: dict[str, str] = field(default_factory=dict)  # of the first node of each role

    @property
    def address(self) -> str:
        """Of the Ray cluster, as RAY_ADDRESS says it in a pod."""
        return str(self.cluster.address)

    def text(self, path: str) -> str:
        """What the API answers, if that is not JSON."""
        with urllib.request.urlopen(self.url + path, timeout=30) as response:
            return str(response.read().decode())

    def add(self, role: str) -> str:
        """A node more for a role; its address."""
        ip = f"127.0.0.{len(self.cluster.list_all_nodes()) + 2}"
        self.cluster.add_node(
            num_cpus=1,
            node_ip_address=ip,
            labels={"baton/role": role},
            object_store_memory=OBJECT_STORE_BYTES,
        )
        self.ips.setdefault(role, ip)
        return ip

    def deploy(self, config: dict[str, Any]) -> None:
        """Send a Serve config, in which ports and the secret's file are those of this host."""
        args = config["applications"][0]["args"]
        local = {"secret_file": str(self.secret_file), "metrics_port": 0}
        config = {
            **config,
            "http_options": {"host": "127.0.0.1", "port": self.api_port},
            "applications": [{**config["applications"][0], "args": args | local}],
        }
        self._serve_api(json.dumps(config).encode())

    def replicas(self) -> dict[str, list[tuple[str, str]]]:
        """Address and state of each replica, by its deployment."""
        deployments = self._serve_api()["applications"]["baton"]["deployments"]
        return {
            name: sorted((each.get("node_ip") or "", each["state"]) for each in details["replicas"])
            for name, details in deployments.items()
        }

    def incarnations(self) -> dict[str, set[str]]:
        """Ids of the replicas of each deployment; one that is started anew has another."""
        deployments = self._serve_api()["applications"]["baton"]["deployments"]
        return {
            name: {each["replica_id"] for each in details["replicas"]}
            for name, details in deployments.items()
        }

    def runs(self) -> bool:
        """Whether Serve has all that the last config asks for."""
        application = self._serve_api()["applications"].get("baton", {"status": "NOT_STARTED"})
        assert application["status"] != "DEPLOY_FAILED", application
        return bool(application["status"] == "RUNNING")

    def _serve_api(self, body: bytes | None = None) -> Any:
        request = urllib.request.Request(
            f"{self.dashboard}/api/serve/applications/",
            body,
            {"Content-Type": "application/json", "Authorization": f"Bearer {self.token}"},
            method="GET" if body is None else "PUT",
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            text = response.read()
        return json.loads(text) if text else None


@contextlib.contextmanager
def ray_pods(*roles: str) -> Iterator[RayPods]:
    """A head, and a node for each role; all is gone at the end."""
    work = Path(tempfile.mkdtemp(prefix="baton-test-", dir=short_folder()))
    api_port, dashboard_port = free_port(), free_port()
    before = dict(os.environ)
    os.environ.update(ray_environment(work, api_port))
    (work / "ray").mkdir()  # where Ray writes which cluster is the current one
    (work / "secret").write_text("of this test, 16 bytes or more")
    with warnings.catch_warnings(action="ignore"):  # Ray's own, all through
        from ray.cluster_utils import Cluster

        cluster = Cluster(shutdown_at_exit=True)
        try:
            cluster.add_node(
                num_cpus=0,
                node_ip_address=HEAD_IP,
                include_dashboard=True,
                dashboard_host=HEAD_IP,
                dashboard_port=dashboard_port,
                temp_dir=str(work),
                object_store_memory=OBJECT_STORE_BYTES,
            )
            pods = RayPods(
                f"http://127.0.0.1:{api_port}",
                api_port,
                work / "secret",
                cluster,
                f"http://{HEAD_IP}:{dashboard_port}",
                os.environ["RAY_AUTH_TOKEN"],
            )
            for role in roles:
                pods.add(role)
            yield pods
        finally:
            cluster.shutdown()
            os.environ.clear()
            os.environ.update(before)
            _remove(work)


def _remove(folder: Path) -> None:
    """Ray's last processes may still write for a moment."""
    until(lambda: shutil.rmtree(folder, ignore_errors=True) or not folder.exists(), "removed")
