"""What a board is made of (pure): rows of panels, each with its queries and what it says.

Knows PromQL and which way a panel is drawn, but nothing of Grafana's JSON: ``grafana.py`` does. So
tests and the documentation see every query and every description without the SDK.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

GRID = 24  # columns of Grafana's grid


class Kind(Enum):
    """How a panel is drawn."""

    LINES = "lines"
    STACKED = "stacked"  # areas on top of each other: parts of a whole
    STAT = "stat"  # the last value, large
    HEATMAP = "heatmap"  # the buckets of a histogram over time
    TABLE = "table"  # one row per set of labels, one column per query
    SCATTER = "scatter"  # the first query is x, each other one a series of points over it


@dataclass(frozen=True)
class Query:
    """One PromQL expression; ``$model``, ``$replica`` and ``$__rate_interval`` are Grafana's."""

    expr: str
    legend: str = ""  # of its series, "{{role}}" is a label; of a table, the column's title
    dashed: bool = False  # a line to compare with: an objective, a roof


@dataclass(frozen=True)
class Panel:
    """One picture."""

    title: str
    says: str  # what it shows and what a bad value means; the panel's description
    queries: tuple[Query, ...]
    kind: Kind = Kind.LINES
    unit: str = "short"  # one of Grafana's ids
    width: int = 8  # of the grid's 24 columns
    height: int = 8  # rows of about 30 pixels
    highest: float | None = None  # of the axis, where there is one: 1 for shares
    log_axis: bool = False

    def __post_init__(self) -> None:
        if not self.queries or not self.says or not 0 < self.width <= GRID:
            raise ValueError(f"panel {self.title!r} lacks queries, a description or a width")


@dataclass(frozen=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Board:
    """One dashboard. ``uid`` is its address in Grafana and the name of its file."""

    uid: str
    title: str
    says: str
    rows: tuple[Row, ...]
    by_replica: bool = False  # offers a choice of workers; its queries then name $replica

    def panels(self) -> Iterator[Panel]:
        """All of its panels, from top to bottom."""
        for row in self.rows:
            yield from row.panels


def places(panels: tuple[Panel, ...], top: int) -> list[tuple[int, int]]:
    """Column and row of the upper left corner of each panel, below ``top``.

    Each goes as high as it can, then as far to the left; so one that is high has lower ones beside
    it.
    """
    heights = [top] * GRID  # of what is placed, per column
    found: list[tuple[int, int]] = []
    for panel in panels:
        width = panel.width
        y, x = min((max(heights[x : x + width]), x) for x in range(GRID - width + 1))
        heights[x : x + width] = [y + panel.height] * width
        found.append((x, y))
    return found
