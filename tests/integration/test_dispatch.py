"""The life of a request between router and workers, over real sockets with scripted workers."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvtransfer.hashing import unpack_ids
from router import wire, worker as worker_module
from router.dispatch import Chunk
from router.errors import (
    BadRequest,
    DeadlineExceeded,
    QueueFull,
    Unavailable,
)
from router.link import Link
from tests.integration.dispatching import (
    PROMPT,
    all_proven,
    collect,
    request,
    run,
    serving,
    text,
)
from tests.integration.fake_worker import EOS, LAYOUT, Answer, FakeWorker


def test_the_conversation_in_order() -> None:
    async def scenario() -> None:
        p, d = FakeWorker("prefill", "P"), FakeWorker("decode", "D")
        p.cached_tokens = 16
        d.cached_tokens = 99  # D's is not what the client is told
        async with serving(p, d) as dispatcher:
            chunks = await collect(dispatcher, request(5))
            assert text(chunks) == "01234"
            assert [len(chunk.ids) for chunk in chunks] == [1] * 5
            assert [chunk.finish for chunk in chunks] == ["", "", "", "", "length"]
            assert chunks[0].cached_tokens == 16
            await p.until(lambda: "Release" in p.kinds())
            assert p.kinds() == ["Prefill", "Release"]
            assert d.kinds() == ["Reserve", "Decode"]  # Peer was sent with the proof
            prefill, decode = p.seen[0], d.seen[1]
            assert isinstance(prefill, wire.Prefill)
            assert isinstance(decode, wire.Decode)
            assert unpack_ids(prefill.ids) == list(PROMPT)
            assert prefill.sampling == decode.sampling
            assert prefill.sampling.max_tokens == 5
            assert prefill.sampling.seed == 7
            assert unpack_ids(decode.ids) == [*PROMPT, ord("0")]
            assert decode.num_prompt == len(PROMPT)
            assert decode.ticket
            assert 0 < decode.deadline_ms <= 600_000
            assert p.idle
            assert d.idle

    run(scenario)


def test_one_token_does_not_touch_d() -> None:
    async def scenario() -> None:
        p, d = FakeWorker("prefill", "P"), FakeWorker("decode", "D")
        async with serving(p, d) as dispatcher:
            chunks = await collect(dispatcher, request(1))
            assert text(chunks) == "0"
            assert chunks[-1].finish == "length"
            assert d.seen == []
            (prefill,) = p.seen
            assert isinstance(prefill, wire.Prefill)
            assert not prefill.export

    run(scenario)


def test_first_token_ends_the_answer() -> None:
    async def scenario() -> None:
        p = FakeWorker("prefill", "P", Answer(""))
        d = FakeWorker("decode", "D")
        async with serving(p, d) as dispatcher:
            chunks = await collect(dispatcher, request(5))
            assert chunks == [Chunk((EOS,), "stop", 0)]
            await d.until(lambda: "Abort" in d.kinds())
            assert p.idle
            assert d.idle

    run(scenario)


def test_mixed_worker_alone() -> None:
    async def scenario() -> None:
        m = FakeWorker("mixed", "M")
        async with serving(m) as dispatcher:
            chunks = await collect(dispatcher, request(None))
            assert text(chunks) == "0123456789"
            assert chunks[-1].finish == "stop"
            (decode,) = m.seen
            assert isinstance(decode, wire.Decode)
            assert decode.ticket == b""
            assert decode.sampling.max_tokens == 512 - len(PROMPT)

    run(scenario)


def test_unknown_peer_gets_the_card_again() -> None:
    async def scenario() -> None:
        p, d = FakeWorker("prefill", "P"), FakeWorker("decode", "D")
        async with serving(p, d) as dispatcher:
            d.forgets_peers = True
            assert text(await collect(dispatcher, request(5))) == "01234"
            assert d.kinds() == ["Reserve", "Decode", "Peer", "Decode"]

    run(scenario)


STAGES = ["Reserve", "Prefill", "Decode"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["cancel", "close"])
def test_cancel_at_each_stage_leaves_nothing(stage: str, how: str) -> None:
    """Each worker swallows its message, so the request stands still just there."""

    async def scenario() -> None:
        p, d = FakeWorker("prefill", "P"), FakeWorker("decode", "D")
        where = p if stage == "Prefill" else d
        async with serving(p, d) as dispatcher:

            def swallow(link: Link, message: wire.Message) -> bool:
                if type(message).__name__ != stage:
                    return False
                where.open[message.request, message.attempt] = None  # type: ignore[union-attr]
                return True

            where.hook = swallow
            answer = dispatcher.generate(request(5))
            if stage == "Decode":
                assert (await anext(answer)).ids == (ord("0"),)
            if how == "close" and stage == "Decode":
                await where.until(lambda: stage in where.kinds())
                await answer.aclose()
            else:
                task = asyncio.ensure_future(anext(answer))
                await where.until(lambda: stage in where.kinds())
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            await where.until(lambda: "Abort" in where.kinds())
            await d.until(lambda: d.idle)
            await p.until(lambda: p.idle)
            assert dispatcher.num_jobs == 0
            where.hook = None
            assert text(await collect(dispatcher, request(3))) == "012"

    run(scenario)


def test_closing_in_mid_stream_aborts_d() -> None:
    async def scenario() -> None:
        p, d = FakeWorker("prefill", "P"), FakeWorker("decode", "D")
        d.answer = p.answer = Answer("x" * 400)
        async with serving(p, d) as dispatcher:
            answer = dispatcher.generate(request(400))
            for _ in range(3):
                await anext(answer)
            await answer.aclose()
            await d.until(lambda: d.idle)
            assert d.kinds()[-1] == "Abort"
            await p.until(lambda: p.idle)
            assert p.kinds() == ["Prefill", "Release"]

    run(scenario)


def test_a_prefilled_that_crosses_the_abort_is_released() -> None:
    async def scenario() -> None:
        p, d = FakeWorker("prefill", "P"), FakeWorker("decode", "D")
        held: list[tuple[Link, wire.Prefill]] = []
        async with serving(p, d) as dispatcher:

            def hold(link: Link, message: wire.Message) -> bool:
                if isinstance(message, wire.Prefill):
                    held.append((link, message))
                return isinstance(message, wire.Prefill | wire.Abort)

            p.hook = hold
            task = asyncio.ensure_future(anext(dispatcher.generate(request(5))))
            await p.until(lambda: held)
            task.cancel()
            await p.until(lambda: "Abort" in p.kinds())
            p._prefill(*held[0])
            await p.until(lambda: "Release" in p.kinds())
            assert p.idle

    run(scenario)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_failed_attempt_goes_to_another_worker(side: str) -> None:
    async def scenario() -> None:
        ps = [FakeWorker("prefill", f"P{i}") for i in range(2)]
        ds = [FakeWorker("decode", f"D{i}") for i in range(2)]
        failed: list[str] = []
        async with serving(*ps, *ds, policy="round-robin") as dispatcher:

            def fail(link: Link, message: wire.Message) -> bool:
                kind = wire.Prefill if side == "prefill" else wire.Decode
                if isinstance(message, kind) and not failed:
                    failed.append(type(message).__name__)
                    if isinstance(message, wire.Decode):
                        link.send(wire.Pulled(message.request, message.attempt, 1, 1, 1.0))
                        link.send(wire.Tokens(message.request, message.attempt, 1, (ord("1"),)))
                    link.send(wire.Failed(message.request, message.attempt, "internal", "boom"))
                    for worker in (*ps, *ds):
                        worker.open.pop((message.request, message.attempt), None)
                    return True
                return False

            for worker in (*ps, *ds):
                worker.hook = fail
            chunks = await collect(dispatcher, request(5))
            assert text(chunks) == "01234"
            assert failed
            pool = ps if side == "prefill" else ds
            first = [len([k for k in w.kinds() if k in ("Prefill", "Decode")]) for w in pool]
            assert sorted(first) == [1, 1]  # never the same one again
            if side == "decode":
                again = [m for w in ps for m in w.seen if isinstance(m, wire.Prefill)]
                ids = sorted(len(unpack_ids(m.ids)) for m in again)
                assert ids == [len(PROMPT), len(PROMPT) + 2]  # with the tokens delivered
            for worker in (*ps, *ds):
                await worker.until(lambda worker=worker: worker.idle)
            assert dispatcher.counters["retries"] == 1

    run(scenario)


def test_a_worker_that_dies_in_mid_stream() -> None:
    async def scenario() -> None:
        p = FakeWorker("prefill", "P")
        ds = [FakeWorker("decode", f"D{i}") for i in range(2)]
        async with serving(p, *ds) as dispatcher:
            for d in ds:
                d.gate = asyncio.Event()
            answer = dispatcher.generate(request(5))
            chunks = [await anext(answer)]
            (busy,) = [d for d in ds if d.seen]
            busy.gate.set()
            chunks.append(await anext(answer))
            await busy.stop()
            (other,) = [d for d in ds if d is not busy]
            other.gate = None
            for d in ds:
                d.gate = None
            chunks += [chunk async for chunk in answer]
            assert text(chunks) == "01234"
            assert other.kinds() == ["Reserve", "Decode"]
            await p.until(lambda: p.idle)

    run(scenario)


def test_a_failed_pull_without_another_p_is_recomputed_by_d() -> None:
    async def scenario() -> None:
        p, d = FakeWorker("prefill", "P"), FakeWorker("decode", "D")
        async with serving(p, d) as dispatcher:

            def fail(link: Link, message: wire.Message) -> bool:
                if isinstance(message, wire.Decode) and message.ticket:
                    d.open.pop((message.request, message.attempt))
                    link.send(wire.Failed(message.request, message.attempt, "pull", "stale"))
                    return True
                return False

            d.hook = fail
            assert text(await collect(dispatcher, request(5))) == "01234"
            last = d.seen[-1]
            assert isinstance(last, wire.Decode)
            assert last.ticket == b""
            assert unpack_ids(last.ids) == [*PROMPT, ord("0")]
            await p.until(lambda: p.idle)

    run(scenario)


@pytest.mark.parametrize("kind", ["gap", "repeat"])
def test_a_gap_fails_the_attempt(kind: str) -> None:
    async def scenario() -> None:
        p, d = FakeWorker("prefill", "P"), FakeWorker("decode", "D")
        index = 2 if kind == "gap" else 0
        async with serving(p, d) as dispatcher:

            def skip(link: Link, message: wire.Message) -> bool:
                if isinstance(message, wire.Decode):
                    link.send(wire.Tokens(message.request, message.attempt, index, (1,)))
                    return True
                return False

            d.hook = skip
            with pytest.raises(Unavailable, match=r"tokens from|no worker is left"):
                await collect(dispatcher, request(5))
            await d.until(lambda: "Abort" in d.kinds())
            assert dispatcher.num_jobs == 0

    run(scenario)


def test_what_the_worker_calls_invalid_is_the_clients_mistake() -> None:
    async def scenario() -> None:
        p, d = FakeWorker("prefill", "P"), FakeWorker("decode", "D")
        async with serving(p, d) as dispatcher:

            def refuse(link: Link, message: wire.Message) -> bool:
                if isinstance(message, wire.Prefill):
                    link.send(wire.Failed(message.request, message.attempt, "invalid", "odd"))
                return isinstance(message, wire.Prefill)

            p.hook = refuse
            with pytest.raises(BadRequest, match="odd"):
                await collect(dispatcher, request(5))
            await d.until(lambda: d.idle)
            assert p.kinds() == ["Prefill"]  # no retry
            p.hook = None
            assert text(await collect(dispatcher, request(2))) == "01"

    run(scenario)


def test_refused_goes_back_to_the_queue() -> None:
    async def scenario() -> None:
        p, d = FakeWorker("prefill", "P"), FakeWorker("decode", "D")
        refusals: list[wire.Message] = []
        async with serving(p, d) as dispatcher:

            def refuse(link: Link, message: wire.Message) -> bool:
                if isinstance(message, wire.Reserve) and len(refusals) < 3:
                    refusals.append(message)
                    link.send(wire.Refused(message.request, message.attempt, "full", True))
                    return True
                return False

            d.hook = refuse
            task = asyncio.ensure_future(collect(dispatcher, request(5)))
            for count in range(1, 4):
                await d.until(lambda count=count: len(refusals) == count)
                d.report(steps=count)  # only news from D makes the router try again
            assert text(await task) == "01234"
            await p.until(lambda: p.idle)
            assert p.kinds() == ["Prefill", "Release"]

    run(scenario)


def test_never_fits() -> None:
    async def scenario() -> None:
        p = FakeWorker("prefill", "P", max_model_len=4096)
        d = FakeWorker("decode", "D", max_model_len=100)
        async with serving(p, d) as dispatcher:
            long = replace(request(5), ids=tuple(range(100)))
            with pytest.raises(BadRequest, match="100"):
                await collect(dispatcher, long)
            just = replace(request(5), ids=(1,) * 99)
            assert text(await collect(dispatcher, just)) == "0"
            assert len(p.seen) == 1

    run(scenario)


def test_no_workers_and_queue_full_and_deadline() -> None:
    async def scenario() -> None:
        p, d = FakeWorker("prefill", "P"), FakeWorker("decode", "D")
        async with serving(p, d, max_queue=1, request_timeout_s=0.5) as dispatcher:
            d.report(running=8)  # max_num_seqs
            async with asyncio.timeout(5):
                while dispatcher.table.workers[d.card.worker_id, d.card.epoch].load != d.load:
                    await asyncio.sleep(0)
            first = asyncio.ensure_future(collect(dispatcher, request(5)))
            while len(dispatcher.queue) == 0:
                await asyncio.sleep(0)
            with pytest.raises(QueueFull):
                await collect(dispatcher, request(5))
            with pytest.raises(DeadlineExceeded):
                await first
            d.report(running=0, state="draining")
            async with asyncio.timeout(5):
                while dispatcher.ready:
                    await asyncio.sleep(0)
            with pytest.raises(Unavailable):
                await collect(dispatcher, request(5))

    run(scenario)


def test_waiting_requests_end_when_the_last_worker_drains() -> None:
    async def scenario() -> None:
        p, d = FakeWorker("prefill", "P"), FakeWorker("decode", "D")
        async with serving(p, d) as dispatcher:
            d.report(running=8)
            async with asyncio.timeout(5):
                while dispatcher.table.workers[d.card.worker_id, d.card.epoch].load != d.load:
                    await asyncio.sleep(0)
            task = asyncio.ensure_future(collect(dispatcher, request(5)))
            while len(dispatcher.queue) == 0:
                await asyncio.sleep(0)
            p.report(state="draining")
            with pytest.raises(Unavailable):
                await task

    run(scenario)


def test_not_ready_before_a_proof_has_pulled_bytes() -> None:
    async def scenario() -> None:
        p, d = FakeWorker("prefill", "P"), FakeWorker("decode", "D")
        d.load = replace(d.load, state="starting")
        async with serving(p, d, ready=False) as dispatcher:
            assert not dispatcher.ready
            with pytest.raises(Unavailable):
                await collect(dispatcher, request(5))
            await d.until(lambda: d.links)
            d.report(state="ready")
            await all_proven(dispatcher)
            state = dispatcher.state()
            (pair,) = state["pairs"]
            assert pair == {"prefill": "P", "decode": "D", "state": "proven", "reason": ""}
            assert text(await collect(dispatcher, request(2))) == "01"

    run(scenario)


def test_incompatible_workers_are_never_paired() -> None:
    """B035: said once, when they register."""

    async def scenario() -> None:
        layout = {**LAYOUT, "dtype": "bfloat16"}
        p, d = FakeWorker("prefill", "P"), FakeWorker("decode", "D", layout=layout)
        good = FakeWorker("decode", "D2")
        async with serving(p, d, good) as dispatcher:
            for _ in range(3):
                assert text(await collect(dispatcher, request(2))) == "01"
            assert d.seen == []
            (bad,) = [e for e in dispatcher.state()["pairs"] if e["state"] == "incompatible"]
            assert bad["decode"] == "D"
            assert "dtype" in bad["reason"]

    run(scenario)


def test_an_empty_registry_drops_nobody_and_a_lost_link_comes_back() -> None:
    async def scenario() -> None:
        p, d = FakeWorker("prefill", "P"), FakeWorker("decode", "D")
        async with serving(p, d) as dispatcher:
            dispatcher.table.update([])
            assert text(await collect(dispatcher, request(2))) == "01"
            d.links[0].close()
            worker = dispatcher.table.workers[d.card.worker_id, d.card.epoch]
            async with asyncio.timeout(5):
                while worker.state != "dead":
                    await asyncio.sleep(0)
                while worker.state != "ready":
                    await asyncio.sleep(0.01)
            d.peers.clear()
            assert text(await collect(dispatcher, request(2))) == "01"
            assert d.peers  # introduced anew on the new connection

    run(scenario)


def test_an_engine_that_stands_still_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "STALLED_AFTER_S", 0.5)

    async def scenario() -> None:
        p, d = FakeWorker("prefill", "P"), FakeWorker("decode", "D")
        async with serving(p, d) as dispatcher:
            assert d.server is not None
            d.hook = lambda link, message: isinstance(message, wire.Decode)
            d.server.progress = lambda: (5, True)
            with pytest.raises(Unavailable, match=r"no worker is left|stands still"):
                await collect(dispatcher, request(5))
            assert not dispatcher.ready
            d.server.progress = lambda: (6, False)
            async with asyncio.timeout(5):
                while not dispatcher.ready:
                    await asyncio.sleep(0.01)

    run(scenario)


def test_leases_are_renewed() -> None:
    async def scenario() -> None:
        p, d = FakeWorker("prefill", "P"), FakeWorker("decode", "D")
        p.lease_ms = 1500
        async with serving(p, d) as dispatcher:
            d.hook = lambda link, message: isinstance(message, wire.Decode)
            answer = dispatcher.generate(request(5))
            await anext(answer)
            await p.until(lambda: p.kinds().count("Renew") == 2)  # one each third of the lease
            assert p.seen[-1] == wire.Renew(tuple(p.tickets))
            await answer.aclose()
            await p.until(lambda: p.idle)
            assert not dispatcher.table.workers[p.key].leases.ids
            assert p.kinds() == ["Prefill", "Renew", "Renew", "Release"]

    run(scenario)


def test_p_keeps_the_tickets_that_are_wanted_over_a_lost_link() -> None:
    async def scenario() -> None:
        p, d = FakeWorker("prefill", "P"), FakeWorker("decode", "D")
        async with serving(p, d) as dispatcher:
            held: list[tuple[Link, wire.Message]] = []

            def hold(link: Link, message: wire.Message) -> bool:
                if isinstance(message, wire.Decode) and not held:
                    held.append((link, message))
                    return True
                return False

            d.hook = hold
            answer = dispatcher.generate(request(5))
            chunks = [await anext(answer)]
            await d.until(lambda: held)
            p.tickets.add(b"of nobody")
            p.links[0].close()
            await p.until(lambda: not p.links)
            await p.until(lambda: p.links)
            assert len(p.tickets) == 1
            assert b"of nobody" not in p.tickets
            d._act(*held[0])
            chunks += [chunk async for chunk in answer]
            assert text(chunks) == "01234"
            await p.until(lambda: p.idle)  # released over the new link

    run(scenario)


def test_cancel_in_the_queue() -> None:
    async def scenario() -> None:
        p, d = FakeWorker("prefill", "P"), FakeWorker("decode", "D", max_num_seqs=1)
        async with serving(p, d) as dispatcher:
            d.gate = asyncio.Event()
            first = dispatcher.generate(request(5))
            await anext(first)
            waiting = asyncio.ensure_future(collect(dispatcher, request(5)))
            while len(dispatcher.queue) == 0:
                await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert len(dispatcher.queue) == 0
            await first.aclose()
            await d.until(lambda: d.idle)
            d.gate = None
            assert text(await collect(dispatcher, request(5))) == "01234"
            assert p.kinds().count("Prefill") == 2

    run(scenario)


def test_many_at_once_on_few_places() -> None:
    async def scenario() -> None:
        ps = [FakeWorker("prefill", f"P{i}") for i in range(2)]
        ds = [FakeWorker("decode", f"D{i}", max_num_seqs=2) for i in range(2)]
        async with serving(*ps, *ds) as dispatcher:
            answers = await asyncio.gather(*(collect(dispatcher, request(8)) for _ in range(40)))
            assert {text(answer) for answer in answers} == {"01234567"}
            for worker in (*ps, *ds):
                await worker.until(lambda worker=worker: worker.idle)
                assert worker.seen

    run(scenario)
