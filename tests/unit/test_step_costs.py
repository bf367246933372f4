"""What a step costs: by hand, token by token, and beside the benchmark's own arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from services.engine.roofline import Cost, StepCosts, Weights, attended
from services.engine.scheduler import Row
from services.engine.sequence import SamplingParams
from tests.support.roofline import SMOLLM, decode_bytes, decode_flops, prefill_flops
from tests.support.worker_box import Box, decode

COSTS = StepCosts(
    layers=Weights(1_000, 4_000),
    head=Weights(70, 280),
    pair_flops=24,
    kv_bytes=8,
    windows=((0, 2),),
)


def smollm(int8: bool = False) -> StepCosts:
    """The default model, as the benchmark's shape has it."""
    head = SMOLLM.hidden * SMOLLM.vocab
    layers = SMOLLM.num_layers * SMOLLM.layer_weights
    all_bytes = SMOLLM.weight_bytes(int8)
    head_bytes = head + 4 * 9 * SMOLLM.vocab if int8 else 4 * head
    return StepCosts(
        layers=Weights(layers, all_bytes - head_bytes),
        head=Weights(head, head_bytes),
        pair_flops=4 * SMOLLM.num_heads * SMOLLM.head_dim,
        kv_bytes=2 * SMOLLM.num_kv_heads * SMOLLM.head_dim * 4,
        windows=((0, SMOLLM.num_layers),),
    )


def row(start: int, count: int, sample: bool = True) -> Row:
    params = SamplingParams(max_tokens=9)
    return Row((b"", 0), (0,) * count, start, (), sample, params, start + count)


def test_a_step_by_hand() -> None:
    rows = [row(4, 3, sample=False), row(9, 1)]
    linear = 2 * 4 * 1_000 + 2 * 70  # four tokens, one of them sampled
    pairs = (5 + 6 + 7) + 10
    assert COSTS.of(rows) == Cost(
        flops=linear + 2 * 24 * pairs,
        num_bytes=4_000 + 280 + 2 * 8 * (7 + 10),  # KV before a row is read, its own written
    )


def test_without_a_sampled_token_the_head_is_not_read() -> None:
    cost = COSTS.of([row(0, 3, sample=False)])
    assert cost == Cost(2 * 3 * 1_000 + 2 * 24 * 6, 4_000 + 2 * 8 * 3)


def test_nothing_costs_nothing() -> None:
    assert COSTS.of([]) == Cost(0, 0)


@given(start=st.integers(0, 40), count=st.integers(1, 40), window=st.integers(0, 30))
def test_attention_token_by_token(start: int, count: int, window: int) -> None:
    seen = [
        {key for key in range(query + 1) if not window or key > query - window}
        for query in range(start, start + count)
    ]
    pairs, positions = attended(start, count, window)
    assert pairs == sum(map(len, seen))
    assert positions == len(set().union(*seen))


def test_layers_with_a_window_count_apart() -> None:
    mixed = replace(COSTS, windows=((0, 1), (4, 3)))
    plain, narrow = COSTS.of([row(9, 1)]), mixed.of([row(9, 1)])
    assert narrow.flops - 2 * 1_070 == 24 * 10 + 3 * 24 * 4
    assert narrow.num_bytes - 4_280 == 8 * 10 + 3 * 8 * 4
    assert plain.flops - 2 * 1_070 == 2 * 24 * 10


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=6))
def test_a_prompt_in_chunks_is_the_prompt(lengths: list[int]) -> None:
    """The same operations, however it is cut; the weights are read for each chunk."""
    total, starts = sum(lengths), [sum(lengths[:i]) for i in range(len(lengths))]
    chunks = [
        smollm().of([row(start, count, start + count == total)])
        for start, count in zip(starts, lengths, strict=True)
    ]
    assert sum(chunk.flops for chunk in chunks) == prefill_flops(SMOLLM, total)
    assert sum(chunk.num_bytes for chunk in chunks) >= smollm().of([row(0, total)]).num_bytes


def test_what_an_engine_plans_is_what_its_tokens_need() -> None:
    """A prompt in three chunks, and three more tokens."""
    box, flops = Box("w"), 0
    box.say(decode([1, 2, 3, 4, 5] * 4))
    while box.engine.has_work:
        box.step()
        assert box.engine.plan is not None
        flops += smollm().of(box.engine.plan.rows).flops
    answer = sum(decode_flops(SMOLLM, 1, context) for context in (20, 21, 22))
    assert flops == prefill_flops(SMOLLM, 20) + answer


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("context", [0, 100, 2_000])
def test_decoding_costs_what_the_benchmark_says(batch: int, context: int, int8: bool) -> None:
    cost = smollm(int8).of([row(context, 1)] * batch)
    assert cost.flops == decode_flops(SMOLLM, batch, context)
    assert cost.num_bytes == decode_bytes(SMOLLM, batch, context, int8)
