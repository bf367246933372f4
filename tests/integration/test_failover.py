"""What becomes of requests when workers fail them, over real sockets with scripted workers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import replace

import pytest

from kvtransfer.faults import FaultPlan
from kvtransfer.hashing import unpack_ids
from router import connection, wire, worker as worker_module, workers as workers_module
from router.dispatch import Dispatcher
from router.errors import BadRequest, RequestError, Unavailable
from router.link import Link
from tests.integration.dispatching import PROMPT, all_proven, collect, request, run, serving, text
from tests.integration.fake_worker import Answer, FakeWorker, Hook

FIRST = ord("0")


def pool(role: str, count: int, **card: object) -> list[FakeWorker]:
    return [FakeWorker(role, f"{role[0].upper()}{index}", **card) for index in range(count)]


def of_kind(workers: Iterable[FakeWorker], kind: type) -> list[wire.Message]:
    return [message for worker in workers for message in worker.seen if isinstance(message, kind)]


def busy(workers: Iterable[FakeWorker], kind: type = wire.Message) -> FakeWorker:
    """The one worker that got such messages."""
    (found,) = [worker for worker in workers if of_kind([worker], kind)]
    return found


async def all_idle(dispatcher: Dispatcher, *workers: FakeWorker) -> None:
    """Nothing is open or leased at the workers, and the router waits for nothing."""
    for worker in workers:
        await worker.until(lambda worker=worker: worker.idle)
    assert dispatcher.num_jobs == 0
    for record in dispatcher.table.workers.values():
        assert not record.calls
        assert not record.tickets


def once(kind: type, action: Hook) -> tuple[Hook, list[wire.Message]]:
    """A hook that does ``action`` for the first message of a kind, at whichever worker."""
    hit: list[wire.Message] = []

    def hook(link: Link, message: wire.Message) -> bool:
        if not isinstance(message, kind) or hit:
            return False
        hit.append(message)
        return action(link, message)

    return hook, hit


def failing(kind: str) -> Hook:
    def fail(link: Link, message: wire.Message) -> bool:
        link.send(wire.Failed(message.request, message.attempt, kind, "as scripted"))  # type: ignore[union-attr]
        return True

    return fail


# --- a ticket outlives the decode worker that it was for ------------------------------------------


@pytest.mark.parametrize("how", ["lost", "draining", "internal", "refused"])
@pytest.mark.parametrize("stage", ["computing", "computed"])
def test_another_decode_worker_takes_the_ticket_over(how: str, stage: str) -> None:
    """B056: P's work is not thrown away when D fails before it has the KV."""

    async def scenario() -> None:
        (p,), ds = pool("prefill", 1), pool("decode", 2)
        async with serving(p, *ds) as dispatcher:
            held: list[tuple[Link, wire.Message]] = []

            def hold(link: Link, message: wire.Message) -> bool:
                if isinstance(message, wire.Prefill if stage == "computing" else wire.Decode):
                    held.append((link, message))
                    return len(held) == 1
                return False

            for worker in (p, *ds):
                worker.hook = hold
            task = asyncio.ensure_future(collect(dispatcher, request(5)))
            where = p if stage == "computing" else None
            async with asyncio.timeout(5):
                while not held:
                    await asyncio.sleep(0)
            first = where or busy(ds, wire.Decode)
            first = busy(ds, wire.Reserve)
            name = (held[0][1].request, held[0][1].attempt)  # type: ignore[union-attr]
            if how == "lost":
                first.die()
            else:
                first.open.pop(name)
                answer = wire.Failed(*name, how, "as scripted")
                first.links[0].send(wire.Refused(*name, "", True) if how == "refused" else answer)
            (other,) = [d for d in ds if d is not first]
            await other.until(lambda: "Reserve" in other.kinds())
            if stage == "computing":
                p._act(*held[0])
            assert text(await task) == "01234"
            assert other.kinds() == ["Reserve", "Decode"]
            reserve, decode = other.seen
            assert isinstance(reserve, wire.Reserve)
            assert isinstance(decode, wire.Decode)
            assert unpack_ids(reserve.ids) == list(PROMPT)  # what the ticket covers
            assert unpack_ids(decode.ids) == [*PROMPT, FIRST]
            assert decode.ticket
            await p.until(lambda: p.idle)
            assert p.kinds() == ["Prefill", "Release"]  # computed once, released once
            causes = dispatcher.state()["requests"]["causes"]
            assert causes == {f"decode {how}": 1, "ticket reused": 1}
            assert dispatcher.state()["requests"]["retries"] == 1
            await all_idle(dispatcher, p, other)

    run(scenario)


