"""``python -m services.dashboards [FOLDER]``: write all boards as JSON; ``make dashboards``."""

import sys
from pathlib import Path

from services.dashboards.boards import all_boards
from services.dashboards.grafana import to_json

FOLDER = Path("deploy/observability/dashboards")


def main(folder: Path) -> None:
    """Write the files; those of boards that are no more are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    made = {folder / f"{board.uid}.json": to_json(board) for board in all_boards()}
    for path, text in made.items():
        path.write_text(text)
        print(path)
    for path in set(folder.glob("*.json")) - made.keys():
        path.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
