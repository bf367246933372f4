"""The queue of requests that wait until a pair of workers has room for them (asyncio).

Who goes next is decided by ``router.admission.pick``; this file only waits and wakes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter

from router.admission import Waiting, hopeless, pick
from router.buckets import OVERHEAD, Tally
from router.config import RouterConfig
from router.errors import DeadlineExceeded, QueueFull, Unavailable
from router.job import Job
from router.policy import Key, Pair, View, usable_pairs

DEADLINE = "the request took longer than this server allows"
STOPPING = "the server is stopping"


class _Place:
    """A job's place in the queue."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.gives_up_at: float | None = None  # loop time; None: some worker could serve it


class Queue:
    """``grant`` opens a job's calls at a pair, so that the next ``view`` counts them."""

    def __init__(
        self,
        config: RouterConfig,
        view: Callable[[], View],
        grant: Callable[[Job, Pair], None],
    ) -> None:
        self.overhead = Tally(OVERHEAD)  # seconds that finding a pair took, for those that got one
        self._config = config
        self._view = view
        self._grant = grant
        self._places: list[_Place] = []
        self._usable: tuple[frozenset[Pair], frozenset[Key]] | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._places)

    async def wait(self, job: Job) -> None:
        """Until the job's calls are open. Raises RequestError when that takes too long."""
        if self._closed:
            raise Unavailable(STOPPING)
        place = _Place(job)
        if job.num_attempts:
            self._places.insert(0, place)  # its client has waited already
        else:
            self._places.append(place)
        patience = asyncio.get_running_loop().time() + self._config.queue_timeout_s
        try:
            self._fail_hopeless([place])
            self.serve()
            async with asyncio.timeout_at(min(patience, job.deadline)):
                await place.granted
        except TimeoutError:
            if job.deadline <= patience:
                raise DeadlineExceeded(DEADLINE) from None
            error = QueueFull("all workers were busy for too long; try again")
            raise error.rejects("queue_timeout") from None
        finally:
            if place in self._places:
                self._places.remove(place)

    def serve(self) -> None:
        """To be called when something may have become free: give pairs to those who wait."""
        while self._places:
            began = perf_counter()
            view = self._view()
            keys = frozenset(key for key, worker in view.workers.items() if worker.usable)
            usable = frozenset(usable_pairs(view)), keys
            if usable != self._usable:
                self._usable = usable
                self._fail_hopeless(self._places)
            else:
                self._fail_hopeless([p for p in self._places if p.gives_up_at is not None])
            places = [place for place in self._places if place.gives_up_at is None]
            waiting = [Waiting(place.job.demand, place.job.bypassed) for place in places]
            picked = pick(waiting, view, self._config.max_bypass)
            if picked is None:
                return
            for earlier in picked.bypassed:
                places[earlier].job.bypassed += 1
            place = places[picked.index]
            self._places.remove(place)
            if not place.granted.done():  # else its client has gone
                self._grant(place.job, picked.pair)
                place.granted.set_result(None)
                self.overhead.add(perf_counter() - began)

    def close(self) -> None:
        """End the wait of everybody, now and from now on."""
        self._closed = True
        for place in self._places:
            _fail(place, STOPPING)
        self._places.clear()

    def _fail_hopeless(self, places: list[_Place]) -> None:
        """End the wait of those that no worker of now could ever serve.

        Not at once: their workers may only be reconnecting.
        """
        loop = asyncio.get_running_loop()
        waiting = [Waiting(place.job.demand, place.job.bypassed) for place in places]
        lost = set(hopeless(waiting, self._view()))
        for index, place in enumerate(places):
            if index not in lost:
                place.gives_up_at = None
            elif place.gives_up_at is None:
                place.gives_up_at = loop.time() + self._config.comeback_s
                loop.call_at(place.gives_up_at, self._give_up, place)

    def _give_up(self, place: _Place) -> None:
        """Its time is over, unless a worker has come back meanwhile."""
        now = asyncio.get_running_loop().time()
        if place in self._places and place.gives_up_at is not None and place.gives_up_at <= now:
            self._places.remove(place)
            advice = place.job.problem or "try again"
            _fail(place, f"no worker is left that could serve this; {advice}", "no_workers")


def _fail(place: _Place, reason: str, rejection: str = "") -> None:
    if not place.granted.done():
        place.granted.set_exception(Unavailable(reason).rejects(rejection))
        place.granted.exception()  # nobody complains when its client has gone meanwhile
