"""What a comparison report shows: targets × rates on one workload or more, in plain values.

Pure data, filled by whatever has run the targets and shown by ``loadtest.html_report``. Shares are
0 to 1, times seconds, rates requests per second; intervals are of 95 %.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from loadtest.figures import Summary

FEW_ROUNDS = 3
"""From so many rounds on it is known how much one run differs from the next."""


@dataclass(frozen=True)
class Measured:
    """A value and where it may really lie. An end that is not known is nan or infinite."""

    value: float
    low: float = math.nan
    high: float = math.nan


@dataclass(frozen=True)
class Cell:
    """One target at one rate, all rounds together."""

    target: str
    rate: float
    summary: Summary  # of all rounds (``figures.pooled``), by the section's first SLO
    attainment: Mapping[str, Measured]  # by the label of the SLO
    itl_s: Sequence[float] = ()  # all inter-token latencies, or evenly spaced quantiles of them


@dataclass(frozen=True)
class MaxRate:
    """The highest rate at which the attainment holds."""

    target: str
    slo: str  # its label
    rate: Measured  # high is infinite when the highest rate tried was sustained
    note: str = ""  # "sustained at every rate tried" ...


@dataclass(frozen=True)
class Ratio:
    """A figure of a target over the same figure of the first target."""

    figure: str  # "Max rate (tight)", "p99 ITL at 4/s"
    target: str
    base: float  # the first target's own value, in ``unit``
    value: float  # this target's
    ratio: Measured
    unit: Literal["s", "/s", ""] = ""
    better: Literal["higher", "lower"] = "higher"


@dataclass(frozen=True)
class Section:
    """One workload."""

    workload: str
    description: str  # in words: lengths, arrivals, rounds, seconds per cell
    slos: Mapping[str, str]  # label → what it asks, "TTFT ≤ 1 s, TPOT ≤ 50 ms"; main one first
    cells: Sequence[Cell]
    max_rates: Sequence[MaxRate] = ()
    ratios: Sequence[Ratio] = ()
    notes: Sequence[str] = ()  # plain sentences, shown above the plots
    rounds: int = FEW_ROUNDS  # of the comparison: of fewer, no winner is named at single rates
    itl_rate: float | None = None  # whose ITL distribution is shown; None: the report chooses


@dataclass(frozen=True)
class ComparisonReport:
    """A whole report."""

    title: str
    started: str  # ISO 8601
    command: str  # that produced it
    targets: Mapping[str, str]  # name → what it is (URL or command line); the first is the base
    sections: Sequence[Section]
    attainment: float = 0.9  # share that must meet all objectives
    facts: Mapping[str, str] = field(default_factory=dict)  # "Machine", "Model", versions ...
    notes: Sequence[str] = ()  # interrupted, spoiled cells ...
