"""Disaggregated answers equal a mixed engine's where other servers were seen to differ.

Lengths around a block (B026), partial and full prefix hits (B028, B029), damaged transfers (B031,
B037), seeds among neighbours (B092); and the work is done where it should be (B042). The reference
is one mixed worker without a prefix cache; tokens are sampled, so that each depends on all logits.
"""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from tests.faults.rig import VOCAB, Rig, Stream, model_folder, rig

NUM_TOKENS = 8


def random_ids(drawn: random.Random, count: int) -> list[int]:
    return [drawn.randrange(VOCAB - 1) for _ in range(count)]


async def references(
    folder: Path, asked: list[list[int]], num_tokens: int = NUM_TOKENS, **options: Any
) -> list[list[int]]:
    """The answers of one mixed worker, each prompt alone."""
    roles = {"prefill": 0, "decode": 0, "mixed": 1}
    async with rig(folder, "auto", prefix_cache=False, **roles) as mixed:
        return [await mixed.complete(prompt, num_tokens, **options) for prompt in asked]


def computed(deployed: Rig, role: str) -> int:
    return deployed.engines[role].engine.scheduler.stats.computed_prompt_tokens


async def lengths(folder: Path, block_size: int, counts: list[int]) -> None:
    drawn = random.Random(26)
    asked = [random_ids(drawn, count) for count in counts]
    right = await references(folder, asked)
    sizes = {"block_size": block_size, "kv_blocks": 3200 // block_size}
    async with rig(folder, "tcp", prefix_cache=False, **sizes) as deployed:
        before = {role: computed(deployed, role) for role in deployed.engines}
        for prompt, answer in zip(asked, right, strict=True):
            assert await deployed.complete(prompt, NUM_TOKENS) == answer, len(prompt)
        done = {role: computed(deployed, role) - before[role] for role in deployed.engines}
        assert done == {"prefill": sum(counts), "decode": 0}


@pytest.mark.parametrize("block_size", [16, 256])
def test_lengths_around_a_block(tmp_path: Path, full: bool, block_size: int) -> None:
    """B026, B042: every length up to two blocks and one; all of it is computed at P."""
    every = list(range(1, 2 * block_size + 2))
    near = [1, 2, *(n + d for n in (block_size, 2 * block_size) for d in (-1, 0, 1))]
    counts = every if full or block_size == 16 else near
    asyncio.run(lengths(model_folder(tmp_path), block_size, counts))


async def partial_hits(folder: Path, rounds: int) -> None:
    drawn = random.Random(28)
    stems = [random_ids(drawn, 200) for _ in range(4)]
    asked: list[list[int]] = []
    for _ in range(rounds):
        stem = drawn.choice(stems)[
            : drawn.choice([16 * drawn.randint(0, 12), drawn.randint(1, 200)])
        ]
        asked.append([*stem, *random_ids(drawn, drawn.randint(1, 40))])
    right = await references(folder, asked)
    sizes = {"max_model_len": 256, "kv_blocks": 40}  # so small that the stems evict each other
    async with rig(folder, "tcp", **sizes) as deployed:
        for prompt, answer in zip(asked, right, strict=True):
            assert await deployed.complete(prompt, NUM_TOKENS) == answer
            if drawn.random() < 0.3:  # the next turn of a conversation: the answer is in the cache
                turn = [*prompt, *answer, *random_ids(drawn, 3)]
                (expected,) = await references(folder, [turn])
                assert await deployed.complete(turn, NUM_TOKENS) == expected
        for gate in deployed.engines.values():
            assert gate.engine.scheduler.stats.cached_prompt_tokens or gate is deployed.decode
        await deployed.until_idle()


@pytest.mark.timeout(900)
def test_partial_prefix_hits(tmp_path: Path, full: bool) -> None:
    """B028: any prefix may be in either cache, whole or in part, or just evicted."""
    asyncio.run(partial_hits(model_folder(tmp_path), 500 if full else 25))


async def full_hits(folder: Path) -> None:
    words = list(b"again and ") * 60
    asked = [[*words[: count - 1], 33] for count in (1, 2, 15, 16, 17, 127, 128, 512)]
    right = await references(folder, asked, 32)
    async with rig(folder, "memory") as deployed:
        for _ in range(3):
            for prompt, answer in zip(asked, right, strict=True):
                assert await deployed.complete(prompt, 32) == answer, len(prompt)


def test_full_prefix_hits(tmp_path: Path) -> None:
    """B029: a prompt that is cached as a whole still gets its logits computed."""
    asyncio.run(full_hits(model_folder(tmp_path)))


async def damage(folder: Path, transport: str, rounds: int) -> None:
    drawn = random.Random(31)
    stem = random_ids(drawn, 100)  # shared: a damaged block of it must not stay in a cache
    asked = [[*stem, *random_ids(drawn, 20)] for _ in range(10)]
    right = await references(folder, asked)
    settings = {"checksums": True, "pull_faults": "corrupt=0.1,seed=31"}
    async with rig(folder, transport, **settings) as deployed:
        injected, stats = deployed.injected, deployed.decode.worker.roles._decode.stats
        turn = 0
        while turn < rounds or injected.counts["corrupt"] <= 2:
            turn += 1
            some = [drawn.randrange(len(asked)) for _ in range(5)]
            streams = [
                await Stream.post(deployed.port, asked[i], NUM_TOKENS, cache_salt=f"{turn}")
                for i in some
            ]
            for index, stream in zip(some, streams, strict=True):
                await stream.end()
                assert (stream.error, stream.ids) == (None, right[index])
        await deployed.until_idle()
        damaged = injected.counts["corrupt"]  # reads; a pull has two, and may be hit twice
        assert damaged / 2 <= stats.failed + stats.failed_parts <= damaged


@pytest.mark.parametrize("transport", ["memory", "tcp", "nixl"])
def test_damaged_transfers(tmp_path: Path, full: bool, transport: str) -> None:
    """B031, B037: a tenth of the reads is damaged, shared prefixes too: noticed, and done anew."""
    asyncio.run(damage(model_folder(tmp_path), transport, 10 if full else 4))


async def seeds(folder: Path) -> None:
    drawn = random.Random(92)
    prompt = random_ids(drawn, 50)
    (right,) = await references(folder, [prompt], seed=42, temperature=0.8)
    async with rig(folder, "memory") as deployed:

        async def neighbour(seed: int | None) -> None:
            await deployed.complete(random_ids(drawn, 20), 20, seed=seed)

        for turn in range(20):
            others = [neighbour(seed) for seed in (None, 7, 42)[: turn % 4]]
            answer, *_ = await asyncio.gather(
                deployed.complete(prompt, NUM_TOKENS, seed=42, temperature=0.8), *others
            )
            assert answer == right


def test_seeds_among_neighbours(tmp_path: Path) -> None:
    """B092: a seed means the same alone and beside seeded and unseeded requests."""
    asyncio.run(seeds(model_folder(tmp_path)))


async def first_tokens(folder: Path) -> None:
    drawn = random.Random(14)
    prompt = random_ids(drawn, 40)
    roles = {"prefill": 0, "decode": 0, "mixed": 1}
    async with rig(folder, "auto", **roles) as mixed, rig(folder, "tcp") as deployed:
        (first, *_) = right = await mixed.complete(prompt, 16)
        for num_tokens in (1, 2, 3, 16):
            assert await deployed.complete(prompt, num_tokens) == right[:num_tokens]
            stream = await Stream.post(deployed.port, prompt, num_tokens)
            await stream.end()
            assert (stream.ids, stream.finish) == (right[:num_tokens], "length")
        await deployed.until_idle()
        before = deployed.steps()["decode"]
        stop = {"stop_token_ids": [first]}
        for options in ({}, {"min_tokens": 3}):
            answers = []
            for port in (mixed.port, deployed.port):
                stream = await Stream.post(port, prompt, 16, **stop, **options)
                await stream.end()
                answers.append((stream.ids, stream.finish))
            assert answers[0] == answers[1]
            assert answers[1][1] == "stop" or len(answers[1][0]) == 16
            assert len(answers[1][0]) >= options.get("min_tokens", 0)
            if not options:
                await deployed.until_idle()
                assert deployed.steps()["decode"] == before, "D was asked to go on behind a stop"
        await deployed.until_idle()


def test_the_first_token_decides(tmp_path: Path) -> None:
    """B014, B015: P makes it; its count, its stop and min_tokens hold as on one engine."""
    asyncio.run(first_tokens(model_folder(tmp_path)))
