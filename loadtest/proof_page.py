"""A proof in words for people: Markdown tables, and plots as files beside them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from loadtest.comparison import Cell, ComparisonReport, Measured, Section
from loadtest.comparison_html import comparison_html
from loadtest.plot_style import Line, standalone
from loadtest.plots import Points, against_rate, attainment_against_rate, cdf
from loadtest.wording import digits, measured_words, ms, percent

SHOWN = ("ITL p99", "chat: ITL p99", "TTFT p50", "chat: TTFT p50")  # the report has all ratios
BEGIN, END = "<!-- proof -->", "<!-- /proof -->"


def write_page(page: Path, proof: ComparisonReport, sweep: ComparisonReport) -> None:
    """Put tables and plots between the page's marks; files go into ``proof/`` beside it.

    Raises ValueError for a page without marks.
    """
    text = page.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise ValueError(f"{page} has no {BEGIN} and {END}")
    folder = page.parent / "proof"
    folder.mkdir(exist_ok=True)
    for name, svg in plots(proof).items():
        (folder / f"{name}.svg").write_text(standalone(svg), encoding="utf-8")
    for name, report in (("report", proof), ("sweep", sweep)):
        (folder / f"{name}.html").write_text(comparison_html(report), encoding="utf-8")
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    made = "\n".join(markdown(proof, sweep))
    page.write_text(f"{before}{BEGIN}\n\n{made}\n{END}{after}", encoding="utf-8")


def markdown(proof: ComparisonReport, sweep: ComparisonReport) -> list[str]:
    """Lines."""
    facts = {"Command": f"`{proof.command}`", "Date": proof.started[:10], **proof.facts}
    lines = [
        "[Report](proof/report.html), [sweep](proof/sweep.html) (to be opened in a browser)",
        "",
    ]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    for section in proof.sections:
        lines += ["", f"### {section.workload}", "", f"{section.description}.", ""]
        lines += [f"- {label}: {words}" for label, words in section.slos.items()]
        lines += ["", f"![attainment](proof/{section.workload}-attainment.svg)"]
        lines += [f"![inter-token latencies](proof/{section.workload}-itl.svg)"]
        lines += [f"![time to first token](proof/{section.workload}-ttft.svg)", ""]
        lines += _table(section, proof.attainment)
        swept = next((s for s in sweep.sections if s.workload == section.workload), None)
        if swept:
            lines += ["", "Mixed settings by token budget:", "", *_cells(swept)]
    return lines


def _table(section: Section, attainment: float) -> list[str]:
    lines = _cells(section)
    lines += ["", f"| highest rate at which {percent(attainment)} meet | objectives | requests/s |"]
    lines += ["| :--- | :--- | ---: |"]
    lines += [
        f"| {entry.target} | {entry.slo} | {measured_words(entry.rate)}"
        f"{f' ({entry.note})' if entry.note else ''} |"
        for entry in section.max_rates
    ]
    if section.ratios:
        base = section.cells[0].target
        lines += ["", f"| ratio to {base} | | 95 % interval |", "| :--- | :--- | ---: |"]
        lines += [
            f"| {ratio.target} | {ratio.figure} | {measured_words(ratio.ratio)} |"
            for ratio in section.ratios
            if ratio.figure.startswith("highest rate") or ratio.figure.split(" at ")[0] in SHOWN
        ]
    return lines


def _cells(section: Section) -> list[str]:
    labels = list(section.slos)
    head = ["setting", "rate/s", *labels, "TTFT p50", "TTFT p99", "TPOT p50", "ITL p50", "ITL p99"]
    lines = [
        "| " + " | ".join([head[0], *(f"{name}" for name in head[1:])]) + " |",
        "| :--- |" + " ---: |" * (len(head) - 1),
    ]
    for cell in section.cells:
        total = cell.summary.total
        shares = [percent(cell.attainment[label].value) for label in labels]
        times = (total.ttft.p50, total.ttft.p99, total.tpot.p50, total.itl.p50, total.itl.p99)
        values = [cell.target, digits(cell.rate), *shares, *(f"{ms(value)} ms" for value in times)]
        lines.append("| " + " | ".join(values) + " |")
    return lines


def plots(proof: ComparisonReport) -> dict[str, str]:
    """SVGs by name: for each workload attainment, inter-token latencies and first tokens."""
    found = {}
    for section in proof.sections:
        by_target: dict[str, list[Cell]] = {}
        for cell in section.cells:
            by_target.setdefault(cell.target, []).append(cell)
        lines = {name: Line(name, place) for place, name in enumerate(by_target)}
        found[f"{section.workload}-attainment"] = _attainment(section, by_target, proof.attainment)
        rates = sorted({cell.rate for cell in section.cells})
        rate = rates[len(rates) // 2]
        found[f"{section.workload}-itl"] = cdf(
            [(lines[cell.target], cell.itl_s) for cell in section.cells if cell.rate == rate],
            f"Inter-token latencies at {digits(rate)} requests/s",
            tail=True,
            legend=True,
        )
        found[f"{section.workload}-ttft"] = against_rate(
            [
                Points(
                    lines[name],
                    [cell.rate for cell in cells],
                    [Measured(cell.summary.total.ttft.p50) for cell in cells],
                )
                for name, cells in by_target.items()
            ],
            "TTFT, median",
            legend=True,
        )
    return found


def _attainment(section: Section, by_target: Mapping[str, Sequence[Cell]], threshold: float) -> str:
    """All targets by all objectives, in one plot."""
    series: list[Points] = []
    for name, cells in by_target.items():
        for label in section.slos:
            series.append(
                Points(
                    Line(f"{name}, {label}", len(series)),
                    [cell.rate for cell in cells],
                    [cell.attainment[label] for cell in cells],
                )
            )
    return attainment_against_rate(series, threshold, "Requests that meet", legend=True)
