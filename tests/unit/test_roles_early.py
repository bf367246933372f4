"""Early pull, case by case: parts while the prompt is computed, in any order with what else happens
to a request. One terminal message, no block left behind, nothing shared before it is verified.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvtransfer.hashing import pack_ids, prefix_hash
from kvtransfer.ticket import Ticket, open_ticket
from router import wire
from services.decode import Stage
from services.engine.sequence import SamplingParams
from tests.support.fake_runner import naive
from tests.support.worker_box import (
    BLOCK,
    IDS,
    LEASE_S,
    MAX_LEN,
    SAMPLING,
    SECRET,
    SPAN,
    Box,
    Pair,
    decode,
    failure,
    is_terminal,
    only,
    only_key,
    prefill,
    prefilled,
    reserve,
)

LONG = [1, 2, 3, 4, 5, 6, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 0]  # 3 steps of P, 5 blocks
OTHER = [6, *LONG[1:]]
EXPECTED = naive(LONG, len(LONG), SamplingParams(4), MAX_LEN)


@pytest.fixture
def box() -> Box:
    return Box("w")


@pytest.fixture
def pair() -> Pair:
    return Pair()


def indexes(pair: Pair, key: bytes) -> list[int]:
    """Which blocks of the sequence a pull fetches."""
    pull = pair.d.puller.pulls[key]
    return [pull.ticket.first_block + index for index, _ in pull.pairs]


def finish(pair: Pair) -> wire.Prefilled:
    """P to its end; further parts are lost on their way."""
    message = pair.p.run()[-1]
    assert isinstance(message, wire.Prefilled)
    return message


def tokens_of(pair: Pair, answer: wire.Prefilled) -> list[int]:
    """D to its end, and P's lease."""
    messages = [m for m in pair.d.run() if isinstance(m, wire.Tokens)]
    assert messages[-1].finish == "length"
    pair.p.say(wire.Release(answer.ticket_id))
    return [answer.token, *(m.ids[0] for m in messages)]


def fail(pair: Pair, key: bytes, settled: bool = True) -> list[wire.Message]:
    return pair.d.event(pair.d.puller.failed(key, settled))


# --- the producer -----------------------------------------------------------------------------


def parts(messages: list[wire.Message]) -> list[Ticket]:
    return [open_ticket(m.ticket, SECRET) for m in messages if isinstance(m, wire.TicketPart)]


def test_a_part_names_what_a_step_has_sealed(box: Box) -> None:
    box.say(prefill(LONG, early=True))
    said = box.run()
    first, second = parts(said)
    assert [first.first_block, second.first_block] == [0, 2]
    assert [first.num_tokens, second.num_tokens] == [8, 16]
    assert first.prefix == prefix_hash(LONG[:8])
    assert second.prefix == prefix_hash(LONG[:16])
    answer = said[-1]
    assert isinstance(answer, wire.Prefilled)
    ticket = open_ticket(answer.ticket, SECRET)
    assert ticket.first_block == 0
    assert first.block_ids + second.block_ids == ticket.block_ids[:4]
    assert first.generations + second.generations == ticket.generations[:4]
    assert {generation % 2 for generation in ticket.generations} == {0}
    assert len({first.ticket_id, second.ticket_id, ticket.ticket_id}) == 3
    assert box.exporter.num_leased == 1, "a part has a lease"
    box.say(wire.Release(first.ticket_id))  # nothing to release
    assert box.exporter.num_leased == 1
    box.say(wire.Release(answer.ticket_id))
    box.check_idle()


@pytest.mark.parametrize(
    "message",
    [
        prefill(LONG),
        prefill(LONG[:8], early=True),
        prefill(LONG, early=True, export=False),
    ],
    ids=["not asked for", "done in one step", "nobody will pull"],
)
def test_no_part_without_need(box: Box, message: wire.Prefill) -> None:
    box.say(message)
    said = box.run()
    assert isinstance(only(said), wire.Prefilled)


