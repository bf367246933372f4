"""A worker is killed with -9 at each stage of a request: the answer is right, or an error.

P at each stage, with another P alive and with none (then D computes the prompt itself); D at each
stage, with another D alive and with none. "Right" is the token ids of the same request when nobody
dies; tokens are sampled, so that each depends on every logit before it. (B004, B017, B052)
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from router import wire
from tests.faults.fleet import Fleet, fleet
from tests.faults.rig import BIGGER, CHUNK, TINY, VOCAB, Stream, model_folder, until

NUM_TOKENS = 24
NUM_PROMPT = 20 * CHUNK
MAX_LEN = 768
TERMINAL_S = 3.0  # from a kill that cannot be made good to the error


async def hold_all(deployed: Fleet, role: str, name: str, *args: int) -> None:
    for worker in deployed.of(role):
        worker.call(name, *args)


async def any_reached(deployed: Fleet, role: str, what: str = "reached") -> None:
    await until(lambda: any(w.call(what) for w in deployed.of(role)), f"a {role} gate is {what}")


Stage = Callable[[Fleet], Awaitable[Callable[[], Awaitable[None]]]]
"""Closes the gates; what it returns waits until the request is there."""


async def queued(deployed: Fleet) -> Callable[[], Awaitable[None]]:
    await hold_all(deployed, "prefill", "pause")
    return lambda: any_reached(deployed, "prefill")


async def computing(deployed: Fleet) -> Callable[[], Awaitable[None]]:
    await hold_all(deployed, "prefill", "hold", NUM_PROMPT // 2)
    return lambda: any_reached(deployed, "prefill")


async def answer_on_its_way(deployed: Fleet) -> Callable[[], Awaitable[None]]:
    deployed.gate.hold_message(lambda message: isinstance(message, wire.Prefilled))
    return lambda: until(lambda: deployed.gate.held, "the prompt is computed")


async def prefilled_not_pulled(deployed: Fleet) -> Callable[[], Awaitable[None]]:
    await hold_all(deployed, "decode", "hold_posts")

    async def reached() -> None:
        await any_reached(deployed, "decode", "posting")
        await until(lambda: any(job.delivered for job in deployed.jobs), "the first token is there")

    return reached


async def pull_in_flight(deployed: Fleet) -> Callable[[], Awaitable[None]]:
    await hold_all(deployed, "decode", "hold_completions")

    async def reached() -> None:
        await any_reached(deployed, "decode", "num_posted")
        await until(lambda: any(job.delivered for job in deployed.jobs), "the first token is there")

    return reached


async def after_pulled(deployed: Fleet) -> Callable[[], Awaitable[None]]:
    await hold_all(deployed, "decode", "pause", NUM_PROMPT + NUM_TOKENS // 2)
    return lambda: any_reached(deployed, "decode")


async def reserved(deployed: Fleet) -> Callable[[], Awaitable[None]]:
    return await computing(deployed)


P_STAGES = (
    queued,
    computing,
    answer_on_its_way,
    prefilled_not_pulled,
    pull_in_flight,
    after_pulled,
)
D_STAGES = (reserved, prefilled_not_pulled, pull_in_flight, after_pulled)


def stages_of(stages: tuple[Stage, ...], others: int, rounds: int) -> list[Stage]:
    """All of them, so often; in the short form, with nobody else alive, every second one."""
    return list(stages[::2] if rounds == 1 and not others else stages * rounds)


def prompt_of(drawn: random.Random) -> list[int]:
    return [drawn.randrange(VOCAB - 1) for _ in range(NUM_PROMPT)]


def notice(turn: int, stages: tuple[Stage, ...]) -> bool:
    """Whether the router notices before things go on: by turns, the other way round each round."""
    return bool((turn + turn // len(stages)) % 2)


def open_all(deployed: Fleet) -> None:
    deployed.gate.open()
    for worker in deployed.workers:
        if worker.alive:
            worker.call("open")


async def kill_at(
    deployed: Fleet, stage: Stage, side: str, prompt: list[int], notice: bool
) -> Stream:
    """Bring a stream to a stage, kill that side's worker, and let everything go on: at once, or
    when the router has noticed.
    """
    reached = await stage(deployed)
    stream = await Stream.post(deployed.port, prompt, NUM_TOKENS)
    await reached()
    victim = deployed.serving(side) if stage is not after_pulled or side == "decode" else None
    victim = victim or deployed.of("prefill")[0]  # after Pulled, no P belongs to the request
    victim.kill()
    if notice:
        record = deployed.record(victim)
        await until(lambda: record.state == "dead", "the router sees that it is gone")
    open_all(deployed)
    return stream


async def undisturbed(deployed: Fleet, prompt: list[int]) -> tuple[list[int], float]:
    """Token ids and TTFT; with a salt, so that nothing of it is in a cache afterwards."""
    stream = await Stream.post(deployed.port, prompt, NUM_TOKENS, cache_salt="undisturbed")
    await stream.end()
    assert len(stream.ids) == NUM_TOKENS
    return stream.ids, stream.first_token - stream.posted


async def kill_prefill(folder: Path, transport: str, others: int, rounds: int) -> None:
    drawn = random.Random(f"{transport} {others}")
    async with fleet(folder, transport, prefill=1 + others, max_model_len=MAX_LEN) as deployed:
        for turn, stage in enumerate(stages_of(P_STAGES, others, rounds)):
            prompt = prompt_of(drawn)
            right, ttft = await undisturbed(deployed, prompt)
            await deployed.until_idle()
            recomputed = computed_by(deployed, "decode")
            held = time.monotonic()
            stream = await kill_at(deployed, stage, "prefill", prompt, notice(turn, P_STAGES))
            released = time.monotonic()
            await stream.end()
            assert stream.error is None, f"{stage.__name__}: {stream.error}"
            assert stream.ids == right, stage.__name__
            if not others and stage is not after_pulled:
                assert computed_by(deployed, "decode") - recomputed >= NUM_PROMPT, "not by D"
            grown = max(0.0, stream.first_token - released)
            print(
                f"  {stage.__name__:<22} {transport}, {others} other P: TTFT {ttft * 1000:.0f} ms,"
                f" {grown * 1000:.0f} ms of it after the kill ({(released - held) * 1000:.0f} held)"
            )
            # Promised is the prefill's own time and a second. What is printed is to be read on an
            # idle machine; the limit here also holds where both measurements are disturbed.
            assert grown < 3 * ttft + 3, f"{stage.__name__}: {grown:.2f} s after the kill"
            await deployed.restore()


def computed_by(deployed: Fleet, role: str) -> int:
    """Prompt tokens that the workers of a role have computed."""
    return sum(worker.call("computed") for worker in deployed.of(role))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("transport", "others"), [("tcp", 1), ("nixl", 0), ("nixl", 1), ("tcp", 0)]
)
def test_prefill_worker_dies(tmp_path: Path, full: bool, transport: str, others: int) -> None:
    """In full with a model whose prefill takes long enough for the time to be worth a look."""
    if not full and (transport, others) in (("nixl", 1), ("tcp", 0)):
        pytest.skip("only in the full form")
    shape = BIGGER if full else TINY
    folder = model_folder(tmp_path, replace(shape, max_model_len=MAX_LEN))
    asyncio.run(kill_prefill(folder, transport, others, 5 if full else 1))


async def kill_decode(folder: Path, transport: str, others: int, rounds: int) -> None:
    drawn = random.Random(f"{transport} {others}")
    async with fleet(folder, transport, decode=1 + others, max_model_len=MAX_LEN) as deployed:
        for turn, stage in enumerate(stages_of(D_STAGES, others, rounds)):
            prompt = prompt_of(drawn)
            right, _ = await undisturbed(deployed, prompt)
            await deployed.until_idle()
            stream = await kill_at(deployed, stage, "decode", prompt, notice(turn, D_STAGES))
            killed = time.monotonic()
            await stream.end()
            if others:
                assert stream.error is None, f"{stage.__name__}: {stream.error}"
                assert stream.ids == right, stage.__name__
            else:
                assert stream.error is not None, stage.__name__
                assert stream.ids == right[: len(stream.ids)], stage.__name__
                assert stream.ended - killed < TERMINAL_S, stage.__name__
            await deployed.until_idle(2.0)  # P's lease is 30 s: it was released
            await deployed.restore()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("transport", "others"), [("nixl", 1), ("tcp", 0), ("tcp", 1), ("nixl", 0)]
)
def test_decode_worker_dies(tmp_path: Path, full: bool, transport: str, others: int) -> None:
    if not full and (transport, others) in (("tcp", 1), ("nixl", 0)):
        pytest.skip("only in the full form")
    folder = model_folder(tmp_path, replace(TINY, max_model_len=MAX_LEN))
    asyncio.run(kill_decode(folder, transport, others, 5 if full else 1))
