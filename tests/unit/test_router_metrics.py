"""What a router exports: names, labels, zeros, borders; and that routers do not mix."""

from __future__ import annotations

import asyncio
import time
from itertools import product

import pytest
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from router import wire
from router.config import RouterConfig, RouterSettings
from router.dispatch import Dispatcher
from router.errors import RequestError
from router.ledger import Ledger, Objectives
from router.metrics import RouterMetrics
from router.observation import error_type
from router.pools import Pools

MODEL = "tiny"
LABELS = {
    "baton_requests": "endpoint stream code error_type",
    "baton_requests_in_flight": "",
    "baton_requests_queued": "",
    "baton_admission_rejections": "reason",
    "baton_client_disconnects": "stage",
    "baton_time_to_first_token_seconds": "stream",
    "baton_time_per_output_token_seconds": "",
    "baton_inter_token_latency_seconds": "",
    "baton_request_duration_seconds": "code",
    "baton_slo_requests": "slo verdict",
    "baton_slo_objective_seconds": "slo",
    "baton_prompt_tokens": "",
    "baton_cached_prompt_tokens": "",
    "baton_generated_tokens": "",
    "baton_request_prompt_tokens": "",
    "baton_request_generated_tokens": "",
    "baton_stage_duration_seconds": "stage",
    "baton_route_decisions": "policy decision",
    "baton_route_overhead_seconds": "",
    "baton_retries": "stage reason",
    "baton_failovers": "kind",
    "baton_workers": "role state",
    "baton_worker_losses": "role reason",
    "baton_autoscale_replicas": "role kind",
    "baton_autoscale_decisions": "role direction reason",
    "baton_worker_start_failures": "role reason",
    "baton_event_loop_lag_seconds": "",
    "baton_process_start_time_seconds": "",
}
"""By family, which for a counter has no ``_total``. All but those of ``BARE`` have ``model``."""
BARE = {"baton_event_loop_lag_seconds", "baton_process_start_time_seconds"}
ALWAYS = {  # has a value before anything happens
    "baton_slo_objective_seconds",
    "baton_process_start_time_seconds",
    "baton_autoscale_replicas",
}


async def _nobody() -> list[wire.WorkerCard]:
    return []


def metrics(ledger: Ledger | None = None, **settings: object) -> RouterMetrics:
    made = RouterSettings(
        RouterConfig(), "", MODEL, "R", b"s" * 32, **settings  # type: ignore[arg-type]
    )  # fmt: skip
    return RouterMetrics(
        made, ledger or Ledger(Objectives(2.0, 0.1)), [], Dispatcher(made, _nobody)
    )


def families(registry: CollectorRegistry) -> dict[str, Metric]:
    """As a reader of the page gets them."""
    page = generate_latest(registry).decode()
    return {family.name: family for family in text_string_to_metric_families(page)}


def test_every_series_of_the_contract_is_there_with_its_labels() -> None:
    exported = families(metrics().registry)
    assert exported.keys() == LABELS.keys()
    for name, family in exported.items():
        expected = set(LABELS[name].split())
        if name not in BARE:
            expected.add("model")
        assert family.samples, name
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == expected, sample
            assert sample.labels.get("model", MODEL) == MODEL
        assert family.documentation


def test_nothing_has_happened_is_exactly_zero() -> None:
    for name, family in families(metrics().registry).items():
        if name not in ALWAYS:
            assert {sample.value for sample in family.samples} <= {0.0}, name


def test_each_error_is_there_before_it_happens() -> None:
    """``rate`` does not see the event with which a series begins."""
    registry = metrics().registry
    errors = list(RequestError.__subclasses__())
    assert {400, 401, 404, 413, 429, 499, 500, 503, 504} <= {error.status for error in errors}
    for status in (200, *(error.status for error in errors)):
        labels = {"model": MODEL, "code": str(status)}
        for endpoint, stream in product(("chat", "completions"), ("true", "false")):
            asked = {"endpoint": endpoint, "stream": stream, "error_type": error_type(status)}
            assert registry.get_sample_value("baton_requests_total", {**labels, **asked}) == 0
        for series in ("count", "sum"):
            name = f"baton_request_duration_seconds_{series}"
            assert registry.get_sample_value(name, labels) == 0, status


