"""The queue of requests that wait until a pair of workers has room for them (asyncio).

Who goes next is decided by ``router.admission.pick``; this file only waits and wakes::

    let in ───────────────────────► waits for room ──► granted
                                       ▲     │ no worker of now
    held: there is no worker           │     ▼ could ever serve it
       └──► waits for one to start ────┴── waits for one to come back, or to start

Where pools may have no worker on purpose, a request that finds none is held: it takes its place,
and whether it can be served at all is asked when a pair is there. To have waited for a worker is
not to have waited for room: that begins then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from time import perf_counter

from router.admission import (
    WAKE_RETRY_AFTER_S,
    Admitted,
    Waiting,
    admit,
    hopeless,
    pick,
    window,
)
from router.buckets import OVERHEAD, Tally
from router.config import RouterSettings
from router.errors import DeadlineExceeded, QueueFull, RequestError, Unavailable
from router.job import Job
from router.policy import Key, Pair, View, usable_pairs

DEADLINE = "the request took longer than this server allows"
STOPPING = "the server is stopping"


@dataclass(frozen=True)
class Waits:
    """Who waits now."""

    answers: int = 0
    tokens: int = 0  # of their prompts, and of what was made already
    oldest_s: float = 0.0  # the longest wait


class _Place:
    """A job's place in the queue."""

    def __init__(self, job: Job, limit: asyncio.Timeout) -> None:
        self.job = job
        self.since = time.monotonic()
        self.limit = limit  # of the whole wait
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.gives_up: asyncio.TimerHandle | None = None  # None: some worker could serve it
        self.queued = False
        self.starting = False  # the worker that it waits for is none that is busy, or reconnects


