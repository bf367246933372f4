"""After the load and the faults: is everything as it was before, and does it still work?

Faults of single transfers and messages go on meanwhile; they are part of the deployment. A probe
may therefore fail cleanly and be asked again, but it may never be wrong.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from tests.chaos.exchange import Reply
from tests.chaos.fleet import Fleet, not_idle
from tests.chaos.load import ask, settle
from tests.chaos.questions import Asking, Question
from tests.chaos.record import RIGHT, TIE, WRONG, Record
from tests.support.serving import Served

IDLE_WITHIN_S = 90.0  # reads that never end are settled after 60
LOOK_EVERY_S = 0.5
NUM_PROBES, NUM_TRIES = 4, 4


def aftermath(
    server: Served,
    fleet: Fleet,
    questions: Sequence[Question],
    answers: Sequence[Reply],
    hang_after_s: float,
) -> list[str]:
    """What is missing, held or wrong, in words. The last question is a longest one: as many of them
    as there are pairs are asked at once, so that pools that have shrunk would show.
    """

    def probe(number: int) -> Record:
        name = f"probe-{number}"
        how = Asking(number, len(questions) - 1, number % 2 == 0, name, None)
        for _ in range(NUM_TRIES):
            record = ask(
                server.url, questions[-1], how, name, hang_after_s, answers[-1], fleet.clock
            )
            settle([record], questions, answers)
            if record.outcome in (RIGHT, TIE, WRONG):
                break
        return record

    if found := eventually(lambda: list(not_as_before(fleet))):
        return [f"{IDLE_WITHIN_S:.0f} s after the load: {what}" for what in found]
    records = server.at_once([partial(probe, number) for number in range(NUM_PROBES)])
    bad = [r for r in records if r.outcome not in (RIGHT, TIE)]
    found = [f"probe {r.number}, {NUM_TRIES} tries: {r.outcome}, {r.reply}" for r in bad]
    return found + [
        f"{IDLE_WITHIN_S:.0f} s after the probes: {what}"
        for what in eventually(lambda: list(not_as_before(fleet)))
    ]


def eventually(look: Callable[[], list[str]]) -> list[str]:
    """What is still found after some time; nothing as soon as nothing is found."""
    tick = threading.Event()
    for _ in range(int(IDLE_WITHIN_S / LOOK_EVERY_S)):
        if not look():
            return []
        tick.wait(LOOK_EVERY_S)
    return look()


def not_as_before(fleet: Fleet) -> Iterator[str]:
    """Processes, pairs, blocks and requests: what is missing, and what is too much."""
    for role, number in fleet.expected.items():
        alive = len(fleet.alive(role))
        if alive != number:
            yield f"{alive} processes of the role {role} instead of {number}"
    states = fleet.states()
    if len(states) != fleet.expected["router"]:
        yield f"{len(states)} routers answer"
    for pid, state in states.items():
        proven = sum(pair["state"] == "proven" for pair in state["pairs"])
        if proven != fleet.num_pairs:
            yield f"router {pid} has {proven} proven pairs instead of {fleet.num_pairs}"
    yield from not_idle(states)
