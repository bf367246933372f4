"""Leases under every interleaving: each ticket ends exactly once, by release or by the clock."""

from __future__ import annotations

from itertools import count

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtransfer.exporter import Exporter
from kvtransfer.ticket import open_ticket

SECRET = b"a secret of the deployment"
LEASE_S = 30.0
OWNERS = ("r-0", "r-1")


class Leases(RuleBasedStateMachine):
    """Two routers that export, renew, release, reconnect; late, twice, or never."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        ids = count(1)
        self.exporter = Exporter(
            "p-0", 7, b"layout", SECRET, LEASE_S, new_id=lambda n: next(ids).to_bytes(n, "big")
        )
        self.next_block = count(0, 10)
        self.tickets: list[bytes] = []  # all that were ever signed
        self.blocks: dict[bytes, list[int]] = {}
        self.owners: dict[bytes, str] = {}
        self.deadlines: dict[bytes, float] = {}  # of those that were not given back yet
        self.released = self.expired = 0

    @rule(owner=st.sampled_from(OWNERS), num_blocks=st.integers(1, 3))
    def export(self, owner: str, num_blocks: int) -> None:
        first = next(self.next_block)
        pairs = [(first + i, 2 * i) for i in range(num_blocks)]
        export = self.exporter.export(owner, pairs, 16 * num_blocks, b"prefix", self.now)
        ticket = open_ticket(export.packed, SECRET)
        assert ticket.ticket_id == export.ticket_id not in self.blocks
        self.tickets.append(export.ticket_id)
        self.blocks[export.ticket_id] = list(ticket.block_ids)
        self.owners[export.ticket_id] = owner
        self.deadlines[export.ticket_id] = self.now + LEASE_S

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Also of one that is over, which frees nothing."""
        ticket_id = data.draw(st.sampled_from(self.tickets))
        freed = self.exporter.release(ticket_id)
        assert freed == (self.blocks[ticket_id] if ticket_id in self.deadlines else [])
        self.released += self.deadlines.pop(ticket_id, None) is not None

    @rule(ticket_id=st.binary(min_size=16, max_size=16).map(lambda data: b"?" + data))
    def release_unknown(self, ticket_id: bytes) -> None:
        assert self.exporter.release(ticket_id) == []

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        """A lease that ran out is not revived, whether or not anybody has collected it."""
        asked = data.draw(st.lists(st.sampled_from(self.tickets), min_size=1, max_size=3))
        over = [t for t in asked if self.deadlines.get(t, self.now) <= self.now]
        assert self.exporter.renew([*asked, b"unknown"], self.now) == [*over, b"unknown"]
        for ticket_id in set(asked) - set(over):
            self.deadlines[ticket_id] = self.now + LEASE_S

    @rule(owner=st.sampled_from(OWNERS), data=st.data())
    def reconnect(self, owner: str, data: st.DataObject) -> None:
        mine = [t for t in self.deadlines if self.owners[t] == owner]
        wanted = set(data.draw(st.lists(st.sampled_from(mine)))) if mine else set()
        freed = self.exporter.release_unwanted(owner, wanted | {b"unknown"})
        unwanted = [t for t in mine if t not in wanted]
        assert sorted(freed) == sorted(self.blocks[t] for t in unwanted)
        self.released += len(unwanted)
        for ticket_id in unwanted:
            del self.deadlines[ticket_id]

    @rule(seconds=st.sampled_from([0.0, 1.0, 12.0, LEASE_S]), collect=st.booleans())
    def pass_time(self, seconds: float, collect: bool) -> None:
        self.now += seconds
        if collect:
            self.expire()

    def expire(self) -> None:
        over = [t for t, deadline in self.deadlines.items() if deadline <= self.now]
        freed = self.exporter.expire(self.now)
        assert sorted(freed) == sorted(self.blocks[t] for t in over)
        self.expired += len(over)
        for ticket_id in over:
            del self.deadlines[ticket_id]

    @invariant()
    def each_ticket_is_in_one_place(self) -> None:
        self.exporter.check_integrity()
        assert self.exporter.num_leased == len(self.deadlines)
        assert self.exporter.released_count == self.released
        assert self.exporter.expired_count == self.expired
        assert self.exporter.next_expiry() == min(self.deadlines.values(), default=None)
        assert len(self.tickets) == len(self.deadlines) + self.released + self.expired

    def teardown(self) -> None:
        self.now += LEASE_S
        self.expire()
        self.each_ticket_is_in_one_place()
        assert self.exporter.num_leased == 0


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
