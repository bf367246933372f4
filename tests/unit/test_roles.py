"""The conversation of a worker, case by case: one terminal message, and no block left behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvtransfer.hashing import pack_ids
from kvtransfer.ticket import open_ticket
from router import wire
from services.engine.sequence import SamplingParams
from tests.support.fake_runner import VOCAB, naive
from tests.support.worker_box import (
    BLOCK,
    IDS,
    LEASE_S,
    MAX_LEN,
    SECRET,
    SPAN,
    Box,
    Pair,
    RecordingLink,
    Work,
    decode,
    failure,
    is_terminal,
    only,
    only_key,
    prefill,
    prefilled,
    reserve,
)


@pytest.fixture
def box() -> Box:
    return Box("w")


@pytest.fixture
def pair() -> Pair:
    return Pair()


# --- the conversation -------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_a_hand_off_from_reserve_to_release(pair: Pair, length: int) -> None:
    ids = [i % VOCAB for i in range(length)]
    assert pair.d.say(reserve(ids)) == [wire.Reserved(b"a", 0, cached_tokens=0)]
    answer = prefilled(pair.p, ids)
    assert answer.num_tokens == length
    assert answer.lease_ms == LEASE_S * 1000
    assert pair.p.roles.load().tickets == 1
    assert pair.d.say(wire.Peer(pair.p.card), pair.decode(ids, answer)) == []
    pulled = only(pair.arrive(only_key(pair.d)))
    blocks = -(-length // BLOCK)
    assert pulled == wire.Pulled(b"a", 0, blocks, blocks * SPAN, 0.0)
    assert pair.d.roles.load().owed_blocks == 1  # it will grow
    assert pair.p.say(wire.Release(answer.ticket_id), wire.Release(answer.ticket_id)) == []
    tokens = pair.d.run()
    assert [m.first_index for m in tokens if isinstance(m, wire.Tokens)] == [1, 2, 3]
    assert [m.finish for m in tokens if isinstance(m, wire.Tokens)] == ["", "", "length"]
    got = [answer.token, *(m.ids[0] for m in tokens if isinstance(m, wire.Tokens))]
    assert got == naive(ids, length, SamplingParams(4), MAX_LEN)
    load = pair.d.roles.load()
    assert (load.computed_prompt_tokens, load.generated_tokens, load.owed_blocks) == (0, 3, 0)
    assert (load.pulled_blocks, load.pulled_bytes) == (blocks, blocks * SPAN)
    assert pair.p.roles.load().computed_prompt_tokens == length
    pair.check_idle()


def test_the_second_turn_pulls_only_what_the_cache_lacks(pair: Pair) -> None:
    _, key = pair.pulling()
    pair.arrive(key)
    turn = [*IDS, *naive(IDS, 6, SamplingParams(4), MAX_LEN), 2, 2]
    pair.d.run()
    pair.p.pass_time(LEASE_S)
    assert pair.d.say(reserve(turn)) == [wire.Reserved(b"a", 0, cached_tokens=8)]
    answer = prefilled(pair.p, turn)
    assert answer.cached_tokens == 4  # P has only what it computed itself: the first block
    assert pair.d.say(pair.decode(turn, answer)) == []
    key = only_key(pair.d)
    assert [index for index, _ in pair.d.puller.pulls[key].pairs] == [2]
    message = only(pair.arrive(key))
    assert isinstance(message, wire.Pulled)
    assert message.num_bytes == SPAN
    tokens = [m.ids[0] for m in pair.d.run() if isinstance(m, wire.Tokens)]
    assert [answer.token, *tokens] == naive(turn, 12, SamplingParams(4), MAX_LEN)
    pair.p.say(wire.Release(answer.ticket_id))
    pair.check_idle()


def test_decode_without_a_ticket_computes_everything(box: Box) -> None:
    assert box.say(decode(IDS)) == []
    tokens = [m for m in box.run() if isinstance(m, wire.Tokens)]
    assert [m.ids[0] for m in tokens] == naive(IDS, 6, SamplingParams(4), MAX_LEN)
    assert box.roles.load().computed_prompt_tokens == 6
    box.check_idle()


@pytest.mark.parametrize(
    "sampling",
    [
        wire.Sampling(max_tokens=1),
        wire.Sampling(max_tokens=9, stop_ids=tuple(naive(IDS, 6, SamplingParams(1), MAX_LEN))),
    ],
    ids=["max_tokens is 1", "the first token is a stop"],
)
def test_an_answer_of_one_token_leaves_no_ticket(box: Box, sampling: wire.Sampling) -> None:
    answer = prefilled(box, sampling=sampling)
    assert answer.finish == ("length" if sampling.max_tokens == 1 else "stop")
    assert (answer.ticket, answer.ticket_id, answer.num_tokens) == (b"", b"", 0)
    box.check_idle()


def test_prefill_without_export_keeps_nothing(box: Box) -> None:
    answer = prefilled(box, export=False)
    assert (answer.finish, answer.ticket) == ("", b"")
    box.check_idle()


def test_a_stop_before_min_tokens_still_gets_a_ticket(box: Box) -> None:
    stop = tuple(naive(IDS, 6, SamplingParams(1), MAX_LEN))
    answer = prefilled(box, sampling=wire.Sampling(max_tokens=5, min_tokens=3, stop_ids=stop))
    assert answer.ticket
    box.say(wire.Release(answer.ticket_id))
    box.check_idle()


def test_an_unknown_peer_leaves_the_request_open(pair: Pair) -> None:
    pair.d.say(reserve())
    answer = prefilled(pair.p)
    message = pair.decode(IDS, answer)
    assert pair.d.say(message) == [wire.UnknownPeer(b"a", 0, "p", 7)]
    assert pair.d.say(wire.Peer(pair.p.card), message) == []
    pair.arrive(only_key(pair.d))
    assert is_terminal(pair.d.run()[-1])
    pair.p.say(wire.Release(answer.ticket_id))
    pair.check_idle()


def test_a_new_epoch_replaces_the_card_of_the_old_one(pair: Pair) -> None:
    pair.d.say(wire.Peer(pair.p.card), wire.Peer(replace(pair.p.card, epoch=8)), reserve())
    answer = prefilled(pair.p)
    assert pair.d.say(pair.decode(IDS, answer)) == [wire.UnknownPeer(b"a", 0, "p", 7)]
    failure(pair.d.say(wire.Abort(b"a", 0)), "aborted")
    pair.d.check_idle()


def test_a_reservation_may_be_computed_here_after_all(box: Box) -> None:
    box.say(reserve())
    assert box.say(decode()) == []
    tokens = [m.ids[0] for m in box.run() if isinstance(m, wire.Tokens)]
    assert tokens == naive(IDS, 6, SamplingParams(4), MAX_LEN)
    box.check_idle()


# --- ends -------------------------------------------------------------------------------------

ENDS: dict[str, tuple[Callable[[Box], list[wire.Message]], str]] = {
    "abort": (lambda box: box.say(wire.Abort(b"a", 0), wire.Abort(b"a", 0)), "aborted"),
    "deadline": (lambda box: box.pass_time(5.0), "deadline"),
}
STARTS: dict[str, tuple[list[wire.Message], int]] = {
    "reserved": ([reserve(deadline_ms=5000)], 0),
    "prefill queued": ([prefill(deadline_ms=5000)], 0),
    "prefill in chunks": ([prefill([1] * 20, deadline_ms=5000)], 1),
    "decode queued": ([decode(deadline_ms=5000)], 0),
    "decoding": ([decode(deadline_ms=5000)], 2),
}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("end", ENDS)
def test_every_stage_can_be_ended(box: Box, start: str, end: str) -> None:
    messages, steps = STARTS[start]
    box.say(*messages)
    for _ in range(steps):
        box.step()
    box.link.take()
    act, kind = ENDS[end]
    failure(act(box), kind)
    assert box.run() == []
    box.check_idle()


@pytest.mark.parametrize("start", STARTS)
def test_a_lost_link_ends_every_stage_silently(box: Box, start: str) -> None:
    messages, steps = STARTS[start]
    box.say(*messages)
    for _ in range(steps):
        box.step()
    box.link.take()
    box.roles.disconnected(box.link)
    box.handle(prefill(request=b"b"))  # it was on its way
    assert box.run() == []
    box.check_idle()


PULL_ENDS = ["arrived", "failed", "failed unsettled", "aborted", "aborted unsettled"]


def end_pull(pair: Pair, key: bytes, how: str) -> list[wire.Message]:
    puller = pair.d.puller
    if how == "arrived":
        return pair.arrive(key)
    settled = not how.endswith("unsettled")
    event = (puller.failed if how.startswith("failed") else puller.gave_up)(key, settled)
    said = pair.d.event(event)
    if not settled:
        assert pair.d.engine.pool.counts()["quarantined"] == len(event.blocks)
        said += pair.d.event(puller.settled(key))
    return said


@pytest.mark.parametrize("how", PULL_ENDS)
@pytest.mark.parametrize("end", [*ENDS, "link lost"])
def test_a_request_that_ends_during_its_pull_keeps_the_blocks_until_it_settles(
    pair: Pair, end: str, how: str
) -> None:
    answer, key = pair.pulling(deadline_ms=5000)
    if end == "link lost":
        pair.d.roles.disconnected(pair.d.link)
    else:
        act, kind = ENDS[end]
        failure(act(pair.d), kind)
    assert pair.d.roles.num_open == 0
    assert pair.d.engine.pool.counts()["quarantined"] == 2
    assert pair.d.puller.pulls[key].aborted
    assert end_pull(pair, key, how) == []
    assert pair.d.run() == []
    pair.p.say(wire.Release(answer.ticket_id))
    pair.check_idle()


@pytest.mark.parametrize("how", ["failed", "failed unsettled"])
def test_a_failed_pull_fails_the_request_once(pair: Pair, how: str) -> None:
    answer, key = pair.pulling()
    assert "seal" in failure(end_pull(pair, key, how), "pull")
    assert pair.d.say(wire.Abort(b"a", 0)) == []
    assert pair.d.roles.load().failed_pulls == 1
    pair.p.say(wire.Release(answer.ticket_id))
    pair.check_idle()


def test_the_deadline_of_a_request_is_that_of_its_pull(pair: Pair) -> None:
    _, key = pair.pulling(deadline_ms=5000)
    assert pair.d.puller.pulls[key].deadline == pair.d.now + 5.0


def test_a_key_is_not_opened_again_while_its_blocks_are_in_quarantine(pair: Pair) -> None:
    answer, key = pair.pulling()
    failure(pair.d.say(wire.Abort(b"a", 0)), "aborted")
    assert "has not ended" in failure(pair.d.say(reserve()), "invalid")
    pair.d.event(pair.d.puller.gave_up(key, settled=False))
    for message in (reserve(), prefill(), decode()):
        assert "has not ended" in failure(pair.d.say(message), "invalid")
    pair.d.event(pair.d.puller.settled(key))
    assert isinstance(only(pair.d.say(reserve())), wire.Reserved)
    pair.d.say(wire.Abort(b"a", 0))
    pair.p.say(wire.Release(answer.ticket_id))
    pair.check_idle()


def test_late_bytes_in_quarantine_reach_nobody(pair: Pair) -> None:
    _, key = pair.pulling([1] * 20)
    blocks = pair.d.puller.pulls[key].blocks
    pair.d.say(wire.Abort(b"a", 0))
    pair.d.event(pair.d.puller.gave_up(key, settled=False))
    pair.d.say(decode([1] * 20, request=b"b"))
    pair.d.step()
    for block in blocks:
        pair.d.runner.scribble(block)
    tokens = [m.ids[0] for m in pair.d.run() if isinstance(m, wire.Tokens)]
    assert tokens == naive([1] * 20, 20, SamplingParams(4), MAX_LEN)


# --- repeated and wrong messages --------------------------------------------------------------


@pytest.mark.parametrize("again", [reserve(), prefill(), decode()], ids=["R", "P", "D"])
@pytest.mark.parametrize("first", [reserve(), prefill(), decode()], ids=["R", "P", "D"])
def test_a_repeated_message_adds_no_second_terminal(
    box: Box, first: wire.Message, again: wire.Message
) -> None:
    box.say(first)
    said = box.say(again) + box.run() + box.say(wire.Abort(b"a", 0))
    assert sum(map(is_terminal, said)) == 1
    for message in said:
        if isinstance(message, wire.Prefilled):
            box.say(wire.Release(message.ticket_id))
    box.check_idle()


def test_a_repeated_decode_starts_no_second_pull(pair: Pair) -> None:
    answer, key = pair.pulling()
    message = pair.decode(IDS, answer)
    assert pair.d.say(message) == []
    pair.arrive(key)
    assert pair.d.say(message) == []
    assert sum(map(is_terminal, pair.d.run())) == 1
    pair.p.say(wire.Release(answer.ticket_id))
    pair.check_idle()


WRONG: dict[str, dict[str, object]] = {
    "no token ids": {"ids": b""},
    "not packed u32": {"ids": b"12345"},
    "outside the vocabulary": {"ids": pack_ids([1, VOCAB])},
    "exceed": {"ids": pack_ids([1] * MAX_LEN)},
    "num_prompt 0": {"num_prompt": 0},
    "num_prompt 7": {"num_prompt": 7},
    "there already": {"num_prompt": 2, "sampling": wire.Sampling(max_tokens=4)},
    "a stop id": {"sampling": wire.Sampling(4, stop_ids=(1, VOCAB))},
    "out of range: .*temperature=-1": {"sampling": wire.Sampling(4, temperature=-1.0)},
    "out of range: .*temperature=nan": {"sampling": wire.Sampling(4, temperature=float("nan"))},
    "out of range: .*temperature=inf": {"sampling": wire.Sampling(4, temperature=float("inf"))},
    "out of range: .*top_p=0": {"sampling": wire.Sampling(4, top_p=0.0)},
    "out of range: .*top_p=2": {"sampling": wire.Sampling(4, top_p=2.0)},
    "out of range: .*top_k=-1": {"sampling": wire.Sampling(4, top_k=-1)},
    "out of range: .*min_p=1.5": {"sampling": wire.Sampling(4, min_p=1.5)},
    "out of range: .*seed=18446744073709551616": {"sampling": wire.Sampling(4, seed=1 << 64)},
    "out of range: .*choice=-1": {"sampling": wire.Sampling(4, choice=-1)},
    "attempt -1": {"attempt": -1},
    "attempt 4294967296": {"attempt": 1 << 32},
    "the salt has 256 bytes": {"salt": bytes(256)},
}


WRONG_CASES = [
    (base, text)
    for base in (reserve(), prefill(), decode())
    for text, changes in WRONG.items()
    if changes.keys() <= vars(base).keys()
]


@pytest.mark.parametrize(("base", "text"), WRONG_CASES)
def test_what_is_wrong_ends_that_request_only(box: Box, base: Work, text: str) -> None:
    changes = WRONG[text]
    if "num_prompt" not in changes and "ids" in changes and not isinstance(base, wire.Reserve):
        changes = {**changes, "num_prompt": max(1, len(changes["ids"]) // 4)}  # type: ignore[arg-type]
    message = only(box.say(replace(base, **changes)))  # type: ignore[arg-type]
    if isinstance(base, wire.Reserve):
        assert isinstance(message, wire.Refused)
        assert not message.retry
        reason = message.reason
    else:
        reason = failure([message], "invalid")
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(reason)
    assert [m for m in box.say(decode(request=b"ok")) + box.run() if is_terminal(m)]
    box.check_idle()


def test_the_longest_salt_and_attempt_are_fine(pair: Pair) -> None:
    last = (1 << 32) - 1
    reserved = pair.d.say(reserve(attempt=last, salt=bytes(255)))
    assert isinstance(only(reserved), wire.Reserved)
    answer = prefilled(pair.p, salt=bytes(255))
    message = replace(pair.decode(IDS, answer), attempt=last)
    pair.d.say(wire.Peer(pair.p.card), message)
    pair.arrive(only_key(pair.d))
    assert is_terminal(pair.d.run()[-1])


def test_a_wrong_decode_ends_its_reservation(pair: Pair) -> None:
    pair.d.say(reserve())
    answer = prefilled(pair.p)
    message = replace(pair.decode(IDS, answer), num_prompt=0)
    failure(pair.d.say(message), "invalid")
    pair.d.check_idle()


def bad_tickets() -> dict[str, Callable[[Pair, wire.Prefilled], wire.Decode]]:
    def changed(**changes: object) -> Callable[[Pair, wire.Prefilled], wire.Decode]:
        def make(pair: Pair, answer: wire.Prefilled) -> wire.Decode:
            ticket = open_ticket(answer.ticket, SECRET)
            ticket = replace(ticket, **changes)  # type: ignore[arg-type]
            return replace(pair.decode(IDS, answer), ticket=ticket.sign(SECRET))

        return make

    def other_ids(pair: Pair, answer: wire.Prefilled) -> wire.Decode:
        return pair.decode([6, *IDS[1:]], answer)

    def forged(pair: Pair, answer: wire.Prefilled) -> wire.Decode:
        ticket = open_ticket(answer.ticket, SECRET).sign(b"another secret")
        return replace(pair.decode(IDS, answer), ticket=ticket)

    def cut(pair: Pair, answer: wire.Prefilled) -> wire.Decode:
        return replace(pair.decode(IDS, answer), ticket=answer.ticket[:20])

    def no_token_after_it(pair: Pair, answer: wire.Prefilled) -> wire.Decode:
        return replace(pair.decode(IDS, answer), ids=pack_ids(IDS))

    return {
        "signature": forged,
        "signature does": cut,
        "layout": changed(fingerprint=b"other layout"),
        "5 tokens, not 6": changed(num_tokens=5),
        "for other tokens": other_ids,
        "the ticket is for other tokens": changed(prefix=b"0" * 16),
        "blocks do not match": changed(block_ids=(1,), generations=(2,)),
        "tokens": no_token_after_it,
    }


@pytest.mark.parametrize("text", bad_tickets())
def test_a_ticket_that_is_not_for_this_request_pulls_nothing(pair: Pair, text: str) -> None:
    pair.d.say(wire.Peer(pair.p.card), reserve())
    answer = prefilled(pair.p)
    message = bad_tickets()[text](pair, answer)
    assert text in failure(pair.d.say(message), "pull")
    assert not pair.d.puller.pulls
    pair.d.check_idle()


def test_cached_blocks_of_other_tokens_are_not_taken_for_the_tickets(pair: Pair) -> None:
    """Reserve and Decode that differ: the pinned blocks would hold another prompt's KV."""
    pair.d.say(decode([1, 1, 1, 1, 5, 6], request=b"b"))
    pair.d.run()
    said = pair.d.say(wire.Peer(pair.p.card), reserve([1, 1, 1, 1, 5, 6]))
    assert said == [wire.Reserved(b"a", 0, cached_tokens=4)]
    answer = prefilled(pair.p)
    assert "other tokens" in failure(pair.d.say(pair.decode(IDS, answer)), "pull")
    pair.d.check_idle()