def test_another_decode_worker_is_asked_only_once() -> None:
    async def scenario() -> None:
        (p,), ds = pool("prefill", 1), pool("decode", 3)
        async with serving(p, *ds, decode_attempts=9) as dispatcher:
            failed: list[wire.Message] = []

            def fail(link: Link, message: wire.Message) -> bool:
                if not isinstance(message, wire.Decode) or len(failed) == 2:
                    return False
                failed.append(message)
                for d in ds:
                    d.open.pop((message.request, message.attempt), None)
                return failing("internal")(link, message)

            for d in ds:
                d.hook = fail
            assert text(await collect(dispatcher, request(5))) == "01234"
            assert [message.attempt for message in failed] == [1, 1]  # type: ignore[union-attr]
            prefills = of_kind([p], wire.Prefill)
            assert [unpack_ids(m.ids) for m in prefills] == [  # type: ignore[union-attr]
                list(PROMPT),
                [*PROMPT, FIRST],
            ]
            await all_idle(dispatcher, p, *ds)

    run(scenario)


@pytest.mark.parametrize("refuses", [False, True])
def test_nobody_waits_for_a_decode_worker_while_holding_a_ticket(refuses: bool) -> None:
    """The other D has no room, as the router knows or as D says: the ticket goes at once."""

    async def scenario() -> None:
        (p,), ds = pool("prefill", 1), pool("decode", 2)
        async with serving(p, *ds) as dispatcher:
            first, other = ds
            full = other.card.max_num_seqs
            if not refuses:
                other.report(running=full)
                record = dispatcher.table.workers[other.key]
                async with asyncio.timeout(5):
                    while record.load != other.load:
                        await asyncio.sleep(0)

            def refuse(link: Link, message: wire.Message) -> bool:
                if refuses and isinstance(message, wire.Reserve) and first.open:
                    return False
                if isinstance(message, wire.Reserve) and other.load.steps == 1:
                    link.send(wire.Refused(message.request, message.attempt, "full", True))
                    return True
                return False

            if refuses:
                other.hook = refuse
                dispatcher.table.workers[other.key].last_turn = 10**6  # first's turn
            first.hook = lambda link, message: isinstance(message, wire.Decode)
            task = asyncio.ensure_future(collect(dispatcher, request(5)))
            await first.until(lambda: "Decode" in first.kinds())
            first.die()
            await p.until(lambda: "Release" in p.kinds())
            assert p.kinds() == ["Prefill", "Release"]
            assert not task.done()
            other.report(running=0, steps=2)
            assert text(await task) == "01234"
            assert p.kinds().count("Prefill") == 2
            await all_idle(dispatcher, p, other)

    run(scenario)


# --- early pull -----------------------------------------------------------------------------------


def test_early_parts_are_passed_on() -> None:
    async def scenario() -> None:
        (p,), (d,) = pool("prefill", 1), pool("decode", 1)
        p.num_parts = 3
        async with serving(p, d) as dispatcher:
            dispatcher.table.workers[d.key].peers.clear()  # not introduced yet
            assert text(await collect(dispatcher, request(5))) == "01234"
            assert d.kinds() == ["Reserve", "Peer", *["TicketPart"] * 3, "Decode"]
            parts = [message.ticket for message in of_kind([d], wire.TicketPart)]  # type: ignore[union-attr]
            assert parts == [b"part 0", b"part 1", b"part 2"]
            assert text(await collect(dispatcher, request(1))) == "0"  # no D: no parts
            assert [m.early for m in of_kind([p], wire.Prefill)] == [True, False]  # type: ignore[union-attr]
            await all_idle(dispatcher, p, d)
        (p,), (d,) = pool("prefill", 1), pool("decode", 1)
        p.num_parts = 3
        async with serving(p, d, early_pull=False) as dispatcher:
            assert text(await collect(dispatcher, request(5))) == "01234"
            assert d.kinds() == ["Reserve", "Decode"]

    run(scenario)


def test_unknown_peer_for_an_early_part() -> None:
    async def scenario() -> None:
        (p,), (d,) = pool("prefill", 1), pool("decode", 1)
        p.num_parts = 1
        async with serving(p, d) as dispatcher:

            def forget(link: Link, message: wire.Message) -> bool:
                if isinstance(message, wire.TicketPart):
                    link.send(wire.UnknownPeer(message.request, message.attempt, *p.key))
                return isinstance(message, wire.TicketPart)

            d.hook = forget
            assert text(await collect(dispatcher, request(5))) == "01234"
            assert d.kinds().count("Peer") == 1
            await all_idle(dispatcher, p, d)

    run(scenario)


