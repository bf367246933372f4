"""The report of a comparison as one HTML file: each workload's curves, bars, ratios and verdicts.

Also that of a search for one target's highest rate: a comparison without anything to compare with.
Text from :class:`ComparisonReport`; reads and writes no files.
"""

import math
import re
from collections.abc import Sequence
from html import escape
from statistics import NormalDist

from loadtest import html_page as page
from loadtest.comparison import (
    FEW_ROUNDS,
    ComparisonReport,
    MaxRate,
    Measured,
    Ratio,
    Section,
)
from loadtest.figures import Figures
from loadtest.plot_style import Line, legend_html
from loadtest.plots import Points, against_rate, attainment_against_rate, cdf, max_rate_bars
from loadtest.slo import SLO
from loadtest.wording import (
    NOTHING,
    date_words,
    digits,
    measured_words,
    ms,
    percent,
    time_words,
)

MANY = 3  # targets besides the first
TOO_LITTLE = 0.02  # a difference that nobody would choose by
MANY_ROWS = 60  # of ratios: folded away on a screen
LATENCIES: Sequence[tuple[str, str, str]] = (
    ("ttft", "p50", "TTFT, median"),
    ("ttft", "p99", "TTFT, p99"),
    ("tpot", "p50", "TPOT, median"),
    ("tpot", "p99", "TPOT, p99"),
    ("itl", "p50", "ITL, median"),
    ("itl", "p99", "ITL, p99"),
)


def comparison_html(report: ComparisonReport) -> str:
    """The whole page."""
    several = len(report.targets) > 1
    base = next(iter(report.targets))
    names = {f"section-{place}": section for place, section in enumerate(report.sections)}
    links = "".join(
        f'<a href="#{key}">{escape(section.workload)}</a>' for key, section in names.items()
    )
    intro = (
        "All targets were run by turns on the same machine, with the same requests in each round."
        + (f" Ratios are to {base}." if len(report.sections) == 1 else "")
        if several
        else ""
    )
    return page.page(
        report.title,
        f"<h1>{escape(report.title)}</h1>",
        f'<p class="dim">{escape(date_words(report.started))}</p>',
        page.warnings(report.notes),
        f"<p>{escape(intro)} Intervals are of 95 %.</p>",
        page.facts({**report.targets, **report.facts}),
        f"<nav>{links}</nav>" if len(names) > 1 else "",
        *(_section(key, section, report) for key, section in names.items()),
        page.reproduce(report.command),
        page.definitions(),
    )


def verdicts(section: Section, base: str) -> list[str]:
    """In plain words where each target wins against the first one, and where nothing is known.

    Of many targets only their highest rates, all of them together: the table has the rest.
    """
    targets = dict.fromkeys(ratio.target for ratio in section.ratios)
    if len(targets) > MANY:
        return _verdicts_of_many(section, base)
    judged = [
        ratio
        for ratio in section.ratios
        if section.rounds >= FEW_ROUNDS or " at " not in ratio.figure
    ]
    sentences = []
    for target in targets:
        sides: dict[str, list[Ratio]] = {"better": [], "worse": [], "even": []}
        for ratio in judged:
            if ratio.target == target:
                sides[side_of(ratio, len(judged))].append(ratio)
        for side in ("better", "worse"):
            if sides[side]:
                figures = "; ".join(_by_figure(sides[side], with_ratio=True))
                sentences.append(f"{target} is {side} than {base}: {figures}.")
        if sides["even"]:
            figures = "; ".join(_by_figure(sides["even"], with_ratio=False))
            sentences.append(f"{target} and {base}, no certain difference: {figures}.")
    return sentences


def _verdicts_of_many(section: Section, base: str) -> list[str]:
    """A sentence for each figure that has no rate, and each side of it."""
    words = {side: f"{side} than {base}" for side in ("better", "worse")}
    words["even"] = f"no certain difference to {base}"
    sides: dict[tuple[str, str], list[str]] = {}
    for ratio in section.ratios:
        if " at " not in ratio.figure:
            side = words[side_of(ratio, len(section.ratios))]
            found = sides.setdefault((ratio.figure, side), [])
            found.append(f"{ratio.target} ({_times(ratio.ratio.value)})")
    return [f"{figure}, {side}: {'; '.join(found)}." for (figure, side), found in sides.items()]


def side_of(ratio: Ratio, num_judged: int = 1) -> str:
    """Whether the target is "better" or "worse" than the first one.

    "even" when the interval holds 1 or is not known, or when the difference is under 2 %. The
    interval is widened until all ``num_judged`` ratios together are wrong in 1 of 20 reports only
    (Bonferroni, on the logarithm).
    """
    value, low, high = ratio.ratio.value, ratio.ratio.low, ratio.ratio.high
    if math.isnan(low) or math.isnan(high) or abs(value - 1) < TOO_LITTLE:
        return "even"
    near = low if value > 1 else high  # the end on the side of 1
    if not 0 < near < math.inf or not value > 0:
        return "even"
    wider = _z(0.05 / num_judged) / _z(0.05)
    distance = abs(math.log(value))
    if distance <= wider * abs(math.log(value / near)):
        return "even"
    return "better" if (value > 1) == (ratio.better == "higher") else "worse"


