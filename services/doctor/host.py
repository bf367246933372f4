"""Checks of what every machine has: processor, shared memory, limits, temporary files.

Each takes the folder that stands for ``/``, so that a test can lay out another machine's.
"""

import contextlib
import ctypes
import mmap
import os
import resource
import tempfile
from pathlib import Path

from services.doctor.findings import Finding, Level
from services.machine import this_machine

GIB, MIB = 2**30, 2**20
OBJECT_STORE_BYTES = 80 * MIB  # Ray's in baton serve; 75 MiB is the least that Ray takes
MANY_FILES = 4096  # a stream takes two of a router, a pair of workers some
MANY_THREADS = 4096  # Ray alone has some hundreds in each process
LOCKED_BYTES = 16 * MIB  # what the trial of mlock locks
CAP_IPC_LOCK = 14  # bit of the capabilities in /proc/self/status


def check_processor(root: Path) -> Finding:
    """Cores, the part of them that a container may use, and memory."""
    cores, memory = len(os.sched_getaffinity(0)), amount(this_machine().memory_bytes)
    quota = cpu_quota(root)
    if quota is None or quota >= cores:
        return Finding("processor", Level.OK, f"{cores} cores, {memory} of memory")
    found = f"{quota:g} of {cores} cores, by a limit; {memory} of memory"
    if quota >= 1:
        return Finding("processor", Level.OK, found)
    return Finding(
        "processor",
        Level.WARN,
        f"{found}: every process stands still for a part of each tenth of a second",
        "raise the CPU limit to 1 or more (`resources` of the role), or leave it out",
    )


def cpu_quota(root: Path) -> float | None:
    """Cores' worth of time that this container may use; None without a limit."""
    with contextlib.suppress(OSError, ValueError):  # cgroup 2
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        folder = root / "sys/fs/cgroup/cpu"
        used = int((folder / "cpu.cfs_quota_us").read_text())
        return None if used < 0 else used / int((folder / "cpu.cfs_period_us").read_text())
    return None


def check_shared_memory(root: Path) -> Finding:
    """Whether ``/dev/shm`` can be written, and has room for Ray's object store."""
    folder = root / "dev/shm"
    mend = (
        "mount a tmpfs there: `shm.size` of the role in the chart, --shm-size for docker run,"
        " mount -o remount,size=2G /dev/shm on a host"
    )
    try:
        size = os.statvfs(folder)
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, mmap.PAGESIZE)
    except OSError as error:
        return Finding(
            "shared memory", Level.FAIL, f"/dev/shm: {error.strerror}: processes need it", mend
        )
    total, free = size.f_blocks * size.f_frsize, size.f_bavail * size.f_frsize
    found = f"/dev/shm has {amount(total)}, {amount(free)} of it free"
    if free >= OBJECT_STORE_BYTES:
        return Finding("shared memory", Level.OK, found)
    return Finding(
        "shared memory",
        Level.WARN,
        f"{found}: Ray keeps its objects on disk below {amount(OBJECT_STORE_BYTES)}, and libraries"
        " that exchange data between GPUs fail",
        mend,
    )


def check_huge_pages(root: Path) -> Finding:
    """KV pools in host memory ask for huge pages; the host's switch holds for its containers."""
    switch = root / "sys/kernel/mm/transparent_hugepage/enabled"
    try:
        chosen = switch.read_text().partition("[")[2].partition("]")[0]  # "always [madvise] never"
    except OSError:
        return Finding("huge pages", Level.NOTE, "this kernel has none that are transparent")
    if chosen != "never":
        return Finding("huge pages", Level.OK, f"for whom asks for them ({chosen})")
    return Finding(
        "huge pages",
        Level.WARN,
        "switched off: attention over long contexts on the processor waits for addresses",
        f"on the host: echo madvise > /{switch.relative_to(root)}",
    )


