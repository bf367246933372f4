"""What is verified after a pull, and what text a client would get if it were not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtransfer.region import Region
from tests.guards.rig import ASKED, LEASE_S, OTHER, Answer, Pairs, Worker, right


def verified_or_wrong(
    asked: Answer, d: Worker, p: Worker, guarded: bool, reason: str, other: Answer | None = None
) -> None:
    """With the guard on: a failed pull that says why, and the right text from the next attempt.
    With it off: the client reads another text to its end, and nobody notices.
    """
    asked.hear(d)
    if guarded:
        (failure,) = asked.failures
        assert failure.kind == "pull"
        assert reason in failure.message
        assert not asked.pulled
        if other is not None:
            p.run()
            other.hear(p)
            other.release(p)
        asked.retry(d, p)
        assert asked.tokens == right(ASKED)
        d.check_idle()
        p.check_idle()
    else:
        asked.finish(d)
        assert asked.finished
        assert not asked.failures
        assert asked.tokens[0] == right(ASKED)[0]
        assert asked.tokens != right(ASKED), "the guard prevents nothing here"


@pytest.mark.parametrize(
    "guard", ["on", "seals unchecked", "seals read with the data", "hand-out not published"]
)
def test_a_block_that_is_being_written_anew_is_not_taken_for_the_old_one(
    guard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B001: the lease ran out while the read was on its way, and another prompt has begun to write
    into the block. Its trailer is still the old one, as no write has been completed: only the seal,
    read after the data, tells.
    """
    p, d = Worker("p", 7, blocks=3), Worker("d", 9, blocks=4)
    d.memory.check_seals = guard != "seals unchecked"
    d.reads.seals_with_data = guard == "seals read with the data"
    if guard == "hand-out not published":
        monkeypatch.setattr(Region, "open", lambda self, epoch, blocks: None)
    asked, other = Answer(ASKED), Answer(OTHER, b"other")
    asked.ticket(d, p)
    asked.decode(d, p)  # the read is posted, but nothing has moved yet

    p.pass_time(LEASE_S)
    other.prefill(p)
    p.step()  # all slots of a block but the last: it is not sealed
    d.land()

    verified_or_wrong(asked, d, p, guard == "on", "was reused meanwhile", other)


def short(pairs: Pairs) -> Pairs:
    """The last block never comes."""
    return pairs[:-1]


def swapped(pairs: Pairs) -> Pairs:
    """Each block comes to the place of the other."""
    (a, here), (b, there) = pairs
    return [(b, here), (a, there)]


def empty(pairs: Pairs) -> Pairs:
    """Nothing comes."""
    return []


@pytest.mark.parametrize("fault", [short, swapped, empty])
@pytest.mark.parametrize("guarded", [True, False])
def test_memory_that_a_read_did_not_fill_is_not_taken_for_the_prompt(
    fault: Callable[[Pairs], Pairs], guarded: bool
) -> None:
    """B001: the read says that it is done, the seals at P are all right, but what lies in D's
    blocks is another prompt's KV. Only the trailers tell.
    """
    p, d = Worker("p", 7, blocks=5), Worker("d", 9, blocks=4, prefix_cache=False)
    before = Answer(OTHER, b"before")
    before.hand_off(d, p)
    assert before.tokens == right(OTHER)

    d.memory.check_trailers = guarded
    d.reads.fault = fault
    asked = Answer(ASKED)
    asked.ticket(d, p)
    asked.decode(d, p)
    d.land()

    d.reads.fault = lambda pairs: pairs
    verified_or_wrong(asked, d, p, guarded, "is not the ticket's")


@pytest.mark.parametrize("guarded", [True, False])
def test_kv_of_another_incarnation_is_not_taken_for_the_tickets(guarded: bool) -> None:
    """P was restarted and sits at its old address. Block ids and generations of the new one are
    those of the old ticket, for they begin anew: only the epoch differs.
    """
    p, d = Worker("p", 7, blocks=5), Worker("d", 9, blocks=4)
    asked, other = Answer(ASKED), Answer(OTHER, b"other")
    asked.ticket(d, p)
    restarted = Worker("p", 8, blocks=5)
    other.prefill(restarted)
    restarted.run()
    other.hear(restarted)

    d.memory.check_epochs = guarded
    d.reads.address = restarted.card
    asked.decode(d, p)
    d.land()

    d.reads.address = None
    verified_or_wrong(asked, d, p, guarded, "is not the ticket's")
