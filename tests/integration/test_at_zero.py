"""Requests while there is no worker: they wait for one, in bounds, and nothing is left of them."""

from __future__ import annotations

import asyncio
import gc
import json
import time
import weakref
from collections import Counter
from dataclasses import replace
from typing import Any

import psutil
import pytest
from fastapi import FastAPI

from kvtransfer.hashing import unpack_ids
from router import admission, wire
from router.api import create_api
from router.config import RouterConfig, RouterSettings
from router.dispatch import Chunk, Dispatcher, GenRequest
from router.errors import BadRequest, DeadlineExceeded, QueueFull, Unavailable
from router.ledger import Ledger
from router.pools import MANY, Pools, StartFailure, scaling_stats
from router.tokenizer import ByteTokenizer
from tests.integration import deployed as over_http, dispatching
from tests.integration.deployed import deployed
from tests.integration.dispatching import collect, request, run, serving, text
from tests.integration.fake_worker import MODEL, SECRET, Answer, FakeWorker

AT_ZERO = Pools(targets={"prefill": 0, "decode": 0}, reasons={"prefill": "idle", "decode": "idle"})
WAKING = Pools(targets={"prefill": 1, "decode": 1}, reasons={"prefill": "wake", "decode": "wake"})
MIB = 2**20


def sleepers(*names: str) -> tuple[FakeWorker, ...]:
    """Workers that nobody knows of yet: P1 is a prefill worker, D1 a decode worker."""
    roles = {"P": "prefill", "D": "decode"}
    workers = tuple(FakeWorker(roles[name[0]], name) for name in names)
    for worker in workers:
        worker.registered = False
    return workers


def wake(*workers: FakeWorker) -> None:
    for worker in workers:
        worker.registered = True


def ask(dispatcher: Dispatcher, what: GenRequest) -> asyncio.Task[list[Chunk]]:
    return asyncio.create_task(collect(dispatcher, what))


async def held(dispatcher: Dispatcher, number: int) -> None:
    """So many wait."""
    async with asyncio.timeout(10):
        while len(dispatcher.queue) != number:
            await asyncio.sleep(0)


def with_ids(number: int, first: int = 1, max_tokens: int = 5) -> GenRequest:
    """A prompt of so many tokens that begins with ``first``."""
    return replace(request(max_tokens), ids=(first, *[7] * (number - 1)))


# --- they are answered --------------------------------------------------------------------------


def test_the_first_request_waits_for_workers_and_is_answered() -> None:
    async def scenario() -> None:
        p, d = sleepers("P1", "D1")
        async with serving(p, d, ready=False, wakes=True) as dispatcher:
            asked = ask(dispatcher, request(5))
            await held(dispatcher, 1)
            assert dispatcher.state()["requests"]["queued"] == 1
            wake(p)
            await p.until(lambda: p.links)
            assert len(dispatcher.queue) == 1, "half a pair"
            wake(d)
            assert text(await asked) == "01234"
            assert dispatcher.state()["requests"]["finished"] == 1
            # And again: what was there before may be lost, and come back.
            for worker in (p, d):
                worker.report(state="draining")
            async with asyncio.timeout(10):
                while dispatcher.ready:
                    await asyncio.sleep(0.01)
            asked = ask(dispatcher, request(3))
            await held(dispatcher, 1)
            for worker in (p, d):
                worker.report(state="ready")
            assert text(await asked) == "012"

    run(scenario)


def test_they_get_in_in_the_order_of_their_arrival() -> None:
    """Also before one that arrives when the pair has just been proven."""

    async def scenario() -> None:
        p, d = sleepers("P1", "D1")
        async with serving(p, d, ready=False, wakes=True) as dispatcher:
            asked = []
            for number in range(20):
                asked.append(ask(dispatcher, with_ids(4, first=number + 1)))
                await held(dispatcher, number + 1)
            wake(p, d)
            async with asyncio.timeout(10):
                while not dispatcher.ready:
                    await asyncio.sleep(0)
            asked.append(ask(dispatcher, with_ids(4, first=21)))
            await asyncio.gather(*asked)
            prompts = [unpack_ids(m.ids)[0] for m in p.seen if isinstance(m, wire.Prefill)]
            assert prompts == [*range(1, 22)]

    run(scenario)


