"""Where Prometheus finds everybody: targets, and the two paths of a router's API that name them.

``GET /internal/prometheus/targets`` is HTTP service discovery: every worker and every router of the
deployment, whichever router is asked. A port that listens on all addresses of its host is named by
the one that the asker has used. ``GET /metrics`` is what the asked router's own metrics port has,
for those who can reach no other; with several routers it is any one of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from router.config import RouterSettings
from router.errors import NotFound, Unavailable
from router.exposition import Exposed, Exposition
from router.wire import WorkerCard

EVERYWHERE = ("0.0.0.0", "::")  # where who listens on all addresses says that it listens
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Target:
    """A metrics port, and whose it is."""

    host: str  # or one of EVERYWHERE
    port: int
    role: str  # router | prefill | decode | mixed
    replica: str  # id of one incarnation
    model: str

    def address(self, here: str = LOOPBACK) -> str:
        """As Prometheus writes it. ``here``: how the reader reaches the host that it asks."""
        host = here if self.host in EVERYWHERE else self.host
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


Targets = Callable[[], Awaitable[Iterable[Target] | None]]
"""Who is registered now; None when that cannot be told."""


async def no_targets() -> list[Target]:
    """Of a router that runs alone."""
    return []


def worker_targets(cards: Iterable[WorkerCard]) -> list[Target]:
    """The metrics ports of those workers that have one."""
    return [
        Target(
            card.metrics_host or card.host, card.metrics_port, card.role, card.worker_id, card.model
        )
        for card in cards
        if card.metrics_port
    ]


@contextlib.asynccontextmanager
async def exposed_router(collector: Exposed, settings: RouterSettings) -> AsyncIterator[Target]:
    """A router's metrics port, open as long as the block runs. Raises OSError."""
    host, port = settings.metrics_host, settings.metrics_port
    page = await asyncio.to_thread(Exposition, collector, host, port)
    try:
        yield Target(page.host, page.port, "router", settings.router_id, settings.served_model)
    finally:
        await asyncio.to_thread(page.close)


def asked_host(http: Request) -> str:
    """The name or address by which a request has come here: its Host header's, or the server's."""
    return http.url.hostname or LOOPBACK


def discovery(targets: Iterable[Target], here: str = LOOPBACK) -> list[dict[str, Any]]:
    """As Prometheus's HTTP service discovery reads it. ``here``: how it has reached us.

    The labels are for its relabelling only and not of the series, which have labels of their own: a
    router's counts of workers say the worker's role.
    """
    return [
        {
            "targets": [target.address(here)],
            "labels": {
                "__meta_baton_role": target.role,
                "__meta_baton_replica": target.replica,
                "__meta_baton_model": target.model,
            },
        }
        for target in sorted(targets, key=lambda target: (target.role, target.replica))
    ]


class Scraping:
    """The handlers of both paths."""

    def __init__(self, collector: Exposed, targets: Targets, public: bool) -> None:
        self._collector = collector
        self._targets = targets
        self._public = public

    async def metrics(self) -> Response:
        """GET /metrics."""
        if not self._public:
            raise NotFound("GET /metrics: not here (metrics_public), but on the metrics port")
        page = await asyncio.to_thread(generate_latest, self._collector)
        return Response(page, headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

    async def prometheus_targets(self, http: Request) -> Response:
        """GET /internal/prometheus/targets."""
        targets = await self._targets()
        if targets is None:  # an empty list would end what Prometheus watches
            raise Unavailable("the registry does not answer; ask again")
        return JSONResponse(discovery(targets, asked_host(http)))
