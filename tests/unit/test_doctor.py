"""What ``baton doctor`` concludes from what it sees; other machines are folders here."""

import json
import os
import resource
import tempfile
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.ucx import UcxOptions
from services.cli import build_parser
from services.config import ConfigError, from_yaml
from services.doctor import devices, host
from services.doctor.command import DoctorOptions, guarded, run_doctor
from services.doctor.findings import Finding, Level, as_json, as_text, exit_status, summary
from services.doctor.trial import Outcome, Way, left_out
from services.doctor.ways import Try, judge, ways_from_here

OK = Finding("ports", Level.OK, "8000 free")
NOTE = Finding("gpu", Level.NOTE, "none")
WARN = Finding("temporary", Level.WARN, "little", "make room")
FAIL = Finding("rdma", Level.FAIL, "no adapter " + "of any kind " * 12, "place the pod " * 12)


# --- the report ---


def test_only_failures_change_the_exit_status() -> None:
    assert exit_status([OK, NOTE, WARN]) == 0
    assert exit_status([OK, FAIL, NOTE]) == 1


def test_text_fits_a_terminal_and_says_what_to_mend_below() -> None:
    lines = as_text(FAIL).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith("  FAIL  rdma")
    mend = next(i for i, line in enumerate(lines) if "→ place the pod" in line)
    assert " ".join(" ".join(lines[mend:]).split()) == "→ " + FAIL.mend.strip()
    assert summary([OK, WARN, FAIL, FAIL]) == "2 to mend, 1 to look at"


def test_json_has_the_same() -> None:
    report = json.loads(as_json({"baton": "1"}, [OK, FAIL]))
    assert report["ok"] is False
    assert report["findings"][1] == {
        "check": "rdma",
        "level": "fail",
        "found": FAIL.found,
        "mend": FAIL.mend,
    }
    assert json.loads(as_json({}, [OK]))["ok"] is True


@pytest.mark.parametrize("level", [Level.WARN, Level.FAIL])
def test_whatever_is_bad_says_what_to_mend(level: Level) -> None:
    with pytest.raises(ValueError, match="says nothing of what to mend"):
        Finding("rdma", level, "no adapter")


def test_flags() -> None:
    args = build_parser().parse_args(["doctor", "--json", "--need", "gpu"])
    assert (args.json, args.need, args.config) == (True, "gpu", "")


def test_an_unknown_need_is_refused_before_anything_is_looked_at() -> None:
    with pytest.raises(ConfigError, match="--need infiniband: can be gpu, rdma"):
        run_doctor(DoctorOptions(need="gpu,infiniband"), say=pytest.fail)


# --- processor, memory, limits ---


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "250000 100000\n"}, 2.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_cpu_quota(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    write(tmp_path / "sys/fs/cgroup", files)
    assert host.cpu_quota(tmp_path) == quota


def test_a_quota_below_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)))
    cgroup = tmp_path / "sys/fs/cgroup"
    write(cgroup, {"cpu.max": "50000 100000"})
    finding = host.check_processor(tmp_path)
    assert finding.level is Level.WARN
    assert finding.found.startswith("0.5 of 4 cores, by a limit; ")
    assert "raise the CPU limit" in finding.mend
    for limit, found in [("250000 100000", "2.5 of 4 cores"), ("max 100000", "4 cores")]:
        write(cgroup, {"cpu.max": limit})
        finding = host.check_processor(tmp_path)
        assert (finding.level, finding.found.startswith(found)) == (Level.OK, True)


def test_shared_memory_that_is_not_there(tmp_path: Path) -> None:
    finding = host.check_shared_memory(tmp_path)
    assert finding.level is Level.FAIL
    assert "No such file or directory" in finding.found
    assert "shm.size" in finding.mend


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("always [madvise] never\n", Level.OK),
        ("[always] madvise never\n", Level.OK),
        ("always madvise [never]\n", Level.WARN),
        (None, Level.NOTE),
    ],
)
def test_huge_pages(tmp_path: Path, text: str | None, level: Level) -> None:
    if text is not None:
        write(tmp_path / "sys/kernel/mm/transparent_hugepage", {"enabled": text})
    finding = host.check_huge_pages(tmp_path)
    assert finding.level is level
    if level is Level.WARN:
        assert "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled" in finding.mend


