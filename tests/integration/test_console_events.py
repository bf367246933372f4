"""The console over HTTP: what anybody may read, what needs the key, and what the events say."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from router.console import feed as feeds, pages
from router.link import Link
from router.wire import Message, Prefill
from tests.integration.deployed import Deployment, deployed, run
from tests.integration.fake_worker import MODEL

CHAT = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 6}
KEY = {"authorization": "Bearer secret"}


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "TICK_S", 0.02)
    monkeypatch.setattr(feeds, "SUMS_S", 0.0)


@contextlib.asynccontextmanager
async def listening(at: Deployment, **options: Any) -> AsyncIterator[Events]:
    async with at.http.stream("GET", "/internal/events", **options) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        yield Events(response)


class Events:
    def __init__(self, response: httpx2.Response) -> None:
        self._lines = response.aiter_lines()

    async def next(self, want: str) -> dict[str, Any]:
        """The data of the next event of this name."""
        name = ""
        async for line in self._lines:
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: ") and name == want:
                data: dict[str, Any] = json.loads(line[6:])
                return data
        raise AssertionError(f"the events ended without {want}")

    async def ended(self) -> list[dict[str, Any]]:
        """The requests that have ended, once there are some."""
        while True:
            state = await self.next("state")
            if state["ended"]:
                return list(state["ended"])

    async def rest(self) -> list[str]:
        return [line async for line in self._lines]


def test_the_page_is_public_and_its_data_is_not() -> None:
    async def scenario() -> None:
        async with deployed(api_keys=("secret",)) as at:
            page = await at.http.get("/console")
            assert page.status_code == 200
            assert page.headers["content-type"] == "text/html; charset=utf-8"
            policy = page.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            for path in pages.paths():
                assert (await at.http.get(path)).status_code in (200, 307), path
            slash = await at.http.get("/console/", follow_redirects=True)
            assert slash.text == page.text
            for path in ("/internal/events", "/internal/state", "/console/other.js"):
                assert (await at.http.get(path)).status_code == 401, path
            async with listening(at, headers=KEY) as events:
                assert (await events.next("state"))["model"] == MODEL

    run(scenario)


def test_files_are_asked_for_again_but_sent_once() -> None:
    async def scenario() -> None:
        async with deployed() as at:
            first = await at.http.get("/console/app.js")
            assert first.headers["cache-control"] == "no-cache"
            assert first.headers["content-type"].startswith("text/javascript")
            again = {"if-none-match": first.headers["etag"]}
            second = await at.http.get("/console/app.js", headers=again)
            assert (second.status_code, second.content) == (304, b"")
            head = await at.http.head("/console/app.js")
            assert head.headers["content-length"] == str(len(first.content))
            assert (await at.http.head("/internal/events")).status_code == 200
            assert (await at.http.get("/console/none.js")).status_code == 404
            slash = await at.http.get("/console/")
            assert slash.headers["location"] == "../console"  # whatever a proxy has before that

    run(scenario)


def test_a_request_is_seen_while_it_runs_and_when_it_has_ended() -> None:
    async def scenario() -> None:
        async with deployed(slo_ttft_s=1.5) as at:
            async with listening(at) as events:
                hello = await events.next("hello")
                assert (hello["ended"], hello["history"]) == ([], [])
                state = await events.next("state")
                assert state["slo"] == {"ttft": 1.5, "tpot": 0.1}
                assert [w["role"] for w in state["workers"]] == ["prefill", "decode"]
                assert all(w["state"] == "ready" and w["kv_blocks"] == 64 for w in state["workers"])
                assert state["requests"] == {"in_flight": 0, "queued": 0}
                assert state["live"] == []

                at.d.gate = asyncio.Event()  # D says nothing until it is told
                asked = asyncio.create_task(
                    at.post("/v1/chat/completions", CHAT, headers={"x-request-id": "mine"})
                )
                while not (live := state["live"]) or live[0]["spans"][-1][0] != "decode":
                    state = await events.next("state")
                (one,) = live
                assert (one["id"], one["end"], one["code"]) == ("mine", None, 0)
                assert one["ttft"] is not None
                assert one["spans"][-1][2:] == [None, "D0"]
                assert state["requests"]["in_flight"] == 1
                assert state["now"]["ttft"]["n"] == 1  # its first token is known

                at.d.gate.set()
                while not asked.done():
                    at.d.gate.set()
                    await asyncio.sleep(0)
                (one,) = await events.ended()
                assert (one["id"], one["code"], one["tokens"]) == ("mine", 200, 6)
                assert [(span[0], span[3]) for span in one["spans"] if span[3]] == [
                    ("prefill", "P0"),
                    ("transfer", "D0"),
                    ("decode", "D0"),
                ]
                assert one["good"] is True
            async with listening(at) as events:  # who comes later is told as well
                hello = await events.next("hello")
                assert [one["id"] for one in hello["ended"]] == ["mine"]
                assert sum(point["judged"] for point in hello["history"]) == 1

    run(scenario)


def test_a_retry_is_seen() -> None:
    async def scenario() -> None:
        async with deployed(roles="PPD") as at:
            dead: list[str] = []

            def die(link: Link, message: Message) -> bool:
                if isinstance(message, Prefill) and not dead:
                    worker = next(w for w in at.workers if link in w.links)
                    dead.append(worker.card.worker_id)
                    worker.die()
                    return True
                return False

            for worker in at.workers[:2]:
                worker.hook = die
            async with listening(at) as events:
                answer = await at.post("/v1/chat/completions", CHAT)
                assert answer.status_code == 200
                (one,) = await events.ended()
            (lost,) = [span for span in one["spans"] if span[0] == "lost"]
            assert lost[3] == dead[0]
            assert one["retries"][0][1] == "prefill lost"
            other = {"P0": "P1", "P1": "P0"}[dead[0]]
            assert ("prefill", other) in [(span[0], span[3]) for span in one["spans"]]

    run(scenario)


def test_proofs_and_refusals() -> None:
    async def scenario() -> None:
        async with deployed() as at, listening(at) as events:
            assert (await events.next("hello"))["ended"] == []  # a pair was proven before
            bad = await at.post("/v1/chat/completions", {"messages": "none"})
            assert bad.status_code == 400
            (one,) = await events.ended()
            assert (one["code"], one["ttft"], one["good"]) == (400, None, None)
            assert "messages" in one["error"]

    run(scenario)


def test_a_page_that_was_closed_is_forgotten() -> None:
    async def scenario() -> None:
        async with deployed() as at:
            feed = at.front.console
            async with listening(at) as events:
                await events.next("state")
                assert len(feed._listeners) == 1
            async with asyncio.timeout(10):
                while feed._listeners:
                    await asyncio.sleep(0.01)
            assert feed._ticking is None

    run(scenario)


def test_a_reader_that_stands_still_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its events pile up to a limit, requests are answered as always, others get its place."""
    monkeypatch.setattr(pages, "STUCK_S", 0.3)

    async def scenario() -> None:
        async with deployed() as at:
            feed = at.front.console
            host, port = at.url.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port))) as stuck:
                stuck.sendall(b"GET /internal/events HTTP/1.1\r\nhost: x\r\n\r\n")
                async with asyncio.timeout(10):
                    while not feed._listeners:
                        await asyncio.sleep(0.01)
                (listener,) = feed._listeners
                for _ in range(feeds.MAX_WAITING):  # more than sockets hold
                    listener.put(feeds.encode("state", {"padding": "x" * 100_000}))
                    await asyncio.sleep(0)
                for _ in range(feeds.MAX_WAITING):
                    listener.put(feeds.encode("state", {}))
                assert len(listener._events) == feeds.MAX_WAITING
                assert listener._lost > 0
                answer = await at.post("/v1/chat/completions", CHAT)
                assert answer.status_code == 200
                async with asyncio.timeout(10):
                    while feed._listeners:  # though the connection is open still
                        await asyncio.sleep(0.01)

    run(scenario)


def test_a_server_that_stops_does_not_wait_for_consoles() -> None:
    async def scenario() -> None:
        async with deployed() as at, listening(at) as events:
            await events.next("state")
            at.front.console.close()
            async with asyncio.timeout(5):
                await events.rest()
            refused = await at.http.get("/internal/events")
            assert refused.status_code == 503

    run(scenario)


def test_a_stream_ends_by_itself_and_the_next_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "LIFETIME_S", 0.1)

    async def scenario() -> None:
        async with deployed() as at:
            for _ in range(2):
                async with listening(at) as events:
                    await events.next("state")
                    await events.rest()

    run(scenario)
