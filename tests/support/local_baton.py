"""Stands for ``baton serve`` where a test wants real engines sooner, in one process.

``python tests/support/local_baton.py serve FLAGS`` is ``baton local FLAGS``.
"""

import sys
from pathlib import Path

COMMAND = (sys.executable, str(Path(__file__).resolve()))


def main() -> int:
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from services import cli

    assert sys.argv[1] == "serve"
    return cli.main(["local", *sys.argv[2:]])


if __name__ == "__main__":
    sys.exit(main())
