"""Which ways KV could take from here, and what it means when one does not work."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from services.doctor.devices import Adapter
from services.doctor.findings import Finding, Level
from services.doctor.trial import Outcome, Way

CUDA = "cuda_copy"  # without it UCX does not know GPU memory


@dataclass(frozen=True)
class Try:
    """A way, and how bad it is when it does not work."""

    check: str
    way: Way
    level: Level
    mend: str


def ways_from_here(
    adapters: list[Adapter], gpu: bool, need_rdma: bool, environment: Mapping[str, str] = os.environ
) -> list[Try]:
    """``gpu``: there is one that torch can use. Pools in host memory unless the name says GPU."""
    tries = [
        Try(
            "tcp",
            Way("tcp, our own", "tcp"),
            Level.FAIL,
            "let processes of this host connect over 127.0.0.1 (a firewall, or a network namespace"
            " whose lo is down: ip link set lo up)",
        ),
        Try(
            "ucx tcp",
            Way("nixl over sockets", "nixl", "tcp", "lo"),
            Level.FAIL,
            "install nixl anew (pip install --force-reinstall nixl). What is in host memory can do"
            " without: transport: tcp",
        ),
        Try(
            "ucx shm",
            Way("nixl between processes of one host", "nixl", "tcp,cma", "lo"),
            Level.WARN,
            "workers of one host use sockets instead. UCX copies by process_vm_readv: allow it"
            " (sysctl kernel.yama.ptrace_scope=0, and no seccomp profile that forbids it). Between"
            " pods it never works, and nothing needs it",
        ),
    ]
    if gpu:
        way = Way("nixl, GPU memory", "nixl", f"tcp,{CUDA}", "lo", "cuda")
        mend = (
            "KV on GPUs goes by no other way: compare the driver's CUDA (nvidia-smi) with what nixl"
            " has been built for (pip show nixl-cu12 nixl-cu13)"
        )
        tries.append(Try("ucx cuda", way, Level.FAIL, mend))
    level = Level.FAIL if need_rdma else Level.WARN
    for adapter in adapters:
        if adapter.usable:
            tries += _rdma(adapter, gpu, level)
    if "UCX_TLS" in environment:
        devices = environment.get("UCX_NET_DEVICES", "all")
        way = Way(f"nixl, UCX_TLS={environment['UCX_TLS']}", "nixl", "auto", devices)
        mend = (
            "the environment asks UCX for what is not here: change UCX_TLS and UCX_NET_DEVICES"
            " (`rdma.ucxTls` and `rdma.netDevices` in the chart)"
        )
        tries.append(Try("ucx as set", way, Level.FAIL, mend))
    return tries


def _rdma(adapter: Adapter, gpu: bool, level: Level) -> list[Try]:
    """An adapter to itself: what it needs of this host is all needed, the network is not."""
    tls = "srd" if adapter.efa else "rc"
    library = " and libefa.so.1 (Debian: ibverbs-providers)" if adapter.efa else ""
    mend = (
        f"see `locked memory` and `rdma` above; {tls} needs /dev/infiniband, IPC_LOCK{library}."
        " Until then, UCX_TLS without it"
    )
    name = adapter.ucx_name
    tries = [Try(f"ucx {tls}", Way(f"nixl, {tls} on {name}", "nixl", tls, name), level, mend)]
    if gpu:
        way = Way(f"nixl, GPU memory by {tls} on {name}", "nixl", f"{tls},{CUDA}", name, "cuda")
        tries.append(Try(f"ucx {tls} gpu", way, level, f"see `gpudirect` above; {mend}"))
    return tries


def judge(tried: Try, outcome: Outcome) -> Finding:
    """What a try has shown."""
    name = tried.way.name
    if outcome.left_out and (outcome.error or tried.way.ucx_tls != "auto"):
        text = f"{name}: UCX finds no {outcome.left_out} here"
        return Finding(tried.check, tried.level, text, tried.mend)
    if outcome.error:
        return Finding(tried.check, tried.level, f"{name}: {outcome.error}", tried.mend)
    moved = f"{name}: every byte arrived, {outcome.rate / 1e9:.1f} GB/s"
    if outcome.left_out:  # of a list in the environment, where something else has done it
        text = f"{moved}, but UCX finds no {outcome.left_out} here"
        return Finding(tried.check, Level.WARN, text, tried.mend)
    return Finding(tried.check, Level.OK, moved)
