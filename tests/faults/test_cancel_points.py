"""A client goes away at each point of its request's life: both sides are idle at once.

Shows B004, B006 and B007. The request is held exactly at the point, by a gate; its client only
closes its socket; then the gate opens. Idle means: the router knows of no request, nothing runs or
waits at either worker, and no block is active, leased or in quarantine. That must hold within two
engine steps of each side and half a second, although leases last 30 s: nothing may wait for one.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from router import wire
from tests.faults.gates import EngineGate
from tests.faults.rig import (
    CHUNK,
    VOCAB,
    HttpClient,
    Rig,
    completion_body,
    model_folder,
    rig,
    until,
)

TRANSPORTS = ("memory", "tcp", "nixl")
MAX_STEPS = 2
MAX_S = 0.5
PROBE = list(b"The quick brown fox jumps over the lazy dog, and the probe is right.")


@dataclass
class Case:
    """One request that will be cut. ``variant`` counts up, so that each way there is taken."""

    rig: Rig
    random: random.Random
    variant: int
    num_prompt: int = 0
    max_tokens: int = 16
    worker: EngineGate | None = None  # held: its commands must hold the news before it goes on


Hold = Callable[[Case], Callable[[], Awaitable[None]]]
"""Closes the gates for a case; what it returns waits until the request is at the point."""


def num_held(gate: EngineGate, computed: int) -> Callable[[], bool]:
    """Whether the engine is held with a sequence of which so many tokens are computed."""

    def there() -> bool:
        running = gate.engine.scheduler.running
        return gate.reached.is_set() and any(seq.num_computed >= computed for seq in running)

    return there


def queued_at_router(case: Case) -> Callable[[], Awaitable[None]]:
    case.rig.router.hold_queue()
    queue = case.rig.dispatcher.queue
    return lambda: until(lambda: len(queue) == 1, "it is queued at the router")


def queued_at_prefill(case: Case) -> Callable[[], Awaitable[None]]:
    gate = case.rig.prefill
    gate.pause_when(lambda engine: True)
    waiting = gate.engine.scheduler.waiting
    return lambda: until(lambda: gate.reached.is_set() and len(waiting) == 1, "it is queued at P")


def between_chunks(case: Case) -> Callable[[], Awaitable[None]]:
    """Between two steps of the prompt, or inside the second of them."""
    case.num_prompt = case.random.randint(2 * CHUNK + 1, 500)
    done = CHUNK * case.random.randint(1, (case.num_prompt - 1) // CHUNK)
    gate = case.rig.prefill
    if case.variant % 2:
        gate.pause_when(lambda e: any(s.num_computed >= done for s in e.scheduler.running))
    else:
        gate.hold_when(lambda plan: plan.rows[0].start >= done)
        case.worker = gate
    return lambda: until(num_held(gate, done), "a part of the prompt is computed")


def prefilled_not_pulled(case: Case) -> Callable[[], Awaitable[None]]:
    """P's answer is on its way to the router, or the router's Decode has not been seen by D."""
    gates, decode = case.rig.router, case.rig.decode
    gates.hold_message(lambda message: isinstance(message, wire.Prefilled))

    async def reached() -> None:
        await until(lambda: gates.held, "the prompt is computed")
        if case.variant % 2:
            decode.block()
            await until(decode.reached.is_set, "D's engine is held")
            gates.open()
            await until(lambda: decode.num_commands, "Decode is at D")
            case.worker = decode

    return reached


def pull_in_flight(case: Case) -> Callable[[], Awaitable[None]]:
    """Before the read is posted, before it has ended, or before that of the seals has."""
    pulls, prefill = case.rig.pulls, case.rig.prefill
    match case.variant % 3:
        case 0:
            pulls.hold_posts()
            return lambda: until(pulls.posting.is_set, "a read is about to be posted")
        case 1:
            pulls.hold_completions()
            return lambda: until(lambda: pulls.num_posted, "a read is in flight")
        case _:
            pulls.hold_completions(after=1)
            leased = prefill.worker.roles._prefill.exporter

            def seals() -> bool:
                return pulls.num_posted >= 2 and leased.num_leased == 1

            return lambda: until(seals, "the read of the seals is in flight")


def pulled_not_admitted(case: Case) -> Callable[[], Awaitable[None]]:
    """D's engine has not seen yet that the KV is there; the cut is seen after that."""
    pulls, decode, prefill = case.rig.pulls, case.rig.decode, case.rig.prefill
    pulls.hold_completions()

    async def reached() -> None:
        exporter = prefill.worker.roles._prefill.exporter
        await until(lambda: pulls.num_posted and exporter.num_leased, "the pull is in flight")
        decode.block()
        await until(decode.reached.is_set, "D's engine is held")
        if case.variant % 2 == 0:  # else it arrives after the cut: see cut()
            before = decode.num_commands
            pulls.open()
            await until(lambda: decode.num_commands > before, "D's engine is told of the KV")
        case.worker = decode

    return reached


