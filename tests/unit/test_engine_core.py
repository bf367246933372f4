"""The engine under everything that can happen between two steps, against a naive loop."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.engine.config import EngineConfig
from services.engine.engine import Engine
from services.engine.scheduler import Output
from services.engine.sequence import Key, SamplingParams
from tests.support.fake_runner import VOCAB, FakeRunner, check_states, naive, run_until_idle, states

BLOCK = 4


def make(
    blocks: int = 33,
    budget: int = 64,
    seqs: int = 8,
    max_len: int = 0,
    prefix_cache: bool = True,
    chunks: int = 0,
) -> tuple[Engine, FakeRunner]:
    runner = FakeRunner(BLOCK, budget, seqs, chunks)
    config = EngineConfig(
        kv_blocks=blocks,
        block_size=BLOCK,
        max_model_len=max_len or (blocks - 1) * BLOCK,
        max_num_seqs=seqs,
        token_budget=budget,
        chunk_budget=chunks,
        prefix_cache=prefix_cache,
    )
    return Engine(config, runner), runner


def idle(engine: Engine) -> None:
    """Assert that nothing is held any more."""
    engine.check_integrity()
    assert not engine.has_work
    counts = engine.pool.counts()
    held = {name: counts[name] for name in ("active", "leased", "quarantined")}
    assert held == {"active": 0, "leased": 0, "quarantined": 0}
    assert engine.pool.num_available == engine.pool.num_usable


@dataclass
class Asked:
    """One sequence as the test sees it."""

    ids: list[int]
    num_prompt: int
    params: SamplingParams
    hold: bool = False
    tokens: list[int] = field(default_factory=list)
    state: str = "open"  # reserved, open, held, done, gone


# Few different tokens, so that prompts share prefixes.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 12),
    min_tokens=st.integers(0, 4),
    stop_ids=st.sampled_from([(), (3,), (1, 4)]),
)


class EngineMachine(RuleBasedStateMachine):
    """Arrivals, steps, aborts, leases, reservations and late bytes, in any order, in tiny pools."""

    @initialize(
        blocks=st.integers(7, 14),
        budget=st.integers(1, 20),
        seqs=st.integers(1, 4),
        prefix_cache=st.booleans(),
        chunks=st.sampled_from([0, 1, 3]),
    )
    def start(self, blocks: int, budget: int, seqs: int, prefix_cache: bool, chunks: int) -> None:
        self.engine, self.runner = make(blocks, budget, seqs, 24, prefix_cache, chunks)
        self.asked: dict[Key, Asked] = {}
        self.leases: list[tuple[list[tuple[int, int]], list[int]]] = []
        self.quarantined: dict[Key, tuple[int, ...]] = {}

    def new_key(self) -> Key:
        return (b"%d" % len(self.asked), 0)

    def pick(self, index: int, *states: str) -> Key | None:
        keys = [key for key, asked in self.asked.items() if asked.state in states]
        return keys[index % len(keys)] if keys else None

    # --- commands ---

    @rule(ids=PROMPTS, params=PARAMS, hold=st.booleans(), answered=st.integers(0, 3))
    def add(self, ids: list[int], params: SamplingParams, hold: bool, answered: int) -> None:
        num_prompt = max(1, len(ids) - min(answered, params.max_tokens - 1))
        key = self.new_key()
        self.engine.add(key, ids, num_prompt, params, hold=hold)
        self.asked[key] = Asked(ids, num_prompt, params, hold)

    @rule(ids=PROMPTS)
    def reserve(self, ids: list[int]) -> None:
        key = self.new_key()
        before = self.engine.pool.counts()
        reservation = self.engine.reserve(key, ids)
        if reservation is None:
            assert self.engine.pool.counts() == before
            return
        assert len(reservation.blocks) == -(-len(ids) // BLOCK)
        self.asked[key] = Asked(ids, len(ids), SamplingParams(1), state="reserved")

    @rule(index=st.integers(0, 99), params=PARAMS, first=st.integers(0, VOCAB - 1))
    def admit(self, index: int, params: SamplingParams, first: int) -> None:
        key = self.pick(index, "reserved")
        if key is None:
            return
        asked = self.asked[key]
        reservation = self.engine._reserved[key]
        for i in range(reservation.num_cached, len(reservation.blocks)):
            self.runner.write(reservation.blocks[i], i, asked.ids)
        params = SamplingParams(params.max_tokens + 1, params.min_tokens, stop_ids=params.stop_ids)
        ids = [*asked.ids, first]
        self.engine.admit(key, ids, len(asked.ids), params)
        self.asked[key] = Asked(ids, len(asked.ids), params)

    @rule(index=st.integers(0, 99))
    def quarantine(self, index: int) -> None:
        key = self.pick(index, "reserved")
        if key is None:
            return
        reservation = self.engine._reserved[key]
        self.engine.quarantine(key)
        assert self.engine.knows(key), "its key is free before its blocks are"
        self.quarantined[key] = reservation.blocks[reservation.num_cached :]
        self.asked[key].state = "gone"

    @rule(index=st.integers(0, 99))
    def compute_in_quarantine(self, index: int) -> None:
        """Its early pull has not settled, and it is computed here under the same key."""
        keys = [key for key in self.quarantined if self.asked[key].state == "gone"]
        if keys:
            key = keys[index % len(keys)]
            asked = self.asked[key]
            self.asked[key] = Asked(asked.ids, len(asked.ids), SamplingParams(2))
            self.engine.add(key, asked.ids, len(asked.ids), SamplingParams(2))

    @rule(index=st.integers(0, 99))
    def settle(self, index: int) -> None:
        if self.quarantined:
            key = list(self.quarantined)[index % len(self.quarantined)]
            del self.quarantined[key]
            self.engine.settle(key)

    @rule()
    def late_bytes(self) -> None:
        for blocks in self.quarantined.values():
            for block in blocks:
                self.runner.scribble(block)

    @rule(index=st.integers(0, 99))
    def abort(self, index: int) -> None:
        key = self.pick(index, "open", "reserved", "held")
        if key is not None:
            self.engine.abort(key)
            self.engine.abort(key)
            assert self.engine.knows(key) == (key in self.quarantined)
            self.asked[key].state = "gone"

    @rule(index=st.integers(0, 99))
    def export(self, index: int) -> None:
        key = self.pick(index, "held")
        if key is not None:
            asked = self.asked[key]
            pairs, ids = self.engine.take_held(key)
            assert ids == asked.ids
            assert len(pairs) == -(-len(ids) // BLOCK)
            self.leases.append((pairs, ids))
            asked.state = "done"

    @rule(index=st.integers(0, 99))
    def end_lease(self, index: int) -> None:
        if self.leases:
            pairs, _ids = self.leases.pop(index % len(self.leases))
            self.engine.end_lease([block for block, _ in pairs])

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.engine.has_work:
                self.book(self.engine.step(1.0))

    def book(self, outputs: list[Output]) -> None:
        for output in outputs:
            asked = self.asked[output.key]
            assert asked.state == "open", "a token of a sequence that is not wanted"
            generated = len(asked.ids) - asked.num_prompt
            assert output.index == generated + len(asked.tokens), "a token is lost or repeated"
            asked.tokens.append(output.token)
            assert output.held == (asked.hold and not output.finish)
            if output.held:
                asked.state = "held"
            elif output.finish:
                asked.state = "done"
                self.check_answer(asked)

    def check_answer(self, asked: Asked) -> None:
        assert asked.tokens == naive(asked.ids, asked.num_prompt, asked.params, 24)

    # --- what holds at all times ---

    @invariant()
    def blocks_and_sequences_agree(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.check_integrity()
        check_states(self.engine, self.runner)
        for key, asked in self.asked.items():
            if asked.state == "open":
                self.check_sealed(asked, self.engine.sealed_blocks(key))
        for pairs, ids in self.leases:
            for block, generation in pairs:
                assert self.runner.generations[block] == generation, "a leased block was reused"
            last = pairs[-1][0]
            slot = (len(ids) - 1) % BLOCK
            assert self.runner.kv[last][slot][0] == len(ids) - 1

    def check_sealed(self, asked: Asked, sealed: list[tuple[int, int]]) -> None:
        """What a peer may be told of a sequence that runs: sealed, and its own tokens' KV."""
        chain = states([*asked.ids, *asked.tokens])
        assert len(sealed) * BLOCK <= len(chain)
        for index, (block, generation) in enumerate(sealed):
            assert self.runner.generations[block] == generation
            first = index * BLOCK
            expected = {slot: (first + slot, chain[first + slot]) for slot in range(BLOCK)}
            assert self.runner.kv[block] == expected

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        while self.leases:
            self.end_lease(0)
        for key, asked in self.asked.items():
            if asked.state in ("reserved", "held"):
                self.engine.abort(key)
        for key in list(self.quarantined):
            self.engine.settle(key)
        for _ in range(3000):
            if not self.engine.has_work:
                break
            self.book(self.engine.step(1.0))
            for key, asked in self.asked.items():
                if asked.state == "held":
                    self.engine.abort(key)
                    asked.state = "gone"
        assert not any(asked.state == "open" for asked in self.asked.values()), "somebody starves"
        idle(self.engine)


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(PROMPTS, min_size=1, max_size=8),
    budget=st.integers(1, 30),
    seqs=st.integers(1, 8),
    max_tokens=st.integers(1, 9),
    prefix_cache=st.booleans(),
)
def test_counters_are_exact_when_nothing_is_preempted(
    prompts: list[list[int]], budget: int, seqs: int, max_tokens: int, prefix_cache: bool
) -> None:
    engine, _ = make(80, budget, seqs, prefix_cache=prefix_cache)
    params = SamplingParams(max_tokens)
    for i, ids in enumerate(prompts):
        engine.add((b"%d" % i, 0), ids, len(ids), params)
    outputs = run_until_idle(engine)
    stats = engine.scheduler.stats
    cached = sum(found[0].num_cached for found in outputs.values())
    assert stats.preemptions == 0
    assert stats.computed_prompt_tokens == sum(map(len, prompts)) - cached
    assert stats.cached_prompt_tokens == cached
    assert cached == 0 or prefix_cache
    assert stats.generated_tokens == len(prompts) * max_tokens
    idle(engine)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9])