def test_cached_blocks_of_the_producer_are_in_the_first_part(box: Box) -> None:
    box.say(wire.Release(prefilled(box, LONG[:9]).ticket_id))
    box.say(prefill(LONG, early=True, request=b"b"))
    box.step()
    (part,) = parts(box.link.take())
    assert (part.first_block, part.num_tokens) == (0, 16)
    box.say(wire.Abort(b"b", 0))
    box.check_idle()


def test_an_abort_between_parts_frees_the_producers_blocks_at_once(pair: Pair) -> None:
    pair.computing(LONG)
    _, key = pair.part()
    failure(pair.p.say(wire.Abort(b"a", 0)), "aborted")
    pair.p.check_idle()
    assert fail(pair, key) == []
    failure(pair.d.say(wire.Abort(b"a", 0)), "aborted")
    pair.check_idle()


def test_a_preempted_prompt_names_only_what_is_new(pair: Pair) -> None:
    """The part that was told has lost its blocks; the final ticket covers them."""
    pair.computing(LONG)
    _, key = pair.part()
    pair.p.engine.scheduler._preempt(pair.p.engine.scheduler.running[0])
    taken = pair.p.engine.pool.allocate(pair.p.engine.pool.num_available)  # nothing is cached now
    assert taken is not None
    pair.p.engine.pool.release(taken)
    said = pair.p.run()
    assert [part.first_block for part in parts(said)] == [2]
    answer = said[-1]
    assert isinstance(answer, wire.Prefilled)
    for message in said[:-1]:
        pair.d.say(message)
    first, second = pair.d.puller.pulls
    assert first == key
    assert fail(pair, first) == []  # its blocks were reused
    assert pair.d.say(pair.decode(LONG, answer)) == []
    assert pair.arrive(second) == []
    last = only_key(pair.d)
    assert indexes(pair, last) == [0, 1, 4]
    pulled = only(pair.arrive(last))
    assert isinstance(pulled, wire.Pulled)
    assert tokens_of(pair, answer) == EXPECTED
    pair.check_idle()


# --- the consumer -----------------------------------------------------------------------------


def test_parts_are_pulled_while_the_prompt_is_computed(pair: Pair) -> None:
    pair.computing(LONG)
    _, one = pair.part()
    assert indexes(pair, one) == [0, 1]
    _, two = pair.part()
    assert indexes(pair, two) == [2, 3]
    assert pair.arrive(two) == []
    assert pair.arrive(one) == []
    answer = finish(pair)
    assert pair.d.say(pair.decode(LONG, answer)) == []
    last = only_key(pair.d)
    assert indexes(pair, last) == [4]
    assert pair.arrive(last) == [wire.Pulled(b"a", 0, 5, 5 * SPAN, 0.0)]
    assert tokens_of(pair, answer) == EXPECTED
    load = pair.d.roles.load()
    assert (load.pulled_blocks, load.pulled_bytes) == (5, 5 * SPAN)
    assert (load.early_blocks, load.failed_pulls) == (4, 0)
    assert load.computed_prompt_tokens == 0
    pair.check_idle()


def test_pull_time_counts_from_the_decode(pair: Pair) -> None:
    pair.computing(LONG)
    _, key = pair.part()
    pair.d.now += 3
    answer = finish(pair)
    pair.d.say(pair.decode(LONG, answer))
    pair.d.now += 2
    pair.arrive(key)
    pulled = only(pair.arrive(only_key(pair.d)))
    assert isinstance(pulled, wire.Pulled)
    assert pulled.pull_ms == 2000
    assert tokens_of(pair, answer) == EXPECTED


