"""The metrics port of a process: prometheus_client's pages, in threads of their own.

Routers and workers each open one. It answers any path with all that its collector has, and knows
nothing of what is counted. A scrape never runs on an event loop, so no token waits for it. Pages
are plain text, whatever is asked for: as OpenMetrics, prometheus_client 0.26 writes samples whose
name has a colon, as vLLM's have, under another name.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import threading
from collections.abc import Iterable
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any, Protocol, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import make_wsgi_app
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication

PORTS_TRIED = 100  # from the one that was asked for; several processes of a host share the number
REACHED = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # where we reach who listens on all addresses
READ_TIMEOUT_S = 10.0  # a client that sends no request does not keep its thread for ever

log = logging.getLogger(__name__)


class Exposed(Collector, Protocol):
    """What can be shown: a CollectorRegistry, or something around one."""

    def restricted_registry(self, names: Any) -> Collector:
        """Only series of these names: ``/metrics?name[]=...``."""


class Exposition:
    """An open metrics port."""

    def __init__(self, collector: Exposed, host: str, port: int = 0) -> None:
        """Listen on ``host`` and the first free port from ``port`` on; 0 is any free one.

        Raises OSError when the address is not this machine's, or no port is free.
        """
        self._server = _listen(collector, host, port)
        self._thread = threading.Thread(target=self._serve, name="metrics", daemon=True)
        self._thread.start()

    @property
    def host(self) -> str:
        """Where it listens."""
        return str(self._server.server_address[0])

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop listening; answers that are under way end by themselves. May be called again."""
        if self._server.closing:
            return
        self._server.closing = True
        # The thread waits for a connection: here is one, which it does not answer.
        address = (REACHED.get(self.host, self.host), self.port)
        with contextlib.suppress(OSError), socket.create_connection(address, READ_TIMEOUT_S):
            self._thread.join()
        self._server.server_close()

    def _serve(self) -> None:
        while not self._server.closing:
            self._server.handle_request()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    allow_reuse_address = True  # of connections that have ended lately, not of another listener
    request_queue_size = 16
    closing = False

    def server_bind(self) -> None:
        """Without http.server's look-up of our own name, which may take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether to answer."""
        return not self.closing

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away, or never said a word."""
        log.debug("a reader of metrics at %s", client_address, exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = READ_TIMEOUT_S

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are no news."""


def _plain_text(collector: Exposed) -> WSGIApplication:
    # Not compressed: readers are near, and the processor is not ours alone.
    app = make_wsgi_app(collector, disable_compression=True)

    def answer(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        environ.pop("HTTP_ACCEPT", None)
        return cast("Iterable[bytes]", app(environ, start_response))

    return answer


def _listen(collector: Exposed, host: str, port: int) -> _Server:
    kind = _Server6 if ":" in host else _Server
    for candidate in range(port, min(port + PORTS_TRIED, 2**16)) if port else (0,):
        try:
            server = kind((host, candidate), _Handler)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not port:
                raise
            continue
        server.set_app(_plain_text(collector))
        return server
    raise OSError(
        errno.EADDRINUSE, f"metrics_port: none of {PORTS_TRIED} ports from {port} on is free", host
    )
