"""``baton doctor``: all checks, one after the other, and their report."""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from services.config import AppConfig, ConfigError, load
from services.doctor import devices, host, software
from services.doctor.findings import Finding, Level, as_json, as_text, exit_status, summary
from services.doctor.trial import run_trials
from services.doctor.ways import judge, ways_from_here
from services.machine import torch_has_cuda

NEEDS = ("gpu", "rdma")
ROOT = Path("/")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DoctorOptions:
    """The flags of the command."""

    need: str = ""  # gpu, rdma or both, with a comma: what is missing of it is a fault
    json: bool = False  # one JSON object instead of text
    config: str = ""  # YAML of the deployment: its model, its ports and what it says of UCX


def run_doctor(options: DoctorOptions, say: Callable[[str], None] = print) -> int:
    """The exit status: 0 when nothing fails, 1 otherwise. Raises ConfigError for wrong use."""
    needs = {word.strip() for word in options.need.split(",") if word.strip()}
    if unknown := needs - set(NEEDS):
        raise ConfigError(f"--need {sorted(unknown)[0]}: can be {', '.join(NEEDS)}")
    if sys.platform != "linux":
        raise ConfigError("baton doctor knows Linux only")
    config = load(options.config or None)
    about = software.about()
    findings = []
    if not options.json:
        say("baton doctor: " + ", ".join(f"{name} {value}" for name, value in about.items()))
    for finding in examine(config, needs):  # some take seconds
        findings.append(finding)
        if not options.json:
            say(as_text(finding))
    say(as_json(about, findings) if options.json else summary(findings))
    return exit_status(findings)


def examine(config: AppConfig, needs: set[str], root: Path = ROOT) -> Iterator[Finding]:
    """Everything there is to say of the machine whose files are below ``root``."""
    (gpus, no_gpu), adapters = devices.gpus(), devices.adapters(root)
    torch_cuda, need_rdma = torch_has_cuda(), "rdma" in needs
    in_cluster = bool(software.ray_address(root))
    checks: dict[str, Callable[[], Finding]] = {
        "processor": lambda: host.check_processor(root),
        "shared memory": lambda: host.check_shared_memory(root),
        "huge pages": lambda: host.check_huge_pages(root),
        "open files": lambda: host.check_open_files(root),
        "processes": lambda: host.check_processes(root),
        "locked memory": lambda: host.check_locked_memory(root, need_rdma or bool(adapters)),
        "temporary": lambda: host.check_temporary_folder(root),
        "gpu": lambda: devices.check_gpu(root, gpus, torch_cuda, "gpu" in needs, no_gpu),
        "rdma": lambda: devices.check_rdma(adapters, need_rdma),
        "gpudirect": lambda: devices.check_gpudirect(root, adapters, len(gpus)),
    }
    for name, check in checks.items():
        yield guarded(name, check)
    cuda = bool(gpus) and torch_cuda
    tries = ways_from_here(adapters, cuda, need_rdma, config, os.environ, in_cluster)
    for tried, outcome in zip(tries, run_trials([t.way for t in tries]), strict=True):
        yield judge(tried, outcome)
    yield guarded("ray", software.check_ray)
    yield guarded("cluster", lambda: software.check_cluster(root))
    yield guarded("ports", lambda: software.check_ports(config, in_cluster))
    yield guarded("model cache", lambda: software.check_model_cache(config))


def guarded(name: str, check: Callable[[], Finding]) -> Finding:
    """What a check says; one that fails itself must not hide what the others have to say."""
    try:
        return check()
    except Exception as error:
        log.exception("the check %s failed", name)
        found = f"could not be looked at: {type(error).__name__}: {error}"
        mend = "report the traceback on stderr, which is a mistake of baton doctor"
        return Finding(name, Level.FAIL, found, mend)
