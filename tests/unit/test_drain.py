"""A worker that leaves: new work is refused, what runs may end, the rest goes back at the deadline.

And Check, by which a router finds out that it waits for nothing.
"""

from __future__ import annotations

import pytest

from router import wire
from services.roles import LAST_PULLS_S
from tests.support.worker_box import (
    IDS,
    LEASE_S,
    Box,
    Pair,
    RecordingLink,
    decode,
    is_terminal,
    only,
    only_key,
    prefill,
    prefilled,
    reserve,
)

DEADLINE_S = 10.0


@pytest.fixture
def pair() -> Pair:
    return Pair()


def drain(box: Box, in_s: float = DEADLINE_S) -> None:
    box.roles.drain(box.now + in_s)
    box.roles.tick(box.now)
    box.roles.flush(box.now)


def handed_back(messages: list[wire.Message]) -> list[bytes]:
    """Requests that were handed back; nothing else may end among the messages."""
    ends = [m for m in messages if is_terminal(m)]
    assert all(isinstance(m, wire.Failed) and m.kind == "draining" for m in ends), ends
    return sorted(m.request for m in ends if isinstance(m, wire.Failed))


# --- new work ----------------------------------------------------------------------------------


def test_the_news_of_a_drain_comes_before_the_refusals(pair: Pair) -> None:
    said: list[object] = []
    pair.d.roles._on_load = said.append
    pair.d.say(decode(request=b"c"))
    pair.d.step()  # it is busy, and has reported just now
    said.clear()
    pair.d.link.send = lambda *messages: said.extend(messages)  # type: ignore[method-assign]
    pair.d.roles.drain()
    pair.d.handle(reserve(request=b"b"))
    load, refused = said
    assert isinstance(load, wire.Load)
    assert load.state == "draining"
    assert isinstance(refused, wire.Refused)
    assert refused.retry


def test_an_idle_worker_lingers_for_what_is_on_its_way() -> None:
    box = Box("d")
    drain(box)
    box.pass_time(0)
    assert not box.roles.drained
    assert isinstance(only(box.say(reserve())), wire.Refused)
    box.pass_time(0.3)
    assert box.roles.drained


# --- the deadline ------------------------------------------------------------------------------


def test_prefill_hands_back_what_is_computed_and_what_waits() -> None:
    box = Box("p")
    box.say(prefill([1] * 20, request=b"a"), prefill([2] * 20, request=b"b"))
    box.step()
    drain(box)
    assert box.pass_time(DEADLINE_S - 0.1) == []
    assert not box.roles.drained
    assert handed_back(box.pass_time(0.1)) == [b"a", b"b"]
    assert box.roles.drained
    box.check_idle()


def test_decode_hands_back_what_is_reserved_pulled_and_decoded(pair: Pair) -> None:
    answer, _ = pair.pulling()
    pair.d.say(reserve(request=b"b"), decode(request=b"c"))
    pair.d.step()
    tokens = pair.d.link.take()
    assert any(isinstance(m, wire.Tokens) for m in tokens)
    drain(pair.d)
    assert handed_back(pair.d.pass_time(DEADLINE_S)) == [b"a", b"b", b"c"]
    key = only_key(pair.d)
    assert pair.d.puller.pulls[key].aborted
    assert pair.d.event(pair.d.puller.gave_up(key, settled=True)) == []
    pair.d.pass_time(0.3)
    assert pair.d.roles.drained
    pair.p.say(wire.Release(answer.ticket_id))
    pair.check_idle()


def test_a_pull_that_does_not_settle_does_not_keep_the_worker(pair: Pair) -> None:
    pair.pulling()
    drain(pair.d)
    assert handed_back(pair.d.pass_time(DEADLINE_S)) == [b"a"]
    pair.d.event(pair.d.puller.gave_up(only_key(pair.d), settled=False))
    pair.d.pass_time(LAST_PULLS_S)
    assert pair.d.roles.drained


def test_what_is_handed_back_was_delivered_up_to_its_last_token() -> None:
    box = Box("d")
    box.say(decode(request=b"c"))
    for _ in range(2):
        box.step()
    drain(box, 0)
    sent = [*box.link.take(), *box.pass_time(0)]
    assert [m.first_index for m in sent if isinstance(m, wire.Tokens)] == [0, 1]
    assert isinstance(sent[-1], wire.Failed)
    box.check_idle()


def test_everybody_gets_back_what_is_his() -> None:
    box, other = Box("d"), RecordingLink("another router")
    box.roles.connected(other, ())
    box.say(decode(request=b"a"))
    box.handle(decode(request=b"b"), other)
    drain(box, 0)
    assert handed_back(box.pass_time(0)) == [b"a"]
    assert handed_back(other.take()) == [b"b"]


def test_the_earliest_deadline_holds() -> None:
    box = Box("d")
    box.say(decode(request=b"a"))
    drain(box, 5)
    drain(box, 60)
    assert handed_back(box.pass_time(5)) == [b"a"]
    box = Box("d")
    box.say(decode(request=b"a"))
    drain(box, 60)
    drain(box, 5)
    assert handed_back(box.pass_time(5)) == [b"a"]


# --- tickets -----------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["released", "expired"])
def test_the_last_ticket_lets_a_prefill_worker_go(end: str) -> None:
    box = Box("p")
    first, second = prefilled(box), prefilled(box, [6, 5, 4], request=b"b")
    drain(box, 10 * LEASE_S)
    box.say(wire.Release(first.ticket_id))
    box.pass_time(1)
    assert not box.roles.drained
    if end == "released":
        box.say(wire.Release(second.ticket_id))
        box.pass_time(0)
    else:
        box.pass_time(LEASE_S)
    assert box.roles.drained
    box.check_idle()


def test_tickets_keep_a_worker_a_little_longer_than_its_deadline() -> None:
    box = Box("p")
    prefilled(box)
    drain(box)
    box.pass_time(DEADLINE_S + LAST_PULLS_S - 0.1)
    assert not box.roles.drained, "a pull may be under way"
    box.pass_time(0.1)
    assert box.roles.drained


def test_whoever_drains_a_worker_releases_nobodys_tickets() -> None:
    box, control = Box("p"), RecordingLink("drain-1")
    prefilled(box)
    box.roles.connected(control, ())
    drain(box)
    box.roles.disconnected(control)
    box.pass_time(1)
    assert box.exporter.num_leased == 1
    assert not box.roles.drained


# --- Check -------------------------------------------------------------------------------------


def test_check_is_answered_only_for_what_is_not_known(pair: Pair) -> None:
    box = pair.d
    box.say(reserve(), decode(request=b"c"), prefill(request=b"p"))
    for request in (b"a", b"c", b"p"):
        assert box.say(wire.Check(request, 0)) == []
    for request, attempt in ((b"x", 0), (b"a", 1)):
        lost = only(box.say(wire.Check(request, attempt)))
        assert lost == wire.Failed(request, attempt, "lost", lost.message)  # type: ignore[union-attr]


def test_check_after_the_end_says_that_it_is_over() -> None:
    box = Box("p")
    prefilled(box, IDS)
    lost = only(box.say(wire.Check(b"a", 0)))
    assert isinstance(lost, wire.Failed)
    assert lost.kind == "lost"
    assert box.exporter.num_leased == 1
