"""Which tokens a step computes: budget, order, preemption, ends. One behaviour at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from services.engine.blocks import BlockPool
from services.engine.scheduler import MAX_PASSED, Output, Plan, Scheduler
from services.engine.sequence import SamplingParams, Sequence, Status
from tests.support.fake_runner import FakeRunner, naive

BLOCK = 4
PARAMS = SamplingParams(max_tokens=4)


class Box:
    """A scheduler and a runner that checks its plans."""

    def __init__(
        self,
        blocks: int = 33,
        budget: int = 64,
        seqs: int = 8,
        max_len: int = 100,
        chunks: int = 0,
    ) -> None:
        self.pool = BlockPool(blocks)
        self.scheduler = Scheduler(self.pool, BLOCK, budget, seqs, max_len, chunks)
        self.runner = FakeRunner(BLOCK, budget, seqs, chunks)

    def add(self, name: str, ids: list[int], params: SamplingParams = PARAMS) -> Sequence:
        seq = Sequence((name.encode(), 0), list(ids), len(ids), params)
        self.scheduler.add(seq)
        return seq

    def step(self, now: float = 1.0) -> tuple[Plan, list[Output]]:
        plan = self.scheduler.schedule(now)
        if not plan.rows:
            return plan, []
        outputs, sealed = self.scheduler.update(plan, self.runner.run(plan))
        self.runner.publish((), sealed)
        self.pool.check_integrity()
        return plan, outputs

    def run(self, limit: int = 500) -> dict[str, list[int]]:
        tokens: dict[str, list[int]] = {}
        for _ in range(limit):
            if not self.scheduler.running and not self.scheduler.waiting:
                return tokens
            for output in self.step()[1]:
                tokens.setdefault(output.key[0].decode(), []).append(output.token)
        raise AssertionError("the scheduler does not come to an end")


def shape(plan: Plan) -> list[tuple[str, int, int, bool]]:
    return [(row.key[0].decode(), row.start, row.end, row.sample) for row in plan.rows]


def test_a_prompt_is_computed_in_chunks_of_the_budget_and_sampled_at_its_end() -> None:
    box = Box(budget=5)
    box.add("a", list(range(12)))
    assert shape(box.step()[0]) == [("a", 0, 5, False)]
    assert shape(box.step()[0]) == [("a", 5, 10, False)]
    assert shape(box.step()[0]) == [("a", 10, 12, True)]
    assert shape(box.step()[0]) == [("a", 12, 13, True)]


def test_running_sequences_come_before_waiting_ones() -> None:
    box = Box(budget=5)
    box.add("a", [1, 2, 3])
    box.step()
    box.add("b", [4, 5, 6, 1, 2, 3])
    box.add("c", [6])
    assert shape(box.step()[0]) == [("a", 3, 4, True), ("c", 0, 1, True), ("b", 0, 3, False)]
    box.add("d", [0, 1, 2])
    assert shape(box.step()[0]) == [
        ("a", 4, 5, True),
        ("c", 1, 2, True),
        ("b", 3, 6, True),
    ]


def test_no_more_rows_than_max_num_seqs() -> None:
    box = Box(seqs=2)
    for name in "abc":
        box.add(name, [1, 2, 3])
    assert [row.key[0] for row in box.step()[0].rows] == [b"a", b"b"]
    tokens = box.run()
    assert {len(found) for found in tokens.values()} <= {3, 4}
    assert len(tokens["c"]) == 4


def test_a_step_tells_which_blocks_it_opened_and_which_it_sealed() -> None:
    box = Box()
    seq = box.add("a", list(range(9)))
    plan = box.scheduler.schedule(1.0)
    assert plan.opened == tuple((block, 1) for block in seq.blocks)
    _, sealed = box.scheduler.update(plan, [3])
    assert sealed == [(block, 2) for block in seq.blocks[:2]]


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 9])
def test_max_tokens_counts_from_the_prompts_end(max_tokens: int) -> None:
    box = Box()
    box.add("a", [1, 2, 3], SamplingParams(max_tokens=max_tokens))
    assert len(box.run()["a"]) == max_tokens


def test_a_continued_answer_counts_what_is_there_already() -> None:
    box = Box()
    params = SamplingParams(max_tokens=5)
    seq = Sequence((b"a", 1), [1, 2, 3, 4, 5], 2, params)
    box.scheduler.add(seq)
    plan, outputs = box.step()
    assert outputs[0].index == 3
    assert box.scheduler.stats.computed_prompt_tokens == 2
    assert len(outputs + box.step()[1]) == 2
    assert seq.status is Status.FINISHED


def test_the_context_ends_an_answer() -> None:
    box = Box(max_len=6)
    box.add("a", [1, 2, 3], SamplingParams(max_tokens=50))
    finishes = [output.finish for _ in range(3) for output in box.step()[1]]
    assert finishes == ["", "", "length"]


def test_a_stop_id_ends_an_answer_with_itself() -> None:
    expected = naive([1, 2, 3], 3, SamplingParams(max_tokens=20), 100)
    stop = expected[4]
    params = SamplingParams(max_tokens=20, stop_ids=(stop,))
    box = Box()
    box.add("a", [1, 2, 3], params)
    tokens = box.run()["a"]
    assert tokens == expected[: expected.index(stop) + 1]
    assert box.pool.num_available == box.pool.num_usable


def test_a_stop_id_before_min_tokens_does_not_end_an_answer() -> None:
    expected = naive([1, 2, 3], 3, SamplingParams(max_tokens=9), 100)
    params = SamplingParams(max_tokens=9, min_tokens=9, stop_ids=tuple(range(7)))
    box = Box()
    box.add("a", [1, 2, 3], params)
    assert box.run()["a"] == expected


def test_a_stop_as_the_last_token_allowed_is_a_stop() -> None:
    token = naive([1, 2], 2, SamplingParams(max_tokens=1), 100)[0]
    seq = Sequence((b"a", 0), [1, 2, token], 2, SamplingParams(max_tokens=1, stop_ids=(token,)))
    assert seq.finish_reason(100) == "stop"


def test_preemption_takes_the_youngest_and_loses_no_token() -> None:
    box = Box(blocks=8)  # 7 usable, 28 tokens
    params = SamplingParams(max_tokens=10)
    prompts = {name: [i, 2, 3, 4, 5] for i, name in enumerate("abc")}
    for name, ids in prompts.items():
        box.add(name, ids, params)
    tokens = box.run()
    assert tokens == {name: naive(ids, 5, params, 100) for name, ids in prompts.items()}
    assert box.scheduler.stats.preemptions > 0
    first = box.runner.plans[0].rows[0].key
    starts = [r.start for plan in box.runner.plans for r in plan.rows if r.key == first]
    assert starts == sorted(starts), "the oldest was preempted"


def test_preempted_sequences_come_back_in_their_order() -> None:
    box = Box(blocks=6, budget=64)  # 5 usable
    seqs = [box.add(name, [i, 1, 2, 3], PARAMS) for i, name in enumerate("abc")]
    box.step()
    taken = box.pool.allocate(box.pool.num_available)  # somebody else took the rest
    assert taken is not None
    box.step()
    assert [seq.key[0] for seq in box.scheduler.running] == [b"a"]
    assert list(box.scheduler.waiting) == seqs[1:]
    box.pool.release(taken)
    tokens = box.run()
    assert sorted(tokens) == ["a", "b", "c"]


def test_a_prefix_hit_spares_full_blocks_but_never_the_last_token() -> None:
    ids = [1, 2, 3, 4, 5, 6, 0, 1]
    box = Box()
    box.add("a", ids)
    box.run()
    computed = box.scheduler.stats.computed_prompt_tokens
    assert computed == 8
    seq = box.add("b", ids)
    plan, outputs = box.step()
    assert shape(plan) == [("b", 4, 8, True)]
    assert outputs[0].num_cached == seq.num_cached == 4
    assert box.scheduler.stats.computed_prompt_tokens == 12
    assert box.scheduler.stats.cached_prompt_tokens == 4
    assert [outputs[0].token, *box.run()["b"]] == naive(ids, 8, PARAMS, 100)


def test_another_salt_never_hits() -> None:
    ids = [1, 2, 3, 4, 5]
    box = Box()
    box.add("a", ids)
    box.run()
    seq = Sequence((b"b", 0), list(ids), 5, PARAMS, salt=b"another tenant")
    box.scheduler.add(seq)
    assert box.step()[0].rows[0].start == 0


def test_what_an_answer_wrote_is_reused_by_the_next_turn() -> None:
    box = Box()
    params = replace(PARAMS, max_tokens=8)
    box.add("a", [1, 2, 3], params)
    turn = [1, 2, 3, *box.run()["a"], 5, 5]
    box.add("b", turn, params)
    assert box.step()[0].rows[0].start == 8  # 10 of 11 tokens had KV: two full blocks
    assert len(box.run()["b"]) == 7


def test_a_sequence_that_does_not_fit_now_waits_and_changes_nothing() -> None:
    box = Box(blocks=5)
    box.add("a", list(range(7)) + [0] * 5)
    box.step()
    box.add("b", [1] * 8)
    before = box.pool.counts()
    assert [row.key[0] for row in box.step()[0].rows] == [b"a"]
    assert box.pool.counts()["active"] == before["active"] + 1  # a's own next block
    tokens = box.run()
    assert tokens["b"] == naive([1] * 8, 8, PARAMS, 100)


def test_removing_a_sequence_gives_its_blocks_back_at_any_point() -> None:
    box = Box(seqs=1)
    running, waiting = box.add("a", [1, 2, 3]), box.add("b", [4, 5])
    box.step()
    box.scheduler.remove(waiting)
    box.scheduler.remove(running)
    assert not box.scheduler.running
    assert not box.scheduler.waiting
    assert box.pool.num_available == box.pool.num_usable


# --- chunks beside decodes (FAULTS B090) ----------------------------------------------------------


def test_chunks_share_a_budget_of_their_own_and_come_after_decodes() -> None:
    box = Box(budget=64, chunks=4)
    box.add("long", [1] * 10)
    assert shape(box.step()[0]) == [("long", 0, 4, False)]
    box.add("next", [2, 3, 4, 5, 6])
    box.add("tiny", [2])
    with_kv(box, "pulled", [1, 2, 3, 4, 5])
    assert shape(box.step()[0]) == [
        ("tiny", 0, 1, True),
        ("pulled", 4, 5, True),
        ("long", 4, 8, False),
    ]
    box.add("small", [2, 3, 4])
    with_kv(box, "later", [2, 2, 3, 4, 5])
    # No chunks are left for "next"; behind it only those start that hold blocks.
    assert shape(box.step()[0]) == [
        ("tiny", 1, 2, True),
        ("pulled", 5, 6, True),
        ("long", 8, 10, True),
        ("later", 4, 5, True),
        ("next", 0, 2, False),
    ]


def test_a_younger_decode_has_its_token_in_each_step_of_an_older_prompt() -> None:
    box = Box(budget=4, seqs=4)
    with_kv(box, "a", [1, 2, 3, 4, 5], SamplingParams(max_tokens=30))
    box.step()
    box.add("long", [3] * 20)
    with_kv(box, "b", [2, 2, 3, 4, 5], SamplingParams(max_tokens=30))
    began = len(box.runner.plans)
    for _ in range(12):
        box.step()
    rows = [[row.key[0] for row in plan.rows] for plan in box.runner.plans[began:]]
    for name in (b"a", b"b"):
        first = next(i for i, names in enumerate(rows) if name in names)
        assert all(name in names for names in rows[first:]), "a prompt stalled a decode"
    assert sum(b"long" in names for names in rows) >= 10


def test_no_chunk_budget_is_all_of_the_token_budget() -> None:
    box = Box(budget=8)
    box.add("a", [1] * 20)
    assert shape(box.step()[0]) == [("a", 0, 8, False)]


def test_a_chunk_budget_above_the_token_budget_is_no_error() -> None:
    box = Box(budget=4, chunks=9)
    assert box.scheduler.chunk_budget == 4


def test_a_decode_that_needs_room_may_preempt_the_prompt_beside_it() -> None:
    box = Box(blocks=8, budget=8, chunks=2)  # 7 usable
    old = with_kv(box, "old", [1, 2, 3, 4, 5, 6, 0, 1], SamplingParams(max_tokens=9))
    box.step()
    prompt = box.add("prompt", [2] * 16)
    box.step()
    assert (len(old.blocks), len(prompt.blocks)) == (3, 4)
    tokens = box.run()
    assert prompt.preempted == 1
    assert old.preempted == 0
    assert tokens["prompt"] == naive([2] * 16, 16, PARAMS, 100)


# --- short prompts go before long ones ------------------------------------------------------------


def holding(box: Box, *sizes: int) -> None:
    """Queue prompts of these sizes, named l0, l1, ..., and begin the first."""
    for i, size in enumerate(sizes):
        box.add(f"l{i}", [i] * size, SamplingParams(max_tokens=1))
    box.step()


def test_a_prompt_that_ends_in_this_step_goes_before_those_that_do_not() -> None:
    box = Box(budget=8)
    holding(box, 20, 20)  # one runs, one waits
    box.add("a", [2, 3, 4], SamplingParams(max_tokens=1))
    assert shape(box.step()[0]) == [("a", 0, 3, True), ("l0", 8, 13, False)]
    assert shape(box.step()[0]) == [("l0", 13, 20, True), ("l1", 0, 1, False)]


def test_short_ones_keep_their_order_and_wait_when_longer_ones_are_to_have_their_half() -> None:
    box = Box(budget=8)
    holding(box, 60)
    for token, (name, size) in enumerate((("a", 6), ("b", 2), ("c", 1), ("d", 8), ("e", 1))):
        box.add(name, [1 + token] * size, SamplingParams(max_tokens=1))
    assert shape(box.step()[0]) == [("a", 0, 6, True), ("b", 0, 2, True)]
    assert shape(box.step()[0]) == [("l0", 8, 16, False)]
    # "d" is longer than what "c" has left of this step, so it is passed as well.
    assert shape(box.step()[0]) == [("c", 0, 1, True), ("e", 0, 1, True), ("l0", 16, 22, False)]
    assert shape(box.step()[0]) == [("d", 0, 8, True)]
    assert shape(box.step()[0]) == [("l0", 22, 30, False)]


def test_a_short_one_that_may_not_pass_yet_is_not_passed_by_a_shorter_one() -> None:
    box = Box(budget=8)
    holding(box, 60)
    for token, (name, size) in enumerate((("a", 6), ("b", 5), ("c", 3))):
        box.add(name, [1 + token] * size, SamplingParams(max_tokens=1))
    assert shape(box.step()[0])[0] == ("a", 0, 6, True)
    box.step()
    assert shape(box.step()[0])[:2] == [("b", 0, 5, True), ("c", 0, 3, True)]


def test_single_tokens_of_others_pay_nothing_back() -> None:
    box = Box(budget=64, chunks=4)
    holding(box, 60)
    box.add("a", [1] * 4, SamplingParams(max_tokens=1))
    for i in range(3):
        with_kv(box, f"d{i}", [i, 2, 3, 4, 5], SamplingParams(max_tokens=30))
    assert [row.key[0] for row in box.step()[0].rows] == [b"a", b"d0", b"d1", b"d2"]
    box.add("b", [6] * 3, SamplingParams(max_tokens=1))
    assert [row.key[0] for row in box.step()[0].rows] == [b"d0", b"d1", b"d2", b"l0"]


def test_the_next_long_one_does_not_pay_for_the_last() -> None:
    box = Box(budget=8)
    holding(box, 60)
    box.add("a", [2] * 8, SamplingParams(max_tokens=1))
    assert shape(box.step()[0]) == [("a", 0, 8, True)]
    box.scheduler.remove(box.scheduler.running[0])  # it is owed 8 tokens
    box.add("b", [3, 4], SamplingParams(max_tokens=1))
    assert shape(box.step()[0]) == [("b", 0, 2, True)]
    box.add("l1", [5] * 60, SamplingParams(max_tokens=1))
    box.add("c", [6] * 8, SamplingParams(max_tokens=1))
    assert shape(box.step()[0]) == [("c", 0, 8, True)]


def test_a_step_that_decodes_fill_does_not_cancel_what_a_long_one_is_owed() -> None:
    box = Box(budget=4)
    holding(box, 60)
    for i in range(4):
        with_kv(box, f"d{i}", [i, 2, 3, 4, 5], SamplingParams(max_tokens=3))
    decodes = [(f"d{i}", 4, 5, True) for i in range(4)]
    assert shape(box.step()[0]) == decodes
    box.add("short", [6] * 4)
    assert [row.key[0] for row in box.step()[0].rows] == [b"d0", b"d1", b"d2", b"d3"]
    assert shape(box.step()[0]) == [("l0", 4, 8, False)]
    assert shape(box.step()[0]) == [("short", 0, 4, True)]


@pytest.mark.parametrize("size", range(1, 9))
def test_a_long_one_has_half_of_all_chunks_however_many_short_ones_come(size: int) -> None:
    """Alone it takes 10 steps of 8 tokens."""
    box = Box(budget=8, seqs=64, blocks=200)
    seq = box.add("long", [1] * 80, SamplingParams(max_tokens=1))
    steps = count = 0
    while seq.status is not Status.FINISHED and steps < 40:
        while sum(len(other.ids) for other in box.scheduler.waiting if other is not seq) < 16:
            box.add(f"s{count}", [2 + count % 5] * size, SamplingParams(max_tokens=1))
            count += 1
        plan, _ = box.step()
        assert sum(len(row.ids) for row in plan.rows) == 8
        steps += 1
    assert 15 <= steps <= 20


def test_short_ones_that_need_less_than_half_never_wait() -> None:
    box = Box(budget=8, seqs=64, blocks=200)
    holding(box, 80)
    for i in range(16):
        names = [f"{i} {j}" for j in range(2)]
        for name in names:
            box.add(name, [2 + i % 5, 3], SamplingParams(max_tokens=1))
        assert [output.key[0].decode() for output in box.step()[1]] == names
    assert [output.key[0] for output in box.step()[1]] == [b"l0"]  # 8, 16 times 4, 8


def test_decodes_come_before_short_prompts_and_those_before_long_ones() -> None:
    box = Box(budget=8)
    for name, first in (("a", 1), ("b", 2), ("c", 3)):
        with_kv(box, name, [first, 2, 3, 4, 5], SamplingParams(max_tokens=30))
    box.add("long", [4] * 40)
    assert [row.key[0] for row in box.step()[0].rows] == [b"a", b"b", b"c", b"long"]
    box.add("big", [5] * 6)  # more than the 5 that the decodes leave
    box.add("small", [6] * 4)
    rows = [(row.key[0], len(row.ids)) for row in box.step()[0].rows]
    assert rows == [(b"a", 1), (b"b", 1), (b"c", 1), (b"small", 4), (b"long", 1)]


def test_what_is_cached_does_not_make_a_prompt_long() -> None:
    box = Box(budget=8)
    box.add("before", [2] * 12)
    box.run()
    holding(box, 60)
    box.add("turn", [2] * 12 + [3] * 6, SamplingParams(max_tokens=1))
    assert shape(box.step()[0]) == [("turn", 12, 18, True), ("l0", 8, 10, False)]


def test_the_last_seat_is_left_to_the_first_that_is_passed() -> None:
    box = Box(budget=8, seqs=3)
    holding(box, 60, 60)
    box.add("a", [2, 3], PARAMS)
    box.add("b", [2, 3], PARAMS)
    assert [row.key[0] for row in box.step()[0].rows] == [b"a", b"l0"]
    assert [row.key[0] for row in box.step()[0].rows] == [b"a", b"l0"]


def test_the_blocks_that_the_first_needs_are_left_to_it() -> None:
    box = Box(blocks=36, budget=8)  # 35 usable; the long ones need 15 each, the others 2 each
    holding(box, 60, 60)
    for i, name in enumerate("abc"):
        box.add(name, [2 + i] * 5, SamplingParams(max_tokens=9))
    assert [row.key[0] for row in box.step()[0].rows] == [b"a", b"l0"]
    for _ in range(3):
        assert [row.key[0] for row in box.step()[0].rows] == [b"a", b"b", b"l0"]
    assert box.pool.num_available >= 15


# --- who may pass whom (FAULTS B089) ------------------------------------------------------------


def crowded(lights: int) -> tuple[Box, Sequence]:
    """A pool of 20 blocks of which somebody else holds 10, a prompt of 15 blocks that waits for
    them, and small ones behind it.
    """
    box = Box(blocks=21, budget=64, seqs=64)
    box.taken = box.pool.allocate(10)  # type: ignore[attr-defined]
    heavy = box.add("heavy", [1] * 59)
    box.step()
    for i in range(lights):
        box.add(f"light {i}", [2 + i % 5, 3])
    return box, heavy


def started(box: Box) -> list[str]:
    names = [row.key[0].decode() for plan in box.runner.plans for row in plan.rows]
    return list(dict.fromkeys(names))


def test_small_ones_pass_a_heavy_one_that_finds_no_room() -> None:
    box, heavy = crowded(10)
    box.step()
    assert started(box) == [f"light {i}" for i in range(10)]
    assert heavy.num_passed == 10
    box.pool.release(box.taken)  # type: ignore[attr-defined]
    tokens = box.run()
    assert tokens["heavy"] == naive([1] * 59, 59, PARAMS, 100)
    assert len(tokens) == 11


def test_only_so_many_pass_until_the_heavy_one_has_started() -> None:
    box, heavy = crowded(40)
    for _ in range(30):
        box.step()
    assert len(started(box)) == heavy.num_passed == MAX_PASSED
    assert not box.scheduler.running
    box.pool.release(box.taken)  # type: ignore[attr-defined]
    box.step()
    assert started(box)[MAX_PASSED] == "heavy"
    assert len(box.run()) == 41 - MAX_PASSED


def test_small_ones_that_never_end_coming_do_not_starve_the_heavy_one() -> None:
    box, _heavy = crowded(0)
    box.pool.release(box.taken)  # type: ignore[attr-defined]
    for i in range(60):
        for j in range(3):
            box.add(f"{i} {j}", [2 + (i + j) % 5, 3], SamplingParams(max_tokens=9))
        box.step()
    assert "heavy" in started(box)[: MAX_PASSED + 4]


def test_a_second_heavy_one_is_not_passed_more_often_than_the_first() -> None:
    box, first = crowded(0)
    second = box.add("second", [4] * 59)
    for i in range(40):
        box.add(f"light {i}", [2 + i % 5, 3])
    for _ in range(30):
        box.step()
    assert first.num_passed == second.num_passed == MAX_PASSED
    box.pool.release(box.taken)  # type: ignore[attr-defined]
    box.run()
    assert started(box)[MAX_PASSED : MAX_PASSED + 2] == ["heavy", "second"]


def test_removing_the_heavy_one_lets_the_others_go_on() -> None:
    box, heavy = crowded(40)
    for _ in range(30):
        box.step()
    box.scheduler.remove(heavy)
    assert len(box.run()) == 40 - MAX_PASSED


@settings(max_examples=80, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 6), st.integers(0, 2), st.booleans()),
        min_size=1,
        max_size=40,
    ),
    blocks=st.integers(13, 24),
    chunks=st.integers(0, 8),
    seqs=st.integers(1, 9),
)
def test_everybody_ends_and_who_finds_no_room_is_not_passed_too_often(
    arrivals: list[tuple[int, int, int, bool]], blocks: int, chunks: int, seqs: int
) -> None:
    """``arrivals``: prompt length, answer length, steps until the next comes, with KV or not."""
    box = Box(blocks, 16, seqs, 48, chunks)
    order: list[Sequence] = []
    passed: dict[int, set[int]] = {}
    expected: dict[str, list[int]] = {}
    got: dict[str, list[int]] = {}

    def step() -> None:
        waiting = [seq for seq in box.scheduler.waiting if not seq.blocks and not seq.started]
        preempted = box.scheduler.stats.preemptions
        first = next(iter(box.scheduler.waiting), None)
        room = box.pool.num_available
        no_room = first is not None and box.scheduler.blocks_for(first.num_tokens) > room
        _, outputs = box.step()
        for output in outputs:
            got.setdefault(output.key[0].decode(), []).append(output.token)
        fresh = [seq for seq in waiting if seq.started]
        if box.scheduler.stats.preemptions > preempted:
            return  # it may have had room in between
        for seq in waiting:
            if no_room and seq is first and not seq.started:
                later = {id(other) for other in fresh if order.index(other) > order.index(seq)}
                passed.setdefault(id(seq), set()).update(later)

    for i, (length, answer, pause, pulled) in enumerate(arrivals):
        ids = [i % 7] * length
        params = SamplingParams(max_tokens=answer)
        need = box.scheduler.blocks_for(max(1, length - 1)) + box.scheduler.num_owed
        if pulled and length > 1 and need <= box.pool.num_available:
            order.append(with_kv(box, str(i), ids, params))
            expected[str(i)] = naive(ids, length - 1, params, 48)
        else:
            order.append(box.add(str(i), ids, params))
            expected[str(i)] = naive(ids, length, params, 48)
        for _ in range(pause):
            step()
    for _ in range(3000):
        if not box.scheduler.running and not box.scheduler.waiting:
            break
        step()
    assert got == expected
    assert all(len(others) <= MAX_PASSED for others in passed.values())
    assert box.pool.num_available == box.pool.num_usable


# --- sequences that come with KV (a hand-off) -----------------------------------------------------


def with_kv(box: Box, name: str, ids: list[int], params: SamplingParams = PARAMS) -> Sequence:
    """Queue a sequence whose KV, all but the last token's, is in its blocks."""
    blocks = box.pool.allocate(box.scheduler.blocks_for(len(ids) - 1))
    assert blocks is not None
    box.runner.publish(box.pool.take_opened(), [])
    for index, block in enumerate(blocks):
        box.runner.write(block, index, ids[:-1])
    seq = Sequence((name.encode(), 0), list(ids), len(ids) - 1, params)
    seq.blocks = blocks
    box.runner.publish((), box.scheduler.adopt(seq, len(ids) - 1))
    box.scheduler.add(seq)
    return seq


