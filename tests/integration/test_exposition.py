"""The metrics port of a process: over real sockets, and how it ends."""

import os
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families as plain_metrics
from prometheus_client.registry import Collector

from router.exposition import Exposition
from tests.support.prometheus import scrape
from tests.support.promql import ROOT

HOST = "127.0.0.1"
PROMETHEUS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("eaten", "Cakes", ["kind"], registry=registry).labels("lemon").inc(3)
    Gauge("left", "Cakes", registry=registry).set(2)
    Gauge("vllm:left", "Cakes", registry=registry).set(2)
    return registry


@pytest.fixture
def page(registry: CollectorRegistry) -> Iterator[Exposition]:
    page = Exposition(registry, HOST)
    yield page
    page.close()


def url(page: Exposition, path: str = "/metrics") -> str:
    return f"http://{page.host}:{page.port}{path}"


@pytest.mark.parametrize("accept", ["text/plain", PROMETHEUS, "*/*"])
def test_any_free_port_answers_in_plain_text(page: Exposition, accept: str) -> None:
    families = {family.name: family for family in plain_metrics(scrape(url(page), accept))}
    assert [(s.name, s.labels, s.value) for s in families["eaten"].samples] == [
        ("eaten_total", {"kind": "lemon"}, 3)
    ]
    # prometheus_client would write vllm_... for a reader that prefers OpenMetrics
    assert [(s.name, s.value) for s in families["vllm:left"].samples] == [("vllm:left", 2)]


def test_one_may_ask_for_single_names(page: Exposition) -> None:
    assert "eaten" not in scrape(url(page, "/metrics?name[]=left"))


def test_processes_that_share_a_port_number_take_the_next_ones(registry: CollectorRegistry) -> None:
    first = Exposition(registry, HOST)
    pages = [first]
    try:
        pages += [Exposition(registry, HOST, first.port) for _ in range(3)]
        ports = [page.port for page in pages]
        assert len(set(ports)) == 4
        assert all(first.port < port < first.port + 100 for port in ports[1:])
        assert all("left 2.0" in scrape(url(page)) for page in pages)
    finally:
        for page in pages:
            page.close()


def test_the_port_that_was_asked_for_is_taken_when_it_is_free(registry: CollectorRegistry) -> None:
    page = Exposition(registry, HOST)
    page.close()
    again = Exposition(registry, HOST, page.port)
    assert again.port == page.port
    again.close()


@pytest.mark.parametrize("everywhere", ["0.0.0.0", "::"])
def test_on_all_addresses_it_answers_on_each_and_ends(
    registry: CollectorRegistry, everywhere: str
) -> None:
    try:
        page = Exposition(registry, everywhere)
    except OSError:
        pytest.skip("no such addresses here")
    assert page.host == everywhere
    for address in ("127.0.0.1", "127.0.0.2"):
        assert "left 2.0" in scrape(f"http://{address}:{page.port}/metrics")
    page.close()
    with pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{page.port}/metrics", timeout=5)


def test_an_address_of_another_machine_is_an_error(registry: CollectorRegistry) -> None:
    with pytest.raises(OSError, match="assign"):
        Exposition(registry, "192.0.2.1")


def test_after_the_end_nobody_listens_and_no_thread_is_left(registry: CollectorRegistry) -> None:
    before = threading.active_count()
    page = Exposition(registry, HOST)
    scrape(url(page))
    silent = socket.create_connection((page.host, page.port))  # a client that never says a word
    page.close()
    page.close()  # twice is once
    with pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(url(page), timeout=5)
    silent.close()
    threads = [t for t in threading.enumerate() if t.name == "metrics"]
    assert threads == []
    assert threading.active_count() <= before + 1  # the silent client's, which ends by itself


def test_one_reader_does_not_wait_for_another(page: Exposition) -> None:
    with socket.create_connection((page.host, page.port)) as silent:
        silent.sendall(b"GET /metrics")
        assert "left 2.0" in scrape(url(page))


class Broken(Collector):
    def __init__(self) -> None:
        self.works = False

    def collect(self) -> Iterator[Metric]:
        if not self.works:
            raise RuntimeError("no cakes today")
        yield Metric("cakes", "Cakes", "gauge")


def test_a_mistake_in_a_collector_is_an_error_of_that_scrape_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    registry, broken = CollectorRegistry(), Broken()
    registry.register(broken)
    page = Exposition(registry, HOST)
    try:
        with pytest.raises(urllib.error.HTTPError, match="500") as caught:
            scrape(url(page))
        caught.value.close()
        assert "no cakes today" in capsys.readouterr().err
        broken.works = True
        assert "# TYPE cakes gauge" in scrape(url(page))
    finally:
        page.close()


WITHOUT_FILES = """
import urllib.request
from router.api import create_api
from router.config import RouterConfig, RouterSettings
from router.exposition import Exposition
from router.tokenizer import ByteTokenizer

settings = RouterSettings(RouterConfig(), "", "m", "router-1", b"s" * 32)
front = create_api(settings, None, ByteTokenizer()).state.front
page = Exposition(front.collector, "127.0.0.1")
with urllib.request.urlopen(f"http://127.0.0.1:{page.port}/metrics") as answer:
    print(answer.status, b"baton_requests_total" in answer.read())
page.close()
"""


def test_no_file_is_needed_for_it() -> None:
    """B108: neither a temporary folder nor the one in which prometheus_client may keep counters."""
    nowhere = {"TMPDIR": "/nonexistent", "PROMETHEUS_MULTIPROC_DIR": "/nonexistent"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_FILES],
        env={**os.environ, **nowhere}, cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.split() == ["200", "True"], done.stderr


def test_it_listens_on_ipv6(registry: CollectorRegistry) -> None:
    if not socket.has_ipv6:
        pytest.skip("needs IPv6")
    try:
        page = Exposition(registry, "::1")
    except OSError as error:
        pytest.skip(f"needs IPv6 on loopback: {error}")
    assert "left 2.0" in scrape(f"http://[::1]:{page.port}/metrics")
    page.close()
