"""Paged attention for CPUs against plain torch, and its promise: a query's result depends, to the
last bit, on its sequence alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch import Tensor

from kvtransfer.layout import KVLayout
from kvtransfer.region import Region
from services.engine.attention import attend, batch_order, plan_attention, write_kv
from services.engine.kernels import use_threads
from services.engine.paged_attention import PagedAttention
from services.engine.scheduler import Row
from services.engine.sequence import SamplingParams

CPU = torch.device("cpu")
LAYERS, LAYER = 2, 1
NAN = float("nan")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    use_threads(2)
    yield
    use_threads(2)


@dataclass(frozen=True)
class Shape:
    """What a step of some rows looks like: (start, count) of each."""

    rows: list[tuple[int, int]]
    share: int = 3
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    window: int = 0

    @property
    def kernels(self) -> PagedAttention:
        return PagedAttention(self.share * self.num_kv_heads, self.num_kv_heads, self.head_dim)


@dataclass
class Step:
    """A step of random numbers: its rows in scattered blocks, its KV, its queries."""

    shape: Shape
    seed: int
    kv: Tensor = field(init=False)  # what the rows have; zeros elsewhere
    rows: list[Row] = field(init=False)
    queries: Tensor = field(init=False)
    new_kv: Tensor = field(init=False)
    known: Tensor = field(init=False)  # which slots hold KV, before the step

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        chance = random.Random(self.seed)
        shape, size = self.shape, self.shape.block_size
        lengths = [start + count for start, count in shape.rows]
        num_blocks = sum(-(-length // size) for length in lengths) + 3
        free = list(range(num_blocks))
        chance.shuffle(free)
        rows = []
        self.known = torch.zeros(num_blocks, size, dtype=torch.bool)
        for name, (start, count) in enumerate(shape.rows):
            own = [free.pop() for _ in range(-(-(start + count) // size))]
            for position in range(start):
                self.known[own[position // size], position % size] = True
            params = SamplingParams(1)
            ids = tuple(range(count))
            rows.append(Row((b"%d" % name, 0), ids, start, tuple(own), True, params, 1))
        self.rows = [rows[i] for i in batch_order(rows)]
        num_tokens, dim = sum(count for _, count in shape.rows), shape.head_dim
        self.queries = torch.randn(num_tokens, shape.share * shape.num_kv_heads, dim) * 2
        self.new_kv = torch.randn(num_tokens, 2, shape.num_kv_heads, dim) * 2
        self.kv = self.pool()
        self.kv.copy_(torch.randn(self.kv.shape) * self.known[:, None, None, None, :, None])

    def pool(self) -> Tensor:
        """Memory as workers have it: spans with trailers between the blocks."""
        s = self.shape
        layout = KVLayout("", LAYERS, s.num_kv_heads, s.head_dim, "", s.block_size, dtype="float32")
        return Region(layout, len(self.known)).kv

    def reference(self) -> Tensor:
        """``[num_tokens, num_heads * head_dim]`` by plain torch, over what the rows have alone."""
        kv = self.kv.clone()
        plan = plan_attention(self.rows, self.shape.block_size, CPU)
        write_kv(kv, LAYER, plan, self.new_kv)
        return attend(kv, LAYER, plan, self.queries, self.shape.window).flatten(1)

    def run(self) -> Tensor:
        """The same by the kernels, with NaN in all that must not be read."""
        kernels, kv = self.shape.kernels, self.spoiled()
        plan = kernels.plan(self.rows, self.shape.block_size)
        for slot, new in zip(plan.slots.tolist(), self.new_kv, strict=True):
            kv[slot[0], LAYER, :, :, slot[1]] = new
        before = kv.clone()
        wide = torch.full((len(self.queries), self.queries[0].numel() + 8), NAN)  # strides differ
        wide[:, :-8] = self.queries.flatten(1)
        queries = wide[:, :-8].unflatten(1, self.queries.shape[1:])
        found = kernels.attend(kv, LAYER, plan, queries, self.shape.window)
        again = kernels.attend(kv, LAYER, plan, queries, self.shape.window)  # as the next layer
        assert torch.equal(found.nan_to_num(), again.nan_to_num())
        assert torch.equal(kv.view(torch.int32), before.view(torch.int32)), "KV was written"
        return found

    def spoiled(self) -> Tensor:
        """The pool with NaN wherever the step must neither read nor write."""
        kv = self.pool()
        kv.copy_(self.kv.masked_fill(~self.known[:, None, None, None, :, None], NAN))
        kv[:, 1 - LAYER] = NAN
        return kv


row_lists = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 700), st.just(1)),
        st.tuples(st.integers(0, 400), st.integers(2, 150)),
    ),
    min_size=1,
    max_size=4,
)


@given(
    st.builds(
        Shape,
        row_lists,
        share=st.integers(1, 9),
        num_kv_heads=st.integers(1, 3),
        head_dim=st.sampled_from([8, 16, 24, 64, 80, 128]),
        block_size=st.sampled_from([1, 4, 8, 10, 16, 32]),
        window=st.sampled_from([0, 0, 1, 5, 16, 100, 256, 300]),
    ),
    st.integers(0, 9),
)
@example(Shape([(0, 1), (255, 1), (256, 1), (511, 1), (512, 1)]), 0)  # the ends of tiles
@example(Shape([(0, 255)], share=1), 0)
@example(Shape([(0, 257)], share=8), 0)
@example(Shape([(250, 10), (256, 7), (300, 2)], window=256), 0)
@example(Shape([(1000, 1), (700, 40)], window=3), 0)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_equals_plain_torch_and_reads_nothing_else(shape: Shape, seed: int) -> None:
    step = Step(shape, seed)
    torch.testing.assert_close(step.run(), step.reference(), atol=2e-6, rtol=2e-5)


# --- the same bits, however it is computed --------------------------------------------------------


def attended(step: Step, rows: list[tuple[int, int]], kv: Tensor, queries: Tensor) -> Tensor:
    """Each row is a range of tokens of the step's one sequence, whose KV is there already."""
    kernels = step.shape.kernels
    [row] = step.rows
    parts = [
        Row(row.key, tuple(range(n)), start, row.blocks, True, row.params, 1) for start, n in rows
    ]
    plan = kernels.plan(parts, step.shape.block_size)
    chosen = torch.cat([queries[start : start + n] for start, n in rows])
    return kernels.attend(kv, LAYER, plan, chosen, step.shape.window)


