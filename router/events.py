"""What became of the latest requests, and how fast they were (pure): what the live console shows.

Knows neither HTTP nor metrics: ``router.metrics`` counts everything for ever, here is only what one
looks at now. Times of day are seconds since 1970, everything within a request is seconds since it
was read completely.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

STEP_S = 5.0  # of the history: one point of a line
HISTORY_S = 300.0
WINDOW_S = 60.0  # of what is called "now"
KEEP = 256  # requests that are shown to a page that was just opened
SAMPLES = 4096  # requests whose times are kept; at high rates they reach less far back


@dataclass(frozen=True)
class Span:
    """One stage of a request, at a worker or (``worker`` is empty) in the router."""

    stage: str  # tokenize | queue | prefill | transfer | decode | lost (an attempt that failed)
    start_s: float
    end_s: float | None = None  # None: it goes on
    worker: str = ""

    def row(self) -> list[Any]:
        """As it travels to the page."""
        end = None if self.end_s is None else round(self.end_s, 4)
        return [self.stage, round(self.start_s, 4), end, self.worker]


@dataclass(frozen=True)
class Timeline:
    """One HTTP request, from when it was read to its last token."""

    id: str
    at: float  # time of day
    endpoint: str  # chat | completions
    stream: bool
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    choices: int = 1  # answers to it; the spans are those of the first
    spans: tuple[Span, ...] = ()
    retries: tuple[tuple[float, str], ...] = ()  # (seconds, why)
    ttft_s: float | None = None
    tpot_s: float | None = None
    end_s: float | None = None  # None: it goes on
    code: int = 0  # HTTP status, once it has ended
    error: str = ""
    good: bool | None = None  # met all objectives; None: cannot be said

    def row(self) -> dict[str, Any]:
        """As it travels to the page."""
        return {
            "id": self.id,
            "at": round(self.at, 4),
            "endpoint": self.endpoint,
            "stream": self.stream,
            "prompt": self.prompt_tokens,
            "cached": self.cached_tokens,
            "tokens": self.tokens,
            "choices": self.choices,
            "spans": [span.row() for span in self.spans],
            "retries": [[round(at, 4), why] for at, why in self.retries],
            "ttft": _rounded(self.ttft_s),
            "tpot": _rounded(self.tpot_s),
            "end": _rounded(self.end_s),
            "code": self.code,
            "error": self.error,
            "good": self.good,
        }


@dataclass(frozen=True)
class _Sample:
    """``first_at``: when its first token came; ``end_at``: when it ended. Times of day."""

    end_at: float
    first_at: float
    ttft_s: float | None
    tpot_s: float | None
    good: bool | None
    tokens: int


class Recent:
    """The latest requests of one router. Memory is bounded; adding one costs no more than that."""

    def __init__(self, keep: int = KEEP, samples: int = SAMPLES) -> None:
        self._timelines: deque[Timeline] = deque(maxlen=keep)
        self._samples: deque[_Sample] = deque(maxlen=samples)

    @property
    def timelines(self) -> list[Timeline]:
        """Those that have ended, oldest first."""
        return list(self._timelines)

    def add(self, timeline: Timeline) -> None:
        """A request that has ended."""
        assert timeline.end_s is not None, "it has not ended"
        self._timelines.append(timeline)
        self._samples.append(_sample(timeline, timeline.end_s))

    def summary(self, now: float, live: Iterable[Timeline] = ()) -> dict[str, Any]:
        """Percentiles and rates of the last minute; ``live`` ones count with what they have."""
        samples = self._latest(now - WINDOW_S)
        started = [_sample(one, now - one.at) for one in live if one.ttft_s is not None]
        first = [s.ttft_s for s in (*samples, *started) if s.first_at > now - WINDOW_S]
        judged = [s.good for s in samples if s.good is not None]
        return {
            "window_s": WINDOW_S,
            "ttft": _percentiles(first),
            "tpot": _percentiles(s.tpot_s for s in samples),
            "good": sum(judged),
            "judged": len(judged),
            "ended": len(samples),
        }

    def history(
        self, now: float, live: Iterable[Timeline] = (), span_s: float = HISTORY_S
    ) -> list[dict[str, Any]]:
        """A point for each ``STEP_S``, aligned to the clock, oldest first; empty ones are left out.

        TTFT counts when the first token came, everything else when the request ended.
        """
        since = now - span_s
        ended = self._latest(since)
        started = [_sample(one, now - one.at) for one in live if one.ttft_s is not None]
        ttft: dict[int, list[float | None]] = {}
        rest: dict[int, list[_Sample]] = {}
        for sample in (*ended, *started):
            if sample.first_at > since:
                ttft.setdefault(int(sample.first_at // STEP_S), []).append(sample.ttft_s)
        for sample in ended:
            rest.setdefault(int(sample.end_at // STEP_S), []).append(sample)
        return [
            {
                "t": step * STEP_S,
                "ttft": _percentiles(ttft.get(step, ())),
                "tpot": _percentiles(s.tpot_s for s in rest.get(step, ())),
                "good": sum(s.good is True for s in rest.get(step, ())),
                "judged": sum(s.good is not None for s in rest.get(step, ())),
                "tokens": sum(s.tokens for s in rest.get(step, ())),
            }
            for step in sorted(ttft.keys() | rest.keys())
        ]

    def _latest(self, since: float) -> list[_Sample]:
        """Those that ended after ``since``, oldest first; they were added in this order."""
        found = []
        for sample in reversed(self._samples):
            if sample.end_at <= since:
                break
            found.append(sample)
        return found[::-1]


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent of all do not exceed (nearest rank)."""
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(0, int(rank) - 1)]


def _percentiles(values: Iterable[float | None]) -> dict[str, float] | None:
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return None
    found = {f"p{p}": round(percentile(ordered, p), 5) for p in (50, 95, 99)}
    return {"n": len(ordered), **found}


def _sample(timeline: Timeline, end_s: float) -> _Sample:
    first_s = timeline.ttft_s if timeline.ttft_s is not None else end_s
    return _Sample(
        end_at=timeline.at + end_s,
        first_at=timeline.at + first_s,
        ttft_s=timeline.ttft_s,
        tpot_s=timeline.tpot_s,
        good=timeline.good,
        tokens=timeline.tokens,
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)
