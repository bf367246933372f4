"""Service level objectives: what a request must meet to count as good (goodput: DistServe)."""

import math
import re
from dataclasses import dataclass, fields

from loadtest.record import Record


@dataclass(frozen=True)
class SLO:
    """Upper limits in seconds; infinite where there is no objective."""

    ttft: float = math.inf
    tpot: float = math.inf
    e2e: float = math.inf

    def missed(self, record: Record, waited_s: float = 0.0) -> tuple[str, ...]:
        """Names of the objectives that a request missed; a failed one has missed all of them.

        ``waited_s`` counts as if the server had let it wait before it was sent.
        """
        ttft_s, e2e_s = record.ttft_s + waited_s, record.latency_s + waited_s
        seen = {"ttft": ttft_s, "tpot": record.tpot_s, "e2e": e2e_s}
        return tuple(
            name for name, value in seen.items() if record.error or not value <= getattr(self, name)
        )

    def met(self, record: Record, waited_s: float = 0.0) -> bool:
        """Whether the request ended well and within every limit."""
        return not record.error and not self.missed(record, waited_s)


_UNITS = {"ms": 0.001, "s": 1.0}


def parse_slo(text: str) -> SLO:
    """Read ``"ttft=500ms,tpot=0.05s,e2e=10s"``; raises ValueError that says what is wrong.

    A number without a unit is milliseconds, as ``vllm bench serve --goodput`` has it.
    """
    names = [field.name for field in fields(SLO)]
    limits: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(\w+)\s*[=:]\s*([0-9.]+)\s*(ms|s|)", part)
        if match is None or match[1] not in names:
            raise ValueError(
                f"SLO {part!r}: want NAME=LIMIT with a name of {', '.join(names)}"
                " and a limit such as 500ms or 2s"
            )
        try:
            limits[match[1]] = float(match[2]) * _UNITS[match[3] or "ms"]
        except ValueError:
            raise ValueError(f"SLO {part!r}: {match[2]!r} is not a number") from None
    return SLO(**limits)
