"""What was seen of one request, and the figures that follow from it.

The figures are defined as ``vllm bench serve`` defines them. All times are seconds; those in
``chunk_s`` count from when the request was sent, the others from the start of the run.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

INTERRUPTED = "interrupted"
"""The error of a request that the load test itself cut off."""
SKIPPED = "skipped"
"""The error of a turn that was not sent, because one before it in its conversation failed."""
NO_IDS = "no token ids"
"""The same, because the answer before it came as text and the prompts are token ids."""


@dataclass(frozen=True)
class Record:
    """One request as the client saw it. Without an ``error`` it is complete."""

    index: int  # in the order in which requests were due
    class_name: str
    conversation: int
    turn: int
    due_s: float
    sent_s: float
    planned_tokens: int  # of the whole prompt
    max_tokens: int
    error: str = ""  # kind: "connect", "timeout", "http 429", "reset" ...; empty: none
    message: str = ""  # what the server or the socket said of it
    prompt_tokens: int = 0  # as the server counted; as planned where it did not
    output_tokens: int = 0  # as the server counted; the chunks where it did not
    chunk_s: tuple[float, ...] = ()  # arrival of each chunk of the answer

    @property
    def lag_s(self) -> float:
        """How late the client was to send it: its own fault, not the server's."""
        return self.sent_s - self.due_s

    @property
    def ttft_s(self) -> float:
        """Time to the first token; nan when none came."""
        return self.chunk_s[0] if self.chunk_s else math.nan

    @property
    def latency_s(self) -> float:
        """Until the last token (E2E); nan when none came."""
        return self.chunk_s[-1] if self.chunk_s else math.nan

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first; 0 for an answer of one token."""
        if self.output_tokens <= 1:
            return 0.0
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> tuple[float, ...]:
        """Inter-token latencies: the times between one chunk and the next."""
        return tuple(b - a for a, b in zip(self.chunk_s, self.chunk_s[1:], strict=False))

    def to_json(self) -> dict[str, Any]:
        """For a line of JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Record":
        """Raises KeyError for a field that is missing; others are ignored."""
        given = {field.name: values[field.name] for field in fields(cls)}
        return cls(**{**given, "chunk_s": tuple(given["chunk_s"])})


@dataclass(frozen=True)
class RunResult:
    """All that one run has seen."""

    records: tuple[Record, ...]  # in the order of ``index``
    duration_s: float  # from the start to the last answer's end
    started: str  # wall clock, ISO 8601
    num_planned: int  # requests that the schedule held; more than records when interrupted
    interrupted: bool = False