def test_parts_go_to_the_decode_worker_that_took_over() -> None:
    async def scenario() -> None:
        (p,), ds = pool("prefill", 1), pool("decode", 2)
        async with serving(p, *ds) as dispatcher:
            held: list[tuple[Link, wire.Prefill]] = []

            def hold(link: Link, message: wire.Message) -> bool:
                if isinstance(message, wire.Prefill):
                    held.append((link, message))
                return isinstance(message, wire.Prefill)

            p.hook = hold
            task = asyncio.ensure_future(collect(dispatcher, request(5)))
            await p.until(lambda: held)
            link, message = held[0]
            first = busy(ds, wire.Reserve)
            (other,) = [d for d in ds if d is not first]
            part = wire.TicketPart(message.request, message.attempt, b"1")
            link.send(part)
            await first.until(lambda: "TicketPart" in first.kinds())
            first.die()
            await other.until(lambda: "Reserve" in other.kinds())
            link.send(replace(part, ticket=b"2"))
            await other.until(lambda: "TicketPart" in other.kinds())
            p._act(link, message)
            assert text(await task) == "01234"
            assert [m.ticket for m in of_kind(ds, wire.TicketPart)] in (  # type: ignore[union-attr]
                [b"1", b"2"],
                [b"2", b"1"],
            )
            await all_idle(dispatcher, p, other)

    run(scenario)


# --- leases ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("others", [0, 1])
def test_an_expired_lease_ends_the_wait_for_a_pull_at_once(others: int) -> None:
    """B002: the request hears of it from P, and does not wait until D notices."""

    async def scenario() -> None:
        ps, (d,) = pool("prefill", 1 + others), pool("decode", 1)
        async with serving(*ps, d) as dispatcher:
            d.hook, held = once(wire.Decode, lambda link, message: True)
            task = asyncio.ensure_future(collect(dispatcher, request(5)))
            await d.until(lambda: held)
            p = busy(ps, wire.Prefill)
            (ticket_id,) = p.tickets
            p.tickets.clear()
            p.links[0].send(wire.Expired((ticket_id, b"of nobody")))
            assert text(await task) == "01234"
            causes = dispatcher.state()["requests"]["causes"]
            assert causes == {"expired": 1} | ({} if others else {"recompute": 1})
            assert len(of_kind(ps, wire.Prefill)) == 1 + others
            await all_idle(dispatcher, *ps, d)

    run(scenario)


def test_a_ticket_released_while_p_reconnects_is_released_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the list of wanted tickets and the open link, a release would be lost."""

    async def scenario() -> None:
        (p,), (d,) = pool("prefill", 1), pool("decode", 1)
        async with serving(p, d) as dispatcher:
            d.hook = lambda link, message: isinstance(message, wire.Decode)
            answer = dispatcher.generate(request(5))
            await anext(answer)
            record = dispatcher.table.workers[p.key]
            connect = workers_module.connect_worker

            async def connect_slowly(*args: object) -> Link:
                assert args[7] == record.tickets  # said to be wanted ...
                await answer.aclose()  # ... but not any more
                return await connect(*args)  # type: ignore[arg-type]

            monkeypatch.setattr(workers_module, "connect_worker", connect_slowly)
            p.links[0].close()
            await p.until(lambda: "Release" in p.kinds())
            await all_idle(dispatcher, p, d)

    run(scenario)


@pytest.mark.parametrize("how", ["failed", "cancelled"])
def test_a_ticket_that_comes_too_late_to_be_used_is_released(how: str) -> None:
    """P's answer is there, but its request has ended before it was looked at."""

    async def scenario() -> None:
        (p,), (d,) = pool("prefill", 1), pool("decode", 1)
        async with serving(p, d, decode_attempts=1) as dispatcher:
            p.hook, held = once(wire.Prefill, lambda link, message: True)
            task = asyncio.ensure_future(collect(dispatcher, request(5)))
            await p.until(lambda: held)
            (name,) = d.open
            ticket_id = b"t" * 16
            if how == "failed":
                failed = wire.Failed(*name, "internal", "as scripted")
                dispatcher.table.workers[d.key].receive(failed)
            answer = wire.Prefilled(*name, FIRST, 0, ticket=b"T", ticket_id=ticket_id)
            dispatcher.table.workers[p.key].receive(answer)
            if how == "cancelled":
                task.cancel()
            result = (await asyncio.gather(task, return_exceptions=True))[0]
            assert isinstance(result, RequestError | asyncio.CancelledError)
            await p.until(lambda: wire.Release(ticket_id) in p.seen)
            d.open.clear()
            await all_idle(dispatcher, p, d)

    run(scenario)


# --- prefill fails --------------------------------------------------------------------------------


def test_a_poisonous_prompt_does_not_walk_over_all_workers() -> None:
    """B021: two workers that die of it are enough."""

    async def scenario() -> None:
        ps, ds = pool("prefill", 4), pool("decode", 2)
        async with serving(*ps, *ds) as dispatcher:

            def die_of_it(worker: FakeWorker) -> Hook:
                def die(link: Link, message: wire.Message) -> bool:
                    if isinstance(message, wire.Prefill):
                        worker.die()
                    return isinstance(message, wire.Prefill)

                return die

            for p in ps:
                p.hook = die_of_it(p)
            with pytest.raises(Unavailable, match="prefill worker"):
                await collect(dispatcher, request(5))
            assert sum(bool(p.links) for p in ps) == 2
            assert not of_kind(ds, wire.Decode)
            assert dispatcher.state()["requests"]["causes"] == {"prefill lost": 2}
            for p in ps:
                p.hook = None
            assert text(await collect(dispatcher, request(5))) == "01234"
            await all_idle(dispatcher, *ps, *ds)

    run(scenario)


