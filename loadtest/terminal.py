"""What a load test says on a terminal: one line that lives while it runs, a table when it is over.

Text only, of at most 100 columns. Colour and the rewriting of a line are for terminals alone; in
a pipe or a log file each line is plain and stays.
"""

import asyncio
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from loadtest.comparison import ComparisonReport, Section
from loadtest.figures import Figures, Summary
from loadtest.record import INTERRUPTED, Record
from loadtest.slo import SLO
from loadtest.wording import (
    NOTHING,
    attainment_words,
    digits,
    limit_words,
    measured_words,
    ms,
    percent,
    time_words,
    verdict,
    warnings_of,
)

WIDTH = 100
TTY_EVERY_S, LOG_EVERY_S = 0.25, 5.0
RECENT_S = 10.0  # what "of late" means

_BOLD, _YELLOW, _RESET = "\x1b[1m", "\x1b[33m", "\x1b[0m"


class Progress:
    """Counts what has happened in a run and shows it in one line.

    ``schedule_s`` is when the last request is due in an open-loop run; 0 in a closed loop, whose
    end is estimated from how fast it goes.
    """

    def __init__(
        self,
        stream: TextIO,
        num_planned: int,
        schedule_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream, self._clock = stream, clock
        self._num_planned, self._schedule_s = num_planned, schedule_s
        self._began = clock()
        self._sent = self._done = self._errors = 0
        self._recent: deque[tuple[float, Record]] = deque(maxlen=2000)

    def sent(self, *_: object) -> None:
        """One more request is on its way."""
        self._sent += 1

    def done(self, record: Record) -> None:
        """A request has ended, well or not."""
        self._done += 1
        self._errors += record.error not in ("", INTERRUPTED)
        self._recent.append((self._clock(), record))

    def line(self) -> str:
        """As of now."""
        now = self._clock()
        while self._recent and self._recent[0][0] < now - RECENT_S:
            self._recent.popleft()
        ok = [record for _, record in self._recent if not record.error]
        since = min(RECENT_S, now - self._began)
        if len(self._recent) == self._recent.maxlen:
            since = now - self._recent[0][0]
        ttft = _median([record.ttft_s for record in ok])
        tpot = _median([record.tpot_s for record in ok if record.output_tokens > 1])
        parts = [
            f"{now - self._began:.0f} s",
            f"sent {self._sent:,}/{self._num_planned:,}",
            f"in flight {self._sent - self._done:,}",
            f"done {self._done - self._errors:,}",
            f"errors {self._errors:,}",
            f"{digits(len(ok) / since) if since > 0 else NOTHING}/s",
            f"TTFT {time_words(ttft)}",
            f"TPOT {time_words(tpot)}",
            f"ETA {self._eta(now - self._began)}",
        ]
        return "  ".join(parts)[:WIDTH]

    async def show(self) -> None:
        """Write the line now and then until cancelled; leaves the cursor on a line of its own."""
        tty = self._stream.isatty()
        try:
            while True:
                await asyncio.sleep(TTY_EVERY_S if tty else LOG_EVERY_S)
                self._write(tty)
        finally:
            if tty:
                self._write(tty)
                self._stream.write("\n")
                self._stream.flush()

    def _write(self, tty: bool) -> None:
        self._stream.write(f"\r\x1b[K{self.line()}" if tty else f"{self.line()}\n")
        self._stream.flush()

    def _eta(self, elapsed: float) -> str:
        if self._schedule_s:
            answering = _median([record.latency_s for _, record in self._recent])
            left = self._schedule_s - elapsed + (0.0 if math.isnan(answering) else answering)
        elif self._done:
            left = (self._num_planned - self._done) * elapsed / self._done
        else:
            return NOTHING
        return time_words(float(math.ceil(left))) if left > 0 else "now"


def _median(values: Sequence[float]) -> float:
    values = [value for value in values if not math.isnan(value)]
    return statistics.median(values) if values else math.nan


def summary_table(summary: Summary, colour: bool = False) -> str:
    """The figures of a run: verdict, counts, latencies, objectives, errors, the client's lag."""
    bold, yellow, reset = (_BOLD, _YELLOW, _RESET) if colour else ("", "", "")
    groups = _groups(summary)
    lines = [f"{bold}{part}{reset}" for part in _wrapped(verdict(summary.total))]
    lines += ["", *_counts(groups), "", *_latencies(groups)]
    objectives = [*_objectives(groups)]
    lines += ["", *objectives] if objectives else []
    if summary.total.errors:
        lines.append("")
        for kind, count in summary.total.errors.items():
            said = summary.total.messages.get(kind)
            lines += _wrapped(f"{count:,} × {kind}" + (f", the first: {said}" if said else ""))
    lag = summary.lag
    lines += [
        "",
        f"{time_words(summary.duration_s)}; client lag p50 {ms(lag.p50)} ms,"
        f" p99 {ms(lag.p99)} ms, max {ms(lag.max)} ms",
    ]
    for warning in warnings_of(summary):
        lines += [f"{yellow}{part}{reset}" for part in _wrapped(f"warning: {warning}")]
    return "\n".join(lines) + "\n"


def _groups(summary: Summary) -> list[Figures]:
    """All, then each class; a single class is all."""
    return [summary.total, *(summary.classes if len(summary.classes) > 1 else ())]


def _counts(groups: Sequence[Figures]) -> Iterator[str]:
    row = "{:<14}{:>8}{:>7}{:>8}{:>8}{:>8}{:>10}{:>10}  {}"
    yield row.format(
        "", "ended ok", "failed", "cut off", "req/s", "good/s", "tok/s out", "tok/s all", "attained"
    )
    for group in groups:
        yield row.format(
            group.name[:13],
            f"{group.num_ok:,}",
            f"{group.num_failed:,}",
            f"{group.num_interrupted:,}",
            digits(group.request_throughput),
            digits(group.goodput),
            digits(group.output_throughput),
            digits(group.total_throughput),
            NOTHING if group.slo == SLO() else attainment_words(group.attainment),
        )


def _latencies(groups: Sequence[Figures]) -> Iterator[str]:
    row = "{:<14}{:<6}" + "{:>11}" * 6
    yield row.format("ms", "", "mean", "std", "p50", "p90", "p99", "max")
    for group in groups:
        for name in ("ttft", "tpot", "itl", "e2e"):
            spread = getattr(group, name)
            values = (spread.mean, spread.std, spread.p50, spread.p90, spread.p99, spread.max)
            first = group.name[:13] if name == "ttft" else ""
            yield row.format(first, name.upper(), *map(ms, values))


def _objectives(groups: Sequence[Figures]) -> Iterator[str]:
    for group in groups:
        if group.slo is None:  # several limits: each class says its own
            continue
        for name, attainment in group.objectives.items():
            limit = limit_words(getattr(group.slo, name))
            words = f"{name.upper()} ≤ {limit}"
            yield f"{group.name[:13]:<14}{words:<18}met by {attainment_words(attainment)}"


def _wrapped(text: str) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) + 1 > WIDTH:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return lines


