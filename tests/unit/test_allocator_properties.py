"""Blocks and what lies in them: however holds are taken, turned, split and given up, nobody's
content changes, and a name leads only to the content that it stands for.

``test_blocks`` counts blocks; this follows their contents, as writers, readers, leases and late
bytes see them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.engine.blocks import BlockPool, Hold

GARBAGE = -1
INDEX = st.integers(0, 99)
VALUES = st.integers(0, 3)  # few, so that blocks with equal content compete for a name
UNHELD = {"free", "cached"}


@dataclass
class Holder:
    """Somebody who counts on the contents of blocks, each of them once."""

    blocks: list[int]
    hold: Hold = Hold.ACTIVE


class Allocator(RuleBasedStateMachine):
    """All operations in all orders, on pools of a few blocks."""

    @initialize(num_blocks=st.integers(2, 9), prefix_cache=st.booleans())
    def start(self, num_blocks: int, prefix_cache: bool) -> None:
        self.pool = BlockPool(num_blocks, prefix_cache)
        self.holders: list[Holder] = []
        self.content: dict[int, int] = {}  # what lies in a block now
        self.promised: dict[int, int] = {}  # what lies in a sealed block until it is handed out
        self.before = list(self.pool.generations)
        self.spoiled: set[int] = set()

    def pick(self, index: int, *holds: Hold) -> Holder | None:
        found = [h for h in self.holders if h.hold in holds and h.blocks]
        return found[index % len(found)] if found else None

    def is_open(self, block: int) -> bool:
        return self.pool.generations[block] % 2 == 1

    def held(self) -> list[int]:
        return [block for holder in self.holders for block in holder.blocks]

    # --- operations ---

    @rule(count=st.integers(0, 5))
    def allocate(self, count: int) -> None:
        generations, before = list(self.pool.generations), self.pool.counts()
        blocks = self.pool.allocate(count)
        opened = self.pool.take_opened()
        if blocks is None:
            assert count > before["free"] + before["cached"]
            assert self.pool.counts() == before
            assert opened == ()
            return
        assert not set(blocks) & set(self.held()), "a block is in two hands"
        assert 0 not in blocks, "the padding block was handed out"
        assert opened == tuple((block, self.pool.generations[block]) for block in blocks)
        assert set(self.pool.take_spoiled()) == self.spoiled.intersection(blocks)
        assert self.pool.take_spoiled() == []
        self.spoiled.difference_update(blocks)
        for block in blocks:
            grown = self.pool.generations[block] - generations[block]
            assert grown == (2 if generations[block] % 2 else 1)
            assert self.is_open(block)
            self.promised.pop(block, None)
            self.content[block] = GARBAGE
        self.holders.append(Holder(blocks))

    @rule(index=INDEX, which=INDEX, value=VALUES)
    def write_and_seal(self, index: int, which: int, value: int) -> None:
        """The last write to an open block has retired."""
        holder = self.pick(index, Hold.ACTIVE)
        if holder is None:
            return
        block = holder.blocks[which % len(holder.blocks)]
        if not self.is_open(block):
            return
        assert self.held().count(block) == 1, "two holders of a block that is being written"
        self.content[block] = self.promised[block] = value
        assert self.pool.seal(block) % 2 == 0

    @rule(index=INDEX, which=INDEX)
    def enter_into_cache(self, index: int, which: int) -> None:
        holder = self.pick(index, Hold.ACTIVE, Hold.LEASED)
        if holder is not None:
            block = holder.blocks[which % len(holder.blocks)]
            if not self.is_open(block) and block not in self.named().values():
                self.pool.name(block, name(self.content[block]))

    @rule(values=st.lists(VALUES, max_size=3, unique=True))
    def share(self, values: list[int]) -> None:
        found = self.pool.match(map(name, values))
        assert len(found) <= len(values)
        for value, block in zip(values, found, strict=False):
            assert self.content[block] == value, "the name leads to another content"
        self.pool.share(found)
        self.holders.append(Holder(found))

    @rule(index=INDEX, into=st.sampled_from([Hold.LEASED, Hold.QUARANTINED]))
    def move(self, index: int, into: Hold) -> None:
        """An export of sealed blocks, or a pull that was given up into open ones."""
        holder = self.pick(index, Hold.ACTIVE)
        if holder is None:
            return
        fits = [b for b in holder.blocks if self.is_open(b) == (into is Hold.QUARANTINED)]
        self.split_off(holder, fits)
        self.pool.move(fits, Hold.ACTIVE, into)
        self.holders[-1].hold = into

    @rule(index=INDEX, at=st.integers(1, 4))
    def split(self, index: int, at: int) -> None:
        """A holder gives up a part of its blocks later than the rest."""
        holder = self.pick(index, *Hold)
        if holder is not None:
            self.split_off(holder, holder.blocks[at:])

    @rule(index=INDEX)
    def release(self, index: int) -> None:
        if self.holders:
            holder = self.holders.pop(index % len(self.holders))
            self.pool.release(holder.blocks, holder.hold)

    @rule(index=INDEX)
    def discard(self, index: int) -> None:
        if self.holders:
            holder = self.holders.pop(index % len(self.holders))
            self.pool.discard(holder.blocks, holder.hold)
            self.spoiled.update(holder.blocks)

    @rule(value=VALUES)
    def late_bytes(self, value: int) -> None:
        """What a pull that was given up may do to its blocks, until they are released."""
        for holder in self.holders:
            if holder.hold is Hold.QUARANTINED:
                for block in holder.blocks:
                    self.content[block] = value

    def split_off(self, holder: Holder, blocks: list[int]) -> None:
        holder.blocks = [block for block in holder.blocks if block not in blocks]
        self.holders.append(Holder(blocks, holder.hold))

    def named(self) -> dict[int, int]:
        """Block by value, of all values that the cache knows."""
        found = {value: self.pool.match([name(value)]) for value in range(4)}
        return {value: blocks[0] for value, blocks in found.items() if blocks}

    # --- what holds after each of them ---

    @invariant()
    def contents_stay(self) -> None:
        for block, value in self.promised.items():
            assert self.content[block] == value, "a sealed block was written"
            assert not self.is_open(block)

    @invariant()
    def names_are_one_to_one(self) -> None:
        named = self.named()
        assert len(set(named.values())) == len(named), "a block has two names"
        for value, block in named.items():
            assert self.promised.get(block) == value, "a name of a block that was given away"
        assert not named or self.pool.prefix_cache
        assert not self.spoiled & set(named.values()), "what was discarded is found by a name"

    @invariant()
    def nothing_is_lost_or_in_two_places(self) -> None:
        self.pool.check_integrity()
        counts = self.pool.counts()
        assert sum(counts.values()) == self.pool.num_usable == self.pool.num_blocks - 1
        held = set(self.held())
        assert self.pool.num_available == self.pool.num_usable - len(held)
        for hold in Hold:
            mine = [b for h in self.holders if h.hold is hold for b in h.blocks]
            assert self.pool.held(hold) == Counter(mine)

    @invariant()
    def generations_only_grow(self) -> None:
        now = self.pool.generations
        assert all(new >= old for new, old in zip(now, self.before, strict=True))
        assert now[0] == 0
        self.before = list(now)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        while self.holders:
            self.release(0)
            self.nothing_is_lost_or_in_two_places()
        assert {state for state, count in self.pool.counts().items() if count} <= UNHELD
        assert self.pool.allocate(self.pool.num_usable) is not None


def name(value: int) -> bytes:
    """The name of a content, as a hash of it would be."""
    return b"content %d" % value


TestAllocator = Allocator.TestCase
TestAllocator.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