def _z(error: float) -> float:
    return NormalDist().inv_cdf(1 - error / 2)


def _by_figure(ratios: Sequence[Ratio], with_ratio: bool) -> list[str]:
    """``ITL p99 1.6 × at 2/s, 1.5 × at 4/s``: a figure's rates together."""
    found: dict[str, list[str]] = {}
    for ratio in ratios:
        figure, at, rate = ratio.figure.partition(" at ")
        times = [_times(ratio.ratio.value)] if with_ratio else []
        found.setdefault(figure, []).append(" ".join([*times, *filter(None, [at.strip(), rate])]))
    return [" ".join(filter(None, [figure, ", ".join(parts)])) for figure, parts in found.items()]


def _times(value: float) -> str:
    return f"{digits(value)}\N{NO-BREAK SPACE}×"


def _section(key: str, section: Section, report: ComparisonReport) -> str:
    places = {name: place for place, name in enumerate(report.targets)}
    names = list(dict.fromkeys(cell.target for cell in section.cells)) or list(places)
    lines = {name: Line(name, places[name]) for name in names}
    limits = "".join(
        f"<li>{f'<b>{escape(label)}</b>: ' if label else ''}{escape(words)}</li>"
        for label, words in section.slos.items()
        if words
    )
    rate = chosen_rate(section)
    legend = legend_html({escape(name): line for name, line in lines.items()})
    return "\n".join(
        [
            f'<h2 id="{key}">{escape(section.workload)}</h2>',
            f"<p>{escape(section.description)}</p>",
            f"<p>Objectives of a request:</p><ul class=words>{limits}</ul>" if limits else "",
            page.warnings(section.notes),
            page.bullets(verdicts(section, names[0])),
            f"<h3>Highest rate at which {report.attainment * 100:.4g} % of requests meet"
            " their objectives</h3>" if section.max_rates else "",
            _max_rates(section, lines),
            "<h3>Against the rate</h3>",
            legend if len(names) > 1 else "",
            page.plots(*_attainments(section, lines, report.attainment)),
            page.plots(*_latencies(section, lines)),
            f"<h3>Inter-token latencies at a rate of {rate:.3g}/s</h3>" if rate else "",
            page.plots(_itl(section, lines, rate)) if rate else "",
            _ratios(section, names[0]),
            _cells(section),
        ]
    )  # fmt: skip


def _attainments(section: Section, lines: dict[str, Line], threshold: float) -> list[str]:
    return [
        attainment_against_rate(
            _series(section, lines, [cell.attainment.get(label) for cell in section.cells]),
            threshold,
            f"Requests that meet: {label}" if len(section.slos) > 1 else "Attainment",
        )
        for label in section.slos
    ]


def _latencies(section: Section, lines: dict[str, Line]) -> list[str]:
    """Each percentile against the rate; beside the medians the limit of the main objectives."""
    slos = {cell.summary.total.slo for cell in section.cells}
    slo = (slos.pop() if len(slos) == 1 else None) or SLO()
    svgs = []
    for name, rank, title in LATENCIES:
        spreads = [getattr(cell.summary.total, name) for cell in section.cells]
        values = [Measured(getattr(spread, rank)) if spread.count else None for spread in spreads]
        limit = getattr(slo, name, math.inf) if rank == "p50" else math.inf
        svgs.append(against_rate(_series(section, lines, values), title, limit))
    return svgs


def _series(
    section: Section, lines: dict[str, Line], values: Sequence[Measured | None]
) -> list[Points]:
    """A figure of the section's cells, as a line by rate for each target that has it."""
    series = []
    for name, line in lines.items():
        found = sorted(
            (cell.rate, place)
            for place, cell in enumerate(section.cells)
            if cell.target == name and values[place] is not None
        )
        ys = [value for _, place in found if (value := values[place]) is not None]
        series.append(Points(line, [rate for rate, _ in found], ys))
    return series


def chosen_rate(section: Section) -> float | None:
    """Whose ITL is shown: as asked, or the highest that half of the targets sustain."""
    known = [cell for cell in section.cells if len(cell.itl_s)]
    if section.itl_rate is not None or not known:
        return section.itl_rate
    targets = {cell.target for cell in known}
    rates = sorted({cell.rate for cell in known})
    shared = [rate for rate in rates if {c.target for c in known if c.rate == rate} == targets]
    if not shared:
        return rates[-1]
    sustained = [
        rate
        for rate in shared
        if 2 * sum(c.summary.total.attainment.share >= 0.9 for c in known if c.rate == rate)
        >= len(targets)
    ]
    return max(sustained, default=shared[0])