def test_a_ticket_without_a_reservation_is_refused(pair: Pair) -> None:
    answer = prefilled(pair.p)
    assert "needs a Reserve" in failure(pair.d.say(pair.decode(IDS, answer)), "invalid")
    pair.d.check_idle()


def test_unknown_ids_are_ignored(box: Box) -> None:
    assert box.say(wire.Abort(b"?", 3), wire.Release(b"?")) == []
    assert box.say(wire.Renew((b"?",))) == [wire.Expired((b"?",))]
    assert box.say(wire.Pong(1), wire.Expired((b"x",))) == []
    box.check_idle()


def test_a_message_that_raises_fails_its_request(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("a bug")

    for name, message in (("reserve", reserve()), ("add", prefill()), ("add", decode())):
        with monkeypatch.context() as patch:
            patch.setattr(box.engine, name, broken)
            assert "a bug" in failure(box.say(message), "internal")
    assert isinstance(only(box.say(reserve())), wire.Reserved)
    box.say(wire.Abort(b"a", 0))
    box.check_idle()


# --- leases -----------------------------------------------------------------------------------


def test_a_lease_lasts_as_long_as_it_is_renewed_and_is_never_revived(box: Box) -> None:
    answer = prefilled(box)
    for _ in range(4):
        assert box.pass_time(LEASE_S - 1) == []
        assert box.say(wire.Renew((answer.ticket_id,))) == []
    assert box.engine.pool.counts()["leased"] == 2
    box.pass_time(LEASE_S)
    box.check_idle()
    assert box.roles.load().expired_leases == 1
    assert box.say(wire.Renew((answer.ticket_id,))) == [wire.Expired((answer.ticket_id,))]
    assert box.say(wire.Release(answer.ticket_id)) == []
    box.check_idle()


def test_a_renewal_at_the_moment_of_expiry_is_too_late(box: Box) -> None:
    answer = prefilled(box)
    box.now += LEASE_S
    assert box.say(wire.Renew((answer.ticket_id,))) == [wire.Expired((answer.ticket_id,))]
    box.pass_time(0.0)
    box.check_idle()


def test_a_ticket_outlives_its_connection_but_not_an_unwanting_reconnect(box: Box) -> None:
    first, second = prefilled(box), prefilled(box, request=b"b")
    box.roles.disconnected(box.link)
    assert box.exporter.num_leased == 2
    box.link = RecordingLink()
    box.roles.connected(box.link, (second.ticket_id,))
    assert box.exporter.num_leased == 1
    other = RecordingLink(name="another router")
    box.roles.connected(other, ())
    assert box.exporter.num_leased == 1
    box.say(wire.Release(second.ticket_id), wire.Release(first.ticket_id))
    box.check_idle()


def test_an_abort_after_prefilled_leaves_the_lease(box: Box) -> None:
    answer = prefilled(box)
    assert box.say(wire.Abort(b"a", 0)) == []
    assert box.exporter.num_leased == 1
    box.say(wire.Release(answer.ticket_id))
    box.check_idle()


def test_a_prompt_waits_for_leased_blocks_and_goes_on_when_they_come_free() -> None:
    box = Box("p", blocks=9)
    answer = prefilled(box, [1] * 24)
    box.say(prefill([2] * 24, request=b"b"))
    for _ in range(5):
        box.step()
    assert box.engine.stalled
    assert box.link.take() == []
    box.pass_time(LEASE_S)
    message = only(box.run())
    assert isinstance(message, wire.Prefilled)
    box.say(wire.Release(message.ticket_id), wire.Release(answer.ticket_id))
    box.check_idle()


# --- refusals, drain, failure -----------------------------------------------------------------


def test_no_room_for_a_reservation_is_a_refusal_for_now() -> None:
    box = Box("d", blocks=5)
    assert isinstance(only(box.say(reserve([1] * 9))), wire.Reserved)
    refused = only(box.say(reserve([2] * 9, request=b"b")))
    assert isinstance(refused, wire.Refused)
    assert refused.retry
    failure(box.say(wire.Abort(b"a", 0)), "aborted")
    assert isinstance(only(box.say(reserve([2] * 9, request=b"b"))), wire.Reserved)
    never = only(box.say(reserve([2] * 16, request=b"c")))
    assert isinstance(never, wire.Refused)
    assert not never.retry
    box.say(wire.Abort(b"b", 0))
    box.check_idle()


def test_a_draining_worker_finishes_what_it_has_and_takes_nothing_new(pair: Pair) -> None:
    pair.d.say(wire.Peer(pair.p.card), reserve(), decode(request=b"c"))
    pair.d.roles.drain()
    for message in (reserve(request=b"b"), prefill(request=b"b"), decode(request=b"b")):
        refused = only(pair.d.say(message))
        assert isinstance(refused, wire.Refused)
        assert refused.retry
    assert pair.d.say(decode(request=b"c")) == [], "a repeated message was answered"
    answer = prefilled(pair.p)
    assert pair.d.say(pair.decode(IDS, answer)) == []
    assert pair.d.roles.num_open == 2
    pair.arrive(only_key(pair.d))
    assert sum(map(is_terminal, pair.d.run())) == 2
    assert pair.d.loads[-1].state == "draining"
    pair.p.say(wire.Release(answer.ticket_id))
    pair.check_idle()


def test_a_failed_engine_tells_everybody_once(pair: Pair) -> None:
    pair.pulling()
    pair.d.say(wire.Abort(b"a", 0))  # told already
    other = RecordingLink(name="another router")
    pair.d.roles.connected(other, ())
    pair.d.handle(decode(request=b"b"), other)
    pair.d.say(reserve(request=b"c"), prefill(request=b"d"))
    pair.d.roles.fail("the engine failed")
    told = pair.d.link.take()
    assert sorted(m.request for m in told if isinstance(m, wire.Failed)) == [b"c", b"d"]
    assert failure(other.take(), "internal") == "the engine failed"
    assert pair.d.loads[-1].state == "dead"


def test_load_is_reported_on_change_but_not_too_often(box: Box) -> None:
    before = len(box.loads)
    box.roles.flush(box.now)
    assert len(box.loads) <= before + 1
    reported = len(box.loads)
    box.roles.flush(box.now + 9)
    assert len(box.loads) == reported, "reported without a change"
    box.say(decode())
    for _ in range(3):
        box.step()
    assert len(box.loads) - reported <= 2
    box.run()
    assert box.loads[-1].generated_tokens == 4
    assert box.loads[-1].running == 0
    counts = box.loads[-1].blocks
    assert sum(counts.values()) == box.engine.pool.num_usable
