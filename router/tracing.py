"""Traces of requests: what is recorded, and where it is switched on (pure; OpenTelemetry as an
extra).

::

    chat smollm2-135m-instruct      router: the HTTP request
      tokenize, queue, attempt      router: what it did, and each pair of workers that it tried
      prefill.queue, prefill        prefill worker
      kv_transfer, decode           decode worker

One trace goes over all processes: the router takes a client's ``traceparent``, or begins a trace,
and the workers are told of its span in ``wire.Prefill``, ``Reserve`` and ``Decode``. A span is made
when what it is about is over, from the times that were noted anyway; so nothing is recorded token
by token. Without an endpoint, :func:`open_tracing` gives None and requests carry no trace.
:mod:`router.otlp`, imported only when there is an endpoint, hands the spans to OpenTelemetry.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from router.otlp import Tracing

MISSING = "its packages are not installed; in Baton's folder: pip install '.[tracing]'"

Attribute = str | int | float | bool | tuple[str, ...]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Event:
    """Something that happened within a span, at a time of ``time.monotonic``."""

    name: str
    at: float
    attributes: Mapping[str, Attribute] = field(default_factory=dict)


@dataclass(frozen=True)
class Span:
    """A part of a request that is over. Times are those of ``time.monotonic``, in seconds."""

    name: str
    start: float
    end: float
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    error: str = ""  # why it failed, in a word; "" when it did not
    events: tuple[Event, ...] = ()


def traces_url(endpoint: str) -> str:
    """Where spans are posted: the receiver's ``/v1/traces`` unless the endpoint has a path.

    "" stays "", no tracing. Raises ValueError for what is no HTTP URL.
    """
    if not endpoint:
        return ""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            "must be the URL of an OTLP receiver that speaks HTTP, such as http://127.0.0.1:4318"
        )
    if parts.port == 0:  # asked for, so that a port which is none is refused here
        raise ValueError("port 0 cannot be connected to")
    if parts.path in ("", "/"):
        parts = parts._replace(path="/v1/traces")
    return parts.geturl()


def tracing_installed() -> bool:
    """Whether the packages of the extra ``tracing`` are there. Imports no more than it must."""
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.http.trace_exporter") is not None
    except ModuleNotFoundError:
        return False


def open_tracing(endpoint: str, role: str, instance: str, ratio: float = 1.0) -> Tracing | None:
    """Where the spans of one process go; None for nowhere. To be closed at the end.

    ``ratio``: the share of requests whose trace begins here that are recorded. Whoever starts a
    deployment has checked that the packages are there; where they are missing all the same, on
    another node, that process serves without spans, and says so.
    """
    if not endpoint:
        return None
    if not tracing_installed():
        log.warning("%s records no traces: %s", instance, MISSING)
        return None
    from router.otlp import export_to

    return export_to(traces_url(endpoint), role, instance, ratio)
