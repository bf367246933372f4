"""Each fault does what it says, and none lies about settlement."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvtransfer.errors import PeerGone, TransportError
from kvtransfer.fault_transport import FaultTransport
from kvtransfer.faults import KINDS, FaultPlan, Faults
from kvtransfer.transport import Completion, Part, Status
from tests.support.scripted_transport import CARD, PlainMemory, ScriptedTransport

DELAY_S = 0.5


class Rows:
    """Memory of bytes that counts what is changed, as a tensor is indexed."""

    def __init__(self) -> None:
        self.changed: list[tuple[int, int]] = []

    def __getitem__(self, place: tuple[int, int]) -> int:
        return 0

    def __setitem__(self, place: tuple[int, int], value: int) -> None:
        assert value != 0
        self.changed.append(place)


@dataclass(frozen=True)
class Layout:
    kv_bytes: int = 64


class Region:
    """Of :class:`kvtransfer.region.Region`, what is damaged."""

    layout = Layout()

    def __init__(self) -> None:
        self.spans, self.staging = Rows(), Rows()


class Rig:
    """A fault transport over a scripted one, with a clock of the test."""

    def __init__(self, **chances: float) -> None:
        self.now = 0.0
        self.remote, self.local = PlainMemory(), PlainMemory()
        for block in range(4):
            self.remote.write(block, 2, value=100 + block)
        self.inner = ScriptedTransport(self.remote, self.local)
        self.faults = Faults(FaultPlan(delay_s=DELAY_S, seed=1, **chances))
        self.transport = FaultTransport(self.inner, self.faults, clock=lambda: self.now)
        self.region = Region()
        self.transport.register(self.region)  # type: ignore[arg-type]

    def pull(self, part: Part = Part.KV) -> int:
        return self.transport.pull(CARD, part, [(1, 20), (2, 21)])

    def finish_all(self) -> None:
        for handle in list(self.inner.reads):
            self.inner.finish(handle)

    def handles(self) -> list[int]:
        return [completion.handle for completion in self.transport.poll()]


def test_without_a_fault_everything_is_passed_on() -> None:
    rig = Rig()
    assert rig.transport.name == "scripted"
    handle = rig.pull()
    (inner,) = rig.inner.reads
    assert rig.transport.moved(handle) == 0
    rig.inner.land(inner, 0)
    assert rig.transport.moved(handle) == 1
    rig.transport.abandon(handle)
    assert rig.inner.abandoned == [inner]
    assert rig.handles() == []
    rig.inner.finish(inner, Status.FAILED)
    assert rig.transport.poll() == [Completion(handle, Status.FAILED, "the peer disconnected")]
    assert rig.transport.moved(handle) == 0
    rig.transport.abandon(handle)
    rig.inner.refuse = PeerGone("it has gone")
    with pytest.raises(PeerGone):
        rig.pull()
    rig.transport.forget(CARD)
    assert rig.inner.forgotten == [CARD]
    rig.transport.close()
    assert rig.inner.closed
    with pytest.raises(TransportError, match="closed"):
        rig.transport.connect(CARD)


def test_a_dropped_read_is_over_with_the_transport_only() -> None:
    rig = Rig(drop=1.0)
    handle = rig.pull()
    rig.transport.abandon(handle)
    rig.now = 1e6
    assert rig.handles() == []
    assert not rig.inner.reads
    assert rig.transport.moved(handle) == 0
    with pytest.raises(TransportError, match="in flight"):
        rig.transport.forget(CARD)
    rig.transport.close()
    assert rig.handles() == []


@pytest.mark.parametrize("abandoned", [False, True])
def test_the_bytes_of_a_delayed_read_land_late(abandoned: bool) -> None:
    rig = Rig(delay=1.0)
    handle = rig.pull()
    if abandoned:
        rig.transport.abandon(handle)
    assert rig.handles() == []
    assert not rig.inner.reads
    with pytest.raises(TransportError, match="in flight"):
        rig.transport.forget(CARD)
    rig.now = DELAY_S
    assert rig.handles() == []
    rig.remote.data[1] = 7  # what is there now, not what was there at the time of the pull
    rig.finish_all()
    assert rig.handles() == [handle]
    assert rig.local.data == {20: 7, 21: 102}
    rig.transport.forget(CARD)


def test_a_delayed_read_whose_peer_has_gone_meanwhile_fails() -> None:
    rig = Rig(delay=1.0)
    handle = rig.pull()
    rig.inner.refuse = PeerGone("it has gone")
    rig.now = DELAY_S
    assert rig.transport.poll() == [Completion(handle, Status.FAILED, "it has gone")]
    assert rig.transport.poll() == []


def test_a_delayed_read_never_lands_after_the_end() -> None:
    rig = Rig(delay=1.0)
    rig.pull()
    rig.transport.close()
    rig.now = DELAY_S
    assert rig.handles() == []
    assert not rig.inner.reads


def test_a_double_read_is_reported_twice_once_both_are_over() -> None:
    rig = Rig(duplicate=1.0)
    handle = rig.pull()
    first, second = rig.inner.reads
    rig.inner.finish(second)
    assert rig.handles() == []
    rig.inner.finish(first, Status.FAILED)
    completions = rig.transport.poll()
    assert [c.handle for c in completions] == [handle, handle]
    assert {c.status for c in completions} == {Status.FAILED}
    assert rig.transport.poll() == []


@pytest.mark.parametrize("part", list(Part))
def test_damage_lies_in_what_was_read(part: Part) -> None:
    rig = Rig(corrupt=1.0)
    for _ in range(40):
        rig.pull(part)
    rig.finish_all()
    assert len(rig.handles()) == 40
    kv, seals = rig.region.spans.changed, rig.region.staging.changed
    assert (len(kv), len(seals)) == ((40, 0) if part is Part.KV else (0, 40))
    assert {block for block, _ in kv + seals} == {20, 21}
    if part is Part.KV:
        assert all(place < Layout.kv_bytes + 32 for _, place in kv)
        assert any(place < Layout.kv_bytes for _, place in kv)
        assert any(place >= Layout.kv_bytes for _, place in kv)  # a trailer


def test_a_failed_read_is_not_damaged() -> None:
    rig = Rig(corrupt=1.0)
    rig.pull()
    (inner,) = rig.inner.reads
    rig.inner.end(inner, Status.FAILED)
    rig.transport.poll()
    assert rig.region.spans.changed == []


def test_a_reordered_read_comes_after_the_next_one() -> None:
    rig = Rig(reorder=1.0)
    late = rig.pull()
    rig.faults.plan = FaultPlan(delay_s=DELAY_S)
    rig.finish_all()
    assert rig.handles() == []
    next_one = rig.pull()
    rig.finish_all()
    assert rig.handles() == [next_one, late]


def test_a_reordered_read_that_is_the_last_comes_by_itself() -> None:
    rig = Rig(reorder=1.0)
    handle = rig.pull()
    rig.finish_all()
    assert rig.handles() == []
    rig.now = DELAY_S
    assert rig.handles() == [handle]


def test_faults_are_counted_and_repeatable() -> None:
    counts = []
    for _ in range(2):
        rig = Rig(**dict.fromkeys(KINDS, 0.15))
        for _ in range(200):
            rig.pull()
        counts.append(dict(rig.faults.counts))
    assert counts[0] == counts[1]
    assert set(counts[0]) == set(KINDS)
    assert sum(counts[0].values()) < 200