def test_after_two_failed_pulls_a_decode_worker_computes_it() -> None:
    async def scenario() -> None:
        ps, (d,) = pool("prefill", 3), pool("decode", 1)
        async with serving(*ps, d) as dispatcher:

            def fail(link: Link, message: wire.Message) -> bool:
                if isinstance(message, wire.Decode) and message.ticket:
                    d.open.pop((message.request, message.attempt))
                    return failing("pull")(link, message)
                return False

            d.hook = fail
            assert text(await collect(dispatcher, request(5))) == "01234"
            assert len(of_kind(ps, wire.Prefill)) == 2
            decode = d.seen[-1]
            assert isinstance(decode, wire.Decode)
            assert decode.ticket == b""
            assert unpack_ids(decode.ids) == [*PROMPT, *b"01"]
            causes = dispatcher.state()["requests"]["causes"]
            assert causes == {"pull": 2, "recompute": 1}
            assert dispatcher.state()["requests"]["retries"] == 2
            await all_idle(dispatcher, *ps, d)

    run(scenario)


def test_workers_that_leave_use_up_no_attempts() -> None:
    """B051: handed back by three prefill workers in turn, then by two decode workers."""

    async def scenario() -> None:
        ps, ds = pool("prefill", 4), pool("decode", 3)
        async with serving(*ps, *ds) as dispatcher:
            left = {"Prefill": 3, "Decode": 2}

            def leave(link: Link, message: wire.Message) -> bool:
                name = type(message).__name__
                if not left.get(name):
                    return False
                left[name] -= 1
                for worker in (*ps, *ds):
                    worker.open.pop((message.request, message.attempt), None)  # type: ignore[union-attr]
                if name == "Decode":
                    link.send(wire.Pulled(message.request, message.attempt, 1, 1, 1.0))  # type: ignore[union-attr]
                return failing("draining")(link, message)

            for worker in (*ps, *ds):
                worker.hook = leave
            assert text(await collect(dispatcher, request(5))) == "01234"
            causes = dispatcher.state()["requests"]["causes"]
            assert causes == {"prefill draining": 3, "decode draining": 2}
            await all_idle(dispatcher, *ps, *ds)

    run(scenario)