def test_a_container_may_have_few_processes(tmp_path: Path) -> None:
    write(tmp_path / "sys/fs/cgroup", {"pids.max": "1024\n"})
    finding = host.check_processes(tmp_path)
    assert finding.level is Level.WARN
    assert finding.found.startswith("1,024 ")
    write(tmp_path / "sys/fs/cgroup", {"pids.max": "max\n"})
    assert not host.check_processes(tmp_path).found.startswith("1,024 ")


@pytest.mark.parametrize(
    ("soft", "capable", "rdma", "level"),
    [
        (65_536, (), False, Level.NOTE),
        (65_536, (), True, Level.FAIL),
        (65_536, ("CapBnd",), True, Level.FAIL),  # added to the container, whose user is not root
        (65_536, ("CapBnd", "CapEff"), True, Level.OK),
        (resource.RLIM_INFINITY, (), True, Level.OK),
    ],
)
def test_locked_memory(
    monkeypatch: pytest.MonkeyPatch, soft: int, capable: tuple[str, ...], rdma: bool, level: Level
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    monkeypatch.setattr(host, "has_capability", lambda _, kind: kind in capable)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(host, "lock_some", lambda: "")
    finding = host.check_locked_memory(Path("/"), rdma)
    assert finding.level is level
    if level is not Level.OK:
        assert "64 KiB" in finding.found
        assert "LimitMEMLOCK=infinity" in finding.mend
        assert "`rdma.runAsRoot`" in finding.mend
    in_vain = "bounding set" in finding.found and "not in effect for user 1000" in finding.found
    assert in_vain == (capable == ("CapBnd",))


def test_a_kernel_that_locks_nothing_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "has_capability", lambda _, kind: True)
    monkeypatch.setattr(host, "lock_some", lambda: "Cannot allocate memory")
    finding = host.check_locked_memory(Path("/"), rdma=True)
    assert finding.level is Level.FAIL
    assert "locking 16 MiB fails: Cannot allocate memory" in finding.found


# --- devices ---


def test_gpu() -> None:
    h100 = ["NVIDIA H100, 81559 MiB, 570.1"]
    root = Path("/nowhere")
    assert devices.check_gpu(root, h100, True, True).level is Level.OK
    assert devices.check_gpu(root, h100, False, False).level is Level.WARN
    wrong_image = devices.check_gpu(root, h100, False, True)
    assert wrong_image.level is Level.FAIL
    assert "VARIANT=cuda" in wrong_image.mend
    assert devices.check_gpu(root, [], True, False).level is Level.NOTE
    assert devices.check_gpu(root, [], True, True).level is Level.FAIL


def test_a_gpu_whose_driver_was_not_mounted(tmp_path: Path) -> None:
    write(tmp_path / "dev", {"nvidia0": "", "nvidiactl": ""})
    finding = devices.check_gpu(tmp_path, [], True, False, "is not in PATH")
    assert finding.level is Level.FAIL
    assert finding.found == "nvidia0 in /dev, but nvidia-smi is not in PATH"
    assert "NVIDIA_DRIVER_CAPABILITIES" in finding.mend


GKE = {"bin/nvidia-smi": "", "lib64/libcuda.so.1": ""}
LOOKS = {"PATH": "/bin:/usr/local/nvidia/bin", "LD_LIBRARY_PATH": "/usr/local/nvidia/lib64"}


