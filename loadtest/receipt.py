"""When bytes that wait in a socket have reached this machine, as the kernel noted it.

A client that is busy reads late; at 1,000 requests per second that shows. Linux stamps each segment
that comes in (SO_TIMESTAMPNS, which TCP sockets have too), so the time of an answer is not that of
its reading. Elsewhere, and below TLS, the time of the reading has to do.
"""

import os
import socket
import struct
import sys
import time
from typing import Final

clock: Final = time.monotonic  # the event loop's as well

_TIMESTAMPNS = 35  # asm-generic/socket.h; Python has no name for it
_TIMESPEC = struct.Struct("qq")
_SPACE = socket.CMSG_SPACE(_TIMESPEC.size)
_PEEK = socket.MSG_PEEK | getattr(socket, "MSG_DONTWAIT", 0)


class Receipt:
    """Of one connection. The descriptor stays its owner's."""

    def __init__(self, fd: int) -> None:
        self._socket: socket.socket | None = None
        if sys.platform == "linux":
            self._socket = socket.socket(fileno=os.dup(fd))
            self._socket.setsockopt(socket.SOL_SOCKET, _TIMESTAMPNS, 1)

    def next(self) -> float:
        """When the first byte that is still to be read has come, on :data:`clock`; now, if that is
        not known.
        """
        now = clock()
        if self._socket is None:
            return now
        try:
            _, notes, _, _ = self._socket.recvmsg(1, _SPACE, _PEEK)
        except OSError:  # nothing there, or an error that its reader will see
            return now
        for level, kind, note in notes:
            if (level, kind) == (socket.SOL_SOCKET, _TIMESTAMPNS):
                seconds, nanoseconds = _TIMESPEC.unpack(note)
                ago = time.time() - (seconds + nanoseconds * 1e-9)
                return now - ago if 0 < ago < 1 else now  # else the wall clock was set
        return now

    def close(self) -> None:
        """With the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
