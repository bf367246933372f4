"""What the injected faults do to a sequence of frames."""

from __future__ import annotations

import asyncio

from kvtransfer.faults import FaultPlan, Faults
from router.link_faults import FaultyFrames


class Scripted(Faults):
    """Draws what it is told, then nothing."""

    def __init__(self, *kinds: str, delay_s: float = 0.01) -> None:
        super().__init__(FaultPlan())
        self._kinds = list(kinds)
        self._delay_s = delay_s

    def draw(self) -> str:
        return self._kinds.pop(0) if self._kinds else ""

    def delay_s(self) -> float:
        return self._delay_s


def passed(*kinds: str, frames: bytes = b"abcd", wait_s: float = 0.0) -> list[bytes]:
    """What comes out when each letter is a frame."""

    async def scenario() -> list[bytes]:
        out: list[bytes] = []
        faulty = FaultyFrames(Scripted(*kinds), out.append, 0)
        for frame in frames:
            faulty.push(bytes([frame]))
        await asyncio.sleep(wait_s)
        faulty.close()
        return out

    return asyncio.run(scenario())


def test_each_kind() -> None:
    assert passed() == [b"a", b"b", b"c", b"d"]
    assert passed("", "drop") == [b"a", b"c", b"d"]
    assert passed("duplicate") == [b"a", b"a", b"b", b"c", b"d"]
    assert passed("reorder") == [b"b", b"a", b"c", b"d"]
    assert passed("reorder", "drop") == [b"c", b"a", b"d"]
    assert passed("reorder", "duplicate") == [b"b", b"b", b"a", b"c", b"d"]
    assert passed("", "", "", "reorder") == [b"a", b"b", b"c"]  # nothing has overtaken it yet


def test_a_delay_holds_up_what_follows() -> None:
    assert passed("", "delay") == [b"a"]
    assert passed("", "delay", wait_s=0.1) == [b"a", b"b", b"c", b"d"]
    assert passed("delay", "delay", "drop", wait_s=0.1) == [b"a", b"b", b"d"]


def test_one_byte_is_changed_but_never_a_spared_one() -> None:
    async def scenario() -> None:
        for _ in range(200):
            out: list[bytes] = []
            FaultyFrames(Scripted("corrupt"), out.append, 4).push(b"\x00\x00\x00\x03abc")
            (frame,) = out
            assert frame[:4] == b"\x00\x00\x00\x03"
            assert sum(a != b for a, b in zip(frame[4:], b"abc", strict=True)) == 1

    asyncio.run(scenario())