def test_what_does_not_fit_is_told_when_somebody_knows() -> None:
    async def scenario() -> None:
        p, d = sleepers("P1", "D1")
        async with serving(p, d, ready=False, wakes=True) as dispatcher:
            long, fits = ask(dispatcher, with_ids(512)), ask(dispatcher, with_ids(500))
            everything = ask(dispatcher, request(None))
            await held(dispatcher, 3)
            wake(p, d)
            with pytest.raises(BadRequest, match="maximum context length of 512"):
                await long
            assert text(await fits) == "01234"
            assert text(await everything) == "0123456789"
            assert dispatcher.counters["refused"] == 1
            assert dispatcher.counters["finished"] == 2

    run(scenario)


def test_to_wait_for_a_worker_is_not_to_wait_for_room() -> None:
    """The patience with busy workers begins when there are some, and then it ends."""

    async def scenario() -> None:
        p, d = sleepers("P1", "D1")
        async with serving(p, d, ready=False, wakes=True, queue_timeout_s=0.3) as dispatcher:
            first = ask(dispatcher, with_ids(4))
            await held(dispatcher, 1)
            await asyncio.sleep(0.4)
            second = ask(dispatcher, with_ids(4))
            await held(dispatcher, 2)
            d.gate = asyncio.Event()  # the first one stays at its worker, which has only one seat
            d.load = replace(d.load, running=7)
            wake(p)
            await p.until(lambda: p.links)
            d.gate.set()  # of the proof
            wake(d)
            with pytest.raises(QueueFull, match="busy for too long"):
                await second
            d.gate.set()
            d.gate = None
            assert text(await first) == "01234"

    run(scenario)


def test_a_running_request_waits_for_another_worker() -> None:
    """Past ``comeback_s``, behind its last token, and before those that arrive meanwhile."""

    async def scenario() -> None:
        p, d, other = sleepers("P1", "D1", "D2")
        wake(p, d)
        config = {"comeback_s": 0.05}
        async with serving(p, d, other, wakes=True, **config) as dispatcher:
            d.gate = asyncio.Event()
            asked = ask(dispatcher, request(6))
            await d.until(lambda: "Decode" in d.kinds())
            d.gate.set()
            await asyncio.sleep(0.05)
            d.registered = False
            d.die()
            await held(dispatcher, 1)
            later = ask(dispatcher, request(2))
            await held(dispatcher, 2)
            await asyncio.sleep(0.2)
            assert not asked.done()
            wake(other)
            chunks = await asked
            assert text(chunks) == "012345"
            assert text(await later) == "01"
            assert dispatcher.counters["retries"] == 1

    run(scenario)


# --- they are told ------------------------------------------------------------------------------


def test_after_a_while_they_are_told_what_was_missing() -> None:
    async def scenario() -> None:
        p, d = sleepers("P1", "D1")
        async with serving(p, d, ready=False, wakes=True, wake_timeout_s=0.3) as dispatcher:
            with pytest.raises(Unavailable) as none:
                await collect(dispatcher, request())
            said = "no prefill worker and no decode worker has started; this request has waited"
            assert none.value.message.startswith(f"{said} for 0.3 s")
            assert none.value.rejection == "no_workers"
            assert int(none.value.headers()["retry-after"]) >= 5
            failure = StartFailure("decode", "d", "exception", "/secret/path", 0.0, MANY)
            dispatcher.pools = replace(WAKING, failures=(failure,))
            wake(p)
            await p.until(lambda: p.links)
            with pytest.raises(Unavailable, match="failed to start 3 times in a row") as failing:
                await collect(dispatcher, request())
            assert failing.value.message.startswith("no decode worker has started;")
            assert "secret" not in failing.value.message
            assert dispatcher.counters["refused"] == 2

    run(scenario)


