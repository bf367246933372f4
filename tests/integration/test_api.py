"""What the HTTP API says, to right requests and to wrong ones."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from router import wire
from router.link import Link
from tests.integration.deployed import deployed, run
from tests.integration.fake_worker import EOS, MODEL

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
CHAT_IDS = list(b"user: hi\nassistant: ")


def test_chat() -> None:
    async def scenario() -> None:
        async with deployed("Paris.") as at:
            at.p.cached_tokens = 16
            response = await at.post("/v1/chat/completions", CHAT)
            body = response.json()
            assert response.status_code == 200
            assert body["object"] == "chat.completion"
            assert body["id"] == "chatcmpl-" + response.headers["x-request-id"]
            assert body["model"] == MODEL
            (choice,) = body["choices"]
            assert choice["message"] == {"role": "assistant", "content": "Paris."}
            assert choice["finish_reason"] == "stop"
            assert body["usage"] == {
                "prompt_tokens": len(CHAT_IDS),
                "completion_tokens": 7,
                "total_tokens": len(CHAT_IDS) + 7,
                "prompt_tokens_details": {"cached_tokens": 16},
            }
            assert "prompt_token_ids" not in body
            prefill = at.p.seen[0]
            assert isinstance(prefill, wire.Prefill)
            assert prefill.sampling.stop_ids == (EOS,)
            assert prefill.sampling.temperature == 1.0
            await at.idle()

    run(scenario)


def test_chat_stream() -> None:
    async def scenario() -> None:
        async with deployed("Paris.") as at:
            *chunks, done = await at.events("/v1/chat/completions", CHAT)
            assert done == "[DONE]"
            assert len({chunk["id"] for chunk in chunks}) == 1
            assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
            assert not any("usage" in chunk for chunk in chunks)
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
            assert deltas[0] == {"role": "assistant", "content": ""}
            assert deltas[1:-1] == [{"content": c} for c in "Paris."]
            assert deltas[-1] == {}
            reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
            assert reasons == [None] * 7 + ["stop"]

    run(scenario)


def test_usage_in_streams() -> None:
    async def scenario() -> None:
        async with deployed() as at:
            for path, body in (
                ("/v1/chat/completions", CHAT),
                ("/v1/completions", {"prompt": "hello"}),
            ):
                asked = {**body, "max_tokens": 4, "stream_options": {"include_usage": True}}
                *chunks, last, done = await at.events(path, asked)
                assert done == "[DONE]"
                assert last["choices"] == []
                whole = (await at.post(path, {**body, "max_tokens": 4})).json()
                assert last["usage"] == whole["usage"]
                assert last["usage"]["completion_tokens"] == 4
                assert all(chunk["usage"] is None for chunk in chunks)
                asked["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
                *chunks, last, done = await at.events(path, asked)
                assert chunks[-1]["usage"] == last["usage"]

    run(scenario)


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_exact_max_tokens(max_tokens: int) -> None:
    async def scenario() -> None:
        async with deployed() as at:
            body = {"prompt": "x", "max_tokens": max_tokens, "ignore_eos": True}
            whole = (await at.post("/v1/completions", body)).json()
            assert whole["usage"]["completion_tokens"] == max_tokens
            assert whole["choices"][0]["finish_reason"] == "length"
            *chunks, _ = await at.events("/v1/completions", body)
            assert [c["choices"][0]["text"] for c in chunks] == list("0123456789"[:max_tokens])
            assert [c["choices"][0]["finish_reason"] for c in chunks][-1] == "length"

    run(scenario)


def test_min_tokens_and_ignore_eos() -> None:
    async def scenario() -> None:
        async with deployed("ab") as at:
            for asked, tokens in (({"ignore_eos": True}, 8), ({"min_tokens": 5}, 6), ({}, 3)):
                body = {"prompt": "x", "max_tokens": 8, **asked}
                usage = (await at.post("/v1/completions", body)).json()["usage"]
                assert usage["completion_tokens"] == tokens

    run(scenario)


@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [
        ("3456", "012", 7),
        (["9", "23"], "01", 4),
        ("0", "", 1),
        ("01", "", 2),
        ("34x", "0123456789", 11),
        (["789x", "89"], "01234567", 10),
    ],
)
def test_stop_strings(stop: object, text: str, tokens: int) -> None:
    async def scenario() -> None:
        async with deployed() as at:
            body = {"prompt": "x", "stop": stop, "max_tokens": 50}
            whole = (await at.post("/v1/completions", body)).json()
            assert whole["choices"][0]["text"] == text
            assert whole["choices"][0]["finish_reason"] == "stop"
            assert whole["usage"]["completion_tokens"] == tokens
            *chunks, _ = await at.events("/v1/completions", body)
            assert "".join(c["choices"][0]["text"] for c in chunks) == text
            assert all(c["choices"][0]["text"] for c in chunks[:-1])
            included = await at.post(
                "/v1/completions", {**body, "include_stop_str_in_output": True}
            )
            if whole["choices"][0]["stop_reason"]:
                stopped = whole["choices"][0]["stop_reason"]
                assert included.json()["choices"][0]["text"] == text + stopped
            await at.idle()
            counts = at.dispatcher.counters
            assert (counts["finished"], counts["cancelled"]) == (3, 0)

    run(scenario)


def test_stop_token_ids() -> None:
    async def scenario() -> None:
        async with deployed() as at:
            body = {"prompt": "x", "stop_token_ids": [ord("3")], "max_tokens": 50}
            choice = (await at.post("/v1/completions", body)).json()["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == ("012", "stop")
            assert choice["stop_reason"] == ord("3")
            body["include_stop_str_in_output"] = True
            choice = (await at.post("/v1/completions", body)).json()["choices"][0]
            assert choice["text"] == "0123"

    run(scenario)


def test_characters_of_several_tokens() -> None:
    text = "é😀👩‍👩‍👧漢字 ďábel"

    async def scenario() -> None:
        async with deployed(text) as at:
            body = {"prompt": "x", "max_tokens": 100}
            *chunks, _ = await at.events("/v1/completions", body)
            texts = [c["choices"][0]["text"] for c in chunks]
            assert "".join(texts) == text
            assert not any("\ufffd" in part for part in texts)
            body["max_tokens"] = 4  # ends in the middle of the second character
            whole = (await at.post("/v1/completions", body)).json()["choices"][0]["text"]
            *chunks, _ = await at.events("/v1/completions", body)
            assert "".join(c["choices"][0]["text"] for c in chunks) == whole == "é\ufffd"

    run(scenario)


def test_token_ids() -> None:
    async def scenario() -> None:
        async with deployed("ab") as at:
            ask = {"return_token_ids": True}
            body = (await at.post("/v1/chat/completions", {**CHAT, **ask})).json()
            assert body["prompt_token_ids"] == CHAT_IDS
            assert body["choices"][0]["token_ids"] == [*b"ab", EOS]
            body = (await at.post("/v1/completions", {"prompt": "hey", **ask})).json()
            assert "prompt_token_ids" not in body
            assert body["choices"][0]["prompt_token_ids"] == list(b"hey")
            assert body["choices"][0]["token_ids"] == [*b"ab", EOS]
            *chunks, _ = await at.events("/v1/chat/completions", {**CHAT, **ask})
            assert chunks[0]["prompt_token_ids"] == CHAT_IDS
            ids = [i for c in chunks[1:] for i in c["choices"][0]["token_ids"]]
            assert ids == [*b"ab", EOS]
            *chunks, _ = await at.events("/v1/completions", {"prompt": "hey", **ask})
            assert chunks[0]["choices"][0]["prompt_token_ids"] == list(b"hey")
            assert [c["choices"][0]["token_ids"] for c in chunks] == [[97], [98], [EOS]]

    run(scenario)


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("a", 1), (["a", "bc"], 2), ([97, 98], 1), ([[97], [98, 99]], 2)],
)
def test_prompt_forms_and_n(prompt: object, count: int) -> None:
    async def scenario() -> None:
        async with deployed() as at:
            body = {"prompt": prompt, "max_tokens": 3, "n": 2, "seed": 5}
            whole = (await at.post("/v1/completions", body)).json()
            assert [c["index"] for c in whole["choices"]] == list(range(count * 2))
            assert {c["text"] for c in whole["choices"]} == {"012"}
            assert whole["usage"]["completion_tokens"] == 3 * 2 * count
            prefills = [m for m in at.p.seen if isinstance(m, wire.Prefill)]
            assert sorted(m.sampling.choice for m in prefills) == sorted([0, 1] * count)
            assert {m.sampling.seed for m in prefills} == {5}
            *chunks, _ = await at.events("/v1/completions", body)
            ended = [c["choices"][0] for c in chunks if c["choices"][0]["finish_reason"]]
            assert sorted(c["index"] for c in ended) == list(range(count * 2))
            for index in range(count * 2):
                own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
                assert "".join(c["text"] for c in own) == "012"
                assert [c["finish_reason"] for c in own] == [None, None, "length"]
            await at.idle()

    run(scenario)


WRONG = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [257]}, "prompt"),
    ({"prompt": [2**63]}, "prompt"),
    ({"prompt": [["a"]]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": [5]}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
    ({"min_tokens": 10**30, "max_tokens": 10**30}, "min_tokens"),
    ({"prompt": ["x"] * 60, "n": 8}, "prompt"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 1e9}, "temperature"),
    ({"temperature": "0"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": -1}, "top_p"),
    ({"top_p": 2}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 0.01}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 1000}, "n"),
    ({"n": 2, "temperature": 0}, "n"),
    ({"seed": 2**70}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["a"] * 10_000}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop": [5]}, "stop"),
    ({"stop_token_ids": [257]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": 5}, "stop_token_ids"),
    ({"stream": "yes"}, "stream"),
    ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": "x"}}, "stream_options.include_usage"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 129}, "cache_salt"),
    ({"request_id": "a\r\nb"}, "request_id"),
    ({"model": 5}, "model"),
    ({"logprobs": 1}, "logprobs"),
    ({"logprobs": 0}, "logprobs"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ({"echo": True}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 2}, "best_of"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"structured_outputs": {"json": {}}}, "structured_outputs"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
]
WRONG_CHAT = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"min_tokens": 10**30}, "min_tokens"),
    ({"messages": [{"content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"chat_template": "x"}, "chat_template"),
]


def test_wrong_requests_are_400_with_the_field() -> None:
    async def scenario() -> None:
        async with deployed() as at:
            cases = [
                ("/v1/chat/completions", {**CHAT, **body}, param) for body, param in WRONG_CHAT
            ]
            for body, param in WRONG:
                cases.append(("/v1/completions", {"prompt": "x", **body} if body else {}, param))
            for path, body, param in cases:
                for stream in ({}, {"stream": True}):
                    response = await at.post(path, {**stream, **body})
                    assert response.status_code == 400, (body, response.text)
                    assert response.headers["content-type"] == "application/json"
                    error = response.json()["error"]
                    assert error["param"] == param, (body, error)
                    assert error["type"] == "BadRequestError"
                    assert error["code"] == 400
                    assert param.split(".")[-1] in error["message"]
            assert at.p.seen == []
            whole = await at.post("/v1/completions", {"prompt": "x", "max_tokens": 3})
            assert whole.json()["choices"][0]["text"] == "012"

    run(scenario)


def test_unknown_fields_and_harmless_values_pass() -> None:
    async def scenario() -> None:
        async with deployed() as at:
            body = {
                "prompt": "x",
                "max_tokens": 2,
                "user": "me",
                "metadata": {"a": 1},
                "kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [1]},
                "bootstrap_room": 7,
                "logprobs": None,
                "presence_penalty": 0,
                "repetition_penalty": 1.0,
                "logit_bias": {},
                "best_of": 1,
                "echo": False,
                "response_format": {"type": "text"},
                "temperature": 1,
                "top_k": -1,
                "stop": None,
                "n": None,
                "seed": -1,
                "stream": None,
                "model": None,
            }
            response = await at.post("/v1/completions", body)
            assert response.status_code == 200, response.text
            prefill = at.p.seen[0]
            assert isinstance(prefill, wire.Prefill)
            assert prefill.sampling.seed == 2**64 - 1
            assert prefill.sampling.top_k == 0

    run(scenario)


def test_bodies_that_are_not_requests() -> None:
    async def scenario() -> None:
        async with deployed(max_body_bytes=10_000) as at:
            path = "/v1/completions"
            json_type = {"content-type": "application/json"}
            for content in (
                b"", b"{", b"[]", b"5", b"\xff", b'{"prompt": "x", "temperature": NaN}',
                b'{"prompt": "x", "temperature": 1e999}', b'{"a":' * 1900,
                b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
            ):  # fmt: skip
                response = await at.http.post(path, content=content, headers=json_type)
                assert response.status_code == 400, content[:50]
                assert response.json()["error"]["type"] == "BadRequestError"
            response = await at.http.post(
                path, content=b'{"prompt": "x"}', headers={"content-type": "text/plain"}
            )
            assert response.status_code == 400
            response = await at.post(path, {"prompt": "x" * 20_000})
            assert response.status_code == 413
            assert response.json()["error"]["code"] == 413
            for name in ("prompt", "stop", "cache_salt", "model", "request_id", "stream"):
                content = b'{"prompt": "x", "max_tokens": 1, "%s": "\\ud800"}' % name.encode()
                response = await at.http.post(path, content=content, headers=json_type)
                assert response.status_code in (200, 400, 404), response.text
            response = await at.post("/tokenize", {"prompt": "x" * 9_000})
            assert response.json()["count"] == 9_000  # that is not about what fits a worker
            response = await at.post(path, {"prompt": "x" * 600})
            assert response.status_code == 400
            assert "512" in response.json()["error"]["message"]

    run(scenario)


def test_not_found_and_not_allowed() -> None:
    async def scenario() -> None:
        async with deployed() as at:
            for name in ("nope", "", MODEL + " "):
                for stream in (False, True):
                    response = await at.post(
                        "/v1/chat/completions", {**CHAT, "model": name, "stream": stream}
                    )
                    assert response.status_code == 404
                    assert response.json()["error"]["code"] == "model_not_found"
                    assert response.json()["error"]["param"] == "model"
            response = await at.http.get("/v1/embeddings")
            assert response.status_code == 404
            assert response.json()["error"]["code"] == 404
            response = await at.http.get("/v1/completions")
            assert response.status_code == 405
            assert response.json()["error"]["code"] == 405
            assert at.p.seen == []

    run(scenario)


def test_models_version_health_state() -> None:
    async def scenario() -> None:
        async with deployed() as at:
            models = (await at.http.get("/v1/models")).json()
            assert models["object"] == "list"
            assert models["data"][0]["id"] == MODEL
            assert models["data"][0]["object"] == "model"
            assert models["data"][0]["max_model_len"] == 512
            assert (await at.http.get(f"/v1/models/{MODEL}")).json() == models["data"][0]
            assert (await at.http.get("/v1/models/a/b")).status_code == 404
            assert (await at.http.get("/health")).status_code == 200
            assert "version" in (await at.http.get("/version")).json()
            state = (await at.http.get("/internal/state")).json()
            worker = state["workers"][0]
            expected = {
                "id", "epoch", "role", "state", "pid", "host", "port", "transport", "running",
                "waiting", "tickets", "computed_prompt_tokens", "pulled_bytes", "blocks",
                "cached_prompt_tokens", "generated_tokens", "pulled_blocks", "preemptions",
                "failed_pulls", "expired_leases", "steps", "model", "kv_blocks",
            }  # fmt: skip
            assert expected <= worker.keys()
            assert worker["state"] == "ready"
            assert worker["blocks"].keys() == {
                "free", "active", "cached", "leased", "quarantined",
            }  # fmt: skip
            assert state["requests"]["running"] == 0
            at.d.report(state="draining")
            async with asyncio.timeout(5):
                while (await at.http.get("/ready")).status_code == 200:
                    pass
            response = await at.post("/v1/completions", {"prompt": "x", "stream": True})
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"
            assert response.json()["error"]["type"] == "ServiceUnavailableError"

    run(scenario)


def test_tokenize_and_detokenize() -> None:
    async def scenario() -> None:
        async with deployed() as at:
            body = (await at.post("/tokenize", {"prompt": "hé", "return_token_strs": True})).json()
            assert body["tokens"] == list("hé".encode())
            assert body["count"] == 3
            assert body["max_model_len"] == 512
            assert len(body["token_strs"]) == 3
            body = (await at.post("/tokenize", CHAT)).json()
            assert body["tokens"] == CHAT_IDS
            response = await at.post("/detokenize", {"tokens": list("hé".encode())})
            assert response.json() == {"prompt": "hé"}
            assert (await at.post("/detokenize", {"tokens": [999]})).status_code == 400
            assert (await at.post("/tokenize", {})).status_code == 400

    run(scenario)


def test_request_ids_are_echoed() -> None:
    async def scenario() -> None:
        async with deployed() as at:
            headers = {"x-request-id": "abc-1"}
            for stream in (False, True):
                response = await at.post(
                    "/v1/completions", {"prompt": "x", "stream": stream}, headers=headers
                )
                assert response.headers["x-request-id"] == "abc-1"
                assert "cmpl-abc-1" in response.text
            response = await at.post("/v1/completions", {"prompt": ""}, headers=headers)
            assert response.status_code == 400
            assert response.headers["x-request-id"] == "abc-1"

    run(scenario)


def test_api_keys() -> None:
    async def scenario() -> None:
        async with deployed(api_keys=("one", "two")) as at:
            assert (await at.http.get("/health")).status_code == 200
            for header in ({}, {"authorization": "Bearer three"}, {"authorization": "one"}):
                for path in ("/v1/models", "/internal/state", "/docs", "/openapi.json"):
                    response = await at.http.get(path, headers=header)
                    assert response.status_code == 401
                    assert response.json()["error"]["type"] == "authentication_error"
            for key in ("one", "two"):
                response = await at.http.get(
                    "/v1/models", headers={"authorization": f"Bearer {key}"}
                )
                assert response.status_code == 200

    run(scenario)


def test_queue_full_is_429() -> None:
    async def scenario() -> None:
        async with deployed(max_queue=1) as at:
            at.d.report(running=8)
            key = (at.d.card.worker_id, at.d.card.epoch)
            async with asyncio.timeout(5):
                while at.dispatcher.table.workers[key].load != at.d.load:
                    await asyncio.sleep(0)
            waiting = asyncio.ensure_future(at.post("/v1/completions", {"prompt": "x"}))
            while len(at.dispatcher.queue) == 0:
                await asyncio.sleep(0.001)
            response = await at.post("/v1/completions", {"prompt": "x", "stream": True})
            assert response.status_code == 429
            assert response.headers["retry-after"] == "1"
            at.d.report(running=0)
            assert (await waiting).status_code == 200

    run(scenario)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", ["Reserve", "Prefill", "Decode", "Tokens"])
def test_a_client_that_goes_away(stage: str, stream: bool) -> None:
    async def scenario() -> None:
        async with deployed("x" * 400) as at:
            where = at.p if stage == "Prefill" else at.d

            def swallow(link: Link, message: wire.Message) -> bool:
                if type(message).__name__ != stage:
                    return False
                where.open[message.request, message.attempt] = None  # type: ignore[union-attr]
                return True

            where.hook = swallow
            if stage == "Tokens":
                at.d.gate = asyncio.Event()
            body = {"prompt": "x", "max_tokens": 300, "stream": stream}
            data = json.dumps(body).encode()
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", int(at.url.rpartition(":")[2])
            )
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%s" % (len(data), data)
            )
            last = "Decode" if stage == "Tokens" else stage
            await where.until(lambda: last in where.kinds())
            writer.close()
            await where.until(lambda: "Abort" in where.kinds())
            await at.idle()

    run(scenario)


def test_an_error_before_the_first_token_has_its_status() -> None:
    async def scenario() -> None:
        async with deployed() as at:

            def fail(link: Link, message: wire.Message) -> bool:
                if isinstance(message, wire.Prefill):
                    link.send(wire.Failed(message.request, message.attempt, "invalid", "no way"))
                return isinstance(message, wire.Prefill)

            at.p.hook = fail
            for stream in (False, True):
                response = await at.post("/v1/completions", {"prompt": "x", "stream": stream})
                assert response.status_code == 400
                assert response.json()["error"]["message"] == "no way"
            await at.idle()

    run(scenario)


def test_an_error_in_mid_stream_is_an_event() -> None:
    async def scenario() -> None:
        async with deployed() as at:
            at.d.gate = asyncio.Event()
            client = openai.AsyncOpenAI(base_url=at.url + "/v1", api_key="x", max_retries=0)
            answer = await client.completions.create(model=MODEL, prompt="x", stream=True)
            assert (await anext(answer)).choices[0].text == "0"
            await at.d.stop()
            with pytest.raises(openai.APIError, match="request failed|no worker"):
                await anext(answer)
            await client.close()
            raw = await at.post("/v1/completions", {"prompt": "x", "stream": True})
            assert raw.status_code == 503
            await at.p.until(lambda: at.p.idle)

    run(scenario)


def test_the_status_line_does_not_wait_for_ever() -> None:
    async def scenario() -> None:
        async with deployed(first_token_status_s=0.05, keep_alive_s=0.05) as at:
            held: list[tuple[Link, wire.Prefill]] = []

            def hold(link: Link, message: wire.Message) -> bool:
                if isinstance(message, wire.Prefill):
                    held.append((link, message))
                return isinstance(message, wire.Prefill)

            at.p.hook = hold
            body = {"prompt": "x", "stream": True, "max_tokens": 1}
            async with at.http.stream("POST", "/v1/completions", json=body) as response:
                assert response.status_code == 200
                lines = response.aiter_lines()
                comments = 0
                async for line in lines:
                    comments += line == ": keep-alive"
                    if comments == 3:
                        at.p._prefill(*held[0])
                    if line.startswith("data: {"):
                        assert json.loads(line[6:])["choices"][0]["text"] == "0"
                        break
                assert "data: [DONE]" in [line async for line in lines]

    run(scenario)


def test_the_official_client() -> None:
    async def scenario() -> None:
        async with deployed("Hello!") as at:
            client = openai.AsyncOpenAI(base_url=at.url + "/v1", api_key="x", max_retries=0)
            assert [model.id async for model in client.models.list()] == [MODEL]
            assert (await client.models.retrieve(MODEL)).id == MODEL
            messages: Any = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
            answer = await client.chat.completions.create(model=MODEL, messages=messages)
            assert answer.choices[0].message.content == "Hello!"
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == len(CHAT_IDS)
            stream = await client.chat.completions.create(
                model=MODEL,
                messages=messages,
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            assert text == "Hello!"
            assert chunks[-1].usage is not None
            completion = await client.completions.create(model=MODEL, prompt=["a", "b"])
            assert [c.text for c in completion.choices] == ["Hello!", "Hello!"]
            with pytest.raises(openai.NotFoundError):
                await client.chat.completions.create(model="nope", messages=messages)
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(model=MODEL, messages=messages, n=0)
            await client.close()

    run(scenario)


def test_cache_salt_is_derived_by_the_server() -> None:
    async def scenario() -> None:
        async with deployed() as at:
            for salt in ("a", "b", "a", None):
                await at.post("/v1/completions", {"prompt": "x", "cache_salt": salt})
            salts = [m.salt for m in at.p.seen if isinstance(m, wire.Prefill)]
            assert salts[0] == salts[2] != salts[1]
            assert salts[3] == b""
            assert b"a" not in (salts[0], salts[0][:1]) or len(salts[0]) == 16

    run(scenario)
