"""A pool lies in huge pages where the kernel has them, zeroed, and lives as long as it must."""

import gc
import re
from pathlib import Path

import pytest
import torch

from kvtransfer.pool_memory import HUGE_PAGE, zeros

SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags_at(address: int) -> set[str]:
    """What the kernel says of the mapping that ``address`` is in."""
    found, here = set(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            here = int(span[1], 16) <= address < int(span[2], 16)
        elif here and line.startswith("VmFlags:"):
            found |= set(line.split()[1:])
    return found


@pytest.mark.skipif(not SWITCH.exists(), reason="this kernel has no transparent huge pages")
def test_huge_pages_are_asked_for() -> None:
    memory = zeros(3 * HUGE_PAGE + 4096, "cpu")
    assert memory.data_ptr() % HUGE_PAGE == 0
    assert "hg" in flags_at(memory.data_ptr())
    assert "hg" in flags_at(memory.data_ptr() + len(memory) - 1)
    assert "hg" not in flags_at(torch.zeros(3 * HUGE_PAGE).data_ptr())


@pytest.mark.parametrize("num_bytes", [8, HUGE_PAGE - 1, HUGE_PAGE, 5 * HUGE_PAGE + 24])
def test_all_of_it_is_there_and_zero(num_bytes: int) -> None:
    memory = zeros(num_bytes, "cpu")
    assert memory.shape == (num_bytes,)
    assert memory.dtype == torch.uint8
    assert not memory.any()
    memory += 7
    assert int(memory.sum()) == 7 * num_bytes


def test_a_part_keeps_it_and_the_last_one_gives_it_back() -> None:
    part = zeros(40 * HUGE_PAGE, "cpu")[HUGE_PAGE:]
    gc.collect()
    part[-1] = 5  # its own mapping, or a crash
    assert int(part[-1]) == 5
    place = part.data_ptr()
    assert flags_at(place)
    before = mapped()
    del part
    gc.collect()
    assert before - mapped() >= 40 * HUGE_PAGE


def mapped() -> int:
    """Bytes of address space of this process."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * 4096
