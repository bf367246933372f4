"""The console over HTTP: its files, which anybody may read, and its events, which need the key.

Plain ASGI and Starlette's routes. Knows neither what the events say nor what the page does with it.
"""

from __future__ import annotations

import asyncio
import contextlib
from hashlib import sha256
from pathlib import Path

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from router.console.feed import Feed, Listener
from router.errors import NotFound, RequestError
from router.sse import Message, Receive, Send, send_error, unless_disconnected

STUCK_S = 20.0  # one who takes nothing for so long gives his place to another
LIFETIME_S = 300.0  # of one stream of events; the page asks again. A router that drains waits less
FOLDER = Path(__file__).parent
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
SAFETY = {
    # Nothing from elsewhere, no code in the page itself, not inside another site's frame.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def paths() -> frozenset[str]:
    """What anybody may read: the page holds no data."""
    return frozenset({"/console", "/console/", *(f"/console/{name}" for name in _names())})


def routes(feed: Feed) -> list[BaseRoute]:
    """``/console``, its files, and ``/internal/events``."""
    files = Files()
    return [
        Route("/console", files, methods=["GET"]),
        Route("/console/", _without_slash, methods=["GET"]),
        Route("/console/{name}", files, methods=["GET"]),
        Route("/internal/events", Events(feed), methods=["GET"]),
    ]


class Files:
    """The page and what belongs to it, from memory. An ASGI application."""

    def __init__(self) -> None:
        self._files = {
            name: ((FOLDER / name).read_bytes(), TYPES[Path(name).suffix]) for name in _names()
        }
        self._tags = {name: f'"{sha256(f[0]).hexdigest()[:16]}"' for name, f in self._files.items()}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """As an ASGI application."""
        name = scope["path_params"].get("name", "index.html")
        if name not in self._files:
            await send_error(send, NotFound(f"the console has no file {name!r:.100}"), {})
            return
        body, kind = self._files[name]
        tag = self._tags[name]
        known = dict(scope["headers"]).get(b"if-none-match", b"").decode("latin-1") == tag
        headers = {"content-type": kind, "etag": tag, "cache-control": "no-cache", **SAFETY}
        if known:
            body = b""
        else:
            headers["content-length"] = str(len(body))
        status = 304 if known else 200
        await send({"type": "http.response.start", "status": status, "headers": _raw(headers)})
        empty = scope["method"] == "HEAD"
        await send({"type": "http.response.body", "body": b"" if empty else body})


class Events:
    """The feed as server-sent events. An ASGI application."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """As an ASGI application."""
        if scope["method"] == "HEAD":
            await _start(send)
            await send({"type": "http.response.body", "body": b""})
            return
        try:
            listener = self._feed.listen()
        except RequestError as error:
            await send_error(send, error, {})
            return
        try:
            with contextlib.suppress(RequestError, OSError):  # the page was closed
                await unless_disconnected(receive, self._pass_on(listener, send))
        finally:
            self._feed.leave(listener)

    async def _pass_on(self, listener: Listener, send: Send) -> None:
        try:
            await _start(send)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LIFETIME_S):
                    while (event := await listener.next()) is not None:
                        async with asyncio.timeout(STUCK_S):
                            message = {"type": "http.response.body", "body": event}
                            await send({**message, "more_body": True})
        finally:
            self._feed.leave(listener)  # now: what follows may wait for one who never reads
        await send({"type": "http.response.body", "body": b""})


async def _without_slash(http: Request) -> Response:
    """What the page names is named from ``/console``, whatever a proxy has put before that."""
    return RedirectResponse("../console")


def _names() -> list[str]:
    return [path.name for path in FOLDER.iterdir() if path.suffix in TYPES]


async def _start(send: Send) -> None:
    headers = {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        "x-accel-buffering": "no",
    }
    await send({"type": "http.response.start", "status": 200, "headers": _raw(headers)})


def _raw(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]
