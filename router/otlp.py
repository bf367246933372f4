"""Hands spans to OpenTelemetry, which sends them to an OTLP/HTTP receiver from a thread of its own.

The only file that imports opentelemetry, and itself imported only where tracing is on. Nothing here
waits for the receiver or raises into a request's path: what cannot be sent is dropped, after some
tries, and the exporter's logger says so.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from router.observation import WRONG_REQUESTS, Observation
from router.request_spans import answered, asked, parts_of, seen_of, span_name
from router.tracing import Span
from router.version import version

if TYPE_CHECKING:
    from router.completion import Reply
    from router.openai_api import GenerationFields

MAX_QUEUE = 4096  # spans that wait to be sent; the oldest of more are dropped
BATCH = 128  # spans of one message: encoding holds the interpreter for some milliseconds
DELAY_S = 1.0  # spans are sent at the latest after so long
TIMEOUT_S = 5.0  # of one message, tries included
PATIENCE_S = 2.0  # at the end, for the last spans

NO_FAULT = frozenset({"aborted", "cancelled", *WRONG_REQUESTS})
"""Errors that are the client's doing; their spans have the type, but not the status of an error."""

log = logging.getLogger(__name__)

_W3C = TraceContextTextMapPropagator()


class Trace:
    """The span of a request that is under way. ``parent`` is its traceparent, for what belongs to
    it in other processes.
    """

    def __init__(self, tracing: Tracing, span: trace.Span) -> None:
        carrier: dict[str, str] = {}
        self._tracing = tracing
        self._span = span
        self._reply: Reply | None = None
        self._context = trace.set_span_in_context(span, Context())
        _W3C.inject(carrier, self._context)
        self.parent = carrier["traceparent"]

    def answering(self, request: GenerationFields, reply: Reply) -> None:
        """The request is understood, and this will be the answer."""
        self._reply = reply
        self._span.set_attributes(asked(request, reply.id))

    def end(self, seen: Observation) -> None:
        """The request is over."""
        assert seen.ended_at is not None
        try:
            for part in parts_of(seen):
                self._tracing.make(part, self._context)
            self._span.set_attributes(seen_of(seen))
            if self._reply is not None:
                self._span.set_attributes(answered(choice.finish for choice in self._reply.choices))
            _end(self._span, seen.origin + seen.ended_at, seen.error_type)
        except Exception:  # a request never fails for a span's sake
            log.exception("a request's span is lost")


class Tracing:
    """The spans of one process. All methods are thread-safe."""

    def __init__(
        self,
        processor: SpanProcessor,
        exporter: SpanExporter,
        role: str,
        instance: str,
        ratio: float = 1.0,
    ) -> None:
        self._processor = processor
        self._exporter = exporter
        resource = Resource(
            {
                "service.name": f"baton-{role}",
                "service.instance.id": instance,
                "service.version": version(),
            }
        )
        sampler = ParentBased(TraceIdRatioBased(ratio))
        provider = TracerProvider(sampler, resource, shutdown_on_exit=False)
        provider.add_span_processor(processor)
        self._tracer = provider.get_tracer("baton", version())

    def begin(self, endpoint: str, model: str, headers: Mapping[str, str]) -> Trace | None:
        """The span of a request that has come, below the one that its headers tell of, if they do.

        None when this one is not recorded: its client, or else the ratio, has decided so.
        """
        try:
            told = {k: headers[k] for k in ("traceparent", "tracestate") if k in headers}
            context = _W3C.extract(told, Context())
            span = self._tracer.start_span(span_name(endpoint, model), context, SpanKind.SERVER)
            return Trace(self, span) if span.is_recording() else None
        except Exception:  # a request never fails for a span's sake
            log.exception("a request is not traced")
            return None

    def record(self, parent: str, span: Span) -> None:
        """A span that is over, below the one of another process: its traceparent."""
        try:
            self.make(span, _W3C.extract({"traceparent": parent}, Context()))
        except Exception:  # the engine's thread goes on
            log.exception("a span is lost")

    def make(self, part: Span, context: Context) -> None:
        """A span that is over, in the context of its parent."""
        offset = _clock_offset_ns()
        span = self._tracer.start_span(
            part.name,
            context,
            attributes=dict(part.attributes),
            start_time=offset + _ns(part.start),
        )
        for event in part.events:
            span.add_event(event.name, dict(event.attributes), offset + _ns(event.at))
        _end(span, part.end, part.error)

    def close(self) -> None:
        """Send what waits, for two seconds at most. Blocks; may be called again."""
        ending = threading.Thread(target=self._processor.shutdown, name="last spans", daemon=True)
        ending.start()
        ending.join(PATIENCE_S)
        if ending.is_alive():
            self._exporter.shutdown()  # it waits between two tries: no more of that


def export_to(url: str, role: str, instance: str, ratio: float) -> Tracing:
    """Spans that are posted to ``url``."""
    exporter = OTLPSpanExporter(url, timeout=TIMEOUT_S, compression=Compression.NoCompression)
    processor = BatchSpanProcessor(
        exporter, MAX_QUEUE, DELAY_S * 1000, BATCH, export_timeout_millis=TIMEOUT_S * 1000
    )
    return Tracing(processor, exporter, role, instance, ratio)


def _end(span: trace.Span, at: float, error: str) -> None:
    if error:
        span.set_attribute("error.type", error)
        if error not in NO_FAULT:
            span.set_status(StatusCode.ERROR, error)
    span.end(_clock_offset_ns() + _ns(at))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _clock_offset_ns() -> int:
    """From ``time.monotonic`` to the time of day. The closest of three readings: a thread may be
    stopped between two clocks.
    """
    readings = []
    for _ in range(3):
        before, day, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        readings.append((after - before, day - (before + after) // 2))
    return min(readings)[1]
