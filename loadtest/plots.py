"""Plots of a load test as SVG text: distributions, a run over time, figures against the rate.

Values go in, in seconds, and text comes out; lines are thinned to what can be seen. Each plot has
its legend in itself with ``legend=True``; else the page that holds several has one for all.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from loadtest.comparison import MaxRate, Measured
from loadtest.plot_style import (
    HEIGHT,
    INK,
    SERIES,
    Floats,
    Line,
    drawing,
    drawing_two,
    legend_above,
    svg_of,
    time_axis,
)
from loadtest.record import INTERRUPTED, Record

MOST_POINTS = 300  # of a line or a cloud
NEAR = 2.5  # a limit that is farther from the highest value than this is not drawn
_DOTTED = (0, (2, 2))


@dataclass(frozen=True)
class Points:
    """A series of measured values over x."""

    line: Line
    x: Sequence[float]
    y: Sequence[Measured]


def cdf(
    samples: Sequence[tuple[Line, Sequence[float]]],
    title: str,
    limits: Sequence[tuple[Line, float]] = (),
    tail: bool = False,
    legend: bool = False,
) -> str:
    """Shares of samples (seconds) up to a value; ``limits``: those of the SLO, where they are near.

    ``tail``: 90, 99 and 99.9 % are equally far apart, so that the slowest are seen.
    """
    with drawing(title) as (figure, axes):
        kept = [(line, np.asarray(values, dtype=np.float64)) for line, values in samples]
        kept = [(line, values[np.isfinite(values)]) for line, values in kept]
        every = np.concatenate([values for _, values in kept] or [np.empty(0)])
        highest = float(every.max()) if len(every) else 0.0
        limits = [(line, limit) for line, limit in limits if limit <= NEAR * highest]
        time_axis(axes, "x", every, [limit for _, limit in limits])
        for line, values in kept:
            shares = _thinned_shares(len(values))
            at = np.quantile(values, shares) * 1e3 if len(values) else np.empty(0)
            ys = _nines(shares) if tail else shares
            axes.plot(at, ys, color=line.colour, ls=line.dashes, label=line.name)
        for line, limit in limits:
            axes.axvline(limit * 1e3, color=line.colour, lw=1.1, ls=_DOTTED)
        if tail:
            ticks = np.array([0, 0.5, 0.9, 0.99, 0.999])
            axes.set_yticks(_nines(ticks), ["0", "50", "90", "99", "99.9 %"])
            axes.set_ylim(0, _nines(np.array([0.9996]))[0])
        else:
            axes.set_yticks([0, 0.25, 0.5, 0.75, 0.9, 1], ["0", "25", "50", "75", "90", "100 %"])
            axes.set_ylim(0, 1.02)
        return svg_of(figure, legend)


def timeline(records: Sequence[Record], title: str = "Requests over time") -> str:
    """Requests sent and ended per second, and in flight."""
    with drawing_two(title, HEIGHT + 0.5) as (figure, rates, flight):
        sent = np.array([record.sent_s for record in records])
        ends = np.array([_end_s(record) for record in records])
        until = float(max(ends.max(), sent.max())) if len(records) else 1.0
        edges = _edges(len(records), until)
        for line, dashes, times in (
            (Line("sent", 0), "-", sent),
            (Line("ended", 1), (0, (3, 1.2)), ends),
        ):
            heights = np.histogram(times, edges)[0] / (edges[1] - edges[0])
            rates.stairs(heights, edges, color=line.colour, ls=dashes, lw=1.4, label=line.name)
        legend_above(rates)
        moments = np.linspace(0, until, MOST_POINTS)
        alive = np.searchsorted(np.sort(sent), moments, "right")
        alive = alive - np.searchsorted(np.sort(ends), moments, "right")
        flight.fill_between(moments, alive, color=SERIES[0], alpha=0.25, lw=0, step="post")
        flight.step(moments, alive, color=SERIES[0], lw=1.0, where="post")
        rates.set(ylabel="requests/s", ylim=(0, None))
        flight.set(ylabel="in flight", xlabel="time, s", xlim=(0, until or 1), ylim=(0, None))
        rates.yaxis.set_major_locator(MaxNLocator(4))
        flight.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        figure.align_ylabels()
        return svg_of(figure)


def ttft_over_time(
    groups: Sequence[tuple[Line, Sequence[Record]]],
    title: str = "TTFT over time",
    legend: bool = False,
) -> str:
    """TTFT of each request at the time it was sent; failed ones as crosses on the axis."""
    with drawing(title, HEIGHT + 0.5) as (figure, axes):
        ok = [(line, [r for r in records if not r.error]) for line, records in groups]
        time_axis(axes, "y", np.array([r.ttft_s for _, records in ok for r in records]))
        for line, records in ok:
            kept = _thinned(records)
            xs, ys = [r.sent_s for r in kept], [r.ttft_s * 1e3 for r in kept]
            axes.scatter(
                xs, ys, s=9, color=line.colour, marker=line.marker, lw=0, alpha=0.8,
                label=line.name,
            )  # fmt: skip
        failed = [r for _, records in groups for r in records if _failed(r)]
        if failed:
            xs = [record.sent_s for record in _thinned(failed)]
            crosses = axes.scatter(
                xs, [axes.get_ylim()[0]] * len(xs), s=22, color=INK, marker="x", lw=1.2,
                clip_on=False, zorder=4,
            )  # fmt: skip
            axes.legend([crosses], ["failed"], loc="lower right", bbox_to_anchor=(1, 1.0))
        last = max((r.sent_s for _, records in groups for r in records), default=1.0)
        axes.set(xlabel="sent at, s", xlim=(0, last * 1.02 or 1))
        return svg_of(figure, legend)


def errors_over_time(records: Sequence[Record], title: str = "Errors over time") -> str:
    """Requests that failed, by kind, at the time when they were sent."""
    with drawing(title) as (figure, axes):
        failed = [record for record in records if _failed(record)]
        until = max((record.sent_s for record in records), default=1.0)
        edges = _edges(len(records), until)
        kinds = sorted({record.error for record in failed})
        bottom = np.zeros(len(edges) - 1)
        for line in (Line(kind, place + 1) for place, kind in enumerate(kinds)):
            times = [record.sent_s for record in failed if record.error == line.name]
            top = bottom + np.histogram(times, edges)[0]
            axes.stairs(top, edges, baseline=bottom, fill=True, color=line.colour, label=line.name)
            bottom = top
        if kinds:
            legend_above(axes)
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.set(ylabel=f"requests per {edges[1] - edges[0]:.2g} s", ylim=(0, None))
        axes.set(xlabel="sent at, s", xlim=(0, until or 1))
        return svg_of(figure)


def attainment_against_rate(
    series: Sequence[Points], threshold: float, title: str, legend: bool = False
) -> str:
    """Share of requests that met their objectives, with intervals, and the share that must."""
    with drawing(title) as (figure, axes):
        axes.axhline(threshold, color=INK, lw=1.0, ls=(0, (4, 3)))
        _rate_lines(axes, series)
        ticks = [tick for tick in (0.0, 0.25, 0.5, 0.75, 1.0) if abs(tick - threshold) > 0.08]
        ticks = sorted({*ticks, threshold})
        axes.set_yticks(ticks, [f"{tick * 100:.4g} %" for tick in ticks])
        axes.set_ylim(-0.02, 1.04)
        return svg_of(figure, legend)


def against_rate(
    series: Sequence[Points], title: str, limit: float = math.inf, legend: bool = False
) -> str:
    """A latency (seconds) against the rate; ``limit``: that of the SLO."""
    with drawing(title, HEIGHT - 0.3) as (figure, axes):
        every = np.array([y.value for points in series for y in points.y])
        near = limit <= NEAR * max(every, default=0.0)
        time_axis(axes, "y", every, [limit] if near else [])
        if near:
            axes.axhline(limit * 1e3, color=INK, lw=1.0, ls=_DOTTED)
        in_ms = [Points(p.line, p.x, [Measured(y.value * 1e3) for y in p.y]) for p in series]
        _rate_lines(axes, in_ms)
        return svg_of(figure, legend)


def max_rate_bars(entries: Sequence[tuple[Line, MaxRate]], title: str) -> str:
    """The highest rate of each target, with intervals; an arrow where no end is known."""
    with drawing(title, 0.8 + 0.27 * max(len(entries), 1)) as (figure, axes):
        ends = [end for _, entry in entries for end in (entry.rate.value, entry.rate.high)]
        until = max((end for end in ends if math.isfinite(end)), default=0.0) * 1.22 or 1.0
        for row, (line, entry) in enumerate(entries):
            rate, end = entry.rate, entry.rate.value
            axes.barh(row, rate.value, 0.62, color=line.colour, alpha=0.75)
            if not math.isnan(rate.low):
                end = rate.high if math.isfinite(rate.high) else rate.value + until * 0.05
                axes.plot([rate.low, end], [row, row], color=INK, lw=1.2)
                axes.plot(rate.low, row, color=INK, marker="|", ms=6)
                axes.plot(end, row, color=INK, marker="|" if math.isfinite(rate.high) else ">")
            at_least = rate.high == math.inf and rate.low == rate.value
            at_most = rate.low == 0 and rate.high == rate.value
            sign = "≥ " if at_least else "≤ " if at_most else ""
            axes.text(
                max(end, rate.value) + until * 0.025, row, f"{sign}{rate.value:.3g}", va="center"
            )
        axes.set_yticks(range(len(entries)), [_short(line.name) for line, _ in entries])
        axes.set_ylim(len(entries) - 0.4, -0.6)
        axes.set(xlim=(0, until), xlabel="requests/s")
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        return svg_of(figure)


def _rate_lines(axes: Axes, series: Sequence[Points]) -> None:
    rates = [x for points in series for x in points.x]
    top = max(rates, default=1.0)
    intervals = any(math.isfinite(y.low) for points in series for y in points.y)
    apart = min(0.006, 0.03 / max(len(series), 1)) * top if intervals else 0.0
    for number, points in enumerate(series):
        line = points.line
        xs = np.array(points.x) + (number - (len(series) - 1) / 2) * apart
        ys, lows, highs = np.array([(y.value, y.low, y.high) for y in points.y]).reshape(-1, 3).T
        axes.plot(
            xs, ys, color=line.colour, ls=line.dashes, marker=line.marker, label=line.name
        )  # fmt: skip
        known = np.isfinite(lows) & np.isfinite(highs)
        axes.vlines(xs[known], lows[known], highs[known], color=line.colour, lw=1.2, alpha=0.6)
    axes.set(xlabel="rate, requests/s", xlim=(0, top * 1.06))


def _nines(shares: Floats) -> Floats:
    """Where a share stands on an axis on which 90, 99 and 99.9 % are equally far apart."""
    places: Floats = np.asarray(-np.log10(1 - np.minimum(shares, 0.99999)), dtype=np.float64)
    return places


def _thinned_shares(count: int) -> Floats:
    """Shares at which a CDF of so many values is drawn: even, and closer together near the end."""
    if count <= MOST_POINTS:
        return np.linspace(0, 1, count)
    near_end = 1 - np.geomspace(0.1, 1 / count, MOST_POINTS // 3)
    return np.union1d(np.linspace(0, 1, MOST_POINTS), near_end)


def _thinned(records: Sequence[Record]) -> Sequence[Record]:
    """The first and the slowest of each stretch, so that no peak is lost."""
    step = math.ceil(len(records) / (MOST_POINTS // 2))
    if step <= 1:
        return records
    stretches = [records[start : start + step] for start in range(0, len(records), step)]
    slowest = [max(stretch, key=lambda record: record.ttft_s) for stretch in stretches]
    return [*(stretch[0] for stretch in stretches), *slowest]


def _edges(num_records: int, seconds: float) -> Floats:
    """Of bins: wide enough to hold some requests each, and at least a second."""
    bins = int(np.clip(min(num_records / 6, seconds), 5, 60))
    return np.linspace(0, seconds or 1.0, bins + 1)


def _short(name: str, most: int = 28) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _end_s(record: Record) -> float:
    return record.sent_s + (record.chunk_s[-1] if record.chunk_s else 0.0)


def _failed(record: Record) -> bool:
    return record.error not in ("", INTERRUPTED)
