"""Where models are kept, and how one process at a time prepares a file or folder there.

A file or folder appears in the cache under its own name only when it is complete; whatever a killed
process left behind has another name and is removed by the next one. A lock beside the target lets
one process work on it while others wait. Knows files and hashes, not where models come from.
"""

import fcntl
import functools
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Report = Callable[[str], None]

print_now: Report = functools.partial(print, flush=True)  # progress in a pipe is seen at once


class FetchError(Exception):
    """The model cannot be had; the message says what is wrong and what to do."""


def cache_dir() -> Path:
    """Our folder in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"


def size(num_bytes: int) -> str:
    """For people."""
    if num_bytes < 1_000_000:
        return f"{max(1, num_bytes // 1000)} kB"
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:.2f} GB"


def silent(_: str) -> None:
    """A report that nobody reads."""


class Progress:
    """Says how far a download is: at each tenth of ``total`` bytes, and every ten seconds."""

    def __init__(self, total: int, report: Report) -> None:
        self._total, self._report = max(total, 1), report
        self._next_percent, self._next_time = 10, time.monotonic() + 10

    def at(self, done: int) -> None:
        """So many bytes are there."""
        percent = min(100 * done // self._total, 100)
        if percent >= self._next_percent or time.monotonic() >= self._next_time:
            self._report(f"  {done / 1e6:.0f} of {self._total / 1e6:.0f} MB ({percent} %)")
            self._next_percent = percent // 10 * 10 + 10
            self._next_time = time.monotonic() + 10


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_sha256(path: Path, expected: str, advice: str) -> None:
    """Raise :class:`FetchError` with ``advice`` unless the file has this hash."""
    actual = file_sha256(path)
    if actual != expected:
        raise FetchError(f"{path} is corrupted: sha256 {actual}, expected {expected}; {advice}")


@contextmanager
def locked(target: Path, report: Report) -> Iterator[None]:
    """Hold the lock of ``target`` among all processes; it ends with the process at the latest."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(target.name + ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"waiting for another process that prepares {target.name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def work_folder(target: Path) -> Iterator[Path]:
    """A new folder beside ``target``, for its lock's holder; removed at the end if still there."""
    work = target.with_name(target.name + ".partial")
    shutil.rmtree(work, ignore_errors=True)  # of a process that was killed: we hold its lock
    work.mkdir()
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    """Replace a file at once; for the holder of its lock."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(partial, path)
