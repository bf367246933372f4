"""Runs contenders by turns, and puts what came out into tables (pure but for the clock's callers).

A *cell* is one contender's result for one case; in each round every cell of a case is measured
once, right after the ceilings, in an order that turns from round to round. So what a machine does
to itself meanwhile meets all of them alike, and shares are of the ceiling of the same minute.
Printed are medians over the rounds.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from tests.support.roofline import Ceilings, Shape, decode_roof_s, prefill_share


@dataclass(frozen=True)
class Case:
    """A prompt of ``tokens`` (``batch`` 0), or a decode step of ``batch`` sequences that have
    ``tokens`` of context.
    """

    tokens: int
    batch: int = 0

    def __str__(self) -> str:
        if not self.batch:
            return f"prefill {self.tokens:,}"
        return f"decode {self.batch} x {self.tokens:,}"


@dataclass(frozen=True)
class Timing:
    """``seconds`` of the prompt, or of a step in the middle of some; ``context`` there."""

    seconds: float
    context: float = 0.0


class Contender(Protocol):
    """Something that computes cases."""

    name: str
    weights: str  # "float32", "int8" with its scales, or "" for something else

    def can(self, case: Case) -> bool: ...

    def measure(self, case: Case) -> Timing: ...


@dataclass
class Cell:
    """One contender's timings of one case, a round each, with the ceilings beside them."""

    contender: str
    case: Case
    weights: str
    timings: list[Timing] = field(default_factory=list)
    ceilings: list[Ceilings] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(timing.seconds for timing in self.timings)

    @property
    def tokens_s(self) -> float:
        return (self.case.batch or self.case.tokens) / self.seconds

    @property
    def spread(self) -> float:
        """Half the distance from the fastest to the slowest round, by the median."""
        all_seconds = [timing.seconds for timing in self.timings]
        return (max(all_seconds) - min(all_seconds)) / 2 / self.seconds

    def share(self, shape: Shape) -> float | None:
        """The median of the rounds' shares: of the GEMM ceiling in prefill, else of the roof. None
        where that is not known.
        """
        if self.case.batch and not self.weights:
            return None
        int8 = self.weights == "int8"
        return statistics.median(
            decode_roof_s(shape, self.case.batch, timing.context, ceilings, int8) / timing.seconds
            if self.case.batch
            else prefill_share(shape, self.case.tokens, timing.seconds, ceilings)
            for timing, ceilings in zip(self.timings, self.ceilings, strict=True)
        )


@dataclass
class Results:
    """Of one run."""

    shape: Shape
    cells: list[Cell] = field(default_factory=list)
    overheads_ms: dict[str, list[float]] = field(default_factory=dict)
    forms: dict[str, list[float]] = field(default_factory=dict)  # of the ceilings, per second

    def cell(self, contender: str, case: Case) -> Cell | None:
        for cell in self.cells:
            if (cell.contender, cell.case) == (contender, case):
                return cell
        return None

    def ratio(self, one: str, other: str, case: Case) -> float | None:
        """How many times as fast ``one`` is, the median of the rounds' ratios."""
        a, b = self.cell(one, case), self.cell(other, case)
        if a is None or b is None:
            return None
        pairs = zip(a.timings, b.timings, strict=True)
        return statistics.median(theirs.seconds / ours.seconds for ours, theirs in pairs)

    def save(self, file: Path, about: dict[str, object]) -> None:
        file.write_text(json.dumps({**about, **asdict(self)}, indent=1) + "\n")


def selected(names: Sequence[str], *texts: str) -> bool:
    """Whether one of the names that were asked for is part of one of ``texts``."""
    return not names or any(name in text for name in names for text in texts)


