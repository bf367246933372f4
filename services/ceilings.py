"""What this machine can do at best: operations per second of a GEMM, bytes per second read.

Timed once, with the worker's number of threads, before anything is served; it takes a second. Kept
like the token budget, see ``measure.cached``. Others use the same cores, above all while a
deployment starts, and make it slower; for some milliseconds a processor is faster than it can stay.
So neither the middle nor the best of many tries is taken, but what a quarter of them reach. A
ceiling is that of a plain product of large matrices and of a plain sum. It is no law: kernels that
fit a cache or a shape better may come out a little above it.
"""

import functools
import logging
import time
from collections.abc import Callable

import torch

from services.budget import device_name
from services.engine.config import EngineConfig
from services.engine.roofline import Ceilings
from services.measure import cached
from services.model_cache import cache_dir

log = logging.getLogger(__name__)

# Rows, inputs and outputs: a square, and what the layers of a model look like.
SHAPES = {
    "cpu": ((512, 512, 512), (512, 1024, 4096)),
    "cuda": ((8192, 8192, 8192), (8192, 4096, 16384)),
}
READ_BYTES = 1 << 28  # far more than the caches keep
BOX_S = 0.3  # of tries, for each of them


def machine_ceilings(config: EngineConfig) -> Ceilings:
    """Of the device, dtype and threads of this engine."""
    folder = cache_dir() / "ceilings"
    device = torch.device(config.device)
    key: dict[str, str | int] = {
        "processor": device_name(config.device),
        "threads": config.threads,
        "torch": str(torch.__version__),
    }
    flops, known = cached(
        {**key, "what": "flops", "dtype": config.dtype},
        functools.partial(gemm_flops, device, getattr(torch, config.dtype)),
        folder,
    )
    num_bytes, _ = cached({**key, "what": "bytes"}, functools.partial(read_bytes, device), folder)
    log.info(
        "ceilings: %.0f GFLOP/s, %.1f GB/s (%s)",
        flops / 1e9,
        num_bytes / 1e9,
        "as timed earlier" if known else "timed now",
    )
    return Ceilings(flops, num_bytes)


@torch.inference_mode()
def gemm_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of the fastest shape."""
    best = 0.0
    for rows, inputs, outputs in SHAPES[device.type]:
        x = torch.randn(rows, inputs, device=device).to(dtype)
        weight = torch.randn(outputs, inputs, device=device).to(dtype)
        multiply = functools.partial(torch.nn.functional.linear, x, weight)
        best = max(best, 2 * rows * inputs * outputs / _quick(multiply, device))
    return best


@torch.inference_mode()
def read_bytes(device: torch.device) -> float:
    """Bytes per second of a sum."""
    memory = torch.ones(READ_BYTES // 4, device=device)
    return READ_BYTES / _quick(memory.sum, device)


def _quick(act: Callable[[], object], device: torch.device) -> float:
    """Seconds below which a quarter of the calls stay."""
    taken = [_timed(act, device)]
    while sum(taken) < BOX_S:
        taken.append(_timed(act, device))
    return sorted(taken)[len(taken) // 4]


def _timed(act: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    act()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
