"""How right the load test's figures are: ``make bench-loadtest``.

A stub server answers after known delays, in a process and on a core of its own, and logs when each
chunk really left it. Its log, put through the same formulas, is what the client should have seen:
TTFT, TPOT, ITL and E2E, their mean, p50, p90 and p99, of two classes whose TTFT differs. Each must
be right within 1 ms or 2 %, the larger of both; half of the requests meet their objective, and the
client's p99 lag must be under 5 ms. All of it runs three times, and what is off in most of them is
wrong: a virtual machine stands still now and then, which is nobody's figure. Exit status 1 if
anything is wrong.

Run it on a machine that does nothing else. ``--realtime`` puts both processes before all others
(SCHED_FIFO, for root), which helps where that cannot be had.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from loadtest.client import Client, ClientOptions
from loadtest.conversation import Conversation, Turn
from loadtest.event_loop import new_event_loop
from loadtest.figures import Spread, Summary, summarize
from loadtest.record import RunResult
from loadtest.runner import run
from loadtest.slo import SLO
from tests.support.stub_server import RunningStub, Seen, running_stub

TTFT_MS, ITL_MS, PROMPT_US = 50.0, 10.0, 250.0
WORDS = {"short": 10, "long": 210}  # of prompts: the TTFT of the one is 50 ms above the other's
SLOS = {"short": SLO(ttft=0.08), "long": SLO(ttft=0.08)}  # only short ones meet it
WITHIN_S, WITHIN = 0.001, 0.02
LAG_S = 0.005  # p99
FIGURES = ("ttft", "tpot", "itl", "e2e")
POINTS = ("mean", "p50", "p90", "p99")


@dataclass(frozen=True)
class Case:
    """Poisson arrivals for so long, at so many requests per second, with answers of so many."""

    rate: float
    seconds: float
    chunks: int

    def conversations(self, seed: int) -> list[Conversation]:
        """Short and long prompts by turns; each names its number first."""
        count = round(self.rate * self.seconds)
        gaps = np.random.default_rng(seed).exponential(1 / self.rate, count)
        names = ["short", "long"]
        return [
            Conversation(float(at), names[i % 2], (self._turn(i, WORDS[names[i % 2]]),))
            for i, at in enumerate(np.cumsum(gaps))
        ]

    def _turn(self, number: int, num_words: int) -> Turn:
        return Turn(f"{number} {'word ' * (num_words - 1)}", num_words, self.chunks)

    def nominal_s(self, class_name: str) -> dict[str, float]:
        """What was asked of the stub."""
        ttft = (TTFT_MS + WORDS[class_name] * PROMPT_US / 1000) / 1000
        itl = ITL_MS / 1000
        return {"ttft": ttft, "tpot": itl, "itl": itl, "e2e": ttft + (self.chunks - 1) * itl}


CASES = (Case(1, 30, 64), Case(100, 20, 64), Case(1000, 10, 2))


@dataclass(frozen=True)
class Measured:
    """One case: what we saw, and what there was to see."""

    case: Case
    ours: Summary
    true: Summary

    def spreads(self) -> Iterator[tuple[str, str, Spread, Spread]]:
        """Class, figure, ours, the stub's."""
        for ours, true in zip(self.ours.classes, self.true.classes, strict=True):
            for name in FIGURES:
                yield ours.name, name, getattr(ours, name), getattr(true, name)

    def misses(self, points: Sequence[str] = POINTS) -> dict[str, str]:
        """What is not as right as it must be: its name, and by how much."""
        found = {}
        if self.ours.total.num_ok != self.ours.num_planned:
            found["requests failed"] = f"{dict(self.ours.total.errors)}"
        if self.ours.total.output_tokens != self.ours.num_planned * self.case.chunks:
            found["tokens of answers"] = f"{self.ours.total.output_tokens}"
        share, should = (each.total.attainment.share for each in (self.ours, self.true))
        if not abs(share - should) <= WITHIN:
            found["attainment"] = f"{share:.1%}, by the stub's times {should:.1%}"
        for class_name, name, ours, true in self.spreads():
            for point in points:
                is_, should = getattr(ours, point), getattr(true, point)
                if not abs(is_ - should) <= max(WITHIN_S, WITHIN * should):
                    wrong = f"{is_ * 1e3:.2f} ms, the stub's {should * 1e3:.2f} ms"
                    found[f"{class_name} {name} {point}"] = wrong
        if "p99" in points and not self.ours.lag.p99 < LAG_S:
            found["p99 lag"] = f"{self.ours.lag.p99 * 1e3:.2f} ms"
        return found