@pytest.mark.parametrize("max_tokens", [1, 2, 16])
def test_a_hand_off_gives_what_one_engine_gives(length: int, max_tokens: int) -> None:
    ids = [i % VOCAB for i in range(length)]
    params = SamplingParams(max_tokens)
    producer, theirs = make()
    consumer, ours = make()
    producer.add((b"a", 0), ids, length, params, hold=True)
    (output,) = [output for found in run_until_idle(producer).values() for output in found]
    tokens = [output.token]
    if max_tokens > 1:
        assert output.held
        reservation = consumer.reserve((b"a", 0), ids)
        assert reservation is not None
        pairs, exported = producer.take_held((b"a", 0))
        assert exported == ids
        for (remote, generation), local in zip(pairs, reservation.blocks, strict=True):
            assert theirs.generations[remote] == generation
            ours.kv[local] = dict(theirs.kv[remote])
        consumer.admit((b"a", 0), [*ids, output.token], length, params)
        producer.end_lease([block for block, _ in pairs])
        tokens += [output.token for output in run_until_idle(consumer)[b"a", 0]]
        assert consumer.scheduler.stats.computed_prompt_tokens == 0
    else:
        assert output.finish == "length"
    assert tokens == naive(ids, length, params, 128)
    idle(producer)
    idle(consumer)