def test_the_deadline_of_a_request_holds() -> None:
    async def scenario() -> None:
        async with serving(ready=False, wakes=True, request_timeout_s=0.1) as dispatcher:
            with pytest.raises(DeadlineExceeded):
                await collect(dispatcher, request())

    run(scenario)


def test_a_router_that_stops_ends_their_wait() -> None:
    async def scenario() -> None:
        async with serving(ready=False, wakes=True) as dispatcher:
            asked = ask(dispatcher, request())
            await held(dispatcher, 1)
            await dispatcher.close()
            with pytest.raises(Unavailable, match="stopping"):
                await asked

    run(scenario)


def test_without_pools_at_zero_nobody_waits() -> None:
    async def scenario() -> None:
        async with serving(ready=False, comeback_s=0.0) as dispatcher:
            with pytest.raises(Unavailable, match="are ready"):
                await collect(dispatcher, request())

    run(scenario)


# --- they are bounded, and leave nothing --------------------------------------------------------


def test_one_too_many_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with serving(ready=False, wakes=True, max_queue=3) as dispatcher:
            asked = [ask(dispatcher, with_ids(6)), ask(dispatcher, with_ids(6))]
            await held(dispatcher, 2)
            with dispatcher.door.place():
                pass
            monkeypatch.setattr(admission, "HELD_TOKENS", 17)
            with pytest.raises(QueueFull):  # there is a place, but not for a prompt of six
                await collect(dispatcher, with_ids(6))
            asked.append(ask(dispatcher, with_ids(5)))
            await held(dispatcher, 3)
            door = dispatcher.door
            for refused in (door.place().__enter__, lambda: door.enter(request())):
                with pytest.raises(QueueFull, match="3 requests wait for workers") as full:
                    refused()
                assert full.value.rejection == "queue_full"
            assert dispatcher.counters["refused"] == 3
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            assert dispatcher.queue.held_tokens == 0

    run(scenario)


def test_those_that_are_being_read_count() -> None:
    """Of those that come at once, no more are tokenized than may wait."""

    async def scenario() -> None:
        async with serving(ready=False, wakes=True, max_queue=2) as dispatcher:
            asked = ask(dispatcher, request())
            await held(dispatcher, 1)
            with dispatcher.door.place(), pytest.raises(QueueFull), dispatcher.door.place():
                pass
            with dispatcher.door.place():
                asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

    run(scenario)


def test_who_leaves_while_held_leaves_nothing() -> None:
    async def scenario() -> None:
        p, d = sleepers("P1", "D1")
        async with serving(p, d, ready=False, wakes=True, wake_timeout_s=3600.0) as dispatcher:
            what = with_ids(100)
            known = weakref.ref(what)
            asked = ask(dispatcher, what)
            del what
            await held(dispatcher, 1)
            assert dispatcher.queue.held_tokens == 100
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            assert (len(dispatcher.queue), dispatcher.num_jobs) == (0, 0)
            assert dispatcher.queue.held_tokens == 0
            assert dispatcher.counters["cancelled"] == 1
            del asked
            await asyncio.sleep(0)
            gc.collect()
            assert known() is None, "a timer of an hour still holds it"
            wake(p, d)
            await dispatching.all_proven(dispatcher)
            assert p.kinds() == d.kinds() == []

    run(scenario)