def test_early_blocks_are_shared_with_nobody_before_all_are_there(pair: Pair) -> None:
    pair.computing(LONG)
    _, key = pair.part()
    pair.arrive(key)
    assert pair.d.say(reserve(LONG, request=b"b")) == [wire.Reserved(b"b", 0, cached_tokens=0)]
    answer = finish(pair)
    pair.d.say(pair.decode(LONG, answer))
    assert pair.d.say(reserve(LONG, request=b"c")) == [wire.Reserved(b"c", 0, cached_tokens=0)]
    pair.arrive(only_key(pair.d))
    assert pair.d.say(reserve(LONG, request=b"d")) == [wire.Reserved(b"d", 0, cached_tokens=20)]
    pair.d.say(*(wire.Abort(name, 0) for name in (b"b", b"c", b"d")))
    assert tokens_of(pair, answer) == EXPECTED
    pair.check_idle()


def test_only_what_the_cache_lacks_is_pulled_early(pair: Pair) -> None:
    pair.d.say(decode(LONG[:5], request=b"b"))
    pair.d.run()
    assert pair.d.say(reserve(LONG)) == [wire.Reserved(b"a", 0, cached_tokens=4)]
    pair.d.say(wire.Peer(pair.p.card))
    pair.p.say(prefill(LONG, early=True))
    _, key = pair.part()
    assert indexes(pair, key) == [1]
    pair.arrive(key)
    answer = finish(pair)
    pair.d.say(pair.decode(LONG, answer))
    pulled = only(pair.arrive(only_key(pair.d)))
    assert isinstance(pulled, wire.Pulled)
    assert pulled.num_blocks == 4
    assert tokens_of(pair, answer) == EXPECTED
    pair.check_idle()


def test_a_prompt_that_is_cached_whole_is_admitted_without_a_pull(pair: Pair) -> None:
    ids = LONG[:8]
    pair.d.say(decode([*ids, 1], request=b"b"))
    pair.d.run()
    pair.d.say(wire.Peer(pair.p.card), reserve(ids))
    answer = prefilled(pair.p, ids)
    assert pair.d.say(pair.decode(ids, answer)) == [wire.Pulled(b"a", 0, 0, 0, 0.0)]
    assert not pair.d.puller.pulls
    assert tokens_of(pair, answer) == naive(ids, 8, SamplingParams(4), MAX_LEN)
    pair.check_idle()


def test_a_part_over_all_that_is_missing_leaves_nothing_to_pull(pair: Pair) -> None:
    """A part and the ticket may be signed for the same blocks: then Decode admits at once."""
    ids = LONG[:8]
    pair.d.say(wire.Peer(pair.p.card), reserve(ids))
    answer = prefilled(pair.p, ids)
    ticket = open_ticket(answer.ticket, SECRET)
    assert pair.d.say(wire.TicketPart(b"a", 0, ticket.sign(SECRET))) == []
    pair.arrive(only_key(pair.d))
    assert pair.d.say(pair.decode(ids, answer)) == [wire.Pulled(b"a", 0, 2, 2 * SPAN, 0.0)]
    assert tokens_of(pair, answer) == naive(ids, 8, SamplingParams(4), MAX_LEN)
    pair.check_idle()


# --- every end of two parts, before and after Decode --------------------------------------------

WHEN = ["before", "after"]
OUTCOMES = ["arrived", "failed"]