def test_a_sequence_with_kv_goes_on_behind_it() -> None:
    box = Box()
    ids = [1, 2, 3, 4, 5, 6]
    with_kv(box, "a", ids)
    plan, outputs = box.step()
    assert shape(plan) == [("a", 5, 6, True)]
    assert outputs[0].index == 1
    assert box.scheduler.stats.computed_prompt_tokens == 0
    expected = naive(ids, 5, PARAMS, 100)
    assert [outputs[0].token, *box.run()["a"]] == expected


def test_who_holds_blocks_may_pass_who_waits_for_them() -> None:
    """Else both wait for ever: the first in the queue for blocks, the second, who has them, for its
    turn.
    """
    box = Box(blocks=6)  # 5 usable
    holder = with_kv(box, "holder", [1, 2, 3, 4, 5])
    big = Sequence((b"big", 0), [3] * 18, 18, SamplingParams(max_tokens=2))
    box.scheduler.waiting.appendleft(big)
    plan, _ = box.step()
    assert [row.key for row in plan.rows] == [holder.key]
    tokens = box.run()
    assert len(tokens["big"]) == 2


def test_holders_that_cannot_go_on_make_room_for_the_first() -> None:
    """All blocks are held by sequences that each need one more, and nobody runs."""
    box = Box(blocks=5)  # 4 usable
    ids = [[1, 2, 3, 4, 5], [2, 2, 3, 4, 5], [3, 2, 3, 4, 5], [0, 2, 3, 4, 5]]
    for name, each in zip("abcd", ids, strict=True):
        with_kv(box, name, each)
    assert box.pool.num_available == 0
    tokens = box.run()
    assert box.scheduler.stats.preemptions > 0
    for name, each in zip("abcd", ids, strict=True):
        assert tokens[name] == naive(each, 4, PARAMS, 100)


def test_the_first_keeps_its_kv_while_blocks_are_held_elsewhere() -> None:
    box = Box(blocks=5)
    seq = with_kv(box, "a", [1, 2, 3, 4, 5])
    taken = box.pool.allocate(3)
    assert taken is not None
    assert box.step()[0].rows == ()
    assert seq.num_computed == 4
    box.pool.release(taken)
    assert len(box.run()["a"]) == 3
    assert box.scheduler.stats.preemptions == 0