def test_what_is_asked_is_reported_when_it_arrives() -> None:
    async def scenario() -> None:
        p, d = sleepers("P1", "D1")
        ledger = Ledger()
        async with serving(p, d, ready=False, wakes=True, max_queue=2) as dispatcher:
            asked = [ask(dispatcher, with_ids(n)) for n in (10, 20)]
            await held(dispatcher, 2)
            with pytest.raises(QueueFull):
                await collect(dispatcher, with_ids(3))  # it wanted an answer as well
            await asyncio.sleep(0.05)
            stats = scaling_stats(dispatcher, ledger)
            assert (stats["requests"], stats["prompt_tokens"]) == (3, 33)
            assert stats["prompt_squares"] == 100 + 400 + 9
            assert (stats["queued"], stats["queued_tokens"]) == (2, 30)
            assert 0.04 < stats["oldest_wait_s"] < 10
            assert (stats["answers"], stats["answer_tokens"]) == (0, 0)
            wake(p, d)
            await asyncio.gather(*asked)
            with pytest.raises(BadRequest):
                await collect(dispatcher, with_ids(600))  # no worker could ever do that
            stats = scaling_stats(dispatcher, ledger)
            assert (stats["requests"], stats["prompt_tokens"]) == (3, 33)
            assert (stats["answers"], stats["answer_tokens"]) == (2, 10)
            assert (stats["queued"], stats["queued_tokens"], stats["oldest_wait_s"]) == (0, 0, 0)
            # At zero nobody could say so; but what the last workers could hold is known.
            for worker in (p, d):
                worker.report(state="draining")
            async with asyncio.timeout(10):
                while dispatcher.ready:
                    await asyncio.sleep(0.01)
            long = ask(dispatcher, with_ids(100_000))
            await held(dispatcher, 1)
            assert scaling_stats(dispatcher, ledger)["prompt_tokens"] == 33 + 512
            long.cancel()
            await asyncio.gather(long, return_exceptions=True)

    run(scenario)


# --- over HTTP ----------------------------------------------------------------------------------


def test_a_stream_is_kept_alive_until_there_is_a_worker() -> None:
    async def scenario() -> None:
        config = {"first_token_status_s": 0.05, "keep_alive_s": 0.05}
        async with deployed(wakes=True, **config) as at:
            body = {"prompt": "hello", "max_tokens": 4, "stream": True}
            async with at.http.stream("POST", "/v1/completions", json=body) as response:
                assert response.status_code == 200
                lines = response.aiter_lines()
                comments = [line for line in [await anext(lines) for _ in range(6)] if line]
                assert set(comments) == {": keep-alive"}
                at.wake()
                rest = [line async for line in lines]
            data = [line[6:] for line in rest if line.startswith("data: ")]
            assert data[-1] == "[DONE]"
            said = [json.loads(one)["choices"][0]["text"] for one in data[:-1]]
            assert "".join(said) == "0123"

    over_http.run(scenario)


def test_b115_while_there_is_no_worker_probes_are_quick_and_nothing_hangs() -> None:
    """B115: not ready before anything is known; ready when asleep on purpose, as a request wakes
    workers up; no probe waits for requests that do, and these are told in time.
    """

    async def scenario() -> None:
        async with deployed(wakes=True, wake_timeout_s=2.0) as at:
            assert await ready(at) == (503, {"ready": False})
            at.dispatcher.pools = AT_ZERO
            assert await ready(at) == (200, {"ready": True, "asleep": True})
            assert await ready(at, "?settled=3600") == (200, {"ready": True, "asleep": True})
            began = time.monotonic()
            body = {"prompt": "hello", "max_tokens": 4}
            waiting = [asyncio.create_task(at.post("/v1/completions", body)) for _ in range(40)]
            await held(at.dispatcher, 40)
            for path in ("/health", "/ready", "/internal/state", "/metrics"):
                asked = time.monotonic()
                assert (await at.http.get(path)).status_code == 200, path
                assert time.monotonic() - asked < 0.5, path
            at.dispatcher.pools = WAKING
            assert (await ready(at))[0] == 200
            failure = StartFailure("prefill", "p", "died", "", time.time(), MANY)
            at.dispatcher.pools = replace(WAKING, failures=(failure,))
            assert await ready(at) == (503, {"ready": False})
            for answer in await asyncio.gather(*waiting):
                assert answer.status_code == 503
                assert int(answer.headers["retry-after"]) > 0
                said = answer.json()["error"]["message"]
                assert "prefill workers have failed to start 3 times in a row" in said
            assert time.monotonic() - began < 8
            await at.idle()

    over_http.run(scenario)


