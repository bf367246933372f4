"""Allocation of KV blocks: generations, sharing, prefix cache (pure: numbers and names, never
requests).

A block's state follows from who holds it::

    free ──allocate──► active ──release──► cached (it has a name) or free
                         │  ▲
                         │  └──share─── cached
                         ├──move──► leased       (exported: a peer may read it)
                         └──move──► quarantined  (a peer's bytes may still arrive in it)

Generations: odd from the moment a block is handed out, before any write to it; even once its last
write has retired (:meth:`BlockPool.seal`). The allocator alone sets them, so a ticket that carries
an even value can be told from every later use of the same block.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from enum import Enum

PADDING_BLOCK = 0


class Hold(Enum):
    """Why a block is not free."""

    ACTIVE = "active"
    LEASED = "leased"
    QUARANTINED = "quarantined"


class BlockPool:
    """``num_blocks`` blocks, of which block 0 is reserved for padding writes."""

    def __init__(self, num_blocks: int, prefix_cache: bool = True) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs at least 2 blocks (one is reserved), got {num_blocks}")
        self.num_blocks = num_blocks
        self.prefix_cache = prefix_cache
        self.generations = [0] * num_blocks
        self._refs: dict[Hold, dict[int, int]] = {hold: {} for hold in Hold}
        self._free = deque(range(1, num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()  # unheld but named, oldest first
        self._names: dict[int, bytes] = {}
        self._by_name: dict[bytes, int] = {}
        self._opened: list[tuple[int, int]] = []
        self._spoiled: set[int] = set()
        self._to_zero: list[int] = []

    @property
    def num_usable(self) -> int:
        """Blocks that sequences can ever have."""
        return self.num_blocks - 1

    @property
    def num_available(self) -> int:
        """Blocks that :meth:`allocate` can hand out now: free, or cached and held by nobody."""
        return len(self._free) + len(self._cached)

    def counts(self) -> dict[str, int]:
        """Blocks by state; they add up to ``num_usable``."""
        active, leased, quarantined = (self._refs[hold].keys() for hold in Hold)
        return {
            "free": len(self._free),
            "active": len(active - quarantined),
            "cached": len(self._cached),
            "leased": len(leased - active - quarantined),
            "quarantined": len(quarantined),
        }

    def allocate(self, count: int) -> list[int] | None:
        """``count`` blocks with new odd generations, or None. Evicts the longest unused cached
        blocks as needed.
        """
        if count > self.num_available:
            return None
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.popleft()
            else:
                block, _none = self._cached.popitem(last=False)
                self._forget_name(block)
            generation = self.generations[block]
            self.generations[block] = generation + 1 if generation % 2 == 0 else generation + 2
            self._opened.append((block, self.generations[block]))
            self._refs[Hold.ACTIVE][block] = 1
            if block in self._spoiled:
                self._spoiled.remove(block)
                self._to_zero.append(block)
            blocks.append(block)
        return blocks

    def take_opened(self) -> tuple[tuple[int, int], ...]:
        """``(block, odd generation)`` handed out since the last call; to be published before
        anything is written.
        """
        opened = tuple(self._opened)
        self._opened.clear()
        return opened

    def match(self, names: Iterable[bytes]) -> list[int]:
        """Blocks of the longest cached prefix of ``names``; they are not held yet (see
        :meth:`share`).
        """
        blocks: list[int] = []
        for name in names:
            block = self._by_name.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Hold already filled blocks once more."""
        refs = self._refs[Hold.ACTIVE]
        for block in blocks:
            refs[block] = refs.get(block, 0) + 1
            self._cached.pop(block, None)

    def move(self, blocks: Sequence[int], source: Hold, target: Hold) -> None:
        """Turn one hold of each block into another kind."""
        for block in blocks:
            self._refs[target][block] = self._refs[target].get(block, 0) + 1
            self._unref(block, source)

    def release(self, blocks: Sequence[int], hold: Hold = Hold.ACTIVE) -> None:
        """Give up one hold of each block. Unheld blocks are cached if named, else free."""
        for block in reversed(blocks):  # a chain's tail is evicted before its head
            self._unref(block, hold)
            if not any(block in refs for refs in self._refs.values()):
                if block in self._names:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def discard(self, blocks: Sequence[int], hold: Hold = Hold.ACTIVE) -> None:
        """:meth:`release` blocks in which there may be anything, also what is not a number. Nobody
        finds them by a name any more, and who gets one next has to zero it.
        """
        for block in blocks:
            self._spoiled.add(block)
            if block in self._names:
                self._forget_name(block)
        self.release(blocks, hold)

    def take_spoiled(self) -> list[int]:
        """Discarded blocks that were handed out since the last call; to be zeroed before anything
        is written.
        """
        blocks, self._to_zero = self._to_zero, []
        return blocks

    def seal(self, block: int) -> int:
        """The last write has retired: make the generation even (idempotent), and return it."""
        self.generations[block] += self.generations[block] % 2
        return self.generations[block]

    def name(self, block: int, name: bytes) -> None:
        """Enter a sealed block into the prefix cache, unless another one has that name or this one
        was discarded.
        """
        assert self.generations[block] % 2 == 0, "an open block is not cached"
        if self.prefix_cache and name not in self._by_name and block not in self._spoiled:
            self._by_name[name] = block
            self._names[block] = name

    def held(self, hold: Hold) -> dict[int, int]:
        """How often each block is held in this way."""
        return dict(self._refs[hold])

    def check_integrity(self) -> None:
        """Assert that each block is in one place and that names and blocks are one to one."""
        held = set().union(*(refs.keys() for refs in self._refs.values()))
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        placed = len(held) + len(free) + len(cached)
        assert placed == len(held | free | cached), "a block is in two places"
        assert held | free | cached == set(range(1, self.num_blocks)), "a block is lost"
        assert all(count > 0 for refs in self._refs.values() for count in refs.values())
        assert {name: block for block, name in self._names.items()} == self._by_name
        assert cached <= self._names.keys() <= held | cached
        assert all(self.generations[block] % 2 == 0 for block in self._names)
        assert sum(self.counts().values()) == self.num_usable

    def _unref(self, block: int, hold: Hold) -> None:
        refs = self._refs[hold]
        assert refs.get(block, 0) > 0, f"block {block} is not {hold.value}"
        refs[block] -= 1
        if not refs[block]:
            del refs[block]

    def _forget_name(self, block: int) -> None:
        del self._by_name[self._names.pop(block)]
