"""Pulls under every interleaving, over a transport that is slow, late, double, lying or silent.

A read lands move by move, as long as it is not over, while the producer reuses its blocks and the
consumer gives pulls up. Whatever comes: one outcome per start, one Settled per unsettled outcome,
no byte in a block that was told to be free, and in verified blocks what the ticket says.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtransfer.errors import PeerGone, TransportError
from kvtransfer.importer import Arrived, Event, Importer, PullFailed, Settled
from kvtransfer.ticket import AgentCard
from kvtransfer.transport import Completion, Part, Status, Transport
from tests.support.scripted_transport import CARD, PlainMemory, ScriptedTransport, make_ticket

REMOTE_BLOCKS = 2
LOCAL_BLOCKS = 5
PULL_S = 8.0
STALL_S = 5.0
SETTLE_S = 60.0
QUIET_S = 1.0  # the importer's own
KEYS = [bytes([n]) for n in range(3)]


class LandingTransport(ScriptedTransport):
    """Knows for which start a read was posted, and checks each byte that lands against it."""

    def __init__(self, machine: Pulls) -> None:
        super().__init__(machine.remote, machine.local, self.check)
        self.machine = machine
        self.starts: dict[int, int] = {}
        self.cut: list[int] = []  # starts whose reads were in flight at the end

    def pull(self, peer: AgentCard, part: Part, blocks: Sequence[tuple[int, int]]) -> int:
        handle = super().pull(peer, part, blocks)
        (start,) = {self.machine.holders[local] for _, local in blocks}
        self.starts[handle] = start
        self.machine.quiet_since = None
        return handle

    def close(self) -> None:
        self.cut = [self.starts[handle] for handle in self.reads]
        super().close()

    def check(self, handle: int, block: int) -> None:
        assert not self.closed
        assert self.machine.holders.get(block) == self.starts[handle], "landed in a free block"


class Pulls(RuleBasedStateMachine):
    """A producer that reuses blocks, a consumer with a small pool, and the wire between them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.remote, self.local = PlainMemory(REMOTE_BLOCKS), PlainMemory(LOCAL_BLOCKS)
        self.transport = LandingTransport(self)
        self.importer = Importer(
            self.local, self.transport, stall_s=STALL_S, build=self.build, settle_s=SETTLE_S
        )
        self.serial = count(1)  # of everything that must not be mistaken for another
        self.generations = dict.fromkeys(range(REMOTE_BLOCKS), 0)
        self.written: dict[tuple[int, int], int] = {}  # (block, generation) → data
        self.holders: dict[int, int] = {}  # local block → the start that may still write it
        self.starts: dict[bytes, int] = {}  # key → its start, until the key is free again
        self.expected: dict[int, dict[int, int]] = {}  # start → local block → data; outcome open
        self.deadlines: dict[bytes, float] = {}
        self.told: dict[bytes, tuple[float, tuple[int, ...]]] = {}  # unsettled: when, which blocks
        self.quiet_since: float | None = None  # first poll after the last move of any read
        self.watched: dict[bytes, float | None] = {}  # first poll after the last sign of progress

    @initialize()
    def fill(self) -> None:
        for block in range(REMOTE_BLOCKS):
            self.seal(block)

    def build(self, number: int) -> Transport:
        assert self.transport.closed
        wanted = {self.starts[key] for key in self.importer._live}
        assert not wanted & set(self.transport.cut), "pulls that somebody waits for were cut"
        assert number == self.importer.rebuild_count + 1
        self.transport = LandingTransport(self)
        self.watched = dict.fromkeys(self.watched)  # those that waited begin
        self.quiet_since = None
        return self.transport

    # --- the producer ---

    @rule(block=st.integers(0, REMOTE_BLOCKS - 1), writes=st.sampled_from([True, True, False]))
    def hand_out(self, block: int, writes: bool) -> None:
        """Odd before the first write."""
        self.generations[block] += 1 + self.generations[block] % 2
        self.remote.open(block, self.generations[block])
        if writes:
            self.remote.data[block] = next(self.serial)

    @rule(block=st.integers(0, REMOTE_BLOCKS - 1))
    def seal(self, block: int) -> None:
        """Even after the last one."""
        generation = self.generations[block] = self.generations[block] // 2 * 2 + 2
        value = self.written[block, generation] = next(self.serial)
        self.remote.write(block, generation, value)

    # --- the consumer ---

    @rule(
        key=st.sampled_from(KEYS),
        num_blocks=st.sampled_from([1, 1, 1, 1, 1, 2, 2, 0]),
        refuse=st.sampled_from([False] * 7 + [True]),
        data=st.data(),
    )
    def start(self, key: bytes, num_blocks: int, refuse: bool, data: st.DataObject) -> None:
        """A ticket of the latest sealed blocks, or of older ones; into any free blocks."""
        free = [block for block in range(LOCAL_BLOCKS) if block not in self.holders]
        if key in self.starts or len(free) < num_blocks:
            return
        latest = [max(pair for pair in self.written if pair[0] == b) for b in range(REMOTE_BLOCKS)]
        older = sorted(self.written)
        choice = st.sampled_from(latest) | st.sampled_from(latest) | st.sampled_from(older)
        sources = data.draw(st.lists(choice, min_size=num_blocks, max_size=2))
        targets = data.draw(st.permutations(free))[:num_blocks]
        pairs = list(enumerate(targets))
        serial = next(self.serial)
        for local in targets:
            self.holders[local] = serial
            self.local.data[local] = -serial  # nobody's text
        self.starts[key] = serial
        self.expected[serial] = {local: self.written[sources[i]] for i, local in pairs}
        self.deadlines[key] = self.now + PULL_S
        self.watched[key] = None
        ticket = make_ticket(sources, first_block=data.draw(st.integers(0, 2)))
        self.transport.refuse = TransportError("refused") if refuse else None
        self.importer.start(key, ticket, CARD, pairs, self.deadlines[key])
        self.transport.refuse = None

    @rule(key=st.sampled_from(KEYS))
    def abort(self, key: bytes) -> None:
        """Of any pull: open, decided, or never started."""
        self.importer.abort(key)

    @rule(seconds=st.sampled_from([0.5] * 8 + [STALL_S, SETTLE_S]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.poll()

    # --- the wire ---

    def draw_read(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.transport.reads)))

    def touch(self, handle: int) -> None:
        """Something of this read has come: its pull makes progress."""
        self.quiet_since = None
        for key, start in self.starts.items():
            if start == self.transport.starts[handle] and key in self.watched:
                self.watched[key] = None

    @precondition(lambda self: any(read.missing for read in self.transport.reads.values()))
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        reads = self.transport.reads
        handle = data.draw(st.sampled_from(sorted(h for h, read in reads.items() if read.missing)))
        self.transport.land(handle, data.draw(st.integers(0, len(reads[handle].missing) - 1)))
        self.touch(handle)

    @precondition(lambda self: self.transport.reads)
    @rule(data=st.data(), then=st.sampled_from(["poll"] * 4 + ["nothing", "refuse"]))
    def finish(self, data: st.DataObject, then: str) -> None:
        """The rest lands; the next read may be refused."""
        handle = self.draw_read(data)
        self.touch(handle)
        self.transport.finish(handle)
        if then != "nothing":
            self.transport.refuse = PeerGone("it has gone") if then == "refuse" else None
            self.poll()
            self.transport.refuse = None

    @precondition(lambda self: self.transport.reads)
    @rule(data=st.data(), lie=st.booleans())
    def go_wrong(self, data: st.DataObject, lie: bool) -> None:
        """It fails with what has landed; or it says DONE, and of some blocks nothing has come."""
        handle = self.draw_read(data)
        read = self.transport.reads[handle]
        self.touch(handle)
        if not lie:
            self.transport.end(handle, Status.FAILED)
            return
        moves = 2 if read.part is Part.KV else 1  # of a block
        missing = [ours for *_, ours in read.missing]
        never = {block for block in missing if missing.count(block) == moves}
        self.transport.finish(handle, never=frozenset(never))

    @precondition(lambda self: self.transport.completions)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        self.transport.completions.append(
            data.draw(st.sampled_from(list(self.transport.completions)))
        )

    @rule(data=st.data())
    def stray(self, data: st.DataObject) -> None:
        """A completion of a read that was never posted, or was reported long ago."""
        known = self.transport.reads.keys() | {c.handle for c in self.transport.completions}
        handle = data.draw(st.sampled_from([*sorted(self.transport.starts.keys() - known), 10**6]))
        self.transport.completions.append(Completion(handle, Status.DONE))

    @precondition(lambda self: len(self.transport.completions) > 1)
    @rule()
    def reorder(self) -> None:
        self.transport.completions.reverse()

    # --- what must be true ---

    @rule()
    def poll(self) -> None:
        for event in self.importer.poll(self.now):
            self.on_event(event)
        if self.quiet_since is None:
            self.quiet_since = self.now
        elif self.now - self.quiet_since >= QUIET_S and not self.importer.num_in_flight:
            for key, (when, _) in self.told.items():
                assert self.now - when < SETTLE_S, f"{key!r} is still not settled"
        for key, first in self.watched.items():
            assert self.now < self.deadlines[key]
            assert first is None or self.now - first < STALL_S
            self.watched[key] = self.now if first is None else first

    def on_event(self, event: Event) -> None:
        start = self.starts[event.key]  # KeyError: nobody waits for an event of this key
        if isinstance(event, Settled):
            _, blocks = self.told.pop(event.key)
            assert blocks == event.blocks
            self.free(event.key)
            return
        expected = self.expected.pop(start)  # KeyError: a second outcome
        del self.watched[event.key]
        assert set(event.blocks) == set(expected)
        if isinstance(event, Arrived):
            assert {block: self.local.data[block] for block in event.blocks} == expected
            self.free(event.key)
        elif event.settled:
            assert isinstance(event, PullFailed)
            self.free(event.key)
        else:
            self.told[event.key] = (self.now, event.blocks)

    def free(self, key: bytes) -> None:
        start = self.starts.pop(key)
        self.holders = {block: held for block, held in self.holders.items() if held != start}

    @invariant()
    def integrity(self) -> None:
        self.importer.check_integrity()
        assert self.transport.abandoned == list(dict.fromkeys(self.transport.abandoned))

    def teardown(self) -> None:
        """Nothing answers any more: clocks alone bring every block back."""
        for seconds in (0.0, PULL_S, SETTLE_S, QUIET_S):
            self.now += seconds
            self.poll()
        assert not self.expected
        assert not self.told
        assert not self.holders
        assert self.importer.num_in_flight == self.importer.num_unsettled == 0


TestPulls = Pulls.TestCase
TestPulls.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
