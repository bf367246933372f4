"""A receiver of traces as OTLP over HTTP has them, on a port of its own."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass(frozen=True)
class Received:
    """A span, and which process it is from."""

    service: str
    instance: str
    span: Span

    @property
    def attributes(self) -> dict[str, Any]:
        return {pair.key: _value(pair.value) for pair in self.span.attributes}


@dataclass
class Receiver:
    """What has come. ``status``: the answer to all that comes."""

    url: str = ""
    status: int = 200
    num_posts: int = 0
    headers: list[dict[str, str]] = field(default_factory=list)
    spans: list[Received] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def until(self, num_spans: int, timeout_s: float = 10.0) -> list[Received]:
        """Wait until so many spans are here."""
        end = time.monotonic() + timeout_s
        with self.changed:
            while len(self.spans) < num_spans:
                left = end - time.monotonic()
                names = [received.span.name for received in self.spans]
                assert self.changed.wait(left), f"{len(names)} of {num_spans} spans: {names}"
            return list(self.spans)

    def take(self, path: str, body: bytes, headers: dict[str, str]) -> None:
        assert path == "/v1/traces"
        with self.changed:
            self.num_posts += 1
            self.headers.append(headers)
            if self.status == 200:
                for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                    about = {pair.key: _value(pair.value) for pair in group.resource.attributes}
                    service, instance = about["service.name"], about["service.instance.id"]
                    self.spans += [
                        Received(service, instance, span)
                        for scope in group.scope_spans
                        for span in scope.spans
                    ]
            self.changed.notify_all()


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    inner = getattr(value, kind)
    return tuple(map(_value, inner.values)) if kind == "array_value" else inner


@contextlib.contextmanager
def otlp_receiver(status: int = 200) -> Iterator[Receiver]:
    """Listen until the block ends."""
    receiver = Receiver(status=status)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            receiver.take(self.path, body, dict(self.headers))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(receiver.status)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()