def test_a_second_reservation_pins_what_the_first_pulled() -> None:
    engine, runner = make()
    ids = list(range(7)) + [0, 1]
    first = engine.reserve((b"a", 0), ids)
    assert first is not None
    for index, block in enumerate(first.blocks):
        runner.write(block, index, ids)
    unverified = engine.reserve((b"b", 0), ids)
    assert unverified is not None
    assert unverified.num_cached == 0, "pulled blocks were shared before they were verified"
    engine.abort((b"b", 0))
    engine.admit((b"a", 0), [*ids, 3], 9, SamplingParams(3))
    second = engine.reserve((b"b", 0), ids)
    assert second is not None
    assert second.blocks[:2] == first.blocks[:2]
    assert second.num_cached == 2
    engine.abort((b"a", 0))
    engine.abort((b"b", 0))
    idle(engine)


def test_a_prompt_of_full_blocks_in_the_cache_needs_no_pull() -> None:
    engine, _ = make()
    ids = [1, 2, 3, 4, 5, 6, 0, 1]
    engine.add((b"a", 0), [*ids, 0], 9, SamplingParams(1))
    run_until_idle(engine)
    reservation = engine.reserve((b"b", 0), ids)
    assert reservation is not None
    assert reservation.num_cached == len(reservation.blocks) == 2
    engine.admit((b"b", 0), [*ids, 2], 8, SamplingParams(4))
    tokens = [output.token for output in run_until_idle(engine)[b"b", 0]]
    assert tokens == naive([*ids, 2], 8, SamplingParams(4), 128)
    idle(engine)


