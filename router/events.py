"""The latest requests, and how fast they were (pure): what the live console asks for.

``router.ledger`` counts everything for ever; here is only what one looks at now. Adding a request
is all that happens while nobody looks. ``now`` is a time of day, as ``Observation.at``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from router.observation import Observation

STEP_S = 5.0  # of the history: one point of a line
HISTORY_S = 300.0
WINDOW_S = 60.0  # of what is called "now"
KEEP = 128  # requests that are shown to a page that was just opened
SAMPLES = 2048  # requests whose times are kept; at high rates they reach less far back


class _Sample(NamedTuple):
    end_at: float  # time of day
    first_at: float  # ... when its first token came
    ttft_s: float | None
    tpot_s: float | None
    good: bool | None
    tokens: int


class Recent:
    """The latest requests of one router, in bounded memory."""

    def __init__(self, keep: int = KEEP, samples: int = SAMPLES) -> None:
        self._ended: deque[Observation] = deque(maxlen=keep)
        self._samples: deque[_Sample] = deque(maxlen=samples)

    @property
    def ended(self) -> list[Observation]:
        """Those that have ended last, oldest first."""
        return list(self._ended)

    def add(self, seen: Observation) -> None:
        """A request has ended."""
        assert seen.ended_at is not None, "it has not ended"
        self._ended.append(seen)
        self._samples.append(_sample(seen, seen.ended_at))

    def summary(self, now: float, live: Iterable[Observation] = ()) -> dict[str, Any]:
        """Percentiles of the last minute; ``live`` ones count with what they have seen so far."""
        samples = self._since(now - WINDOW_S)
        first = [s.ttft_s for s in (*samples, *_begun(live, now)) if s.first_at > now - WINDOW_S]
        judged = [s.good for s in samples if s.good is not None]
        return {
            "window_s": self._reach(now),
            "ttft": _percentiles(first),
            "tpot": _percentiles(s.tpot_s for s in samples),
            "good": sum(judged),
            "judged": len(judged),
            "ended": len(samples),
        }

    def history(
        self, now: float, live: Iterable[Observation] = (), span_s: float = HISTORY_S
    ) -> list[dict[str, Any]]:
        """A point for each ``STEP_S`` of the clock, oldest first; those without anything are left
        out, and so is the one that ``span_s`` cuts through.

        TTFT counts when the first token came, everything else when the request ended.
        """
        oldest = -(-(now - span_s) // STEP_S)
        if self._full:  # a step that was cut would show too few
            whole = -(-self._samples[0].end_at // STEP_S)
            oldest = max(oldest, min(whole, now // STEP_S))
        ended = self._since(oldest * STEP_S)
        ttft: dict[float, list[float | None]] = {}
        rest: dict[float, list[_Sample]] = {}
        for sample in (*ended, *_begun(live, now)):
            step = sample.first_at // STEP_S
            if step >= oldest:
                ttft.setdefault(step, []).append(sample.ttft_s)
        for sample in ended:
            rest.setdefault(sample.end_at // STEP_S, []).append(sample)
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

    @property
    def _full(self) -> bool:
        return len(self._samples) == self._samples.maxlen

    def _reach(self, now: float) -> float:
        """Seconds that "now" covers: at high rates fewer."""
        if not self._full:
            return WINDOW_S
        return round(max(0.0, min(WINDOW_S, now - self._samples[0].end_at)), 1)

    def _since(self, moment: float) -> list[_Sample]:
        """Those that ended at or after ``moment``; they were added in this order."""
        found = []
        for sample in reversed(self._samples):
            if sample.end_at < moment:
                break
            found.append(sample)
        return found


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


def _begun(live: Iterable[Observation], now: float) -> list[_Sample]:
    return [_sample(seen, now - seen.at) for seen in live if seen.ttft_s is not None]


def _sample(seen: Observation, end_s: float) -> _Sample:
    first_s = end_s if seen.ttft_s is None else seen.ttft_s
    return _Sample(
        end_at=seen.at + end_s,
        first_at=seen.at + first_s,
        ttft_s=seen.ttft_s,
        tpot_s=seen.tpot_s,
        good=seen.good,
        tokens=seen.tokens,
    )
