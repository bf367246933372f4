"""The report of one run as one HTML file: verdict, figures per class, plots, how to run it again.

Text from figures and records; reads and writes no files.
"""

from collections.abc import Sequence
from html import escape

from loadtest import html_page as page
from loadtest.figures import Figures, Spread, Summary, inter_token_s
from loadtest.plot_style import Line, legend_html
from loadtest.plots import cdf, errors_over_time, timeline, ttft_over_time
from loadtest.record import Record, RunResult
from loadtest.slo import SLO
from loadtest.store import RunInfo
from loadtest.wording import (
    attainment_words,
    date_words,
    digits,
    limit_words,
    ms,
    percent,
    slo_words,
    time_words,
    verdict,
    warnings_of,
)

MOST_MESSAGES = 3  # of each kind of error


def run_html(info: RunInfo, result: RunResult, summary: Summary) -> str:
    """The whole page."""
    total = summary.total
    failed = total.num_failed > 0
    return page.page(
        f"Load test of {info.target}: {info.workload}",
        f"<h1>Load test of {escape(info.target)}</h1>",
        f'<p class="dim">{escape(_subtitle(info, summary))}</p>',
        f'<p class="verdict">{escape(verdict(total))}</p>',
        page.warnings(warnings_of(summary)),
        page.tiles(_tiles(summary)),
        "<h2>Requests</h2>",
        _requests(summary),
        _objectives(summary),
        "<h2>Latencies</h2>",
        _latencies(summary),
        _distributions(result, summary),
        "<h2>Over time</h2>",
        page.plots(timeline(result.records), ttft_over_time(_by_class(result, summary))),
        f"<h2>Errors</h2>{_errors(result.records)}" if failed else "",
        page.plots(errors_over_time(result.records)) if failed else "",
        page.reproduce(info.command),
        page.facts(
            {
                "Target": info.target,
                "Model": info.model,
                "Workload": info.workload,
                "Load": info.load,
                "Started": date_words(summary.started),
                "Client lag": f"p50 {ms(summary.lag.p50)} ms, p99 {ms(summary.lag.p99)} ms,"
                f" max {ms(summary.lag.max)} ms",
                **info.facts,
            }
        ),
        page.definitions(),
    )


def _subtitle(info: RunInfo, summary: Summary) -> str:
    parts = [
        info.model, info.workload, info.load, date_words(summary.started),
        f"took {time_words(summary.duration_s)}",
    ]  # fmt: skip
    return " · ".join(filter(None, parts))


def _tiles(summary: Summary) -> dict[str, tuple[str, str]]:
    total = summary.total
    low, high = total.attainment.interval
    failed = f", {total.num_failed:,} failed" if total.num_failed else ""
    return {
        "Goodput": (f"{digits(total.goodput)}/s", "requests that met all objectives"),
        "Attainment": (
            percent(total.attainment.share),
            f"95 % interval {low * 100:.1f} to {high * 100:.1f} %",
        ),
        "TTFT p50": (time_words(total.ttft.p50), f"p99 {time_words(total.ttft.p99)}"),
        "TPOT p50": (time_words(total.tpot.p50), f"p99 {time_words(total.tpot.p99)}"),
        "Output": (
            f"{digits(total.output_throughput)}/s",
            f"tokens; {digits(total.total_throughput)}/s with prompts",
        ),
        "Requests": (f"{total.num_ok:,}", f"ended well{failed}"),
    }


def _groups(summary: Summary) -> list[Figures]:
    """Each class, then all; a single class is all."""
    return [*(summary.classes if len(summary.classes) > 1 else ()), summary.total]


def _requests(summary: Summary) -> str:
    head = [
        "", "sent", "ended well", "failed", "cut off", "requests/s", "goodput/s",
        "output tok/s", "all tok/s", "prompt tokens", "output tokens",
    ]  # fmt: skip
    rows = [
        [
            escape(group.name),
            f"{group.num_sent:,}",
            f"{group.num_ok:,}",
            f"{group.num_failed:,}",
            f"{group.num_interrupted:,}",
            digits(group.request_throughput),
            digits(group.goodput),
            digits(group.output_throughput),
            digits(group.total_throughput),
            f"{group.prompt_tokens:,}",
            f"{group.output_tokens:,}",
        ]
        for group in _groups(summary)
    ]
    return page.table(head, [[row] for row in rows])