class Queue:
    """``grant`` opens a job's calls at a pair, so that the next ``view`` counts them. ``lack`` says
    which workers are missing, when there is no pair.
    """

    def __init__(
        self,
        settings: RouterSettings,
        view: Callable[[], View],
        grant: Callable[[Job, Pair], None],
        lack: Callable[[], str],
    ) -> None:
        self.overhead = Tally(OVERHEAD)  # seconds that finding a pair took, for those that got one
        self.held_tokens = 0  # of the prompts of those that came when there was no worker
        self._config = settings.config
        self._wakes = settings.wakes
        self._view = view
        self._grant = grant
        self._lack = lack
        self._places: list[_Place] = []
        self._usable: tuple[frozenset[Pair], frozenset[Key]] | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._places)

    def waiting(self) -> Waits:
        """Who waits now. Any thread may ask."""
        places = self._places.copy()
        return Waits(
            len(places),
            sum(place.job.num_tokens for place in places),
            time.monotonic() - min(place.since for place in places) if places else 0.0,
        )

    async def wait(self, job: Job) -> None:
        """Until the job's calls are open. Raises RequestError when that takes too long."""
        if self._closed:
            raise Unavailable(STOPPING)
        held_tokens = 0 if job.let_in else job.num_tokens
        self.held_tokens += held_tokens
        limit = asyncio.timeout_at(self._patience(job))
        place = _Place(job, limit)
        try:
            async with limit:
                self._take(place)
                await place.granted
        except TimeoutError:
            if limit.when() == job.deadline:
                raise DeadlineExceeded(DEADLINE) from None
            error = QueueFull("all workers were busy for too long; try again")
            raise error.rejects("queue_timeout") from None
        finally:
            self.held_tokens -= held_tokens
            if place.gives_up is not None:
                place.gives_up.cancel()
            self._leave(place)

    def serve(self) -> None:
        """To be called when something may have become free: give pairs to those who wait."""
        if self._wakes and self._places:
            self._let_in(self._view())
        while self._places:
            began = perf_counter()
            view = self._view()
            keys = frozenset(key for key, worker in view.workers.items() if worker.usable)
            usable = frozenset(usable_pairs(view)), keys
            if usable != self._usable:
                self._usable = usable
                self._find_hopeless(self._places, view)
            else:
                self._find_hopeless([p for p in self._places if p.gives_up is not None], view)
            ready = (place for place in self._places if place.gives_up is None)
            places = list(islice(ready, window(self._config.max_bypass)))
            waiting = [Waiting(place.job.demand, place.job.bypassed) for place in places]
            picked = pick(waiting, view, self._config.max_bypass)
            if picked is None:
                return
            for earlier in picked.bypassed:
                places[earlier].job.bypassed += 1
            place = places[picked.index]
            self._leave(place)
            if not place.granted.done():  # else its client has gone
                self._grant(place.job, picked.pair)
                place.granted.set_result(None)
                self.overhead.add(perf_counter() - began)

    def close(self) -> None:
        """End the wait of everybody, now and from now on."""
        self._closed = True
        for place in self._places.copy():
            self._leave(place)
            _fail(place, Unavailable(STOPPING))

    def _leave(self, place: _Place) -> None:
        if place.queued:
            place.queued = False
            self._places.remove(place)

    def _take(self, place: _Place) -> None:
        place.queued = True
        if place.job.num_attempts:
            self._places.insert(0, place)  # its client has waited already
        else:
            self._places.append(place)
        if place.job.let_in:
            self._find_hopeless([place], self._view())
            self.serve()
        else:
            self._expect_worker(place)

    def _let_in(self, view: View) -> None:
        """When there is a pair, those that were held are told whether they can be served."""
        if not usable_pairs(view):
            return
        for place in [place for place in self._places if not place.job.let_in]:
            request = place.job.request
            verdict = admit(len(request.ids), request.max_tokens, view, 0, self._config.max_queue)
            if isinstance(verdict, Admitted):
                place.job.admit(verdict.max_tokens)
                self._go_on(place)
            else:
                self._leave(place)
                _fail(place, verdict)

    def _find_hopeless(self, places: list[_Place], view: View) -> None:
        """Those that no worker of now could ever serve wait for one, and not for its being free.

        Not for long, as their workers may only be reconnecting; where pools may be at zero, for
        as long as one may take to start.
        """
        known = [place for place in places if place.job.let_in and not place.granted.done()]
        waiting = [Waiting(place.job.demand, place.job.bypassed) for place in known]
        lost = set(hopeless(waiting, view))
        asleep = self._wakes and not usable_pairs(view)
        for index, place in enumerate(known):
            if index not in lost:
                self._go_on(place)
            elif asleep:
                self._expect_worker(place)
            elif place.gives_up is None:
                self._give_up_in(place, self._config.comeback_s)

    def _expect_worker(self, place: _Place) -> None:
        """From now on it waits for a worker that starts."""
        if not place.starting:
            place.starting = True
            place.limit.reschedule(place.job.deadline)
            self._give_up_in(place, self._config.wake_timeout_s)

    def _go_on(self, place: _Place) -> None:
        """Some worker could serve it. If it had to start first, nobody has been busy so far."""
        if place.gives_up is not None:
            place.gives_up.cancel()
            place.gives_up = None
        if place.starting and not place.granted.done():
            place.starting = False
            place.limit.reschedule(self._patience(place.job))

    def _patience(self, job: Job) -> float:
        """Until when, in loop time, workers may be too busy for it."""
        return min(asyncio.get_running_loop().time() + self._config.queue_timeout_s, job.deadline)

    def _give_up_in(self, place: _Place, seconds: float) -> None:
        if place.gives_up is not None:
            place.gives_up.cancel()
        place.gives_up = asyncio.get_running_loop().call_later(seconds, self._give_up, place)

    def _give_up(self, place: _Place) -> None:
        """Its time is over."""
        if place.granted.done():
            return
        self._leave(place)
        if place.starting and not usable_pairs(self._view()):
            waited = f"this request has waited for {self._config.wake_timeout_s:g} s; try again"
            error = Unavailable(f"{self._lack()}; {waited}")
            error.retry_after_s = WAKE_RETRY_AFTER_S
        else:
            advice = place.job.problem or "try again"
            error = Unavailable(f"no worker is left that could serve this; {advice}")
        _fail(place, error.rejects("no_workers"))


def _fail(place: _Place, error: RequestError) -> None:
    if not place.granted.done():
        place.granted.set_exception(error)
        place.granted.exception()  # nobody complains when its client has gone meanwhile
