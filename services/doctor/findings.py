"""What checks have found: as text, as JSON, and as an exit status (pure)."""

import json
import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum

WIDTH = 100
BROKEN = 1


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"  # is not there, and nothing that was asked for needs it
    WARN = "warn"  # works, but badly, or will not under load
    FAIL = "fail"  # something that was asked for does not work


@dataclass(frozen=True)
class Finding:
    """What one check says."""

    check: str  # its name: docs/kubernetes.md speaks of some
    level: Level
    found: str  # what is so, with numbers
    mend: str = ""  # what to do about it; never empty for WARN and FAIL

    def __post_init__(self) -> None:
        if self.level in (Level.WARN, Level.FAIL) and not self.mend:
            raise ValueError(f"{self.check}: {self.found}: says nothing of what to mend")


def exit_status(findings: Iterable[Finding]) -> int:
    """1 if anything that was asked for does not work, else 0."""
    return BROKEN if any(finding.level is Level.FAIL for finding in findings) else 0


def as_json(about: dict[str, object], findings: list[Finding]) -> str:
    """One object: ``about``, ``ok``, and ``findings`` as a list of objects."""
    ok = not exit_status(findings)
    return json.dumps(about | {"ok": ok, "findings": [asdict(f) for f in findings]}, indent=2)


def as_text(finding: Finding) -> str:
    """A line or more, with what to mend below."""
    mark = finding.level.value.upper() if finding.level is Level.FAIL else finding.level.value
    lines = [_wrapped(f"  {mark:<6}{finding.check:<15}", finding.found)]
    if finding.mend:
        lines.append(_wrapped(" " * 23 + "→ ", finding.mend))
    return "\n".join(lines)


def summary(findings: list[Finding]) -> str:
    """The last line: how many there are to mend."""
    count = {level: sum(f.level is level for f in findings) for level in Level}
    return f"{count[Level.FAIL]} to mend, {count[Level.WARN]} to look at"


def _wrapped(head: str, text: str) -> str:
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )
