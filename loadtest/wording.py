"""Figures as people read them: units, digits, limits and intervals in words. Pure text."""

import math
import re
from collections.abc import Sequence
from dataclasses import fields

from loadtest.comparison import Measured
from loadtest.figures import Attainment, Figures, Summary
from loadtest.slo import SLO

NOTHING = "–"
"""Stands for a figure that does not exist."""


def digits(value: float, significant: int = 3) -> str:
    """Three significant digits, never more than three decimals, thousands apart: 1,234 or 0.12."""
    if math.isnan(value):
        return NOTHING
    if math.isinf(value):
        return "∞"
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(float(f"{value:.{significant - 1}e}"))))
    return f"{value:,.{min(max(significant - 1 - magnitude, 0), 3)}f}"


def ms(seconds: float) -> str:
    """Milliseconds, without the unit."""
    return digits(seconds * 1e3)


def time_words(seconds: float) -> str:
    """A duration with its unit: 43.2 ms, 1.30 s, 12 min 5 s."""
    if math.isnan(seconds):
        return NOTHING
    if seconds < 1:
        return f"{ms(seconds)} ms"
    if seconds < 120:
        return f"{digits(seconds)} s"
    return f"{int(seconds // 60):,} min {int(seconds % 60)} s"


def percent(share: float) -> str:
    """One decimal; all of them only when it is really all."""
    if math.isnan(share):
        return NOTHING
    if share < 1:
        share = min(share, 0.999)
    return f"{share * 100:.1f} %" if share < 1 else "100 %"


def interval_words(low: float, high: float, scale: float = 1.0, unit: str = "") -> str:
    """``86.4 to 93.8 %``; an end that is not known reads as "at least" or "at most"."""
    if math.isnan(low) or math.isnan(high):
        return NOTHING
    low, high = low * scale, high * scale
    if math.isinf(high) and low <= 0:
        return "open at both ends"
    if math.isinf(high):
        return f"at least {digits(low)}{unit}"
    return f"{digits(low)} to {digits(high)}{unit}"


def attainment_words(attainment: Attainment) -> str:
    """``90.7 % (86.4 to 93.8 %)``."""
    if not attainment.total:
        return NOTHING
    low, high = (f"{end * 100:.1f}" for end in attainment.interval)
    return f"{percent(attainment.share)} ({low} to {high} %)"


def measured_words(measured: Measured, unit: str = "") -> str:
    """``6.20/s (5.80 to 6.50)``."""
    if math.isnan(measured.value):
        return NOTHING
    if math.isnan(measured.low):
        return f"{digits(measured.value)}{unit}"
    return f"{digits(measured.value)}{unit} ({interval_words(measured.low, measured.high)})"


def limit_words(seconds: float) -> str:
    """A limit as one would set it: 500 ms, 1.5 s."""
    return f"{seconds * 1e3:.4g} ms" if seconds < 1 else f"{seconds:.4g} s"


def slo_words(slo: SLO) -> str:
    """``TTFT ≤ 500 ms and TPOT ≤ 50 ms``; empty without objectives."""
    parts = [
        f"{field.name.upper()} ≤ {limit_words(getattr(slo, field.name))}"
        for field in fields(slo)
        if math.isfinite(getattr(slo, field.name))
    ]
    return joined(parts)


def joined(parts: Sequence[str]) -> str:
    """``a, b and c``."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def verdict(figures: Figures) -> str:
    """One sentence: how many requests were good, by what."""
    attainment = figures.attainment
    if not attainment.total:
        return "No request ended."
    if figures.slo == SLO():
        return (
            f"{attainment.met:,} of {attainment.total:,} requests ended well,"
            f" {digits(figures.goodput)} requests/s. No objectives were set."
        )
    words = f"met {slo_words(figures.slo)}" if figures.slo else "met the objectives of their class"
    return (
        f"Goodput {digits(figures.goodput)} requests/s: {attainment_words(attainment)} of"
        f" {attainment.total:,} requests {words}."
    )


def warnings_of(summary: Summary) -> list[str]:
    """What a reader must know before trusting the figures."""
    found = []
    if summary.interrupted:
        sent = summary.total.num_sent
        found.append(
            f"The run was interrupted: {sent:,} of {summary.num_planned:,} planned requests were"
            f" sent, and {summary.total.num_interrupted:,} of these were cut off by the load test."
            " The figures are of those that ended."
        )
    if summary.spoiled:
        found.append(summary.spoiled)
    total = summary.total
    if total.num_ok and total.output_tokens < 0.95 * total.planned_output_tokens:
        found.append(
            f"Answers held {total.output_tokens:,} tokens where {total.planned_output_tokens:,}"
            " were asked for: the server ends answers early, so the load was lighter than planned."
        )
    if total.num_ok and not 0.9 <= total.prompt_tokens / max(total.planned_prompt_tokens, 1) <= 1.1:
        found.append(
            f"The server counted {total.prompt_tokens:,} prompt tokens where"
            f" {total.planned_prompt_tokens:,} were planned."
        )
    return found


def date_words(iso: str) -> str:
    """``2026-11-30 09:20:08`` of ISO 8601, with the offset from UTC where it has one."""
    return re.sub(r"(\d)T(\d\d:\d\d:\d\d)(\.\d+)?", r"\1 \2", iso).replace("+00:00", " UTC")
