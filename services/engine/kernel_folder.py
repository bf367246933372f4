"""Where compiled kernels are kept (pure).

Numba keeps what it compiled for a file until that file changes. But a kernel has parts of other
files in it, and a stale one computes what is wrong. So all lie in a folder named after the text of
all files here that numba compiles from.
"""

import hashlib
import os
from importlib.metadata import version
from pathlib import Path

COMPLETE = "complete"  # a file that is there when all kernels are


def kernel_folder(sources: Path = Path(__file__).parent) -> Path:
    """Beside the models: see :func:`services.model_cache.cache_dir`."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"
    digest = hashlib.sha256(version("numba").encode())
    for file in sorted(sources.glob("*.py")):
        text = file.read_bytes()
        if b"numba" in text:
            digest.update(file.name.encode() + b"\0" + text)
    return cache / "kernels" / digest.hexdigest()[:16]
