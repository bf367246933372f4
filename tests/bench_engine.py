"""``make bench-engine``: Baton's engine against the machine's ceilings, and ``transformers``.

Everything computes in this process, by turns: in each round each case is measured once by each
contender, right after the ceilings. Prefill is one prompt, from ``Engine.add`` to the first token;
decode is ``Engine.step`` of a batch, with the sampler. Needs an idle machine. Status 1 when a
target is missed.
"""

import argparse
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.machine import calm_openmp, processor_name

calm_openmp()  # as every worker does, before torch is imported

import torch  # noqa: E402

from services.fetch import DEFAULT_MODEL, fetch  # noqa: E402
from tests.support import bench  # noqa: E402
from tests.support.bench import Case, Cell, Contender, Results, Target, say, selected  # noqa: E402
from tests.support.bench_contenders import (  # noqa: E402
    Baton,
    BatonContender,
    Machine,
    Setup,
    Transformers,
)
from tests.support.roofline import Shape  # noqa: E402

PREFILL = (128, 512, 2048)
BATCHES = (1, 4, 8, 16, 32)
CONTEXTS = (256, 2000)
SHORT = Case(100, 16)  # against Case(2000, 16)
MAX_ROWS = 512  # of the engine that computes 512 tokens in a step
ROOM = 64  # tokens that a sequence may grow
FP32, INT8 = "Baton fp32", "Baton int8"
OVERHEAD = "32 sequences, one of them sampled"


def cases() -> list[Case]:
    """All that are measured."""
    decode = [Case(context, batch) for context in CONTEXTS for batch in BATCHES]
    return [*(Case(tokens) for tokens in PREFILL), SHORT, *decode]


@dataclass
class Bench:
    """The contenders of this process."""

    setup: Setup
    shape: Shape
    machine: Machine
    contenders: list[Contender]
    batons: dict[str, Baton]

    def overheads(self, results: Results) -> None:
        """A step's time outside the model."""
        batch = self.setup.max_batch
        context = min(256, self.setup.max_tokens - ROOM)
        for name, baton in self.batons.items():
            for what, sampled in (("greedy", 0), ("one of them sampled", 1), ("sampled", batch)):
                label = f"{name}: {batch} sequences, {what}"
                value = baton.overhead_ms(batch, context, sampled)
                results.overheads_ms.setdefault(label, []).append(value)
                say(f"step outside the model  {label:<45}{value:9.2f} ms")


def build(setup: Setup, only: Sequence[str], max_rows: int = MAX_ROWS) -> Bench:
    """Load what was asked for; several copies of the model, by the end."""
    shape = Shape.of(setup.config)
    contenders: list[Contender] = []
    batons: dict[str, Baton] = {}
    torch.set_num_threads(setup.threads)
    for name, dtype in ((FP32, "float32"), (INT8, "int8")):
        if not selected(only, name):
            continue
        say(f"loading {name}")
        baton = batons[name] = Baton(setup, dtype, max_rows)
        contenders.append(BatonContender(name, baton, baton.engine, decodes=True))
        budget = baton.default_budget
        if budget != max_rows:
            engine = baton.with_budget(budget)
            contenders.append(BatonContender(f"{name}, steps of {budget}", baton, engine, False))
    if selected(only, Transformers.name):
        say(f"loading {Transformers.name}")
        contenders.append(Transformers(setup))
    return Bench(setup, shape, Machine(shape, setup.threads), contenders, batons)


def percent(results: Results, cell: Cell | None) -> float | None:
    share = None if cell is None else cell.share(results.shape)
    return None if share is None else 100 * share


def targets(results: Results) -> list[Target]:
    """What must hold between Baton and the machine."""
    found = []
    for tokens in (512, 2048):
        cell = results.cell(FP32, Case(tokens))
        found.append(
            Target(f"{Case(tokens)}, fp32, of GEMM", percent(results, cell), 80, unit=" %")
        )
    for context, limit in ((256, 70), (2000, 60)):
        for batch in (1, 8, 32):
            case = Case(context, batch)
            cell = results.cell(FP32, case)
            found.append(Target(f"{case}, fp32, of roof", percent(results, cell), limit, unit=" %"))
    long, short = results.cell(FP32, Case(2000, 16)), results.cell(FP32, SHORT)
    times = None if long is None or short is None else long.seconds / short.seconds
    found.append(Target("decode 16 x 2,000 by 16 x 100", times, 1.6, True, " times"))
    overheads = results.overheads_ms.get(f"{FP32}: {OVERHEAD}")
    ms = None if overheads is None else bench.statistics.median(overheads)
    found.append(Target("step outside the model, batch 32", ms, 2, True, " ms"))
    return found