@pytest.mark.parametrize(
    ("environment", "lacking", "mend"),
    [
        ({"PATH": "/bin"}, "PATH lacks /usr/local/nvidia/bin and LD_LIBRARY_PATH lacks",
         "ENV PATH=$PATH:/usr/local/nvidia/bin LD_LIBRARY_PATH=/usr/local/nvidia/lib64"),
        (LOOKS | {"PATH": "/bin"}, "but PATH lacks", "ENV PATH=$PATH:/usr/local/nvidia/bin"),
        (LOOKS | {"LD_LIBRARY_PATH": ""}, "but LD_LIBRARY_PATH lacks /usr/local/nvidia/lib64",
         "ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib64"),
        (LOOKS, "but nvidia-smi says: no devices", "was installed to the end"),
    ],
)  # fmt: skip
def test_a_driver_where_gke_mounts_it(
    tmp_path: Path, environment: dict[str, str], lacking: str, mend: str
) -> None:
    write(tmp_path / "dev", {"nvidia0": ""})
    write(tmp_path / "usr/local/nvidia", GKE)
    why = "says: no devices"
    finding = devices.check_gpu(tmp_path, [], True, False, why, environment)
    assert finding.level is Level.FAIL
    assert "the driver is in /usr/local/nvidia" in finding.found
    assert lacking in finding.found
    assert mend in finding.mend
    found = devices.check_gpu(tmp_path, ["NVIDIA L4"], True, False, "", environment)
    assert found.level is Level.OK


def test_a_folder_without_a_driver_is_none(tmp_path: Path) -> None:
    (tmp_path / "usr/local/nvidia/bin").mkdir(parents=True)
    finding = devices.check_gpu(tmp_path, [], True, False, "is not in PATH", LOOKS)
    assert finding.level is Level.NOTE


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (None, "is not in PATH"),
        ("echo NVIDIA-SMI has failed; exit 9", "says: NVIDIA-SMI has failed"),
        ("exit 12", "ends with status 12"),
        ("echo", "lists none"),
    ],
)
def test_why_nvidia_smi_shows_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, why: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if script is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    assert devices.gpus() == ([], why)


def roce(tmp_path: Path, **changes: str) -> Path:
    """A machine with one RoCE adapter; ``changes`` by the last part of the file's name."""
    port = "ports/1"
    files = {
        f"{port}/state": "4: ACTIVE\n",
        f"{port}/link_layer": "Ethernet\n",
        f"{port}/rate": "200 Gb/sec (4X HDR)\n",
        f"{port}/gid_attrs/types/0": "IB/RoCE v1\n",
        f"{port}/gid_attrs/types/3": "RoCE v2\n",
        f"{port}/gid_attrs/types/10": "RoCE v2\n",
        "device/infiniband_verbs/uverbs0/dev": "231:192\n",
    }
    files = {name: changes.get(name.rsplit("/", 1)[1], text) for name, text in files.items()}
    write(tmp_path / "sys/class/infiniband/mlx5_0", files)
    write(tmp_path / "dev/infiniband", {"uverbs0": ""})
    return tmp_path


def test_a_roce_adapter_and_its_gid(tmp_path: Path) -> None:
    (adapter,) = devices.adapters(roce(tmp_path))
    assert adapter.usable
    assert (adapter.ucx_name, adapter.roce_gid) == ("mlx5_0:1", 3)  # 3 is less than 10
    finding = devices.check_rdma([adapter], needed=True)
    assert finding.level is Level.OK
    assert "mlx5_0:1 Ethernet 200 Gb/sec (4X HDR)" in finding.found
    assert "GID 3 (UCX_IB_GID_INDEX" in finding.found


def test_an_adapter_that_the_pod_was_not_given(tmp_path: Path) -> None:
    (roce(tmp_path) / "dev/infiniband/uverbs0").unlink()
    found = devices.adapters(tmp_path)
    for needed, level in [(True, Level.FAIL), (False, Level.WARN)]:
        finding = devices.check_rdma(found, needed)
        assert finding.level is level
        assert "none of them is in /dev/infiniband" in finding.found
        assert "rdma.resource" in finding.mend


def test_a_port_that_is_down(tmp_path: Path) -> None:
    finding = devices.check_rdma(devices.adapters(roce(tmp_path, state="1: DOWN\n")), True)
    assert (finding.level, "no port is active" in finding.found) == (Level.FAIL, True)


def test_roce_without_an_address(tmp_path: Path) -> None:
    root = roce(tmp_path)
    for name in ("3", "10"):
        (root / f"sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/{name}").unlink()
    finding = devices.check_rdma(devices.adapters(root), True)
    assert finding.level is Level.FAIL
    assert "no GID for RoCE v2" in finding.found


