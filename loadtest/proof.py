"""``make proof``: prefill and decode apart against mixed workers, on the cores at hand.

    alone   what a token takes when nobody else is there, and how fast prompts are computed
    sweep   each mixed setting (one worker or two, by token budget) at one rate of each workload
    proof   the best mixed setting and the disaggregated one, by turns, over rates, per workload

Workloads are built-in scenarios at half their lengths. Objectives and rates are multiples of what
was measured first, so that they mean the same on a slower machine. Everything goes into one folder:
report.html, comparison.json and requests.jsonl of the proof, the same of the sweep in ``sweep/``.
"""

import argparse
import asyncio
import math
import os
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from loadtest.command import INTERRUPTED, OK, Asker, in_loop, stop_on_signals, workload_of
from loadtest.compare import Comparer, Sweep
from loadtest.comparison import ComparisonReport
from loadtest.options import ServerOptions, WorkloadOptions
from loadtest.proof_page import write_page
from loadtest.ratios import section
from loadtest.results import (
    Requests,
    facts,
    new_folder,
    read_comparison,
    say,
    write_comparison,
)
from loadtest.runner import run
from loadtest.slo import SLO
from loadtest.source import Extent, ScenarioSource, source_of
from loadtest.targets import Target, start
from loadtest.trial import Comparison, Objectives, Window
from loadtest.wording import digits, ms, time_words

TIGHT, LOOSE = 1.5, 3.0  # times what a token takes alone
QUEUE_S = 8.0  # a first token later than this: a queue that grows
IN_BATCH = 6  # sequences of a decode worker at the highest rate that it could have, about
SERVE = ("--kv-blocks", "700", "--max-model-len", "2048")
DISAGGREGATED = Target("disaggregated", flags=("--prefill", "1", "--decode", "1", *SERVE))
SWEEP = "sweep"  # a folder within the proof's
LONG = 448  # tokens of the prompts that tell how fast prompts are computed


@dataclass(frozen=True)
class Part:
    """One workload. ``loads`` are rates, as shares of what the machine could at most do."""

    scenario: str
    sweep_s: float
    sweep_load: float
    window_s: float
    loads: tuple[float, ...]
    rounds: int = 1


@dataclass(frozen=True)
class Size:
    """How much is run."""

    parts: tuple[Part, ...]
    budgets: tuple[int, ...]
    workers: tuple[int, ...]  # of the mixed settings
    num_alone: int = 8  # requests, one at a time
    scale: float = 0.5  # of the scenarios' lengths


FULL = Size(
    parts=(
        Part("bursts", 30, 0.4, 40, (0.15, 0.3, 0.5, 0.75), rounds=2),
        Part("chat", 10, 0.6, 20, (0.5, 0.9)),
        Part("summarise", 10, 0.6, 20, (0.5, 0.9)),
    ),
    budgets=(32, 64, 128, 256, 512),
    workers=(1, 2),
)
SMALL = Size(
    parts=(Part("bursts", 3, 0.3, 3, (0.3,)),), budgets=(32,), workers=(1,), num_alone=2, scale=0.1
)


@dataclass(frozen=True)
class Alone:
    """What one request at a time gets from the disaggregated setting."""

    tpot_s: float
    prefill_rate: float  # tokens/s

    def objectives(self, source: ScenarioSource) -> Objectives:
        """Tight and loose. What has an end of its own in the scenario keeps that."""
        return {
            label: {
                name: slo
                if math.isfinite(slo.e2e)
                else SLO(ttft=QUEUE_S, tpot=factor * self.tpot_s)
                for name, slo in source.slos.items()
            }
            for label, factor in (("tight", TIGHT), ("loose", LOOSE))
        }

    def capacity(self, source: ScenarioSource) -> float:
        """Requests/s beyond which the prefill or the decode worker cannot follow, about."""
        classes = source.scenario.classes
        total = sum(spec.share for spec in classes)
        tokens_in = sum(spec.share * (spec.prefix + spec.input.mean) for spec in classes) / total
        tokens_out = sum(spec.share * spec.output.mean for spec in classes) / total
        return min(self.prefill_rate / tokens_in, IN_BATCH / (tokens_out * TIGHT * self.tpot_s))