async def ready(at: over_http.Deployment, query: str = "") -> tuple[int, dict[str, Any]]:
    answer = await at.http.get(f"/ready{query}")
    assert ("retry-after" in answer.headers) == (answer.status_code == 503)
    return answer.status_code, answer.json()


def test_a_client_that_leaves_while_it_is_held() -> None:
    async def scenario() -> None:
        async with deployed(wakes=True) as at:
            for stream in (False, True):
                body = {"prompt": "hello", "max_tokens": 4, "stream": stream}
                asked = asyncio.create_task(at.post("/v1/completions", body))
                await held(at.dispatcher, 1)
                asked.cancel()
                await held(at.dispatcher, 0)
            async with asyncio.timeout(10):
                while at.dispatcher.num_jobs:
                    await asyncio.sleep(0.01)
            assert at.dispatcher.counters["cancelled"] == 2

    over_http.run(scenario)


PROMPT = "Whoever holds the baton runs. " * 100  # 3 kB


def test_ten_thousand_requests_at_zero(full: bool) -> None:
    """As many as the queue holds wait and are answered; the others are told at once to come back,
    and what that takes is bounded. With ``--full`` there are ten thousand.
    """
    number = 10_000 if full else 2500

    async def scenario() -> None:
        workers = sleepers("P1", "D1", "D2")
        for worker in workers:
            worker.answer = Answer("a baton")
            worker.card = replace(worker.card, max_model_len=8192, kv_blocks=4096, max_num_seqs=64)
            worker.load = replace(worker.load, blocks={**worker.load.blocks, "free": 4095})
            await worker.start()
        config = RouterConfig()
        settings = RouterSettings(config, "", MODEL, "R", SECRET, wakes=True)

        async def discover() -> list[wire.WorkerCard]:
            return [worker.card for worker in workers if worker.registered]

        app = create_api(settings, discover, ByteTokenizer())
        body = json.dumps({"prompt": PROMPT, "max_tokens": 7}).encode()
        async with app.router.lifespan_context(app):
            before = psutil.Process().memory_info().rss
            began = time.monotonic()
            asked = [asyncio.create_task(post(app, body)) for _ in range(number)]
            while sum(one.done() for one in asked) < number - config.max_queue:
                await asyncio.sleep(0.05)
            took = time.monotonic() - began
            await held(app.state.front.dispatcher, config.max_queue)
            refused = [one.result() for one in asked if one.done()]
            grown = psutil.Process().memory_info().rss - before
            print(f"\n{len(refused)} refused in {took:.1f} s, {grown / MIB:.0f} MiB more")
            assert len(refused) == number - config.max_queue
            assert Counter(status for status, _, _ in refused) == {429: len(refused)}
            assert all(int(headers[b"retry-after"]) > 0 for _, headers, _ in refused)
            assert grown < 200 * MIB
            wake(*workers)
            answers = [one for one in await asyncio.gather(*asked) if one[0] != 429]
            assert len(answers) == config.max_queue
            assert {(status, content) for status, _, content in answers} == {(200, "a baton")}
        for worker in workers:
            await worker.stop()

    over_http.run(scenario)


async def post(app: FastAPI, body: bytes) -> tuple[int, dict[bytes, bytes], str]:
    """POST /v1/completions without a socket: status, headers, and the text or what is wrong."""
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": "/v1/completions", "raw_path": b"/v1/completions",
        "query_string": b"", "root_path": "", "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80), "headers": [(b"content-type", b"application/json")],
    }  # fmt: skip
    sent: list[Any] = []
    requested = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if requested:
            return requested.pop()
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    start, *parts = sent
    answer = json.loads(b"".join(part["body"] for part in parts))
    said = answer["choices"][0]["text"] if start["status"] == 200 else answer["error"]["message"]
    return start["status"], dict(start["headers"]), said
