"""Streams of server-sent events, and clients that go away (plain ASGI).

Knows neither what the events say nor how they are made.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

from router.errors import ClientGone, RequestError, as_request_error

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Result = TypeVar("Result")

_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would hold the tokens back
}
_COMMENT = b": keep-alive\n\n"
_GONE = "the client has gone"


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of ``work``, which is cancelled when the client goes away (ClientGone)."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone(_GONE)
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


class EventStream:
    """Server-sent events, from chunks that are made while they are sent. An ASGI application.

    The status line waits for the first chunk or an error, but not longer than ``status_after_s``:
    so an error before the first token has its own status. Later ones become an event.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[dict[str, Any], None],
        headers: dict[str, str],
        status_after_s: float,
        keep_alive_s: float,
        on_error: Callable[[RequestError], None] = lambda error: None,
    ) -> None:
        self._on_error = on_error  # it ends by this, before or after its first byte
        self._chunks = chunks
        self._headers = headers
        self._status_after_s = status_after_s
        self._keep_alive_s = keep_alive_s
        self._last_sent = 0.0  # loop time

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Send it all; when the client goes away, the chunks are closed."""
        try:
            await unless_disconnected(receive, self._run(send))
        except ClientGone as gone:
            self._on_error(gone)
        finally:
            await self._chunks.aclose()

    async def _run(self, send: Send) -> None:
        first = asyncio.ensure_future(anext(self._chunks))
        try:
            await asyncio.wait((first,), timeout=self._status_after_s)
            if first.done() and (reason := first.exception()) is not None:
                error = as_request_error(reason)
                self._on_error(error)
                await send_error(send, error, self._headers)
            else:
                await self._stream(first, send)
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)

    async def _stream(self, first: asyncio.Future[dict[str, Any]], send: Send) -> None:
        headers = _encoded({**_HEADERS, **self._headers})
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        keeping = asyncio.ensure_future(self._keep_alive(send))
        try:
            if not first.done():
                await self._send(send, _COMMENT)
            await self._event(send, await first)
            async for chunk in self._chunks:
                await self._event(send, chunk)
        except ClientGone:
            raise
        except Exception as reason:  # the answer cannot go on; the client is told
            error = as_request_error(reason)
            self._on_error(error)
            await self._event(send, error.body())
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _event(self, send: Send, data: dict[str, Any]) -> None:
        await self._send(send, b"data: " + _json(data) + b"\n\n")

    async def _send(self, send: Send, body: bytes) -> None:
        self._last_sent = asyncio.get_running_loop().time()
        try:
            await send({"type": "http.response.body", "body": body, "more_body": True})
        except OSError as error:
            raise ClientGone(_GONE) from error

    async def _keep_alive(self, send: Send) -> None:
        """A comment whenever nothing was sent for a while, so that no proxy gives up."""
        if not self._keep_alive_s:
            return
        loop = asyncio.get_running_loop()
        self._last_sent = loop.time()
        while True:
            await asyncio.sleep(self._last_sent + self._keep_alive_s - loop.time())
            if loop.time() - self._last_sent >= self._keep_alive_s:
                await self._send(send, _COMMENT)


async def send_error(send: Send, error: RequestError, headers: dict[str, str]) -> None:
    """An error as the whole response."""
    own = {"content-type": "application/json", **error.headers(), **headers}
    await send({"type": "http.response.start", "status": error.status, "headers": _encoded(own)})
    await send({"type": "http.response.body", "body": _json(error.body())})


def _encoded(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]


def _json(data: dict[str, Any]) -> bytes:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()
