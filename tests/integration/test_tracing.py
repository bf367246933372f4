"""One trace over router and workers: what the router sends on, and what arrives at a receiver."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from router import otlp, wire
from router.link import Link
from router.otlp import Tracing
from tests.faults.rig import HttpClient, completion_body, model_folder, rig
from tests.integration.deployed import Deployment, deployed, run
from tests.support.otlp_receiver import Received, otlp_receiver

CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{CLIENT[0]}-{CLIENT[1]}-01"}
NOT_SAMPLED = {"traceparent": f"00-{CLIENT[0]}-{CLIENT[1]}-00"}
ASKED = {"prompt": "hello", "max_tokens": 4, "ignore_eos": True, "seed": 7}
ANY = "http://127.0.0.1:1"  # nobody asks there: the exporter is replaced


class Spans:
    """What a router has recorded."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()

    @property
    def all(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())

    def one(self, name: str) -> ReadableSpan:
        (span,) = [span for span in self.all if span.name == name]
        return span

    async def root(self, name: str = "text_completion tiny") -> ReadableSpan:
        """A request's own span, which comes last: the response may be here before it."""
        async with asyncio.timeout(5):
            while not [span for span in self.all if span.name == name]:
                await asyncio.sleep(0.001)
        return self.one(name)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Spans:
    """Routers and workers of this process record here, whatever their endpoint."""
    found = Spans()

    def export_to(url: str, role: str, instance: str, ratio: float) -> Tracing:
        processor = SimpleSpanProcessor(found.exporter)
        return Tracing(processor, found.exporter, role, instance, ratio)

    monkeypatch.setattr(otlp, "export_to", export_to)
    return found


def traces(at: Deployment) -> dict[str, set[str]]:
    """The traceparents that workers were told, by message."""
    found: dict[str, set[str]] = {}
    for worker in at.workers:
        for message in worker.seen:
            if isinstance(message, (wire.Reserve, wire.Prefill, wire.Decode)):
                found.setdefault(type(message).__name__, set()).add(message.trace)
    return found


def hex_ids(span: ReadableSpan) -> tuple[str, str]:
    assert span.context is not None
    return f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}"


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_a_client_s_trace_goes_on_in_the_router_and_the_workers(spans: Spans) -> None:
    async def scenario() -> None:
        async with deployed(tracing_endpoint=ANY) as at:
            answer = await at.post("/v1/completions", ASKED, headers=SAMPLED)
            assert answer.status_code == 200
            root = await spans.root()
            assert root.kind is SpanKind.SERVER
            assert root.parent is not None
            assert (hex_ids(root)[0], f"{root.parent.span_id:016x}") == CLIENT
            told = {f"00-{CLIENT[0]}-{hex_ids(root)[1]}-01"}
            assert traces(at) == {"Reserve": told, "Prefill": told, "Decode": told}
            about = attributes(root)
            assert about["gen_ai.response.id"] == answer.json()["id"]
            assert about["gen_ai.usage.input_tokens"] == 5
            assert about["gen_ai.usage.output_tokens"] == 4
            assert about["gen_ai.response.finish_reasons"] == ("length",)
            assert about["gen_ai.request.seed"] == 7
            assert about["http.response.status_code"] == 200
            assert "hello" not in str(about)
            for name in ("tokenize", "queue", "attempt"):
                part = spans.one(name)
                assert hex_ids(part)[0] == CLIENT[0]
                assert part.parent == root.context
                assert_within(part, root)
            attempt = attributes(spans.one("attempt"))
            assert (attempt["baton.prefill"], attempt["baton.decode"]) == ("P0", "D0")
            assert len(spans.all) == 4

    run(scenario)


def assert_within(part: ReadableSpan, whole: ReadableSpan, slack_ms: float = 1.0) -> None:
    assert part.start_time
    assert part.end_time
    assert whole.start_time
    assert whole.end_time
    slack = int(slack_ms * 1e6)  # two clocks, read one after the other
    assert whole.start_time - slack <= part.start_time <= part.end_time <= whole.end_time + slack


def test_a_trace_begins_here_when_the_client_has_none(spans: Spans) -> None:
    async def scenario() -> None:
        async with deployed(tracing_endpoint=ANY) as at:
            await at.events(
                "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}
            )
            root = await spans.root("chat tiny")
            assert root.parent is None
            assert attributes(root)["gen_ai.request.stream"] is True
            assert attributes(root)["gen_ai.response.finish_reasons"] == ("stop",)
            assert attributes(root)["gen_ai.response.time_to_first_chunk"] > 0
            trace_id, span_id = hex_ids(root)
            (told,) = set.union(*traces(at).values())
            assert told.startswith(f"00-{trace_id}-{span_id}-")

    run(scenario)


