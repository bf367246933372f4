"""The server's logs, kept when a run fails, and what they say about single requests."""

import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.serving import Served

NUM_LINES = 40  # about all requests together
LONGEST = 240  # characters of a line


def keep(server: Served) -> Path | None:
    """A copy of the server's logs; their folder goes with the server."""
    found = re.search(r"logs: (\S+), removed", server.text)
    if not found or not Path(found[1]).is_dir():
        return None
    kept = Path(tempfile.mkdtemp(prefix="baton-chaos-")) / "logs"
    shutil.copytree(found[1], kept, symlinks=True, ignore_dangling_symlinks=True)
    return kept


def about(logs: Path, labels: Sequence[str]) -> Iterator[str]:
    """Lines of the processes' logs that name one of these requests, in the order of time."""
    if not labels:
        return
    names = re.compile(rf"\b({'|'.join(re.escape(label) for label in labels)})\b(?!-)")
    found = [
        line
        for file in sorted(logs.glob("worker-*.err"))
        for line in file.read_text(errors="replace").splitlines()
        if names.search(line)
    ]
    yield from (line[:LONGEST] for line in sorted(found)[:NUM_LINES])
