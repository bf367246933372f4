"""How long P keeps blocks, and who may ask for them."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest

from kvtransfer.exporter import Export, Exporter
from kvtransfer.ticket import Ticket, open_ticket
from router import wire
from services import decode as decode_module
from tests.guards.rig import ASKED, LEASE_S, OTHER, SECRET, Answer, Worker, right
from tests.support.worker_box import RecordingLink

THIRD = [(13 * i + 2) % 101 for i in range(30)]


@pytest.mark.parametrize("guarded", [True, False])
def test_a_dead_router_does_not_keep_blocks(guarded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The router dies with the ticket. Without a lease nobody would ever give its blocks back, and
    the next prompt would wait for ever.
    """
    if not guarded:
        monkeypatch.setattr(Exporter, "expire", lambda self, now: [])
    p, d = Worker("p", 7, blocks=3), Worker("d", 9, blocks=4)
    lost, next_one = Answer(ASKED), Answer(OTHER, b"next")
    lost.ticket(d, p)
    p.roles.disconnected(p.link)
    p.link = RecordingLink("another router")
    p.roles.connected(p.link, ())

    next_one.prefill(p)
    for _ in range(10):
        p.pass_time(LEASE_S)
    next_one.hear(p)
    assert (next_one.prefilled is not None) is guarded
    if guarded:
        assert next_one.tokens == right(OTHER)[:1]
        next_one.release(p)
        p.check_idle()
    else:
        assert p.engine.stalled
        assert p.engine.pool.counts()["leased"] == 2


def revive_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let renewals extend leases that are over, as if they were still there."""
    renew, export = Exporter.renew, Exporter.export
    known: dict[bytes, Any] = {}

    def remember(self: Exporter, *args: Any, **more: Any) -> Export:
        made = export(self, *args, **more)
        known[made.ticket_id] = self._leases[made.ticket_id]
        return made

    def revive(self: Exporter, ticket_ids: Sequence[bytes], now: float) -> list[bytes]:
        for ticket_id in renew(self, ticket_ids, now):
            known[ticket_id].deadline = now + self.lease_s
            self._leases[ticket_id] = known[ticket_id]
        return []

    monkeypatch.setattr(Exporter, "export", remember)
    monkeypatch.setattr(Exporter, "renew", revive)


@pytest.mark.parametrize("guarded", [True, False])
def test_a_lease_that_is_over_is_not_revived(
    guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router stalls beyond its lease, then renews and soon releases. Its blocks are another
    request's by then: with a revived lease, the release would take them from it.
    """
    if not guarded:
        revive_leases(monkeypatch)
    p, d = Worker("p", 7, blocks=3), Worker("d", 9, blocks=7)
    stalled, asked, third = Answer(THIRD, b"stalled"), Answer(ASKED), Answer(OTHER, b"third")
    stalled.ticket(d, p)
    assert stalled.prefilled is not None
    d.say(wire.Abort(stalled.request, 0))
    p.pass_time(LEASE_S)
    asked.ticket(d, p)
    third.prefill(p)  # waits for room
    asked.decode(d, p)

    p.say(wire.Renew((stalled.prefilled.ticket_id,)))
    expired = [m for m in p.heard() if isinstance(m, wire.Expired)]
    assert bool(expired) is guarded
    stalled.release(p)
    p.step()
    d.land()

    asked.hear(d)
    assert asked.pulled is guarded
    if guarded:
        asked.release(p)
        asked.finish(d)
        assert asked.tokens == right(ASKED)
        d.check_idle()
    else:
        assert "was reused meanwhile" in asked.failures[0].message


def unsigned(data: bytes, secret: bytes) -> Ticket:
    """``open_ticket`` that looks at no signature."""
    body = data[:-32]
    return open_ticket(body + hmac.digest(secret, body, sha256), secret)


@pytest.mark.parametrize("guarded", [True, False])
def test_a_ticket_that_was_not_signed_is_worth_nothing(
    guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks in a ticket are exchanged for those of another tenant's prompt. Trailers and seals
    are all right, so only the signature keeps the other's text away from this client.
    """
    if not guarded:
        monkeypatch.setattr(decode_module, "open_ticket", unsigned)
    p, d = Worker("p", 7, blocks=5), Worker("d", 9, blocks=6)
    secret, asked = Answer(OTHER, b"secret"), Answer(ASKED)
    secret.prefill(p)
    p.run()
    secret.hear(p)
    asked.ticket(d, p)
    assert secret.prefilled is not None
    assert asked.prefilled is not None
    theirs = open_ticket(secret.prefilled.ticket, SECRET)
    ours = open_ticket(asked.prefilled.ticket, SECRET)
    forged = replace(ours, block_ids=theirs.block_ids, generations=theirs.generations)
    asked.prefilled = replace(asked.prefilled, ticket=forged.sign(b"guessed"))
    asked.decode(d, p)
    d.land()

    asked.hear(d)
    if guarded:
        assert "signature does not match" in asked.failures[0].message
        asked.retry(d, p)
        assert asked.tokens == right(ASKED)
        d.check_idle()
    else:
        asked.finish(d)
        assert asked.finished
        assert asked.tokens != right(ASKED)
