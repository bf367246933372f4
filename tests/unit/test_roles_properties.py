"""Prefill and decode workers with their routers: whatever is delayed, repeated, lost, killed or
drained, each opening has one terminal message, every text is right, and nothing is left behind.

``test_roles_conversation`` lets a router say anything; here routers follow the protocol, so that
requests come to an end through as many attempts as it takes, and their whole text is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from router import wire
from services.engine.sequence import SamplingParams
from tests.support.fake_runner import check_states, naive
from tests.support.scripted_router import Request, Router
from tests.support.scripted_world import World
from tests.support.worker_box import LEASE_S, MAX_LEN, Box

INDEX = st.integers(0, 99)
POOL = 9  # 8 usable: two longest requests and a bit
MOST_OPEN = 6
NEVER = float("inf")
EVENTS = [
    *3 * ["ask"], *5 * ["all_goes_on"], "to_box", "to_router", "step", *2 * ["step_and_hear"],
    *3 * ["pull_arrives"], "pull_fails", "pull_is_given_up", "pull_settles",
    *3 * ["again"], "time_passes", "cancel", "ask_for_news", "renew", "once_more",
    "reconnect", "kill", "drain", "leave", "lose_router",
]  # fmt: skip


def prompt(index: int) -> list[int]:
    """1 to 14 tokens; many of these begin alike."""
    return [(index // 28 >> i) & 1 for i in range(1 + index % 14)]


def expected(request: Request) -> list[int]:
    return answer(tuple(request.ids), request.sampling.max_tokens)


@cache
def answer(ids: tuple[int, ...], max_tokens: int) -> list[int]:
    return naive(ids, len(ids), SamplingParams(max_tokens), MAX_LEN)


def pick(items: Sequence[Any], index: int) -> Any:
    """One of them, None when there is none."""
    return items[index % len(items)] if items else None


class HandOffs(RuleBasedStateMachine):
    """A prefill worker, two decode workers and two routers, in a world that is not kind."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.epoch = 0
        self.p = self.new_box("p")
        self.ds = [self.new_box("d0"), self.new_box("d1")]
        self.num_requests = 0
        self.num_routers = 0
        for _ in range(2):
            self.new_router()

    def new_box(self, name: str) -> Box:
        self.epoch += 1
        return self.world.add_box(Box(name, self.epoch, POOL, chunk_budget=6))

    def new_router(self) -> None:
        self.world.add_router(f"router {self.num_routers}")
        self.num_routers += 1

    def router(self, index: int) -> Router:
        return self.world.routers[index % len(self.world.routers)]

    def requests(self) -> list[tuple[Router, Request]]:
        return [(r, one) for r in self.world.routers for one in r.requests.values()]

    def busy(self) -> list[tuple[Router, Request]]:
        return [(router, one) for router, one in self.requests() if one.is_open]

    def queued(self) -> list[tuple[Router, Request]]:
        return [(router, one) for router, one in self.requests() if one.stage == "queued"]

    def pulls(self, told: bool) -> list[tuple[Box, bytes]]:
        return [(box, key) for box in self.world.boxes for key in box.puller.keys(told)]

    # --- what may happen, in any order ---

    # One rule for all of it: hypothesis leaves out some rules in each run, and the world would
    # stand still without any of these.
    @rule(events=st.lists(st.tuples(st.sampled_from(EVENTS), INDEX, INDEX), min_size=4, max_size=9))
    def happens(self, events: list[tuple[str, int, int]]) -> None:
        for what, index, which in events:
            getattr(self, what)(index, which)
            self.check()

    def ask(self, index: int, which: int) -> None:
        if len(self.busy()) + len(self.queued()) >= MOST_OPEN:
            return
        sampling = wire.Sampling(max_tokens=1 + which % 12)
        deadline = self.world.now + (4.0 if which % 5 == 0 else NEVER)
        request = Request(b"request %d" % self.num_requests, prompt(index), sampling, deadline)
        self.num_requests += 1
        router = self.router(which)
        router.ask(request)
        self.start(router, request, which % 2, local=False)

    def all_goes_on(self, index: int, _: int) -> None:
        """Everything that is under way arrives, and all workers step; pulls take longer."""
        for _ in range(1 + index % 3):
            for pipe in self.world.live:
                while pipe.to_box:
                    self.world.to_box(pipe)
                while pipe.to_router:
                    self.world.to_router(pipe)
            for box in self.world.boxes:
                self.world.step(box)

    def to_box(self, index: int, which: int) -> None:
        pipe = pick([pipe for pipe in self.world.live if pipe.to_box], index)
        if pipe is not None:
            for _ in range(min(1 + which % 3, len(pipe.to_box))):
                self.world.to_box(pipe)

    def to_router(self, index: int, which: int) -> None:
        pipe = pick([pipe for pipe in self.world.live if pipe.to_router], index)
        if pipe is not None:
            for _ in range(min(1 + which % 3, len(pipe.to_router))):
                self.world.to_router(pipe)

    def step(self, index: int, which: int) -> None:
        box = self.world.boxes[index % len(self.world.boxes)]
        for _ in range(1 + which % 3):
            self.world.step(box)
        check_states(box.engine, box.runner)

    def step_and_hear(self, index: int, _: int) -> None:
        self.world.step_and_hear(self.world.boxes[index % len(self.world.boxes)])

    def pull_arrives(self, index: int, _: int) -> None:
        self.pull_ends(index, "arrive")

    def pull_fails(self, index: int, _: int) -> None:
        self.pull_ends(index, "fail")

    def pull_is_given_up(self, index: int, _: int) -> None:
        self.pull_ends(index, "late")

    def pull_ends(self, index: int, how: str) -> None:
        pull = pick(self.pulls(told=False), index)
        if pull is not None:
            self.world.pull_ends(pull[0], pull[1], how)

    def pull_settles(self, index: int, _: int) -> None:
        pull = pick(self.pulls(told=True), index)
        if pull is not None:
            self.world.settle(pull[0], pull[1])

    def again(self, index: int, which: int) -> None:
        """What has failed is begun anew, by one decode worker alone now and then."""
        queued = pick(self.queued(), index)
        if queued is not None:
            self.start(queued[0], queued[1], which % 2, local=which % 3 == 0)

    def start(self, router: Router, request: Request, d: int, local: bool) -> None:
        if self.ds[d] in router.pipes and (local or self.p in router.pipes):
            router.begin(request, None if local else self.p, self.ds[d])

    def time_passes(self, index: int, _: int) -> None:
        self.world.pass_time((0.5, 2.0, 5.0, LEASE_S)[index % 4])

    # --- what goes wrong ---

    def cancel(self, index: int, _: int) -> None:
        busy = pick(self.busy(), index)
        if busy is not None:
            busy[0].cancel(busy[1])

    def ask_for_news(self, index: int, _: int) -> None:
        busy = pick(self.busy(), index)
        if busy is not None:
            busy[0].check(busy[1])

    def renew(self, index: int, _: int) -> None:
        self.router(index).renew()

    def once_more(self, index: int, which: int) -> None:
        """A message that a box got already, or that is on its way, comes again."""
        pipe = pick([pipe for pipe in self.world.live if pipe.sent], index)
        if pipe is not None:
            pipe.to_box.append(pipe.sent[which % len(pipe.sent)])

    def reconnect(self, index: int, which: int) -> None:
        router = self.router(which)
        box = self.world.boxes[index % len(self.world.boxes)]
        self.world.disconnect(router, box)
        self.world.connect(router, box)

    def kill(self, index: int, _: int) -> None:
        """A worker is killed, and a new incarnation takes its place."""
        self.replace([self.p, *self.ds][index % 3])

    def drain(self, index: int, which: int) -> None:
        box = [self.p, *self.ds][index % 3]
        box.roles.drain(self.world.now + which % 4)

    def leave(self, _index: int, _which: int) -> None:
        for box in [box for box in self.world.boxes if box.roles.drained]:
            assert box.decode.num_open == 0
            self.replace(box)

    def lose_router(self, index: int, _: int) -> None:
        self.world.stop_router(self.router(index))
        self.new_router()

    def replace(self, old: Box) -> None:
        self.world.kill(old)
        new = self.new_box(old.card.worker_id)
        if old is self.p:
            self.p = new
        else:
            self.ds[self.ds.index(old)] = new

    # --- what holds ---

    def check(self) -> None:
        self.world.check_integrity()
        for _, request in self.requests():
            right = expected(request)
            assert request.tokens == right[: len(request.tokens)], "text of another prompt"
            assert request.stage != "done" or request.tokens == right, "cut short"

    def teardown(self) -> None:
        for box in list(self.world.boxes):
            if box.roles.state == "draining":
                self.replace(box)
        for turn in range(60):  # seconds: longer than the leases of routers that are gone
            self.world.settle_down()
            self.check()
            if all(request.is_over for _, request in self.requests()):
                break
            self.world.pass_time(1.0)
            for router, request in self.queued():
                router.begin(request, self.p, self.ds[turn % 2])
        assert all(request.is_over for _, request in self.requests()), "a request hangs"
        self.world.settle_down()
        self.world.pass_time(LEASE_S)
        self.world.settle_down()
        self.world.check_ledger()
        for box in self.world.boxes:
            box.check_idle()


TestHandOffs = HandOffs.TestCase
TestHandOffs.settings = settings(max_examples=60, stateful_step_count=15, deadline=None)
