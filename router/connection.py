"""A framed TCP connection: frames, their numbers, the time limits, and who is alive (asyncio).

Each side counts its frames, and the other closes the connection at the first number that is not the
next one: nothing on a link is lost, doubled or overtaken unnoticed. What is lost last is noticed by
the ping that follows within a second. The handshake, which makes this an authenticated
:class:`Link`, is in ``router.link``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import cast

from router.codec import LENGTH_BYTES
from router.wire import (
    PROTOCOL_VERSION,
    Challenge,
    Hello,
    Message,
    Ping,
    Pong,
    Proof,
    Rejected,
    Welcome,
    WireError,
    encode,
    unpack,
)

MAX_FRAME_UNAUTHENTICATED = 64 * 1024
MAX_FRAME = 16 * 1024 * 1024
HANDSHAKE_TIMEOUT_S = 2.0
PING_INTERVAL_S = 1.0
DEAD_AFTER_S = 3.0
MAX_UNSENT_BYTES = 64 * 1024 * 1024  # a peer that is further behind does not read
CLOSE_TIMEOUT_S = 1.0  # to flush the last frames to the peer

_HANDSHAKE = (Hello, Challenge, Proof, Welcome, Rejected)

log = logging.getLogger(__name__)


class Link(asyncio.Protocol):
    """A connection as both sides use it, once it is open.

    The two subclasses in ``router.link`` add the two halves of the handshake. Callbacks run on the
    event loop; after ``on_close``, which comes exactly once for each link that was open, there are
    none.
    """

    def __init__(self) -> None:
        self.open = False  # authenticated, and not closed
        self.peer_name = "?"  # for logs
        self.close_reason = ""
        self.close_kind = "closed"  # or silent, unread, protocol: as it is counted
        self.peer_steps = 0  # the engine's step counter, as of the last pong
        self.peer_busy = False
        self.last_pong = 0.0  # loop time
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._num_sent = self._num_received = 0  # frames
        self._last_heard = 0.0  # loop time of the last complete frame
        self._timer: asyncio.TimerHandle | None = None
        self._pings = 0
        self._was_open = False
        self._reported = asyncio.Event()  # the end of this connection

    # --- for the owner ---------------------------------------------------------------------------

    def send(self, *messages: Message) -> None:
        """Queue messages, in one write. Messages to a closed link are dropped."""
        if self.open:
            self._write(messages)

    def close(self, reason: str = "closed by us") -> None:
        """Flush what was sent, then close. ``on_close`` follows, not from within this call."""
        if self._transport is None or self._transport.is_closing():
            return
        self._end(reason)
        self._transport.close()
        self._timer = self._loop.call_later(CLOSE_TIMEOUT_S, self._transport.abort)

    async def wait_closed(self) -> None:
        """Until ``on_close`` has run; after :meth:`close` that takes a second at most."""
        await self._reported.wait()

    # --- to be filled by the two sides -----------------------------------------------------------

    def _handshake(self, message: Message) -> None:
        """A message before the link is open; raises WireError when it should not have come."""
        raise NotImplementedError

    def _deliver(self, message: Message) -> None:
        raise NotImplementedError

    def _progress(self) -> tuple[int, bool]:
        return 0, False

    def _closed(self, was_open: bool) -> None:
        raise NotImplementedError

    # --- asyncio.Protocol ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass of it
        self.peer_name = str(transport.get_extra_info("peername"))
        self._last_heard = self._loop.time()
        self._timer = self._loop.call_later(
            HANDSHAKE_TIMEOUT_S, self._abort, f"no handshake within {HANDSHAKE_TIMEOUT_S:g} s"
        )

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            for body in self._frames():
                self._take(body)
                if self._is_closing():
                    return
        except WireError as error:
            self._abort(str(error), "protocol")

    def connection_lost(self, error: Exception | None) -> None:
        self._end(f"connection lost: {error}" if error else "closed by the peer")
        self._forget()

    # --- inside ----------------------------------------------------------------------------------

    def _frames(self) -> Iterable[bytes]:
        """The complete frames in the buffer; the limit is read anew for each of them."""
        while len(self._buffer) >= LENGTH_BYTES:
            size = int.from_bytes(self._buffer[:LENGTH_BYTES], "big")
            limit = MAX_FRAME if self.open else MAX_FRAME_UNAUTHENTICATED
            if size > limit:
                raise WireError(f"a frame of {size} bytes, {limit} are allowed")
            end = LENGTH_BYTES + size
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[LENGTH_BYTES:end])
            del self._buffer[:end]
            yield body

    def _take(self, body: bytes) -> None:
        """One frame has come."""
        self._heard()
        self._process(body)

    def _heard(self) -> None:
        self._last_heard = self._loop.time()

    def _process(self, body: bytes) -> None:
        """Handle a frame. One that is wrong, or that cannot be handled, ends this link only."""
        try:
            message, number = unpack(body)
            self._check_number(message, number)
            self._receive(message)
        except WireError as error:
            self._abort(str(error), "protocol")
        except Exception:
            log.exception("link to %s: a message could not be handled", self.peer_name)
            self._abort("a message could not be handled", "protocol")

    def _check_number(self, message: Message, number: int | None) -> None:
        self._num_received += 1
        if number == self._num_received:
            return
        if number is None and not self.open and _of_another_version(message):
            return  # the handshake refuses it by its version's name
        kind = "no number" if number is None else f"number {number}"
        raise WireError(
            f"a frame was lost, doubled or overtaken: a {type(message).__name__} has {kind}, "
            f"{self._num_received} was to come"
        )

    def _receive(self, message: Message) -> None:
        if not self.open:
            self._handshake(message)
        elif isinstance(message, Ping):
            steps, busy = self._progress()
            self._write((Pong(message.seq, steps, busy),))
        elif isinstance(message, Pong):
            self.last_pong = self._loop.time()
            self.peer_steps, self.peer_busy = message.steps, message.busy
        elif isinstance(message, _HANDSHAKE):
            raise WireError(f"{type(message).__name__} after the handshake")
        else:
            self._deliver(message)

    def _opened(self) -> None:
        self.open = self._was_open = True
        self.last_pong = self._loop.time()
        if self._timer:
            self._timer.cancel()
        self._tick(self._loop.time())

    def _tick(self, due: float) -> None:
        """Each second: is the peer alive? Then ping it."""
        now = self._loop.time()
        if now - due > PING_INTERVAL_S:  # our own loop stood still; the peer's bytes may be waiting
            self._last_heard = now
        if now - self._last_heard > DEAD_AFTER_S:
            self._abort(f"nothing heard for {DEAD_AFTER_S:g} s", "silent")
            return
        self._pings += 1
        self._timer = self._loop.call_later(PING_INTERVAL_S, self._tick, now + PING_INTERVAL_S)
        self._write((Ping(self._pings),))

    def _write(self, messages: Iterable[Message]) -> None:
        assert self._transport is not None
        if self._transport.is_closing():
            return
        self._emit(self._encode(messages))
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._abort(f"{MAX_UNSENT_BYTES} bytes unread by the peer", "unread")

    def _encode(self, messages: Iterable[Message]) -> list[bytes]:
        """Frames with the next numbers. A message that cannot be packed takes none: it is its
        sender's error, and no gap for the peer.
        """
        frames = [encode(message, self._num_sent + i) for i, message in enumerate(messages, 1)]
        self._num_sent += len(frames)
        return frames

    def _emit(self, frames: list[bytes]) -> None:
        assert self._transport is not None
        self._transport.write(b"".join(frames))

    def _is_closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def _abort(self, reason: str, kind: str = "closed") -> None:
        self._end(reason, kind)
        if self._transport is not None:
            self._transport.abort()

    def _end(self, reason: str, kind: str = "closed") -> None:
        """No more messages, no more timers."""
        self.open = False
        if not self.close_reason:
            self.close_reason, self.close_kind = reason, kind
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _forget(self) -> None:
        """Report the end, once."""
        if not self._reported.is_set():
            self._reported.set()
            self._closed(self._was_open)


def _of_another_version(message: Message) -> bool:
    """Whether this is how a peer of another protocol version begins, or answers ours."""
    if isinstance(message, Hello | Challenge):
        return message.version != PROTOCOL_VERSION
    return isinstance(message, Rejected)