def ceilings_table(results: Results) -> str:
    """The median of each form."""
    rows = []
    for name, rates in results.forms.items():
        unit = "GB/s" if name in ("torch.sum", "loop by numba") else "GFLOP/s"
        rows.append([name, f"{bench.statistics.median(rates) / 1e9:.1f}", unit])
    return bench.table(["ceiling", "median", "unit"], rows)


def overhead_table(results: Results) -> str:
    rows = [
        [name, f"{bench.statistics.median(values):.2f}"]
        for name, values in results.overheads_ms.items()
    ]
    return bench.table(["step outside the model", "ms"], rows)


def report(results: Results, goals: Sequence[Target], heading: str) -> str:
    """All tables."""
    parts = [heading, ceilings_table(results)]
    if any(not cell.case.batch for cell in results.cells):
        parts.append(bench.prefill_table(results))
    if any(cell.case.batch for cell in results.cells):
        parts.append(bench.decode_table(results))
    if results.overheads_ms:
        parts.append(overhead_table(results))
    return "\n\n".join([*parts, bench.target_table(goals)])


def parser(text: str) -> argparse.ArgumentParser:
    """The flags that both benchmarks have."""
    flags = argparse.ArgumentParser(description=text)
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    flags.add_argument("--model", default=DEFAULT_MODEL, help="alias, folder or GGUF file")
    flags.add_argument("--rounds", type=int, default=5)
    flags.add_argument("--threads", type=int, default=cores, help="of everybody")
    flags.add_argument(
        "--only", action="append", default=[], help="cases with this in their name, repeatable"
    )
    flags.add_argument(
        "--who", action="append", default=[], help="contenders with this in their name, repeatable"
    )
    flags.add_argument("--json", type=Path, help="keep every timing in this file")
    flags.add_argument("--markdown", type=Path, help="put the tables between this page's marks")
    return flags


def prepare(args: argparse.Namespace) -> tuple[Setup, list[Case]]:
    """The model, and the cases that were asked for."""
    folder = fetch(args.model, report=say)
    chosen = [case for case in cases() if selected(args.only, str(case))]
    if not chosen:
        raise SystemExit(f"no case is called that; there are {', '.join(map(str, cases()))}")
    max_batch = max(max(case.batch for case in chosen), 32 if not args.only else 1)
    max_tokens = max(case.tokens for case in chosen) + ROOM
    return Setup(folder, args.threads, max_batch, max_tokens), chosen


def conclude(args: argparse.Namespace, results: Results, goals: list[Target], mark: str) -> int:
    """Print, write, and judge."""
    command = f"make {mark}"
    if given := shlex.join(sys.argv[1:]):
        command += f' ARGS="{given}"'
    heading = (
        f"`{command}`, {time.strftime('%Y-%m-%d')}, {args.rounds} rounds: {args.model}, "
        f"{args.threads} threads on {processor_name()}, torch {torch.__version__}."
    )
    text = report(results, goals, heading)
    print(text)
    if args.json:
        results.save(args.json, {"command": command, "processor": processor_name()})
    if args.markdown:
        bench.write_between(args.markdown, mark, text)
    return 1 if any(goal.missed for goal in goals) else 0


def main() -> int:
    """The exit status."""
    args = parser(__doc__.splitlines()[0]).parse_args()
    setup, chosen = prepare(args)
    parts = build(setup, args.who)
    results = Results(parts.shape, forms=parts.machine.forms)
    extra = (lambda: parts.overheads(results)) if not args.only else (lambda: None)
    bench.run(results, parts.contenders, chosen, args.rounds, parts.machine, extra)
    return conclude(args, results, targets(results), "bench-engine")


if __name__ == "__main__":
    sys.exit(main())
