"""Everything one router exports, by name; the numbers are counted elsewhere (prometheus_client).

The ledger (``router.ledger``) and the dispatcher count in plain Python on the event loop; a scrape,
in a thread of its own, copies what is there. So no request and no token waits for an exporter. What
can happen is exported from the start, as zero: of a series that begins with its first event, no
rate sees that event.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from itertools import product

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from router.buckets import Tally
from router.config import RouterSettings
from router.dispatch import Dispatcher
from router.ledger import Ledger
from router.loop_lag import LoopLag
from router.observation import STATUSES, error_type
from router.pools import REASONS, SCALED, START_REASONS

Key = tuple[str, ...]

ROLES = ("prefill", "decode", "mixed")
STATES = ("starting", "ready", "draining", "dead", "stalled")
REQUESTS = [
    (endpoint, stream, str(status), error_type(status))
    for endpoint, stream, status in product(("chat", "completions"), ("false", "true"), STATUSES)
]
REJECTIONS = [("queue_full",), ("queue_timeout",), ("too_long",), ("no_workers",)]
LEFT_IN = [("queue",), ("prefill",), ("transfer",), ("decode",)]
VERDICTS = list(product(("ttft", "tpot", "both"), ("good", "bad")))
DECISIONS = [("disagg",), ("decode_only",), ("mixed",), ("retry",)]
RETRIES = [
    *product(("prefill", "decode"), ("lost", "stalled", "unknown", "draining", "internal")),
    ("prefill", "pull"),
    ("prefill", "expired"),
]
FAILOVERS = [("ticket reused",), ("recompute",), ("local prefill",)]
LOSSES = list(
    product(ROLES, ("closed", "silent", "unread", "protocol", "stalled", "dead"))
)  # as ``Link.close_kind`` says, or the worker itself
RESIZES = list(product(SCALED, ("up", "down"), REASONS))
START_FAILURES = list(product(ROLES, START_REASONS))


class RouterMetrics(Collector):
    """``registry`` is this router's own, with nothing of the process or of other routers in it.

    ``requests`` are those that go on.
    """

    def __init__(
        self, settings: RouterSettings, ledger: Ledger, requests: Sized, dispatcher: Dispatcher
    ) -> None:
        self.loop_lag = LoopLag()
        self._model = settings.served_model
        self._policy = settings.config.policy
        self._started = time.time()
        self._ledger = ledger
        self._requests = requests
        self._dispatcher = dispatcher
        self.registry = CollectorRegistry(auto_describe=True)
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """All series, as of now."""
        yield from self._outcomes()
        yield from self._times()
        yield from self._routing()
        yield from self._workers()
        yield from self._pools()
        yield histogram(
            "baton_event_loop_lag_seconds",
            "How late the event loop runs what is due",
            (),
            [((), self.loop_lag.tally)],
        )
        text = "When this process began, in seconds since 1970"
        yield GaugeMetricFamily("baton_process_start_time_seconds", text, value=self._started)

    # --- families --------------------------------------------------------------------------------

    def _counter(
        self, name: str, about: str, labels: Sequence[str], counts: Mapping[Key, float]
    ) -> Metric:
        family = CounterMetricFamily(name, about, labels=("model", *labels))
        for values, count in counts.items():
            family.add_metric((self._model, *values), count)
        return family

    def _gauge(
        self, name: str, about: str, labels: Sequence[str], values: Mapping[Key, float]
    ) -> Metric:
        family = GaugeMetricFamily(name, about, labels=("model", *labels))
        for key, value in values.items():
            family.add_metric((self._model, *key), value)
        return family

    def _histogram(
        self, name: str, about: str, tallies: Mapping[Key, Tally], labels: Sequence[str] = ()
    ) -> Metric:
        labelled = [((self._model, *values), tally) for values, tally in tallies.items()]
        return histogram(name, about, ("model", *labels), labelled)

    def _outcomes(self) -> Iterator[Metric]:
        ledger = self._ledger
        yield self._counter(
            "baton_requests_total",
            "HTTP requests for tokens by what became of them",
            ("endpoint", "stream", "code", "error_type"),
            counts_of(ledger.requests, REQUESTS),
        )
        yield self._gauge(
            "baton_requests_in_flight",
            "HTTP requests for tokens that have not ended",
            (),
            {(): len(self._requests)},
        )
        yield self._gauge(
            "baton_requests_queued",
            "Answers that wait in the router for a pair of workers",
            (),
            {(): len(self._dispatcher.queue)},
        )
        yield self._counter(
            "baton_admission_rejections_total",
            "Requests that were not let in, or found no place",
            ("reason",),
            counts_of(ledger.rejections, REJECTIONS),
        )
        yield self._counter(
            "baton_client_disconnects_total",
            "Clients that left before their answer was complete, by where it was",
            ("stage",),
            counts_of(ledger.disconnects, LEFT_IN),
        )
        yield self._counter(
            "baton_slo_requests_total",
            "Requests that met an objective (good) or missed it (bad)",
            ("slo", "verdict"),
            counts_of(ledger.verdicts, VERDICTS),
        )
        objectives = ledger.objectives
        yield self._gauge(
            "baton_slo_objective_seconds",
            "The objective: seconds to the first token, and for each after it",
            ("slo",),
            {("ttft",): objectives.ttft_s, ("tpot",): objectives.tpot_s},
        )
        for name, about, count in (
            ("prompt", "Tokens of prompts whose first token was made", ledger.prompt_tokens),
            ("cached_prompt", "Of those, tokens that were not computed", ledger.cached_tokens),
            ("generated", "Tokens of answers", ledger.generated_tokens),
        ):
            yield self._counter(f"baton_{name}_tokens_total", about, (), {(): count})

    def _times(self) -> Iterator[Metric]:
        ledger = self._ledger
        yield self._histogram(
            "baton_time_to_first_token_seconds",
            "From a request's last byte to its first content; not streamed: to the first token",
            {(_text(stream),): tally for stream, tally in ledger.ttft.items()},
            ("stream",),
        )
        yield self._histogram(
            "baton_time_per_output_token_seconds",
            "Seconds a token after the first, one value for each request that has a second",
            {(): ledger.tpot},
        )
        yield self._histogram(
            "baton_inter_token_latency_seconds", "Between two chunks of an answer",
            {(): ledger.gaps},
        )  # fmt: skip
        yield self._histogram(
            "baton_request_duration_seconds",
            "From a request's headers to the end of its answer",
            {(str(code),): tally for code, tally in ledger.durations.copy().items()},
            ("code",),
        )
        yield self._histogram(
            "baton_stage_duration_seconds",
            "tokenize, route, queue, prefill, write make TTFT; kv_transfer, decode_admit, "
            "first_decode make the time to the second token",
            {(stage,): tally for stage, tally in ledger.stages.items()},
            ("stage",),
        )
        yield self._histogram(
            "baton_request_prompt_tokens", "Tokens of a request's prompts",
            {(): ledger.prompt_sizes},
        )  # fmt: skip
        yield self._histogram(
            "baton_request_generated_tokens", "Tokens of a request's answers",
            {(): ledger.answer_sizes},
        )  # fmt: skip

    def _routing(self) -> Iterator[Metric]:
        routing = self._dispatcher.routing
        decisions = counts_of(routing.decisions, DECISIONS)
        yield self._counter(
            "baton_route_decisions_total",
            "Pairs that were chosen, by what they do",
            ("policy", "decision"),
            {(self._policy, *values): count for values, count in decisions.items()},
        )
        yield self._histogram(
            "baton_route_overhead_seconds",
            "What finding a pair took the router, of each request that got one",
            {(): self._dispatcher.queue.overhead},
        )
        yield self._counter(
            "baton_retries_total",
            "Attempts that failed and were followed by another",
            ("stage", "reason"),
            counts_of(routing.retries, RETRIES),
        )
        yield self._counter(
            "baton_failovers_total",
            "How requests went on where their own workers could not",
            ("kind",),
            counts_of(routing.failovers, FAILOVERS),
        )
        yield self._counter(
            "baton_worker_losses_total",
            "Workers that went without a goodbye, or hang",
            ("role", "reason"),
            counts_of(routing.losses, LOSSES),
        )

    def _workers(self) -> Iterator[Metric]:
        table = self._dispatcher.table
        found: Counter[Key] = Counter()
        for (role, state), number in table.conditions().items():
            found[role, state if state in STATES else "draining"] += number
        yield self._gauge(
            "baton_workers",
            "Workers as this router sees them",
            ("role", "state"),
            counts_of(found, product(ROLES, STATES)),
        )
        replicas: dict[Key, float] = {}
        wanted, most = self._dispatcher.targets, self._dispatcher.pools.most
        for role in ROLES:
            replicas[role, "actual"] = table.registered[role]
            replicas[role, "target"] = wanted.get(role, 0)
            replicas[role, "max"] = most.get(role, 0)
        # How many there are, only who sees all of them can tell: rules count targets.
        replicas["router", "target"] = self._dispatcher.wanted_routers
        yield self._gauge(
            "baton_autoscale_replicas",
            "Workers that are registered, that there should be and may be; routers that should be",
            ("role", "kind"),
            replicas,
        )

    def _pools(self) -> Iterator[Metric]:
        """Every router is told the same by who decides, and says the same."""
        pools = self._dispatcher.pools
        yield self._counter(
            "baton_autoscale_decisions_total",
            "Changes of a pool's target since the deployment began, as each router says",
            ("role", "direction", "reason"),
            counts_of(pools.decisions, RESIZES),
        )
        yield self._counter(
            "baton_worker_start_failures_total",
            "Workers that did not start since the deployment began, as each router says",
            ("role", "reason"),
            counts_of(pools.start_failures, START_FAILURES),
        )


def histogram(
    name: str,
    about: str,
    labels: Sequence[str],
    tallies: Iterable[tuple[Sequence[str], Tally]],
) -> HistogramMetricFamily:
    """A family of histograms: (values of ``labels``, tally) each."""
    family = HistogramMetricFamily(name, about, labels=labels)
    for values, tally in tallies:
        family.add_metric(values, tally.cumulative(), tally.total)
    return family


def counts_of(counts: Mapping[Key, float], known: Iterable[Key] = ()) -> dict[Key, float]:
    """A copy, with zeros for what is ``known`` and has not happened."""
    return dict.fromkeys(known, 0.0) | dict(counts)


def _text(flag: bool) -> str:
    return "true" if flag else "false"
