"""Who is asked first: D, and only then P."""

from __future__ import annotations

import pytest

from router import wire
from tests.support.scripted_router import Request, Router
from tests.support.scripted_world import World
from tests.support.worker_box import LEASE_S, Box

ROUNDS = 60
LENGTH = 14  # four blocks of prompt


class PrefillFirst(Router):
    """Has a prompt computed first, and asks for room at D while P holds its KV."""

    def begin(self, request: Request, p: Box | None, d: Box) -> None:
        request.attempt += 1
        request.p, request.d = p, d
        self._prefill(request)

    def hear(self, box: Box, message: wire.Message) -> None:
        request = self.requests.get(getattr(message, "request", b""))
        match message:
            case wire.Prefilled() if request is not None:
                request.ticket, request.packed = (box, message.ticket_id), message.ticket
                request.tokens.append(message.token)
                self._ask_for_room(request)
            case wire.Refused() if request is not None:
                self._ask_for_room(request)
            case wire.Reserved() if request is not None:
                request.stage = "decoding"
                self._introduce(request)
                self._decode(request, request.packed)
            case _:
                super().hear(box, message)

    def _ask_for_room(self, request: Request) -> None:
        request.stage = "reserving"
        tokens, request.tokens = request.tokens, []  # D keeps room for the prompt's KV
        self.reserve(request)
        request.tokens = tokens


@pytest.mark.parametrize("guarded", [True, False])
def test_nobody_holds_kv_at_p_while_waiting_for_room_at_d(guarded: bool) -> None:
    """B011: P and D have room for one prompt each, and two routers have one each. If one of them
    asks P first, its KV fills P while it waits for D, where the other waits for P: for a lease.
    """
    world = World()
    p, d = world.add_box(Box("p", 1, blocks=6)), world.add_box(Box("d", 2, blocks=6))
    first = world.add_router("first")
    second = (Router if guarded else PrefillFirst)("second", world.clock)
    world.routers.append(second)
    for box in world.boxes:
        world.connect(second, box)

    asked: list[tuple[Router, Request]] = []
    for router in (second, first):
        one = Request(router.name.encode(), [3] * LENGTH, wire.Sampling(max_tokens=4), float("inf"))
        one.ids[0] = len(asked)
        router.ask(one)
        asked.append((router, one))
    second.begin(asked[0][1], p, d)
    if not guarded:  # its prompt is under way, or done, when the other one comes
        world.deliver_to_boxes()
        world.step(p)
    first.begin(asked[1][1], p, d)
    for _ in range(ROUNDS):
        world.move()
        for router, one in asked:
            if one.stage == "queued":
                router.begin(one, p, d)

    assert all(one.stage == "done" for _, one in asked) is guarded
    if guarded:
        world.settle_down()
        world.check_ledger()
        for box in (p, d):
            box.check_idle()
    else:
        assert p.engine.stalled
        assert p.exporter.num_leased == 1
        world.pass_time(LEASE_S)
        world.move()
        assert not p.engine.stalled, "not the lease's end, but something else resolves it"
