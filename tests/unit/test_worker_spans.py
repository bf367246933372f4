"""What a worker says of a traced request, from whole workers without tensors and clocks."""

from __future__ import annotations

import pytest

from router import wire
from router.tracing import Span
from tests.support.worker_box import (
    BLOCK,
    IDS,
    SPAN,
    Box,
    Pair,
    decode,
    only,
    only_key,
    prefill,
    reserve,
)

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
LONG = [1 + i % 6 for i in range(5 * BLOCK + 1)]


class Recorded:
    """What was recorded, by name."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def __call__(self, parent: str, span: Span) -> None:
        assert parent == TRACE
        assert span.start <= span.end
        self.spans.append(span)

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.spans]

    def one(self, name: str) -> Span:
        (span,) = [span for span in self.spans if span.name == name]
        return span


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


def times(span: Span) -> tuple[float, float]:
    return span.start, span.end


def test_a_prompt_waits_and_is_computed(recorded: Recorded) -> None:
    box = Box("p", record=recorded)
    assert box.say(prefill(trace=TRACE)) == []
    box.now += 2  # until it is scheduled
    assert isinstance(only(box.run()), wire.Prefilled)
    assert recorded.names == ["prefill.queue", "prefill"]
    assert times(recorded.one("prefill.queue")) == (100, 102)
    span = recorded.one("prefill")
    assert times(span) == (102, 102)
    assert not span.error
    assert span.attributes == {
        "baton.worker.id": "p",
        "baton.job.id": b"a".hex(),
        "baton.attempt": 0,
        "baton.prompt.cached_tokens": 0,
    }


def test_what_the_prefix_cache_spared(recorded: Recorded) -> None:
    box = Box("p", record=recorded)
    for request in (b"a", b"b"):
        assert box.say(prefill(LONG, request, trace=TRACE)) == []
        answer = only(box.run())
        assert isinstance(answer, wire.Prefilled)
        box.say(wire.Release(answer.ticket_id))
    cached = [
        s.attributes["baton.prompt.cached_tokens"] for s in recorded.spans if s.name == "prefill"
    ]
    assert cached == [0, 5 * BLOCK]


def test_a_pull_and_what_is_decoded(recorded: Recorded) -> None:
    pair = Pair(recorded)
    assert isinstance(only(pair.d.say(reserve(trace=TRACE))), wire.Reserved)
    pair.d.now = 105  # P computes: nothing for D to do
    answer = prefilled(pair.p)
    assert pair.d.say(wire.Peer(pair.p.card), traced(pair, answer)) == []
    pair.d.now = 107
    pair.arrive(only_key(pair.d))
    pair.d.now = 110
    pair.d.run()
    transfer, decoding = recorded.one("kv_transfer"), recorded.one("decode")
    assert times(transfer) == (105, 107)
    blocks = -(-len(IDS) // BLOCK)
    assert transfer.attributes["baton.kv.blocks"] == blocks
    assert transfer.attributes["baton.kv.bytes"] == blocks * SPAN
    assert [(event.name, event.at) for event in transfer.events] == [("ticket", 105)]
    assert times(decoding) == (107, 110)  # what it waits for its first step is in it
    assert [(event.name, event.at) for event in decoding.events] == [("first_token", 110)]
    assert decoding.attributes["baton.tokens"] == 3  # and one by P
    assert {span.attributes["baton.worker.id"] for span in recorded.spans[2:]} == {"d"}


def test_an_early_pull_lies_beside_the_prefill(recorded: Recorded) -> None:
    pair = Pair(recorded)
    pair.computing(LONG, trace=TRACE)
    pair.p.now = pair.d.now = 101
    _, key = pair.part()
    pair.p.now = pair.d.now = 102
    pair.arrive(key)
    pair.p.now = pair.d.now = 103
    (*_, answer) = pair.p.run()
    assert isinstance(answer, wire.Prefilled)
    assert pair.d.say(traced(pair, answer, LONG)) == []
    pair.d.now = 104
    pair.arrive(only_key(pair.d))
    transfer = recorded.one("kv_transfer")
    assert times(transfer) == (101, 104)
    assert transfer.events[0].at == 103
    assert transfer.start < recorded.one("prefill").end


def test_a_mixed_worker_computes_and_decodes(recorded: Recorded) -> None:
    box = Box("m", record=recorded)
    box.say(decode(trace=TRACE))
    while box.engine.has_work:
        box.now += 1
        box.step()
    assert recorded.names == ["prefill.queue", "prefill", "decode"]
    assert times(recorded.one("prefill.queue")) == (100, 101)
    assert times(recorded.one("decode")) == (101, 104)
    assert recorded.one("decode").attributes["baton.tokens"] == 4


@pytest.mark.parametrize("num_tokens", [0, 1, 2])
def test_an_abort_is_the_error_of_what_was_under_way(recorded: Recorded, num_tokens: int) -> None:
    box = Box("m", record=recorded)
    box.say(decode(trace=TRACE))
    for _ in range(num_tokens):
        box.step()
    box.now = 103
    box.say(wire.Abort(b"a", 0))
    span = recorded.spans[-1]
    assert (span.name, span.error) == ("decode" if num_tokens else "prefill", "aborted")
    assert span.end == 103
    assert not [other.error for other in recorded.spans[:-1] if other.error]


def test_a_pull_that_fails(recorded: Recorded) -> None:
    pair = Pair(recorded)
    pair.d.say(reserve(trace=TRACE))
    answer = prefilled(pair.p)
    pair.d.say(wire.Peer(pair.p.card), traced(pair, answer))
    pair.d.now = 106
    pair.d.event(pair.d.puller.failed(only_key(pair.d), settled=True))
    span = recorded.one("kv_transfer")
    assert (span.error, *times(span)) == ("pull", 100, 106)
    assert "decode" not in recorded.names


def test_a_deadline_and_a_lost_connection(recorded: Recorded) -> None:
    box = Box("p", record=recorded)
    box.say(prefill(trace=TRACE, deadline_ms=1000))
    box.pass_time(2)
    box.say(prefill(request=b"b", trace=TRACE))
    box.roles.disconnected(box.link)
    assert [span.error for span in recorded.spans] == ["deadline", "lost"]


def test_a_reservation_that_came_to_nothing_says_nothing(recorded: Recorded) -> None:
    box = Box("d", record=recorded)
    box.say(reserve(trace=TRACE), wire.Abort(b"a", 0))
    assert recorded.spans == []


def test_what_is_not_traced_says_nothing(recorded: Recorded) -> None:
    pair = Pair(recorded)
    _, key = pair.pulling()
    pair.arrive(key)
    pair.d.run()
    assert recorded.spans == []


def prefilled(box: Box) -> wire.Prefilled:
    box.say(prefill(trace=TRACE))
    answer = only(box.run())
    assert isinstance(answer, wire.Prefilled)
    return answer


def traced(pair: Pair, answer: wire.Prefilled, ids: list[int] = IDS) -> wire.Decode:
    return decode([*ids, answer.token], num_prompt=len(ids), ticket=answer.ticket, trace=TRACE)
