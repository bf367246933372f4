"""What a run's records amount to: latencies, throughput, goodput, attainment, errors, lag.

The definitions are those of ``vllm bench serve`` (``docs/loadtest.md`` lists them): only requests
that ended well enter latencies, throughput and tokens; TPOT leaves out answers of one token; ITL
is over all gaps of all requests; percentiles interpolate linearly. Requests that failed count
against attainment; those that the load test itself cut off count neither way.

Pure: numbers in, numbers out. Knows neither files, terminals nor plots. A figure that does not
exist (a median of nothing) is nan here and null in JSON.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np

from loadtest.record import INTERRUPTED, Record, RunResult
from loadtest.slo import SLO

LAG_LIMIT_S = 0.005
LAG_SHARE = 0.1
MIN_LATE = 3
"""A run is spoiled when its p99 lag is over both LAG_LIMIT_S and LAG_SHARE of its median TTFT, and
so many requests were that late: of few requests, one alone is the p99.
"""

_Z = 1.959963984540054  # of a normal distribution's middle 95 %


@dataclass(frozen=True)
class Spread:
    """A sample's figures, in the sample's own unit (here seconds)."""

    count: int
    mean: float
    std: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """Of any values; nans (figures that a request does not have) are left out."""
        sample = np.sort(np.asarray(list(values), dtype=np.float64))  # sorted: order cannot matter
        sample = sample[~np.isnan(sample)]
        if not len(sample):
            return cls(0, *[math.nan] * 6)
        p50, p90, p99 = np.percentile(sample, [50, 90, 99]).tolist()
        mean, std = float(sample.mean()), float(sample.std())
        return cls(len(sample), mean, std, p50, p90, p99, float(sample[-1]))


@dataclass(frozen=True)
class Attainment:
    """How many requests met an objective, or all of theirs."""

    met: int
    total: int

    @property
    def share(self) -> float:
        """0 to 1; nan when there were no requests."""
        return self.met / self.total if self.total else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval: right if requests do not depend on one another."""
        if not self.total:
            return 0.0, 1.0
        z2 = _Z * _Z / self.total
        middle = (self.share + z2 / 2) / (1 + z2)
        spread = self.share * (1 - self.share) / self.total + z2 / (4 * self.total)
        half = _Z * math.sqrt(spread) / (1 + z2)
        return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True)
class Figures:
    """Of one class of requests, or of all. Times in seconds, rates per second."""

    name: str  # of the class; "all"
    slo: SLO | None  # None: several classes with different ones
    num_sent: int  # = num_ok + num_failed + num_interrupted
    num_ok: int
    num_failed: int
    num_interrupted: int  # cut off by the load test itself
    ttft: Spread
    tpot: Spread
    itl: Spread
    e2e: Spread
    request_throughput: float
    output_throughput: float  # tokens
    total_throughput: float  # tokens of prompts and answers
    goodput: float  # requests that met all of their objectives
    attainment: Attainment  # of num_ok + num_failed
    objectives: Mapping[str, Attainment]  # each by itself: "ttft", "tpot", "e2e" where there is one
    errors: Mapping[str, int]  # by kind, most frequent first; without INTERRUPTED
    messages: Mapping[str, str]  # of each kind, the first request's
    prompt_tokens: int  # of the requests that ended well, as are the next three
    planned_prompt_tokens: int
    output_tokens: int
    planned_output_tokens: int  # the answers' length asked for