def decoding(case: Case) -> Callable[[], Awaitable[None]]:
    """Between two steps, or inside one."""
    gate, index = case.rig.decode, case.random.randint(1, 12)
    end = case.num_prompt + index
    if case.variant % 2:
        gate.pause_when(lambda e: any(s.num_tokens >= end for s in e.scheduler.running))
    else:
        gate.hold_when(lambda plan: plan.rows[0].end >= end)
        case.worker = gate
    return lambda: until(gate.reached.is_set, "it is decoding")


def last_token(case: Case) -> Callable[[], Awaitable[None]]:
    """D is inside its last step, or the last token is on its way; also where P makes it."""
    gates, decode = case.rig.router, case.rig.decode
    match case.variant % 3:
        case 0:
            end = case.num_prompt + case.max_tokens - 1
            decode.hold_when(lambda plan: plan.rows[0].end >= end)
            case.worker = decode
            return lambda: until(decode.reached.is_set, "D is in the last step")
        case 1:
            gates.hold_message(lambda m: isinstance(m, wire.Tokens) and bool(m.finish))
        case _:
            case.max_tokens = 1
            gates.hold_message(lambda message: isinstance(message, wire.Prefilled))
    return lambda: until(lambda: gates.held, "the last token is on its way to the router")


def any_moment(case: Case) -> Callable[[], Awaitable[None]]:
    """Nothing is held."""
    moment = case.random.uniform(0, 0.08)

    async def reached() -> None:
        await asyncio.sleep(moment)  # the moment is what is being drawn

    return reached


POINTS: tuple[Hold, ...] = (
    queued_at_router,
    queued_at_prefill,
    between_chunks,
    prefilled_not_pulled,
    pull_in_flight,
    pulled_not_admitted,
    decoding,
    last_token,
    any_moment,
)

# Engines that go on while the cut is on its way, so that there is no telling how many steps went
# by: P computes on while an early part is pulled.
NOT_HELD = {pull_in_flight: ("prefill",), any_moment: ("prefill", "decode")}


async def cut_at(point: Hold, case: Case) -> tuple[float, int]:
    """Bring a request to the point and cut it; seconds and steps until all is idle again."""
    deployed = case.rig
    case.num_prompt = case.random.randint(1, 500)
    reached = point(case)
    prompt = [case.random.randrange(VOCAB - 1) for _ in range(case.num_prompt)]
    # Streaming or not, and the way the socket ends, change slower than the ways to be there do.
    stream, reset = bool(case.variant // 3 % 2), bool(case.variant // 6 % 2)
    body = completion_body(prompt, case.max_tokens, stream=stream)
    client = await HttpClient.post(deployed.port, body)
    await reached()
    before, steps, begin = _commands(case), deployed.steps(), time.monotonic()
    client.cut(reset)
    if point is not any_moment:
        await until(lambda: deployed.dispatcher.num_jobs == 0, "the router has dropped it")
        await until(lambda: not case.worker or _commands(case) > before, "the worker is told")
    deployed.open()
    await deployed.until_idle()
    seconds = time.monotonic() - begin
    held = {
        role: now for role, now in deployed.steps().items() if role not in NOT_HELD.get(point, ())
    }
    return seconds, max((now - steps[role] for role, now in held.items()), default=0)


def _commands(case: Case) -> int:
    return case.worker.num_commands if case.worker else 0


async def cut_often(folder: Path, transport: str, count: int) -> dict[str, tuple[float, int]]:
    """Cut ``count`` requests at each point; the worst case of each."""
    worst = {}
    async with rig(folder, transport) as deployed:
        right = await deployed.complete(PROBE, 16)
        await deployed.until_idle()
        for point in POINTS:
            drawn = random.Random(f"{transport} {point.__name__}")
            measured = []
            for variant in range(count):
                seconds, steps = await cut_at(point, Case(deployed, drawn, variant))
                case = f"{point.__name__} over {transport}, variant {variant}: {seconds:.3f} s"
                assert seconds <= MAX_S, case
                assert steps <= MAX_STEPS, f"{case}, {steps} steps"
                measured.append((seconds, steps))
            worst[point.__name__] = (max(s for s, _ in measured), max(n for _, n in measured))
        assert await deployed.complete(PROBE, 16) == right
        await deployed.until_idle()
        for gate in deployed.engines.values():
            counts = gate.engine.pool.counts()
            assert counts["free"] + counts["cached"] == gate.engine.pool.num_usable
    return worst


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_cancel_at_each_point(tmp_path: Path, full: bool, transport: str) -> None:
    worst = asyncio.run(cut_often(model_folder(tmp_path), transport, 200 if full else 6))
    print(f"\nworst of each point over {transport}:")
    for name, (seconds, steps) in worst.items():
        print(f"  {name:<22} {seconds * 1000:6.0f} ms  {steps} steps")
