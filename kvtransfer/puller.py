"""The thread that moves KV: it alone touches an Importer and its transport.

Posting and polling stay out of the engine's thread, since over shared memory the copy runs inside
the post. Commands come in by a queue, events go out by a callback in this thread. It waits on the
queue alone while nothing is in flight; with reads in flight it waits on it for a fraction of a
millisecond between polls, because NIXL can only be polled.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from kvtransfer.importer import Event, Importer
from kvtransfer.ticket import AgentCard, Ticket

logger = logging.getLogger(__name__)

_FIRST_WAIT_S = 0.0002  # between polls, doubling while nothing happens
_LONGEST_WAIT_S = 0.001
_LONGEST_DRAINING_WAIT_S = 0.05  # nobody waits for these but the quarantine
_IDLE_WAIT_S = 1.0  # between signs of life


class Puller:
    """Runs an :class:`Importer` in a daemon thread of its own; all methods are thread-safe.

    ``on_events`` is called in that thread and must not block. When something fails in the thread,
    also the attempt to replace a transport, the transport is closed, ``failure`` says why, and what
    was in flight and every later pull is reported as failed. After :meth:`close` nothing is
    reported any more.
    """

    failure = ""
    beats = 0  # rises each second, or the thread hangs

    def __init__(
        self,
        importer: Importer,
        on_events: Callable[[list[Event]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._importer = importer
        self._on_events = on_events
        self._clock = clock
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-puller", daemon=True)
        self._thread.start()

    @property
    def num_in_flight(self) -> int:
        """Pulls whose outcome is open."""
        return self._importer.num_in_flight

    @property
    def rebuild_count(self) -> int:
        """How often the transport was replaced, since reads of the old one did not settle."""
        return self._importer.rebuild_count

    def pull(
        self,
        key: bytes,
        ticket: Ticket,
        peer: AgentCard,
        pairs: Sequence[tuple[int, int]],
        deadline: float,
    ) -> None:
        """See :meth:`Importer.start`; ``deadline`` is on this puller's clock, which should be the
        importer's as well.
        """
        asked = self._clock()
        start = self._importer.start
        self._commands.put(lambda: start(key, ticket, peer, pairs, deadline, asked))

    def abort(self, key: bytes) -> None:
        """See :meth:`Importer.abort`."""
        self._commands.put(lambda: self._importer.abort(key))

    def forget(self, peer: AgentCard) -> None:
        """See :meth:`Importer.forget`."""
        self._commands.put(lambda: self._importer.forget(peer))

    def close(self, timeout_s: float = 10.0) -> None:
        """Fail what is in flight, close the transport, end the thread. Idempotent."""
        self._commands.put(None)
        self._thread.join(timeout_s)  # does not wait when it has ended
        if self._thread.is_alive():
            logger.error("the KV puller did not end within %.0f s", timeout_s)

    def _run(self) -> None:
        while True:
            try:
                self._serve()
                break
            except Exception as error:  # the thread's edge: who waits for a pull must hear of it
                logger.exception("the KV puller failed; its transport is closed")
                self.failure = f"the KV puller failed: {error!r}"
                self._end(self.failure)
        self._end("the KV puller was closed")

    def _serve(self) -> None:
        """Commands and polls, until the command None."""
        wait_s = _FIRST_WAIT_S
        while True:
            self.beats += 1
            busy = self._importer.num_unsettled > 0
            try:
                command = self._commands.get(timeout=wait_s if busy else _IDLE_WAIT_S)
            except queue.Empty:
                idle = True
            else:
                idle = False
                if command is None:
                    return
                command()
            events = self._importer.poll(self._clock())
            if events:
                self._on_events(events)
            longest = _LONGEST_WAIT_S if self._importer.num_in_flight else _LONGEST_DRAINING_WAIT_S
            wait_s = min(2 * wait_s, longest) if idle and not events else _FIRST_WAIT_S

    def _end(self, reason: str) -> None:
        settled = False
        try:
            self._importer.transport.close()
            settled = True
        except Exception:
            logger.exception("the KV transport did not close: blocks of its reads stay unsettled")
        events = self._importer.end(reason, settled)
        try:
            if events:
                self._on_events(events)
        except Exception:
            logger.exception("the receiver of KV events failed; lost are %s", events)
