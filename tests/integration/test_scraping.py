"""``/metrics`` and ``/internal/prometheus/targets``: who may ask, and what they are told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from router import wire
from router.api import create_api
from router.config import RouterConfig, RouterSettings
from router.scraping import Target, Targets, no_targets, worker_targets
from router.tokenizer import ByteTokenizer
from tests.integration.deployed import deployed, run
from tests.integration.fake_worker import MODEL, SECRET

METRICS, TARGETS = "/metrics", "/internal/prometheus/targets"
KEY = {"Authorization": "Bearer k1"}


def ask(
    path: str,
    headers: dict[str, str] | None = None,
    targets: Targets = no_targets,
    compat: str = "",
    **config: Any,
) -> httpx2.Response:
    """One GET to a router that has not been started."""

    async def discover() -> list[wire.WorkerCard]:
        return []

    async def scenario() -> httpx2.Response:
        settings = RouterSettings(
            RouterConfig(**config), "", MODEL, "router-1", SECRET, metrics_compat=compat
        )
        app = create_api(settings, discover, ByteTokenizer(), targets)
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://router") as http:
            return await http.get(path, headers=headers)

    return asyncio.run(scenario())


def names(page: str) -> set[str]:
    return {family.name for family in text_string_to_metric_families(page)}


def test_a_router_shows_its_metrics_on_its_port_and_on_the_apis() -> None:
    async def scenario() -> None:
        async with deployed() as system:
            front = system.front
            assert front.target is not None
            assert front.target.role == "router"
            page = await system.http.get(METRICS)
            assert page.status_code == 200
            assert page.headers["content-type"].startswith("text/plain; version=")
            async with httpx2.AsyncClient() as other:
                own = await other.get(f"http://{front.target.address()}/metrics")
            assert names(page.text) == names(own.text) >= {"baton_requests", "baton_workers"}
        assert front.target is None

    run(scenario)


def test_metrics_need_no_key_but_where_workers_are_does() -> None:
    assert ask(METRICS, api_keys=("k1",)).status_code == 200
    assert ask(TARGETS, api_keys=("k1",)).status_code == 401
    assert ask(TARGETS, KEY, api_keys=("k1",)).status_code == 200


def test_metrics_may_be_kept_from_the_apis_port() -> None:
    for keys in ((), ("k1",)):
        answer = ask(METRICS, metrics_public=False, api_keys=keys)
        assert answer.status_code == 404
        assert "metrics_public" in answer.json()["error"]["message"]


def test_vllms_names_come_when_they_are_asked_for() -> None:
    assert "vllm:" not in ask(METRICS).text
    page = ask(METRICS, compat="vllm").text
    expected = {
        f"vllm:{name}"
        for name in (
            "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
            "time_to_first_token_seconds", "inter_token_latency_seconds",
            "request_time_per_output_token_seconds", "e2e_request_latency_seconds",
            "prompt_tokens", "prompt_tokens_cached", "generation_tokens", "request_success",
            "admission_rejections", "request_prompt_tokens", "request_generation_tokens",
        )
    }  # fmt: skip
    assert expected == {name for name in names(page) if name.startswith("vllm:")}
    assert 'vllm:num_requests_waiting{engine="router-1",model_name="tiny"} 0.0' in page


def test_targets_are_what_prometheus_reads() -> None:
    worker = wire.WorkerCard(
        worker_id="decode-1", epoch=1, role="decode", model="m", host="10.0.0.2", port=1, pid=2,
        layout={}, agents=(), kv_blocks=8, block_size=16, max_model_len=64, max_num_seqs=4,
        token_budget=32, metrics_port=9000,
    )  # fmt: skip
    silent = replace(worker, worker_id="old", metrics_port=0)

    async def targets() -> Iterable[Target]:
        router = Target("fd00::1", 9001, "router", "router-1", "m")
        return [router, *worker_targets([worker, silent])]

    def labels(role: str) -> dict[str, str]:
        return {
            "__meta_baton_role": role,
            "__meta_baton_replica": f"{role}-1",
            "__meta_baton_model": "m",
        }

    answer = ask(TARGETS, targets=targets)
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == [
        {"targets": ["10.0.0.2:9000"], "labels": labels("decode")},
        {"targets": ["[fd00::1]:9001"], "labels": labels("router")},
    ]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("baton.example:8000", "baton.example:9000"),
        ("192.0.2.7", "192.0.2.7:9000"),
        ("[2001:db8::1]:8000", "[2001:db8::1]:9000"),
        ("[no address", "router:9000"),  # the server's own, as our client's transport has it
    ],
)
@pytest.mark.parametrize("everywhere", ["0.0.0.0", "::"])
def test_who_listens_on_all_addresses_is_named_by_the_one_that_was_asked(
    everywhere: str, asked: str, told: str
) -> None:
    """The reader may be on another host, where 127.0.0.1 is itself."""

    async def targets() -> list[Target]:
        here = Target(everywhere, 9000, "router", "router-1", "m")
        return [here, replace(here, host="10.0.0.2", role="decode")]

    groups = ask(TARGETS, {"host": asked}, targets).json()
    assert [group["targets"] for group in groups] == [["10.0.0.2:9000"], [told]]


def test_a_registry_that_does_not_answer_is_not_an_empty_one() -> None:
    async def targets() -> None:
        return None

    # Prometheus keeps what it knows when it gets an error, and nothing when it gets nothing
    assert ask(TARGETS, targets=targets).status_code == 503