def comparison_table(report: ComparisonReport) -> str:
    """Every workload: cells, highest rates, ratios."""
    lines: list[str] = []
    for section in report.sections:
        lines += [section.workload, "", *_cells(section)]
        for note in section.notes:
            lines += ["", *_wrapped(note)]
        if section.max_rates:
            lines += [
                "",
                f"highest rate at which {report.attainment * 100:.4g} % meet the objectives",
            ]
            lines += [
                f"  {entry.target[:26]:<28}{entry.slo[:14]:<16}"
                + "  ".join(filter(None, [measured_words(entry.rate, "/s"), entry.note]))
                for entry in section.max_rates
            ]
        if section.ratios:
            base = next(iter(report.targets))
            lines += ["", f"ratios to {base} (95 % interval)"]
            lines += [
                f"  {ratio.target[:26]:<28}{ratio.figure[:38]:<40}{measured_words(ratio.ratio)}"
                for ratio in section.ratios
            ]
        lines.append("")
    return "\n".join(lines)


def _cells(section: Section) -> Iterator[str]:
    row = "{:<26}{:>7}{:>9}{:>9}{:>10}{:>10}{:>9}{:>9}{:>9}"
    yield row.format(
        "ms",
        "rate/s",
        "attained",
        "good/s",
        "TTFT p50",
        "TTFT p99",
        "TPOT p50",
        "ITL p99",
        "failed",
    )
    for cell in section.cells:
        total = cell.summary.total
        yield row.format(
            cell.target[:25],
            digits(cell.rate),
            percent(total.attainment.share),
            digits(total.goodput),
            ms(total.ttft.p50),
            ms(total.ttft.p99),
            ms(total.tpot.p50),
            ms(total.itl.p99),
            f"{total.num_failed:,}",
        )
