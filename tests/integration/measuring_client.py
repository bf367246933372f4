"""A client that measures for itself: plain HTTP over a socket, and the moment of each event.

It shares nothing with the server but the clock.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Seen:
    """What the client has seen of one request; moments are of ``time.monotonic()``."""

    status: int = 0
    sent_at: float = 0.0
    content_at: list[float] = field(default_factory=list)  # of each chunk with text or an end
    ended_at: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] = field(default_factory=dict)
    left: bool = False  # by this client's own will

    @property
    def code(self) -> int:
        """The status of what became of it: an error in a stream has one of its own."""
        if self.left:
            return 499
        code = self.error.get("code")
        return code if isinstance(code, int) else self.status

    @property
    def tokens(self) -> int:
        return self.usage.get("completion_tokens", len(self.content_at))

    @property
    def ttft_s(self) -> float:
        return self.content_at[0] - self.sent_at

    @property
    def tpot_s(self) -> float:
        return (self.content_at[-1] - self.content_at[0]) / (self.tokens - 1)


async def ask(
    port: int,
    path: str,
    body: dict[str, Any],
    leave_after: int | None = None,
    leave_when: Callable[[], Coroutine[Any, Any, object]] | None = None,
) -> Seen:
    """Send a request and read all of the answer, or leave: after so many chunks with content, or
    when something else happens before that.
    """
    seen = Seen()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        payload = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"content-length: {len(payload)}\r\nconnection: close\r\n\r\n"
        )
        seen.sent_at = time.monotonic()
        writer.write(head.encode() + payload)
        reading = asyncio.ensure_future(_read(reader, seen, leave_after))
        if leave_when is not None:
            leaving = asyncio.ensure_future(leave_when())
            await asyncio.wait((reading, leaving), return_when=asyncio.FIRST_COMPLETED)
            leaving.cancel()
            if not reading.done():
                seen.left = True
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
                return seen
        await reading
        seen.ended_at = time.monotonic()
        return seen
    finally:
        writer.close()


async def _read(reader: asyncio.StreamReader, seen: Seen, leave_after: int | None) -> None:
    seen.status = int((await reader.readline()).split()[1])
    headers = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.decode().partition(":")
        headers[name.lower()] = value.strip()
    if "content-length" in headers:
        answer = json.loads(await reader.readexactly(int(headers["content-length"])))
        seen.usage, seen.error = answer.get("usage", {}), answer.get("error", {})
        return
    while size := int(await reader.readline(), 16):
        event = (await reader.readexactly(size + 2)).decode().strip()
        now = time.monotonic()
        if not event.startswith("data: {"):
            continue
        data = json.loads(event.removeprefix("data: "))
        seen.error = data.get("error") or seen.error
        seen.usage = data.get("usage") or seen.usage
        for choice in data.get("choices", ()):
            text = choice.get("text", choice.get("delta", {}).get("content"))
            if text or choice["finish_reason"]:
                seen.content_at.append(now)
        if len(seen.content_at) == leave_after:
            seen.left = True
            return
    assert await reader.read() == b"\r\n", "bytes after the end"