@pytest.mark.parametrize("whens", list(itertools.product(WHEN, repeat=2)))
@pytest.mark.parametrize("outcomes", list(itertools.product(OUTCOMES, repeat=2)))
@pytest.mark.parametrize("swapped", [False, True])
def test_the_last_pull_fetches_exactly_what_is_missing(
    pair: Pair, whens: tuple[str, ...], outcomes: tuple[str, ...], swapped: bool
) -> None:
    pair.computing(LONG)
    keys = [pair.part()[1], pair.part()[1]]
    answer = finish(pair)
    plan = list(zip(keys, whens, outcomes, strict=True))
    if swapped:
        plan.reverse()

    def end(moment: str) -> None:
        for key, when, outcome in plan:
            if when == moment:
                assert (pair.arrive(key) if outcome == "arrived" else fail(pair, key)) == []

    end("before")
    assert pair.d.say(pair.decode(LONG, answer)) == []
    if "after" in whens:
        assert set(pair.d.puller.pulls) <= set(keys), "the last pull began beside the early ones"
    end("after")
    last = only_key(pair.d)
    lost = [
        i for n, outcome in enumerate(outcomes) if outcome == "failed" for i in (2 * n, 2 * n + 1)
    ]
    assert indexes(pair, last) == [*lost, 4]
    assert pair.arrive(last) == [wire.Pulled(b"a", 0, 5, 5 * SPAN, 0.0)]
    assert tokens_of(pair, answer) == EXPECTED
    assert pair.d.decode.stats.early_blocks == 2 * outcomes.count("arrived")
    assert pair.d.decode.stats.failed_parts == outcomes.count("failed")
    assert pair.d.roles.load().failed_pulls == 0
    pair.check_idle()


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("other", ["arrived", "failed", "aborted", "aborted unsettled"])
def test_a_part_that_may_still_write_fails_the_request(pair: Pair, when: str, other: str) -> None:
    pair.computing(LONG)
    one, two = pair.part()[1], pair.part()[1]
    answer = finish(pair)
    if when == "after":
        assert pair.d.say(pair.decode(LONG, answer)) == []
    assert "seal" in failure(fail(pair, one, settled=False), "pull")
    assert pair.d.roles.num_open == 0
    assert pair.d.engine.pool.counts()["quarantined"] == 5, "not as one whole"
    assert pair.d.puller.pulls[two].aborted
    puller = pair.d.puller
    if other == "arrived":
        said = pair.arrive(two)
    elif other == "failed":
        said = fail(pair, two)
    else:
        said = pair.d.event(puller.gave_up(two, settled=other == "aborted"))
    if other == "aborted unsettled":
        assert pair.d.engine.pool.counts()["quarantined"] == 5
        said += pair.d.event(puller.settled(two))
    assert said == []
    assert pair.d.engine.pool.counts()["quarantined"] == 5, "settled while a pull may write"
    assert pair.d.event(puller.settled(one)) == []
    assert pair.d.roles.load().failed_pulls == 1
    pair.p.say(wire.Release(answer.ticket_id))
    pair.check_idle()


@pytest.mark.parametrize("settled", [True, False])
def test_a_failed_last_pull_fails_the_request(pair: Pair, settled: bool) -> None:
    pair.computing(LONG)
    for _ in range(2):
        pair.arrive(pair.part()[1])
    answer = finish(pair)
    pair.d.say(pair.decode(LONG, answer))
    key = only_key(pair.d)
    failure(fail(pair, key, settled), "pull")
    if not settled:
        pair.d.event(pair.d.puller.settled(key))
    assert pair.d.roles.load().failed_pulls == 1
    pair.p.say(wire.Release(answer.ticket_id))
    pair.check_idle()


# --- ends at every point ----------------------------------------------------------------------

ENDS: dict[str, Callable[[Box], list[wire.Message]]] = {
    "aborted": lambda box: box.say(wire.Abort(b"a", 0), wire.Abort(b"a", 0)),
    "deadline": lambda box: box.pass_time(5.0),
    "draining": lambda box: hand_back(box),
    "link lost": lambda box: lose_link(box),
}


def hand_back(box: Box) -> list[wire.Message]:
    box.roles.drain(box.now)
    return box.pass_time(0.0)


def lose_link(box: Box) -> list[wire.Message]:
    box.roles.disconnected(box.link)
    box.roles.flush(box.now)
    return box.link.take()


