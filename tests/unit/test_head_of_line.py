"""Chats and documents in one queue, through the router's choice and the engine's scheduler: in
which step does each get its first token?

Time is counted in steps. The router knows at once what a worker has, and a prefill worker's KV is
taken away with its first token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

import pytest

from router.admission import Waiting, pick
from router.config import RouterConfig
from router.policy import Demand, Pair, View, WorkerView
from services.engine.blocks import BlockPool
from services.engine.scheduler import Scheduler
from services.engine.sequence import SamplingParams, Sequence
from tests.support.fake_runner import FakeRunner

BLOCK = 16
BUDGET = 256  # tokens of a step
AHEAD = RouterConfig().prefill_ahead
BYPASS = RouterConfig().max_bypass
P, D = ("P", 1), ("D", 1)


@dataclass(eq=False)
class Request:
    """What came, and when it went where; -1 is not yet."""

    size: int
    answer: int  # tokens that are computed on the worker
    came: int
    bypassed: int = 0
    sent: int = -1
    first: int = -1


class Deployment:
    """A router's queue before one prefill worker, or one mixed worker."""

    def __init__(self, mixed: bool, seqs: int = 32, blocks: int = 1001) -> None:
        self.mixed = mixed
        self.pool = BlockPool(blocks, prefix_cache=False)
        self.scheduler = Scheduler(self.pool, BLOCK, BUDGET, seqs, 4096)
        self.runner = FakeRunner(BLOCK, BUDGET, seqs)
        self.queue: list[Request] = []
        self.there: dict[bytes, Request] = {}
        self.now = 0
        self.count = 0
        self.random = Random(1)

    def ask(self, size: int, answer: int = 1) -> Request:
        request = Request(size, answer if self.mixed else 1, self.now)
        self.queue.append(request)
        return request

    def view(self) -> View:
        """As router.worker makes it."""
        scheduler = self.scheduler
        seqs = [*scheduler.running, *scheduler.waiting]
        short = [r.size for r in self.there.values() if r.first < 0 and r.size <= BUDGET]
        limits = (True, self.pool.num_blocks, BLOCK, 4096, scheduler.max_num_seqs, BUDGET)
        worker = WorkerView(
            P,
            "mixed" if self.mixed else "prefill",
            *limits,
            num_seqs=len(seqs),
            pending_short=sum(short),
            pending_long=max(0, sum(seq.num_lacking for seq in seqs) - sum(short)),
            free_blocks=self.pool.num_available - scheduler.num_owed,
        )
        if self.mixed:
            return View({P: worker}, frozenset({Pair(None, P)}), prefill_ahead=AHEAD)
        decode = WorkerView(D, "decode", *limits, free_blocks=self.pool.num_usable)
        return View({P: worker, D: decode}, frozenset({Pair(P, D)}), prefill_ahead=AHEAD)

    def place(self) -> None:
        """As router.pending does it."""
        while self.queue:
            waiting = [Waiting(Demand(r.size, 100), r.bypassed) for r in self.queue]
            picked = pick(waiting, self.view(), BYPASS)
            if picked is None:
                return
            for index in picked.bypassed:
                self.queue[index].bypassed += 1
            request = self.queue.pop(picked.index)
            request.sent = self.now
            self.count += 1
            name = b"%d" % self.count
            self.there[name] = request
            ids = [self.random.randrange(7) for _ in range(request.size)]
            params = SamplingParams(request.answer)
            self.scheduler.add(Sequence((name, 0), ids, len(ids), params))

    def step(self) -> None:
        self.place()
        self.now += 1
        plan = self.scheduler.schedule(float(self.now))
        if not plan.rows:
            return
        outputs, sealed = self.scheduler.update(plan, self.runner.run(plan))
        self.runner.publish((), sealed)
        for output in outputs:
            request = self.there[output.key[0]]
            request.first = self.now if request.first < 0 else request.first
            if output.finish:
                del self.there[output.key[0]]

    def run(self, until: Iterable[Request]) -> None:
        until = list(until)
        for _ in range(3000):
            if all(request.first >= 0 for request in until):
                return
            self.step()
        raise AssertionError("somebody never gets a token")


@pytest.mark.parametrize("mixed", [False, True], ids=["prefill", "mixed"])
def test_a_chat_behind_four_documents_has_its_token_in_the_next_step(mixed: bool) -> None:
    """In order of arrival it would be the twelfth, ceil((2900 + 40) / 256)."""
    deployment = Deployment(mixed)
    documents = [deployment.ask(size) for size in (1000, 800, 600, 500)]
    deployment.step()
    chat = deployment.ask(40)
    deployment.run([chat])
    assert chat.first - chat.came == 1
    deployment.run(documents)
    assert [document.first for document in documents] == [5, 8, 10, 12]
    assert deployment.now == -(-(1000 + 800 + 600 + 500 + 40) // BUDGET)


@pytest.mark.parametrize("mixed", [False, True], ids=["prefill", "mixed"])
def test_chats_that_need_less_than_half_of_a_step_do_not_wait(mixed: bool) -> None:
    """However many documents are there: these take 35 steps, and 70 chats pass the last."""
    deployment = Deployment(mixed)
    documents = [deployment.ask(800) for _ in range(8)]
    chats = []
    while any(document.first < 0 for document in documents):
        chats += [deployment.ask(40), deployment.ask(40)]
        deployment.step()
    deployment.run(chats)
    waits = [chat.first - chat.came for chat in chats]
    assert max(waits) == 2  # when a document ends in that step itself
    assert waits.count(1) >= 0.8 * len(waits)
    assert max(document.first for document in documents) <= 8 * 800 // (BUDGET - 2 * 40) + 1


@pytest.mark.parametrize(
    ("mixed", "seqs", "blocks", "answer", "limit"),
    [
        (False, 32, 1001, 1, 26),  # alone they take 13 steps
        (True, 32, 1001, 20, 40),  # the chats' answers take a part of each step
        # Room is scarce: one document, or some chats. Up to 16 chats bypass each, in fours.
        (True, 4, 121, 10, 4 * 16 // 4 * 10),
        (True, 4, 81, 10, 4 * 16 // 4 * 10),
    ],
)
def test_more_chats_than_can_be_served_do_not_starve_documents(
    mixed: bool, seqs: int, blocks: int, answer: int, limit: int
) -> None:
    deployment = Deployment(mixed, seqs, blocks)
    documents = [deployment.ask(800, answer) for _ in range(4)]
    while any(document.first < 0 for document in documents):
        for _ in range(7):
            deployment.ask(40, answer)
        deployment.step()
        assert deployment.now <= limit, "documents starve"
    assert max(document.bypassed for document in documents) <= BYPASS