def test_reservations_do_not_starve_who_was_preempted() -> None:
    engine, _ = make(blocks=9, seqs=2)  # 8 usable
    engine.add((b"a", 0), [1] * 8, 8, SamplingParams(12))
    engine.add((b"b", 0), [2] * 18, 18, SamplingParams(4))
    got = [key for i in range(60) if (key := step_and_reserve(engine, i)) is not None]
    assert not engine.has_work, "newcomers took every block that came free"
    assert engine.scheduler.stats.preemptions > 0
    assert got, "nothing was ever reserved"


def step_and_reserve(engine: Engine, i: int) -> Key | None:
    """Step, and ask for half of the pool; whoever got the last half drops it only then."""
    if engine.has_work:
        engine.step(1.0)
    key = (b"r%d" % i, 0)
    if engine.reserve(key, [4] * 16) is None:
        return None
    for earlier in [old for old in engine._reserved if old != key]:
        engine.abort(earlier)
    return key


def test_a_step_without_room_says_so_and_goes_on_when_there_is_some() -> None:
    engine, _ = make(blocks=5)
    engine.add((b"a", 0), [1] * 12, 12, SamplingParams(2), hold=True)
    run_until_idle(engine)
    pairs, _ids = engine.take_held((b"a", 0))
    engine.add((b"b", 0), [2] * 12, 12, SamplingParams(1))
    assert engine.step(1.0) == []
    assert engine.stalled
    engine.end_lease([block for block, _ in pairs])
    assert len(engine.step(1.0)) == 1
    assert not engine.stalled
    idle(engine)


def test_what_never_fits_is_told_with_the_limit() -> None:
    engine, _ = make(blocks=5, max_len=100)
    assert engine.never_fits(16) == ""
    assert "KV pool of 16 tokens" in engine.never_fits(17)
    assert "maximum context length of 100" in engine.never_fits(101)


def test_a_quarantined_key_stays_taken_until_it_is_settled() -> None:
    engine, _ = make()
    engine.reserve((b"a", 0), [1, 2, 3])
    engine.quarantine((b"a", 0))
    assert engine.knows((b"a", 0))
    assert engine.pool.counts()["quarantined"] == 1
    engine.settle((b"a", 0))
    assert not engine.knows((b"a", 0))
    idle(engine)


def test_sealed_blocks_grow_with_the_steps_and_begin_with_cached_ones() -> None:
    engine, _ = make(budget=6)
    engine.add((b"a", 0), [1, 2, 3, 4, 5], 5, SamplingParams(1))
    run_until_idle(engine)
    ids = [1, 2, 3, 4, *range(7), *range(7), 0, 1]  # 20: the first block is cached
    engine.add((b"b", 0), ids, 20, SamplingParams(2), hold=True)
    assert engine.sealed_blocks((b"b", 0)) == []
    found = []
    for _ in range(3):
        engine.step(1.0)
        found.append(len(engine.sealed_blocks((b"b", 0))))
    assert found == [2, 4, 5]  # 10, 16 and 20 tokens
    sealed = engine.sealed_blocks((b"b", 0))
    assert [generation % 2 for _, generation in sealed] == [0] * 5
    pairs, _ids = engine.take_held((b"b", 0))
    assert pairs == sealed
    engine.end_lease([block for block, _ in pairs])
    idle(engine)


def test_integrity_names_a_block_that_nobody_counts_on() -> None:
    engine, _ = make()
    engine.add((b"a", 0), [1, 2, 3], 3, SamplingParams(9))
    engine.step(1.0)
    engine.check_integrity()
    leaked = engine.pool.allocate(1)
    assert leaked is not None
    with pytest.raises(AssertionError, match="holders differ"):
        engine.check_integrity()


def test_a_recompute_stalls_no_decode_of_its_worker() -> None:
    """FAULTS B090: each step of a long prompt has a token of everybody who decodes."""
    engine, runner = make(blocks=65, budget=32, chunks=8, max_len=200)
    for name in b"ab":
        engine.add((bytes([name]), 0), [name % 7, 1], 2, SamplingParams(40))
    engine.step(1.0)
    engine.add((b"long", 0), [3] * 100, 100, SamplingParams(2))
    for _ in range(13):
        tokens = {output.key[0] for output in engine.step(1.0)}
        assert tokens >= {b"a", b"b"}
    assert b"long" in tokens
    run_until_idle(engine)
    idle(engine)