def test_an_efa_adapter_is_known_by_its_driver(tmp_path: Path) -> None:
    root = roce(tmp_path, link_layer="Unspecified\n")
    driver = root / "sys/bus/drivers/efa"
    driver.mkdir(parents=True)
    (root / "sys/class/infiniband/mlx5_0/device/driver").symlink_to(driver)
    (adapter,) = devices.adapters(root)
    assert adapter.efa
    (tried,) = [t for t in ways([adapter], {}, need_rdma=True) if "mlx5_0" in t.way.name]
    assert tried.way.ucx_tls == "srd"
    assert "libefa.so.1" in tried.mend


def test_gpudirect(tmp_path: Path) -> None:
    found = devices.adapters(roce(tmp_path))
    assert devices.check_gpudirect(tmp_path, found, 0).level is Level.NOTE
    assert devices.check_gpudirect(tmp_path, found, 1).level is Level.WARN
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86\n"
    write(tmp_path / "proc/driver/nvidia", {"version": text})
    assert devices.check_gpudirect(tmp_path, found, 1).level is Level.OK
    write(tmp_path / "proc/driver/nvidia", {"version": "NVRM version: NVIDIA UNIX x86_64 570\n"})
    assert devices.check_gpudirect(tmp_path, found, 1).level is Level.WARN
    (tmp_path / "sys/module/nvidia_peermem").mkdir(parents=True)
    assert devices.check_gpudirect(tmp_path, found, 1).level is Level.OK


# --- ways ---


def ways(
    adapters: list[devices.Adapter],
    environment: dict[str, str],
    gpu: bool = False,
    need_rdma: bool = False,
    in_cluster: bool = False,
    **raw: Any,
) -> list[Try]:
    return ways_from_here(adapters, gpu, need_rdma, from_yaml(raw), environment, in_cluster)


def test_ways_follow_from_what_is_here(tmp_path: Path) -> None:
    checks = [t.check for t in ways([], {"HOME": "/"})]
    assert checks == ["tcp", "ucx tcp", "ucx shm"]
    found = devices.adapters(roce(tmp_path))
    tries = ways(found, {}, gpu=True, need_rdma=True)
    assert [t.check for t in tries[3:]] == ["ucx cuda", "ucx rc", "ucx rc gpu"]
    assert [t.way.device for t in tries[3:]] == ["cuda", "cpu", "cuda"]
    assert tries[4].way == Way("nixl, rc on mlx5_0:1", "nixl", "rc", "mlx5_0:1")
    assert tries[4].level is Level.FAIL
    (down,) = devices.adapters(roce(tmp_path, state="1: DOWN"))
    assert len(ways([down], {}, need_rdma=True)) == 3


SET = {"UCX_TLS": "rc,tcp", "UCX_NET_DEVICES": "mlx5_0:1,mlx5_1:1", "UCX_IB_GID_INDEX": "3"}


@pytest.mark.parametrize("in_cluster", [False, True])
@pytest.mark.parametrize("one", SET)
def test_what_the_environment_says_is_tried_as_a_worker_would_use_it(
    one: str, in_cluster: bool
) -> None:
    """The way leaves to the environment, in which the trial runs as well, what a worker does."""
    for environment in (SET, {one: SET[one]}):
        *_, tried = ways([], environment, gpu=True, in_cluster=in_cluster)
        assert (tried.check, tried.level, tried.exact) == ("ucx as set", Level.FAIL, False)
        assert tried.way.ucx == UcxOptions(one_host=not in_cluster)
        assert tried.way.device == "cuda"
        assert f"{one}={SET[one]} (environment)" in tried.way.name
    assert tried.devices == ({"mlx5_0:1", "mlx5_1:1"} if one == "UCX_NET_DEVICES" else frozenset())