def _itl(section: Section, lines: dict[str, Line], rate: float | None) -> str:
    cells = [cell for cell in section.cells if cell.rate == rate and len(cell.itl_s)]
    samples = [(lines[cell.target], cell.itl_s) for cell in cells]
    return cdf(samples, f"ITL at {rate:.3g}/s, its tail drawn out", tail=True)


def _max_rates(section: Section, lines: dict[str, Line]) -> str:
    if not section.max_rates:
        return ""
    bars = [
        max_rate_bars(
            [(lines[entry.target], entry) for entry in section.max_rates if entry.slo == label],
            f"Highest rate: {label}" if len(section.slos) > 1 else "Highest rate",
        )
        for label in section.slos
    ]
    found = {(entry.target, entry.slo): entry for entry in section.max_rates}
    rows = []
    for target in lines:
        entries = [found.get((target, label)) for label in section.slos]
        rows.append([escape(target), *("" if e is None else _max_rate(e) for e in entries)])
    labels = section.slos if len(section.slos) > 1 else ("highest rate",)
    left = tuple(range(1, len(labels) + 1))
    table = page.table(["target", *labels], [rows], "Highest rate (95 % interval)", left)
    return page.plots(*bars) + table


def _max_rate(entry: MaxRate) -> str:
    note = f'<br><span class="dim">{escape(entry.note)}</span>' if entry.note else ""
    return f"{measured_words(entry.rate, '/s')}{note}"


def _ratios(section: Section, base: str) -> str:
    if not section.ratios:
        return ""
    marks = {
        "better": "<span class=good>better</span>",
        "worse": "<span class=bad>worse</span>",
        "even": "no certain difference",
    }
    groups = []
    for target in dict.fromkeys(ratio.target for ratio in section.ratios):
        groups.append(
            [
                [
                    escape(ratio.target),
                    escape(ratio.figure),
                    _with_unit(ratio.base, ratio.unit),
                    _with_unit(ratio.value, ratio.unit),
                    _times(ratio.ratio.value),
                    _ratio_interval(ratio.ratio),
                    marks[side_of(ratio)],
                ]
                for ratio in section.ratios
                if ratio.target == target
            ]
        )
    head = ["target", "figure", base, "target's", "ratio", "95 % interval", f"than {base}"]
    table = page.table(head, groups, left=(1, 6))
    if len(section.ratios) > MANY_ROWS:
        table = page.details(f"All {len(section.ratios)} ratios", table)
    return f"<h3>Ratios to {escape(base)}</h3>{table}"


def _ratio_interval(ratio: Measured) -> str:
    if math.isnan(ratio.low) or math.isnan(ratio.high):
        return NOTHING
    if math.isinf(ratio.high):
        return f"{digits(ratio.low)} or more" if ratio.low > 0 else "not known"
    return f"{digits(ratio.low)} to {digits(ratio.high)}"


def _with_unit(value: float, unit: str) -> str:
    return time_words(value) if unit == "s" else f"{digits(value)}{unit}"


def _cells(section: Section) -> str:
    head = [
        "target", "rate/s", "met", "good/s", "output tok/s", "TTFT p50", "p99", "TPOT p50", "p99",
        "ITL p50", "p99", "E2E p50", "p99", "failed", "lag p99",
    ]  # fmt: skip
    groups: dict[str, list[list[str]]] = {}
    for cell in sorted(section.cells, key=lambda cell: cell.rate):
        row = [escape(cell.target), digits(cell.rate), *_row(cell.summary.total)]
        groups.setdefault(cell.target, []).append([*row, ms(cell.summary.lag.p99)])
    caption = f"Latencies in ms. Met, good: all objectives of {next(iter(section.slos), '')}."
    caption = re.sub(r" of \.$", ".", caption)
    return page.details(
        "All figures of each target at each rate",
        page.table(head, list(groups.values()), caption),
    ) + _class_cells(section)


def _row(figures: Figures) -> list[str]:
    spreads = (figures.ttft, figures.tpot, figures.itl, figures.e2e)
    return [
        percent(figures.attainment.share),
        digits(figures.goodput),
        digits(figures.output_throughput),
        *(ms(value) for spread in spreads for value in (spread.p50, spread.p99)),
        f"{figures.num_failed:,}",
    ]


def _class_cells(section: Section) -> str:
    """The same for each class, where there are several."""
    if all(len(cell.summary.classes) < 2 for cell in section.cells):
        return ""
    head = [
        "target", "rate/s", "class", "met", "good/s", "output tok/s", "TTFT p50", "p99",
        "TPOT p50", "p99", "ITL p50", "p99", "E2E p50", "p99", "failed",
    ]  # fmt: skip
    groups: dict[str, list[list[str]]] = {}
    for cell in sorted(section.cells, key=lambda cell: cell.rate):
        for figures in cell.summary.classes:
            row = [escape(cell.target), digits(cell.rate), escape(figures.name), *_row(figures)]
            groups.setdefault(cell.target, []).append(row)
    table = page.table(head, list(groups.values()), "Latencies in ms.", left=(2,))
    return page.details("The same for each class of requests", table)
