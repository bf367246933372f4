"""A worker in virtual time: the real engine and scheduler, steps timed by a profile (pure).

A step's plan is made when the step begins, and its outputs are told when it ends; in between the
engine is as the step leaves it. While nobody comes or ends in a batch that only decodes, each step
is like the last one: one token for each, from blocks that are there. Such steps are not planned one
by one but booked together (*coasting*), in time and in the engine as if they had been; a newcomer
ends that with the step under way. The step in which somebody ends is planned again.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from math import sqrt

from router.policy import Key as WorkerKey, WorkerView
from services.engine.config import EngineConfig
from services.engine.engine import Engine
from services.engine.scheduler import Output, Plan
from services.engine.sequence import Key, SamplingParams
from services.planner.profile import Profile


class Events:
    """What is to happen, by virtual time; at the same moment in the order in which it was asked."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (when, next(self._number), what))

    def run(self) -> None:
        """Until nothing is left."""
        while self._heap:
            self.now, _, what = heapq.heappop(self._heap)
            what()


class SimWorker:
    """One worker. ``on_outputs`` hears of the tokens of planned steps, when these end."""

    def __init__(
        self,
        key: WorkerKey,
        role: str,
        config: EngineConfig,
        profile: Profile,
        events: Events,
        on_outputs: Callable[[SimWorker, list[Output]], None],
        coasts: bool = True,
    ) -> None:
        self.key = key
        self.role = role
        self.profile = profile
        self.engine = Engine(config, self)
        self.last_turn = -1
        self.calls: dict[Key, int] = {}  # requests that are here or on the way, and their prompts
        self.short = 0  # tokens of prompts of one step that are not computed yet
        self.pending = 0  # of all prompts
        self._events = events
        self._on_outputs = on_outputs
        self._coasts = coasts
        self._step_s = 0.0
        self._computed = 0  # prompt tokens of the step under way
        self._busy = False
        self._coast: _Coast | None = None

    # --- commands ------------------------------------------------------------------------------

    def open(self, key: Key, prompt: int) -> None:
        """A request was sent here; ``prompt``: tokens that it brings to be computed."""
        self.calls[key] = prompt
        self.pending += prompt
        if prompt <= self.engine.config.token_budget:
            self.short += prompt

    def close(self, key: Key) -> None:
        """It is over."""
        prompt = self.calls.pop(key)
        if prompt <= self.engine.config.token_budget:
            self.short -= prompt

    def prefill(self, key: Key, ids: list[int], params: SamplingParams) -> None:
        """Compute a prompt and its first token, and keep the KV if more are to come."""
        self.engine.add(key, ids, len(ids), params, hold=True)
        self._poke()

    def reserve(self, key: Key, ids: list[int]) -> bool:
        """Set blocks aside for a prompt's KV. False when there is no room."""
        self._catch_up()
        reserved = self.engine.reserve(key, ids) is not None
        if self._coast is not None and not self._has_blocks(self._coast.steps_left):
            self._cut()
        return reserved

    def decode(self, key: Key, ids: list[int], num_prompt: int, params: SamplingParams) -> None:
        """The KV of the reservation is here: make the tokens that follow."""
        self._catch_up()
        self.engine.admit(key, ids, num_prompt, params)
        self._poke()

    def release(self, blocks: list[int]) -> None:
        """A lease of blocks is over."""
        self.engine.end_lease(blocks)
        self._poke()

    # --- what is known of it -------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Nothing runs, waits or is leased."""
        counts = self.engine.pool.counts()
        return not self.calls and not counts["active"] and not counts["leased"]

    def view(self, usable: bool) -> WorkerView:
        """As ``router.worker`` has it, were each step reported."""
        config, engine = self.engine.config, self.engine
        return WorkerView(
            key=self.key,
            role=self.role,
            usable=usable,
            kv_blocks=config.kv_blocks,
            block_size=config.block_size,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            token_budget=config.token_budget,
            num_seqs=len(self.calls),
            pending_short=self.short,
            pending_long=max(0, self.pending - self.short),
            free_blocks=engine.pool.num_available - engine.scheduler.num_owed,
            last_turn=self.last_turn,
        )

    def stats(self) -> dict[str, float]:
        """What it tells the planner, as ``services.planner.reports`` makes it."""
        self._catch_up()
        config, scheduler, pool = self.engine.config, self.engine.scheduler, self.engine.pool
        running = len(scheduler.running)
        free = pool.num_available - scheduler.num_owed
        held = pool.counts()["active"] * config.block_size
        return {
            "running": running + len(scheduler.waiting),
            "waiting_tokens": self.pending,
            "computed_prompt_tokens": scheduler.stats.computed_prompt_tokens,
            "cached_prompt_tokens": scheduler.stats.cached_prompt_tokens,
            "kv_use": min(1.0, max(0.0, 1 - free / pool.num_usable)),
            "seqs": config.max_num_seqs,
            "kv_tokens": pool.num_usable * config.block_size,
            "context": held / running if running else 0.0,
        }

    # --- steps ---------------------------------------------------------------------------------

    def run(self, plan: Plan) -> list[int]:
        """See ``services.engine.engine.Runner``: all tokens are alike."""
        decoding = [row for row in plan.rows if row.start >= row.num_prompt]
        prompts = [row for row in plan.rows if row.start < row.num_prompt]
        profile = self.profile
        seconds = [0.0]
        if decoding:
            mean = sum(row.start for row in decoding) / len(decoding)
            seconds.append(profile.decode_s(len(decoding), mean))
        if prompts:
            more = sum(
                profile.prefill_s(len(r.ids), r.start) - profile.prefill_step for r in prompts
            )
            seconds.append(profile.prefill_step + more)
        both = min(profile.prefill_step, profile.decode_step) if len(seconds) > 2 else 0.0
        self._step_s = sum(seconds) - both
        self._computed = sum(max(0, min(row.end, row.num_prompt) - row.start) for row in plan.rows)
        return [0] * len(plan.rows)

    def zero(self, blocks: list[int]) -> None:
        """See ``Runner``."""

    def publish(self, opened: tuple[tuple[int, int], ...], sealed: list[tuple[int, int]]) -> None:
        """See ``Runner``."""

    def _poke(self) -> None:
        """There is something new to schedule: after the step under way."""
        if not self._busy:
            self._go_on()
        elif self._coast is not None:
            self._cut()

    def _go_on(self) -> None:
        """Begin the next step, or many that are alike."""
        now = self._events.now
        steps = self._alike() if self._coasts else 0
        if steps:
            running = self.engine.scheduler.running
            contexts = sum(seq.num_computed for seq in running)
            self._busy = True
            self._coast = coast = _Coast(now, len(running), contexts, steps, self.profile)
            self._events.at(coast.ends_at, lambda: self._end_coast(coast))
            return
        if not self.engine.has_work:
            return
        outputs = self.engine.step(now)
        self._busy = not self.engine.stalled
        if self._busy:
            self._events.at(now + self._step_s, lambda: self._end_step(outputs))

    def _end_step(self, outputs: list[Output]) -> None:
        if self.role == "prefill":
            self.pending -= self._computed
        self._on_outputs(self, outputs)  # who comes now is in the next step
        self._busy = False
        self._go_on()

    def _alike(self) -> int:
        """How many of the next steps only add a token to each sequence."""
        scheduler = self.engine.scheduler
        running = scheduler.running
        if scheduler.waiting or not running or len(running) > scheduler.token_budget:
            return 0
        if any(seq.num_lacking != 1 or seq.num_generated == 0 for seq in running):
            return 0  # prompts, though of a single token
        longest = scheduler.max_model_len
        steps = (
            min(
                min(seq.params.max_tokens - seq.num_generated, longest - seq.num_tokens)
                for seq in running
            )
            - 1
        )
        while steps > 0 and not self._has_blocks(steps):
            steps //= 2
        return max(0, steps)

    def _has_blocks(self, steps: int) -> bool:
        scheduler = self.engine.scheduler
        need = sum(
            scheduler.blocks_for(seq.num_tokens + steps - 1) - len(seq.blocks)
            for seq in scheduler.running
        )
        return need <= self.engine.pool.num_available

    def _catch_up(self) -> None:
        """Book the coasting steps that are over by now."""
        coast = self._coast
        if coast is None:
            return
        over = coast.over_by(self._events.now)
        begun = min(over + 1, coast.steps)  # the one under way has its blocks
        if begun == coast.begun and over == coast.booked:
            return
        steps, ahead = over - coast.booked, begun - coast.booked
        coast.booked, coast.begun = over, begun
        scheduler, pool = self.engine.scheduler, self.engine.pool
        for seq in scheduler.running:
            need = scheduler.blocks_for(seq.num_tokens + ahead - 1) - len(seq.blocks)
            if need > 0:
                blocks = pool.allocate(need)
                assert blocks is not None, "coasting without blocks"
                seq.blocks += blocks
            seq.ids.extend([0] * steps)
            scheduler.adopt(seq, seq.num_computed + steps)
        pool.take_opened()
        scheduler.stats.steps += steps
        scheduler.stats.generated_tokens += steps * len(scheduler.running)

    def _cut(self) -> None:
        """End coasting with the step under way."""
        self._catch_up()
        coast = self._coast
        assert coast is not None
        if coast.booked + 1 < coast.steps:
            coast.steps = coast.booked + 1
            self._events.at(coast.ends_at, lambda: self._end_coast(coast))

    def _end_coast(self, coast: _Coast) -> None:
        if self._coast is not coast or self._events.now < coast.ends_at:
            return  # it was cut, and ended before
        self._catch_up()
        self._coast = None
        self._busy = False
        self._go_on()


