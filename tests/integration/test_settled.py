"""When a new deployment takes its share of the requests: ``GET /ready?settled=SECONDS``."""

from __future__ import annotations

import asyncio

from router.dispatch import Dispatcher
from tests.integration.deployed import deployed
from tests.integration.dispatching import run, serving
from tests.integration.fake_worker import FakeWorker

TWO_DECODERS = (("prefill", 1), ("decode", 2))
LONG_S = 3600.0


def test_settled_when_all_workers_are_there() -> None:
    async def scenario() -> None:
        p, d, late = (
            FakeWorker("prefill", "P"),
            FakeWorker("decode", "D"),
            FakeWorker("decode", "D2"),
        )
        late.registered = False
        async with serving(p, d, late, replicas=TWO_DECODERS) as dispatcher:
            assert dispatcher.ready
            assert not dispatcher.settled(LONG_S), "one decode worker of two"
            late.registered = True
            await until_settled(dispatcher)

    run(scenario)


def test_settled_after_a_while_with_what_there_is() -> None:
    async def scenario() -> None:
        p, d = FakeWorker("prefill", "P"), FakeWorker("decode", "D")
        async with serving(p, d, replicas=TWO_DECODERS) as dispatcher:
            assert not dispatcher.settled(LONG_S)
            assert dispatcher.settled(0), "no patience"
            dispatcher.readiness.first_at -= LONG_S  # it was an hour ago
            assert dispatcher.settled(LONG_S)

    run(scenario)


def test_never_settled_without_a_pair() -> None:
    async def scenario() -> None:
        p = FakeWorker("prefill", "P")
        async with serving(p, ready=False, replicas=(("prefill", 1),)) as dispatcher:
            await p.until(lambda: bool(dispatcher.table.workers))
            assert not dispatcher.settled(0)

    run(scenario)


def test_who_was_settled_is_so_whenever_it_is_ready() -> None:
    """A loss of all workers is over when the first one is back, not a while later."""

    async def scenario() -> None:
        p, d = FakeWorker("prefill", "P"), FakeWorker("decode", "D")
        late = FakeWorker("decode", "D2")
        async with serving(p, d, late, replicas=TWO_DECODERS) as dispatcher:
            assert dispatcher.settled(LONG_S)
            late.registered = False
            await lost(dispatcher, d, late)
            assert not dispatcher.settled(0)
            d.report(state="ready")
            async with asyncio.timeout(10):
                while not dispatcher.ready:
                    await asyncio.sleep(0.01)
            assert dispatcher.settled(LONG_S), "one decode worker of two, but not at the start"

    run(scenario)


async def lost(dispatcher: Dispatcher, *workers: FakeWorker) -> None:
    for worker in workers:
        worker.report(state="draining")
    async with asyncio.timeout(10):
        while dispatcher.ready:
            await asyncio.sleep(0.01)


def test_over_http() -> None:
    async def scenario() -> None:
        async with deployed() as at:
            for path in ("/ready", "/ready?settled=0"):
                assert (await at.http.get(path)).status_code == 200
            for wrong in ("soon", "-1", "nan", "inf", ""):
                response = await at.http.get("/ready", params={"settled": wrong})
                assert response.status_code == 400
                assert response.json()["error"]["param"] == "settled"
                assert "not a number of seconds" in response.json()["error"]["message"]

    run(scenario)


async def until_settled(dispatcher: Dispatcher) -> None:
    async with asyncio.timeout(10):
        while not dispatcher.settled(LONG_S):
            await asyncio.sleep(0.01)
