"""``baton leave``: lets Serve take everything from this Ray node, and waits until it is gone.

For the ``preStop`` of a pod: Kubernetes has decided that the node goes, and Ray has not heard of
it. ::

    node is said to drain ─► Serve places nothing new on it, and starts its replicas elsewhere
                          ─► each is stopped as in a rollout: a worker hands back what it does,
                             a router ends its requests
                          ─► HAProxy ends the connections through it to routers of other nodes

Where there is no place elsewhere, replicas are stopped in time for the deadline all the same:
``graceful_shutdown_timeout_s`` of their deployment before it. What they do then is in
:mod:`services.app`.

When a whole cluster goes (after an upgrade all of its pods are told at once), requests can go on
nowhere else. So who is needed longer waits: workers until no router is left, the head until no
replica is. That it is the whole cluster is seen by its routers: all of them leave.

Drives Ray through two interfaces that it does not call public (GcsClient, and Serve's details by
node); the version is pinned, and tests/helm runs this on a real one.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray import _raylet, serve
from ray.core.generated import autoscaler_pb2

POLL_S = 0.5  # Serve tells nobody when something has stopped
NOTICE_S = 20.0  # until all pods of a cluster that goes have told Ray, which takes them seconds
LEAVING = ("PENDING_MIGRATION", "STOPPING")
PROXY_SERVES = ("HEALTHY", "DRAINING")
ROUTER, PROXY = "Router", "HAProxy"


@dataclass(frozen=True)
class Part:
    """Something of Serve's on a node: a replica by its deployment's name, or the node's HAProxy."""

    name: str
    node_id: str
    state: str


@dataclass(frozen=True)
class LeaveOptions:
    """The flags of the command."""

    address: str = ""  # of the Ray cluster; empty: what RAY_ADDRESS says
    node_ip: str = ""  # of this node; empty: found out, as can be where a host is one node
    deadline_s: float = 60.0  # until the node goes, from when it is said to drain
    after: str = ""  # who goes first when the whole cluster does: "routers", or "all"
    patience_s: float = 600.0  # the longest wait for these


def run_leave(options: LeaveOptions) -> int:
    """The exit status; 0 when nothing that was waited for is left, 1 when time was over."""
    on: dict[str, Any] = {"_node_ip_address": options.node_ip} if options.node_ip else {}
    ray.init(options.address or None, log_to_driver=False, logging_level=logging.ERROR, **on)
    try:
        here = ray.get_runtime_context().get_node_id()
        if options.after and _within(NOTICE_S, the_cluster_goes):
            _within(options.patience_s, lambda: not first_ones(options.after, here))
        # the head has no replicas, and is never said to drain: Serve needs it to the end
        return 0 if options.after == "all" else _leave(here, options.deadline_s)
    finally:
        ray.shutdown()


def _leave(node_id: str, deadline_s: float) -> int:
    drain_node(ray.get_runtime_context().gcs_address, node_id, deadline_s)
    if _within(deadline_s, lambda: not parts_on(node_id)):
        print("nothing is left on this node")
        return 0
    print(f"still here after {deadline_s:.0f} s: {', '.join(parts_on(node_id))}")
    return 1


def the_cluster_goes() -> bool:
    """Whether all routers are about to leave."""
    return all(part.state in LEAVING for part in parts() if part.name == ROUTER)


def first_ones(who: str, here: str) -> list[Part]:
    """What is waited for: "routers", or "all" on other nodes than this."""
    if who == "routers":
        return [part for part in parts() if part.name == ROUTER]
    return [part for part in parts() if part.node_id != here]


def parts_on(node_id: str) -> list[str]:
    """Names of what is on a node, also if it is being stopped."""
    return [part.name for part in parts() if part.node_id == node_id]


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


def parts() -> list[Part]:
    """All that has a place; nothing where Serve does not run, or not any more."""
    client: Any = serve.context._get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return []
    details = client.get_serve_details()
    replicas = [
        Part(name, replica["node_id"], replica["state"])
        for application in details["applications"].values()
        for name, deployment in application["deployments"].items()
        for replica in deployment["replicas"]
        if replica.get("node_id")  # one that starts has none yet
    ]
    proxies = (details.get("proxies") or {}).items()
    return replicas + [
        Part(PROXY, node_id, proxy["status"])
        for node_id, proxy in proxies
        if proxy["status"] in PROXY_SERVES
    ]


def _within(seconds: float, condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(POLL_S)
    return True