@pytest.mark.parametrize("window", [0, 70, 256])
@pytest.mark.parametrize("share", [1, 3, 8])
def test_chunks_tokens_and_threads_change_no_bit(share: int, window: int) -> None:
    length = 600
    step = Step(Shape([(0, length)], share=share, window=window, head_dim=24), seed=share)
    kv = step.pool()
    torch.manual_seed(1)
    kv.copy_(torch.randn(kv.shape))
    queries = torch.randn(length, 2 * share, 24) * 3
    whole = attended(step, [(0, length)], kv, queries)
    chance = random.Random(share + window)
    for _ in range(3):
        cuts = sorted({0, length, *(chance.randrange(length) for _ in range(12))})
        chunks = [(a, b - a) for a, b in zip(cuts, cuts[1:], strict=False)]
        assert torch.equal(attended(step, chunks, kv, queries), whole)
    tokens = [(p, 1) for p in range(length)]  # as if each were decoded
    assert torch.equal(attended(step, tokens, kv, queries), whole)
    use_threads(1)
    assert torch.equal(attended(step, [(0, length)], kv, queries), whole)
    assert torch.equal(attended(step, tokens[500:], kv, queries), whole[500:])


def test_block_size_changes_no_bit() -> None:
    results = []
    for size in (4, 16, 32):
        step = Step(Shape([(0, 300)], block_size=size, head_dim=64), seed=1)
        results.append(step.run())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_engines_of_one_process_do_not_meet() -> None:
    """Each in a thread of its own, with threads of its own."""
    steps = [Step(Shape([(900, 1), (300, 1), (100, 60)]), seed) for seed in range(3)]
    alone = [step.run() for step in steps]

    def run(index: int) -> list[Tensor]:
        use_threads(1 + index % 2)
        return [steps[index].run() for _ in range(10)]

    with ThreadPoolExecutor(3) as pool:
        for expected, results in zip(alone, pool.map(run, range(3)), strict=True):
            assert all(torch.equal(result, expected) for result in results)


def test_a_number_that_is_none_is_not_hidden() -> None:
    """Whatever is not a number in a sequence comes out of it as such, and of no other one."""
    step = Step(Shape([(40, 1), (50, 1), (3, 30)]), seed=3)
    step.new_kv[1] = NAN  # of the second row
    found = step.run()
    assert found[1].isnan().all()
    assert not found[[0, *range(2, 32)]].isnan().any()
