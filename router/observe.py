"""Follows every HTTP request for tokens from its headers to its end (plain ASGI middleware).

The outermost layer, so that each is counted once, in whatever way it ends: also those that are
refused before their body was read, and those whose handler fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING

from router.config import RouterSettings
from router.errors import ClientGone, InternalError, RequestError
from router.ledger import Ledger
from router.observation import Observation
from router.recorder import RequestRecorder
from router.sse import Message, Receive, Send
from router.tracing import open_tracing

if TYPE_CHECKING:
    from router.otlp import Tracing

ENDPOINTS = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}

log = logging.getLogger(__name__)

App = Callable[[Message, Receive, Send], Awaitable[None]]
OnFinished = Callable[[Observation], None]


class Requests:
    """The HTTP requests for tokens of one router: those that go on, and who hears of their end."""

    def __init__(self, model: str, ledger: Ledger) -> None:
        self.on_finished: list[OnFinished] = []
        self._model = model
        self._tracing: Tracing | None = None
        self._ledger = ledger
        self._open: dict[RequestRecorder, None] = {}  # in the order of their arrival

    @contextlib.asynccontextmanager
    async def traced(self, told: RouterSettings) -> AsyncIterator[None]:
        """Record traces until the block ends, where there is somebody to send them to."""
        tracing = self._tracing = await asyncio.to_thread(
            open_tracing, told.tracing_endpoint, "router", told.router_id, told.tracing_ratio
        )
        try:
            yield
        finally:
            self._tracing = None
            if tracing is not None:
                await asyncio.to_thread(tracing.close)

    def __len__(self) -> int:
        """Those that go on."""
        return len(self._open)

    def seen(self, most: int | None = None) -> list[Observation]:
        """Those that go on, oldest first, as of now.

        Of more than ``most``, half are the oldest, which are at workers when others must wait, and
        half the latest.
        """
        chosen: Iterable[RequestRecorder] = self._open
        if most is not None and len(self._open) > most:
            latest = list(islice(reversed(self._open), most - most // 2))
            chosen = (*islice(self._open, most // 2), *reversed(latest))
        return [recorder.seen() for recorder in chosen]

    def begin(self, endpoint: str, headers: Iterable[tuple[bytes, bytes]] = ()) -> RequestRecorder:
        """One has arrived."""
        recorder = RequestRecorder(self._model, endpoint, self._ledger)
        if self._tracing is not None:
            told = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
            recorder.trace = self._tracing.begin(endpoint, self._model, told)
        self._open[recorder] = None
        return recorder

    def end(self, recorder: RequestRecorder) -> None:
        """It is over. Never fails: who watches must not disturb."""
        del self._open[recorder]
        try:
            seen = recorder.ended()
        except Exception:
            log.exception("a request could not be counted")
            return
        if recorder.trace is not None:
            recorder.trace.end(seen)
        for on_finished in self.on_finished:
            try:
                on_finished(seen)
            except Exception:
                log.exception("a finished request could not be passed on")


class Observe:
    """Puts a recorder into the scope of each request for tokens."""

    def __init__(self, app: App, requests: Requests) -> None:
        self._app = app
        self._requests = requests

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """As ASGI middleware."""
        asks = scope["type"] == "http" and scope["method"] == "POST"
        path = scope["path"].removeprefix(scope.get("root_path", "")) if asks else ""
        endpoint = ENDPOINTS.get(path)
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        recorder = self._requests.begin(endpoint, scope["headers"])
        scope.setdefault("state", {})["recorder"] = recorder
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:  # by who serves us, when the client has gone
            recorder.failed(ClientGone("the client has gone"))
            raise
        except Exception:
            recorder.failed(InternalError("the server made a mistake; its log says more"))
            raise
        finally:
            self._requests.end(recorder)


def recorder_of(scope: Message) -> RequestRecorder | None:
    """Of the request that this scope is of, when it is one for tokens."""
    recorder: RequestRecorder | None = scope.get("state", {}).get("recorder")
    return recorder


def note_failure(scope: Message, error: RequestError) -> None:
    """The request ends by this error."""
    recorder = recorder_of(scope)
    if recorder is not None:
        recorder.failed(error)
