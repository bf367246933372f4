"""A scripted worker that takes its time, and whose prompts say how it shall fail.

A prompt's text begins with a word: one of ``FATES``, or any other for nothing special. Proofs are
answered at once. Durations are those that were measured, as a real worker says them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

from kvtransfer.hashing import unpack_ids
from router import wire
from router.link import Link
from tests.integration.fake_worker import Answer, FakeWorker

FATES = {
    "lose-prefill": "the first attempt fails at P",
    "lose-pull": "the first attempt's KV cannot be fetched",
    "lose-decode": "the first attempt fails at D, after two tokens",
    "doomed": "every attempt fails, wherever it is",
    "stuck": "P never answers",
    "stops": "D sends nothing more after three tokens",
}
STOPS_AFTER = 3


@dataclass
class Pace:
    """How long things take, in seconds; the same for all workers that share it."""

    queue_s: float = 0.0  # at P, before it computes
    prefill_s: float = 0.0
    pull_s: float = 0.0
    admit_s: float = 0.0  # at D, before its first step
    step_s: float = 0.0
    spread: float = 0.0  # prompts differ by up to this share of it, by their length
    failures: Counter[str] = field(default_factory=Counter)  # that were scripted, by fate
    arrived: dict[str, asyncio.Event] = field(default_factory=dict)  # prompts that P has seen

    def reached(self, prompt: str) -> asyncio.Event:
        """Set once P has this prompt."""
        return self.arrived.setdefault(prompt, asyncio.Event())


class PacedWorker(FakeWorker):
    """``pace`` may be changed at any time."""

    def __init__(
        self, role: str, name: str, answer: Answer | None, pace: Pace, **card: object
    ) -> None:
        super().__init__(role, name, answer, **card)
        self._pace = pace

    def _act(self, link: Link, message: wire.Message) -> None:
        if isinstance(message, wire.Prefill | wire.Decode) and message.request not in self._proofs:
            work = self._slowly(link, message)
            self.open[message.request, message.attempt] = asyncio.create_task(work)
        else:
            super()._act(link, message)

    async def _slowly(self, link: Link, message: wire.Prefill | wire.Decode) -> None:
        text = bytes(unpack_ids(message.ids)[: message.num_prompt]).decode()
        fate = text.split()[0]
        if isinstance(message, wire.Prefill):
            self._pace.reached(text).set()
            await self._compute_prompt(link, message, fate)
        else:
            await self._answer_slowly(link, message, fate)

    async def _compute_prompt(self, link: Link, message: wire.Prefill, fate: str) -> None:
        self.queue_ms, self.prefill_ms = await self._prompt_times(message)
        if fate == "stuck":
            await asyncio.Event().wait()
        if fate == "doomed" or (fate == "lose-prefill" and message.attempt == 1):
            self._fail(link, message, fate, "internal")
            return
        self.open.pop((message.request, message.attempt))
        self._prefill(link, message)

    async def _prompt_times(self, message: wire.Prefill | wire.Decode) -> tuple[float, float]:
        """Wait and compute; what both took, in milliseconds."""
        pace, arrived = self._pace, time.monotonic()
        size = 1 + pace.spread * (message.num_prompt % 8) / 8
        await asyncio.sleep(pace.queue_s * size)
        started = time.monotonic()
        await asyncio.sleep(pace.prefill_s * size)
        return (started - arrived) * 1000, (time.monotonic() - started) * 1000

    async def _answer_slowly(self, link: Link, message: wire.Decode, fate: str) -> None:
        name, pace = (message.request, message.attempt), self._pace
        first = message.attempt == 1
        if fate == "doomed":
            self._fail(link, message, fate, "internal")
            return
        if message.ticket:
            await asyncio.sleep(pace.pull_s)
            if fate == "lose-pull" and first:
                self._fail(link, message, fate, "pull")
                return
            link.send(wire.Pulled(*name, num_blocks=1, num_bytes=4096, pull_ms=pace.pull_s * 1000))
            arrived = time.monotonic()
            await asyncio.sleep(pace.admit_s)
            times = [(time.monotonic() - arrived) * 1000, 0.0]
        else:
            times = [*await self._prompt_times(message)]
        await self._tokens(link, message, fate, times)

    async def _tokens(
        self, link: Link, message: wire.Decode, fate: str, times: list[float]
    ) -> None:
        position = len(unpack_ids(message.ids)) - message.num_prompt
        begun = due = time.monotonic()
        finish, sent = "", 0
        while not finish:
            due += self._pace.step_s
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if sent == 0 and message.ticket:
                times[1] = (time.monotonic() - begun) * 1000
            token, finish = self._next(message.sampling, position)
            if finish:
                self.open.pop((message.request, message.attempt))
            said = times if sent == 0 else [0.0, 0.0]
            link.send(
                wire.Tokens(
                    message.request, message.attempt, position, (token,), finish,
                    self.cached_tokens, *said,
                )
            )  # fmt: skip
            position, sent = position + 1, sent + 1
            if fate == "lose-decode" and message.attempt == 1 and sent == 1:
                self._fail(link, message, fate, "internal")
                return
            if fate == "stops" and position == STOPS_AFTER:
                await asyncio.Event().wait()

    def _fail(self, link: Link, message: wire.Prefill | wire.Decode, fate: str, kind: str) -> None:
        self._pace.failures[fate] += 1
        self.open.pop((message.request, message.attempt))
        link.send(wire.Failed(message.request, message.attempt, kind, "as scripted"))
