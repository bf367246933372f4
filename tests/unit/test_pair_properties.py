"""Whole pairs in tight places: tiny pools, many requests, prefixes that come and go, failing pulls,
storms of aborts. Cases of the list of known faults, with their ids.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import pytest

from router import wire
from services.engine.sequence import SamplingParams
from tests.support.fake_runner import naive
from tests.support.scripted_router import Request, Router
from tests.support.scripted_world import World
from tests.support.worker_box import BLOCK, MAX_LEN, Box, decode, prefill, reserve

NEVER = float("inf")


def request(name: int, ids: list[int], max_tokens: int) -> Request:
    return Request(b"%d" % name, ids, wire.Sampling(max_tokens=max_tokens), NEVER)


def check_answer(asked: Request) -> None:
    params = SamplingParams(asked.sampling.max_tokens)
    assert asked.stage == "done", asked
    assert asked.tokens == naive(asked.ids, len(asked.ids), params, MAX_LEN), asked


def serve(
    world: World,
    asked: Iterable[tuple[Router, Request]],
    pairs: list[tuple[Box, Box]],
    concurrency: int,
    patience: int = 200,
) -> int:
    """Begin each request where there is a turn, again when it failed, until all are over. Returns
    the most rounds that went by without an end of one; fails when these are more than patience.
    """
    open_ones: list[tuple[Router, Request]] = []
    todo, longest, still = list(asked)[::-1], 0, 0
    turn = 0
    while todo or open_ones:
        while todo and len(open_ones) < concurrency:
            router, one = todo.pop()
            router.ask(one)
            open_ones.append((router, one))
        for router, one in open_ones:
            if one.stage == "queued":
                turn += 1
                router.begin(one, *pairs[turn % len(pairs)])
        world.move()
        left = [(router, one) for router, one in open_ones if not one.is_over]
        still = 0 if len(left) < len(open_ones) else still + 1
        longest, open_ones = max(longest, still), left
        assert still <= patience, "nobody comes to an end: they wait for each other"
    world.settle_down()
    return longest


@pytest.mark.parametrize("seed", [11])
def test_no_circular_wait(seed: int) -> None:
    """B011: P and D have room for one and a half requests, two routers send 200 of mixed length, 16
    at a time and in any order. All end, soon, and without waiting for a lease.
    """
    random, world = Random(seed), World()
    p, d = world.add_box(Box("p", 1, blocks=7)), world.add_box(Box("d", 2, blocks=9))
    routers = [world.add_router("a"), world.add_router("b")]
    asked = []
    for number in range(200):
        ids = [random.randrange(7) for _ in range(random.randint(1, 14))]
        asked.append((random.choice(routers), request(number, ids, random.randint(1, 6))))
    serve(world, asked, [(p, d)], concurrency=16)
    for _, one in asked:
        check_answer(one)
    for box in (p, d):
        box.check_idle()


@pytest.mark.parametrize("where", ["prefill", "reserve", "decode"])
def test_what_never_fits_is_refused_at_once(where: str) -> None:
    """B012, B013: the pool is smaller than the context. Each length is computed in full or refused
    with the limit, never queued, and never cut down to what fits.
    """
    box = Box("w", blocks=5)  # 16 tokens; the context has 40
    for length in range(1, MAX_LEN + 3):
        ids = [length % 7] * length
        for max_tokens in (2, 9, 60):
            sampling = wire.Sampling(max_tokens=max_tokens)
            if where == "prefill":
                said, room = box.say(prefill(ids, sampling=sampling, export=False)), length + 1
            elif where == "reserve":
                said, room = box.say(reserve(ids)), length + 1
            else:
                said = box.say(decode(ids, sampling=sampling))
                room = max(length + 1, min(length + max_tokens, MAX_LEN))
            said += box.run()
            if room > 4 * BLOCK:
                (refusal,) = said
                assert isinstance(refusal, wire.Refused if where == "reserve" else wire.Failed)
                text = getattr(refusal, "reason", "") or getattr(refusal, "message", "")
                assert "16 tokens" in text or f"context length of {MAX_LEN}" in text
                assert not getattr(refusal, "retry", False)
            else:
                assert not any(isinstance(message, wire.Failed | wire.Refused) for message in said)
            box.say(wire.Abort(b"a", 0))
            box.check_idle()


def test_any_prefix_hit_pulls_the_right_blocks() -> None:
    """B028: 500 hand-offs whose prompts begin as earlier ones did, answers of earlier turns
    included, while other prompts evict what P and D had cached.
    """
    random, world = Random(28), World()
    p, d = world.add_box(Box("p", 1, blocks=17)), world.add_box(Box("d", 2, blocks=15))
    router = world.add_router("r")
    known: list[list[int]] = [[]]
    missing = 0
    for number in range(500):
        before = random.choice(known)
        prefix = before[: random.randint(0, min(len(before), 24))]
        ids = prefix + [random.randrange(7) for _ in range(random.randint(1, 8))]
        one = request(number, ids, random.randint(2, 6))
        serve(world, [(router, one)], [(p, d)], concurrency=1)
        check_answer(one)
        known = [*known[-5:], one.so_far]
        missing += -(-len(ids) // BLOCK)
        if random.random() < 0.2:  # filler: evicts some, on one side only
            box = random.choice([p, d])
            filler = request(1000 + number, [random.randrange(7) for _ in range(30)], 2)
            router.ask(filler)
            router.begin(filler, None, box)
            world.settle_down()
            check_answer(filler)
    pulled = d.decode.stats.num_blocks
    assert 0.2 * missing < pulled < 0.8 * missing, "no hits, or nothing but hits"
    assert p.engine.scheduler.stats.cached_prompt_tokens > 0
    for box in (p, d):
        box.check_idle()


@pytest.mark.parametrize("settled", [True, False])
def test_requests_that_share_a_prefix_whose_pull_failed(settled: bool) -> None:
    """B037: four requests at once begin alike, and every pull of the first attempts brings garbage.
    All four are answered in a second attempt, and a fifth one finds nothing wrong in the cache.
    """
    world = World()
    p, d = world.add_box(Box("p", 1, blocks=33)), world.add_box(Box("d", 2, blocks=33))
    router = world.add_router("r")
    ids = [1, 2, 3, 4, 5, 6, 0, 1, 2, 3]
    four = [request(number, [*ids, number], 5) for number in range(4)]
    for one in four:
        router.ask(one)
        router.begin(one, p, d)
    failed = 0
    while any(one.stage != "queued" for one in four):
        for key in d.puller.keys(told=False):
            world.pull_ends(d, key, "fail" if settled else "late")
            failed += 1
        world.move(pulls=False)
    assert failed >= 4
    assert [sum(one.failures.values()) for one in four] == [1] * 4
    serve(world, [(router, one) for one in four], [(p, d)], concurrency=4)
    fifth = request(5, [*ids, 5], 5)
    serve(world, [(router, fifth)], [(p, d)], concurrency=1)
    for one in (*four, fifth):
        check_answer(one)
    world.check_ledger()
    for box in (p, d):
        box.check_idle()


@pytest.mark.parametrize("how", ["abort", "lost links", "both"])
def test_a_storm_of_aborts_leaves_every_gauge_at_zero(how: str) -> None:
    """B047: 500 requests at two prefill and two decode workers, at all stages, and all of them end
    at once.
    """
    random, world = Random(47), World()
    ps = [world.add_box(Box(f"p{i}", i + 1, blocks=33)) for i in range(2)]
    ds = [world.add_box(Box(f"d{i}", i + 3, blocks=33)) for i in range(2)]
    routers = [world.add_router("a"), world.add_router("b")]
    asked = []
    for number in range(500):
        router, p, d = random.choice(routers), random.choice(ps), random.choice(ds)
        one = request(number, [random.randrange(7) for _ in range(random.randint(1, 12))], 9)
        router.ask(one)
        router.begin(one, p, d)
        asked.append((router, one))
        if number % 3 == 0:
            world.move(pulls=number % 2 == 0)
    if how != "lost links":
        for router, one in asked:
            router.cancel(one)
    if how != "abort":
        for router in routers:
            for box in world.boxes:
                world.disconnect(router, box)
                world.connect(router, box)
    for router, one in asked:
        router.cancel(one)
    world.settle_down()
    world.check_ledger()
    for box in world.boxes:
        load = box.roles.load()
        assert (load.running, load.waiting, load.waiting_tokens, load.tickets) == (0, 0, 0, 0)
        assert {load.blocks[hold] for hold in ("active", "leased", "quarantined")} == {0}
        box.check_idle()
