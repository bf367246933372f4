"""``baton doctor``: all checks, one after the other, and their report."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from services.config import AppConfig, ConfigError, load
from services.doctor import devices, host, software
from services.doctor.findings import Finding, as_json, as_text, exit_status, summary
from services.doctor.trial import run_trials
from services.doctor.ways import judge, ways_from_here
from services.machine import torch_has_cuda

NEEDS = ("gpu", "rdma")
ROOT = Path("/")


@dataclass(frozen=True)
class DoctorOptions:
    """The flags of the command."""

    need: str = ""  # gpu, rdma or both, with a comma: what is missing of it is a fault
    json: bool = False  # one JSON object instead of text
    config: str = ""  # YAML of the deployment: its model and ports are looked for


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
    gpus, adapters = devices.gpus(), devices.adapters(root)
    cuda = bool(gpus) and torch_has_cuda()
    need_rdma = "rdma" in needs
    yield host.check_processor(root)
    yield host.check_shared_memory(root)
    yield host.check_huge_pages(root)
    yield host.check_open_files(root)
    yield host.check_processes(root)
    yield host.check_locked_memory(root, rdma=need_rdma or bool(adapters))
    yield host.check_temporary_folder(root)
    yield devices.check_gpu(root, gpus, torch_has_cuda(), "gpu" in needs)
    yield devices.check_rdma(adapters, need_rdma)
    yield devices.check_gpudirect(root, adapters, len(gpus))
    tries = ways_from_here(adapters, cuda, need_rdma)
    for tried, outcome in zip(tries, run_trials([t.way for t in tries]), strict=True):
        yield judge(tried, outcome)
    yield software.check_ray()
    yield software.check_cluster(root)
    yield software.check_ports(config, in_cluster=bool(software.ray_address(root)))
    yield software.check_model_cache(config)
