"""What a load test leaves: its folder, and what reports say of the machine and the command."""

import json
import os
import platform
import shlex
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Self

from loadtest.compare import Slot
from loadtest.comparison import ComparisonReport
from loadtest.comparison_html import comparison_html
from loadtest.figures import plain_values
from loadtest.plain import from_plain
from loadtest.record import Record
from loadtest.store import REPORT, REQUESTS
from loadtest.writer import WordWriter, Writer

COMPARISON = "comparison.json"


def new_folder(out: str) -> Path:
    """The folder for results, made. Raises ValueError where there are results already."""
    path = Path(out or time.strftime("loadtest-%Y%m%d-%H%M%S"))
    path.mkdir(parents=True, exist_ok=True)
    if (path / REQUESTS).exists():
        raise ValueError(f"out {str(path)!r} holds results already: name another folder")
    return path


class Requests:
    """requests.jsonl of a comparison: a line for each request, as it ends."""

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = (path / REQUESTS).open("a", buffering=1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, slot: Slot, record: Record) -> None:
        """Write one."""
        where = {"target": slot.target, "rate": slot.rate, "round": slot.round}
        self._file.write(json.dumps(where | record.to_json(), separators=(",", ":")) + "\n")


def say(text: str) -> None:
    """How it goes, for people."""
    print(text, file=sys.stderr, flush=True)


def read_comparison(path: Path) -> ComparisonReport:
    """What `write_comparison` has written; raises ValueError that says what is wrong."""
    try:
        return from_plain(ComparisonReport, json.loads((path / COMPARISON).read_text("utf-8")))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path / COMPARISON}: not a comparison ({error!r})") from None


def write_comparison(path: Path, report: ComparisonReport) -> None:
    """comparison.json and report.html."""
    text = json.dumps(plain_values(report), indent=1, ensure_ascii=False, allow_nan=False)
    (path / COMPARISON).write_text(text + "\n", encoding="utf-8")
    (path / REPORT).write_text(comparison_html(report), encoding="utf-8")


def facts(writer: Writer) -> dict[str, str]:
    """What a reader of a report wants to know besides."""
    try:
        baton = version("baton-serving")
    except PackageNotFoundError:
        baton = "from its source"
    found = {
        "Machine": machine(),
        "Client": f"Baton {baton}, Python {platform.python_version()}, {platform.platform()}",
    }
    if isinstance(writer, WordWriter) and writer.note:
        found["Prompts"] = writer.note
    return found


def machine() -> str:
    """Where this runs: processor, cores that it may use, memory."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        memory = Path("/proc/meminfo").read_text().split()[1]
    except OSError:
        return platform.processor() or platform.machine()
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    cores = len(os.sched_getaffinity(0))
    return f"{name or platform.machine()}, {cores} cores, {int(memory) / 2**20:.0f} GiB"


def command_line() -> str:
    """What was typed."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
