"""``baton leave``: lets Serve take everything from this Ray node, and waits until it is gone.

For the ``preStop`` of a pod: Kubernetes has decided that the node goes, and Ray has not heard of
it. ::

    node is said to drain ─► Serve places nothing new on it, and starts its replicas elsewhere
                          ─► each is stopped as in a rollout: a worker hands back what it does,
                             a router ends its requests

Where there is no place elsewhere, replicas are stopped in time for the deadline all the same:
``graceful_shutdown_timeout_s`` of their deployment before it. What they do then is in
:mod:`services.app`. Drives Ray through two interfaces that it does not call public (GcsClient, and
Serve's details by node); the version is pinned, and tests/helm runs this on a real one.
"""

import logging
import time
from typing import Any

import ray
from ray import _raylet, serve
from ray.core.generated import autoscaler_pb2

POLL_S = 0.5  # Serve tells nobody when a replica has stopped


def run_leave(address: str, node_ip: str, deadline_s: float) -> int:
    """The exit status; 0 when nothing of ours is left on this node, before the deadline.

    ``address`` is the cluster's, "": what RAY_ADDRESS says; ``node_ip`` is this node's, "": found
    out, as can be where a host is one node.
    """
    end = time.monotonic() + deadline_s
    on: dict[str, Any] = {"_node_ip_address": node_ip} if node_ip else {}
    ray.init(address or None, log_to_driver=False, logging_level=logging.ERROR, **on)
    try:
        context = ray.get_runtime_context()
        node_id = context.get_node_id()
        drain_node(context.gcs_address, node_id, deadline_s)
        while left := replicas_on(node_id):
            if time.monotonic() > end:
                print(f"still here after {deadline_s:.0f} s: {', '.join(left)}")
                return 1
            time.sleep(POLL_S)
    finally:
        ray.shutdown()
    print("no replica is left on this node")
    return 0


def drain_node(gcs_address: str, node_id: str, deadline_s: float) -> None:
    """Tell Ray that a node goes after ``deadline_s``. Ray itself ends nothing by that."""
    raylet: Any = _raylet  # neither of the two has types
    pb2: Any = autoscaler_pb2
    why = pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")  # taken while actors run, too
    deadline_ms = int((time.time() + deadline_s) * 1000)
    client = raylet.GcsClient(address=gcs_address)
    accepted, reason = client.drain_node(node_id, why, "its pod ends", deadline_ms)
    if not accepted:
        raise RuntimeError(f"Ray does not let node {node_id} go: {reason}")


def replicas_on(node_id: str) -> list[str]:
    """Names of the deployments that have a replica on a node, also one that is being stopped."""
    status: Any = serve.context._get_global_client(raise_if_no_controller_running=False)
    if status is None:  # Serve does not run, or not any more
        return []
    applications = status.get_serve_details()["applications"].values()
    return [
        name
        for application in applications
        for name, deployment in application["deployments"].items()
        for replica in deployment["replicas"]
        if replica.get("node_id") == node_id  # one that starts has none yet
    ]
