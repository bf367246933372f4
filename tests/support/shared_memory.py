"""What there is of shared memory, for tests that none of it is left behind."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

SHM = Path("/dev/shm")


def shared_memory() -> set[str]:
    """Names in /dev/shm and ids of System V segments.

    Without those that a living process uses which is neither this one nor a descendant: another
    test may run beside this one.
    """
    names = set(SHM.iterdir())
    rows = [row.split() for row in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]]
    this = psutil.Process()
    family = {this.pid, *(child.pid for child in this.children(recursive=True))}
    strangers = {pid for pid in psutil.pids() if pid not in family}
    makers = {f"segment {row[1]}": int(row[4]) for row in rows}
    segments = {name for name, maker in makers.items() if maker not in strangers}
    left = names - {path for pid in strangers for path in _used(pid)}
    return {str(path) for path in left if path.exists()} | segments


def _used(pid: int) -> Iterator[Path]:
    """Paths that a process has mapped or open; none of one that is gone or another user's."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if str(SHM) in line:
                yield Path(line.split(maxsplit=5)[5])
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                yield Path(os.readlink(f"/proc/{pid}/fd/{fd}"))