@pytest.mark.parametrize("how", ["failed", "closed", "silent", "invalid"])
def test_a_prefill_that_ends_badly_ends_the_decode_leg_too(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B009, B056: whatever becomes of P, nobody waits for it at D."""
    monkeypatch.setattr(worker_module, "SILENCE_S", 0.2)

    async def scenario() -> None:
        ps, (d,) = pool("prefill", 2), pool("decode", 1)
        async with serving(*ps, d) as dispatcher:

            def misbehave(link: Link, message: wire.Message) -> bool:
                match how:
                    case "failed":
                        return failing("internal")(link, message)
                    case "invalid":
                        return failing("invalid")(link, message)
                    case "closed":
                        link.close()
                return True

            hook, hit = once(wire.Prefill, misbehave)
            for p in ps:
                p.hook = hook
            if how == "invalid":
                with pytest.raises(BadRequest, match="as scripted"):
                    await collect(dispatcher, request(5))
            else:
                assert text(await collect(dispatcher, request(5))) == "01234"
                assert hit
                kind = {"failed": "internal", "closed": "lost", "silent": "unknown"}[how]
                causes = dispatcher.state()["requests"]["causes"]
                assert causes == {f"prefill {kind}": 1}
            await all_idle(dispatcher, *ps, d)
            assert text(await collect(dispatcher, request(5))) == "01234"

    run(scenario)


@pytest.mark.parametrize("kind", [wire.Reserve, wire.Decode])
def test_a_decode_worker_that_lost_a_request_is_found(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "SILENCE_S", 0.2)

    async def scenario() -> None:
        (p,), ds = pool("prefill", 1), pool("decode", 2)
        async with serving(p, *ds) as dispatcher:

            def lose(link: Link, message: wire.Message) -> bool:
                for d in ds:
                    d.open.pop((message.request, message.attempt), None)  # type: ignore[union-attr]
                return True

            hook, _ = once(kind, lose)
            for d in ds:
                d.hook = hook
            assert text(await collect(dispatcher, request(5))) == "01234"
            assert len(of_kind(ds, wire.Check)) >= 1
            assert dispatcher.state()["requests"]["causes"]["decode unknown"] == 1
            await all_idle(dispatcher, p, *ds)

    run(scenario)


def test_a_worker_that_is_only_slow_keeps_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "SILENCE_S", 0.1)

    async def scenario() -> None:
        (p,), (d,) = pool("prefill", 1), pool("decode", 1)
        async with serving(p, d) as dispatcher:
            held: list[tuple[Link, wire.Prefill]] = []

            def hold(link: Link, message: wire.Message) -> bool:
                if isinstance(message, wire.Prefill):
                    held.append((link, message))
                    p.open[message.request, message.attempt] = None
                return isinstance(message, wire.Prefill)

            p.hook = hold
            task = asyncio.ensure_future(collect(dispatcher, request(5)))
            await p.until(lambda: p.kinds().count("Check") == 3)
            p.open.clear()
            p._act(*held[0])
            assert text(await task) == "01234"
            assert dispatcher.state()["requests"]["causes"] == {}

    run(scenario)


# --- no prefill worker is left --------------------------------------------------------------------


def test_without_prefill_workers_new_requests_are_refused() -> None:
    """B042: a deployment never becomes decode-only in silence; what was in flight goes on."""

    async def scenario() -> None:
        (p,), (d,) = pool("prefill", 1), pool("decode", 1)
        async with serving(p, d) as dispatcher:
            d.gate = asyncio.Event()
            answer = dispatcher.generate(request(5))
            chunks = [await anext(answer)]
            p.hook, held = once(wire.Prefill, lambda link, message: True)
            computing = asyncio.ensure_future(collect(dispatcher, request(5)))
            await p.until(lambda: held)
            p.die()
            p.registered = False
            async with asyncio.timeout(5):
                while dispatcher.ready:
                    await asyncio.sleep(0)
            num_seen = len(d.seen)
            with pytest.raises(Unavailable, match="no prefill"):
                await collect(dispatcher, request(5))
            gate, d.gate = d.gate, None
            gate.set()
            chunks += [chunk async for chunk in answer]
            assert text(chunks) == text(await computing) == "01234"
            later = d.seen[num_seen:]
            assert not of_kind([d], wire.Reserve)[2:]
            assert [m.ticket for m in later if isinstance(m, wire.Decode)] in ([], [b""])
            causes = dispatcher.state()["requests"]["causes"]
            assert causes == {"prefill lost": 1, "recompute": 1}
            await all_idle(dispatcher, d)

    run(scenario)


def test_local_prefill_serves_new_requests_but_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """B042."""

    async def scenario() -> None:
        (p,), (d,) = pool("prefill", 1), pool("decode", 1, local_prefill=True)
        async with serving(p, d) as dispatcher:
            assert text(await collect(dispatcher, request(5))) == "01234"
            assert d.kinds() == ["Reserve", "Decode"]  # P does it as long as it is there
            p.die()
            p.registered = False
            async with asyncio.timeout(5):
                while dispatcher.table.workers[p.key].usable:
                    await asyncio.sleep(0)
            assert dispatcher.ready
            assert text(await collect(dispatcher, request(5))) == "01234"
            decode = of_kind([d], wire.Decode)[-1]
            assert decode.ticket == b""  # type: ignore[union-attr]
            assert dispatcher.state()["requests"]["causes"] == {"local prefill": 1}
            assert "computes 19 tokens itself" in caplog.text

    run(scenario)


def fast_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link is dead after 0.3 s instead of 3 s."""
    monkeypatch.setattr(connection, "PING_INTERVAL_S", 0.1)
    monkeypatch.setattr(connection, "DEAD_AFTER_S", 0.3)


def test_paused_prefill_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """B010 (c), B022: requests fail fast and never reach decode; then all goes on by itself."""
    fast_death(monkeypatch)

    async def scenario() -> None:
        ps, (d,) = pool("prefill", 2), pool("decode", 1)
        async with serving(*ps, d, comeback_s=0.2) as dispatcher:
            for p in ps:
                p.freeze()
            async with asyncio.timeout(2):
                while dispatcher.ready:
                    await asyncio.sleep(0.01)
            for _ in range(20):
                async with asyncio.timeout(0.5):
                    with pytest.raises(Unavailable):
                        await collect(dispatcher, request(5))
            assert not of_kind([d], wire.Reserve | wire.Decode)  # type: ignore[arg-type]
            for p in ps:
                await p.thaw()
            async with asyncio.timeout(5):
                while not dispatcher.ready:
                    await asyncio.sleep(0.01)
            assert text(await collect(dispatcher, request(5))) == "01234"
            await all_idle(dispatcher, *ps, d)

    run(scenario)


def test_a_frozen_worker_is_left_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """B022: nothing was streamed yet, so the client notices nothing but the time."""
    fast_death(monkeypatch)

    async def scenario() -> None:
        ps, ds = pool("prefill", 2), pool("decode", 2)
        async with serving(*ps, *ds) as dispatcher:
            ps[0].freeze()
            ds[1].freeze()
            answers = await asyncio.gather(*(collect(dispatcher, request(5)) for _ in range(8)))
            assert {text(answer) for answer in answers} == {"01234"}
            states = {w["id"]: w["state"] for w in dispatcher.state()["workers"]}
            assert states == {"P0": "dead", "P1": "ready", "D0": "ready", "D1": "dead"}
            assert dispatcher.ready
            ps[1].freeze()
            async with asyncio.timeout(2):
                while dispatcher.ready:
                    await asyncio.sleep(0.01)

    run(scenario)


def test_bad_requests_and_impatient_clients_hurt_no_worker() -> None:
    """B010 (a) and (b)."""

    async def scenario() -> None:
        (p,), (d,) = pool("prefill", 1), pool("decode", 1)
        async with serving(p, d) as dispatcher:
            too_long = replace(request(5), ids=(1,) * 600)
            for _ in range(200):
                with pytest.raises(BadRequest):
                    await collect(dispatcher, too_long)
            p.hook = lambda link, message: (
                isinstance(message, wire.Prefill) and failing("invalid")(link, message)
            )
            for _ in range(50):
                with pytest.raises(BadRequest):
                    await collect(dispatcher, request(5))
            p.hook = None
            for number in range(200):
                answer = dispatcher.generate(request(5))
                if number % 2:
                    await anext(answer)
                    await answer.aclose()
                else:
                    task = asyncio.ensure_future(anext(answer))
                    await asyncio.sleep(0)
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
            assert text(await collect(dispatcher, request(5))) == "01234"
            assert all(w.usable for w in dispatcher.table.workers.values())
            requests = dispatcher.state()["requests"]
            assert requests["causes"] == {}
            assert requests["refused"] == 200
            assert requests["failed"] == 50
            await all_idle(dispatcher, p, d)

    run(scenario)


# --- workers come and go --------------------------------------------------------------------------


def test_a_lost_peer_with_many_requests_on_it() -> None:
    """B039: one reconnection, and all of the requests end well."""

    async def scenario() -> None:
        ps, ds = pool("prefill", 2), pool("decode", 2, max_num_seqs=64)
        async with serving(*ps, *ds) as dispatcher:
            held: list[tuple[FakeWorker, Link, wire.Message]] = []

            def holding(worker: FakeWorker) -> Hook:
                def hold(link: Link, message: wire.Message) -> bool:
                    if isinstance(message, wire.Decode):
                        held.append((worker, link, message))
                    return isinstance(message, wire.Decode)

                return hold

            for d in ds:
                d.hook = holding(d)
            tasks = [asyncio.ensure_future(collect(dispatcher, request(5))) for _ in range(32)]
            async with asyncio.timeout(5):
                while len(held) < 32:
                    await asyncio.sleep(0)
            for d in ds:
                d.hook = None
            for worker, link, message in held:
                if worker is ds[1]:
                    worker._act(link, message)
            connections: list[Link] = []
            server = ds[0].server
            assert server is not None
            connected = server.on_connect

            def count(link: Link, hello: wire.Hello, tickets: tuple[bytes, ...]) -> None:
                connections.append(link)
                connected(link, hello, tickets)

            server.on_connect = count
            ds[0].links[0]._abort("lost")
            answers = await asyncio.gather(*tasks)
            assert {text(answer) for answer in answers} == {"01234"}
            await ds[0].until(lambda: ds[0].links)
            assert len(connections) == 1
            await all_idle(dispatcher, *ps, *ds)

    run(scenario)


def test_the_registry_forgets_everybody() -> None:
    """B040: serving goes on, and nobody is told to forget a worker that is still there."""

    async def scenario() -> None:
        (p,), (d,) = pool("prefill", 1), pool("decode", 1)
        async with serving(p, d) as dispatcher:
            p.registered = d.registered = False
            for _ in range(3):
                dispatcher.table.update([])
                assert text(await collect(dispatcher, request(3))) == "012"
            assert "Forget" not in d.kinds()
            assert dispatcher.ready

    run(scenario)


def test_another_worker_at_the_same_port() -> None:
    """B040: a worker that took a dead one's port is not mistaken for it."""

    async def scenario() -> None:
        (p,), (old,) = pool("prefill", 1), pool("decode", 1)
        async with serving(p, old) as dispatcher:
            old.die()
            new = await FakeWorker("decode", "new", Answer("abcdefg")).start(old.card.port)
            dispatcher.table.update([p.card, old.card, new.card])
            async with asyncio.timeout(10):
                while dispatcher.table.workers[new.key].state != "ready" or not dispatcher.ready:
                    await asyncio.sleep(0.01)
            assert dispatcher.table.workers[old.key].state == "dead"
            assert text(await collect(dispatcher, request(3))) == "0bc"  # the new one's answer
            await new.stop()

    run(scenario)


def test_decode_workers_forget_a_prefill_worker_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B041: soon after its end, each D that knew it lets go of it; once."""
    monkeypatch.setattr(workers_module, "GONE_AFTER_S", 0.3)

    async def scenario() -> None:
        ps, ds = pool("prefill", 2), pool("decode", 2)
        async with serving(*ps, *ds) as dispatcher:
            assert all(d.peers == {p.key for p in ps} for d in ds)
            ds[0].links[0]._abort("lost")  # a new connection does not make the router forget
            await ds[0].until(lambda: not ds[0].links)
            await ds[0].until(lambda: ds[0].links)
            ps[0].die()
            await asyncio.sleep(0.7)
            assert not of_kind(ds, wire.Forget)  # registered: it may come back
            ps[0].registered = False
            for d in ds:
                await d.until(lambda d=d: d.peers == {ps[1].key}, timeout=2)
            assert of_kind(ds, wire.Forget) == [wire.Forget(*ps[0].key)] * 2
            assert text(await collect(dispatcher, request(5))) == "01234"
            assert all(not worker.introduced & {ps[0].key}
                       for worker in dispatcher.table.workers.values())  # fmt: skip

    run(scenario)


def test_a_forgotten_worker_that_comes_back_is_introduced_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers_module, "GONE_AFTER_S", 0.0)

    async def scenario() -> None:
        (p,), (d,) = pool("prefill", 1), pool("decode", 1)
        async with serving(p, d) as dispatcher:
            p.registered = False
            p.die()
            await d.until(lambda: "Forget" in d.kinds())
            assert not d.peers
            await p.start(p.card.port)
            p.registered = True
            await all_proven(dispatcher)
            assert text(await collect(dispatcher, request(5))) == "01234"
            assert d.peers == {p.key}

    run(scenario)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_one_of_two_dies_under_steady_load(role: str) -> None:
    """B052: no request fails, whether it was in flight or came just afterwards."""

    async def scenario() -> None:
        ps, ds = pool("prefill", 2), pool("decode", 2)
        async with serving(*ps, *ds) as dispatcher:
            victim = ps[0] if role == "prefill" else ds[0]
            tasks = []
            for number in range(60):
                tasks.append(asyncio.ensure_future(collect(dispatcher, request(8))))
                if number == 20:
                    victim.die()
                await asyncio.sleep(0.005)
            answers = await asyncio.gather(*tasks)
            assert {text(answer) for answer in answers} == {"01234567"}
            left = [worker for worker in (*ps, *ds) if worker is not victim]
            await all_idle(dispatcher, *left)

    run(scenario)


# --- messages get lost ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["drop", "delay", "duplicate", "corrupt", "reorder"])
def test_faulty_links_never_make_wrong_answers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PING_INTERVAL_S", 0.1)

    async def scenario() -> None:
        ps, ds = pool("prefill", 2), pool("decode", 2)
        async with serving(*ps, *ds, link_faults="drop=0,seed=3") as dispatcher:
            faults = dispatcher.table.faults
            assert faults is not None
            faults.plan = FaultPlan(**{kind: 0.02, "delay_s": 0.1})  # type: ignore[arg-type]
            right = 0
            for _ in range(6):
                answers = await asyncio.gather(
                    *(collect(dispatcher, request(8)) for _ in range(8)), return_exceptions=True
                )
                for answer in answers:
                    if isinstance(answer, BaseException):
                        assert isinstance(answer, RequestError), answer
                    else:
                        assert text(answer) == "01234567"
                        right += 1
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(2):
                        while not dispatcher.ready:
                            await asyncio.sleep(0.01)
            assert right > 0
            assert dispatcher.state()["faults"][kind] > 0
            faults.plan = FaultPlan()
            async with asyncio.timeout(10):
                while not all(worker.usable for worker in dispatcher.table.workers.values()):
                    await asyncio.sleep(0.01)
            # A fault that has not been noticed yet shows with the next ping; then all is well.
            await asyncio.sleep(0.3)
            async with asyncio.timeout(10):
                while not all(worker.usable for worker in dispatcher.table.workers.values()):
                    await asyncio.sleep(0.01)
            assert text(await collect(dispatcher, request(8))) == "01234567"
            await all_idle(dispatcher, *ps, *ds)
            assert not any(worker.aborted for worker in dispatcher.table.workers.values())

    run(scenario)


# --- the end --------------------------------------------------------------------------------------


def test_the_end_of_the_router_ends_every_request() -> None:
    async def scenario() -> None:
        (p,), (d,) = pool("prefill", 1), pool("decode", 1, max_num_seqs=4)
        async with serving(p, d) as dispatcher:
            d.gate = asyncio.Event()
            streams = [dispatcher.generate(request(5)) for _ in range(4)]
            for stream in streams:
                await anext(stream)
            waiting = asyncio.ensure_future(collect(dispatcher, request(5)))
            while len(dispatcher.queue) == 0:
                await asyncio.sleep(0)
            rest = [asyncio.ensure_future(anext(stream)) for stream in streams[:2]]
            await dispatcher.close()
            results = await asyncio.gather(
                *rest, waiting, *(anext(stream) for stream in streams[2:]), return_exceptions=True
            )
            assert all(isinstance(result, Unavailable) for result in results)
            assert {str(result) for result in results} == {"the server is stopping"}
            with pytest.raises(Unavailable):
                await collect(dispatcher, request(5))
            assert dispatcher.num_jobs == 0
            await d.until(lambda: not d.links)

    run(scenario)


# --- a connection that breaks is not the end of a worker ------------------------------------------


def test_a_request_waits_for_its_only_workers_to_come_back() -> None:
    """A router that was stopped finds all its connections dead, and has them again at once."""

    async def scenario() -> None:
        p, d = FakeWorker("prefill", "P"), FakeWorker("decode", "D")
        async with serving(p, d) as dispatcher:
            cut: list[Link] = []

            def break_all(link: Link, message: wire.Message) -> bool:
                if not isinstance(message, wire.Decode) or cut:
                    return False
                for record in dispatcher.table.workers.values():
                    assert record.link is not None
                    cut.append(record.link)
                    record.link.close("as scripted")
                return True

            d.hook = break_all
            quiet = text(await collect(dispatcher, request()))
            assert len(cut) == 2
            assert quiet == text(await collect(dispatcher, request())), "no token twice, none lost"
            await all_idle(dispatcher, p, d)

    run(scenario)


def test_a_request_gives_up_when_nobody_comes_back() -> None:
    async def scenario() -> None:
        p, d = FakeWorker("prefill", "P"), FakeWorker("decode", "D")
        async with serving(p, d, comeback_s=0.3) as dispatcher:

            def die(link: Link, message: wire.Message) -> bool:
                if not isinstance(message, wire.Decode):
                    return False
                d.die()
                return True

            d.hook = die
            loop = asyncio.get_running_loop()
            begin = loop.time()
            with pytest.raises(Unavailable, match="no worker is left"):
                await collect(dispatcher, request())
            assert 0.3 <= loop.time() - begin < 5
            with pytest.raises(Unavailable):  # a new one does not wait
                await collect(dispatcher, request())
            await all_idle(dispatcher, p)

    run(scenario)


@pytest.mark.parametrize("times", [3, 4])
def test_connections_that_come_back_count_less_but_not_for_ever(times: int) -> None:
    """B021: what breaks each connection that it is sent over ends after a few of them."""

    async def scenario() -> None:
        p, d = FakeWorker("prefill", "P"), FakeWorker("decode", "D")
        async with serving(p, d) as dispatcher:
            cuts = 0

            def cut(link: Link, message: wire.Message) -> bool:
                nonlocal cuts
                if not isinstance(message, wire.Reserve) or cuts == times:
                    return False
                cuts += 1
                link._abort("as scripted")
                return True

            d.hook = cut
            if times == 3:
                assert text(await collect(dispatcher, request(5))) == "01234"
            else:
                with pytest.raises(Unavailable, match="decode worker D"):
                    await collect(dispatcher, request(5))
            assert dispatcher.state()["requests"]["causes"] == {"decode lost": times}
            await all_proven(dispatcher)
            assert text(await collect(dispatcher, request(5))) == "01234"
            await all_idle(dispatcher, p, d)

    run(scenario)


@pytest.mark.parametrize("when", ["waiting", "new"])
def test_a_request_that_finds_nobody_waits_for_them_to_come_back(when: str) -> None:
    """A pair that only reconnects refuses nobody: not those in the queue, and not the next one."""

    async def scenario() -> None:
        p, d = FakeWorker("prefill", "P", max_num_seqs=1), FakeWorker("decode", "D", max_num_seqs=1)
        async with serving(p, d, comeback_s=5) as dispatcher:
            tasks = []
            if when == "waiting":
                d.gate = asyncio.Event()
                tasks = [asyncio.create_task(collect(dispatcher, request())) for _ in range(3)]
                await d.until(lambda: dispatcher.state()["requests"]["queued"])
            for record in dispatcher.table.workers.values():
                assert record.link is not None
                record.link.close("as scripted")
            assert not dispatcher.ready
            tasks.append(asyncio.create_task(collect(dispatcher, request())))
            await asyncio.sleep(0)
            d.gate = None
            answers = [text(chunks) for chunks in await asyncio.gather(*tasks)]
            assert set(answers) == {"01234"}
            await all_idle(dispatcher, p, d)

    run(scenario)
