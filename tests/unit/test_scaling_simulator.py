"""The deployment in virtual time: is it exact, does it lose nothing, is the oracle honest?"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from router.config import RouterConfig
from services.engine.config import EngineConfig
from services.engine.scheduler import Output
from services.engine.sequence import SamplingParams
from services.planner.oracle import oracle, plan, play
from services.planner.profile import Profile
from services.planner.scenarios import LAPTOP, WORLD
from services.planner.sim_control import Scheduled
from services.planner.sim_run import Sizes
from services.planner.sim_worker import Events, SimWorker
from services.planner.simulator import Simulation
from services.planner.workload import Arrival, Trace, draw, sine, steps

QUIET = replace(WORLD, start_spread=0.0)


class Worker:
    """One decode worker, told the same things at the same moments whether it coasts or not."""

    def __init__(self, coasts: bool, blocks: int, seed: int) -> None:
        self.events = Events()
        self.tokens: dict[bytes, list[float]] = {}
        self.ended: dict[bytes, float] = {}
        self.refused: list[bytes] = []
        self.seen: list[tuple[float, dict[str, float]]] = []
        self.planned = 0
        config = EngineConfig(
            kv_blocks=blocks, block_size=8, max_model_len=512, max_num_seqs=6, token_budget=64,
            prefix_cache=False,
        )  # fmt: skip
        self.worker = SimWorker(
            ("d", 1), "decode", config, LAPTOP, self.events, self.on_outputs, coasts
        )
        random = Random(seed)
        at = 0.0
        for number in range(60):
            at += random.expovariate(0.8)
            key = b"%d" % number
            prompt, answer = random.randint(4, 60), random.randint(2, 70)
            self.events.at(at, lambda k=key, p=prompt, a=answer: self.come(k, p, a))
            self.events.at(at + random.random() * 3, self.look)

    def come(self, key: bytes, prompt: int, answer: int) -> None:
        ids = [0] * prompt
        if not self.worker.reserve((key, 1), ids):
            self.refused.append(key)
            return
        params = SamplingParams(max_tokens=answer)
        self.worker.open((key, 1), 0)
        self.events.at(
            self.events.now + 0.3,
            lambda: self.worker.decode((key, 1), [*ids, 0], prompt, params),
        )

    def look(self) -> None:
        self.seen.append((self.events.now, self.worker.stats()))
        self.worker.engine.check_integrity()

    def on_outputs(self, worker: SimWorker, outputs: list[Output]) -> None:
        for output in outputs:
            if output.finish:
                self.ended[output.key[0]] = self.events.now
                worker.close(output.key)

    def run(self) -> Worker:
        self.events.run()
        return self


@pytest.mark.parametrize(("blocks", "seed"), [(200, 1), (200, 2), (48, 3), (30, 4), (30, 5)])
def test_coasting_is_exact(blocks: int, seed: int) -> None:
    """Step by step and many steps at once: the same answers end at the same moments, and whoever
    looks in between sees the same numbers, with room for all and with preemptions.
    """
    each, many = Worker(False, blocks, seed).run(), Worker(True, blocks, seed).run()
    assert many.refused == each.refused
    assert many.ended.keys() == each.ended.keys()
    assert len(each.ended) + len(each.refused) == 60
    for key, at in each.ended.items():
        assert many.ended[key] == pytest.approx(at, abs=1e-6)
    for (_, told), (_, same) in zip(each.seen, many.seen, strict=True):
        assert same == pytest.approx(told, abs=1e-6)
    stats, same_stats = (w.worker.engine.scheduler.stats for w in (each, many))
    assert stats == same_stats
    if blocks == 30:
        assert stats.preemptions > 0, "the tight case is not tight"


def test_a_lonely_request_takes_what_the_profile_says() -> None:
    trace = Trace("one", 60.0, (Arrival(5.0, 700, 41),), lambda _: 0.0, lambda _: 0.5)
    found = play(trace, QUIET, {"prefill": [(0.0, 1)], "decode": [(0.0, 1)]})
    (request,) = found.requests
    prompt_s = LAPTOP.prefill_s(512) + LAPTOP.prefill_s(188, 512)
    assert request.ttft_s == pytest.approx(prompt_s)
    steps_s = sum(LAPTOP.decode_s(1, 700 + i) for i in range(40))
    assert request.tpot_s == pytest.approx((QUIET.handoff_s + steps_s) / 40)
    assert found.hours == pytest.approx({"prefill": 1 / 60, "decode": 1 / 60})


def test_a_prompt_whose_last_step_is_of_one_token_is_a_prompt() -> None:
    trace = Trace("one", 60.0, (Arrival(5.0, 513, 4),), lambda _: 0.0, lambda _: 0.5)
    found = play(trace, QUIET, {"prefill": [(0.0, 1)], "decode": [(0.0, 1)]})
    (request,) = found.requests
    assert request.ttft_s == pytest.approx(LAPTOP.prefill_s(512) + LAPTOP.prefill_s(1, 512))


def test_workers_that_leave_lose_nothing() -> None:
    """Down to one and up again, every minute, under load: each request has all of its answer, and
    nobody who leaves takes new work or goes before its last answer.
    """
    trace = draw("drain", 900.0, lambda _: 0.45)
    sizes = [(60.0 * i, 5 if i % 2 else 1) for i in range(15)]
    patient = replace(QUIET, router=RouterConfig(queue_timeout_s=1e5, max_queue=10_000))
    first: Sizes = {"prefill": 1, "decode": 1}
    sim = Simulation(trace, patient, Scheduled({"prefill": sizes, "decode": sizes}), first)
    found = sim.run()
    assert len(found.requests) == len(trace.arrivals) > 300
    assert all(request.last_at is not None for request in found.requests)
    for role, pool in sim.pools.items():
        gone = [place for place in pool.all if place.gone_at is not None]
        assert len(gone) > 20, role
        for place in gone:
            mine = [r for r in found.requests if place in (r.prefill, r.decode)]
            ends = [r.first_at if role == "prefill" else r.last_at for r in mine]
            assert place.gone_at >= max((end for end in ends if end), default=0.0)
            assert not place.worker.engine.has_work
            assert place.worker.engine.pool.num_available == place.worker.engine.pool.num_usable


def test_who_starts_is_stopped_before_who_works() -> None:
    """B113: three more are asked for and called off while they start: nobody drains."""
    trace = draw("early", 120.0, lambda _: 0.2)
    sizes = [(0.0, 2), (20.0, 5), (35.0, 2)]
    sim = Simulation(
        trace, QUIET, Scheduled({"prefill": sizes, "decode": sizes}), {"prefill": 2, "decode": 2}
    )
    found = sim.run()
    for pool in sim.pools.values():
        assert [place.gone_at for place in pool.all] == [None, None, 35.0, 35.0, 35.0]
    assert found.hours["prefill"] == pytest.approx((2 * 120 + 3 * 15) / 3600)


def test_requests_are_held_while_there_is_no_worker() -> None:
    trace = draw("none", 60.0, lambda _: 0.2)
    sizes = [(0.0, 0), (30.0, 2)]
    none: Sizes = {"prefill": 0, "decode": 0}
    sim = Simulation(trace, QUIET, Scheduled({"prefill": sizes, "decode": sizes}), none)
    found = sim.run()
    assert all(request.last_at is not None for request in found.requests)
    assert min(r.first_at for r in found.requests if r.first_at) > 30 + QUIET.start_s


# --- the oracle -----------------------------------------------------------------------------------


def test_the_oracle_meets_the_objectives_and_nobody_does_with_fewer() -> None:
    """Its plan, played back, is good enough; with one worker less in either pool it is not; and
    the plan is not of one size.
    """
    trace = draw("oracle", 1200.0, sine(0.3, 1.2, 1200.0))
    best = oracle(trace, QUIET)
    schedule, found = best.schedule, play(trace, QUIET, best.schedule)
    assert found.hours == best.run.hours
    assert found.ttft >= 0.95
    assert found.tpot >= 0.95
    for role in ("prefill", "decode"):
        sizes = [size for _, size in schedule[role]]
        assert max(sizes) >= 2 * min(sizes)
        fewer = {**schedule, role: [(at, max(1, size - 1)) for at, size in schedule[role]]}
        worse = play(trace, QUIET, fewer)
        assert (worse.ttft if role == "prefill" else worse.tpot) < 0.9


def test_the_oracle_asks_for_workers_before_they_are_wanted() -> None:
    """A load that doubles at ten minutes: they are there by then, and counted from when they
    were asked for.
    """
    trace = draw("step", 1200.0, steps(0.5, 1.1, 600.0))
    schedule = plan(trace, QUIET, 0.95, {"prefill": 1.0, "decode": 1.0})
    found = play(trace, QUIET, schedule)
    before = max(size for at, size in schedule["prefill"] if at < 540)
    at = next(at for at, size in schedule["prefill"] if at >= 540 and size > before)
    assert at == pytest.approx(600 - QUIET.start_s)
    at_once = [r for r in found.requests if 600 <= r.asked.at < 630]
    assert sum(map(found.ttft_good, at_once)) >= 0.9 * len(at_once)


def test_a_faster_profile_needs_fewer_workers() -> None:
    trace = draw("speed", 600.0, lambda _: 0.8)
    half = Profile(*(value / 2 for value in vars(LAPTOP).values()))
    exact = {"prefill": 1.0, "decode": 1.0}
    slow, fast = (
        play(trace, world, plan(trace, world, 0.95, exact)).hours
        for world in (QUIET, replace(QUIET, profile=half))
    )
    for role in ("prefill", "decode"):
        assert fast[role] < 0.7 * slow[role]
