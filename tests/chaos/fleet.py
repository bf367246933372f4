"""The server's processes and its own view of them, watched all through a run.

Two sources: the process table (who lives; who ended, and was that us?) and each router's
``/internal/state``, asked at its own port past the ingress. Health, counters and the idle check of
the end come from here. What is done to whom is in :mod:`tests.chaos.inject`.
"""

import http.client
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil

from tests.support.serving import Client, Served

LOOK_EVERY_S = 0.4
ROLES = {
    "ray::ServeReplica:baton:PrefillWorker": "prefill",
    "ray::ServeReplica:baton:DecodeWorker": "decode",
    "ray::ServeReplica:baton:Router": "router",
    "ray::RegistryActor": "registry",
}
HELD = ("active", "leased", "quarantined")
WORKER_COUNTERS = (
    "preemptions", "failed_pulls", "expired_leases", "agent_rebuilds", "early_blocks",
    "pulled_blocks", "computed_prompt_tokens", "generated_tokens",
)  # fmt: skip


@dataclass
class Member:
    """A process of the server that takes part in serving."""

    process: psutil.Process
    role: str
    born_s: float
    ended_s: float | None = None
    fault: str = ""  # of ours that it is under now: it counts as ill
    end_expected: str = ""  # why it may end: killed, drained, stopped for too long
    resumed: bool = False  # it was stopped for long once

    @property
    def pid(self) -> int:
        pid: int = self.process.pid
        return pid

    @property
    def alive(self) -> bool:
        return self.ended_s is None


@dataclass(frozen=True)
class Sample:
    """What was seen at one moment."""

    at_s: float
    healthy: bool  # a router had a proven pair of workers, all of them without a fault of ours
    whole: bool  # every router had all pairs
    routers: int


@dataclass
class Seen:
    """Counters of processes that may be gone: the last value of each."""

    workers: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    routers: dict[str, dict[str, Any]] = field(default_factory=dict)

    def take(self, state: Mapping[str, Any]) -> None:
        """A router's view. A worker that is lost is shown without its counters."""
        self.routers[state["router"]] = dict(state)
        for worker in state["workers"]:
            if worker.get("steps"):
                self.workers[worker["id"], worker["epoch"]] = dict(worker)

    def total(self) -> Counter[str]:
        """Sums over all processes there have been; faults by kind."""
        counts: Counter[str] = Counter()
        for worker in self.workers.values():
            counts.update({name: worker.get(name, 0) for name in WORKER_COUNTERS})
            counts.update({f"transfer {k}": n for k, n in (worker.get("faults") or {}).items()})
        for router in self.routers.values():
            counts.update({f"message {k}": n for k, n in (router.get("faults") or {}).items()})
            counts.update(_flat("requests", router["requests"]))
        return counts


