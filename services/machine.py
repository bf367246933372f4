"""Looks at this machine and its files, for :func:`services.resolve.resolve` and for who starts it.

Needs no torch: the command line calls it before any heavy process starts.
"""

import importlib.util
import os
import platform
import runpy
import secrets
import subprocess
import sys
from pathlib import Path

from router.config import RouterConfig
from router.key_file import KeyFileError, Keys
from router.tracing import tracing_installed
from services.config import AppConfig, ConfigError
from services.engine.model_config import ModelError, read_config
from services.fetch import public_name
from services.resolve import Machine, ModelFacts

CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # "QUOTA PERIOD" in microseconds, or "max ..."


# A third of what another thread gets: enough that a busy neighbour does not starve it.
_NICER, _NICEST = 5, 19


def calm_openmp() -> None:
    """Let torch's threads sleep at a barrier instead of spinning; to be called before its import.

    libgomp spins for milliseconds, which pays on a machine that does nothing else. As soon as any
    other process wants one of the cores, the spinners hold up the thread they wait for, and steps
    take several times as long.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # some 10 microseconds


def give_way() -> None:
    """Let the others of this machine's threads go before the calling one, where cores are shared.

    It gets less only while more threads want to run than there are cores. On Linux, where niceness
    is a thread's; threads that it starts later inherit it.
    """
    if sys.platform == "linux":
        mine = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, 0, min(_NICEST, mine + _NICER))


def this_machine(one_process: bool = False) -> Machine:
    """Cores and memory that this process may use, and whether torch could use a CUDA device."""
    cuda_bytes = _cuda_bytes() if torch_has_cuda() else 0
    return Machine(
        cores=_cores(),
        memory_bytes=_memory_bytes(),
        cuda=cuda_bytes > 0,
        cuda_bytes=cuda_bytes,
        linux=sys.platform == "linux",
        one_process=one_process,
        tracing=tracing_installed(),
    )


def processor_name() -> str:
    """What tells this host's processor from others, as far as its system says: one line."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    facts = {name.strip(): value.strip() for name, value in facts.items()}
    numbers = [facts.get(name, "") for name in ("cpu family", "model", "stepping")]
    words = [facts.get("model name") or platform.processor() or platform.machine(), *numbers]
    return " ".join(word for word in words if word)


def model_facts(folder: Path, name: str) -> ModelFacts:
    """The shape of the model in ``folder``; ``name`` is what the user calls it."""
    try:
        shape = read_config(folder)
    except ModelError as error:
        raise ConfigError(f"model {name}: {error}") from error
    return ModelFacts(
        name=public_name(name),
        max_model_len=shape.max_model_len,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
    )


def read_secret(config: AppConfig) -> bytes:
    """What routers and workers prove to each other that they know."""
    if not config.secret_file:
        return secrets.token_hex(32).encode()  # no white space, so that it can be kept in a file
    return read_secret_file(Path(config.secret_file))


def read_secret_file(file: Path, name: str = "secret_file") -> bytes:
    """A deployment's secret; ``name`` is what an error calls it."""
    try:
        secret = file.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{name} {file}: {error.strerror}") from error
    if len(secret) < 16:
        raise ConfigError(f"{name} {file}: {len(secret)} bytes, needs 16")
    return secret


def check_api_keys(config: RouterConfig) -> None:
    """Raise ConfigError if a router could not read ``api_keys_file``."""
    try:
        Keys(config.api_keys, config.api_keys_file)
    except KeyFileError as error:
        raise ConfigError(f"router.api_keys_file {config.api_keys_file}: {error}") from error


def _cores() -> int:
    """Those that this process may run on, or what its container may use if that is less."""
    if sys.platform != "linux":
        return os.cpu_count() or 1
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = CPU_QUOTA.read_text().split()
    except (OSError, ValueError):
        return cores
    return min(cores, max(1, int(quota) // int(period))) if quota.isdigit() else cores


def _memory_bytes() -> int:
    """The machine's memory, or this container's limit if that is less."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in CGROUP_LIMITS:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit():  # "max" is no limit
            sizes.append(int(text))
    return min(sizes)


def torch_has_cuda() -> bool:
    """Whether the installed torch was built for CUDA, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    return bool(runpy.run_path(str(Path(spec.origin).with_name("version.py"))).get("cuda"))


def _cuda_bytes() -> int:
    """Memory of the smallest CUDA device; 0 without one."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            query, capture_output=True, text=True, timeout=10, check=True
        ).stdout
        return min(int(line) for line in answer.split()) * 2**20
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0
