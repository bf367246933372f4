"""Whatever comes in whatever order: one terminal message for each opening, no block left behind,
and never text of another prompt.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtransfer.hashing import unpack_ids
from kvtransfer.importer import Event
from router import wire
from services.engine.sequence import SamplingParams
from tests.support.fake_runner import check_states, naive
from tests.support.worker_box import (
    LEASE_S,
    MAX_LEN,
    Box,
    RecordingLink,
    Work,
    decode,
    is_terminal,
    prefill,
    reserve,
)

REQUESTS = st.integers(0, 3).map(lambda i: b"r%d" % i)
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=10)
LONGER = st.lists(st.integers(0, 1), min_size=9, max_size=20)  # several steps: early parts
ENDS = st.lists(st.sampled_from(["arrive", "arrive", "arrive", "fail", "late"]), max_size=5)


class Conversation(RuleBasedStateMachine):
    """Two workers, a router that says anything in any order, a puller that ends in any way."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.d = Box("p", blocks=12), Box("d", epoch=9, blocks=12)
        self.boxes = (self.p, self.d)
        self.opened: dict[tuple[int, int, bytes], int] = {}  # (box, link, request) → openings
        self.ended: dict[tuple[int, int, bytes], int] = {}
        self.links = [self.p.link, self.d.link]
        self.lost: list[RecordingLink] = []  # kept, so that no id is used twice
        self.answers: list[tuple[list[int], wire.Prefilled]] = []
        self.prompts: dict[tuple[int, int, bytes], list[int]] = {}  # of open Prefill and Decode
        self.parts: list[wire.TicketPart] = []  # all that P ever said

    def name(self, which: int, request: bytes) -> tuple[int, int, bytes]:
        return which, id(self.links[which]), request

    def is_open(self, which: int, request: bytes) -> bool:
        name = self.name(which, request)
        return self.opened.get(name, 0) > self.ended.get(name, 0)

    def send(self, which: int, message: Work, continues: bool = False) -> None:
        """An opening, unless the request is open at that worker already."""
        name = self.name(which, message.request)
        if not self.is_open(which, message.request):
            self.opened[name] = self.opened.get(name, 0) + 1
            self.prompts[name] = unpack_ids(message.ids)
        elif continues:
            self.prompts[name] = unpack_ids(message.ids)
        self.boxes[which].handle(message)
        self.listen()

    def listen(self) -> None:
        for which, link in enumerate(self.links):
            for message in link.take():
                self.hear(which, message)

    def hear(self, which: int, message: wire.Message) -> None:
        if isinstance(message, wire.Load | wire.Expired):
            return
        if isinstance(message, wire.TicketPart):
            self.parts.append(message)
        name = self.name(which, message.request)  # type: ignore[union-attr]
        assert self.is_open(which, name[2]), f"{message} after the terminal message"
        if isinstance(message, wire.Prefilled):
            ids = self.prompts[name]
            assert message.token == naive(ids, len(ids), SamplingParams(1), MAX_LEN)[0]
            if message.ticket:
                self.answers.append((ids, message))
        if isinstance(message, wire.Tokens):
            ids = self.prompts[name]
            expected = naive(ids, len(ids), SamplingParams(1), MAX_LEN)
            assert list(message.ids) == expected, "text of another prompt"
            self.prompts[name] = [*ids, *message.ids]
        if is_terminal(message):
            self.ended[name] = self.ended.get(name, 0) + 1

    # --- what a router may say ---

    @rule(
        which=st.integers(0, 1), request=REQUESTS, ids=TOKENS, deadline=st.sampled_from([0, 4000])
    )
    def reserve(self, which: int, request: bytes, ids: list[int], deadline: int) -> None:
        self.send(which, reserve(ids, request, deadline_ms=deadline))

    @rule(
        which=st.integers(0, 1),
        request=REQUESTS,
        ids=TOKENS,
        deadline=st.sampled_from([0, 4000]),
        max_tokens=st.integers(1, 3),
        export=st.booleans(),
        early=st.booleans(),
    )
    def prefill(
        self,
        which: int,
        request: bytes,
        ids: list[int],
        deadline: int,
        max_tokens: int,
        export: bool,
        early: bool,
    ) -> None:
        sampling = wire.Sampling(max_tokens=max_tokens)
        changes = {"deadline_ms": deadline, "sampling": sampling, "export": export}
        self.send(which, prefill(ids, request, early=early, **changes))

    @rule(index=st.integers(0, 99), request=st.none() | REQUESTS)
    def part(self, index: int, request: bytes | None) -> None:
        """Any part at any time, also twice, late, or to another request."""
        if self.parts:
            message = self.parts[-1 - index % len(self.parts)]
            self.d.handle(replace(message, request=request or message.request))
            self.listen()

    @rule(
        which=st.integers(0, 1), request=REQUESTS, ids=TOKENS, deadline=st.sampled_from([0, 4000])
    )
    def compute(self, which: int, request: bytes, ids: list[int], deadline: int) -> None:
        reserved = self.boxes[which].decode.knows((request, 0))
        continues = reserved is not None and reserved.value == "reserved"
        self.send(which, decode(ids, request, deadline_ms=deadline), continues)

    @rule(request=REQUESTS, index=st.integers(0, 99), introduce=st.booleans(), forge=st.booleans())
    def decode(self, request: bytes, index: int, introduce: bool, forge: bool) -> None:
        if introduce:
            self.d.handle(wire.Peer(self.p.card))
        if not self.answers:
            return
        ids, answer = self.answers[index % len(self.answers)]
        stage = self.d.decode.knows((request, 0))
        ticket = answer.ticket[:-1] + bytes([answer.ticket[-1] ^ 1]) if forge else answer.ticket
        message = decode([*ids, answer.token], request, num_prompt=len(ids), ticket=ticket)
        self.send(1, message, stage is not None and stage.value == "reserved")

    @rule(which=st.sampled_from(["p", "q"]), epoch=st.integers(6, 8))
    def forget(self, which: str, epoch: int) -> None:
        self.d.handle(wire.Forget(which, epoch))

    @rule(request=REQUESTS, ids=LONGER, max_tokens=st.integers(2, 4), ends=ENDS)
    def hand_off(self, request: bytes, ids: list[int], max_tokens: int, ends: list[str]) -> None:
        """As it should be, up to the last pull: reserve, prefill with early parts, decode with the
        ticket. ``ends``: what happens to its pulls meanwhile, and to the last.
        """
        if self.is_open(0, request) or self.is_open(1, request):
            return
        self.d.handle(wire.Peer(self.p.card))
        self.send(1, reserve(ids, request))
        if not self.is_open(1, request):
            return  # no room, or its last pull has not settled
        sampling = wire.Sampling(max_tokens=max_tokens)
        told = len(self.parts)
        self.send(0, prefill(ids, request, sampling=sampling, early=True))
        for _ in range(20):
            if not self.is_open(0, request):
                break
            self.step(0, 1)
            for message in self.parts[told:]:
                self.d.handle(message)
            for message in self.parts[:2]:  # strays: of this request, or of another
                self.d.handle(replace(message, request=request))
            told = len(self.parts)
            if ends:
                self.pull_ends(-1, ends.pop())
        if self.is_open(0, request) or not self.answers or self.answers[-1][0] != ids:
            return
        if not self.is_open(1, request):
            return  # an early pull failed, and may still write
        answer = self.answers[-1][1]
        changes = {"num_prompt": len(ids), "ticket": answer.ticket, "sampling": sampling}
        self.send(1, decode([*ids, answer.token], request, **changes), continues=True)
        for how in ends:
            self.pull_ends(-1, how)

    @rule(which=st.integers(0, 1), request=REQUESTS)
    def abort(self, which: int, request: bytes) -> None:
        was_open = self.is_open(which, request)
        self.boxes[which].handle(wire.Abort(request, 0))
        self.listen()
        assert not was_open or not self.is_open(which, request), "an abort was not answered"

    @rule(index=st.integers(0, 99), renew=st.booleans())
    def ticket(self, index: int, renew: bool) -> None:
        if self.answers:
            ticket_id = self.answers[index % len(self.answers)][1].ticket_id
            self.p.handle(wire.Renew((ticket_id,)) if renew else wire.Release(ticket_id))
            self.listen()

    # --- what happens ---

    @rule(which=st.integers(0, 1), keep=st.booleans())
    def reconnect(self, which: int, keep: bool) -> None:
        box = self.boxes[which]
        old = box.link
        box.roles.disconnected(old)
        self.lost.append(old)
        box.link = self.links[which] = RecordingLink()
        tickets = tuple(answer.ticket_id for _, answer in self.answers) if keep else ()
        box.roles.connected(box.link, tickets)
        box.roles.flush(box.now)
        assert old.take() == [], "something was said to a lost link"

    @rule(which=st.integers(0, 1), count=st.integers(1, 4))
    def step(self, which: int, count: int) -> None:
        for _ in range(count):
            self.boxes[which].step()
        check_states(self.boxes[which].engine, self.boxes[which].runner)
        self.listen()

    @rule(seconds=st.sampled_from([1.0, 5.0, LEASE_S]))
    def pass_time(self, seconds: float) -> None:
        for box in self.boxes:
            box.now += seconds
            box.step()
        self.listen()

    @rule(index=st.integers(0, 99), how=st.sampled_from(["arrive", "fail", "late"]))
    def pull_ends(self, index: int, how: str) -> None:
        keys = self.d.puller.keys()
        if not keys:
            return
        key = keys[index % len(keys)]
        pull = self.d.puller.pulls[key]
        intact = all(
            self.p.runner.generations[b] == g
            for b, g in zip(pull.ticket.block_ids, pull.ticket.generations, strict=True)
        )
        event: Event
        if how == "arrive" and intact:
            for i, local in pull.pairs:
                self.d.runner.kv[local] = dict(self.p.runner.kv[pull.ticket.block_ids[i]])
            event = self.d.puller.arrived(key)
        elif pull.aborted:
            event = self.d.puller.gave_up(key, settled=how != "late")
        else:
            event = self.d.puller.failed(key, settled=how != "late")
        self.d.roles.on_events([event], self.d.now)
        self.d.roles.flush(self.d.now)
        self.listen()

    @rule(index=st.integers(0, 99))
    def settle(self, index: int) -> None:
        keys = self.d.puller.keys(told=True)
        if keys:
            key = keys[index % len(keys)]
            for block in self.d.puller.pulls[key].blocks:
                self.d.runner.scribble(block)
            self.d.roles.on_events([self.d.puller.settled(key)], self.d.now)

    @invariant()
    def blocks_agree(self) -> None:
        for box in self.boxes:
            box.check_integrity()

    def teardown(self) -> None:
        for which in (0, 1):
            for request in {name[2] for name in self.opened}:
                self.abort(which, request)
        while self.d.puller.keys():
            self.pull_ends(0, "arrive")
        while self.d.puller.keys(told=True):
            self.settle(0)
        self.pass_time(LEASE_S)
        for box in self.boxes:
            box.check_idle()
        live = {id(link) for link in self.links}
        for name, openings in self.opened.items():
            ended = self.ended.get(name, 0)
            assert ended == openings if name[1] in live else ended <= openings


TestConversation = Conversation.TestCase
TestConversation.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
