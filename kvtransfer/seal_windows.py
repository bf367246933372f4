"""Scratch memory in which a peer's seals arrive as one piece.

The seals of a pool are small and lie in a row, but a sequence's blocks do not. Read one by one, 16
bytes each, they would cost more than all else that a hand-off adds to its data. So all of a peer's
seals are read as one piece into a window here, and those that were wanted are copied to the staging
array once that is done. A window belongs to one read until it is settled. Knows no transport.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvtransfer.layout import SEAL_BYTES
from kvtransfer.region import Region

NUM_WINDOWS = 16
WINDOW_ROWS = 4096  # 64 KiB of seals; those of a larger pool are read one by one

Rows = np.ndarray[Any, np.dtype[np.int32]]  # their numbers

_SEAL = np.dtype((np.void, SEAL_BYTES))


class SealWindows:
    """``rows`` is int64 ``[NUM_WINDOWS, WINDOW_ROWS, 2]``, on the device of the pool."""

    def __init__(self, region: Region) -> None:
        shape = (NUM_WINDOWS, WINDOW_ROWS, 2)
        self.rows = torch.zeros(shape, dtype=torch.int64, device=region.staging.device)
        self._staging, self._rows = _seals(region.staging), _seals(self.rows)
        self._nothing: Any = 0 if self._rows is self.rows else np.zeros((), _SEAL)
        self._free = list(range(NUM_WINDOWS))

    def take(self, num_rows: int) -> int | None:
        """A window with its first ``num_rows`` empty, if one is free."""
        if not self._free:
            return None
        window = self._free.pop()
        self._rows[window, :num_rows] = self._nothing
        return window

    def give_back(self, window: int) -> None:
        """The read into it is settled."""
        self._free.append(window)

    def deliver(self, window: int, remote: Rows, local: Rows) -> None:
        """Copy the seals of ``remote`` blocks to the staging array, at ``local`` ones."""
        if isinstance(self._staging, torch.Tensor):
            theirs, ours = (
                torch.from_numpy(i).to(self.rows.device).long() for i in (remote, local)
            )
            self._staging[ours] = self._rows[window, theirs]
        else:
            self._staging[local] = self._rows[window, remote]


def _seals(tensor: torch.Tensor) -> Any:
    """On the host by numpy, a seal as one item, as in :class:`kvtransfer.region.Region`."""
    return tensor.numpy().view(_SEAL)[..., 0] if tensor.device.type == "cpu" else tensor
