"""What a traced request went through on one worker, as spans (pure but for the clock).

::

    a prompt computed here   Prefill or Decode ── prefill.queue ──► first chunk ── prefill ──► token
    KV that is pulled        first part or ticket ── kv_transfer ──► admitted
    further tokens           first token (or admitted) ── decode ──► the last one

A span is recorded when it is over; one that ends otherwise has why as its error. A reservation
that came to nothing leaves no trace: it did no work. A pull may begin before the prompt is
computed, then ``kv_transfer`` lies beside ``prefill``: that is what early parts are for.

Requests that are not traced have none of these objects. All methods run in the engine's thread.
"""

import time
from collections.abc import Callable

from router import wire
from router.tracing import Attribute, Event, Span
from services.engine.scheduler import ERROR, Output
from services.pulls import Intake

Record = Callable[[str, Span], None]
"""(traceparent of the request, what is over); see ``router.otlp.Tracing.record``."""


class RequestSpans:
    """One request, at one worker, in one attempt."""

    def __init__(
        self,
        record: Record,
        message: wire.Prefill | wire.Reserve | wire.Decode,
        worker_id: str,
        clock: Callable[[], float],
    ) -> None:
        self._record = record
        self._parent = message.trace
        self._clock = clock
        self._about: dict[str, Attribute] = {
            "baton.worker.id": worker_id,
            "baton.job.id": message.request.hex(),
            "baton.attempt": message.attempt,
        }
        self._arrived = clock()
        self._pull_began: float | None = None
        self._ticket_came: float | None = None
        self._admitted: float | None = None  # with KV that was pulled
        self._first_token: float | None = None
        self._num_tokens = 0
        self._computes = not isinstance(message, wire.Reserve)

    def pull(self) -> None:
        """A pull starts, maybe of an early part."""
        if self._pull_began is None:
            self._pull_began = self._clock()

    def ticket(self) -> None:
        """The prefill worker is done, and what is still missing can be pulled."""
        self._ticket_came = self._clock()

    def admitted(self, intake: Intake) -> None:
        """All blocks are there, verified, and the sequence waits for its first step."""
        self._admitted = self._clock()
        self._transfer(self._admitted, intake, "")

    def token(self, output: Output, now: float) -> None:
        """What a step made of it."""
        if output.finish == ERROR:
            self.failed("internal")
            return
        self._num_tokens += 1
        if self._first_token is None:
            self._first_token = now
            if self._computes:
                cached: dict[str, Attribute] = {"baton.prompt.cached_tokens": output.num_cached}
                self._add("prefill.queue", self._arrived, output.started)
                self._add("prefill", output.started, now, cached)
        if output.finish:
            self._decoded(now, "")

    def failed(self, why: str, intake: Intake | None = None) -> None:
        """It ended otherwise: aborted, pull, deadline, draining, lost, internal."""
        now = self._clock()
        if self._admitted is not None or self._first_token is not None:
            self._decoded(now, why)
        elif self._computes:
            self._add("prefill", self._arrived, now, error=why)
        elif intake is not None:
            self._transfer(now, intake, why)

    def _transfer(self, end: float, intake: Intake, error: str) -> None:
        came = self._ticket_came
        begun = self._pull_began if self._pull_began is not None else came
        if begun is None:
            return
        about: dict[str, Attribute] = {
            "baton.kv.blocks": intake.num_blocks,
            "baton.kv.bytes": intake.num_bytes,
        }
        events = (Event("ticket", came),) if came is not None else ()
        self._add("kv_transfer", begun, end, about, error, events)

    def _decoded(self, end: float, error: str) -> None:
        """From when it could decode. Nothing is said of a sole token that came of the prompt."""
        first = self._first_token
        begun = self._admitted if self._admitted is not None else first
        assert begun is not None
        if self._admitted is None and self._num_tokens == 1 and not error:
            return
        events = (Event("first_token", first),) if first is not None else ()
        about: dict[str, Attribute] = {"baton.tokens": self._num_tokens}
        self._add("decode", begun, end, about, error, events)

    def _add(
        self,
        name: str,
        start: float,
        end: float,
        about: dict[str, Attribute] | None = None,
        error: str = "",
        events: tuple[Event, ...] = (),
    ) -> None:
        span = Span(name, start, end, self._about | (about or {}), error, events)
        self._record(self._parent, span)


class WorkerTracing:
    """Makes the spans of traced requests; without ``record`` there are none."""

    def __init__(
        self,
        worker_id: str = "",
        record: Record | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker_id = worker_id
        self._record = record
        self._clock = clock

    def follow(self, message: wire.Prefill | wire.Reserve | wire.Decode) -> RequestSpans | None:
        """For a request that has just come; None when it is not traced."""
        if not message.trace or self._record is None:
            return None
        return RequestSpans(self._record, message, self._worker_id, self._clock)


NOT_TRACED = WorkerTracing()
