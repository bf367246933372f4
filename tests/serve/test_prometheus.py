"""Prometheus against the real system: every query of boards and rules has an answer, counts are
exact, and who is gone is gone.

Against ``baton local``; with ``--full`` against ``baton serve`` too, whose worker processes are
killed. The names of B109 are checked here where they matter: in what a running system exports.
"""

import contextlib
import http.client
import json
import os
import re
import signal
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit

import pytest

from router.vllm_names import ALIASES, PREFIX
from tests.support.local_server import LocalServer, local_server
from tests.support.prometheus import Prometheus, need, prometheus, scrape
from tests.support.promql import Asked, board_queries, operands, recorded, rule_queries, used
from tests.support.serving import Client, served, until

# Objectives that this machine meets while it runs tests besides: no alert may come of it.
FLAGS = (
    "--max-model-len", "512", "--kv-blocks", "160", "--decode", "2", "--token-budget", "64",
    "--slo-ttft-s", "60", "--slo-tpot-s", "10", "--metrics-compat", "vllm",
)  # fmt: skip
WINDOW = "10m"  # for Grafana's variables
LONG = [*range(100, 300)]
ALERTS = {query.where for query in rule_queries()} - recorded()
LATE_S = 30  # for Prometheus to have seen something
WORKERS, ROUTERS = 3, 1


@dataclass
class Watched:
    """A deployment, the Prometheus that watches it, and what its client has asked for."""

    client: Client
    prometheus: Prometheus
    sent: int = 0

    def instances(self, role: str) -> set[str]:
        """Ids of the processes that answer scrapes, by Prometheus's account."""
        series = self.prometheus.query(f'up{{role="{role}"}} == 1')
        return {one["metric"]["instance"] for one in series}


def complete(client: Client, prompt: list[int], num_tokens: int, **options: Any) -> None:
    client.complete_ids(prompt, num_tokens, **options)


def stream(client: Client, num_tokens: int) -> None:
    body = {
        "prompt": LONG, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0,
        "return_token_ids": True,
    }  # fmt: skip
    chunks = client.stream("/v1/completions", body)
    ids = [chunk["choices"][0].get("token_ids") or [] for chunk in chunks]
    assert sum(map(len, ids)) == num_tokens


