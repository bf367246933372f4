"""API keys: who may use this server (plain ASGI middleware)."""

from __future__ import annotations

from collections.abc import Set

from router.errors import Unauthorized
from router.key_file import Keys
from router.observe import App, note_failure
from router.sse import Message, Receive, Send, send_error

OPEN_PATHS = frozenset(("/health", "/ready"))  # need no API key


class RequireKey:
    """Lets a request pass that carries one of the keys; with no keys configured, all pass."""

    def __init__(self, app: App, keys: Keys, open_paths: Set[str] = OPEN_PATHS) -> None:
        self._app = app
        self._open_paths = open_paths
        self._keys = keys

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """As ASGI middleware."""
        if scope["type"] == "http" and self._keys and scope["path"] not in self._open_paths:
            given = dict(scope["headers"]).get(b"authorization", b"")
            scheme, _, key = given.partition(b" ")
            if scheme.lower() != b"bearer" or not self._keys.known(key.strip()):
                error = Unauthorized("no API key, or not one of this server's")
                note_failure(scope, error)
                await send_error(send, error, {"www-authenticate": "Bearer"})
                return
        await self._app(scope, receive, send)
