"""Where requests come in: whether each may wait for a pair of workers, and what was asked."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator

from router.admission import Admitted, admit, hold, max_context
from router.config import RouterSettings
from router.errors import BadRequest, QueueFull, RequestError
from router.job import GenRequest
from router.pending import Queue
from router.policy import View, usable_pairs
from router.pools import Asked


class Door:
    """``counters`` counts the refused ones."""

    def __init__(
        self,
        settings: RouterSettings,
        queue: Queue,
        view: Callable[[], View],
        counters: Counter[str],
    ) -> None:
        self.asked = Asked()
        self._max_queue = settings.config.max_queue
        self._wakes = settings.wakes
        self._queue = queue
        self._view = view
        self._counters = counters
        self._coming = 0  # requests for which something is done before they enter
        self.longest: int | None = None  # prompt and answer that the last pairs could hold

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """Until the block ends, something is done for a request that will enter then.

        Raises QueueFull, before that, if it would find no place where requests wait for a worker to
        start: however many come at once, this is not done for many more than may wait.
        """
        if self._wakes and not usable_pairs(self._view()):
            self._raise(self._hold(0, self._coming))
        self._coming += 1
        try:
            yield
        finally:
            self._coming -= 1

    def enter(self, request: GenRequest) -> int | None:
        """The most tokens that its answer may have; None: it may wait until there is a worker that
        could say so. Raises RequestError.
        """
        num, view = len(request.ids), self._view()
        verdict: Admitted | RequestError | None
        if self._wakes and not usable_pairs(view):
            verdict = self._hold(num)
        else:
            self.longest = max_context(view) or self.longest
            verdict = admit(num, request.max_tokens, view, len(self._queue), self._max_queue)
        if not isinstance(verdict, BadRequest):
            # What waits unseen may be longer than what can be served, and would count for a lot.
            self.asked.arrived(min(num, self.longest or num))
        self._raise(verdict)
        return verdict.max_tokens if isinstance(verdict, Admitted) else None

    def _hold(self, num_prompt: int, others: int = 0) -> QueueFull | None:
        queued, held_tokens = len(self._queue) + others, self._queue.held_tokens
        return hold(num_prompt, queued, held_tokens, self._max_queue)

    def _raise(self, verdict: Admitted | RequestError | None) -> None:
        if isinstance(verdict, RequestError):
            self._counters["refused"] += 1
            raise verdict
