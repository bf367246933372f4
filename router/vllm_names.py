"""vLLM's names for what we count, for dashboards, autoscalers and gateways that know only those.

``--metrics-compat vllm`` adds them beside ours, with the same values. A name is given where what it
counts is the same: there is none for LoRA, sleep or sampling parameters, and ``request_success``
does not say whether an answer ended by a stop or by its length. ``engine`` is the id of the router
or worker. A router counts requests as clients see them and a worker as its engine does, so one that
is being decoded runs at both: choose by ``engine``, or sum over one of them. At a router an answer
runs when it has workers, and waits when it has none; as with vLLM's own, none does both. The
``nixl_`` names are for all transports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.config import RouterSettings
from router.dispatch import Dispatcher
from router.exposition import Exposed
from router.worker import Worker

PREFIX = "vllm:"


@dataclass(frozen=True)
class Alias:
    """Another name for some series of a family of ours. Labels that are not kept are summed over.

    Families of counters are named without ``_total``.
    """

    theirs: str
    ours: str
    where: Mapping[str, str] = field(default_factory=dict)
    keep: Mapping[str, str] = field(default_factory=dict)  # our label → theirs
    add: Mapping[str, str] = field(default_factory=dict)


ALIASES = (
    # routers
    Alias("num_requests_waiting", "baton_requests_queued"),
    Alias("prompt_tokens", "baton_prompt_tokens"),
    Alias("prompt_tokens_cached", "baton_cached_prompt_tokens"),
    Alias("generation_tokens", "baton_generated_tokens"),
    Alias("request_success", "baton_requests", {"error_type": ""}),
    Alias("admission_rejections", "baton_admission_rejections", keep={"reason": "reason"}),
    Alias("time_to_first_token_seconds", "baton_time_to_first_token_seconds"),
    Alias("inter_token_latency_seconds", "baton_inter_token_latency_seconds"),
    Alias("request_time_per_output_token_seconds", "baton_time_per_output_token_seconds"),
    Alias("e2e_request_latency_seconds", "baton_request_duration_seconds", {"code": "200"}),
    Alias("request_prompt_tokens", "baton_request_prompt_tokens"),
    Alias("request_generation_tokens", "baton_request_generated_tokens"),
    # workers
    Alias("num_requests_running", "baton_engine_requests", {"state": "running"}),
    Alias("num_requests_waiting", "baton_engine_requests", {"state": "waiting"}),
    Alias(
        "num_requests_kv_fetch_by_stage",
        "baton_kv_transfer_in_flight",
        {"side": "recv"},
        add={"stage": "in_progress"},
    ),
    Alias("kv_cache_usage_perc", "baton_kv_cache_usage_ratio"),
    Alias(
        "cache_config_info",
        "baton_cache_config_info",
        keep={"block_size": "block_size", "num_blocks": "num_gpu_blocks", "dtype": "cache_dtype"},
    ),
    Alias("prefix_cache_queries", "baton_prefix_cache_queried_tokens"),
    Alias("prefix_cache_hits", "baton_prefix_cache_hit_tokens"),
    Alias("num_preemptions", "baton_preemptions"),
    Alias("request_queue_time_seconds", "baton_engine_queue_seconds"),
    Alias("request_prefill_time_seconds", "baton_engine_prefill_seconds"),
    Alias("iteration_tokens_total", "baton_engine_batch_tokens"),
    Alias("nixl_xfer_time_seconds", "baton_kv_transfer_seconds", {"phase": "wire"}),
    Alias("nixl_bytes_transferred", "baton_kv_transfer_bytes"),
    Alias("nixl_num_descriptors", "baton_kv_transfer_blocks"),
    Alias("nixl_num_failed_transfers", "baton_kv_transfers", {"result": "failed"}),
    Alias("nixl_num_kv_expired_reqs", "baton_kv_leases_expired"),
)

More = Callable[[], Iterable[Metric]]


class WithVllmNames(Collector):
    """A registry's families, and after each its aliases, of the same moment.

    ``more``: families that have no name of ours here: gateways choose a router by what waits, what
    runs, and the use of KV blocks, which only workers have.
    """

    def __init__(self, registry: CollectorRegistry, engine: str, more: More = tuple) -> None:
        self._registry = registry
        self._engine = engine
        self._more = more

    def collect(self) -> Iterator[Metric]:
        """All families."""
        for family in self._registry.collect():
            yield family
            for alias in ALIASES:
                if alias.ours == family.name:
                    yield _renamed(family, alias, self._engine)
        yield from self._more()

    def restricted_registry(self, names: Iterable[str]) -> Collector:
        """Those of ours only: who asks for series by name knows which."""
        return self._registry.restricted_registry(names)


def worker_view(compat: str, registry: CollectorRegistry, worker_id: str) -> Exposed:
    """What a worker shows, by its ``metrics_compat``."""
    return WithVllmNames(registry, worker_id) if compat == "vllm" else registry


def router_view(
    settings: RouterSettings, registry: CollectorRegistry, dispatcher: Dispatcher
) -> Exposed:
    """What a router shows, by its ``metrics_compat``."""
    if settings.metrics_compat != "vllm":
        return registry
    labels = {"model_name": settings.served_model, "engine": settings.router_id}

    def gauge(name: str, about: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"{PREFIX}{name}", about, labels=tuple(labels))
        family.add_metric(tuple(labels.values()), value)
        return family

    def more() -> list[Metric]:
        workers = list(dispatcher.table.workers.copy().values())
        about = "Share of the KV blocks of the workers that decode here: their mean"
        return [
            gauge("num_requests_running", "Answers that workers make", dispatcher.num_answering),
            gauge("kv_cache_usage_perc", about, decode_usage(workers)),
        ]

    return WithVllmNames(registry, settings.router_id, more)


def decode_usage(workers: Iterable[Worker]) -> float:
    """Mean share of KV blocks that are in use, of connected workers that decode; 0 without any."""
    shares = []
    for worker in workers:
        blocks = worker.load.blocks if worker.load is not None else {}
        if blocks and worker.card.role != "prefill":
            free = blocks.get("free", 0) + blocks.get("cached", 0)
            shares.append(1 - free / sum(blocks.values()))
    return sum(shares) / len(shares) if shares else 0.0


def _renamed(family: Metric, alias: Alias, engine: str) -> Metric:
    """The family under its other name. Samples that become the same are added up."""
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in family.samples:
        if any(sample.labels.get(name) != value for name, value in alias.where.items()):
            continue
        labels = {"model_name": sample.labels.get("model", ""), "engine": engine, **alias.add}
        for ours, theirs in {**alias.keep, "le": "le"}.items():
            if ours in sample.labels:
                labels[theirs] = sample.labels[ours]
        key = (sample.name.removeprefix(family.name), tuple(labels.items()))
        sums[key] = sums.get(key, 0.0) + sample.value
    renamed = Metric(PREFIX + alias.theirs, f"{family.documentation} ({family.name})", family.type)
    for (suffix, labels_of), value in sums.items():
        renamed.add_sample(renamed.name + suffix, dict(labels_of), value)
    return renamed
