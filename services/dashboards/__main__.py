"""``make dashboards``: write all boards as JSON, and the page that describes them.

``python -m services.dashboards [ROOT]``; ROOT is the checkout, the working directory by default.
"""

import sys
from pathlib import Path

from services.dashboards.boards import all_boards
from services.dashboards.grafana import to_json
from services.dashboards.page import to_markdown

FOLDER = Path("deploy/observability/dashboards")
PAGE = Path("docs/dashboards.md")


def files() -> dict[Path, str]:
    """All files that this code makes, relative to the checkout."""
    boards = all_boards()
    made = {FOLDER / f"{board.uid}.json": to_json(board) for board in boards}
    return made | {PAGE: to_markdown(boards)}


def main(root: Path) -> None:
    """Write the files; those of boards that are no more are removed."""
    made = {root / path: text for path, text in files().items()}
    for path, text in made.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(path)
    for path in set((root / FOLDER).glob("*.json")) - made.keys():
        path.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path())