@pytest.mark.parametrize(
    ("endpoint", "headers"),
    [("", SAMPLED), (ANY, NOT_SAMPLED)],
    ids=["tracing is off", "the client does not want it"],
)
def test_no_spans(spans: Spans, endpoint: str, headers: dict[str, str]) -> None:
    async def scenario() -> None:
        async with deployed(tracing_endpoint=endpoint) as at:
            assert (await at.post("/v1/completions", ASKED, headers=headers)).status_code == 200
            assert set.union(*traces(at).values()) == {""}
        assert spans.all == []

    run(scenario)


def test_a_header_that_is_none_begins_another_trace(spans: Spans) -> None:
    wrong = "", "00-0-0-01", f"ff-{CLIENT[0]}-{CLIENT[1]}-01", f"00-{'0' * 32}-x-01", "x" * 999

    async def scenario() -> None:
        async with deployed(tracing_endpoint=ANY) as at:
            for header in wrong:
                answer = await at.post("/v1/completions", ASKED, headers={"traceparent": header})
                assert answer.status_code == 200
                assert (await spans.root()).parent is None
                spans.exporter.clear()

    run(scenario)


def test_a_lost_attempt_is_in_the_trace(spans: Spans) -> None:
    async def scenario() -> None:
        async with deployed(roles="PPD", tracing_endpoint=ANY) as at:
            once = iter([True])

            def dies_once(link: Link, message: wire.Message) -> bool:
                if not isinstance(message, wire.Prefill) or not next(once, False):
                    return False
                link._abort("killed")
                return True

            at.workers[0].hook = at.workers[1].hook = dies_once
            assert (await at.post("/v1/completions", ASKED)).status_code == 200
            root = await spans.root()
            attempts = [span for span in spans.all if span.name == "attempt"]
            assert [span.status.status_code for span in attempts] == [
                StatusCode.ERROR,
                StatusCode.UNSET,
            ]
            assert attributes(attempts[0])["error.type"] == "prefill lost"
            assert [attributes(span)["baton.attempt"] for span in attempts] == [1, 2]
            assert root.status.status_code is StatusCode.UNSET
            assert attributes(root)["baton.retries"] == 1

    run(scenario)


def test_wrong_requests_and_clients_that_leave_are_no_errors_of_ours(spans: Spans) -> None:
    async def scenario() -> None:
        wrong = [(400, "validation", {"n": 0}), (413, "too_large", {"user": "x" * 4000})]
        async with deployed(tracing_endpoint=ANY, max_body_bytes=3000) as at:
            for status, kind, fields in wrong:
                answer = await at.post("/v1/completions", {"prompt": "x", **fields})
                assert answer.status_code == status
                root = await spans.root()
                assert attributes(root)["error.type"] == kind
                assert root.status.status_code is StatusCode.UNSET
                spans.exporter.clear()
            at.d.gate = asyncio.Event()  # nothing after the first token
            async with at.http.stream(
                "POST", "/v1/completions", json=ASKED | {"stream": True}
            ) as s:
                async for _ in s.aiter_bytes():
                    break
            root = await spans.root()
            assert attributes(root)["error.type"] == "cancelled"
            assert attributes(root)["http.response.status_code"] == 499
            assert root.status.status_code is StatusCode.UNSET
            await at.idle()

    run(scenario)


def test_a_refusal_of_ours_is_an_error(spans: Spans) -> None:
    async def scenario() -> None:
        async with deployed(tracing_endpoint=ANY) as at:
            for worker in at.workers:
                worker.registered = False
                worker.die()
            async with asyncio.timeout(10):
                while at.dispatcher.ready:
                    await asyncio.sleep(0.01)
            assert (await at.post("/v1/completions", ASKED)).status_code == 503
            root = await spans.root()
            assert attributes(root)["error.type"] == "unavailable"
            assert root.status.status_code is StatusCode.ERROR

    run(scenario)


# --- over the wire, from real workers ------------------------------------------------------------


def test_one_trace_over_all_processes(tmp_path: Path) -> None:
    prompt = [1 + i % 250 for i in range(100)]  # several steps, so that parts go early

    async def scenario() -> None:
        with otlp_receiver() as receiver:
            async with rig(
                model_folder(tmp_path), "memory", tracing_endpoint=receiver.url
            ) as deployment:
                headers = b"traceparent: %s\r\n" % SAMPLED["traceparent"].encode()
                client = await HttpClient.post(deployment.port, completion_body(prompt, 6), headers)
                status, _ = await client.answer()
                assert status == 200
                received = await asyncio.to_thread(receiver.until, 8)
            assert receiver.num_posts >= 3  # one process each
        check_whole_trace(received)

    run(scenario)