def run(
    results: Results,
    contenders: Sequence[Contender],
    cases: Sequence[Case],
    rounds: int,
    ceilings: Callable[[], Ceilings],
    extra: Callable[[], None] = lambda: None,
) -> None:
    """Fill ``results.cells``. ``extra`` is called at the end of each round."""
    able = {case: [c for c in contenders if c.can(case)] for case in cases}
    cells = {(c.name, case): Cell(c.name, case, c.weights) for case in cases for c in able[case]}
    results.cells += cells.values()
    for number in range(rounds):
        for case in cases:
            if not able[case]:
                continue
            now = ceilings()
            turn = number % len(able[case])
            for contender in able[case][turn:] + able[case][:turn]:
                cell = cells[contender.name, case]
                cell.timings.append(contender.measure(case))
                cell.ceilings.append(now)
                say(f"round {number + 1}/{rounds}  {case!s:<18}{contender.name:<30}{told(cell)}")
        extra()


def told(cell: Cell) -> str:
    seconds = cell.timings[-1].seconds
    rate = (cell.case.batch or cell.case.tokens) / seconds
    return f"{1000 * seconds:9.1f} ms {rate:9.1f} tokens/s"


def say(text: str) -> None:
    """How far it is, as it goes."""
    print(text, file=sys.stderr, flush=True)


# --- targets --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A value that must be at least, or at most, something. None: not measured in this run."""

    name: str
    value: float | None
    limit: float
    at_most: bool = False
    unit: str = ""

    @property
    def missed(self) -> bool:
        if self.value is None:
            return False
        # written so that NaN is a miss
        return not (self.value <= self.limit if self.at_most else self.value >= self.limit)

    @property
    def row(self) -> list[str]:
        word = "at most" if self.at_most else "at least"
        if self.value is None:
            return [self.name, f"{word} {self.limit:g}{self.unit}", "", "not measured"]
        verdict = "NOT MET" if self.missed else "met"
        return [self.name, f"{word} {self.limit:g}{self.unit}", f"{self.value:.2f}", verdict]


# --- tables ---------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, aligned as text too; the first column to the left, others to the right."""
    lines = [[cell.replace("|", "\\|") for cell in line] for line in (head, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    widths = [max(width, 3) for width in widths]

    def text(line: Sequence[str]) -> str:
        first, *rest = line
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        return f"| {' | '.join(cells)} |"

    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([text(lines[0]), f"| {' | '.join(rule)} |", *map(text, lines[1:])])


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def prefill_table(results: Results) -> str:
    rows = [
        [
            cell.contender,
            f"{cell.case.tokens:,}",
            f"{cell.tokens_s:.0f}",
            f"{1000 * cell.seconds:.0f}",
            percent(cell.share(results.shape)),
            f"{100 * cell.spread:.0f} %",
        ]
        for cell in results.cells
        if not cell.case.batch
    ]
    return table(["prefill", "tokens", "tokens/s", "ms", "of GEMM", "±"], rows)


def decode_table(results: Results) -> str:
    rows = [
        [
            cell.contender,
            f"{cell.case.tokens:,}",
            f"{cell.case.batch}",
            f"{cell.tokens_s:.1f}",
            f"{1000 * cell.seconds:.1f}",
            percent(cell.share(results.shape)),
            f"{100 * cell.spread:.0f} %",
        ]
        for cell in results.cells
        if cell.case.batch
    ]
    return table(["decode", "context", "batch", "tokens/s", "ms/step", "of roof", "±"], rows)


def target_table(targets: Iterable[Target]) -> str:
    return table(["target", "limit", "value", ""], [target.row for target in targets])


def write_between(file: Path, mark: str, text: str) -> None:
    """Put ``text`` between ``<!-- mark -->`` and ``<!-- /mark -->`` of a page; both must be there
    once.
    """
    page = file.read_text()
    begin, end = f"<!-- {mark} -->\n", f"<!-- /{mark} -->"
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ValueError(f"{file} lacks the lines {begin.strip()} and {end}")
    head, rest = page.split(begin)
    file.write_text(f"{head}{begin}\n{text}\n\n{end}{rest.split(end)[1]}")
