"""What a worker shows to Prometheus.

Durations are tallied in the engine's thread: of a step after its tokens were handed on, of a prompt
and of a pull when they are over. All else is read when somebody scrapes, from counters that the
worker keeps anyway and from its latest load report, which is of one moment. No lock is taken, so no
step waits for a scrape. Knows no sockets: ``router.exposition`` serves the registry.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvtransfer.exporter import Exporter
from kvtransfer.puller import Puller
from router import wire
from router.buckets import Tally
from services.engine.engine import Engine
from services.pulls import PullStats
from services.settings import WorkerSettings
from services.tallies import WorkerTallies

_IN_USE = ("active", "leased", "quarantined")  # states of blocks that nobody new can have

Values = float | Mapping[str, float]


@dataclass(frozen=True)
class Sources:
    """The parts of a worker that have numbers."""

    engine: Engine
    pulls: PullStats
    exporter: Exporter
    puller: Puller
    tallies: WorkerTallies
    lag: Tally  # of the event loop
    load: Callable[[], wire.Load]  # the latest report
    clock: Callable[[], float] = time.monotonic  # the engine loop's


def registry_of(settings: WorkerSettings, transport: str, sources: Sources) -> CollectorRegistry:
    """The metrics of one worker; they are read when somebody collects them."""
    names = {
        "model": settings.served_model,
        "role": settings.role,
        "replica": settings.worker_id,
    }
    registry = CollectorRegistry()
    registry.register(_Reader(names, transport, sources))
    return registry


class _Reader(Collector):
    """Makes families of what is there now. ``names``: labels that all series have, but for those of
    the process.
    """

    def __init__(self, names: Mapping[str, str], transport: str, sources: Sources) -> None:
        self._names = dict(names)
        self._transport = {"transport": transport}
        self._sources = sources
        self._started = time.time()

    def describe(self) -> list[Metric]:
        """The same names always."""
        return list(self.collect())

    def collect(self) -> Iterator[Metric]:
        """All families."""
        yield from self._engine()
        yield from self._blocks()
        yield from self._transfers()
        yield from self._pulls()
        yield from self._roofline()
        text = "How late the event loop runs what is due"
        lag = HistogramMetricFamily("baton_event_loop_lag_seconds", text)
        lag.add_metric((), self._sources.lag.cumulative(), self._sources.lag.total)
        yield lag
        text = "When this process began, in seconds since 1970"
        yield GaugeMetricFamily("baton_process_start_time_seconds", text, value=self._started)

    def _engine(self) -> Iterator[Metric]:
        load, tallies = self._sources.load(), self._sources.tallies
        steps, meter = self._sources.engine.scheduler.stats, tallies.meter
        requests = {"running": load.running, "waiting": load.waiting}
        yield self._gauge("baton_engine_requests", "Sequences of the engine", requests, "state")
        text = "Sequences that can run at a time: max_num_seqs"
        seats = self._sources.engine.config.max_num_seqs
        yield self._gauge("baton_engine_seats", text, seats)
        text = "Tokens of these that are still to be computed"
        yield self._gauge("baton_engine_waiting_tokens", text, load.waiting_tokens)
        yield self._counter(
            "baton_engine_steps_total", "Steps that computed something", steps.steps
        )
        tokens = {"prompt": steps.computed_prompt_tokens, "generated": steps.generated_tokens}
        yield self._counter("baton_engine_tokens_total", "Tokens computed", tokens, "kind")
        text = "Sequences that lost their blocks to older ones and started over"
        yield self._counter("baton_preemptions_total", text, steps.preemptions)
        text = "Seconds within steps"
        yield self._counter("baton_engine_busy_seconds_total", text, meter.total.seconds)
        text = "Seconds between steps"
        yield self._counter("baton_engine_idle_seconds_total", text, meter.idle_s)
        text = "Length of a step"
        yield self._histogram("baton_engine_step_seconds", text, tallies.step_s)
        text = "Tokens computed in a step"
        yield self._histogram("baton_engine_batch_tokens", text, tallies.step_tokens)
        text = "Sequences computed in a step"
        yield self._histogram("baton_engine_batch_size", text, tallies.step_seqs)
        text = "Wait of a prompt for its first step here"
        yield self._histogram("baton_engine_queue_seconds", text, tallies.queue_s)
        text = "From a prompt's first step to its first token, where both are here"
        yield self._histogram("baton_engine_prefill_seconds", text, tallies.prefill_s)

    def _blocks(self) -> Iterator[Metric]:
        engine = self._sources.engine
        config, steps = engine.config, engine.scheduler.stats
        blocks = self._sources.load().blocks
        used = sum(blocks[state] for state in _IN_USE)
        text = "Share of the KV blocks that requests, leases or late pulls hold"
        yield self._gauge("baton_kv_cache_usage_ratio", text, used / sum(blocks.values()))
        yield self._gauge("baton_kv_blocks", "KV blocks", blocks, "state")
        text = "What the KV pool is, in labels"
        shape = {
            "block_size": str(config.block_size),
            "num_blocks": str(config.kv_blocks),
            "dtype": config.dtype,
        }
        yield self._gauge("baton_cache_config_info", text, 1, **shape)
        text = "Prompt tokens that were looked up in the prefix cache"
        yield self._counter("baton_prefix_cache_queried_tokens_total", text, steps.queried_tokens)
        text = "Of these, those whose KV was there"
        yield self._counter("baton_prefix_cache_hit_tokens_total", text, steps.hit_tokens)

    def _transfers(self) -> Iterator[Metric]:
        sources, pulls = self._sources, self._sources.pulls
        leases = sources.exporter.num_leased
        text = "Requests whose KV was to be pulled here, by what became of that"
        yield self._counter(
            "baton_kv_transfers_total", text, pulls.ends, "result", **self._transport
        )
        text = "Pulls of parts of a prompt that was still being computed"
        yield self._counter("baton_kv_transfer_parts_total", text, pulls.parts, "result")
        text = "Tickets whose blocks are kept for a pull (send), and pulls (recv)"
        in_flight = {"send": leases, "recv": sources.puller.num_in_flight}
        yield self._gauge("baton_kv_transfer_in_flight", text, in_flight, "side")
        yield self._gauge("baton_kv_leases", "Tickets whose blocks are kept for a pull", leases)
        text = "For how long the oldest of these has been kept"
        since = sources.exporter.oldest_since()
        age = 0.0 if since is None else max(0.0, sources.clock() - since)
        yield self._gauge("baton_kv_lease_age_seconds", text, age)
        text = "Tickets that nobody released in time"
        yield self._counter("baton_kv_leases_expired_total", text, sources.exporter.expired_count)
        text = "Transports that were replaced, since pulls of them did not end"
        yield self._counter("baton_kv_agent_rebuilds_total", text, sources.puller.rebuild_count)

    def _pulls(self) -> Iterator[Metric]:
        tallies, fixed = self._sources.tallies, self._transport
        text = "Pulls of KV blocks that arrived, early ones as well: time by phase"
        same = {**self._names, **fixed}
        seconds = HistogramMetricFamily("baton_kv_transfer_seconds", text, labels=(*same, "phase"))
        for phase, tally in tallies.pull_s.items():
            seconds.add_metric((*same.values(), phase), tally.cumulative(), tally.total)
        yield seconds
        text = "Pulls that arrived: their bytes"
        yield self._histogram("baton_kv_transfer_bytes", text, tallies.pull_bytes, **fixed)
        text = "Pulls that arrived: their blocks"
        yield self._histogram("baton_kv_transfer_blocks", text, tallies.pull_blocks, **fixed)

    def _roofline(self) -> Iterator[Metric]:
        meter = self._sources.tallies.meter
        now = meter.utilisation(self._sources.clock())
        text = "Operations per second that this machine can do, measured at start"
        yield self._gauge("baton_roofline_peak_flops", text, meter.ceilings.flops_s)
        text = "Bytes per second that this machine can read, measured at start"
        yield self._gauge("baton_roofline_peak_bytes_per_second", text, meter.ceilings.bytes_s)
        text = "Operations that the steps needed"
        yield self._counter("baton_engine_flops_total", text, meter.total.flops)
        text = "Bytes that the steps had to move between memory and processor"
        yield self._counter("baton_engine_bytes_total", text, meter.total.num_bytes)
        text = "Operations by what the machine could have done, within the steps of some seconds"
        yield self._gauge("baton_model_flops_utilization_ratio", text, now.flops)
        text = "Bytes by what the machine could have moved, within the steps of some seconds"
        yield self._gauge("baton_memory_bandwidth_utilization_ratio", text, now.bandwidth)
        text = "Operations by bytes of the steps of some seconds"
        yield self._gauge("baton_arithmetic_intensity", text, now.intensity)

    def _counter(
        self, name: str, text: str, values: Values, label: str = "", **fixed: str
    ) -> Metric:
        return self._family(CounterMetricFamily, name, text, values, label, fixed)

    def _gauge(self, name: str, text: str, values: Values, label: str = "", **fixed: str) -> Metric:
        return self._family(GaugeMetricFamily, name, text, values, label, fixed)

    def _histogram(self, name: str, text: str, tally: Tally, **fixed: str) -> Metric:
        same = {**self._names, **fixed}
        family = HistogramMetricFamily(name, text, labels=tuple(same))
        family.add_metric(tuple(same.values()), tally.cumulative(), tally.total)
        return family

    def _family(
        self,
        kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
        name: str,
        text: str,
        values: Values,
        label: str,
        fixed: Mapping[str, str],
    ) -> Metric:
        """One sample, or one for each value of ``label``."""
        same = {**self._names, **fixed}
        if isinstance(values, Mapping):
            family = kind(name, text, labels=(*same, label))
            for value, number in values.items():
                family.add_metric((*same.values(), value), number)
        else:
            family = kind(name, text, labels=tuple(same))
            family.add_metric(tuple(same.values()), values)
        return family