def check_open_files(_: Path) -> Finding:
    """Each client and each connection between processes is an open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{limit(soft)} per process (hard limit {limit(hard)})"
    if soft == resource.RLIM_INFINITY or soft >= MANY_FILES:
        return Finding("open files", Level.OK, found)
    return Finding(
        "open files",
        Level.WARN,
        f"{found}: too few for some thousand streams",
        "ulimit -n 65536 before the start, or LimitNOFILE= of the service or container runtime",
    )


def check_processes(root: Path) -> Finding:
    """Threads count as processes here."""
    allowed = [value for value in (resource.getrlimit(resource.RLIMIT_NPROC)[0],) if value >= 0]
    allowed += [int(text) for text in cgroup_values(root, "pids.max", "pids/pids.max")]
    least = min(allowed, default=resource.RLIM_INFINITY)
    found = f"{limit(least)} processes and threads"
    if least == resource.RLIM_INFINITY or least >= MANY_THREADS:
        return Finding("processes", Level.OK, found)
    return Finding(
        "processes",
        Level.WARN,
        f"{found}: Ray and its workers have some hundreds each",
        f"allow {MANY_THREADS} or more: ulimit -u, or the kubelet's podPidsLimit",
    )


def check_locked_memory(_: Path, rdma: bool) -> Finding:
    """Network adapters read and write pages that are locked; ``rdma``: there is one, or must be."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    capable = has_capability(CAP_IPC_LOCK, "CapEff")
    if soft == resource.RLIM_INFINITY or capable:
        why = "the capability IPC_LOCK" if capable else "no limit"
        if error := lock_some():
            found = f"{why}, but locking {amount(LOCKED_BYTES)} fails: {error}"
            return _memory_limit(found, rdma)
        return Finding("locked memory", Level.OK, f"{why}: {amount(LOCKED_BYTES)} were locked")
    found = f"at most {amount(soft)} may be locked"
    if rdma and has_capability(CAP_IPC_LOCK, "CapBnd"):
        found += (
            "; the capability IPC_LOCK is in the bounding set, as when it is added to a container,"
            f" but not in effect for user {os.geteuid()}"
        )
    return _memory_limit(found, rdma)


def _memory_limit(found: str, rdma: bool) -> Finding:
    mend = (
        "ulimit -l unlimited, which for a container is its node's to give (containerd's"
        " LimitMEMLOCK=infinity, CRI-O's default_ulimits). Or let RDMA's workers be root's, with"
        " the capability IPC_LOCK (`rdma.runAsRoot` and `rdma.capabilities` in the chart)"
    )
    if rdma:
        text = f"{found}: RDMA cannot register a KV pool"
        return Finding("locked memory", Level.FAIL, text, mend)
    return Finding("locked memory", Level.NOTE, f"{found}; only RDMA needs more", f"for it, {mend}")


def lock_some() -> str:
    """Lock some memory in RAM for a moment; the kernel's objection, or nothing."""
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(-1, LOCKED_BYTES) as memory:
        view = ctypes.c_char.from_buffer(memory)
        address = ctypes.c_void_p(ctypes.addressof(view))
        status = libc.mlock(address, ctypes.c_size_t(LOCKED_BYTES))
        error = os.strerror(ctypes.get_errno()) if status else ""
        libc.munlock(address, ctypes.c_size_t(LOCKED_BYTES))
        del view  # else the mapping could not be closed
    return error


def has_capability(bit: int, kind: str) -> bool:
    """Whether this process has a capability: CapEff, in effect, or CapBnd, may come to have it."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{kind}:"):
                return bool(int(line.split()[1], 16) >> bit & 1)
    return False


def check_temporary_folder(_: Path) -> Finding:
    """Ray's sockets and logs go there, and the command that starts HAProxy."""
    try:
        folder = Path(tempfile.gettempdir())
        with tempfile.TemporaryDirectory() as work:
            script = Path(work) / "try"
            script.write_text("#!/bin/sh\n")
            script.chmod(0o700)
            runs = os.access(script, os.X_OK)  # False on a file system without programs
            free = os.statvfs(work).f_bavail * os.statvfs(work).f_frsize
    except OSError as error:
        found = f"nothing can be written: {error}"
        mend = "mount an emptyDir at /tmp, or set TMPDIR to a folder that can be written"
        return Finding("temporary", Level.FAIL, found, mend)
    found = f"{folder}, {amount(free)} free"
    if free < GIB:
        mend = "make room, or set TMPDIR: Ray's logs and what does not fit its memory go there"
        return Finding("temporary", Level.WARN, found, mend)
    if not runs:
        mend = (
            "mount it without noexec, or set TMPDIR: baton serve otherwise starts HAProxy with"
            " splicing, and clients that leave are noticed late"
        )
        return Finding("temporary", Level.WARN, f"{found}, but no program starts there", mend)
    return Finding("temporary", Level.OK, found)


def cgroup_values(root: Path, *names: str) -> list[str]:
    """What those files of the container's cgroup hold that are there, if it is a number."""
    values = []
    for name in names:
        with contextlib.suppress(OSError):
            text = (root / "sys/fs/cgroup" / name).read_text().strip()
            values += [text] if text.isdigit() else []
    return values


def limit(value: int) -> str:
    """A limit, for people."""
    return "unlimited" if value in (resource.RLIM_INFINITY, -1) else f"{value:,}"


def amount(num_bytes: int) -> str:
    """Memory, for people."""
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:.1f} GiB"
    return f"{num_bytes / MIB:.0f} MiB" if num_bytes >= MIB else f"{num_bytes / 1024:.0f} KiB"
