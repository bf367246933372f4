"""Which ways KV could take from here, and what it means when one does not work."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvtransfer.ucx import BY_DEFAULT, NET_DEVICES, described, settle
from services.config import AppConfig, WorkerConfig
from services.doctor.devices import Adapter
from services.doctor.findings import Finding, Level
from services.doctor.trial import Outcome, Way

CUDA = "cuda_copy"  # without it UCX does not know GPU memory
MEND_AS_SET = (
    "who is named in brackets asks for what is not here: change UCX_TLS and UCX_NET_DEVICES in the"
    " environment (`rdma.ucxTls`, `rdma.netDevices`, `rdma.env` in the chart), or ucx_tls and"
    " net_devices of the role. By default workers of one host have loopback only: name the adapter"
)


@dataclass(frozen=True)
class Try:
    """A way, and how bad it is when it does not work."""

    check: str
    way: Way
    level: Level
    mend: str
    exact: bool = True  # the way is no other than the one that is named
    devices: frozenset[str] = frozenset()  # at least one of these must be here


def ways_from_here(
    adapters: list[Adapter],
    gpu: bool,
    need_rdma: bool,
    config: AppConfig,
    environment: Mapping[str, str],
    in_cluster: bool = False,
) -> list[Try]:
    """``gpu``: there is one that torch can use. Pools in host memory unless the name says GPU.

    ``in_cluster``: workers here have peers on other hosts.
    """
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
            "see `tcp` above; if that is ok, install nixl anew (pip install --force-reinstall"
            " nixl). What is in host memory can do without: transport: tcp",
        ),
        Try(
            "ucx shm",
            Way("nixl between processes of one host", "nixl", "tcp,cma", "lo"),
            Level.WARN,
            "see `tcp` above; if that is ok, workers of one host use sockets instead. UCX copies by"
            " process_vm_readv: allow it (sysctl kernel.yama.ptrace_scope=0, and no seccomp profile"
            " that forbids it). Between pods it never works, and nothing needs it",
        ),
    ]
    if gpu:
        way = Way("nixl, GPU memory", "nixl", f"tcp,{CUDA}", "lo", device="cuda")
        mend = (
            "KV on GPUs goes by no other way: compare the driver's CUDA (nvidia-smi) with what nixl"
            " has been built for (pip show nixl-cu12 nixl-cu13)"
        )
        tries.append(Try("ucx cuda", way, Level.FAIL, mend))
    level = Level.FAIL if need_rdma else Level.WARN
    for adapter in adapters:
        if adapter.usable:
            tries += _rdma(adapter, gpu, level)
    return tries + _as_set(config, gpu, environment, in_cluster)


def _rdma(adapter: Adapter, gpu: bool, level: Level) -> list[Try]:
    """An adapter to itself: what it needs of this host is all needed, the network is not."""
    tls = "srd" if adapter.efa else "rc"
    library = " and libefa.so.1 (Debian: ibverbs-providers)" if adapter.efa else ""
    mend = (
        f"see `locked memory` and `rdma` above; {tls} needs /dev/infiniband, memory that can be"
        f" locked{library}. Until then, UCX_TLS without it"
    )
    name = adapter.ucx_name
    tries = [Try(f"ucx {tls}", Way(f"nixl, {tls} on {name}", "nixl", tls, name), level, mend)]
    if gpu:
        way = Way(
            f"nixl, GPU memory by {tls} on {name}", "nixl", f"{tls},{CUDA}", name, device="cuda"
        )
        tries.append(Try(f"ucx {tls} gpu", way, level, f"see `gpudirect` above; {mend}"))
    return tries


def _as_set(
    config: AppConfig, gpu: bool, environment: Mapping[str, str], in_cluster: bool
) -> list[Try]:
    """What workers would use here, where anybody has said anything: one for each that differs."""
    roles: dict[Way, list[str]] = {}
    for role in ("prefill", "decode"):
        pool: WorkerConfig = getattr(config, role)
        if pool.replicas and pool.transport in ("auto", "nixl"):
            device = pool.engine.device
            device = device if device != "auto" else ("cuda" if gpu else "cpu")
            way = Way("", "nixl", pool.ucx_tls, pool.net_devices, not in_cluster, device)
            roles.setdefault(way, []).append(role)
    tries = []
    for way, names in roles.items():
        settings = settle(way.ucx, environment)
        said = {name: s for name, s in settings.items() if s.source != BY_DEFAULT}
        if said:
            memory = "GPU memory" if way.device == "cuda" else "host memory"
            name = f"nixl as {' and '.join(names)} workers use it, {memory}, {described(settings)}"
            devices = said[NET_DEVICES].value.split(",") if NET_DEVICES in said else ()
            tried = replace(way, name=name)
            one_of = frozenset(devices)
            tries.append(Try("ucx as set", tried, Level.FAIL, MEND_AS_SET, False, one_of))
    return tries


def judge(tried: Try, outcome: Outcome) -> Finding:
    """What a try has shown."""
    name, lost = tried.way.name, outcome.left_out
    if not outcome.started:
        mend = "what is said there comes first: torch must be installed whole (pip check)"
        return Finding(tried.check, tried.level, f"{name}: {outcome.error}", mend)
    none_left = bool(tried.devices) and tried.devices <= set(lost.split(", "))
    if lost and (outcome.error or tried.exact or none_left):
        text = f"{name}: UCX finds no {lost} here"
        return Finding(tried.check, tried.level, text, tried.mend)
    if outcome.error:
        return Finding(tried.check, tried.level, f"{name}: {outcome.error}", tried.mend)
    moved = f"{name}: every byte arrived, {outcome.rate / 1e9:.1f} GB/s"
    if lost:  # of a list, where something else has done it
        text = f"{moved}, but UCX finds no {lost} here"
        return Finding(tried.check, Level.WARN, text, tried.mend)
    return Finding(tried.check, Level.OK, moved)
