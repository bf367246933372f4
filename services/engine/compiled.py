"""Compiles kernels with numba, once per machine."""

import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba import njit
from numba.core.sigutils import normalize_signature

from services.engine.kernel_folder import kernel_folder

log = logging.getLogger(__name__)

KEEP_S = 30 * 24 * 3600.0  # of a version that nobody has started since


KERNELS: list[tuple[Any, str]] = []
"""Every kernel that Python or another kernel's threads call, with the types it is called with."""


def compiled(signature: str, parallel: bool = False) -> Callable[[Any], Any]:
    """Decorator: compiled, or read from the folder, at the first call. It runs without Python's
    lock; ``parallel``: ``prange`` is shared by threads.

    Not sooner, since numba starts its threads then, and a process that has them cannot fork.
    """

    def wrap(function: Any) -> Any:
        how = {"parallel": parallel, "nogil": True}
        try:
            kernel = njit(cache=True, **how)(function)
        except (RuntimeError, OSError) as error:  # nowhere to keep it
            log.warning("%s is compiled at each start: %s", function.__name__, error)
            kernel = njit(**how)(function)
        KERNELS.append((kernel, signature))
        return kernel

    return wrap


def compile_all() -> None:
    """Compile what is imported, as it will be called."""
    for kernel, signature in KERNELS:
        # As a tuple of types: what was compiled for a text is not found by a call.
        kernel.compile(normalize_signature(signature)[0])


def _prepare(folder: Path) -> None:
    """Make the folder, mark it as used, and remove those that have not been for long."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        for other in folder.parent.iterdir():
            if time.time() - other.stat().st_mtime > KEEP_S:
                shutil.rmtree(other, ignore_errors=True)
    except OSError as error:
        log.warning("cannot keep compiled kernels in %s: %s", folder, error.strerror)


_FOLDER = kernel_folder()
_prepare(_FOLDER)
numba.config.CACHE_DIR = str(_FOLDER)
