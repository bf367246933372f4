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


def to_markdown(boards: Iterable[Board]) -> str:
    """One section for each board, one paragraph for each panel, its queries below."""
    parts = [HEAD]
    for board in boards:
        parts.append(f"\n## {board.title.removeprefix('Baton: ')}\n\n{board.says}\n")
        for row in board.rows:
            parts.append(f"\n### {row.title}\n\n")
            parts += [_item(panel) for panel in row.panels]
    return "".join(parts)


def _item(panel: Panel) -> str:
    return f"- **{panel.title}** ({panel.unit}). {panel.says}\n"
