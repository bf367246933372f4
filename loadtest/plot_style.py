"""How plots look, and how a figure becomes SVG text that fits into a page.

Made for a page that is read on a screen, light or dark, and on paper: colours are CSS variables
(``--ink``, ``--s0`` ...) that the page sets, and text stays text. The same figure gives the same
bytes. The hues are those of Okabe and Ito, which colour-blind readers can tell apart; markers and
dashes tell lines apart without any colour. Knows nothing of what is plotted.
"""

import html
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

INK, FAINT = "#1b1b1f", "#d9d9de"
SERIES = ("#0072b2", "#d55e00", "#009e73", "#b65c92", "#b98300", "#3b9bd6", "#6b6b70")
VARIABLES = {INK: "--ink", FAINT: "--faint"} | {
    colour: f"--s{place}" for place, colour in enumerate(SERIES)
}
"""Colours of a light page, and the variables that the SVG has in their place."""

WIDTH, HEIGHT = 4.7, 2.9  # inches of 72 px: half of a page, so that text stays readable

_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)))
_MARKERS = "osD^vPX"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlepad": 9,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.0,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.w_pad": 0.09,  # inches: the reader's font may be wider
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "grid.color": FAINT,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


@dataclass(frozen=True)
class Line:
    """One series; its place decides how it looks, so that a target looks the same everywhere."""

    name: str
    place: int

    @property
    def colour(self) -> str:
        """Of a light page."""
        return SERIES[self.place % len(SERIES)]

    @property
    def dashes(self) -> Any:
        """As matplotlib's ``linestyle``."""
        return _DASHES[self.place // len(SERIES) % len(_DASHES)]

    @property
    def marker(self) -> str:
        """As matplotlib's."""
        return _MARKERS[(self.place + self.place // len(SERIES)) % len(_MARKERS)]

    def mark(self) -> str:
        """A small SVG of the line, for a legend beside the plots."""
        colour = f"var({VARIABLES[self.colour]})"
        pattern = "" if self.dashes == "-" else " ".join(map(str, self.dashes[1]))
        shape = {
            "o": '<circle cx="14" cy="6" r="3.2"/>',
            "s": '<path d="M11 3h6v6h-6z"/>',
            "D": '<path d="M14 2l4 4-4 4-4-4z"/>',
            "^": '<path d="M14 2l4 7h-8z"/>',
            "v": '<path d="M14 10l4-7h-8z"/>',
            "P": '<path d="M12.8 2.5h2.4v2.3h2.3v2.4h-2.3v2.3h-2.4v-2.3h-2.3v-2.4h2.3z"/>',
            "X": '<path d="M11 3l6 6m0-6l-6 6" stroke-width="2.2"/>',
        }[self.marker]
        return (
            f'<svg class="mark" viewBox="0 0 28 12" fill="{colour}" stroke="{colour}">'
            f'<path d="M1 6H27" stroke-width="2" stroke-dasharray="{pattern or "none"}"/>'
            f"{shape}</svg>"
        )


@contextmanager
def drawing(title: str, height: float = HEIGHT) -> Iterator[tuple[Figure, Axes]]:
    """A figure of one plot, in our style."""
    with rc_context(_STYLE):
        figure = Figure((WIDTH, height))
        axes = figure.subplots()
        axes.set_title(title)
        yield figure, axes


@contextmanager
def drawing_two(title: str, height: float) -> Iterator[tuple[Figure, Axes, Axes]]:
    """A figure of two plots, one above the other, with one x-axis."""
    with rc_context(_STYLE):
        figure = Figure((WIDTH, height))
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        upper.set_title(title)
        yield figure, upper, lower


@contextmanager
def drawing_stack(
    title: str, ratios: Sequence[float], height: float, width: float = WIDTH
) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure of several plots, one above the other, with one x-axis."""
    with rc_context(_STYLE):
        figure = Figure((width, height))
        axes = figure.subplots(len(ratios), 1, sharex=True, height_ratios=ratios)
        axes[0].set_title(title)
        yield figure, list(axes)


def time_axis(
    axes: Axes, which: str, seconds: Floats, marks: Sequence[float] = (), unit: str = "ms"
) -> None:
    """Milliseconds on "x" or "y": from zero, or by powers of ten where values are far apart.

    ``marks``: seconds that are to be on it too, if they are finite.
    """
    known = seconds[np.isfinite(seconds)] * 1e3
    ends = [mark * 1e3 for mark in marks if math.isfinite(mark)]
    axis = axes.xaxis if which == "x" else axes.yaxis
    axes.set(**{f"{which}label": unit})
    if not len(known):
        axes.set(**{f"{which}lim": (0, 1)})
        return
    low, high = float(np.quantile(known, 0.01)), max([float(known.max()), *ends])
    if low > 0 and high / low > 30:
        low = min([low, *ends]) * 0.8
        axes.set(**{f"{which}scale": "log", f"{which}label": f"{unit}, logarithmic"})
        axes.set(**{f"{which}lim": (low, high * 1.25)})
        axis.set_major_locator(FixedLocator(_round_numbers(low, high * 1.25)))
        axis.set_minor_locator(NullLocator())
    else:
        axes.set(**{f"{which}lim": (0, high * 1.06 or 1)})
        axis.set_major_locator(MaxNLocator(6))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))


def _round_numbers(low: float, high: float) -> list[float]:
    """1, 2 and 5 of each power of ten, or fewer where that is too many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for steps in ((1, 2, 5), (1, 3), (1,)):
        found = [step * 10.0**power for power in powers for step in steps]
        found = [value for value in found if low <= value <= high]
        if len(found) <= 7:
            break
    return found


def legend_above(axes: Axes, columns: int = 3) -> None:
    """At the height of the title, on the right: there it hides nothing."""
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1, 1.0),
        ncols=columns,
        borderaxespad=0.2,
        columnspacing=1.0,
        handletextpad=0.4,
        handlelength=1.6,
    )


def svg_of(figure: Figure, legend: bool = False) -> str:
    """SVG without size, ids that only matplotlib needs, fonts or colours of its own.

    ``legend``: of the first plot's lines, above all; else the page has one.
    """
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if legend and len(labels) > 1:
        figure.set_figheight(figure.get_figheight() + 0.19 * math.ceil(len(labels) / 2) + 0.1)
        figure.legend(handles, labels, loc="outside upper left", ncols=2)
    title = figure.axes[0].get_title("left")
    out = io.StringIO()
    with rc_context({"svg.hashsalt": f"baton {title}"}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    (box,) = re.findall(r'viewBox="([^"]*)"', svg)
    svg = svg[svg.index(">", svg.index("<svg")) + 1 :]
    for unwanted in (
        r"<metadata>.*?</metadata>\s*",
        r"<!--.*?-->\s*",
        r"<defs>\s*<style[^>]*>[^<]*</style>\s*</defs>\s*",
        r" id=\"(?![mpC][0-9a-f]{10}\")[^\"]*\"",
        r"font-family: [^;\"]*; ?",
        r" transform=\"rotate\(-0 [^\"]*\"",
        r"(?<=\n) +",
    ):
        svg = re.sub(unwanted, "", svg, flags=re.DOTALL)
    svg = re.sub(r"(\d+\.\d\d)\d+", r"\1", svg).replace("xlink:href", "href")
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    label = html.escape(title)
    return f'<svg class="plot" viewBox="{box}" role="img" aria-label="{label}">{svg.strip()}'


def standalone(svg: str) -> str:
    """The same as a file of its own: real colours of a light page, on white."""
    for colour, variable in VARIABLES.items():
        svg = svg.replace(f"var({variable})", colour)
    head, body = svg.split(">", 1)
    style = "background: #fff; font-family: DejaVu Sans, Verdana, sans-serif"
    return f'{head} xmlns="http://www.w3.org/2000/svg" style="{style}">{body}\n'


def legend_html(lines: Mapping[str, Line]) -> str:
    """A legend for all plots of a page's section; names must be escaped already."""
    items = "".join(f"<li>{line.mark()} {name}</li>" for name, line in lines.items())
    return f'<ul class="legend">{items}</ul>'