def mixed(workers: int, budget: int) -> Target:
    """A setting of mixed workers, which share the cores."""
    flags = ("--prefill", "0", "--decode", "0", "--mixed", str(workers), *SERVE)
    name = f"mixed-{workers}x{max(1, cores() // workers)}-budget-{budget}"
    return Target(name, flags=(*flags, "--token-budget", str(budget)))


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))


class Proof:
    """Makes the trials; what there is by then is kept when it is interrupted."""

    def __init__(
        self, size: Size, path: Path, model: str, command: Sequence[str] | None = None
    ) -> None:
        """``command`` stands for ``baton``."""
        self.size, self.path, self.command = size, path, command
        self.model = ("--model", model) if model else ()
        self.asker = Asker(ServerOptions(endpoint="completions"))
        self.sources = {part: _source(part.scenario, size.scale) for part in size.parts}
        self.alone: Alone | None = None
        self.swept: dict[Part, Comparison] = {}
        self.proven: dict[Part, Comparison] = {}

    async def run(self) -> bool:
        """All three stages; whether it was interrupted."""
        stop = stop_on_signals()
        self.alone = await self._alone(stop)
        if self.alone is None:
            return True
        say(
            f"alone: {ms(self.alone.tpot_s)} ms per token,"
            f" {digits(self.alone.prefill_rate)} tokens/s of prompts"
        )
        with Requests(self.path / SWEEP) as requests:
            for workers in self.size.workers:
                for budget in self.size.budgets:
                    if not stop.is_set():
                        await self._sweep(mixed(workers, budget), requests, stop)
        with Requests(self.path) as requests:
            for part, swept in self.swept.items():
                if not stop.is_set():
                    targets = (best(swept), self._target(DISAGGREGATED))
                    sweep = Sweep(self._rates(part, part.loads), part.rounds)
                    window = Window(part.window_s)
                    self.proven[part] = await self._compare(
                        part, targets, sweep, window, requests, stop
                    )
        return stop.is_set()

    async def _alone(self, stop: asyncio.Event) -> Alone | None:
        server = await start(self._target(DISAGGREGATED), self.path, self.command)
        try:
            async with self.asker.connect(server.url) as client:
                chats, _ = _source("chat", self.size.scale).conversations(
                    self.asker.writer, Extent(math.inf, num_requests=self.size.num_alone + 1)
                )
                seen = await run(chats, client, concurrency=1, stop=stop)
                long = source_of(WorkloadOptions(input=str(LONG), output="1"))
                prompts, _ = long.conversations(
                    self.asker.writer, Extent(math.inf, num_requests=self.size.num_alone // 2)
                )
                read = await run(prompts, client, concurrency=1, stop=stop)
        finally:
            await server.stop()
        if stop.is_set():
            return None
        return Alone(
            tpot_s=statistics.median(record.tpot_s for record in seen.records),
            prefill_rate=LONG / statistics.median(record.ttft_s for record in read.records),
        )

    async def _sweep(self, setting: Target, requests: Requests, stop: asyncio.Event) -> None:
        """One mixed setting, at one rate of each workload."""
        say(f"{setting.name}: starting")
        server = await start(self._target(setting), requests.path, self.command)
        try:
            for part in self.size.parts:
                if stop.is_set():
                    return
                sweep = Sweep(self._rates(part, (part.sweep_load,)), 1)
                target = replace(self._target(setting), url=server.url)
                seen = await self._compare(
                    part, (target,), sweep, Window(part.sweep_s), requests, stop
                )
                before = self.swept.get(part)
                targets = (*(before.targets if before else ()), self._target(setting))
                trials = (*(before.trials if before else ()), *seen.trials)
                self.swept[part] = replace(seen, targets=targets, trials=trials)
        finally:
            await server.stop()

    async def _compare(
        self,
        part: Part,
        targets: Sequence[Target],
        sweep: Sweep,
        window: Window,
        requests: Requests,
        stop: asyncio.Event,
    ) -> Comparison:
        assert self.alone
        say(f"{part.scenario}: {', '.join(target.name for target in targets)}")
        source = self.sources[part]
        comparer = Comparer(
            workload=workload_of(source, self.asker, window),
            window=window,
            objectives=self.alone.objectives(source),
            connect=self.asker.connect,
            stop=stop,
            say=say,
            on_record=requests.add,
        )
        return await comparer.compare(targets, sweep, requests.path, command=self.command)

    def _rates(self, part: Part, loads: Sequence[float]) -> tuple[float, ...]:
        assert self.alone
        capacity = self.alone.capacity(self.sources[part])
        return tuple(float(f"{load * capacity:.2g}") for load in loads)

    def _target(self, setting: Target) -> Target:
        return replace(setting, flags=(*setting.flags, *self.model))

    # --- results -------------------------------------------------------------------------------

    def write(self, seconds: float) -> None:
        """The reports of what there is."""
        if self.alone is None:
            return
        known = facts(self.asker.writer) | {
            "Model": self.asker.model,
            "Alone": f"{ms(self.alone.tpot_s)} ms per token,"
            f" {digits(self.alone.prefill_rate)} prompt tokens/s",
            "Objectives": f"tight is {TIGHT:g} times the time per token alone, loose {LOOSE:g}"
            f" times; and the first token within {time_words(QUEUE_S)}",
            "Took": time_words(seconds),
        }
        for path, title, found in (
            (self.path / SWEEP, "Mixed workers by token budget", self.swept),
            (self.path, "Disaggregated against mixed", self.proven),
        ):
            if not found:
                continue
            targets = {
                target.name: target.what for seen in found.values() for target in seen.targets
            }
            sections = [
                section(seen, part.scenario, self._about(part), classes=self._classes(part))
                for part, seen in found.items()
            ]
            write_comparison(
                path,
                ComparisonReport(
                    title=title,
                    started=next(iter(found.values())).started,
                    command=_command(),
                    targets=targets,
                    sections=sections,
                    facts=known,
                ),
            )

    def _about(self, part: Part) -> str:
        return "; ".join(
            [self.sources[part].about.rstrip(".")]
            + [
                f"{spec.name}: {spec.input} tokens in, {spec.output} out"
                for spec in self.sources[part].scenario.classes
            ]
        )

    def _classes(self, part: Part) -> list[str]:
        names = list(self.sources[part].slos)
        return ["", *names[:1]] if len(names) > 1 else [""]


def best(swept: Comparison) -> Target:
    """The setting with the most requests within the tight objectives; of equals, within the loose
    ones; of these, the one whose tokens come soonest.
    """

    def rank(target: Target) -> tuple[float, ...]:
        trials = swept.of(target.name)
        shares = []
        for slos in swept.objectives.values():
            met = [met for trial in trials for met in trial.probe(slos).met]
            shares.append(sum(met) / max(len(met), 1))
        records = [record for trial in trials for record in trial.result.records]
        tpot_s = [record.tpot_s for record in records if not record.error]
        return *shares, -statistics.fmean(tpot_s or [math.inf])

    return max(swept.targets, key=rank)


def _source(scenario: str, scale: float) -> ScenarioSource:
    source = source_of(WorkloadOptions(scenario=scenario, scale=scale))
    assert isinstance(source, ScenarioSource)
    return source


def _command() -> str:
    """As it is typed from the project's folder."""
    given = shlex.join(sys.argv[1:])
    return "make proof" + (f" ARGS={shlex.quote(given)}" if given else "")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m loadtest.proof``; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.proof", description=__doc__)
    parser.add_argument("--out", default="proof", help="folder for the results")
    parser.add_argument("--model", default="", help="as baton serve takes it")
    parser.add_argument(
        "--small", action="store_true", help="a minute or two, to see that it works"
    )
    parser.add_argument("--page", help="Markdown page that gets tables and plots, between marks")
    args = parser.parse_args(argv)
    proof = Proof(SMALL if args.small else FULL, new_folder(args.out), args.model)
    began = time.monotonic()
    try:
        stopped = in_loop(proof.run())
    finally:
        proof.write(time.monotonic() - began)
    if args.page and proof.proven:
        write_page(Path(args.page), *(read_comparison(p) for p in (proof.path, proof.path / SWEEP)))
    return INTERRUPTED if stopped else OK


if __name__ == "__main__":
    sys.exit(main())
