"""A runner without a model: it simulates KV slot by slot, and distrusts every plan.

What a slot holds is a state that depends on all tokens up to its position, as real KV does. The
next token is a function of the last state. So a prefix hit, a preemption or an adoption that leaves
one wrong slot is found at the first row that would attend to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.engine.engine import Engine
from services.engine.scheduler import Output, Plan, Row
from services.engine.sequence import Key, SamplingParams

VOCAB = 7
_MASK = (1 << 61) - 1

Slot = tuple[int, int]  # position, state


def states(ids: Sequence[int]) -> list[int]:
    """The state after each token: a chain over all tokens before it."""
    state, chain = 1, []
    for token in ids:
        state = (state * 6364136223846793005 + token * 2 + 1) & _MASK
        chain.append(state)
    return chain


def next_token(state: int) -> int:
    """The token that follows a sequence in this state."""
    return (state >> 20) % VOCAB


def naive(ids: Sequence[int], num_prompt: int, params: SamplingParams, max_len: int) -> list[int]:
    """The tokens after ``ids``, one by one, with nothing cached."""
    ids, start = list(ids), len(ids)
    while True:
        ids.append(next_token(states(ids)[-1]))
        generated = len(ids) - num_prompt
        stopped = ids[-1] in params.stop_ids and generated >= params.min_tokens
        if stopped or generated >= params.max_tokens or len(ids) >= max_len:
            return ids[start:]


class FakeRunner:
    """Asserts that each row's blocks are its own to write, and hold what it attends to."""

    def __init__(
        self,
        block_size: int,
        token_budget: int = 1 << 30,
        max_rows: int = 1 << 30,
        chunk_budget: int = 0,
    ) -> None:
        self.block_size = block_size
        self.token_budget = token_budget
        self.chunk_budget = chunk_budget or token_budget
        self.max_rows = max_rows
        self.kv: dict[int, dict[int, Slot]] = {}
        self.generations: dict[int, int] = {}  # as published
        self.plans: list[Plan] = []
        self.zeroed: list[int] = []
        self.pause: Callable[[], None] = lambda: None

    def run(self, plan: Plan) -> list[int]:
        """Compute the plan's states; one token per row, -1 where it does not sample."""
        self.plans.append(plan)
        self.publish(plan.opened, [])
        self.zero(plan.spoiled)
        self._check(plan)
        self.pause()
        return [self._compute(row) for row in plan.rows]

    def publish(self, opened: tuple[tuple[int, int], ...], sealed: list[tuple[int, int]]) -> None:
        """Note generations; a block that is handed out anew holds nothing of use."""
        for block, generation in opened:
            assert generation % 2 == 1
            assert generation > self.generations.get(block, 0)
            self.generations[block] = generation
            self.kv[block] = {}
        for block, generation in sealed:
            assert generation == self.generations[block] + 1, "sealed twice, or never opened"
            self.generations[block] = generation

    def zero(self, blocks: list[int]) -> None:
        """A write as well: only to blocks that were handed out anew, which peers can see."""
        for block in blocks:
            assert self.generations[block] % 2, "zeroed before its generation was published"
            self.kv[block] = {}
        self.zeroed += blocks

    def write(self, block: int, index: int, ids: Sequence[int]) -> None:
        """What a pull does: fill a sequence's block ``index`` with the KV of ``ids``."""
        first = index * self.block_size
        chain = states(ids)[first : first + self.block_size]
        self.kv[block] = {slot: (first + slot, state) for slot, state in enumerate(chain)}

    def scribble(self, block: int) -> None:
        """What a late pull does to a block that was given up."""
        self.kv[block] = dict.fromkeys(range(self.block_size), (-1, -1))

    def _check(self, plan: Plan) -> None:
        assert plan.rows, "an empty plan was run"
        assert len(plan.rows) <= self.max_rows
        assert len({row.key for row in plan.rows}) == len(plan.rows), "two rows of one sequence"
        assert sum(len(row.ids) for row in plan.rows) <= self.token_budget
        assert sum(len(row.ids) for row in plan.rows if len(row.ids) > 1) <= self.chunk_budget
        written: set[int] = set()
        for row in plan.rows:
            assert row.ids
            assert len(row.blocks) == -(-row.end // self.block_size), "blocks do not fit the row"
            assert len(set(row.blocks)) == len(row.blocks)
            assert 0 not in row.blocks, "the padding block was handed out"
            own = set(row.blocks[row.start // self.block_size :])
            assert not own & written, "a block is written by two rows"
            assert all(self.generations[block] % 2 for block in own), "a sealed block is written"
            written |= own
        for row in plan.rows:
            done = row.blocks[: row.start // self.block_size]
            assert not written & set(done), "a block is read as full while it is written"

    def _compute(self, row: Row) -> int:
        state = 1
        for position in range(row.end):
            slots = self.kv[row.blocks[position // self.block_size]]
            slot = position % self.block_size
            if position >= row.start:
                token = row.ids[position - row.start]
                state = (state * 6364136223846793005 + token * 2 + 1) & _MASK
                slots[slot] = (position, state)
            else:
                assert slot in slots, f"position {position} of {row.key} was never written"
                found, state = slots[slot]
                assert found == position, f"position {position} holds the KV of {found}"
        return next_token(state) if row.sample else -1


def check_states(engine: Engine, runner: FakeRunner) -> None:
    """Assert that the KV which each sequence counts as computed is that of its own tokens."""
    scheduler = engine.scheduler
    for seq in [*scheduler.running, *scheduler.waiting]:
        for position, state in enumerate(states(seq.ids[: seq.num_computed])):
            block = seq.blocks[position // runner.block_size]
            assert runner.kv[block][position % runner.block_size] == (position, state)


def run_until_idle(engine: Engine, limit: int = 2000) -> dict[Key, list[Output]]:
    """Step until there is no work; the outputs by sequence. Fails when it takes too long."""
    outputs: dict[Key, list[Output]] = {}
    for _ in range(limit):
        if not engine.has_work:
            return outputs
        for output in engine.step(1.0):
            outputs.setdefault(output.key, []).append(output)
        engine.check_integrity()
    raise AssertionError("the engine does not come to an end: somebody starves")
