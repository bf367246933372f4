"""API keys: who may use this server (plain ASGI middleware)."""

from __future__ import annotations

import hmac
from collections.abc import Set
from hashlib import sha256

from router.errors import Unauthorized
from router.observe import App, note_failure
from router.sse import Message, Receive, Send, send_error

OPEN_PATHS = frozenset(("/health", "/ready"))  # need no API key


class RequireKey:
    """Lets a request pass that carries one of the keys; with no keys configured, all pass."""

    def __init__(self, app: App, keys: tuple[str, ...], open_paths: Set[str] = OPEN_PATHS) -> None:
        self._app = app
        self._open_paths = open_paths
        self._digests = [sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """As ASGI middleware."""
        if scope["type"] == "http" and self._digests and scope["path"] not in self._open_paths:
            given = dict(scope["headers"]).get(b"authorization", b"")
            scheme, _, key = given.partition(b" ")
            digest = sha256(key.strip()).digest()
            known = [hmac.compare_digest(digest, one) for one in self._digests]
            if scheme.lower() != b"bearer" or not any(known):
                error = Unauthorized("no API key, or not one of this server's")
                note_failure(scope, error)
                await send_error(send, error, {"www-authenticate": "Bearer"})
                return
        await self._app(scope, receive, send)