POINTS = {
    "no part": (0, 0, False),
    "one in flight": (1, 0, False),
    "two in flight": (2, 0, False),
    "one there": (1, 1, False),
    "one there, one in flight": (2, 1, False),
    "decode, two in flight": (2, 0, True),
    "decode, one there, one in flight": (2, 1, True),
    "decode, last pull in flight": (2, 2, True),
    "decode, only pull in flight": (0, 0, True),
}


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("late", [False, True], ids=["settled", "unsettled"])
def test_a_request_may_end_at_any_point(pair: Pair, end: str, point: str, late: bool) -> None:
    num_parts, num_there, decoding = POINTS[point]
    pair.computing(LONG, deadline_ms=5000)
    keys = [pair.part()[1] for _ in range(num_parts)]
    for key in keys[:num_there]:
        pair.arrive(key)
    answer = finish(pair)
    if decoding:
        pair.d.say(pair.decode(LONG, answer))
    said = ENDS[end](pair.d)
    if end == "link lost":
        assert said == []
    else:
        failure(said, end)
    assert pair.d.roles.num_open == 0
    counts = pair.d.engine.pool.counts()
    in_flight = list(pair.d.puller.pulls)
    assert (counts["active"], counts["quarantined"]) == (0, 5 if in_flight else 0)
    assert all(pair.d.puller.pulls[key].aborted for key in in_flight)
    for key in in_flight:
        assert pair.d.engine.pool.counts()["quarantined"] == 5
        assert pair.d.event(pair.d.puller.gave_up(key, settled=not late)) == []
    if late:
        for key in reversed(in_flight):
            for block in pair.d.puller.pulls[key].blocks:
                pair.d.runner.scribble(block)
            assert pair.d.engine.pool.counts()["quarantined"] == 5
            assert pair.d.event(pair.d.puller.settled(key)) == []
    assert pair.d.run() == []
    pair.p.say(wire.Release(answer.ticket_id))
    pair.check_idle()


@pytest.mark.parametrize("settled", ["first", "while it runs", "last"])
def test_a_recompute_under_the_same_key_waits_for_no_part(pair: Pair, settled: str) -> None:
    pair.computing(LONG)
    _, key = pair.part()
    pair.p.say(wire.Abort(b"a", 0))
    if settled == "first":
        fail(pair, key)
    assert pair.d.say(decode(LONG)) == []
    pair.d.step()
    if settled == "while it runs":
        assert pair.d.puller.pulls[key].aborted
        pair.d.event(pair.d.puller.gave_up(key, settled=False))
        for block in pair.d.puller.pulls[key].blocks:
            pair.d.runner.scribble(block)
        pair.d.event(pair.d.puller.settled(key))
    tokens = [m.ids[0] for m in pair.d.run() if isinstance(m, wire.Tokens)]
    assert tokens == EXPECTED
    if settled == "last":
        assert pair.d.engine.pool.counts()["quarantined"] == 5
        assert "has not ended" in failure(pair.d.say(reserve(LONG)), "invalid")
        assert pair.arrive(key) == []
    pair.check_idle()


def test_an_abort_of_a_recompute_leaves_the_quarantine_of_its_part(pair: Pair) -> None:
    pair.computing(LONG)
    _, key = pair.part()
    pair.d.say(decode(LONG))
    pair.d.step()
    failure(pair.d.say(wire.Abort(b"a", 0)), "aborted")
    assert pair.d.engine.pool.counts()["quarantined"] == 5
    pair.d.event(pair.d.puller.gave_up(key, settled=True))
    pair.p.say(wire.Abort(b"a", 0))
    pair.check_idle()


def test_another_attempt_needs_not_wait_for_the_first_ones_quarantine(pair: Pair) -> None:
    pair.computing(LONG)
    _, key = pair.part()
    failure(pair.d.say(wire.Abort(b"a", 0)), "aborted")
    failure(pair.p.say(wire.Abort(b"a", 0)), "aborted")
    pair.d.event(pair.d.puller.gave_up(key, settled=False))
    pair.computing(LONG, attempt=1)
    _, again = pair.part()
    assert again != key
    for block in pair.d.puller.pulls[key].blocks:
        pair.d.runner.scribble(block)  # bytes of the first attempt
    pair.arrive(again)
    answer = finish(pair)
    pair.d.say(replace(pair.decode(LONG, answer), attempt=1))
    last = next(k for k in pair.d.puller.pulls if k != key)
    assert indexes(pair, last) == [4]
    pair.arrive(last)
    assert tokens_of(pair, answer) == EXPECTED
    pair.d.event(pair.d.puller.settled(key))
    pair.check_idle()


