"""Blocks: nobody loses one, nobody gets one twice, and generations never repeat."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.engine.blocks import BlockPool, Hold

NUM_BLOCKS = 9


@dataclass
class Holder:
    """Somebody who holds blocks, each of them once."""

    blocks: list[int]
    hold: Hold = Hold.ACTIVE


class Blocks(RuleBasedStateMachine):
    """Random use of one pool; ``holders`` is what must be true of it."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.holders: list[Holder] = []
        self.handed_out: set[tuple[int, int]] = set()
        self.before = list(self.pool.generations)
        self.named: dict[bytes, int] = {}  # what a name once stood for: block and its generation

    def pick(self, index: int, *holds: Hold) -> Holder | None:
        found = [h for h in self.holders if h.hold in holds]
        return found[index % len(found)] if found else None

    @rule(count=st.integers(0, NUM_BLOCKS))
    def allocate(self, count: int) -> None:
        available = self.pool.num_available
        blocks = self.pool.allocate(count)
        if blocks is None:
            assert count > available
            assert self.pool.num_available == available
            assert self.pool.take_opened() == ()
            return
        assert count <= available
        assert len(set(blocks)) == count
        held = {block for holder in self.holders for block in holder.blocks}
        assert not held & set(blocks), "a held block was handed out"
        opened = self.pool.take_opened()
        assert opened == tuple((b, self.pool.generations[b]) for b in blocks)
        for block, generation in opened:
            assert generation % 2 == 1
            assert (block, generation) not in self.handed_out
            assert generation > self.before[block]
            self.handed_out.add((block, generation))
        self.holders.append(Holder(blocks))

    @precondition(lambda self: self.holders)
    @rule(index=st.integers(0, 99))
    def release(self, index: int) -> None:
        holder = self.holders.pop(index % len(self.holders))
        self.pool.release(holder.blocks, holder.hold)

    @rule(index=st.integers(0, 99), into=st.sampled_from([Hold.LEASED, Hold.QUARANTINED]))
    def move(self, index: int, into: Hold) -> None:
        holder = self.pick(index, Hold.ACTIVE)
        if holder is not None:
            self.pool.move(holder.blocks, Hold.ACTIVE, into)
            holder.hold = into

    @rule(index=st.integers(0, 99), which=st.integers(0, 99), name=st.integers(0, 5))
    def seal_and_name(self, index: int, which: int, name: int) -> None:
        holder = self.pick(index, Hold.ACTIVE)
        if holder is None or not holder.blocks:
            return
        block = holder.blocks[which % len(holder.blocks)]
        was_open = self.pool.generations[block] % 2 == 1
        generation = self.pool.seal(block)
        assert generation % 2 == 0
        assert generation == self.pool.generations[block] == self.pool.seal(block)
        if was_open:
            text = b"name %d" % name
            taken = bool(self.pool.match([text]))
            self.pool.name(block, text)
            found = self.pool.match([text])
            assert len(found) == 1
            assert (found == [block]) or taken
            if not taken:
                self.named[text] = (block, generation)

    @rule(names=st.lists(st.integers(0, 5), max_size=4))
    def share(self, names: list[int]) -> None:
        texts = [b"name %d" % name for name in names]
        hit = list(dict.fromkeys(self.pool.match(texts)))
        for text, block in zip(texts, self.pool.match(texts), strict=False):
            assert self.named[text] == (block, self.pool.generations[block]), "reused, still named"
        self.pool.share(hit)
        self.holders.append(Holder(hit))

    @invariant()
    def nothing_is_lost(self) -> None:
        self.pool.check_integrity()
        of = {hold: [b for h in self.holders if h.hold is hold for b in h.blocks] for hold in Hold}
        active, leased, quarantined = (set(of[hold]) for hold in Hold)
        counts = self.pool.counts()
        assert counts["active"] == len(active - quarantined)
        assert counts["leased"] == len(leased - active - quarantined)
        assert counts["quarantined"] == len(quarantined)
        held = active | leased | quarantined
        assert self.pool.num_available == self.pool.num_usable - len(held)

    @invariant()
    def generations_only_grow(self) -> None:
        now = self.pool.generations
        assert all(new >= old for new, old in zip(now, self.before, strict=True))
        self.before = list(now)

    def teardown(self) -> None:
        for holder in self.holders:
            self.pool.release(holder.blocks, holder.hold)
        self.pool.check_integrity()
        assert self.pool.num_available == self.pool.num_usable
        blocks = self.pool.allocate(self.pool.num_usable)
        assert blocks is not None
        assert sorted(blocks) == list(range(1, NUM_BLOCKS))


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def filled(pool: BlockPool, *names: bytes) -> list[int]:
    """Blocks that are sealed, named and given back."""
    blocks = pool.allocate(len(names))
    assert blocks is not None
    for block, name in zip(blocks, names, strict=True):
        pool.seal(block)
        pool.name(block, name)
    pool.release(blocks)
    return blocks


def test_a_pool_needs_a_block_beside_the_padding_block() -> None:
    with pytest.raises(ValueError, match="at least 2 blocks"):
        BlockPool(1)


def test_a_block_that_was_never_sealed_gets_a_new_odd_generation() -> None:
    pool = BlockPool(2)
    assert pool.allocate(1) == [1]
    assert pool.generations[1] == 1
    pool.release([1])
    assert pool.allocate(1) == [1]
    assert pool.generations[1] == 3


def test_the_tail_of_a_chain_is_evicted_before_its_head() -> None:
    pool = BlockPool(5)
    head, middle, _tail = filled(pool, b"a", b"b", b"c")
    assert pool.allocate(2) is not None  # one that is free, one that is cached
    assert pool.match([b"a", b"b", b"c"]) == [head, middle]


def test_the_longest_unused_chain_is_evicted_first() -> None:
    pool = BlockPool(3)
    filled(pool, b"a")
    (recent,) = filled(pool, b"b")
    old = pool.match([b"a"])
    pool.share(old)
    pool.release(old)  # used again: now the other one is the oldest
    pool.allocate(1)
    assert pool.match([b"b"]) == []
    assert pool.match([b"a"]) == old
    assert recent not in old


def test_a_match_ends_at_the_first_name_that_is_not_there() -> None:
    pool = BlockPool(4)
    blocks = filled(pool, b"a", b"c")
    assert pool.match([b"a", b"b", b"c"]) == blocks[:1]


def test_a_shared_block_is_not_evicted() -> None:
    pool = BlockPool(3)
    (block,) = filled(pool, b"a")
    pool.share([block])
    assert pool.allocate(2) is None
    assert pool.allocate(1) is not None
    assert pool.match([b"a"]) == [block]


def test_a_leased_block_can_be_shared_and_outlives_its_lease() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.seal(blocks[0])
    pool.name(blocks[0], b"a")
    pool.move(blocks, Hold.ACTIVE, Hold.LEASED)
    pool.share(pool.match([b"a"]))
    assert pool.counts()["active"] == 1
    pool.release(blocks, Hold.LEASED)
    assert pool.num_available == 1
    pool.release(blocks)
    assert pool.counts() == {"free": 1, "active": 0, "cached": 1, "leased": 0, "quarantined": 0}


def test_without_prefix_cache_nothing_matches() -> None:
    pool = BlockPool(3, prefix_cache=False)
    filled(pool, b"a")
    assert pool.match([b"a"]) == []
    assert pool.counts()["free"] == 2


def test_giving_back_what_one_does_not_hold_is_found() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(AssertionError, match="is not active"):
        pool.release(blocks)
    with pytest.raises(AssertionError, match="is not leased"):
        pool.release(blocks, Hold.LEASED)