@dataclass(frozen=True)
class Summary:
    """A whole run."""

    started: str  # wall clock, ISO 8601
    duration_s: float
    num_planned: int
    interrupted: bool
    total: Figures
    classes: tuple[Figures, ...]
    lag: Spread  # of the client: how late it sent, seconds
    spoiled: str  # why the figures are not to be trusted; empty: they are

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON: what does not exist, and limits that do not, are null."""
        plain: dict[str, Any] = plain_values(self)
        return plain


def summarize(result: RunResult, slos: Mapping[str, SLO]) -> Summary:
    """The figures of a run; ``slos`` by class name, a class without one has no objectives."""
    seconds = result.duration_s
    others = {record.class_name for record in result.records} - set(slos)
    by_class: dict[str, list[Record]] = {name: [] for name in [*slos, *sorted(others)]}
    for record in result.records:
        by_class[record.class_name].append(record)
    classes = tuple(
        _figures(name, records, {name: slos.get(name, SLO())}, seconds)
        for name, records in by_class.items()
    )
    every_slo = {name: slos.get(name, SLO()) for name in by_class}
    total = _figures("all", result.records, every_slo, seconds)
    lags = [record.lag_s for record in result.records]
    lag = Spread.of(lags)
    return Summary(
        started=result.started,
        duration_s=seconds,
        num_planned=result.num_planned,
        interrupted=result.interrupted,
        total=total,
        classes=classes,
        lag=lag,
        spoiled=_spoiled(lags, lag, total.ttft.p50),
    )


def pooled(results: Sequence[RunResult]) -> RunResult:
    """Several runs as one: requests put together, durations added (rounds of one setting)."""
    return RunResult(
        records=tuple(record for result in results for record in result.records),
        duration_s=sum(result.duration_s for result in results),
        started=min((result.started for result in results), default=""),
        num_planned=sum(result.num_planned for result in results),
        interrupted=any(result.interrupted for result in results),
    )


def inter_token_s(records: Iterable[Record]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """All gaps between chunks of the requests that ended well."""
    gaps = [np.diff(record.chunk_s) for record in records if not record.error]
    return np.concatenate(gaps) if gaps else np.empty(0)


def plain_values(value: Any) -> Any:
    """Dataclasses as dicts, tuples as lists, nan and infinity as None, for ``json.dumps``."""
    if isinstance(value, Attainment):
        low, high = value.interval
        return plain_values(
            {"met": value.met, "total": value.total, "share": value.share, "interval": [low, high]}
        )
    if is_dataclass(value):
        return {field.name: plain_values(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _figures(
    name: str, records: Sequence[Record], slos: Mapping[str, SLO], seconds: float
) -> Figures:
    ended = [record for record in records if record.error != INTERRUPTED]
    ok = [record for record in ended if not record.error]
    met = sum(slos[record.class_name].met(record) for record in ended)
    kinds = Counter(record.error for record in ended if record.error)
    prompt_tokens = sum(record.prompt_tokens for record in ok)
    output_tokens = sum(record.output_tokens for record in ok)
    limits = set(slos.values())
    return Figures(
        name=name,
        slo=limits.pop() if len(limits) == 1 else None,
        num_sent=len(records),
        num_ok=len(ok),
        num_failed=len(ended) - len(ok),
        num_interrupted=len(records) - len(ended),
        ttft=Spread.of(record.ttft_s for record in ok),
        tpot=Spread.of(record.tpot_s for record in ok if record.output_tokens > 1),
        itl=Spread.of(inter_token_s(ok)),
        e2e=Spread.of(record.latency_s for record in ok),
        request_throughput=_per(len(ok), seconds),
        output_throughput=_per(output_tokens, seconds),
        total_throughput=_per(prompt_tokens + output_tokens, seconds),
        goodput=_per(met, seconds),
        attainment=Attainment(met, len(ended)),
        objectives=_objectives(ended, slos),
        errors=dict(sorted(kinds.items(), key=lambda item: (-item[1], item[0]))),
        messages={record.error: record.message for record in reversed(ended) if record.error},
        prompt_tokens=prompt_tokens,
        planned_prompt_tokens=sum(record.planned_tokens for record in ok),
        output_tokens=output_tokens,
        planned_output_tokens=sum(record.max_tokens for record in ok),
    )


def _per(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else math.nan


def _objectives(ended: Sequence[Record], slos: Mapping[str, SLO]) -> dict[str, Attainment]:
    """Each objective by itself, over the requests of those classes that have it."""
    found = {}
    for name in (field.name for field in fields(SLO)):
        having = {key for key, slo in slos.items() if math.isfinite(getattr(slo, name))}
        asked = [record for record in ended if record.class_name in having]
        met = sum(name not in slos[record.class_name].missed(record) for record in asked)
        if having:
            found[name] = Attainment(met, len(asked))
    return found


def _spoiled(lags: Sequence[float], lag: Spread, median_ttft: float) -> str:
    limit = LAG_LIMIT_S if math.isnan(median_ttft) else max(LAG_LIMIT_S, LAG_SHARE * median_ttft)
    num_late = sum(value > limit for value in lags)
    if not lag.p99 > limit or num_late < MIN_LATE:  # nan: nothing was sent
        return ""
    return (
        f"The client was late: 1 % of the requests were sent {lag.p99 * 1e3:.1f} ms or more after"
        f" they were due, over the limit of {limit * 1e3:.1f} ms (the larger of"
        f" {LAG_LIMIT_S * 1e3:.0f} ms and {LAG_SHARE:.0%} of the median TTFT). The load was not the"
        " one asked for, and arrivals of tokens may have been seen late; use a lower rate or a"
        " machine of its own for the client."
    )
