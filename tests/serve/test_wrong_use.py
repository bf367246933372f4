"""Wrong use ends clearly: at the command line before anything starts, over HTTP with a status.

The command line runs as a process of its own. Requests go over HTTP to the graph in one process:
after each bad one a right one is answered, by workers that nobody had to replace.
"""

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import urllib.error
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from router.api import create_api
from router.config import RouterConfig, RouterSettings
from router.wire import WorkerCard
from services.fetch import ALIASES, DEFAULT_MODEL, fetch
from services.model_cache import file_sha256
from tests.support.local_server import LocalServer, local_server
from tests.support.serving import BATON, Client, free_port, until

CONTEXT = 512
SIZES = ("--max-model-len", str(CONTEXT), "--kv-blocks", "100")
VOCAB = 49152
WRONG_USE = 2
FAILED = 1

# --- the command line ----------------------------------------------------------------------------


def baton(*args: str, **environ: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of ``baton serve ARGS``, which ends by itself."""
    process = subprocess.Popen(
        [BATON, "serve", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environ},
    )
    try:
        out, err = process.communicate(timeout=180)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        pytest.fail(f"baton serve {args} goes on:\n{out}{err}")
    return process.returncode, out, err


def refused(words: Iterable[str], *args: str, **environ: str) -> str:
    """Assert that ``baton serve ARGS`` is wrong use, told in one line; what it printed before."""
    status, out, err = baton(*args, **environ)
    assert status == WRONG_USE, out + err
    assert err.startswith("baton: error: ")
    assert err.count("\n") == 1, err
    for word in words:
        assert word in err
    for phase in ("ray ", "deploy ", "ready "):
        assert phase not in out
    return out


def test_a_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        out = refused([f"--port {port}", "taken", "--port"], "--port", port)
    assert out == ""


def test_an_unknown_model() -> None:
    port = str(free_port())
    words = ["'no-such-model'", *ALIASES, ".gguf"]
    refused(words, "--port", port, "--model", "no-such-model")


def test_a_pool_smaller_than_the_longest_request() -> None:
    """B012: refused before anything starts."""
    # 2048 tokens are 128 blocks of 16, and one is reserved.
    words = ["2048", "129", "100", "kv_blocks", "max_model_len"]
    sizes = ("--max-model-len", "2048", "--kv-blocks", "100")
    refused(words, "--port", str(free_port()), *sizes)


def test_an_unknown_flag() -> None:
    assert refused(["--kv-block", "--help"], "--kv-block", "300") == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("decode:\n  kv_block: 3\n", ["decode.kv_block", "unknown key", "kv_blocks"]),
        ("decoder: {}\n", ["decoder", "unknown key", "decode"]),
        ("port: eighty\n", ["port", "'eighty'", "whole number"]),
        ("router:\n  policy: best\n", ["router.policy", "'best'", "round-robin"]),
        ("prefill:\n  block_size: 8\n", ["prefill.block_size", "8", "decode.block_size", "16"]),
        ("a: [\n", ["not YAML"]),
    ],
)
def test_wrong_yaml(text: str, words: list[str], tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    refused(words, "--port", str(free_port()), "--config", str(file))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache like the user's, whose small files can be damaged; the folder that holds it."""
    source = fetch(DEFAULT_MODEL)
    folder = tmp_path / "baton" / "models" / source.name
    folder.mkdir(parents=True)
    for file in source.iterdir():
        if file.stat().st_size > 10e6:
            (folder / file.name).symlink_to(file)
        else:
            shutil.copy2(file, folder)
    return tmp_path


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_a_corrupted_file_in_the_cache(name: str, cache: Path) -> None:
    (file,) = cache.glob(f"baton/models/*/{name}")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    words = [name, "corrupted", file_sha256(file), "delete", "baton fetch"]
    refused(words, "--port", str(free_port()), XDG_CACHE_HOME=str(cache))


def test_a_missing_file_in_the_cache(cache: Path) -> None:
    (file,) = cache.glob("baton/models/*/model.safetensors")
    file.unlink()
    words = [str(file), "missing", "delete", "baton fetch"]
    refused(words, "--port", str(free_port()), XDG_CACHE_HOME=str(cache))


def test_a_corrupted_download(tmp_path: Path) -> None:
    file = tmp_path / "baton" / "gguf" / Path(ALIASES[DEFAULT_MODEL].member).name
    file.parent.mkdir(parents=True)
    file.write_bytes(b"GGUF, or so it seems")
    words = [str(file), "corrupted", "delete", "baton fetch"]
    refused(words, "--port", str(free_port()), XDG_CACHE_HOME=str(tmp_path))


def test_nixl_that_does_not_work_is_never_replaced(tmp_path: Path) -> None:
    """Found when the workers start; the error names NIXL and its backend, and all of it ends."""
    port = free_port()
    args = ("--port", str(port), "--max-model-len", "128", "--kv-blocks", "20")
    status, out, err = baton(*args, NIXL_PLUGIN_DIR=str(tmp_path))
    assert status == FAILED
    assert err.startswith("baton: error: ")
    assert err.strip().count("\n") == 0, err
    for word in ("Worker does not start", "nixl", "UCX", "choose the tcp transport"):
        assert word in err
    assert "ready in" not in out
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


# --- over HTTP -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with local_server(SIZES) as server:
        yield server


def error_of(client: Client, path: str, body: dict[str, Any] | bytes) -> tuple[int, Any, Any]:
    """Status, headers and error object of a request that must fail."""
    with pytest.raises(urllib.error.HTTPError) as caught, closed(caught):
        client.post(path, body)
    return caught.value.code, caught.value.headers, caught.value.answer["error"]


@contextlib.contextmanager
def closed(caught: pytest.ExceptionInfo[urllib.error.HTTPError]) -> Iterator[None]:
    """Read and close the answer that an HTTPError is."""
    try:
        yield
    except urllib.error.HTTPError as error:
        with error:
            error.answer = json.loads(error.read())  # type: ignore[attr-defined]
        raise


def incarnations(client: Client) -> set[tuple[str, int]]:
    return {(worker["id"], worker["epoch"]) for worker in client.workers()}


def probe(client: Client) -> None:
    """A right request gets the right answer, of two tokens: one from P, one from D."""
    body = {"prompt": "The capital of France is", "max_tokens": 2, "temperature": 0}
    assert client.post("/v1/completions", body, timeout=30)["choices"][0]["text"] == " Paris."


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


TEXT = {"prompt": "a", "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}

BAD_COMPLETIONS: list[tuple[dict[str, Any] | bytes, str]] = [
    *[
        ({"prompt": prompt, "max_tokens": 2}, "prompt")
        for prompt in (
            "", [], [[]], [""], ["a", ""], None, 5, 1.5, True, {}, ["a", 1], [1, "a"], [[1], []],
            [1.5], [True], [None], [[1], "a"], [-1], [VOCAB], [2**63], [2**70], [[1], [VOCAB]],
            ["a"] * 65, "a " * CONTEXT, [1] * CONTEXT, [1] * (2 * CONTEXT),
        )
    ],
    ({"max_tokens": 2}, "prompt"),
    *[({**TEXT, "max_tokens": value}, "max_tokens") for value in (0, -1, "5", 1.5, True, [])],
    *[({**TEXT, "min_tokens": value}, "min_tokens") for value in (-1, 3, "1")],
    *[({**TEXT, "temperature": value}, "temperature") for value in (-1, 1e9, "hot", True)],
    *[({**TEXT, "top_p": value}, "top_p") for value in (0, -1, 2, "1")],
    *[({**TEXT, "top_k": value}, "top_k") for value in (-2, 0.01, 2**40)],
    *[({**TEXT, "min_p": value}, "min_p") for value in (-0.1, 1.1)],
    *[({**TEXT, "n": value}, "n") for value in (0, -1, 17, 1.5)],
    ({**TEXT, "n": 2, "temperature": 0}, "n"),
    *[({**TEXT, "seed": value}, "seed") for value in (2**63, -(2**63) - 1, 2**70, 0.5, "1")],
    *[({**TEXT, "stop": value}, "stop") for value in (5, [5], [""], "", ["x"] * 10_000)],
    *[
        ({**TEXT, "stop_token_ids": value}, "stop_token_ids")
        for value in ([-1], [VOCAB], [2**63], ["a"], 5, [0] * 10_000)
    ],
    *[({**TEXT, "stream": value}, "stream") for value in ("yes", 1)],
    ({**TEXT, "stream_options": {"include_usage": True}}, "stream_options"),
    ({**TEXT, "cache_salt": ""}, "cache_salt"),
    ({**TEXT, "cache_salt": "\ud800"}, "cache_salt"),
    ({**TEXT, "request_id": "two words"}, "request_id"),
    ({**TEXT, "model": 5}, "model"),
    (b'{"prompt": "a", "temperature": 1e999}', "temperature"),
    (b'{"prompt": "a", "max_tokens": 1e999}', "max_tokens"),
]  # fmt: skip

BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    *[
        ({"messages": messages}, "messages")
        for messages in (
            [], None, "a", {}, [5], [{}], [{"role": "wizard", "content": "a"}], [{"role": "user"}],
            [{"role": "user", "content": None}], [{"role": "user", "content": 5}],
            [{"role": "user", "content": [{}]}], [{"role": "user", "content": ["a"]}],
            [{"role": "user", "content": [{"type": "text", "text": 5}]}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            [{"role": "user", "content": "a " * CONTEXT}],
        )
    ],
    ({**CHAT, "max_completion_tokens": 0}, "max_completion_tokens"),
    ({**CHAT, "temperature": "hot"}, "temperature"),
    ({**CHAT, "chat_template_kwargs": []}, "chat_template_kwargs"),
]  # fmt: skip

NOT_SUPPORTED: list[tuple[str, Any]] = [
    ("logprobs", 1), ("logprobs", True), ("logit_bias", {"5": 1}), ("presence_penalty", 0.5),
    ("frequency_penalty", -1), ("repetition_penalty", 1.1), ("best_of", 2), ("echo", True),
    ("suffix", "b"), ("tools", [{"type": "function"}]), ("tool_choice", "required"),
    ("response_format", {"type": "json_object"}), ("guided_json", {}), ("prompt_logprobs", 1),
]  # fmt: skip

BAD_BODIES: dict[str, bytes] = {
    "empty": b"",
    "no JSON": b"prompt=a",
    "cut off": b'{"prompt": "a"',
    "no UTF-8": b'{"prompt": "\xff"}',
    "a list": b'[{"prompt": "a"}]',
    "null": b"null",
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "5000 digits": b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    "deep": b'{"prompt": "a", "x": ' + nested(100_000) + b"}",
    "deep prompt": b'{"prompt": ' + nested(900) + b"}",
}


def brief(value: object) -> str:
    text = ascii(value)
    return text if len(text) < 60 else f"{text[:50]}({len(text)})"


@pytest.fixture
def same_workers(server: LocalServer) -> Iterator[LocalServer]:
    """The server; afterwards a right request is answered, by the same workers, and all is idle."""
    before = incarnations(server)
    yield server
    probe(server)
    server.idle_workers()
    assert incarnations(server) == before


@pytest.mark.parametrize(("body", "param"), BAD_COMPLETIONS, ids=brief)
def test_bad_completions(
    body: dict[str, Any] | bytes, param: str, same_workers: LocalServer
) -> None:
    status, headers, error = error_of(same_workers, "/v1/completions", body)
    assert status == 400
    assert headers["content-type"] == "application/json"
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"].split(".")[0] == param
    assert param in error["message"] or param == "prompt"
    assert len(error["message"]) < 1000


@pytest.mark.parametrize(("body", "param"), BAD_CHATS, ids=brief)
def test_bad_chats(body: dict[str, Any], param: str, same_workers: LocalServer) -> None:
    status, _, error = error_of(same_workers, "/v1/chat/completions", body)
    assert status == 400
    # A prompt that is too long is one of whatever it was made of.
    assert error["param"].split(".")[0] in (param, "prompt")


@pytest.mark.parametrize(("name", "value"), NOT_SUPPORTED, ids=brief)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_known_fields_that_are_not_supported(
    path: str, name: str, value: Any, server: LocalServer
) -> None:
    good = TEXT if path == "/v1/completions" else CHAT
    status, _, error = error_of(server, path, {**good, name: value})
    assert (status, error["param"]) == (400, name)
    assert name in error["message"]


@pytest.mark.parametrize("name", BAD_BODIES)
def test_bad_bodies(name: str, same_workers: LocalServer) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        status, _, error = error_of(same_workers, path, BAD_BODIES[name])
        assert status == 400, (path, error)


def test_a_body_that_is_too_large(same_workers: LocalServer) -> None:
    body = json.dumps({"prompt": "a " * 5_000_000}).encode()
    status, _, error = error_of(same_workers, "/v1/completions", body)
    assert status == 413
    assert str(RouterConfig().max_body_bytes) in error["message"]


def test_another_content_type(same_workers: LocalServer) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        host, _, port = same_workers.url.removeprefix("http://").partition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=30)
        with contextlib.closing(connection):
            body = json.dumps(TEXT).encode()
            connection.request("POST", "/v1/completions", body, {"Content-Type": kind})
            response = connection.getresponse()
            assert response.status == 400
            assert kind in json.loads(response.read())["error"]["message"]


@pytest.mark.parametrize(
    "extra",
    [
        {"no_such_field": 1},
        {"user": "someone", "store": True, "metadata": {"a": "b"}},
        {"logprobs": None, "tools": None, "presence_penalty": 0, "tool_choice": "none"},
        {"temperature": None, "top_p": None, "stop": None, "seed": None, "stream": None},
        {"max_tokens": 10**12, "stop": [" ", "e", "t", "s", "."]},
    ],
    ids=brief,
)
def test_what_is_unknown_or_asks_for_nothing_is_ignored(
    extra: dict[str, Any], server: LocalServer
) -> None:
    for path, good in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
        (choice,) = server.post(path, {**good, **extra})["choices"]
        assert choice["finish_reason"] in ("stop", "length")


def test_a_stream_that_fails_before_its_first_token_has_a_status(server: LocalServer) -> None:
    body = {"prompt": [1] * CONTEXT, "stream": True}
    status, _, error = error_of(server, "/v1/completions", body)
    assert status == 400
    assert str(CONTEXT) in error["message"]


def test_the_longest_prompt_is_accepted(server: LocalServer) -> None:
    prompt = [1 + i % 100 for i in range(CONTEXT - 1)]
    body = {"prompt": prompt, "max_tokens": 5, "ignore_eos": True}
    answer = server.post("/v1/completions", body)
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("name", ["nobody", "", "SmolLM2-135M-Instruct", "\ud800"], ids=brief)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_an_unknown_model_name(path: str, name: str, server: LocalServer) -> None:
    status, _, error = error_of(server, path, {**TEXT, **CHAT, "model": name})
    assert (status, error["param"], error["code"]) == (404, "model", "model_not_found")


def test_paths_and_methods_that_do_not_exist(server: LocalServer) -> None:
    status, _, error = error_of(server, "/v1/embeddings", {})
    assert (status, error["code"]) == (404, 404)
    assert server.get("/v1/completions")[0] == 405


# --- no room, no workers -------------------------------------------------------------------------


def test_a_full_queue() -> None:
    # One sequence at a time and one in the queue: the third that comes is one too many.
    limits = ("--max-num-seqs", "1", "--max-queue", "1")
    with local_server((*SIZES, *limits)) as client:
        before = incarnations(client)
        running = client.stream("/v1/completions", {**TEXT, "max_tokens": 500, "ignore_eos": True})
        next(running)
        results: list[Any] = []
        waiting = threading.Thread(
            target=lambda: results.append(client.post("/v1/completions", TEXT))
        )
        waiting.start()
        until(lambda: client.get("/internal/state")[1]["requests"]["queued"] == 1, "it waits")
        status, headers, error = error_of(client, "/v1/completions", TEXT)
        assert status == 429
        assert int(headers["retry-after"]) >= 1
        assert error["type"] == "RateLimitError"
        running.close()  # type: ignore[attr-defined]  # closes the connection
        waiting.join(30)
        assert results[0]["choices"][0]["finish_reason"] in ("stop", "length")
        probe(client)
        assert incarnations(client) == before


@contextlib.contextmanager
def router_without_workers() -> Iterator[Client]:
    """The real API whose registry is empty."""

    async def discover() -> list[WorkerCard]:
        return []

    folder = str(fetch(DEFAULT_MODEL))
    settings = RouterSettings(RouterConfig(), folder, DEFAULT_MODEL, "router-1", b"s" * 32)
    port = free_port()
    options = uvicorn.Config(create_api(settings, discover), "127.0.0.1", port, log_level="warning")
    server = uvicorn.Server(options)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started, "the router listens")
        yield Client(f"http://127.0.0.1:{port}")
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()


def test_no_usable_pair() -> None:
    with router_without_workers() as client:
        assert client.get("/health")[0] == 200
        assert client.get("/ready") == (503, {"ready": False})
        assert client.workers() == []
        for stream in (False, True):
            status, headers, error = error_of(
                client, "/v1/chat/completions", {**CHAT, "stream": stream}
            )
            assert status == 503
            assert int(headers["retry-after"]) >= 1
            assert error["type"] == "ServiceUnavailableError"
        # What needs no worker still works, and the client's mistakes are still the client's.
        assert client.post("/tokenize", {"prompt": "a b"})["count"] == 2
        assert error_of(client, "/v1/completions", {"prompt": []})[0] == 400
