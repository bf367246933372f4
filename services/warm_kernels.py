"""Compiles all kernels before the first worker needs them, so that it is said, and done once."""

import subprocess
import sys
from collections.abc import Callable

from services.config import ConfigError
from services.engine.kernel_folder import COMPLETE, kernel_folder


def warm_kernels(report: Callable[[str], None]) -> None:
    """Compile what this machine has not compiled yet; raises ConfigError when that fails."""
    folder = kernel_folder()
    if (folder / COMPLETE).exists():
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # each worker compiles for itself, and says why
    report("compiling kernels for this processor, once: half a minute on two cores")
    code = "from services.warm_kernels import compile_all; compile_all()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise ConfigError(f"the kernels cannot be compiled: {' '.join(last)}")


def compile_all() -> None:
    """In a process of its own, since it imports everything."""
    import services.engine.model
    import services.engine.sampler  # noqa: F401
    from services.engine import compiled

    compiled.compile_all()
    folder = kernel_folder()
    if folder.is_dir():
        (folder / COMPLETE).touch()