def test_what_the_configuration_says_is_tried_role_by_role() -> None:
    told: dict[str, Any] = {"ucx_tls": "tcp", "prefill": {"net_devices": "eth1", "device": "cpu"}}
    prefill, decode = ways([], SET, gpu=True, in_cluster=True, **told)[-2:]
    assert prefill.way.ucx == UcxOptions("tcp", "eth1", one_host=False)
    assert decode.way.ucx == UcxOptions("tcp", one_host=False)
    assert (prefill.way.device, decode.way.device) == ("cpu", "cuda")
    assert "as prefill workers use it, host memory, UCX_TLS=tcp (configuration" in prefill.way.name
    assert "as decode workers use it, GPU memory, UCX_TLS=tcp (configuration" in decode.way.name
    assert [t.check for t in ways([], {}, **told)][-2:] == ["ucx as set", "ucx as set"]
    for unused in ({"transport": "tcp"}, {"prefill": 0, "decode": 0, "mixed": 1}):
        assert "ucx as set" not in [t.check for t in ways([], SET, **unused)]


def test_what_ucx_has_gone_on_without() -> None:
    said = """
    UCX WARN network device 'mlx5_0:1' is not available, please use one or more of: 'eth0'(tcp)
    UCX WARN transports 'rc','cuda_copy' are not available, please use one or more of: cma, tcp
    UCX WARN transport 'rc' is not available, please use one or more of: cma, mm, posix, tcp
    UCX ERROR no active messages transport to <no debug data>: posix/memory
    """
    assert left_out(said) == "mlx5_0:1, rc, cuda_copy"
    assert left_out("UCX INFO tcp is fine") == ""


NAMED = Try("ucx shm", Way("shm", "nixl", "tcp,cma"), Level.WARN, "allow it")
AS_SET = Try(
    "ucx as set", Way("as set", "nixl", "auto"), Level.FAIL, "change UCX_TLS", False,
    frozenset({"mlx5_0:1", "mlx5_1:1"}),
)  # fmt: skip


@pytest.mark.parametrize(
    ("tried", "outcome", "level", "text"),
    [
        (NAMED, Outcome(seconds=0.01), Level.OK, "every byte arrived, 1.7 GB/s"),
        (NAMED, Outcome("Destination is unreachable"), Level.WARN, "Destination is unreachable"),
        # It arrived, but by another way than the one that was asked for.
        (NAMED, Outcome("", "cma", 0.01), Level.WARN, "UCX finds no cma here"),
        (AS_SET, Outcome("", "dc_x", 0.01), Level.WARN, "arrived, 1.7 GB/s, but UCX finds no dc_x"),
        (AS_SET, Outcome("No such device", "rc"), Level.FAIL, "UCX finds no rc here"),
        # Here processes of one host met without any; to other hosts nothing leads.
        (AS_SET, Outcome("", "mlx5_0:1", 0.01), Level.WARN, "but UCX finds no mlx5_0:1"),
        (AS_SET, Outcome("", "rc, mlx5_1:1, mlx5_0:1", 0.01), Level.FAIL, "no rc, mlx5_1:1, mlx5"),
        (AS_SET, Outcome("Timed out"), Level.FAIL, "Timed out"),
    ],
)
def test_what_a_try_has_shown(tried: Try, outcome: Outcome, level: Level, text: str) -> None:
    finding = judge(tried, outcome)
    assert (finding.level, finding.check) == (level, tried.check)
    assert text in finding.found


def test_a_trial_that_did_not_start_blames_no_network() -> None:
    finding = judge(NAMED, Outcome("the trial did not start: No module", started=False))
    assert (finding.level, "allow it" in finding.mend) == (Level.WARN, False)
    assert "torch" in finding.mend


# --- what fails by itself ---


def test_a_check_that_fails_does_not_hide_the_others(caplog: pytest.LogCaptureFixture) -> None:
    def check() -> Finding:
        raise ZeroDivisionError("by zero")

    finding = guarded("ports", check)
    assert (finding.check, finding.level) == ("ports", Level.FAIL)
    assert "ZeroDivisionError: by zero" in finding.found
    assert "the check ports failed" in caplog.text
    assert guarded("ports", lambda: OK) is OK


def test_no_folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    finding = host.check_temporary_folder(Path("/"))
    assert (finding.level, "['/tmp']" in finding.found) == (Level.FAIL, True)
    assert "TMPDIR" in finding.mend


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