def measure(stub: RunningStub, case: Case, seed: int = 0) -> Measured:
    """Run a case against a stub that was started by :func:`known_stub`."""
    stub.forget()

    async def load() -> RunResult:
        async with Client(ClientOptions(stub.url)) as client:
            return await run(case.conversations(seed), client)

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        ours = runner.run(load())
    log = {int(seen.prompt[0]["content"].split()[0]): seen for seen in stub.requests()}
    return Measured(case, summarize(ours, SLOS), summarize(truth(ours, log), SLOS))


def truth(ours: RunResult, log: Mapping[int, Seen]) -> RunResult:
    """The same run by the stub's own times, from when a request had arrived there."""
    records = []
    for record in ours.records:
        seen = log[record.conversation]
        times = tuple(at - seen.arrived_s for at in seen.sent_s)
        records.append(replace(record, chunk_s=times, sent_s=record.due_s))
    return replace(ours, records=tuple(records))


def known_stub(**flags: float) -> contextlib.AbstractContextManager[RunningStub]:
    """A stub with the delays of the cases."""
    return running_stub(**{"ttft_ms": TTFT_MS, "itl_ms": ITL_MS, "prompt_us": PROMPT_US} | flags)


def show(measured: Measured) -> None:
    """A table of one case, all times in ms."""
    case, lag = measured.case, measured.ours.lag
    print(f"\n{case.rate:g} requests/s, {case.chunks} chunks each, {lag.count:,} requests")
    row = "{:<12}{:>9}" + "{:>24}" * 2 + "{:>9}"
    print(row.format("ms", "nominal", "stub p50  p90  p99", "ours p50  p90  p99", "error"))
    for class_name, name, ours, true in measured.spreads():
        nominal = case.nominal_s(class_name)[name]
        error = max((getattr(ours, each) - getattr(true, each) for each in POINTS), key=abs)
        print(
            row.format(
                f"{class_name} {name}",
                f"{nominal * 1e3:.2f}",
                *(f"{s.p50 * 1e3:8.2f}{s.p90 * 1e3:8.2f}{s.p99 * 1e3:8.2f}" for s in (true, ours)),
                f"{error * 1e3:+.2f}",
            )
        )
    share = measured.ours.total.attainment.share
    print(f"attainment {share:.1%} (50 % of the stub's delays)")
    print(f"lag p50 {lag.p50 * 1e3:.2f} ms, p99 {lag.p99 * 1e3:.2f} ms, max {lag.max * 1e3:.2f} ms")


def take_cores(pid: int, realtime: bool) -> None:
    """This process on the first core, the stub on the last."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(pid, {cores[-1]})
    os.sched_setaffinity(0, {cores[0]})
    if realtime:
        for each in (0, pid):
            os.sched_setscheduler(each, os.SCHED_FIFO, os.sched_param(1))


def main() -> int:
    """Measure all cases; the exit status."""
    parser = argparse.ArgumentParser(description="the load test's figures against known delays")
    parser.add_argument("--realtime", action="store_true", help="before all other processes (root)")
    parser.add_argument("--shorter", type=float, default=1.0, help="divide the durations by this")
    parser.add_argument("--seed", type=int, default=0, help="of the first round's arrivals")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    found: dict[str, list[str]] = {}
    with known_stub() as stub:
        take_cores(stub.pid, args.realtime)
        for number in range(args.rounds):
            print(f"\nround {number + 1} of {args.rounds}")
            for case in CASES:
                shorter = replace(case, seconds=case.seconds / args.shorter)
                measured = measure(stub, shorter, args.seed + number)
                show(measured)
                for name, text in measured.misses().items():
                    found.setdefault(f"{case.rate:g}/s, {name}", []).append(text)
    print()
    for name, texts in found.items():
        print(f"{name}: {', '.join(texts)} in {len(texts)} of {args.rounds} rounds")
    wrong = [name for name, texts in found.items() if 2 * len(texts) > args.rounds]
    print(f"wrong: {'; '.join(wrong)}" if wrong else "all within 1 ms or 2 %")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
