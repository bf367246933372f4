"""Memory of a pool: on the host in huge pages, where the kernel has them.

A block's keys of one layer and head are 4 KiB or so, and the next ones lie elsewhere. In small
pages each of these is a page of its own, whose address has to be looked up in memory first, for
which attention over long contexts and reads by a peer have to wait.
"""

import contextlib
import mmap

import numpy as np
import torch
from torch import Tensor

HUGE_PAGE = 2 << 20  # bytes, on x86 and on ARM with small pages of 4 KiB


def zeros(num_bytes: int, device: str) -> Tensor:
    """uint8 ``[num_bytes]``, zeroed; on the host, memory is taken when it is first touched.

    Where huge pages are not to be had it is in small ones, with no other difference.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux
    if torch.device(device).type != "cpu" or advice is None or num_bytes < HUGE_PAGE:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    # Private, as huge pages of shared memory are mostly switched off.
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel built without them
        memory.madvise(advice)
    everything = np.frombuffer(memory, np.uint8)  # keeps the mapping, as the tensor keeps this
    start = -everything.ctypes.data % HUGE_PAGE
    return torch.from_numpy(everything[start : start + num_bytes])
