"""Seals that come as one piece go to the right places, and windows are not used twice."""

import numpy as np

from kvtransfer.layout import KVLayout, Stamp
from kvtransfer.region import Region
from kvtransfer.seal_windows import NUM_WINDOWS, SealWindows

EPOCH = 2**64 - 2


def make_region() -> Region:
    return Region(KVLayout("w", 2, 3, 8, "rope", 4, "float32"), 6)


def test_what_was_wanted_is_delivered_and_nothing_else() -> None:
    ours, theirs = make_region(), make_region()
    theirs.open(EPOCH, [(block, 2 * block + 1) for block in range(6)])
    windows = SealWindows(ours)
    window = windows.take(6)
    assert window is not None
    windows.rows[window, :6] = theirs.seals
    windows.deliver(window, np.array([4, 0], np.int32), np.array([1, 5], np.int32))
    found = ours.staged_seals(range(6))
    nothing = Stamp(0, 0)
    assert found == [nothing, Stamp(EPOCH, 9), nothing, nothing, nothing, Stamp(EPOCH, 1)]


def test_a_window_belongs_to_one_read_and_comes_back_empty() -> None:
    windows = SealWindows(make_region())
    taken = [windows.take(6) for _ in range(NUM_WINDOWS)]
    assert sorted(w for w in taken if w is not None) == list(range(NUM_WINDOWS))
    assert windows.take(6) is None
    windows.rows[3] = 7
    windows.give_back(3)
    assert windows.take(6) == 3
    assert not windows.rows[3, :6].any()
    assert windows.take(6) is None
