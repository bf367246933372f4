"""A deployment in virtual time: hours of load in seconds (pure: no clock but its own).

Real are the decision with the signals it is made of, the router's choice and the order of its
queue, and each worker's scheduler and block pool. Modelled are: how long steps take (a profile),
the hand-off and the start of a worker (delays), Serve (starts and drains workers as it is told),
and the way of reports to the planner (late, or lost). The router knows at once what workers have.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from router.admission import WINDOW, Admitted, Waiting, admit, pick
from router.policy import Demand, Pair, View
from services.engine.scheduler import Output
from services.engine.sequence import SamplingParams
from services.planner.signals import COUNTERS
from services.planner.sim_pool import Place, Pool, World
from services.planner.sim_run import ROLES, Request, Run, Sample, Sizes
from services.planner.sim_worker import Events, SimWorker
from services.planner.workload import Arrival, Trace


class Control(Protocol):
    """Who says how many workers there are to be."""

    interval_s: float  # between two decisions

    def decide(self, sim: Simulation) -> Sizes:
        """Workers by role, from now on."""


class Simulation:
    """One deployment under one load."""

    def __init__(self, trace: Trace, world: World, control: Control, initial: Sizes) -> None:
        self.trace = trace
        self.world = world
        self.events = Events()
        self.pools = {
            role: Pool(role, world, self.events, self.on_outputs, self._members_changed)
            for role in ROLES
        }
        self.requests: list[Request] = []
        self.queue: list[Request] = []
        self.queued_kinds = [0, 0]  # of the queue: prompts of more steps than one, and of one
        self.totals = dict.fromkeys(COUNTERS, 0.0)
        self.samples: list[Sample] = []
        self._control = control
        self._turn = 0
        self._usable: list[Place] = []
        self._proven: frozenset[Pair] = frozenset()
        self._known: View | None = None  # what the router knows; None: it has changed
        self._arrivals = iter(trace.arrivals)
        for role, count in initial.items():
            self.pools[role].scale(count, at_once=True)
        self._await_next()
        self.events.at(0.0, self._tick)

    def run(self) -> Run:
        """To the end of the load, and until the last answer."""
        self.events.run()
        hours = {role: pool.hours(self.trace.duration_s) for role, pool in self.pools.items()}
        return Run(self.trace, self.world, self.requests, hours, self.samples)

    # --- the planner's side --------------------------------------------------------------------

    def _tick(self) -> None:
        now = self.events.now
        if now >= self.trace.duration_s:
            return
        for role, target in self._control.decide(self).items():
            if target != self.pools[role].target:
                self.pools[role].scale(target)
        pools = self.pools.items()
        self.samples.append(
            Sample(
                now,
                {role: pool.target for role, pool in pools},
                {role: pool.num_ready for role, pool in pools},
                {role: len(pool.places) for role, pool in pools},
                len(self.queue),
            )
        )
        self.events.at(now + self._control.interval_s, self._tick)

    def router_stats(self) -> dict[str, float]:
        """What the router tells the planner."""
        waiting = self.queue
        return {
            **self.totals,
            "queued": len(waiting),
            "queued_tokens": sum(request.asked.prompt for request in waiting),
            "oldest_wait_s": self.events.now - waiting[0].asked.at if waiting else 0.0,
        }

    # --- the router ----------------------------------------------------------------------------

    def _members_changed(self) -> None:
        """Workers became ready, or are so no longer."""
        ready = {
            role: [place for place in pool.places if place.state == "ready"]
            for role, pool in self.pools.items()
        }
        self._usable = ready["prefill"] + ready["decode"]
        self._proven = frozenset(
            Pair(p.worker.key, d.worker.key) for p in ready["prefill"] for d in ready["decode"]
        )
        self._known = None
        self.serve()

    def _await_next(self) -> None:
        arrival = next(self._arrivals, None)
        if arrival is not None:
            self.events.at(arrival.at, lambda: self._arrive(arrival))

    def _arrive(self, asked: Arrival) -> None:
        self._await_next()
        demand = Demand(asked.prompt, asked.answer)
        request = Request(len(self.requests), asked, demand)
        self.requests.append(request)
        self.totals["requests"] += 1
        self.totals["prompt_tokens"] += asked.prompt
        self.totals["prompt_squares"] += asked.prompt**2
        config = self.world.router
        if len(self.queue) >= config.max_queue:
            self._end(request, "queue_full")
            return
        if self._proven:  # else it is held until there is a pair
            view = replace(self._view(), proven=frozenset([next(iter(self._proven))]))  # all alike
            verdict = admit(asked.prompt, asked.answer, view, len(self.queue), config.max_queue)
            if not isinstance(verdict, Admitted):
                self._end(request, verdict.rejection)
                return
            patience_s = config.queue_timeout_s
        else:
            patience_s = config.wake_timeout_s
        self._enqueue(len(self.queue), request)
        self.serve()
        if request.prefill is None:
            self.events.at(self.events.now + patience_s, lambda: self._give_up(request))

    def _enqueue(self, place: int, request: Request) -> None:
        self.queue.insert(place, request)
        self.queued_kinds[self._is_short(request)] += 1

    def _dequeue(self, request: Request) -> None:
        self.queue.remove(request)
        self.queued_kinds[self._is_short(request)] -= 1

    def _is_short(self, request: Request) -> bool:
        return request.asked.prompt <= self.world.prefill.token_budget

    def _give_up(self, request: Request) -> None:
        if request in self.queue:
            self._dequeue(request)
            self._end(request, "queue_timeout")

    def serve(self) -> None:
        """Something may have become free: give pairs to those who wait."""
        config = self.world.router
        while self.queue and self._may_be_open():
            front = self.queue[: max(WINDOW, config.max_bypass + 1)]
            waiting = [Waiting(request.demand, request.bypassed) for request in front]
            picked = pick(waiting, self._view(), config.max_bypass)
            if picked is None:
                return
            for earlier in picked.bypassed:
                front[earlier].bypassed += 1
            request = front[picked.index]
            self._dequeue(request)
            if not self._grant(request, picked.pair):
                self._enqueue(0, request)
                return

    def _may_be_open(self) -> bool:
        """Whether ``pick`` could find a pair for anyone: it takes long to say no."""
        long, short = self.queued_kinds
        seat = in_turn = False
        for place in self._usable:
            worker = place.worker
            if worker.role == "decode":
                seat = seat or len(worker.calls) < self.world.decode.max_num_seqs
            else:
                most = self.world.router.prefill_ahead * self.world.prefill.token_budget
                in_turn = in_turn or bool(short and worker.short < most)
                in_turn = in_turn or bool(long and worker.pending - worker.short < most)
        return seat and in_turn

    def _view(self) -> View:
        if self._known is None:
            workers = {place.worker.key: place.worker.view(True) for place in self._usable}
            config = self.world.router
            self._known = View(workers, self._proven, config.policy, config.prefill_ahead)
        return self._known

    def _grant(self, request: Request, pair: Pair) -> bool:
        """Reserve at D, compute at P. False: D has no room after all."""
        places = {place.worker.key: place for place in self._usable}
        assert pair.prefill is not None
        prefill, decode = places[pair.prefill], places[pair.decode]
        ids = [0] * request.asked.prompt
        self._known = None
        if not decode.worker.reserve(request.key, ids):
            return False
        request.prefill, request.decode = prefill, decode
        for place in (decode, prefill):
            place.worker.last_turn = self._turn
        self._turn += 1
        decode.worker.open(request.key, 0)
        prefill.worker.open(request.key, len(ids))
        prefill.worker.prefill(request.key, ids, self._params(request))
        return True

    def _params(self, request: Request) -> SamplingParams:
        return SamplingParams(max_tokens=request.asked.answer)

    def on_outputs(self, worker: SimWorker, outputs: list[Output]) -> None:
        """A step has ended."""
        self._known = None
        for output in outputs:
            request = self.requests[int.from_bytes(output.key[0], "little")]
            if output.held:
                self._hand_over(request)
            elif output.finish:
                self._end(request)
        self.serve()

    def _hand_over(self, request: Request) -> None:
        assert request.prefill is not None
        now, prefill = self.events.now, request.prefill.worker
        request.first_at = now
        pairs, _ = prefill.engine.take_held(request.key)
        prefill.close(request.key)
        blocks = [block for block, _ in pairs]
        self.events.at(now + self.world.handoff_s, lambda: self._pulled(request, blocks))

    def _pulled(self, request: Request, blocks: list[int]) -> None:
        prefill, decode = request.prefill, request.decode
        assert prefill is not None
        assert decode is not None
        self._known = None
        prefill.worker.release(blocks)
        self.pools["prefill"].leave_if_done(prefill)
        ids = [0] * (request.asked.prompt + 1)
        num_prompt = request.asked.prompt
        decode.worker.decode(request.key, ids, num_prompt, self._params(request))

    def _end(self, request: Request, failed: str = "") -> None:
        """The last token is there, or it was refused; as the router's ledger judges."""
        config, totals = self.world.router, self.totals
        request.failed = failed
        if failed:
            totals["ttft_bad"] += 1
            return
        request.last_at = self.events.now
        assert request.decode is not None
        request.decode.worker.close(request.key)
        self.pools["decode"].leave_if_done(request.decode)
        totals["answers"] += 1
        totals["answer_tokens"] += request.asked.answer
        ttft_s, tpot_s = request.ttft_s, request.tpot_s
        assert ttft_s is not None
        assert tpot_s is not None
        totals["ttft_good" if ttft_s <= config.slo_ttft_s else "ttft_bad"] += 1
        totals["tpot_good" if tpot_s <= config.slo_tpot_s else "tpot_bad"] += 1