class Fleet:
    """Watches in a thread of its own from the start until :meth:`close`."""

    def __init__(self, server: Served, expected: dict[str, int], clock: "Clock") -> None:
        self.members: list[Member] = []
        self.expected = expected  # number of processes by role
        self.samples: list[Sample] = []
        self.seen = Seen()
        self.lock = threading.RLock()
        self._front = psutil.Process(server.process.pid)
        self.num_pairs = expected["prefill"] * expected["decode"]
        self._states: dict[int, dict[str, Any]] = {}
        self.clock = clock
        self._clients: dict[int, Client] = {}  # of routers, by pid
        self._stop = threading.Event()
        self.look()
        self._thread = threading.Thread(target=self._watch, name="fleet", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._stop.set()
        self._thread.join()

    def alive(self, role: str) -> list[Member]:
        """Those that live, the oldest first."""
        with self.lock:
            return [m for m in self.members if m.role == role and m.alive]

    def well(self, role: str) -> list[Member]:
        """Those of them that are under no fault of ours."""
        return [member for member in self.alive(role) if not member.fault]

    def ready(self, role: str) -> list[Member]:
        """Those of them that take requests, as some router saw it last."""
        if role not in ("prefill", "decode"):
            return self.well(role)
        with self.lock:
            workers = [w for state in self._states.values() for w in state["workers"]]
        ready = {w["pid"] for w in workers if w["state"] == "ready"}
        return [member for member in self.well(role) if member.pid in ready]

    def worker_id(self, member: Member) -> str:
        """The name of a worker's process; empty when no router knows it."""
        with self.lock:
            workers = [w for state in self._states.values() for w in state["workers"]]
        return next((w["id"] for w in workers if w["pid"] == member.pid), "")

    def states(self) -> dict[int, dict[str, Any]]:
        """What each router that answers says, by its pid."""
        found = {}
        for member in self.well("router"):
            client = self._client(member)
            state = _state(client) if client else None
            if state is not None:
                found[member.pid] = state
        return found

    def look(self) -> None:
        """Bring members up to date."""
        now = self.clock.now()
        known = {m.process for m in self.members if m.alive}
        children = {child for child in self._front.children(recursive=True) if child not in known}
        with self.lock:
            for child in children:
                role = _role(child)
                if role:
                    self.members.append(Member(child, role, now))
            for member in self.members:
                if member.alive and _ended(member.process):
                    member.ended_s = now

    def _watch(self) -> None:
        while not self._stop.wait(LOOK_EVERY_S):
            self.look()
            states = self.states()
            ill = {m.pid for m in self.members if m.fault or not m.alive}
            with self.lock:
                self._states = states
                for state in states.values():
                    self.seen.take(state)
                pairs = [healthy_pairs(state, ill) for state in states.values()]
                self.samples.append(
                    Sample(
                        self.clock.now(),
                        healthy=any(pairs),
                        whole=bool(pairs) and all(n >= self.num_pairs for n in pairs),
                        routers=len(pairs),
                    )
                )

    def _client(self, member: Member) -> Client | None:
        """Of a router's own port: HAProxy chooses a router, and we want this one."""
        if member.pid not in self._clients:
            for port in _ports(member.process):
                client = Client(f"http://127.0.0.1:{port}")
                if _state(client):
                    self._clients[member.pid] = client
                    break
        return self._clients.get(member.pid)


@dataclass
class Clock:
    """Seconds since the load began, or will begin."""

    started: float = field(default_factory=time.monotonic)

    def now(self) -> float:
        return time.monotonic() - self.started


def healthy_pairs(state: Mapping[str, Any], ill: set[int]) -> int:
    """Pairs of a router's view that are proven and whose processes are not ``ill`` (pids)."""
    well = {w["id"] for w in state["workers"] if w["state"] == "ready" and w["pid"] not in ill}
    return sum(
        pair["state"] == "proven" and {pair["prefill"], pair["decode"]} <= well
        for pair in state["pairs"]
    )


def not_idle(states: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """What is still held or under way anywhere, in words."""
    found = []
    for pid, state in states.items():
        for name in ("running", "queued"):
            if state["requests"][name]:
                found.append(f"router {pid}: {state['requests'][name]} requests {name}")
        for worker in state["workers"]:
            if worker["state"] == "dead":
                continue
            busy = {n: worker[n] for n in ("running", "waiting", "tickets", "open_calls")}
            busy |= {kind: worker["blocks"][kind] for kind in HELD}
            busy = {name: number for name, number in busy.items() if number}
            if busy:
                found.append(f"router {pid}: {worker['id']} has {busy}")
            elif worker["blocks"]["free"] + worker["blocks"]["cached"] != worker["kv_blocks"] - 1:
                found.append(f"{worker['id']} has lost blocks: {worker['blocks']}")
    return found


def _flat(name: str, value: Any) -> dict[str, int]:
    """Numbers of nested mappings by their path, as words."""
    if not isinstance(value, Mapping):
        return {name: int(value)}
    return {k: n for key, part in value.items() for k, n in _flat(f"{name} {key}", part).items()}


def _role(process: psutil.Process) -> str:
    try:
        name = process.name()
    except psutil.Error:
        return ""
    return next((role for start, role in ROLES.items() if name.startswith(start)), "")


def _ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def _ports(process: psutil.Process) -> list[int]:
    """Where a process listens. Router replicas listen below the ephemeral ports: those first."""
    try:
        connections = process.net_connections(kind="tcp")
    except psutil.Error:
        return []
    return sorted({c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN})


def _state(client: Client) -> dict[str, Any] | None:
    """A router's state, or None if it does not answer, or is no router."""
    try:
        status, state = client.get("/internal/state", timeout=2)
    except (OSError, ValueError, http.client.HTTPException):
        return None
    return state if status == 200 and "pairs" in state else None
