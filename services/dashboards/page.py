"""The boards as a page of the documentation (pure): ``docs/dashboards.md``."""

from collections.abc import Iterable

from services.dashboards.board import Board, Panel

HEAD = """\
# The boards, panel by panel

Written by `make dashboards` from `services/dashboards/`, as the JSON in
`deploy/observability/dashboards/` is: change it there. Each text is what Grafana shows at a panel's
**i**; in brackets is its unit.
[observability.md](observability.md) says which panel to look at when.
"""

UNITS = {
    "s": "seconds",
    "percentunit": "share",
    "reqps": "requests/s",
    "ops": "per second",
    "Bps": "bytes/s",
    "bytes": "bytes",
    "flops": "FLOP/s",
    "short": "",
}
"""Grafana's ids in words; "short" is a plain number."""


def to_markdown(boards: Iterable[Board]) -> str:
    """One section for each board, one item for each panel."""
    parts = [HEAD]
    for board in boards:
        parts.append(f"\n## {board.title.removeprefix('Baton: ')}\n\n{board.says}\n")
        for row in board.rows:
            parts.append(f"\n### {row.title}\n\n")
            parts += [_item(panel) for panel in row.panels]
    return "".join(parts)


def _item(panel: Panel) -> str:
    unit = UNITS[panel.unit]
    return f"- **{panel.title}**{f' ({unit})' if unit else ''}. {panel.says}\n"
