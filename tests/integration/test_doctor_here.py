"""``baton doctor`` on this machine, and in a mount namespace with little of what it looks for."""

import http.server
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from router.version import version
from services.config import AppConfig
from services.doctor import software
from services.doctor.findings import Level
from services.doctor.host import CAP_IPC_LOCK, has_capability
from services.doctor.trial import Outcome, Way, run_trials
from services.doctor.ways import judge, ways_from_here

ROOT = Path(__file__).parents[2]
DOCTOR = [sys.executable, "-m", "services.cli", "doctor", "--json"]
POOR = """
mount -t tmpfs -o size=64k tmpfs /dev/shm
exec prlimit --memlock=65536:65536 setpriv --bounding-set=-ipc_lock --inh-caps=-ipc_lock "$@"
"""
NO_ADAPTER = not Path("/sys/class/infiniband").exists()
NO_GPU = shutil.which("nvidia-smi") is None
NAMESPACES = os.geteuid() == 0 and all(map(shutil.which, ("unshare", "prlimit", "setpriv")))


def start(*command: str) -> subprocess.Popen[str]:
    environment = {name: v for name, v in os.environ.items() if not name.startswith("UCX_")}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def reports() -> Iterator[dict[str, Any]]:
    """Exit status and findings by check, of both; at the same time, since each takes seconds."""
    processes = {"here": start(*DOCTOR)}
    if NAMESPACES:
        poor = ["unshare", "-m", "sh", "-ec", POOR, "sh", *DOCTOR, "--need", "rdma"]
        processes["poor"] = start(*poor)
    found = {}
    try:
        for name, process in processes.items():
            out, err = process.communicate(timeout=120)
            assert out, err
            checks = {finding["check"]: finding for finding in json.loads(out)["findings"]}
            found[name] = (process.returncode, checks)
        yield found
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()


def test_this_machine(reports: dict[str, Any]) -> None:
    _, checks = reports["here"]
    for name in ("tcp", "ucx tcp", "ucx shm"):  # blocks were moved, and were the right ones
        assert checks[name]["level"] == "ok", checks[name]
        assert "every byte arrived" in checks[name]["found"]
    size = os.statvfs("/dev/shm")
    assert (
        f"has {size.f_blocks * size.f_frsize / 2**30:.1f} GiB" in checks["shared memory"]["found"]
    )
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert checks["open files"]["found"].startswith(f"{soft:,} ")
    assert checks["ray"]["level"] == "ok", checks["ray"]
    assert checks["model cache"]["level"] != "fail", checks["model cache"]


@pytest.mark.skipif(not NO_ADAPTER, reason="this machine has an RDMA adapter")
def test_no_rdma_here_is_no_fault(reports: dict[str, Any]) -> None:
    _, checks = reports["here"]
    assert checks["rdma"]["level"] == "note"
    assert not [name for name in checks if name.startswith("ucx rc")]


@pytest.mark.skipif(not NO_GPU, reason="this machine has NVIDIA's tools")
def test_no_gpu_here_is_no_fault(reports: dict[str, Any]) -> None:
    _, checks = reports["here"]
    assert checks["gpu"]["level"] == "note"
    assert "ucx cuda" not in checks


@pytest.mark.skipif(not NAMESPACES, reason="a mount namespace takes root and util-linux")
def test_a_tiny_tmpfs_and_little_locked_memory(reports: dict[str, Any]) -> None:
    status, checks = reports["poor"]
    shm, locked = checks["shared memory"], checks["locked memory"]
    assert (shm["level"], "has 64 KiB" in shm["found"]) == ("warn", True)
    assert "mount a tmpfs" in shm["mend"]
    assert (locked["level"], "64 KiB may be locked" in locked["found"]) == ("fail", True)
    assert "IPC_LOCK" in locked["mend"]
    assert status == 1
    for name in ("tcp", "ucx tcp"):  # neither needs either
        assert checks[name]["level"] == "ok", checks[name]
    if NO_ADAPTER:
        assert (checks["rdma"]["level"], checks["rdma"]["mend"] != "") == ("fail", True)


AS_NOBODY = """
from pathlib import Path
from services.doctor.host import check_locked_memory
finding = check_locked_memory(Path("/"), rdma=True)
print(finding.level, finding.found, finding.mend, sep="; ")
"""


