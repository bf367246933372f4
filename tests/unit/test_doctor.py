"""What ``baton doctor`` concludes from what it sees; other machines are folders here."""

import json
import resource
from pathlib import Path

import pytest

from services.cli import build_parser
from services.config import ConfigError
from services.doctor import devices, host
from services.doctor.command import DoctorOptions, run_doctor
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
        (65_536, False, False, Level.NOTE),
        (65_536, False, True, Level.FAIL),
        (65_536, True, True, Level.OK),
        (resource.RLIM_INFINITY, False, True, Level.OK),
    ],
)
def test_locked_memory(
    monkeypatch: pytest.MonkeyPatch, soft: int, capable: bool, rdma: bool, level: Level
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    monkeypatch.setattr(host, "has_capability", lambda _: capable)
    monkeypatch.setattr(host, "lock_some", lambda: "")
    finding = host.check_locked_memory(Path("/"), rdma)
    assert finding.level is level
    if level is not Level.OK:
        assert "64 KiB" in finding.found
        assert "IPC_LOCK" in finding.mend


def test_a_kernel_that_locks_nothing_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "has_capability", lambda _: True)
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
    finding = devices.check_gpu(tmp_path, [], True, False)
    assert finding.level is Level.FAIL
    assert finding.found.startswith("nvidia0 in /dev")
    assert "NVIDIA_DRIVER_CAPABILITIES" in finding.mend


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
    (tried,) = [t for t in ways_from_here([adapter], False, True, {}) if "mlx5_0" in t.way.name]
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


def test_ways_follow_from_what_is_here(tmp_path: Path) -> None:
    checks = [t.check for t in ways_from_here([], False, False, {})]
    assert checks == ["tcp", "ucx tcp", "ucx shm"]
    found = devices.adapters(roce(tmp_path))
    tries = ways_from_here(found, True, True, {"UCX_TLS": "rc,tcp", "UCX_NET_DEVICES": "mlx5_0:1"})
    assert [t.check for t in tries[3:]] == ["ucx cuda", "ucx rc", "ucx rc gpu", "ucx as set"]
    assert [t.way.device for t in tries[3:]] == ["cuda", "cpu", "cuda", "cpu"]
    assert tries[4].way == Way("nixl, rc on mlx5_0:1", "nixl", "rc", "mlx5_0:1")
    assert tries[4].level is Level.FAIL
    assert (tries[-1].way.ucx_tls, tries[-1].way.net_devices) == ("auto", "mlx5_0:1")
    (down,) = devices.adapters(roce(tmp_path, state="1: DOWN"))
    assert len(ways_from_here([down], False, True, {})) == 3


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
AS_SET = Try("ucx as set", Way("as set", "nixl", "auto"), Level.FAIL, "change UCX_TLS")


@pytest.mark.parametrize(
    ("tried", "outcome", "level", "text"),
    [
        (NAMED, Outcome(seconds=0.01), Level.OK, "every byte arrived, 1.7 GB/s"),
        (NAMED, Outcome("Destination is unreachable"), Level.WARN, "Destination is unreachable"),
        # It arrived, but by another way than the one that was asked for.
        (NAMED, Outcome("", "cma", 0.01), Level.WARN, "UCX finds no cma here"),
        (AS_SET, Outcome("", "dc_x", 0.01), Level.WARN, "arrived, 1.7 GB/s, but UCX finds no dc_x"),
        (AS_SET, Outcome("No such device", "rc"), Level.FAIL, "UCX finds no rc here"),
        (AS_SET, Outcome("Timed out"), Level.FAIL, "Timed out"),
    ],
)
def test_what_a_try_has_shown(tried: Try, outcome: Outcome, level: Level, text: str) -> None:
    finding = judge(tried, outcome)
    assert (finding.level, finding.check) == (level, tried.check)
    assert text in finding.found


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
