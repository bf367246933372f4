"""Which tokens a step computes: budget, order, preemption, ends. One behaviour at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.engine.blocks import BlockPool
from services.engine.scheduler import Output, Plan, Scheduler
from services.engine.sequence import SamplingParams, Sequence, Status
from tests.support.fake_runner import FakeRunner, naive

BLOCK = 4
PARAMS = SamplingParams(max_tokens=4)


class Box:
    """A scheduler and a runner that checks its plans."""

    def __init__(
        self, blocks: int = 33, budget: int = 64, seqs: int = 8, max_len: int = 100
    ) -> None:
        self.pool = BlockPool(blocks)
        self.scheduler = Scheduler(self.pool, BLOCK, budget, seqs, max_len)
        self.runner = FakeRunner(BLOCK, budget, seqs)

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
    assert shape(box.step()[0]) == [("a", 3, 4, True), ("b", 0, 4, False)]
    assert shape(box.step()[0]) == [("a", 4, 5, True), ("b", 4, 6, True), ("c", 0, 1, True)]


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