# --- parts that come late, twice, or are wrong ----------------------------------------------------


def test_a_repeated_part_pulls_nothing_again(pair: Pair) -> None:
    pair.computing(LONG)
    message, key = pair.part()
    pair.d.say(message, message)
    assert only_key(pair.d) == key
    pair.arrive(key)
    pair.d.say(message)
    assert not pair.d.puller.pulls
    fresh, key = pair.part()
    fail(pair, key)
    pair.d.say(message, fresh)  # what failed may be tried again
    assert indexes(pair, only_key(pair.d)) == [2, 3]
    failure(pair.d.say(wire.Abort(b"a", 0)), "aborted")
    pair.d.event(pair.d.puller.gave_up(only_key(pair.d), settled=True))
    pair.p.say(wire.Abort(b"a", 0))
    pair.check_idle()


def test_a_part_that_comes_late_is_ignored(pair: Pair) -> None:
    pair.computing(LONG)
    message = only(pair.step())
    answer = finish(pair)
    unknown = replace(message, request=b"?")  # type: ignore[arg-type]
    assert pair.d.say(unknown) == []
    pair.d.say(pair.decode(LONG, answer))
    key = only_key(pair.d)
    assert pair.d.say(message) == []
    assert only_key(pair.d) == key
    pair.arrive(key)
    assert pair.d.say(message) == []
    assert tokens_of(pair, answer) == EXPECTED
    assert pair.d.say(message) == []
    pair.computing(OTHER, attempt=1)
    failure(pair.d.say(wire.Abort(b"a", 1)), "aborted")
    assert pair.d.say(replace(message, attempt=1)) == []  # type: ignore[arg-type]
    pair.p.say(wire.Abort(b"a", 1))
    assert not pair.d.puller.pulls
    assert pair.d.decode.stats.wrong_parts == 0
    pair.check_idle()


def test_a_part_of_an_unknown_peer_is_dropped(pair: Pair) -> None:
    pair.d.say(reserve(LONG))
    pair.p.say(prefill(LONG, early=True))
    message = only(pair.step())
    assert pair.d.say(message) == []
    assert not pair.d.puller.pulls
    answer = finish(pair)
    assert pair.d.say(pair.decode(LONG, answer)) == [wire.UnknownPeer(b"a", 0, "p", 7)]
    pair.d.say(wire.Peer(pair.p.card), pair.decode(LONG, answer))
    pair.arrive(only_key(pair.d))
    assert tokens_of(pair, answer) == EXPECTED
    pair.check_idle()


WRONG: dict[str, Callable[[Ticket], bytes]] = {
    "forged": lambda ticket: ticket.sign(b"another secret"),
    "cut": lambda ticket: ticket.sign(SECRET)[:20],
    "empty": lambda ticket: b"",
    "another layout": lambda t: replace(t, fingerprint=b"other").sign(SECRET),
    "no blocks": lambda t: replace(t, block_ids=(), generations=()).sign(SECRET),
    "moved": lambda t: replace(t, first_block=1).sign(SECRET),
    "moved with its tokens": lambda t: replace(t, first_block=1, num_tokens=12).sign(SECRET),
    "before the first": lambda t: replace(t, first_block=-1, num_tokens=4).sign(SECRET),
    "behind the end": lambda t: replace(t, first_block=4, num_tokens=24).sign(SECRET),
    "far behind": lambda t: replace(t, first_block=1 << 40).sign(SECRET),
    "fewer tokens": lambda t: replace(t, num_tokens=7, prefix=prefix_hash(LONG[:7])).sign(SECRET),
    "other tokens": lambda t: replace(t, prefix=prefix_hash(OTHER[:8])).sign(SECRET),
}