def _objectives(summary: Summary) -> str:
    """Every class's objectives, each by itself and together."""
    groups = []
    for group in _groups(summary):
        if group.slo is None or group.slo == SLO():
            continue
        rows = [
            [
                f"{name.upper()} ≤ {limit_words(getattr(group.slo, name))}",
                attainment_words(attainment),
            ]
            for name, attainment in group.objectives.items()
        ]
        if len(rows) > 1:
            rows.append(["all of them", f"<b>{attainment_words(group.attainment)}</b>"])
        names = [escape(group.name), *[""] * (len(rows) - 1)]
        groups.append([[name, *row] for name, row in zip(names, rows, strict=True)])
    if not groups:
        return ""
    head = ["", "objective", "met by (95 % interval)"]
    return "<h3>Objectives</h3>" + page.table(head, groups, left=(1, 2))


def _latencies(summary: Summary) -> str:
    head = ["", "ms", "mean", "std", "p50", "p90", "p99", "max", "values"]
    groups = []
    for group in _groups(summary):
        rows = []
        for name in ("ttft", "tpot", "itl", "e2e"):
            spread: Spread = getattr(group, name)
            values = (spread.mean, spread.std, spread.p50, spread.p90, spread.p99, spread.max)
            first = escape(group.name) if name == "ttft" else ""
            rows.append([first, name.upper(), *map(ms, values), f"{spread.count:,}"])
        groups.append(rows)
    return page.table(head, groups, left=(1,))


def _by_class(result: RunResult, summary: Summary) -> list[tuple[Line, list[Record]]]:
    lines = {group.name: Line(group.name, place) for place, group in enumerate(summary.classes)}
    records: dict[str, list[Record]] = {name: [] for name in lines}
    for record in result.records:
        records[record.class_name].append(record)
    return [(lines[name], records[name]) for name in lines]


def _distributions(result: RunResult, summary: Summary) -> str:
    """CDFs of each class, an SLO's limits in the class's colour."""
    by_class = [
        (line, [record for record in records if not record.error])
        for line, records in _by_class(result, summary)
    ]
    slos = [group.slo or SLO() for group in summary.classes]
    limits = list(zip((line for line, _ in by_class), slos, strict=True))
    names = {escape(line.name): line for line, _ in by_class}
    has_limits = any(slo_words(slo) for slo in slos)
    note = " Dotted: the objectives' limits." if has_limits else ""
    return (
        f'<p class="dim">Share of values up to the one on the axis.{note}</p>'
        + (legend_html(names) if len(names) > 1 else "")
        + page.plots(
            cdf(
                [(line, [r.ttft_s for r in records]) for line, records in by_class],
                "TTFT: time to first token",
                [(line, slo.ttft) for line, slo in limits],
            ),
            cdf(
                [
                    (line, [r.tpot_s for r in records if r.output_tokens > 1])
                    for line, records in by_class
                ],
                "TPOT: time per output token",
                [(line, slo.tpot) for line, slo in limits],
            ),
            cdf(
                [(line, inter_token_s(records).tolist()) for line, records in by_class],
                "ITL: inter-token latency, its tail drawn out",
                tail=True,
            ),
            cdf(
                [(line, [r.latency_s for r in records]) for line, records in by_class],
                "E2E: until the last token",
                [(line, slo.e2e) for line, slo in limits],
            ),
        )
    )


def _errors(records: Sequence[Record]) -> str:
    """By kind: how many, when first and last, and what was said of them."""
    kinds: dict[str, list[Record]] = {}
    for record in records:
        if record.error:
            kinds.setdefault(record.error, []).append(record)
    rows = []
    for kind, of_kind in sorted(kinds.items(), key=lambda item: (-len(item[1]), item[0])):
        sent = [record.sent_s for record in of_kind]
        messages = list(dict.fromkeys(r.message[:160] for r in of_kind if r.message))
        more = [f"and {len(messages) - MOST_MESSAGES:,} other messages"]
        shown = messages[:MOST_MESSAGES] + (more if len(messages) > MOST_MESSAGES else [])
        rows.append(
            [
                escape(kind),
                f"{len(of_kind):,}",
                f"{min(sent):,.1f}",
                f"{max(sent):,.1f}",
                "<br>".join(map(escape, shown)),
            ]
        )
    head = ["kind", "requests", "first sent at, s", "last sent at, s", "messages"]
    return page.table(head, [[row] for row in rows], left=(4,))
