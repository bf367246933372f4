"""Checks of accelerators and network adapters: are they here, and can this process use them?

Devices of the host show in ``/sys`` of a container whether it was given them or not; what it was
given is in ``/dev``. Each check takes the folder that stands for ``/``.
"""

import contextlib
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.doctor.findings import Finding, Level

SMI = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
PATIENCE_S = 20.0
ROCE_V2 = "RoCE v2"
PEERMEM = ("nvidia_peermem", "efa_nv_peermem")  # kernel modules by which adapters read GPU memory
# GKE mounts the node's driver there, and leaves it to the image to look:
# https://cloud.google.com/kubernetes-engine/docs/how-to/gpus#cuda
DRIVER = "usr/local/nvidia"
DRIVER_FOLDERS = {"PATH": (f"{DRIVER}/bin", "nvidia-smi"),
                  "LD_LIBRARY_PATH": (f"{DRIVER}/lib64", "libcuda.so.1")}  # fmt: skip


def gpus() -> tuple[list[str], str]:
    """Name, memory and driver of each GPU that this process is given; or none, and why."""
    try:
        answer = subprocess.run(SMI, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
        return [line.strip() for line in answer.stdout.splitlines() if line.strip()], "lists none"
    except FileNotFoundError:
        return [], "is not in PATH"
    except subprocess.CalledProcessError as error:
        said = " ".join((error.stdout + error.stderr).split())
        return [], f"says: {said[:200]}" if said else f"ends with status {error.returncode}"
    except (OSError, subprocess.SubprocessError) as error:
        return [], f"does not answer: {error}"


def check_gpu(
    root: Path,
    found: list[str],
    torch_cuda: bool,
    needed: bool,
    why: str = "",
    environment: Mapping[str, str] = os.environ,
) -> Finding:
    """``found`` and ``why`` not: see :func:`gpus`; ``torch_cuda``: torch is built for CUDA."""
    if found and torch_cuda:
        return Finding("gpu", Level.OK, "; ".join(found))
    if found:
        return Finding(
            "gpu",
            Level.FAIL if needed else Level.WARN,
            f"{'; '.join(found)}: but torch is built for CPUs, so nothing computes there",
            "use the image that was built with VARIANT=cuda, or install torch from the index for"
            " CUDA",
        )
    if any((root / folder / file).exists() for folder, file in DRIVER_FOLDERS.values()):
        return _driver_of_gke(root, why, environment)
    nodes = sorted(path.name for path in (root / "dev").glob("nvidia[0-9]*"))
    if nodes:
        return Finding(
            "gpu",
            Level.FAIL,
            f"{', '.join(nodes)} in /dev, but nvidia-smi {why}",
            "let the container runtime mount the driver: runtimeClassName nvidia, and"
            " NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        )
    if needed:
        return Finding(
            "gpu",
            Level.FAIL,
            "none is here",
            "give the pod one (`gpus: 1` of the role in the chart, --gpus in docker run); on a"
            " host, install the driver until nvidia-smi answers",
        )
    return Finding("gpu", Level.NOTE, "none: workers compute on the processor")


def _driver_of_gke(root: Path, why: str, environment: Mapping[str, str]) -> Finding:
    """A driver is mounted where nobody looks by himself, and nvidia-smi shows no GPU."""
    unseen = {
        variable: f"/{folder}"
        for variable, (folder, file) in DRIVER_FOLDERS.items()
        if (root / folder / file).exists()
        and f"/{folder}" not in environment.get(variable, "").split(":")
    }
    if unseen:
        names = " and ".join(f"{variable} lacks {folder}" for variable, folder in unseen.items())
        words = [f"{v}={'$PATH:' if v == 'PATH' else ''}{folder}" for v, folder in unseen.items()]
        return Finding(
            "gpu",
            Level.FAIL,
            f"the driver is in /{DRIVER}, as GKE mounts it, but {names}",
            "use the image that was built with VARIANT=cuda, which looks there; in the Dockerfile"
            f" of another one: ENV {' '.join(words)}",
        )
    return Finding(
        "gpu",
        Level.FAIL,
        f"the driver is in /{DRIVER}, as GKE mounts it, but nvidia-smi {why}",
        "look whether the node's driver was installed to the end (the pods of the driver installer"
        " in kube-system), and for a GPU in the pod's limits (`gpus` of the role in the chart)",
    )


@dataclass(frozen=True)
class Adapter:
    """A port of a network adapter with RDMA."""

    device: str  # mlx5_0
    port: int
    active: bool
    link: str  # InfiniBand or Ethernet
    rate: str  # "400 Gb/sec (4X NDR)"
    nodes: tuple[str, ...]  # in /dev/infiniband, that belong to it and are there
    roce_gid: int | None  # of its first GID for RoCE v2
    efa: bool = False

    @property
    def ucx_name(self) -> str:
        """As UCX_NET_DEVICES has it."""
        return f"{self.device}:{self.port}"

    @property
    def usable(self) -> bool:
        """Whether a process here could open it."""
        return self.active and bool(self.nodes)


def adapters(root: Path) -> list[Adapter]:
    """All ports of all adapters that the kernel knows."""
    found = []
    for device in sorted((root / "sys/class/infiniband").glob("*")):
        names = [path.name for path in device.glob("device/infiniband_verbs/*")]
        nodes = tuple(n for n in sorted(names) if (root / "dev/infiniband" / n).exists())
        driver = device / "device/driver"
        efa = driver.exists() and driver.resolve().name == "efa"
        ports = [path for path in (device / "ports").glob("*") if path.name.isdigit()]
        for port in sorted(ports, key=lambda path: int(path.name)):
            found.append(
                Adapter(
                    device.name,
                    int(port.name),
                    "ACTIVE" in _read(port / "state"),
                    _read(port / "link_layer") or "unknown link",
                    _read(port / "rate"),
                    nodes,
                    _roce_gid(port),
                    efa,
                )
            )
    return found


def _roce_gid(port: Path) -> int | None:
    """Index of the first GID for RoCE v2; reading the type of one that is not set is an error."""
    types = (port / "gid_attrs/types").glob("*")
    numbers = sorted(int(path.name) for path in types if _read(path) == ROCE_V2)
    return numbers[0] if numbers else None


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""


def check_rdma(found: list[Adapter], needed: bool) -> Finding:
    """Whether there is an adapter, it is up, and this process may open it."""
    bad = Level.FAIL if needed else Level.WARN
    if not found:
        if not needed:
            return Finding("rdma", Level.NOTE, "no adapter: KV moves over TCP between hosts")
        return Finding(
            "rdma",
            Level.FAIL,
            "no adapter in /sys/class/infiniband",
            "place the pod on a node with one (`nodeSelector` of the role), and load its driver"
            " there (ibv_devinfo on the node shows it)",
        )
    text = "; ".join(
        f"{a.ucx_name} {a.link} {a.rate}{'' if a.active else ' (not active)'}" for a in found
    )
    if not any(adapter.nodes for adapter in found):
        return Finding(
            "rdma",
            bad,
            f"{text}: but none of them is in /dev/infiniband",
            "ask for the device plugin's resource (`rdma.resource` and `rdma.count` in the chart);"
            " in docker run, --device /dev/infiniband",
        )
    if not any(adapter.usable for adapter in found):
        return Finding(
            "rdma", bad, f"{text}: no port is active", "look at cable, switch and subnet manager"
        )
    if ethernet := [a for a in found if a.usable and a.link == "Ethernet" and not a.efa]:
        gid = ethernet[0].roce_gid
        if gid is None:
            mend = (
                "give the port an IP address; with Multus, the pod's own network interface has it"
            )
            return Finding("rdma", bad, f"{text}: no GID for {ROCE_V2}", mend)
        text += f"; {ROCE_V2} has GID {gid} (UCX_IB_GID_INDEX, `rdma.ibGidIndex`)"
    return Finding("rdma", Level.OK, text)


def check_gpudirect(root: Path, found: list[Adapter], num_gpus: int) -> Finding:
    """Whether adapters can read GPU memory without a copy through the host's."""
    if not num_gpus or not any(adapter.usable for adapter in found):
        return Finding("gpudirect", Level.NOTE, "needs a GPU and an RDMA adapter")
    for module in PEERMEM:
        if (root / "sys/module" / module).is_dir():
            return Finding("gpudirect", Level.OK, f"the kernel module {module} is loaded")
    if "Open Kernel Module" in _read(root / "proc/driver/nvidia/version"):
        return Finding("gpudirect", Level.OK, "NVIDIA's open kernel modules, which have dma-buf")
    return Finding(
        "gpudirect",
        Level.WARN,
        "neither nvidia_peermem nor NVIDIA's open kernel modules, so each block is copied through"
        " the host's memory",
        "modprobe nvidia-peermem on the node, or install the driver's open kernel modules"
        " (`driver.rdma.enabled` of NVIDIA's GPU operator)",
    )
