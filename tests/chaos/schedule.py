"""Which fault is injected when, and into whom: a pure function of the seed.

Faults of single transfers and messages are not here: the fault wrapper and the links draw those
themselves, from seeds in :func:`flags`.
"""

import random
from dataclasses import dataclass

EVERY_S = 7.5  # on average, from one fault to the next
WARM_UP_S = 4.0  # first requests are under way
CALM_S = 5.0  # the last faults meet requests as well
ALONE_SHARE = 0.2  # of the faults that may hit the only healthy worker of a role


@dataclass(frozen=True)
class Kind:
    """A kind of fault. ``hold_s``: bounds of how long it lasts; of a drain, of its deadline."""

    name: str
    action: str  # kill, stop, drain, expire or flood
    role: str
    hold_s: tuple[float, float] = (0.0, 0.0)


# Connections are dead after 3 s without a ping: a short stop is slept through, a long one is a loss
# from which the process comes back.
SHORT, LONG = (0.5, 2.2), (4.0, 8.0)

KINDS = (
    Kind("kill prefill", "kill", "prefill"),
    Kind("kill decode", "kill", "decode"),
    Kind("kill router", "kill", "router"),
    Kind("kill registry", "kill", "registry"),
    Kind("stop prefill, short", "stop", "prefill", SHORT),
    Kind("stop decode, short", "stop", "decode", SHORT),
    Kind("stop router, short", "stop", "router", SHORT),
    Kind("stop prefill, long", "stop", "prefill", LONG),
    Kind("stop decode, long", "stop", "decode", LONG),
    Kind("expire leases", "expire", "router", (2.0, 4.0)),  # on top of a lease
    Kind("drain prefill", "drain", "prefill", (0.5, 8.0)),
    Kind("drain decode", "drain", "decode", (0.5, 8.0)),
    Kind("flood", "flood", "pool"),  # more long prompts at once than the pools hold
)


@dataclass(frozen=True)
class Fault:
    """One fault to inject."""

    at_s: float  # since the load began
    kind: Kind
    pick: int  # which of the processes of its role, modulo their number
    hold_s: float
    alone: bool  # it need not wait until another healthy process of the role is there


def schedule(seed: int, seconds: float, every_s: float = EVERY_S) -> list[Fault]:
    """The faults of a run, by time. Kinds come in shuffled rounds, so their counts are even."""
    chance = random.Random(f"faults {seed}")
    span = seconds - WARM_UP_S - CALM_S
    count = max(0, round(span / every_s))
    deck: list[Kind] = []
    faults = []
    for index in range(count):
        deck = deck or chance.sample(KINDS, len(KINDS))
        kind = deck.pop()
        at_s = WARM_UP_S + span * (index + chance.random()) / count
        hold_s = chance.uniform(*kind.hold_s)
        alone = chance.random() < ALONE_SHARE
        faults.append(Fault(at_s, kind, chance.randrange(64), hold_s, alone))
    return faults
