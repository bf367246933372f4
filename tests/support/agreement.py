"""Whether two load tools saw the same of a server, over several rounds that took turns (pure).

What is compared is each tool's own median of a figure, one a round; of these the medians over the
rounds, since on a shared machine one round may be far off. Two rules:

- *within a share*: they are no further apart than a share of the other's, for a server whose delays
  are fixed;
- *within the spread*: they are no further apart than half of the one tool's range over its rounds
  plus half of the other's, for a server whose own speed varies. Two tools that measure the same
  break it by chance in 1 of 100 tries with five rounds each, in 1 of 8 with three.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

FIGURES = ("ttft", "tpot", "itl", "e2e")
JUDGED = ("ttft", "tpot")  # the others follow from them and are shown


@dataclass(frozen=True)
class Medians:
    """Of the requests of one run, in seconds, as the tool itself gives them."""

    ttft: float
    tpot: float
    itl: float
    e2e: float


@dataclass(frozen=True)
class Comparison:
    """One figure as both tools saw it, a value a round, in seconds."""

    figure: str  # of FIGURES
    ours: tuple[float, ...]
    theirs: tuple[float, ...]
    share: float | None  # rule: this share of theirs, or None for the spread

    @property
    def difference(self) -> float:
        """Of the medians over the rounds, ours less theirs."""
        return statistics.median(self.ours) - statistics.median(self.theirs)

    @property
    def allowed(self) -> float:
        """How far apart they may be."""
        if self.share is not None:
            return self.share * statistics.median(self.theirs)
        return (_range(self.ours) + _range(self.theirs)) / 2

    @property
    def judged(self) -> bool:
        return self.figure in JUDGED

    @property
    def agrees(self) -> bool:
        """False also where a figure is nan: none was measured in that round."""
        if any(map(math.isnan, (*self.ours, *self.theirs))):
            return False
        return abs(self.difference) <= self.allowed


def _range(values: Sequence[float]) -> float:
    return max(values) - min(values)


def compare(
    ours: Sequence[Medians], theirs: Sequence[Medians], share: float | None = None
) -> list[Comparison]:
    """All figures; ``share`` sets the rule. Raises ValueError where the spread cannot be known."""
    if len(ours) != len(theirs) or len(ours) < (1 if share else 2):
        raise ValueError(f"{len(ours)} and {len(theirs)} rounds: want as many of each, 2 or more")

    def column(runs: Sequence[Medians], figure: str) -> tuple[float, ...]:
        return tuple(getattr(run, figure) for run in runs)

    return [
        Comparison(figure, column(ours, figure), column(theirs, figure), share)
        for figure in FIGURES
    ]


def table(comparisons: Sequence[Comparison], other: str) -> str:
    """Markdown; milliseconds."""

    def ms(values: Sequence[float]) -> str:
        return " · ".join(f"{1000 * value:.2f}" for value in values)

    rows = [
        f"| median | ours, by round | {other}, by round | ours less theirs | allowed | |",
        "|---|---|---|---|---|---|",
    ]
    for it in comparisons:
        relative = 100 * it.difference / statistics.median(it.theirs)
        verdict = ("agree" if it.agrees else "**differ**") if it.judged else ""
        allowed = f"{1000 * it.allowed:.2f} ms" if it.judged else ""
        rows.append(
            f"| {it.figure.upper()} | {ms(it.ours)} | {ms(it.theirs)} "
            f"| {1000 * it.difference:+.2f} ms ({relative:+.1f} %) | {allowed} | {verdict} |"
        )
    return "\n".join(rows)
