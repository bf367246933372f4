"""What a comparison amounts to: figures of each target, ratios to the first one, with intervals.

The same for all targets is drawn again: rounds out of the rounds, and in each of them stretches of
time out of its stretches, with the requests that were due in them (a hierarchical bootstrap; single
requests depend on one another). What a round or a stretch did to all targets then cancels in the
ratio. With one round, only what varies within a run is known, and a note says so. Intervals are of
95 %. Pure.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from loadtest import comparison as report
from loadtest.figures import inter_token_s, pooled, summarize
from loadtest.record import INTERRUPTED, Record
from loadtest.search import Array, Estimate, attainment_curve, draw_brackets, max_rate
from loadtest.slo import SLO
from loadtest.trial import Comparison, Trial
from loadtest.wording import slo_words

DRAWS = 1000
STRETCHES = 10  # of a run
BINS = 2000  # of equal counts, for percentiles of what was drawn: ranks are right to 1 in 2000
NO_INTERVAL = (math.nan, math.nan)

Unit = Literal["s", "/s", ""]


@dataclass(frozen=True)
class Figure:
    """A number that sums up requests: a percentile of values, or a count over time."""

    name: str
    unit: Unit
    better: Literal["higher", "lower"]
    values: Callable[[Record], Sequence[float]]  # of a request that ended well
    percentile: float | None  # None: the sum of the values over the duration


def _tpot(record: Record) -> tuple[float, ...]:
    return (record.tpot_s,) if record.output_tokens > 1 else ()


def _itl(record: Record) -> Sequence[float]:
    return inter_token_s((record,)).tolist()


FIGURES: Mapping[str, Figure] = {
    figure.name: figure
    for figure in (
        Figure("TTFT p50", "s", "lower", lambda record: (record.ttft_s,), 50),
        Figure("TTFT p99", "s", "lower", lambda record: (record.ttft_s,), 99),
        Figure("TPOT p50", "s", "lower", _tpot, 50),
        Figure("TPOT p99", "s", "lower", _tpot, 99),
        Figure("ITL p50", "s", "lower", _itl, 50),
        Figure("ITL p99", "s", "lower", _itl, 99),
        Figure("E2E p50", "s", "lower", lambda record: (record.latency_s,), 50),
        Figure("E2E p99", "s", "lower", lambda record: (record.latency_s,), 99),
        Figure("output tokens", "/s", "higher", lambda record: (record.output_tokens,), None),
    )
}


def goodput(slos: Mapping[str, SLO], label: str = "") -> Figure:
    """Requests/s that meet all of their SLOs."""

    def met(record: Record) -> tuple[float, ...]:
        return (float(slos.get(record.class_name, SLO()).met(record)),)

    return Figure(f"goodput ({label})" if label else "goodput", "/s", "higher", met, None)


class Drawn:
    """Rounds and stretches of time, drawn again and again, the same for every target."""

    def __init__(self, num_rounds: int, rng: np.random.Generator) -> None:
        shares = np.full(num_rounds, 1 / num_rounds)
        self.rounds = rng.multinomial(num_rounds, shares, DRAWS)  # how often each was drawn
        stretches = rng.multinomial(self.rounds * STRETCHES, np.full(STRETCHES, 1 / STRETCHES))
        self.weights = stretches.reshape(DRAWS, -1).astype(np.float64)  # [draw, round × stretch]


def ratio(
    comparison: Comparison,
    target: str,
    rate: float,
    figure: Figure,
    rng: np.random.Generator,
    class_name: str = "",
) -> report.Ratio | None:
    """A figure of ``target`` over that of the first target, both at the same rate.

    Only rounds count that both have made. ``class_name`` empty: all requests. None where one of the
    two does not have the figure.
    """
    base = comparison.targets[0].name
    by_round = [
        {trial.round: trial for trial in comparison.of(name, rate)} for name in (base, target)
    ]
    rounds = sorted(set(by_round[0]) & set(by_round[1]))
    if not rounds:
        return None
    drawn = Drawn(len(rounds), rng)
    a, b = (
        _Sample([trials[number] for number in rounds], figure, class_name) for trials in by_round
    )
    if not a.value > 0 or math.isnan(b.value):
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = b.draws(drawn) / a.draws(drawn)
    low, high = interval(ratios)
    who = f"{class_name}: " if class_name else ""
    return report.Ratio(
        figure=f"{who}{figure.name} at {rate:.3g}/s",
        target=target,
        base=a.value,
        value=b.value,
        ratio=report.Measured(b.value / a.value, low, high),
        unit=figure.unit,
        better=figure.better,
    )


def interval(draws: Array) -> tuple[float, float]:
    """The middle 95 % of what was drawn; nan where a fair part of it has no value."""
    known = draws[~np.isnan(draws)]
    if len(known) < 0.9 * len(draws):
        return NO_INTERVAL
    low, high = np.quantile(known, (0.025, 0.975), method="nearest").tolist()
    return low, high


class _Sample:
    """The values of a figure in the trials of one target, and when their requests were due."""

    def __init__(self, trials: Sequence[Trial], figure: Figure, class_name: str) -> None:
        self.figure = figure
        self.durations = np.array([trial.result.duration_s for trial in trials])
        values: list[float] = []
        places: list[int] = []  # round × STRETCHES + stretch
        for number, trial in enumerate(trials):
            for record in trial.result.records:
                if record.error or (class_name and record.class_name != class_name):
                    continue
                found = figure.values(record)
                values += found
                places += [number * STRETCHES + _stretch(trial, record)] * len(found)
        self.values, self.places = np.array(values, np.float64), np.array(places, np.int64)

    @cached_property
    def value(self) -> float:
        """As it is; nan if there is none."""
        if self.figure.percentile is None:
            seconds = float(self.durations.sum())
            return float(self.values.sum()) / seconds if seconds > 0 else math.nan
        if not len(self.values):
            return math.nan
        return float(np.percentile(self.values, self.figure.percentile))

    def draws(self, drawn: Drawn) -> Array:
        """As it would be in what was drawn; nan where nothing was."""
        num_places = drawn.weights.shape[1]
        if self.figure.percentile is None:
            sums = np.bincount(self.places, self.values, minlength=num_places)
            over: Array = (drawn.weights @ sums) / (drawn.rounds @ self.durations)
            return over
        edges = np.unique(np.quantile(self.values, np.linspace(0, 1, BINS + 1), method="lower"))
        bins = np.searchsorted(edges, self.values, side="right") - 1
        counts = np.zeros((num_places, len(edges)))
        np.add.at(counts, (self.places, bins), 1.0)
        below = np.cumsum(drawn.weights @ counts, axis=1)  # [draw, bin]
        total = below[:, -1:]
        rank = total * self.figure.percentile / 100
        place = np.minimum((below < rank).sum(axis=1), len(edges) - 1)
        return np.where(total[:, 0] > 0, edges[place], math.nan)


def _stretch(trial: Trial, record: Record) -> int:
    share = (record.due_s - trial.start_s) / (trial.end_s - trial.start_s)
    return min(max(int(share * STRETCHES), 0), STRETCHES - 1)


# --- the highest rate --------------------------------------------------------------------------


def estimate(comparison: Comparison, target: str, label: str) -> Estimate | None:
    """The highest rate at which the target meets the objectives; None if it has no requests."""
    probes = [trial.probe(comparison.objectives[label]) for trial in comparison.of(target)]
    if not any(probe.met for probe in probes):
        return None
    return max_rate(probes, comparison.attainment)


def max_rate_ratio(
    comparison: Comparison, target: str, label: str, rng: np.random.Generator
) -> report.Ratio | None:
    """The target's highest rate over that of the first target; its name says if that is a bound.

    The interval is open where a target's rate is not closed in. None where nothing is known of it.
    """
    names = comparison.targets[0].name, target
    a, b = (estimate(comparison, name, label) for name in names)
    if a is None or b is None:
        return None
    at_least = b.kind == "above" or a.kind == "below"
    at_most = b.kind == "below" or a.kind == "above"
    if at_least and at_most:
        return None
    slos = comparison.objectives[label]
    brackets = []
    for name in names:
        curve = attainment_curve([trial.probe(slos) for trial in comparison.of(name)])
        brackets.append(draw_brackets(curve, comparison.attainment, rng))
    (a_low, a_high), (b_low, b_high) = brackets
    with np.errstate(divide="ignore", invalid="ignore"):
        lows = np.nan_to_num(b_low / a_high, nan=0.0, posinf=math.inf)
        highs = np.nan_to_num(b_high / a_low, nan=math.inf, posinf=math.inf)
    low = float(np.quantile(lows, 0.025, method="lower"))
    high = float(np.quantile(highs, 0.975, method="higher"))
    value = b.rate / a.rate
    bound = ", at least" if at_least else ", at most" if at_most else ""
    return report.Ratio(
        figure=f"highest rate ({label}){bound}",
        target=target,
        base=a.rate,
        value=b.rate,
        ratio=report.Measured(value, min(low, value), max(high, value)),
        unit="/s",
    )


# --- the report --------------------------------------------------------------------------------


def section(
    comparison: Comparison,
    workload: str,
    description: str,
    figures: Iterable[str] = ("TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "ITL p99"),
    classes: Sequence[str] = ("",),
    seed: int = 0,
) -> report.Section:
    """All that a report shows of a comparison; ``classes``: whose ratios, "" for all requests."""
    rng = np.random.default_rng(seed)
    return report.Section(
        workload=workload,
        description=description,
        slos={label: _in_words(slos) for label, slos in comparison.objectives.items()},
        cells=_cells(comparison),
        max_rates=[
            report.MaxRate(
                target.name, label, report.Measured(found.rate, found.low, found.high), found.note
            )
            for label in comparison.objectives
            for target in comparison.targets
            if (found := estimate(comparison, target.name, label)) is not None
        ],
        ratios=_ratios(comparison, [FIGURES[name] for name in figures], classes, rng),
        notes=notes(comparison),
        rounds=len({trial.round for trial in comparison.trials}),
    )


def notes(comparison: Comparison) -> list[str]:
    """Sentences that a reader of the figures must know."""
    found = list(comparison.notes)
    if comparison.interrupted:
        found.append(f"Interrupted after {len(comparison.trials)} trials: figures are of those.")
    rounds = len({trial.round for trial in comparison.trials})
    if rounds == 1:
        found.append(
            "One round: the intervals know how much one run varies within itself, not how much one"
            " run differs from the next."
        )
    elif rounds < report.FEW_ROUNDS:
        found.append(f"{rounds} rounds: the intervals hardly know how much runs differ.")
    unknown = sum(
        record.error == INTERRUPTED
        for trial in comparison.trials
        for record in trial.result.records
    )
    if unknown:
        found.append(f"{unknown} requests were cut off before it was known whether they meet.")
    return found


def _cells(comparison: Comparison) -> list[report.Cell]:
    main = next(iter(comparison.objectives.values()))
    cells = []
    for target in comparison.targets:
        attained = {
            label: _attained(comparison, target.name, label) for label in comparison.objectives
        }
        for rate in comparison.rates:
            trials = comparison.of(target.name, rate)
            if not trials:
                continue
            result = pooled([trial.result for trial in trials])
            at_rate = {label: found[rate] for label, found in attained.items() if rate in found}
            gaps = inter_token_s(result.records)
            if len(gaps) > BINS:
                gaps = np.quantile(gaps, np.linspace(0, 1, BINS))
            cells.append(
                report.Cell(target.name, rate, summarize(result, main), at_rate, gaps.tolist())
            )
    return cells


def _attained(comparison: Comparison, target: str, label: str) -> dict[float, report.Measured]:
    """Share of the requests that met, by rate, with intervals as wide as stretches of time vary."""
    slos = comparison.objectives[label]
    curve = attainment_curve([trial.probe(slos) for trial in comparison.of(target)])
    draws = np.random.default_rng(0).beta(
        curve.met / curve.effect + 0.5,
        (curve.total - curve.met) / curve.effect + 0.5,
        (DRAWS, len(curve.rates)),
    )
    lows, highs = np.quantile(draws, (0.025, 0.975), axis=0)
    shares = curve.met / curve.total
    return {
        float(rate): report.Measured(float(share), min(float(low), share), max(float(high), share))
        for rate, share, low, high in zip(curve.rates, shares, lows, highs, strict=True)
    }


def _ratios(
    comparison: Comparison,
    figures: Sequence[Figure],
    classes: Sequence[str],
    rng: np.random.Generator,
) -> list[report.Ratio]:
    good = [
        goodput(slos, label if len(comparison.objectives) > 1 else "")
        for label, slos in comparison.objectives.items()
    ]
    found = []
    for target in comparison.targets[1:]:
        found += [
            max_rate_ratio(comparison, target.name, label, rng) for label in comparison.objectives
        ]
        found += [
            ratio(comparison, target.name, rate, figure, rng, class_name)
            for rate in comparison.rates
            for class_name in classes
            for figure in (*good, *figures)
        ]
    return [item for item in found if item is not None]


def _in_words(slos: Mapping[str, SLO]) -> str:
    """``chat: TTFT ≤ 1 s, TPOT ≤ 50 ms``; classes that have the same are not told apart."""
    words = {name: slo_words(slo) for name, slo in slos.items()}
    if len(set(words.values())) == 1:
        return next(iter(words.values()))
    return "; ".join(f"{name}: {limits}" for name, limits in words.items())