class _Coast:
    """``steps`` alike, from ``began`` on, by ``batch`` sequences of so many tokens in all."""

    def __init__(
        self, began: float, batch: int, contexts: int, steps: int, profile: Profile
    ) -> None:
        self.began = began
        self.steps = steps
        self.booked = 0  # of them, how many the engine knows of ...
        self.begun = 0  # ... and for how many it has set blocks aside
        self._first_s = profile.decode_s(batch, contexts / batch)
        self._more_s = batch * profile.decode_pair  # each step is so much longer than the last

    @property
    def steps_left(self) -> int:
        return self.steps - self.booked

    @property
    def ends_at(self) -> float:
        return self.began + self._seconds(self.steps)

    def over_by(self, now: float) -> int:
        """Steps that have ended."""
        if now >= self.ends_at:
            return self.steps
        passed = now - self.began
        first, more = self._first_s, self._more_s
        linear = first - more / 2
        guess = passed / first
        if more > 0:
            guess = (sqrt(linear * linear + 2 * more * passed) - linear) / more
        steps = min(int(guess), self.steps)
        while self._seconds(steps) > passed:
            steps -= 1
        while steps < self.steps and self._seconds(steps + 1) <= passed:
            steps += 1
        return steps

    def _seconds(self, steps: int) -> float:
        return steps * self._first_s + self._more_s * steps * (steps - 1) / 2
