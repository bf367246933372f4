"""What the router knows of a worker: load between reports, calls, stray messages, hangs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvtransfer.ticket import AgentCard
from router import wire
from router.worker import STALLED_AFTER_S, Worker, WorkerLost, common_agent

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
    call = worker.call(R, 1, tokens=80, blocks=6)
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


def test_a_call_gets_its_messages_and_ends_once() -> None:
    async def scenario() -> None:
        worker, link = connected()
        call = worker.call(R, 1, blocks=2)
        call.send(wire.Reserve(R, 1, b""))
        worker.receive(wire.Reserved(R, 1, 0))
        worker.receive(wire.Tokens(R, 1, 0, (5,)))
        assert call.open
        worker.receive(wire.Tokens(R, 1, 1, (6,), "length"))
        assert not call.open
        assert [await call.next(1e9) for _ in range(3)] == [
            wire.Reserved(R, 1, 0),
            wire.Tokens(R, 1, 0, (5,)),
            wire.Tokens(R, 1, 1, (6,), "length"),
        ]
        call.abort()  # over: nothing to abort
        assert link.sent == [wire.Reserve(R, 1, b"")]
        with pytest.raises(TimeoutError):
            await call.next(asyncio.get_running_loop().time() + 0.01)

    asyncio.run(scenario())


def test_abort_is_sent_once_and_only_for_what_the_worker_knows() -> None:
    worker, link = connected()
    worker.call(R, 1).abort()
    assert link.sent == []
    call = worker.call(R, 2)
    call.send(wire.Reserve(R, 2, b""))
    call.abort()
    call.abort()
    call.send(wire.Decode(R, 2, b"", 0, wire.Sampling(5)))  # over: not sent
    worker.receive(wire.Tokens(R, 2, 0, (5,)))  # crossed the Abort
    assert link.sent == [wire.Reserve(R, 2, b""), wire.Abort(R, 2)]
    worker.receive(wire.Failed(R, 2, "aborted", ""))
    assert worker.aborted == set()
    assert worker.calls == {}


def test_strays() -> None:
    worker, link = connected()
    worker.receive(wire.Tokens(R, 9, 0, (5,)))
    worker.receive(wire.Tokens(R, 9, 1, (5,)))
    assert link.sent == [wire.Abort(R, 9)]
    worker.receive(wire.Prefilled(R, 9, 5, 0, ticket=b"t", ticket_id=b"id"))
    assert link.sent[1:] == [wire.Release(b"id")]
    assert worker.aborted == set()
    with pytest.raises(wire.WireError):
        worker.receive(wire.Hello(1, "R", 1, "D", 7, b""))


def test_refusals_close_the_door_until_something_changes() -> None:
    worker, _ = connected()
    call = worker.call(R, 1, tokens=10, blocks=5)
    other = worker.call(R, 2, blocks=1)
    worker.receive(wire.Refused(R, 1, "full", True))
    assert worker.view().free_blocks == 4
    assert worker.view().pending_tokens > 10**9
    worker.receive(LOAD)
    assert (worker.view().free_blocks, worker.view().pending_tokens) == (50, 100)
    assert not call.open
    third = worker.call(R, 3, blocks=5)
    worker.receive(wire.Refused(R, 3, "full", True))
    worker.receive(wire.Failed(R, 2, "internal", ""))  # that makes room
    assert worker.view().free_blocks >= 50
    assert (other.open, third.open) == (False, False)


def test_lost_calls_are_told() -> None:
    async def scenario() -> None:
        worker, _ = connected()
        call = worker.call(R, 1)
        worker.lose("gone")
        assert await call.next(1e9) == WorkerLost("gone")
        assert not call.open

    asyncio.run(scenario())


def test_an_engine_that_hangs() -> None:
    worker, link = connected()
    call = worker.call(R, 1)
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


def test_expired_tickets_are_not_renewed() -> None:
    worker, _ = connected()
    worker.tickets |= {b"a", b"b"}
    worker.receive(wire.Expired((b"a", b"c")))
    assert worker.tickets == {b"b"}


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
