"""What the router knows of a worker: load between reports, calls, stray messages, hangs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvtransfer.ticket import AgentCard
from router import wire
from router.worker import MAX_ABORTED, STALLED_AFTER_S, Inbox, Worker, WorkerLost, common_agent

LAYOUT = {
    "weights": "w",
    "num_layers": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "rope": "",
    "block_size": 16,
    "dtype": "float32",
}
LOAD = wire.Load(
    "ready", "tcp", 2, 1, 0, 100, {"free": 40, "cached": 10}, 6, 7, 8, 9, 10, 11, 12, 13, 14
)
R = b"r" * 16


def inbox() -> Inbox:
    return asyncio.Queue()


class FakeLink:
    """A link that only remembers."""

    def __init__(self) -> None:
        self.open = True
        self.sent: list[wire.Message] = []
        self.peer_steps = 0
        self.peer_busy = False

    def send(self, *messages: wire.Message) -> None:
        self.sent += messages


def card(name: str = "D", role: str = "decode", *transports: str) -> wire.WorkerCard:
    agents = tuple(AgentCard(name, 7, b"f" * 16, 64, t, b"") for t in transports or ("tcp",))
    return wire.WorkerCard(name, 7, role, "m", "h", 1, 2, LAYOUT, agents, 64, 16, 512, 8, 256)


def connected(load: wire.Load | None = LOAD) -> tuple[Worker, FakeLink]:
    worker, link = Worker(card()), FakeLink()
    worker.link = link  # type: ignore[assignment]
    if load is not None:
        worker.receive(load)
    return worker, link


def test_states() -> None:
    worker = Worker(card())
    assert worker.state == "starting"
    worker, link = connected(None)
    assert worker.state == "starting"
    for state in ("starting", "ready", "draining"):
        worker.receive(replace(LOAD, state=state))
        assert worker.state == state
        assert worker.usable == (state == "ready")
    link.open = False
    worker.lost_at = 1.0
    assert worker.state == "dead"


def test_load_is_corrected_by_what_was_sent_since() -> None:
    worker, _ = connected()
    assert (worker.view().num_seqs, worker.view().pending_tokens) == (3, 100)
    assert worker.view().free_blocks == 50
    call = worker.call(R, 1, inbox(), tokens=80, blocks=6)
    call.send(wire.Decode(R, 1, b"", 0, wire.Sampling(5)))
    view = worker.view()
    assert (view.num_seqs, view.pending_tokens, view.free_blocks) == (4, 180, 44)
    worker.receive(replace(LOAD, running=3, waiting_tokens=150, blocks={"free": 44, "cached": 0}))
    view = worker.view()  # the report includes it
    assert (view.num_seqs, view.pending_tokens, view.free_blocks) == (4, 150, 44)
    worker.computed(call)
    assert worker.view().pending_tokens == 70
    worker.receive(wire.Tokens(R, 1, 0, (5,), "stop"))
    view = worker.view()
    assert (view.num_seqs, view.pending_tokens, view.free_blocks) == (3, 70, 50)


def test_prompts_that_fit_one_step_are_told_from_longer_ones() -> None:
    worker, _ = connected()  # its steps have 256 tokens

    def pending() -> tuple[int, int]:
        return worker.view().pending_short, worker.view().pending_long

    calls = [worker.call(R, i, inbox(), tokens) for i, tokens in enumerate((256, 257, 40, 0))]
    assert pending() == (296, 100 + 257)
    worker.receive(replace(LOAD, waiting_tokens=500))
    assert pending() == (296, 204)
    worker.computed(calls[2])
    assert pending() == (256, 204)
    worker.receive(replace(LOAD, waiting_tokens=200))  # it has computed some of the others' chunks
    assert pending() == (256, 0)
    worker.receive(wire.Prefilled(R, 0, 5, 0))
    assert pending()[0] == 0


def test_blocks_that_others_will_come_to_need_are_not_free() -> None:
    worker, _ = connected()
    worker.receive(replace(LOAD, owed_blocks=7))
    assert worker.view().free_blocks == 43


def test_a_call_gets_its_messages_and_ends_once() -> None:
    async def scenario() -> None:
        worker, link = connected()
        box = inbox()
        call = worker.call(R, 1, box, blocks=2)
        call.send(wire.Reserve(R, 1, b""))
        worker.receive(wire.Reserved(R, 1, 0))
        worker.receive(wire.Tokens(R, 1, 0, (5,)))
        assert call.open
        worker.receive(wire.Tokens(R, 1, 1, (6,), "length"))
        assert not call.open
        assert [await box.get() for _ in range(3)] == [
            (call, wire.Reserved(R, 1, 0)),
            (call, wire.Tokens(R, 1, 0, (5,))),
            (call, wire.Tokens(R, 1, 1, (6,), "length")),
        ]
        call.abort()  # over: nothing to abort
        assert link.sent == [wire.Reserve(R, 1, b"")]
        assert box.empty()

    asyncio.run(scenario())


def test_abort_is_sent_once_and_only_for_what_the_worker_knows() -> None:
    worker, link = connected()
    worker.call(R, 1, inbox()).abort()
    assert link.sent == []
    call = worker.call(R, 2, inbox())
    call.send(wire.Reserve(R, 2, b""))
    call.abort()
    call.abort()
    call.send(wire.Decode(R, 2, b"", 0, wire.Sampling(5)))  # over: not sent
    worker.receive(wire.Tokens(R, 2, 0, (5,)))  # crossed the Abort
    assert link.sent == [wire.Reserve(R, 2, b""), wire.Abort(R, 2)]
    worker.receive(wire.Failed(R, 2, "aborted", ""))
    assert worker.aborted == {}
    assert worker.calls == {}


def test_strays() -> None:
    worker, link = connected()
    worker.receive(wire.Tokens(R, 9, 0, (5,)))
    worker.receive(wire.Tokens(R, 9, 1, (5,)))
    assert link.sent == [wire.Abort(R, 9)]
    worker.receive(wire.Prefilled(R, 9, 5, 0, ticket=b"t", ticket_id=b"id"))
    assert link.sent[1:] == [wire.Release(b"id")]
    assert worker.aborted == {}
    with pytest.raises(wire.WireError):
        worker.receive(wire.Hello(1, "R", 1, "D", 7, b""))


def test_refusals_close_the_door_until_something_changes() -> None:
    worker, _ = connected()
    call = worker.call(R, 1, inbox(), tokens=10, blocks=5)
    other = worker.call(R, 2, inbox(), blocks=1)
    worker.receive(wire.Refused(R, 1, "full", True))
    assert worker.view().free_blocks == 4
    assert min(worker.view().pending_short, worker.view().pending_long) > 10**9
    worker.receive(LOAD)
    assert (worker.view().free_blocks, worker.view().pending_tokens) == (50, 100)
    assert not call.open
    third = worker.call(R, 3, inbox(), blocks=5)
    worker.receive(wire.Refused(R, 3, "full", True))
    worker.receive(wire.Failed(R, 2, "internal", ""))  # that makes room
    assert worker.view().free_blocks >= 50
    assert (other.open, third.open) == (False, False)


def test_lost_calls_are_told() -> None:
    async def scenario() -> None:
        worker, _ = connected()
        box = inbox()
        call = worker.call(R, 1, box)
        worker.lose("gone")
        assert await box.get() == (call, WorkerLost("gone"))
        assert not call.open

    asyncio.run(scenario())


def test_an_engine_that_hangs() -> None:
    worker, link = connected()
    call = worker.call(R, 1, inbox())
    call.send(wire.Reserve(R, 1, b""))
    link.peer_busy, link.peer_steps = True, 5
    assert not worker.check_progress(0.0)
    assert not worker.check_progress(STALLED_AFTER_S)
    assert worker.check_progress(STALLED_AFTER_S + 1)
    assert worker.stalled
    assert not worker.usable
    assert not call.open
    assert link.sent[-1] == wire.Abort(R, 1)
    link.peer_steps = 6
    assert worker.check_progress(STALLED_AFTER_S + 2)
    assert worker.usable
    link.peer_busy = False
    assert not worker.check_progress(STALLED_AFTER_S + 100)


def test_leases_are_renewed_when_a_third_has_passed() -> None:
    """B002: whatever the lease is, a busy consumer does not lose it to the clock."""
    worker, link = connected()
    ended: list[str] = []
    worker.leases.add(b"a", 30.0, 100.0, lambda: ended.append("a"))
    worker.leases.add(b"b", 3.0, 100.0, lambda: ended.append("b"))
    worker.leases.add(b"c", 3.0, 100.5, lambda: ended.append("c"))
    worker.tick(100.9)
    assert link.sent == []
    worker.tick(101.5)
    worker.tick(101.6)
    worker.tick(102.5)
    worker.tick(110.0)
    renewed = [message.ticket_ids for message in link.sent if isinstance(message, wire.Renew)]
    assert renewed == [(b"b", b"c"), (b"b", b"c"), (b"a", b"b", b"c")]  # batched
    worker.release(b"a")
    assert link.sent[-1] == wire.Release(b"a")
    worker.receive(wire.Expired((b"a", b"b", b"unknown")))
    assert ended == ["b"]  # who still wants it hears of it; nobody else
    assert worker.leases.ids == (b"c",)


def test_nothing_is_renewed_without_a_connection() -> None:
    worker, link = connected()
    worker.leases.add(b"a", 3.0, 100.0, lambda: None)
    link.open = False
    assert not worker.tick(200.0)
    assert link.sent == []
    link.open = True
    worker.tick(200.0)
    assert link.sent == [wire.Renew((b"a",))]


def test_a_silent_call_is_asked_after() -> None:
    worker, link = connected()
    call = worker.call(R, 1, inbox())
    unsent = worker.call(R, 2, inbox())
    call.send(wire.Reserve(R, 1, b""))
    link.sent.clear()
    for now in (100.0, 104.9):
        worker.tick(now)
    assert link.sent == []
    worker.tick(105.0)
    assert link.sent == [wire.Check(R, 1)]
    worker.tick(109.0)
    worker.tick(110.0)
    assert link.sent == [wire.Check(R, 1)] * 2  # again and again
    worker.receive(wire.Reserved(R, 1, 0))
    worker.tick(111.0)
    worker.tick(115.0)
    assert len(link.sent) == 2
    worker.tick(116.0)
    assert len(link.sent) == 3
    assert unsent.open


def test_a_part_of_a_ticket_is_no_end() -> None:
    worker, link = connected()
    box = inbox()
    call = worker.call(R, 1, box)
    part = wire.TicketPart(R, 1, b"t")
    worker.receive(part)
    assert box.get_nowait() == (call, part)
    assert call.open
    worker.receive(wire.TicketPart(R, 9, b"t"))  # of nobody
    assert link.sent == [wire.Abort(R, 9)]


def test_what_was_aborted_is_not_remembered_for_ever() -> None:
    worker, link = connected()
    for attempt in range(MAX_ABORTED + 10):
        worker.receive(wire.Tokens(R, attempt, 0, (5,)))
    assert len(link.sent) == MAX_ABORTED + 10
    assert len(worker.aborted) == MAX_ABORTED
    assert (R, 9) not in worker.aborted
    assert (R, 10) in worker.aborted


def test_common_agent() -> None:
    def agent(p: tuple[str, ...], d: tuple[str, ...], used: str = "") -> Any:
        decode = Worker(card("D", "decode", *d))
        decode.load = replace(LOAD, transport=used)
        found = common_agent(Worker(card("P", "prefill", *p)), decode)
        return found.transport if found else None

    assert agent(("tcp",), ("tcp",)) == "tcp"
    assert agent(("tcp", "nixl"), ("tcp", "nixl"), "nixl") == "nixl"
    assert agent(("tcp", "nixl"), ("nixl",)) == "nixl"
    assert agent(("tcp",), ("nixl",)) is None
