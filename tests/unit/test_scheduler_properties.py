"""One engine under traffic that never ends: arrivals, hand-offs in and out, aborts, pulls that
settle late. Nobody starves, everybody's tokens are right, and when the traffic ends nothing is
left. Short prompts pass long ones, which have their half of the chunks all the same.

``test_engine_core`` tries all orders of a few commands; this goes on for hundreds of steps, as
only then can somebody starve.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from services.engine.config import EngineConfig
from services.engine.engine import Engine
from services.engine.scheduler import MAX_PASSED, Output
from services.engine.sequence import Key, SamplingParams
from tests.support.fake_runner import VOCAB, FakeRunner, check_states, naive, run_until_idle

BLOCK = 4
MAX_LEN = 24
ROUNDS = 250
PATIENCE = 5  # rounds that a pull, a lease or a quarantine takes at most


@dataclass
class Asked:
    """A sequence, and what became of it."""

    ids: list[int]
    params: SamplingParams
    since: int
    ahead: int  # sequences and holds that were there before it
    tokens: list[int] = field(default_factory=list)


class Traffic:
    """One engine, and everything that happens to it, drawn from a seed."""

    def __init__(self, seed: int, blocks: int, budget: int, chunks: int, seqs: int) -> None:
        self.random = Random(seed)
        self.runner = FakeRunner(BLOCK, budget, seqs)
        config = EngineConfig(
            kv_blocks=blocks,
            block_size=BLOCK,
            max_model_len=MAX_LEN,
            max_num_seqs=seqs,
            token_budget=budget,
            chunk_budget=chunks,
        )
        self.engine = Engine(config, self.runner)
        self.open: dict[Key, Asked] = {}
        self.later: list[tuple[int, Iterator[None]]] = []  # (round, what goes on then)
        self.round = 0
        self.count = 0
        self.ended = 0
        self.first: tuple[Key, int] | None = None  # the oldest whose prompt is not finished
        self.lead = 0  # tokens by which its followers are ahead of it
        self.most_lead = 0

    def new_key(self) -> Key:
        self.count += 1
        return b"%d" % self.count, 0

    def wait(self, work: Iterator[None]) -> None:
        self.later.append((self.round + self.random.randint(1, PATIENCE), work))

    def start(self, work: Iterator[None]) -> None:
        """Run it to its first pause; each pause takes some rounds."""
        if next(work, self) is not self:
            self.wait(work)

    # --- what may come ---

    def prompt(self) -> list[int]:
        return [self.random.randint(0, 1) for _ in range(self.random.randint(1, 14))]

    def params(self) -> SamplingParams:
        stops = self.random.choice([(), (3,), (1, 4)])
        return SamplingParams(self.random.randint(2, 10), stop_ids=stops)

    def ask(self, key: Key, ids: list[int], params: SamplingParams) -> None:
        ahead = len(self.open) + len(self.later)
        self.open[key] = Asked(ids, params, self.round, ahead)

    def computed_here(self) -> Iterator[None]:
        """Prompt and answer, dropped in the middle now and then."""
        key, ids, params = self.new_key(), self.prompt(), self.params()
        self.engine.add(key, ids, len(ids), params)
        self.ask(key, ids, params)
        if self.random.random() < 0.1:
            yield
            self.drop(key)

    def computed_for_others(self) -> Iterator[None]:
        """A prompt whose KV is leased out for some rounds."""
        key, ids, params = self.new_key(), self.prompt(), self.params()
        self.engine.add(key, ids, len(ids), params, hold=True)
        self.ask(key, ids, params)
        while key in self.open:
            yield
        if self.engine.knows(key):  # held, not finished by its first token
            pairs, exported = self.engine.take_held(key)
            assert exported == ids
            yield
            for block, generation in pairs:
                assert self.runner.generations[block] == generation, "a leased block was reused"
            self.engine.end_lease([block for block, _ in pairs])

    def computed_elsewhere(self) -> Iterator[None]:
        """A reservation, a pull of some rounds, and what may become of it."""
        key, ids = self.new_key(), self.prompt()
        reservation = self.engine.reserve(key, ids)
        if reservation is None:
            return
        yield
        fate = self.random.random()
        if fate < 0.1:
            self.engine.abort(key)
        elif fate < 0.2:
            self.engine.quarantine(key)
            yield
            for block in reservation.blocks[reservation.num_cached :]:
                self.runner.scribble(block)
            self.engine.settle(key)
        else:
            for index in range(reservation.num_cached, len(reservation.blocks)):
                self.runner.write(reservation.blocks[index], index, ids)
            so_far, params = [*ids, self.random.randrange(VOCAB)], self.params()
            self.engine.admit(key, so_far, len(ids), params)
            self.ask(key, so_far, params)
            self.open[key].tokens = []

    def drop(self, key: Key) -> None:
        self.engine.abort(key)
        self.open.pop(key, None)

    # --- rounds ---

    def go_on(self, arrivals: float) -> None:
        """Some arrivals, what was due, and one step."""
        self.round += 1
        due = [work for when, work in self.later if when <= self.round]
        self.later = [(when, work) for when, work in self.later if when > self.round]
        for work in due:
            self.start(work)
        kinds = (self.computed_here, self.computed_for_others, self.computed_elsewhere)
        while self.random.random() < arrivals:
            self.start(self.random.choice(kinds)())
        if self.engine.has_work:
            first = self.oldest_prompt()
            outputs = self.engine.step(float(self.round))
            if first is not None and first == self.oldest_prompt():
                self.book_share(first)
            for output in outputs:
                self.book(output)
        self.engine.check_integrity()
        if self.round % 5 == 0:
            check_states(self.engine, self.runner)
        for key, asked in self.open.items():
            waited = self.round - asked.since
            assert waited <= self.limit(asked), f"{key} starves behind {asked.ahead}"

    def oldest_prompt(self) -> tuple[Key, int] | None:
        """Of those that run, by name and number of preemptions."""
        running = self.engine.scheduler.running
        prompts = ((seq.key, seq.preempted) for seq in running if seq.num_lacking > 1)
        return next(prompts, None)

    def book_share(self, first: tuple[Key, int]) -> None:
        """The step has not finished ``first``. In any stretch of such steps the others have
        computed at most one step's chunks more than it has.
        """
        if first != self.first:
            self.first, self.lead = first, 0
        rows = self.runner.plans[-1].rows
        own = sum(len(row.ids) for row in rows if row.key == first[0])
        others = sum(len(row.ids) for row in rows if row.key != first[0] and len(row.ids) > 1)
        self.lead = max(0, self.lead + others - own)
        self.most_lead = max(self.most_lead, self.lead)
        assert self.lead <= self.engine.scheduler.chunk_budget, f"{first} is passed for too long"

    def limit(self, asked: Asked) -> int:
        """Rounds until a sequence must have ended. One by one, those before it and those that may
        pass it would take about 8 rounds each, some more where a chunk is a single token.
        """
        return 12 * (asked.ahead + MAX_PASSED)

    def book(self, output: Output) -> None:
        asked = self.open[output.key]
        num_prompt = len(asked.ids) - (output.index - len(asked.tokens))
        asked.tokens.append(output.token)
        expected = naive(asked.ids, num_prompt, asked.params, MAX_LEN)
        assert asked.tokens == expected[: len(asked.tokens)], "another token"
        if output.finish:
            assert asked.tokens == expected, "cut short"
        if output.finish or output.held:
            del self.open[output.key]
            self.ended += 1


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    blocks=st.integers(7, 12),
    budget=st.integers(2, 16),
    chunks=st.integers(1, 16),
    seqs=st.integers(1, 4),
    load=st.floats(0.2, 0.5),
)
def test_nobody_starves_however_long_the_traffic_goes_on(
    seed: int, blocks: int, budget: int, chunks: int, seqs: int, load: float
) -> None:
    traffic = Traffic(seed, blocks, budget, chunks, seqs)
    for _ in range(ROUNDS):
        traffic.go_on(load)
    while traffic.open or traffic.later:
        traffic.go_on(0.0)
    assert traffic.ended > 10
    assert not traffic.engine.has_work
    assert traffic.engine.pool.num_available == traffic.engine.pool.num_usable


def test_a_preemption_right_after_a_pull_loses_nothing() -> None:
    """B032: two sequences come with pulled KV, and there is no room for both answers; whoever is
    preempted has lost the KV that it came with, computes it again, and says the same.
    """
    runner = FakeRunner(BLOCK)
    config = EngineConfig(kv_blocks=8, block_size=BLOCK, max_model_len=MAX_LEN, token_budget=8)
    engine = Engine(config, runner)
    params = SamplingParams(14)
    answers = {}
    for name, ids in ((b"a", [1, 0, 1, 1, 0, 2, 2, 1, 0]), (b"b", [0, 0, 1, 1, 0, 2, 2, 1, 1])):
        reservation = engine.reserve((name, 0), ids)
        assert reservation is not None
        for index, block in enumerate(reservation.blocks):
            runner.write(block, index, ids)
        first = naive(ids, 9, SamplingParams(1), MAX_LEN)
        engine.admit((name, 0), [*ids, *first], 9, params)
        answers[name] = naive([*ids, *first], 9, params, MAX_LEN)
    outputs = run_until_idle(engine)
    assert engine.scheduler.stats.preemptions > 0
    for name, answer in answers.items():
        assert [output.token for output in outputs[name, 0]] == answer
    assert engine.pool.num_available == engine.pool.num_usable


@pytest.mark.parametrize("seqs", [3, 64])
def test_a_worker_without_memory_retracts_and_finishes_all(seqs: int) -> None:
    """B048: 64 long answers where there is room for three; those that give way come back."""
    runner = FakeRunner(BLOCK)
    config = EngineConfig(
        kv_blocks=19, block_size=BLOCK, max_model_len=MAX_LEN, max_num_seqs=seqs, token_budget=64
    )
    engine = Engine(config, runner)
    params = SamplingParams(17)
    prompts = {b"%d" % i: [(i >> bit) & 1 for bit in range(7)] for i in range(64)}
    for name, ids in prompts.items():
        engine.add((name, 0), ids, 7, params)
    outputs = run_until_idle(engine)
    for name, ids in prompts.items():
        assert [output.token for output in outputs[name, 0]] == naive(ids, 7, params, MAX_LEN)
    assert engine.scheduler.stats.preemptions > 0 or seqs == 3
    assert engine.pool.num_available == engine.pool.num_usable