@pytest.mark.parametrize("how", WRONG)
def test_a_wrong_part_is_dropped_and_costs_nothing(pair: Pair, how: str) -> None:
    pair.computing(LONG)
    message = only(pair.step())
    assert isinstance(message, wire.TicketPart)
    ticket = WRONG[how](open_ticket(message.ticket, SECRET))
    assert pair.d.say(replace(message, ticket=ticket)) == []
    assert not pair.d.puller.pulls
    assert pair.d.decode.stats.wrong_parts == 1
    assert pair.d.decode.knows((b"a", 0)) is Stage.RESERVED
    answer = finish(pair)
    pair.d.say(pair.decode(LONG, answer))
    pair.arrive(only_key(pair.d))
    assert tokens_of(pair, answer) == EXPECTED
    pair.check_idle()


def test_a_part_of_another_request_is_dropped(pair: Pair) -> None:
    pair.computing(LONG)
    pair.d.say(reserve(OTHER, request=b"b"))
    message = only(pair.step())
    pair.d.say(replace(message, request=b"b"))  # type: ignore[arg-type]
    assert pair.d.decode.stats.wrong_parts == 1
    assert not pair.d.puller.pulls
    pair.d.say(wire.Abort(b"a", 0), wire.Abort(b"b", 0))
    pair.p.say(wire.Abort(b"a", 0))
    pair.check_idle()


def test_a_part_that_ends_behind_the_reserved_tokens_is_dropped(pair: Pair) -> None:
    """The last block of the reservation is partial: no part can cover it."""
    ids = LONG[:6]
    pair.d.say(wire.Peer(pair.p.card), reserve(ids))
    answer = prefilled(pair.p, LONG[:8])
    pair.d.say(wire.TicketPart(b"a", 0, answer.ticket))
    assert not pair.d.puller.pulls
    assert pair.d.decode.stats.wrong_parts == 1
    pair.d.say(wire.Abort(b"a", 0))
    pair.p.say(wire.Release(answer.ticket_id))
    pair.check_idle()


def test_a_part_is_no_ticket_for_a_decode(pair: Pair) -> None:
    pair.computing(LONG[:12])
    message = only(pair.step())
    assert isinstance(message, wire.TicketPart)
    part = open_ticket(message.ticket, SECRET)
    moved = replace(part, first_block=1, num_tokens=12, prefix=prefix_hash(LONG[:12]))
    for ticket in (message.ticket, moved.sign(SECRET)):
        pair.d.say(reserve(LONG[:12], request=b"b"))
        wrong = decode([*LONG[:12], 1], num_prompt=12, ticket=ticket, request=b"b")
        failure(pair.d.say(wrong), "pull")
    assert not pair.d.puller.pulls
    pair.d.say(wire.Abort(b"a", 0))
    pair.p.say(wire.Abort(b"a", 0))
    pair.check_idle()


# --- peers that are gone (FAULTS B008, B041) ------------------------------------------------------


def hand_off(pair: Pair, request: bytes) -> None:
    pair.d.say(wire.Peer(pair.p.card), reserve(request=request))
    answer = prefilled(pair.p, request=request)
    pair.d.say(replace(pair.decode(IDS, answer), request=request))
    pair.arrive(only_key(pair.d))
    tokens_of(pair, answer)


@pytest.mark.parametrize("same_id", [False, True], ids=["Forget", "a new epoch"])
def test_restarts_of_a_producer_leave_nothing_behind(pair: Pair, same_id: bool) -> None:
    for epoch in range(1, 21):
        worker_id = "p" if same_id else f"p{epoch}"
        pair.p = Box(worker_id, epoch)
        hand_off(pair, b"%d" % epoch)
        if not same_id:
            pair.d.say(wire.Forget(worker_id, epoch), wire.Forget(worker_id, epoch))
    assert len(pair.d.decode._peers) == len(pair.d.puller.known) == (1 if same_id else 0)
    assert pair.d.puller.most_known <= 2
    pair.check_idle()


