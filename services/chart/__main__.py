"""``make chart``: write the schema of the values, the README, and the files copied for templates.

``python -m services.chart [ROOT]``; ROOT is the checkout, the working directory by default.
"""

import json
import re
import sys
from pathlib import Path

import yaml

from services.chart.readme import to_markdown
from services.chart.rules import RULES
from services.chart.schema import values_schema
from services.chart.values import read_values

CHART = Path("helm/baton")
COPIES = CHART / "files"  # templates can read what lies inside of the chart only
OBSERVABILITY = Path("deploy/observability")
COPIED = ("rules.yaml", "alerts.yaml", "dashboards/*.json")


def files(root: Path) -> dict[Path, str]:
    """All files that this code makes, relative to the checkout."""
    values = read_values((root / CHART / "values.yaml").read_text())
    chart = yaml.safe_load((root / CHART / "Chart.yaml").read_text())
    schema = values_schema(values, RULES)
    sets = {path.stem: about(path) for path in sorted((root / CHART / "ci").glob("*.yaml"))}
    made = {
        CHART / "values.schema.json": json.dumps(schema, indent=2, ensure_ascii=False) + "\n",
        CHART / "README.md": to_markdown(values, schema, chart["kubeVersion"], sets),
    }
    for pattern in COPIED:
        for path in sorted((root / OBSERVABILITY).glob(pattern)):
            made[COPIES / path.relative_to(root / OBSERVABILITY)] = path.read_text()
    return made


def about(value_set: Path) -> str:
    """What a set of values is for: its first line, a comment."""
    first = value_set.read_text().partition("\n")[0]
    return re.sub(r"^# ?", "", first).rstrip(".")


def stale(root: Path, made: dict[Path, str]) -> list[Path]:
    """Files below ``files/`` that were copied once and have no source any more."""
    there = {path.relative_to(root) for path in (root / COPIES).rglob("*") if path.is_file()}
    return sorted(there - made.keys())


def main(root: Path) -> None:
    """Write the files; copies of what is no more are removed."""
    made = files(root)
    for path, text in made.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
        print(path)
    for path in stale(root, made):
        (root / path).unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path())