def test_objectives_and_their_borders() -> None:
    ledger = Ledger(Objectives(1.7, 0.033))
    registry = metrics(ledger).registry
    for slo, seconds in (("ttft", 1.7), ("tpot", 0.033)):
        labels = {"model": MODEL, "slo": slo}
        assert registry.get_sample_value("baton_slo_objective_seconds", labels) == seconds
    for name, labels in (
        ("baton_time_to_first_token_seconds", {"stream": "true", "le": "1.7"}),
        ("baton_time_per_output_token_seconds", {"le": "0.033"}),
        ("baton_inter_token_latency_seconds", {"le": "0.033"}),
    ):
        assert registry.get_sample_value(f"{name}_bucket", {"model": MODEL, **labels}) == 0.0


def test_the_wanted_replicas_come_from_the_configuration() -> None:
    registry = metrics(replicas=(("prefill", 2), ("decode", 3))).registry
    for role, number in (("prefill", 2), ("decode", 3), ("mixed", 0), ("router", 1)):
        labels = {"model": MODEL, "role": role, "kind": "target"}
        assert registry.get_sample_value("baton_autoscale_replicas", labels) == number


def test_the_wanted_routers_are_said_and_may_change() -> None:
    made = metrics(routers=3)
    labels = {"model": MODEL, "role": "router", "kind": "target"}
    assert made.registry.get_sample_value("baton_autoscale_replicas", labels) == 3
    made._dispatcher.wanted_routers = 2
    assert made.registry.get_sample_value("baton_autoscale_replicas", labels) == 2


def test_what_is_decided_of_pools_is_said_at_once() -> None:
    made = metrics(replicas=(("prefill", 1), ("decode", 2)))

    def value(name: str, **labels: str) -> float | None:
        return made.registry.get_sample_value(name, {"model": MODEL, **labels})

    up = {"role": "prefill", "direction": "up", "reason": "backlog"}
    died = {"role": "decode", "reason": "died"}
    assert value("baton_autoscale_decisions_total", **up) == 0  # before it is told of anything
    assert value("baton_worker_start_failures_total", **died) == 0
    assert value("baton_autoscale_replicas", role="prefill", kind="max") == 0
    made._dispatcher.pools = Pools(
        targets={"prefill": 3},
        most={"prefill": 4},
        decisions={("prefill", "up", "backlog"): 2, ("prefill", "up", "new"): 1},
        start_failures={("decode", "died"): 5},
    )
    for role, kind, number in (
        ("prefill", "target", 3), ("decode", "target", 2), ("prefill", "max", 4),
        ("decode", "max", 0),
    ):  # fmt: skip
        assert value("baton_autoscale_replicas", role=role, kind=kind) == number, (role, kind)
    assert value("baton_autoscale_decisions_total", **up) == 2
    assert value("baton_autoscale_decisions_total", **up | {"reason": "new"}) == 1
    assert value("baton_autoscale_decisions_total", **up | {"role": "decode"}) == 0
    assert value("baton_worker_start_failures_total", **died) == 5


def test_a_router_says_when_it_began() -> None:
    before = time.time()
    registry = metrics().registry
    began = registry.get_sample_value("baton_process_start_time_seconds")
    assert began is not None
    assert before <= began <= time.time()
    assert registry.get_sample_value("baton_process_start_time_seconds") == began


def test_two_routers_of_one_process_do_not_mix() -> None:
    one, other = metrics(), metrics()
    one._ledger.generated_tokens += 5
    labels = {"model": MODEL}
    assert one.registry.get_sample_value("baton_generated_tokens_total", labels) == 5
    assert other.registry.get_sample_value("baton_generated_tokens_total", labels) == 0


@pytest.mark.parametrize("field", ["slo_ttft_s", "slo_tpot_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_objectives_are_numbers_above_zero(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"router.{field}"):
        RouterConfig(**{field: value})


def test_a_scrape_needs_no_event_loop() -> None:
    """It comes in a thread of its own while the loop is busy."""
    made = metrics()

    async def scenario() -> bytes:
        return await asyncio.to_thread(generate_latest, made.registry)

    assert asyncio.run(scenario()).startswith(b"# HELP baton_requests_total")
