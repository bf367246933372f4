"""vLLM's names: the same values as ours, one series for each of theirs."""

import re

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from router import wire
from router.exposition import Exposed
from router.vllm_names import ALIASES, PREFIX, WithVllmNames, decode_usage, worker_view
from router.worker import Worker
from tests.integration.fake_worker import LAYOUT, READY
from tests.support.promql import ROOT

MODEL = "m"


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def samples(exposed: Exposed, name: str) -> dict[tuple[tuple[str, str], ...], float]:
    """Values of one sample name, by its labels in order."""
    return {
        tuple(sorted(sample.labels.items())): sample.value
        for family in exposed.collect()
        for sample in family.samples
        if sample.name == name
    }


OWN = (("engine", "w1"), ("model_name", MODEL))


def test_a_label_that_is_not_kept_is_summed_over(registry: CollectorRegistry) -> None:
    ours = Histogram(
        "baton_time_to_first_token_seconds", "TTFT", ["model", "stream"],
        registry=registry, buckets=(0.1, 1.0),
    )  # fmt: skip
    for stream, seconds in (("true", 0.05), ("true", 0.5), ("false", 0.05), ("false", 7.0)):
        ours.labels(MODEL, stream).observe(seconds)
    both = WithVllmNames(registry, "w1")
    theirs = f"{PREFIX}time_to_first_token_seconds"
    buckets = samples(both, f"{theirs}_bucket")
    assert buckets == {
        tuple(sorted((*OWN, ("le", le)))): count
        for le, count in (("0.1", 2.0), ("1.0", 3.0), ("+Inf", 4.0))
    }
    assert samples(both, f"{theirs}_count") == {OWN: 4.0}
    assert samples(both, f"{theirs}_sum") == {OWN: pytest.approx(7.6)}
    # ours are there as well, untouched
    assert sum(samples(both, "baton_time_to_first_token_seconds_count").values()) == 4


def test_one_value_of_a_label_becomes_a_name(registry: CollectorRegistry) -> None:
    ours = Gauge("baton_engine_requests", "Sequences", ["model", "state"], registry=registry)
    ours.labels(MODEL, "running").set(3)
    ours.labels(MODEL, "waiting").set(5)
    both = WithVllmNames(registry, "w1")
    assert samples(both, f"{PREFIX}num_requests_running") == {OWN: 3.0}
    assert samples(both, f"{PREFIX}num_requests_waiting") == {OWN: 5.0}


def test_a_label_may_be_kept_under_their_name(registry: CollectorRegistry) -> None:
    labels = ["model", "block_size", "num_blocks", "dtype"]
    ours = Gauge("baton_cache_config_info", "Pool", labels, registry=registry)
    ours.labels(MODEL, "16", "300", "float32").set(1)
    (found,) = samples(WithVllmNames(registry, "w1"), f"{PREFIX}cache_config_info")
    assert dict(found) == {
        "model_name": MODEL, "engine": "w1",
        "block_size": "16", "num_gpu_blocks": "300", "cache_dtype": "float32",
    }  # fmt: skip


def test_counters_end_with_total_and_only_successes_succeed(registry: CollectorRegistry) -> None:
    labels = ["model", "code", "error_type"]
    ours = Counter("baton_requests", "Requests", labels, registry=registry)
    ours.labels(MODEL, "200", "").inc(7)
    ours.labels(MODEL, "499", "cancelled").inc(2)
    both = WithVllmNames(registry, "w1")
    assert samples(both, f"{PREFIX}request_success_total") == {OWN: 7.0}
    text = generate_latest(both).decode()
    assert f"# TYPE {PREFIX}request_success_total counter" in text
    assert f'{PREFIX}request_success_total{{engine="w1",model_name="m"}} 7.0' in text


def test_without_the_setting_nothing_is_added(registry: CollectorRegistry) -> None:
    Gauge("baton_requests_queued", "Queue", ["model"], registry=registry).labels(MODEL).set(1)
    assert PREFIX not in generate_latest(worker_view("", registry, "w1")).decode()
    assert PREFIX in generate_latest(worker_view("vllm", registry, "w1")).decode()


def test_no_name_of_theirs_comes_twice_from_one_family() -> None:
    assert len({(alias.theirs, alias.ours) for alias in ALIASES}) == len(ALIASES)


def _worker(role: str, **blocks: int) -> Worker:
    card = wire.WorkerCard(
        worker_id=role, epoch=1, role=role, model=MODEL, host="h", port=1, pid=2, layout=LAYOUT,
        agents=(), kv_blocks=8, block_size=16, max_model_len=64, max_num_seqs=4, token_budget=32,
    )  # fmt: skip
    worker = Worker(card)
    if blocks:
        worker.load = wire.Load(**{**READY.__dict__, "blocks": blocks})
    return worker


def test_a_router_is_as_full_as_its_decode_workers_on_average() -> None:
    half = _worker("decode", free=3, cached=1, active=4)
    full = _worker("mixed", free=0, cached=0, active=6, leased=2)
    unknown = _worker("decode")
    prefill = _worker("prefill", free=8, active=0)
    assert decode_usage([half, full, unknown, prefill]) == 0.75
    assert decode_usage([prefill]) == 0.0


def test_every_name_is_documented() -> None:
    page = (ROOT / "docs" / "observability.md").read_text()
    missing = [
        a.theirs for a in ALIASES if not re.search(rf"`({PREFIX})?{a.theirs}(_total)?`", page)
    ]
    assert not missing
