"""Pictures and a table of the planner in virtual time, for docs/scaling.md.

``python -m services.planner.plots`` runs all loads with good, late and lost reports, and an oracle;
draws those with good reports, and writes the table between the page's marks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from loadtest.plot_style import WIDTH, Line, drawing_stack, legend_above, standalone, svg_of
from services.planner.oracle import oracle
from services.planner.scenarios import HOURS, NAMES, REPORTS, SCALING, WORLD, trace
from services.planner.sim_control import Planned
from services.planner.sim_run import ROLES, Request, Run, Sample
from services.planner.simulator import Simulation

BEGIN, END = "<!-- virtual -->", "<!-- /virtual -->"
ABOUT = {
    "steps": "twice as much, and half again, every quarter of an hour",
    "ramp": "evenly up, and down again",
    "sine": "a period of an hour",
    "bursts": "twice as much for a quarter of an hour, every half hour",
    "shift": "the same rate, from long answers to long prompts and back",
}
BIN_S = 120.0  # of what is shown over time
DOTTED = (0, (1.5, 1.5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=HOURS)
    parser.add_argument("--seed", type=int, default=1, help="other arrivals; only printed")
    parser.add_argument("--page", type=Path, default=Path("docs/scaling.md"))
    options = parser.parse_args()
    folder = options.page.parent / "scaling"
    folder.mkdir(exist_ok=True)
    rows = []
    for name in NAMES:
        load = trace(name, options.hours, options.seed)
        least = oracle(load, WORLD)
        first = {role: least.schedule[role][0][1] for role in ROLES}
        for how, reports in REPORTS.items():
            run = Simulation(load, WORLD, Planned(SCALING, reports), first).run()
            rows.append(row(name, how, run, least.run))
            print(rows[-1])
            if how == "clean" and options.seed == 1:
                picture = standalone(drawn(name, run, least.run))
                (folder / f"{name}.svg").write_text(picture, encoding="utf-8")
    if options.seed == 1:
        write_page(options.page, rows)


def write_page(page: Path, rows: Sequence[str]) -> None:
    """Put table and pictures between the marks."""
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    head = [
        "| load | reports | TTFT met | TPOT met | both | hours | oracle's | ratio | changes |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    pictures = [f"![{name}: {ABOUT[name]}](scaling/{name}.svg)" for name in NAMES]
    made = "\n".join([*head, *rows, "", *pictures])
    page.write_text(f"{before}{BEGIN}\n\n{made}\n\n{END}{after}", encoding="utf-8")


def row(name: str, how: str, run: Run, least: Run) -> str:
    """A line of the table."""
    hours, fewest = (sum(each.hours.values()) for each in (run, least))
    shares = " | ".join(f"{100 * share:.1f} %" for share in (run.ttft, run.tpot, run.both))
    changes = " + ".join(str(len(run.changes(role))) for role in ROLES)
    return (
        f"| {name} | {how} | {shares} | {hours:.1f} | {fewest:.1f} | {hours / fewest:.2f} "
        f"| {changes} |"
    )


def drawn(name: str, run: Run, least: Run) -> str:
    """Load, both pools and both objectives over time, as SVG."""
    with drawing_stack(name, (2, 2, 2, 2), 6.2, 1.6 * WIDTH) as (figure, axes):
        load, *pools, met = axes
        minutes = [sample.at / 60 for sample in run.samples]
        duration = run.trace.duration_s
        moments = [index * BIN_S for index in range(int(duration / BIN_S) + 1)]
        _stairs(load, Line("requests/s", 0), moments, _counts(run, lambda _: True))
        load.plot(
            [at / 60 for at in range(0, int(duration), 10)],
            [run.trace.rate(at) for at in range(0, int(duration), 10)],
            color=Line("", 6).colour, lw=1.0, label="as it was drawn",
        )  # fmt: skip
        load.set(ylabel="requests/s", ylim=(0, None))
        legend_above(load)
        for axis, role in zip(pools, ROLES, strict=True):
            for line, samples, of, dashes in (
                (Line("oracle", 2), least.samples, "alive", "-"),
                (Line("take work", 0), run.samples, "ready", "-"),
                (Line("target", 1), run.samples, "target", DOTTED),
            ):
                axis.step(
                    [sample.at / 60 for sample in samples], _sizes(samples, of, role),
                    where="post", color=line.colour, ls=dashes, lw=1.3, label=line.name,
                )  # fmt: skip
            axis.set(ylabel=f"{role} workers", ylim=(0, None))
        legend_above(pools[0])
        for line, is_good in ((Line("TTFT", 0), run.ttft_good), (Line("TPOT", 1), run.tpot_good)):
            _stairs(met, line, moments, _shares(run, is_good))
        met.axhline(95, color=Line("", 6).colour, lw=0.9, ls=DOTTED)
        met.set(ylabel="objective met, %", ylim=(0, 103), xlabel="minutes", xlim=(0, minutes[-1]))
        legend_above(met)
        figure.align_ylabels()
        return svg_of(figure)


def _stairs(axis: Axes, line: Line, edges: Sequence[float], values: Sequence[float]) -> None:
    axis.stairs(
        values, [edge / 60 for edge in edges], color=line.colour, lw=1.3, label=line.name,
        baseline=None,
    )  # fmt: skip


def _sizes(samples: Sequence[Sample], of: str, role: str) -> list[int]:
    return [getattr(sample, of)[role] for sample in samples]


def _counts(run: Run, is_good: Callable[[Request], bool]) -> list[float]:
    """Good requests per second, by bin of their arrival."""
    counts = [0] * int(run.trace.duration_s / BIN_S)
    for request in run.requests:
        counts[min(int(request.asked.at / BIN_S), len(counts) - 1)] += is_good(request)
    return [count / BIN_S for count in counts]


def _shares(run: Run, is_good: Callable[[Request], bool]) -> list[float]:
    """Of requests, in per cent; all where there were none."""
    pairs = zip(_counts(run, is_good), _counts(run, lambda _: True), strict=True)
    return [100 * good / every if every else 100.0 for good, every in pairs]


if __name__ == "__main__":
    main()
