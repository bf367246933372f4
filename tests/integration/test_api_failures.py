"""What clients see when workers or the router fail: a status or one event, never silence."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest

from router import wire
from router.link import Link
from router.tokenizer import Detokenizer
from tests.integration.deployed import Deployment, deployed, run
from tests.integration.fake_worker import MODEL, FakeWorker

BODY = {"prompt": "x", "max_tokens": 200, "ignore_eos": True}


async def terminal(at: Deployment, body: dict[str, Any], ids: list[str]) -> dict[str, Any]:
    """The last event of a stream that must end by the contract; its texts go to ``ids``."""
    last: dict[str, Any] = {}
    lines: list[str] = []
    async with at.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                last = json.loads(line[6:])
                if "choices" in last:
                    ids.append(last["choices"][0]["text"])
            if line.startswith("data: "):
                lines.append(line)
    assert lines[-1] == "data: [DONE]"
    errors = [line for line in lines if '"error"' in line]
    ends = [line for line in lines if '"finish_reason":"' in line]
    assert len(errors) + len(ends) == 1
    return last


def swallow(worker: FakeWorker, kind: type) -> None:
    """From now on the worker takes such messages, and does nothing with them."""

    def hook(link: Link, message: wire.Message) -> bool:
        if isinstance(message, kind):
            worker.open[message.request, message.attempt] = None  # type: ignore[attr-defined]
        return isinstance(message, kind)

    worker.hook = hook


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["killed", "failed", "pull"])
def test_failures_before_the_first_token_have_a_status(how: str, stream: bool) -> None:
    """B016: 5xx with an error body that says why, never 200 and nothing."""

    async def scenario() -> None:
        async with deployed(roles="M") as at:

            def fail(link: Link, message: wire.Message) -> bool:
                if not isinstance(message, wire.Decode):
                    return False
                if how == "killed":
                    at.d.die()
                else:
                    kind = "internal" if how == "failed" else "pull"
                    link.send(wire.Failed(message.request, message.attempt, kind, "as scripted"))
                return True

            at.d.hook = fail
            response = await at.post("/v1/completions", {**BODY, "stream": stream})
            assert response.status_code == 503
            error = response.json()["error"]
            assert error.keys() == {"message", "type", "param", "code"}
            assert error["code"] == response.status_code
            assert response.headers["content-type"] == "application/json"
            assert "no worker is left" in error["message"]
            assert ("as scripted" if how != "killed" else "closed") in error["message"]
            assert response.headers["retry-after"]

    run(scenario)


@pytest.mark.parametrize("another", [False, True])
def test_decode_killed_in_twenty_streams(another: bool) -> None:
    """B017, B008: each stream goes on elsewhere, or ends with one error event within seconds."""
    text = "".join(chr(ord("a") + i % 26) for i in range(200))

    async def scenario() -> None:
        async with deployed(text, roles="PDD" if another else "PD", max_num_seqs=64) as at:
            decoders = at.workers[1:]
            gates = [asyncio.Event() for _ in decoders]
            for d, gate in zip(decoders, gates, strict=True):
                d.gate = gate
            texts: list[list[str]] = [[] for _ in range(20)]
            streams = [asyncio.ensure_future(terminal(at, BODY, ids)) for ids in texts]
            async with asyncio.timeout(20):
                while not all(len(ids) >= 5 for ids in texts):
                    for gate in gates:
                        gate.set()
                    await asyncio.sleep(0)
            killed = at.d
            for d, gate in zip(decoders, gates, strict=True):
                if d is not killed:
                    d.gate = None
                    gate.set()
            began = time.monotonic()
            killed.die()
            if not another:
                ends = await asyncio.gather(*streams)
                assert time.monotonic() - began < 3
                assert all(end["error"]["code"] == 503 for end in ends)
                assert all(text.startswith("".join(ids)) for ids in texts)
                return
            for _ in range(400):  # those that wait at the gate they saw
                gates[0].set()
                await asyncio.sleep(0)
            ends = await asyncio.gather(*streams)
            assert all(end["choices"][0]["finish_reason"] == "length" for end in ends)
            assert all("".join(ids) == text for ids in texts)

    run(scenario)


def test_the_official_client_raises_on_a_cut_stream() -> None:
    """B017."""

    async def scenario() -> None:
        async with deployed() as at:
            at.d.gate = asyncio.Event()
            client = openai.AsyncOpenAI(base_url=at.url + "/v1", api_key="x", max_retries=0)
            answer = await client.completions.create(model=MODEL, prompt="x", stream=True)
            assert (await anext(answer)).choices[0].text == "0"
            at.d.die()
            with pytest.raises(openai.APIError):
                await anext(answer)
            await client.close()

    run(scenario)


def test_an_error_of_the_routers_own_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """B017: raised inside the detokenizer, in mid-stream."""
    push = Detokenizer.push

    def fail_later(self: Detokenizer, ids: Any) -> str:
        if self.num_tokens >= 3:
            raise RuntimeError("as scripted")
        return push(self, ids)

    async def scenario() -> None:
        async with deployed() as at:
            monkeypatch.setattr(Detokenizer, "push", fail_later)
            ids: list[str] = []
            end = await terminal(at, BODY, ids)
            assert "".join(ids) == "012"
            assert end["error"]["code"] == 500
            assert "scripted" not in json.dumps(end)
            await at.idle()
            response = await at.post("/v1/completions", {**BODY, "n": 0, "stream": True})
            assert response.status_code == 400

    run(scenario)


Prepare = Callable[[Deployment], Awaitable[None]]


async def no_prefill(at: Deployment) -> None:
    at.p.report(state="draining")
    await not_ready(at)


async def no_decode(at: Deployment) -> None:
    at.d.report(state="draining")
    await not_ready(at)


async def not_ready(at: Deployment) -> None:
    async with asyncio.timeout(5):
        while (await at.http.get("/ready")).status_code == 200:
            pass


async def saturated(at: Deployment) -> None:
    at.d.report(running=8)  # max_num_seqs
    record = at.dispatcher.table.workers[at.d.key]
    async with asyncio.timeout(5):
        while record.load != at.d.load:
            await asyncio.sleep(0)


async def stuck(at: Deployment) -> None:
    swallow(at.p, wire.Prefill)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prepare", "status", "kind"),
    [
        (no_prefill, 503, "ServiceUnavailableError"),
        (no_decode, 503, "ServiceUnavailableError"),
        (saturated, 429, "RateLimitError"),
        (stuck, 504, "GatewayTimeoutError"),
    ],
)
def test_each_kind_of_overload_has_its_status(
    prepare: Prepare, status: int, kind: str, stream: bool
) -> None:
    """B078, B042: the full queue is in test_api."""

    async def scenario() -> None:
        async with deployed(queue_timeout_s=0.2, request_timeout_s=0.5) as at:
            await prepare(at)
            began = time.monotonic()
            for path, body in (
                ("/v1/completions", {"prompt": [[1], [2]], "n": 2, "seed": 1}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
            ):
                response = await at.post(path, {**body, "max_tokens": 4, "stream": stream})
                assert response.status_code == status, response.text
                error = response.json()["error"]
                assert (error["type"], error["code"]) == (kind, status)
                assert ("retry-after" in response.headers) == (status in (429, 503))
            assert time.monotonic() - began < 5
            if status != 504:
                assert not any(isinstance(message, wire.Decode) for message in at.d.seen)
            await at.p.until(lambda: not at.p.open)

    run(scenario)


def test_the_end_of_the_router_ends_streams_by_the_contract() -> None:
    """Ctrl-C, a rollout: a stream that is cut short says so."""

    async def scenario() -> None:
        async with deployed() as at:
            at.d.gate = asyncio.Event()
            texts: list[list[str]] = [[] for _ in range(5)]
            streams = [asyncio.ensure_future(terminal(at, BODY, ids)) for ids in texts]
            whole = asyncio.ensure_future(at.post("/v1/completions", BODY))
            async with asyncio.timeout(5):
                while at.d.kinds().count("Decode") < 6 or not all(texts):
                    await asyncio.sleep(0.001)
            await at.dispatcher.close()
            ends = await asyncio.gather(*streams)
            assert {end["error"]["message"] for end in ends} == {"the server is stopping"}
            assert {end["error"]["code"] for end in ends} == {503}
            assert (await whole).status_code == 503
            assert (await at.http.get("/ready")).status_code == 503
            assert (await at.post("/v1/completions", BODY)).status_code == 503

    run(scenario)