def test_a_peer_is_forgotten_once_its_reads_are_over(pair: Pair) -> None:
    answer, key = pair.pulling()
    assert pair.d.say(wire.Forget("p", 7)) == []
    assert pair.d.puller.known == {("p", 7)}, "forgotten with a read in flight"
    pair.arrive(key)
    assert not pair.d.puller.known
    assert len(tokens_of(pair, answer)) == 4
    pair.d.say(reserve(LONG, request=b"b"))
    again = prefilled(pair.p, LONG, request=b"b")
    message = replace(pair.decode(LONG, again), request=b"b")
    assert pair.d.say(message) == [wire.UnknownPeer(b"b", 0, "p", 7)]
    pair.d.say(wire.Abort(b"b", 0))
    pair.p.say(wire.Release(again.ticket_id))
    pair.check_idle()


def test_a_peer_that_was_forgotten_is_not_met_again_by_a_last_pull(pair: Pair) -> None:
    pair.computing(LONG)
    _, key = pair.part()
    answer = finish(pair)
    assert pair.d.say(pair.decode(LONG, answer), wire.Forget("p", 7)) == []
    assert "p is gone" in failure(pair.arrive(key), "pull")
    assert not pair.d.puller.known
    pair.p.say(wire.Release(answer.ticket_id))
    pair.check_idle()


def test_an_old_epoch_that_is_gone_takes_nothing_of_the_new_one(pair: Pair) -> None:
    new = Box("p", epoch=8)
    pair.d.say(wire.Peer(pair.p.card), wire.Peer(new.card), wire.Forget("p", 7))
    pair.p = new
    hand_off(pair, b"a")
    pair.check_idle()


# --- another decode worker takes over -------------------------------------------------------------


@pytest.mark.parametrize("delivered", [1, 2, 3])
def test_a_ticket_serves_another_decode_worker_with_the_tokens_so_far(
    pair: Pair, delivered: int
) -> None:
    """The first one died; its blocks were never released, so the lease still holds."""
    answer, _ = pair.pulling(LONG)
    pair.d = Box("another d", epoch=11)
    assert answer.num_tokens == len(LONG)
    ids = [*LONG, *EXPECTED[:delivered]]
    reserved = pair.d.say(wire.Peer(pair.p.card), reserve(ids[: answer.num_tokens], attempt=1))
    assert isinstance(only(reserved), wire.Reserved)
    message = wire.Decode(b"a", 1, pack_ids(ids), len(LONG), SAMPLING, answer.ticket)
    assert pair.d.say(message) == []
    assert isinstance(only(pair.arrive(only_key(pair.d))), wire.Pulled)
    messages = [m for m in pair.d.run() if isinstance(m, wire.Tokens)]
    assert [m.first_index for m in messages] == list(range(delivered, 4))
    assert [m.ids[0] for m in messages] == EXPECTED[delivered:]
    assert pair.d.roles.load().computed_prompt_tokens == 0
    pair.p.say(wire.Release(answer.ticket_id))
    pair.check_idle()


def test_a_lease_that_ended_does_not_end_a_pull(pair: Pair) -> None:
    """Expiry touches no generation: intact blocks still verify."""
    pair.computing(LONG)
    _, key = pair.part()
    answer = finish(pair)
    pair.p.pass_time(LEASE_S)
    pair.d.say(pair.decode(LONG, answer))
    pair.arrive(key)
    pair.arrive(only_key(pair.d))
    assert is_terminal(pair.d.run()[-1])
    assert pair.p.roles.load().expired_leases == 1
    pair.check_idle()


def test_one_block_is_the_smallest_part() -> None:
    """A part has whole blocks only, whatever the step."""
    box = Box("p", chunk_budget=3)
    box.say(prefill(LONG, early=True))
    found = parts(box.run())
    assert [part.num_tokens % BLOCK for part in found] == [0] * len(found)
    assert [part.num_tokens for part in found] == [4, 8, 12, 16]
    assert [len(part.block_ids) for part in found] == [1, 1, 1, 1]
