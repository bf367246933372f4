"""Injects the faults of a schedule into the server's processes.

A fault waits until another healthy process of its role is there, unless the schedule says that it
need not; later ones do not wait for it. What a stop has stopped is resumed in any case.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.chaos.fleet import Clock, Fleet, Member
from tests.chaos.schedule import Fault

TICK_S = 0.1
UNPULLED_S = 0.7  # tickets pile up at a stopped decode worker before the router stops as well


@dataclass(frozen=True)
class Injected:
    """A fault that was done."""

    fault: Fault
    at_s: float
    end_s: float  # of a stop; else the same
    pid: int


class Injector:
    """Does what a schedule says. ``drain`` tells a worker to leave, ``flood`` fills the pools."""

    def __init__(
        self,
        fleet: Fleet,
        clock: Clock,
        lease_s: float,
        drain: Callable[[Member, float], None],
        flood: Callable[[], None],
    ) -> None:
        self.done: list[Injected] = []
        self.late: list[Fault] = []  # those that never found a target
        self._fleet = fleet
        self._clock = clock
        self._lease_s = lease_s
        self._drain = drain
        self._flood = flood
        self._tick = threading.Event()
        self._timers: list[threading.Timer] = []
        self._stopped: set[int] = set()

    def run(self, faults: Sequence[Fault], until_s: float) -> None:
        """Inject all of them, each at its time or as soon as it can be, for so long."""
        waiting = list(faults)
        while (now := self._clock.now()) < until_s:
            for fault in [fault for fault in waiting if fault.at_s <= now]:
                target = self._target(fault)
                if target is not None or fault.kind.action == "flood":
                    waiting.remove(fault)
                    self._inject(fault, target)
            self._tick.wait(TICK_S)
        self.late = waiting

    def close(self) -> None:
        """End all faults that still last."""
        for timer in self._timers:
            timer.join()
        for pid in list(self._stopped):
            self._signal(pid, signal.SIGCONT)

    # --- inside ----------------------------------------------------------------------------------

    def _target(self, fault: Fault) -> Member | None:
        role = fault.kind.role
        if fault.kind.action == "flood":
            return None
        ready = self._fleet.ready(role)
        enough = len(ready) > 1 or fault.alone or self._fleet.expected[role] < 2
        return ready[fault.pick % len(ready)] if ready and enough else None

    def _inject(self, fault: Fault, target: Member | None) -> None:
        at_s = self._clock.now()
        end_s = at_s
        match fault.kind.action, target:
            case "flood", _:
                self._flood()
            case "kill", Member():
                target.end_expected = target.fault = "killed"
                self._signal(target.pid, signal.SIGKILL)
            case "drain", Member():
                target.end_expected = target.fault = "drained"
                self._drain(target, fault.hold_s)
            case "stop", Member():
                end_s = self._stop(target, fault.hold_s)
            case "expire", Member():
                end_s = self._expire(fault, target)
        pid = target.pid if target else 0
        self.done.append(Injected(fault, at_s, end_s, pid))

    def _stop(self, target: Member, seconds: float) -> float:
        """SIGSTOP now and SIGCONT later; when that will be."""
        target.fault = "stopped"
        self._stopped.add(target.pid)
        self._signal(target.pid, signal.SIGSTOP)

        def resume() -> None:
            self._signal(target.pid, signal.SIGCONT)
            self._stopped.discard(target.pid)
            target.resumed = target.resumed or seconds > 3
            target.fault = ""

        timer = threading.Timer(seconds, resume)
        self._timers.append(timer)
        timer.start()
        return self._clock.now() + seconds

    def _expire(self, fault: Fault, router: Member) -> float:
        """Stop a router beyond the lease of the tickets that it has got, and did not release."""
        consumers = self._fleet.ready("decode")
        if consumers:
            consumer = consumers[fault.pick % len(consumers)]
            self._stop(consumer, 2 * UNPULLED_S)
            self._tick.wait(UNPULLED_S)
        return self._stop(router, self._lease_s + fault.hold_s)

    @staticmethod
    def _signal(pid: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