def check_whole_trace(received: list[Received]) -> None:
    """The spans of a request, of 100 prompt and 6 answer tokens, over three processes."""
    by_name = {item.span.name: item for item in received}
    assert {(item.service, item.span.name) for item in received} == {
        ("baton-router", "text_completion model"),
        ("baton-router", "tokenize"),
        ("baton-router", "queue"),
        ("baton-router", "attempt"),
        ("baton-prefill", "prefill.queue"),
        ("baton-prefill", "prefill"),
        ("baton-decode", "kv_transfer"),
        ("baton-decode", "decode"),
    }
    assert {item.span.trace_id.hex() for item in received} == {CLIENT[0]}
    root = by_name["text_completion model"].span
    assert root.parent_span_id.hex() == CLIENT[1]
    others = [item.span for item in received if item.span is not root]
    assert {span.parent_span_id for span in others} == {root.span_id}
    slack = 2_000_000  # one machine, one clock, read at different moments [ns]
    for span in others:
        assert root.start_time_unix_nano - slack <= span.start_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano + slack
    prefill, transfer, decode = (by_name[n] for n in ("prefill", "kv_transfer", "decode"))
    assert transfer.span.start_time_unix_nano < prefill.span.end_time_unix_nano  # an early part
    assert transfer.span.end_time_unix_nano <= decode.span.start_time_unix_nano + slack
    assert prefill.attributes["baton.worker.id"] == prefill.instance
    assert decode.attributes["baton.tokens"] == 5  # and one by the prefill worker
    assert transfer.attributes["baton.kv.blocks"] == 7  # of 16 tokens, for 100
    assert transfer.attributes["baton.kv.bytes"] > 0
    about = by_name["text_completion model"].attributes
    assert about["gen_ai.usage.input_tokens"] == 100
    assert about["gen_ai.usage.output_tokens"] == 6


# --- receivers that are no good ------------------------------------------------------------------


@pytest.fixture
def deaf() -> Iterator[str]:
    """An endpoint where connections are taken, and nothing is ever read or said."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def closed() -> str:
    """An endpoint where nobody listens."""
    return ANY


@pytest.fixture
def failing() -> Iterator[str]:
    """An endpoint that answers 500 to all."""
    with otlp_receiver(status=500) as receiver:
        yield receiver.url


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that takes seconds takes less."""
    monkeypatch.setattr(otlp, "DELAY_S", 0.05)
    monkeypatch.setattr(otlp, "TIMEOUT_S", 3.0)
    monkeypatch.setattr(otlp, "PATIENCE_S", 0.2)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("kind", ["deaf", "closed", "failing"])
def test_a_bad_endpoint_disturbs_no_request(
    kind: str, request: pytest.FixtureRequest, full: bool
) -> None:
    if kind == "failing" and not full:
        pytest.skip("the others disturb more")
    endpoint: str = request.getfixturevalue(kind)

    async def scenario() -> None:
        async with deployed(tracing_endpoint=endpoint) as at:
            took = []
            for _ in range(20):  # while batches are being tried
                sent = time.monotonic()
                assert (await at.post("/v1/completions", ASKED)).status_code == 200
                took.append(time.monotonic() - sent)
                await asyncio.sleep(otlp.DELAY_S / 5)
            # One that waited for the receiver would wait for seconds.
            assert max(took) < otlp.TIMEOUT_S / 2
            leaving = time.monotonic()
        assert time.monotonic() - leaving < otlp.TIMEOUT_S

    run(scenario)


@pytest.mark.usefixtures("hurried")
def test_more_spans_than_can_wait_are_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, deaf: str
) -> None:
    monkeypatch.setattr(otlp, "MAX_QUEUE", 2 * otlp.BATCH)
    tracing = otlp.export_to(f"{deaf}/v1/traces", "router", "R", 1.0)
    parent = SAMPLED["traceparent"]
    now = time.monotonic()
    for _ in range(5 * otlp.BATCH):
        tracing.record(parent, otlp.Span("x", now, now))
    assert "Queue full" in caplog.text
    tracing.close()
    assert time.monotonic() - now < otlp.TIMEOUT_S  # nobody waited for the receiver


def test_what_cannot_be_recorded_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(SimpleSpanProcessor(exporter), exporter, "router", "R")
    broken: Callable[..., Any] = tracing.record
    broken(SAMPLED["traceparent"], None)
    assert "a span is lost" in caplog.text
    tracing.close()
    assert exporter.get_finished_spans() == ()