@pytest.mark.skipif(not NAMESPACES, reason="another user's process takes root and util-linux")
def test_a_capability_that_only_the_container_has() -> None:
    """As runtimes start a container's processes that are not root's."""
    reads_all = "+dac_override"  # Python may be in a home folder
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    user += [f"--inh-caps={reads_all}", f"--ambient-caps={reads_all}"]
    done = subprocess.run(
        ["prlimit", "--memlock=65536:65536", *user, sys.executable, "-c", AS_NOBODY],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("fail; at most 64 KiB may be locked"), done.stdout
    added = has_capability(CAP_IPC_LOCK, "CapBnd")
    assert ("bounding set" in done.stdout) == added
    assert ("not in effect for user 65534" in done.stdout) == added
    assert "rdma.runAsRoot" in done.stdout


def test_workers_and_doctor_use_ucx_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX finds what the environment asks for, or not: both tries differ by nothing else."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    found = []
    for device in ("lo", "nowhere0"):
        monkeypatch.setenv("UCX_NET_DEVICES", device)
        *_, tried = ways_from_here([], False, False, AppConfig(), os.environ)
        (outcome,) = run_trials([tried.way])
        found.append(judge(tried, outcome))
    assert [finding.check for finding in found] == ["ucx as set"] * 2
    assert [finding.level for finding in found] == [Level.OK, Level.FAIL]
    assert "UCX_NET_DEVICES=lo (environment): every byte arrived" in found[0].found
    assert "UCX_NET_DEVICES=nowhere0 (environment)" in found[1].found
    assert "UCX_NET_DEVICES" in found[1].mend


# --- the trial itself ---

BROKEN = """
import os
import tempfile
from kvtransfer.region import Region
from services.doctor import trial

seal = Region.seal

def damage(region, *args):
    region.kv.zero_()
    seal(region, *args)

ends = {
    "damaged": lambda way, pipe: (setattr(Region, "seal", damage), right(way, pipe)),
    "smaller": lambda way, pipe: (setattr(trial, "NUM_BLOCKS", 16), right(way, pipe)),
    "unwritten": lambda way, pipe: (setattr(trial, "GENERATION", 4), right(way, pipe)),
    "dies": lambda way, pipe: os._exit(3),
    "silent": lambda way, pipe: pipe.recv(),
    "right": lambda way, pipe: right(way, pipe),
}
right, once = trial._own, trial._try

def none():
    raise FileNotFoundError("of temporary files there is another check")

tempfile.gettempdir = none

def patient(way):
    trial.TRY_S = 1.0 if way.name == "silent" else 30.0
    return once(way)

trial._try, trial._own = patient, lambda way, pipe: ends[way.name](way, pipe)
trial.main()
"""


def test_a_trial_notices_what_is_wrong() -> None:
    names = ["unwritten", "damaged", "smaller", "dies", "silent", "right"]
    ways = json.dumps([{"name": name, "transport": "tcp"} for name in names])
    done = subprocess.run(
        [sys.executable, "-c", BROKEN],
        input=ways,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout, done.stderr
    outcomes = {n: Outcome(**o) for n, o in zip(names, json.loads(done.stdout), strict=True)}
    assert outcomes["unwritten"].error == "the bytes that arrived are not those sent"
    assert outcomes["damaged"].error == "the bytes that arrived are not those sent"
    assert outcomes["smaller"].error.endswith("is outside of the pools of 16 and 32 blocks")
    assert outcomes["dies"].error == "the owner of the blocks ended by itself, with code 3"
    assert outcomes["silent"].error == "nothing within 1 s"
    assert outcomes["right"].error == ""
    assert outcomes["right"].seconds > 0


def test_a_trial_that_cannot_start_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from services.doctor import trial

    monkeypatch.setattr(sys, "executable", "/bin/false")
    (outcome,) = trial.run_trials([Way("tcp", "tcp")])
    assert outcome.error == "the trial did not start: exit status 1"
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    (outcome,) = trial.run_trials([Way("tcp", "tcp")])
    assert "No such file or directory" in outcome.error
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nprintf 'Traceback:\\n  x\\nImportError: no torch\\n' >&2; exit 1")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    (outcome,) = trial.run_trials([Way("tcp", "tcp")])
    assert outcome == Outcome("the trial did not start: ImportError: no torch", started=False)


# --- ports, the cache, Ray ---


class Version(http.server.BaseHTTPRequestHandler):
    """What a server says at /version; others than ours have one as well."""

    says = metrics = ""

    def do_GET(self) -> None:
        known = {"/version": json.dumps({"version": self.says}), "/metrics": self.metrics}
        self.send_response(200 if self.path in known else 404)
        self.end_headers()
        self.wfile.write(known.get(self.path, "").encode())

    def log_message(self, *args: object) -> None:
        pass


def test_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        taken = stranger.getsockname()[1]
        finding = software.check_ports(AppConfig(port=taken))
        assert (finding.level, finding.mend.split(";")[0]) == (Level.FAIL, "choose another --port")
    assert software.check_ports(AppConfig(port=free_port())).level is Level.OK


def test_what_is_not_to_be_had_is_not_taken_by_anybody() -> None:
    finding = software.check_ports(AppConfig(host="192.0.2.7", port=free_port()))
    assert finding.level is Level.FAIL
    assert "Cannot assign requested address" in finding.found
    assert "--host" in finding.mend


@pytest.mark.parametrize(
    ("body", "level"), [("baton_x 1\n", Level.OK), ("go_goroutines 7\n", Level.WARN)]
)
def test_a_port_for_metrics_that_is_taken(
    body: str, level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes of ours go on to the next one; who asks this one hears of it."""
    monkeypatch.setattr(Version, "metrics", body)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Version) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        config = AppConfig(port=free_port(), metrics_port=server.server_port)
        finding = software.check_ports(config)
        server.shutdown()
        thread.join()
    assert finding.level is level
    assert str(server.server_port) in finding.found
    assert ("--metrics-port" in finding.mend) == (level is Level.WARN)


@pytest.mark.parametrize(("says", "level"), [(version(), Level.OK), ("0.32.0", Level.FAIL)])
def test_a_router_of_ours_may_have_the_port(
    says: str, level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Version, "says", says)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Version) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        config = AppConfig(port=server.server_port)
        alone, in_cluster = (software.check_ports(config, in_cluster=c) for c in (False, True))
        server.shutdown()
        thread.join()
    assert (alone.level, alone.check) == (level, "ports")
    assert in_cluster.level is (Level.OK if level is Level.OK else Level.NOTE)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def test_model_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    finding = software.check_model_cache(AppConfig(model=str(tmp_path)))
    assert f"{tmp_path} is there; kernels not compiled yet" in finding.found
    assert "would be fetched" in software.check_model_cache(AppConfig()).found
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    finding = software.check_model_cache(AppConfig())
    assert (finding.level, "XDG_CACHE_HOME" in finding.mend) == (Level.FAIL, True)


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As OpenShift makes one, where nothing sets HOME."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    finding = software.check_model_cache(AppConfig())
    assert (finding.level, "no home folder" in finding.found) == (Level.FAIL, True)
    assert "XDG_CACHE_HOME" in finding.mend


def test_a_model_that_is_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in (f"{tmp_path}/not/here", "~nobody-of-this-name/x"):
        finding = software.check_model_cache(AppConfig(model=name))
        assert finding.level is Level.FAIL
        assert finding.found.startswith(f"{name} is not there")
        assert "smollm2-135m-instruct" in finding.mend
    finding = software.check_model_cache(AppConfig(model="org/name"))
    assert finding.level is not Level.FAIL
    assert "org/name comes from a hub" in finding.found


def test_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    assert software.check_ray().level is Level.OK
    monkeypatch.setattr(software, "haproxy_error", lambda: "no such binary")
    assert "HAProxy does not start: no such binary" in software.check_ray().found
    monkeypatch.setattr(software, "wanted_ray", lambda: "1.0.0")
    finding = software.check_ray()
    assert (finding.level, "is made for 1.0.0" in finding.found) == (Level.FAIL, True)


def test_a_ray_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert software.check_cluster(tmp_path).level is Level.NOTE
    asked: list[list[str]] = []

    def run(command: list[str], **_: object) -> None:
        asked.append(command)
        if len(asked) == 1:
            raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(subprocess, "run", run)
    (tmp_path / "tmp/ray").mkdir(parents=True)
    (tmp_path / software.CURRENT_CLUSTER).write_text("10.0.0.9:6379\n")
    finding = software.check_cluster(tmp_path)
    assert (finding.level, "10.0.0.9:6379 does not answer" in finding.found) == (Level.FAIL, True)
    finding = software.check_cluster(tmp_path)
    assert finding.level is Level.WARN
    assert "RAY_SERVE_ENABLE_HA_PROXY=1" in finding.mend
    for name, value in software.SERVE_SETTINGS.items():
        monkeypatch.setenv(name, value)
    assert software.check_cluster(tmp_path).level is Level.OK
    assert asked[-1][-3:] == ["health-check", "--address", "10.0.0.9:6379"]
