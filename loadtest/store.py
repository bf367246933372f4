"""A run's folder: requests.jsonl (one request a line, as it ends), summary.json, report.html.

The folder is of use at every moment: a run that is killed leaves its requests and what is known of
it, and ``read_run`` reads that back. Times are kept to the microsecond.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import IO, Any, Self

from loadtest.figures import Summary, plain_values
from loadtest.record import Record, RunResult
from loadtest.slo import SLO

REQUESTS, SUMMARY, REPORT = "requests.jsonl", "summary.json", "report.html"
FORMAT = 1
"""Of the folder; bump when a reader of the version before would misread it."""


@dataclass(frozen=True)
class RunInfo:
    """What a report says of a run besides its figures."""

    target: str  # URL, or the name of a target
    workload: str  # "chat: short prompts, long answers"
    load: str = ""  # "Poisson arrivals, 4 requests/s for 60 s"
    model: str = ""
    command: str = ""  # that reproduces it
    facts: Mapping[str, str] = field(default_factory=dict)  # "Seed", "Machine", "Baton" ...


@dataclass(frozen=True)
class StoredRun:
    """A run as read back."""

    info: RunInfo
    slos: Mapping[str, SLO]
    result: RunResult


class RunFolder:
    """Writes one run's folder. A context manager: requests.jsonl is open from start to end."""

    def __init__(
        self, path: Path, info: RunInfo, slos: Mapping[str, SLO], num_planned: int = 0
    ) -> None:
        """Raises FileExistsError where the folder holds a run already."""
        self.path, self._info, self._slos = path, info, slos
        path.mkdir(parents=True, exist_ok=True)
        if (path / REQUESTS).exists():
            raise FileExistsError(f"{path} holds a run already: name another folder")
        self._write_summary({"num_planned": num_planned} if num_planned else {}, None)
        self._requests: IO[str] = (path / REQUESTS).open("w", buffering=1)  # a line at a time

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._requests.close()

    def add(self, record: Record) -> None:
        """Write one request."""
        values = record.to_json()
        values["due_s"], values["sent_s"] = round(record.due_s, 6), round(record.sent_s, 6)
        values["chunk_s"] = [round(chunk, 6) for chunk in record.chunk_s]
        self._requests.write(json.dumps(values, separators=(",", ":")) + "\n")

    def finish(self, result: RunResult, summary: Summary, html: str) -> None:
        """Write the summary and the report of a run that has ended."""
        run = {
            "started": result.started,
            "duration_s": result.duration_s,
            "num_planned": result.num_planned,
            "interrupted": result.interrupted,
        }
        self._write_summary(run, summary)
        (self.path / REPORT).write_text(html, encoding="utf-8")

    def _write_summary(self, run: Mapping[str, Any], summary: Summary | None) -> None:
        values = {
            "format": FORMAT,
            "info": plain_values(self._info),
            "slos": plain_values(self._slos),
            "run": run,
            "figures": summary.to_json() if summary else None,
        }
        text = json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False)
        (self.path / SUMMARY).write_text(text + "\n", encoding="utf-8")


def read_run(path: Path) -> StoredRun:
    """Read a folder back; a run that was killed counts as interrupted.

    Raises FileNotFoundError, or ValueError that names the file, the line and what is wrong.
    """
    records = read_records(path / REQUESTS)
    try:
        values = json.loads((path / SUMMARY).read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            raise ValueError(f"format {values['format']}, this version reads {FORMAT}")
        names = {known.name for known in fields(RunInfo)}
        info = RunInfo(**{key: item for key, item in values["info"].items() if key in names})
        slos = {name: _slo(limits) for name, limits in values["slos"].items()}
        run = values["run"]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path / SUMMARY}: not a load test's summary ({error})") from error
    ends = [record.sent_s + record.latency_s for record in records if record.chunk_s]
    result = RunResult(
        records=records,
        duration_s=run.get("duration_s", max(ends, default=0.0)),
        started=run.get("started", ""),
        num_planned=run.get("num_planned", len(records)),
        interrupted=run.get("interrupted", True),
    )
    return StoredRun(info, slos, result)


def read_records(path: Path) -> tuple[Record, ...]:
    """The requests of a file in the order in which they were due; a torn last line is left out."""
    records = []
    text = path.read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        try:
            records.append(Record.from_json(json.loads(line)))
        except json.JSONDecodeError as error:
            if line.endswith("\n"):
                raise ValueError(f"{path}:{number}: not JSON ({error})") from None
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number}: not a request ({error!r})") from None
    return tuple(sorted(records, key=lambda record: record.index))


def _slo(limits: Mapping[str, float | None]) -> SLO:
    return SLO(**{name: math.inf if limit is None else limit for name, limit in limits.items()})