def leave(client: Client) -> None:
    """Begin to read an answer, and go."""
    address = urlsplit(client.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    body = {"prompt": LONG, "max_tokens": 200, "ignore_eos": True, "stream": True}
    headers = {"Content-Type": "application/json"}
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        assert answer.status == 200
        assert answer.readline().startswith(b"data: ")


def ask_wrongly(client: Client) -> None:
    for body, status in (({"prompt": LONG, "max_tokens": -1}, 400), ({"model": "none"}, 404)):
        with pytest.raises(HTTPError) as caught:
            client.post("/v1/completions", body)
        with caught.value as error:
            assert error.code == status


def drive(watched: Watched) -> None:
    """Requests of every kind, some of them at once."""
    client = watched.client
    calls = [lambda n=n: complete(client, LONG[:n], 8) for n in (20, 200, 150, 199)]
    calls += [lambda: stream(client, 12) for _ in range(4)]
    calls += [lambda: complete(client, LONG, 1)]
    client.at_once(calls)  # type: ignore[arg-type]
    leave(client)
    ask_wrongly(client)
    watched.sent += len(calls) + 3


@contextlib.contextmanager
def deployment(full: bool) -> Iterator[Client]:
    if full:
        with served(*FLAGS) as server:
            yield server
    else:
        with local_server(FLAGS) as local:
            yield local


@pytest.fixture(scope="module")
def watched(full: bool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """Watched from before the first request on, and idle again after the last."""
    need("prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    with deployment(full) as client, prometheus(client.url, folder) as server:
        watched = Watched(client, server)
        everybody = WORKERS + ROUTERS
        until(lambda: len(server.numbers("up == 1")) == everybody, "all are scraped", LATE_S)
        until(lambda: server.query("baton:slo_burn:rate5m"), "rules are evaluated", LATE_S)
        drive(watched)
        client.idle_workers()
        until(lambda: seen(watched) == watched.sent, "Prometheus saw all requests", LATE_S)
        # Another scrape, and rules that know of it.
        at = server.value("max(timestamp(up))")
        until(lambda: server.value("min(timestamp(up))") > at + 1, "another scrape", LATE_S)
        yield watched


def seen(watched: Watched) -> float:
    return watched.prometheus.value("sum(baton_requests_total)")


# --- names (B109) --------------------------------------------------------------------------------


def exported(server: Prometheus) -> dict[str, set[str]]:
    """Names of labels by name of series, of all that was scraped."""
    found: dict[str, set[str]] = defaultdict(set)
    for series in server.get("series", **{"match[]": '{job="baton"}'}):
        found[series.pop("__name__")] |= series.keys()
    return found


def asked() -> list[Asked]:
    return board_queries(WINDOW) + rule_queries()


def test_every_metric_and_label_of_boards_and_rules_is_exported(watched: Watched) -> None:
    """B109: of what is named nothing is missing; what nobody asks for is listed."""
    known, made = exported(watched.prometheus), recorded()
    uses = {(query.where, use) for query in asked() for use in used(query.expr)}
    wrong = [
        f"{where}: {use.name}{sorted(use.labels)}"
        for where, use in uses
        if use.name not in made and not (use.name in known and use.labels <= known[use.name])
    ]
    assert not wrong
    ours = {family(name) for name in known if name.startswith("baton_")}
    unused = sorted(ours - {family(use.name) for _, use in uses})
    print(f"\nexported, but on no board and in no rule: {', '.join(unused) or 'none'}")


def family(series: str) -> str:
    """Of a histogram, its name; else the series' own."""
    return re.sub("_(bucket|sum|count)$", "", series)


def test_vllms_names_have_the_values_of_ours(watched: Watched) -> None:
    known = exported(watched.prometheus)
    for alias in ALIASES:
        ours, theirs = (
            {name for name in known if re.fullmatch(f"{family}(_total|_bucket)?", name)}
            for family in (alias.ours, PREFIX + alias.theirs)
        )
        assert ours, alias
        assert theirs, alias
        assert {"model_name", "engine"} <= known[theirs.pop()]
    for theirs, ours in (
        ("generation_tokens_total", "baton_generated_tokens_total"),
        ("time_to_first_token_seconds_sum", "baton_time_to_first_token_seconds_sum"),
        ("nixl_bytes_transferred_sum", "baton_kv_transfer_bytes_sum"),
    ):
        value = watched.prometheus.value(f"sum({PREFIX}{theirs})")
        assert value > 0, theirs
        assert value == pytest.approx(watched.prometheus.value(f"sum({ours})")), theirs


def test_every_query_of_boards_and_rules_returns_data(watched: Watched) -> None:
    """B109. Of an alert, each side of its comparisons: an alert that is silent returns nothing."""
    silent = [
        f"{query.where}: {part}"
        for query in asked()
        for part in (operands(query.expr) if query.where in ALERTS else [query.expr])
        if not watched.prometheus.numbers(part)
    ]
    assert not silent, "\n".join(silent)


# --- numbers -------------------------------------------------------------------------------------


def test_requests_are_counted_once_by_what_became_of_them(watched: Watched) -> None:
    outcomes = {
        (one["metric"]["code"], one["metric"].get("error_type", "")): float(one["value"][1])
        for one in watched.prometheus.query("sum by (code, error_type) (baton_requests_total) > 0")
    }
    assert outcomes == {
        ("200", ""): watched.sent - 3,
        ("499", "cancelled"): 1,
        ("400", "validation"): 1,
        ("404", "not_found"): 1,
    }


def test_an_idle_system_shows_zeros_and_fires_no_alert(watched: Watched) -> None:
    zero = (
        "sum(baton_requests_in_flight)", "sum(baton_requests_queued)", "sum(baton_engine_requests)",
        'sum(baton_kv_blocks{state=~"active|leased|quarantined"})', "sum(baton_kv_leases)",
        "sum(baton_kv_transfer_in_flight)", "sum(baton_kv_cache_usage_ratio)",
    )  # fmt: skip
    for expr in zero:
        assert watched.prometheus.value(expr) == 0, expr
    names = {rule["name"] for rule in rules(watched.prometheus, "alert")}
    assert "BatonBudgetBurnsFast" in names
    firing = [one for one in watched.prometheus.alerts() if one["state"] == "firing"]
    assert not firing


def test_all_rules_are_healthy(watched: Watched) -> None:
    for kind in ("alert", "record"):
        assert all(rule["health"] == "ok" for rule in rules(watched.prometheus, kind))


def rules(server: Prometheus, kind: str) -> list[dict[str, Any]]:
    groups = server.get("rules", type=kind)["groups"]
    return [rule for group in groups for rule in group["rules"]]


# --- processes (B108) ----------------------------------------------------------------------------


def test_every_process_answers_all_at_once(watched: Watched) -> None:
    """B108: a page of each, also while others ask, and a router's on the API's port as well."""
    status, groups = watched.client.get("/internal/prometheus/targets")
    assert status == 200
    addresses = [address for group in groups for address in group["targets"]]
    assert len(set(addresses)) == WORKERS + ROUTERS
    pages = [f"http://{address}/metrics" for address in addresses]
    pages += [f"{watched.client.url}/metrics"]
    texts = watched.client.at_once([lambda url=url: scrape(url) for url in pages * 4])  # type: ignore[misc]
    assert all("baton_event_loop_lag_seconds_count" in text for text in texts)


def test_a_worker_that_is_gone_takes_its_series_with_it(watched: Watched, full: bool) -> None:
    """B108; last in this file. Its counters begin anew under another name, so no rate falls."""
    server, client = watched.prometheus, watched.client
    gone = sorted(watched.instances("decode"))[0]
    end(client, gone)
    until(lambda: gone not in server.targets(), "it is no target any more", LATE_S)
    if full:
        until(lambda: len(watched.instances("decode")) == 2, "there is another one", 120)
    assert gone not in watched.instances("decode")
    for name in ("baton_kv_blocks", "baton_engine_steps_total", "up"):
        until(lambda name=name: not server.query(f'{name}{{instance="{gone}"}}'), name, LATE_S)  # type: ignore[misc]
        assert server.query(f'{name}{{role="decode"}}')
    assert all(rate >= 0 for rate in server.numbers("rate(baton_engine_steps_total[1m])"))
    assert client.get("/ready")[0] == 200


def end(client: Client, worker_id: str) -> None:
    """Kill the process of a worker; in one process, let it leave."""
    if isinstance(client, LocalServer):
        (worker,) = [w for w in client.graph.workers if w.settings.worker_id == worker_id]
        client.graph.workers[0]._asyncio.call_soon_threadsafe(worker.leave, 0)
        return
    (found,) = [w for w in client.workers() if w["id"] == worker_id]
    os.kill(found["pid"], signal.SIGKILL)
