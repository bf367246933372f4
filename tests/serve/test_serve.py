"""``baton serve`` as a user meets it: what it prints, its API, clients that leave, Ctrl-C.

Ray, HAProxy, NIXL, processes and model are the real ones. One server is shared by all tests but the
last, which is about its end.
"""

import http.client
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from tests.support.prometheus import scrape
from tests.support.serving import Client, Served, served, until
from tests.support.shared_memory import shared_memory

MODEL = "smollm2-135m-instruct"
MAX_MODEL_LEN = 2048
SIZES = ("--max-model-len", str(MAX_MODEL_LEN), "--kv-blocks", "300")
ROUTER_LIMIT_BYTES = 300e6
STOP_S = 10
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
PROMPT = [*range(300, 340)]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(*SIZES, "--routers", "2", "--host", "0.0.0.0") as server:
        yield server


def role(client: Client, name: str) -> dict[str, Any]:
    """The only worker of a role, once all are idle."""
    (worker,) = [w for w in client.idle_workers() if w["role"] == name]
    return worker


def rest_of(worker: dict[str, Any], before: dict[str, Any], counter: str) -> int:
    """What a counter rose by."""
    risen: int = worker[counter] - before[counter]
    return risen


# --- what is printed, what runs ----------------------------------------------------------------


def test_prints_what_runs_where_and_how_long_it_took(server: Served) -> None:
    text = server.text
    assert f"serving {MODEL} on {server.url}" in text
    for phase in ("fetch", "ray", "deploy", "ready"):
        assert re.search(rf"^  {phase} +\d+\.\d s", text, re.MULTILINE), phase
    assert re.search(r"^ready in \d+\.\d s$", text, re.MULTILINE)
    assert f"  {server.url}/v1\n" in text
    until(lambda: "Ctrl-C stops" in server.text, "how to stop it")
    for worker in server.workers():
        (line,) = [line for line in text.splitlines() if worker["id"] in line]
        columns = line.split()
        assert columns[1:4] == [str(worker["pid"]), f"{worker['host']}:{worker['port']}", "nixl"]
        assert "300 blocks" in line


def test_the_printed_curl_command_streams_the_answer(server: Served) -> None:
    assert shutil.which("curl"), "needs curl"
    until(lambda: "Ctrl-C stops" in server.text, "the end of what is printed")
    command, _, rest = server.text[server.text.index("curl -N") :].partition("\n\n")
    assert rest
    # Eight tokens take some steps of the model: an answer that was held back comes all at once. So
    # it does where the reader had no core meanwhile, but not each time.
    until(lambda: took_s(command) > 0.02, "an answer that comes by and by")


def took_s(command: str) -> float:
    """From the first chunk of the right answer to the last."""
    started = subprocess.Popen(
        ["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert started.stdout is not None
    with started, started.stdout:
        arrived = [(time.monotonic(), line.strip()) for line in started.stdout]
    assert started.returncode == 0
    events = [(at, line.removeprefix("data: ")) for at, line in arrived if line]
    assert events.pop()[1] == "[DONE]"
    chunks = [(at, json.loads(event)) for at, event in events]
    assert "Paris" in "".join(c["choices"][0]["delta"].get("content", "") for _, c in chunks)
    assert chunks[-1][1]["choices"][0]["finish_reason"] == "stop"
    assert len(chunks) >= 8
    return chunks[-1][0] - chunks[0][0]


def test_says_that_it_is_ready_and_what_it_serves(server: Served) -> None:
    assert server.get("/ready") == (200, {"ready": True})
    assert server.get("/health")[0] == 200
    status, models = server.get("/v1/models")
    assert status == 200
    assert [model["id"] for model in models["data"]] == [MODEL]
    assert models["data"][0]["max_model_len"] == MAX_MODEL_LEN
    assert server.get("/v1/models/nobody")[0] == 404


def test_state_has_the_promised_keys(server: Served) -> None:
    status, state = server.get("/internal/state")
    assert status == 200
    assert {worker["role"] for worker in state["workers"]} == {"prefill", "decode"}
    for worker in state["workers"]:
        assert worker.keys() >= {
            "id", "epoch", "role", "state", "pid", "host", "port", "transport", "running",
            "waiting", "tickets", "computed_prompt_tokens", "pulled_bytes", "blocks",
        }  # fmt: skip
        assert worker["blocks"].keys() == {"free", "active", "cached", "leased", "quarantined"}
        assert worker["state"] == "ready"
        assert worker["epoch"] > 0
        assert sum(worker["blocks"].values()) == worker["kv_blocks"] - 1


def test_state_is_at_most_a_second_old(server: Served) -> None:
    before = role(server, "prefill")
    server.complete_ids([*range(500, 540)], 1, cache_salt="a second")

    def seen() -> bool:
        now = [w for w in server.workers("prefill") if w["id"] == before["id"]]
        return rest_of(now[0], before, "computed_prompt_tokens") == 40

    until(seen, "the counter has risen", 1)


def test_workers_are_two_processes_that_move_kv_by_nixl(server: Served) -> None:
    workers = server.workers()
    assert len({worker["pid"] for worker in workers}) == 2
    assert {worker["transport"] for worker in workers} == {"nixl"}
    for worker in workers:
        process = psutil.Process(worker["pid"])
        assert process.name().startswith("ray::ServeReplica:baton:"), process.name()
        assert any(mapped(worker["pid"], "libtorch"))
        assert any(mapped(worker["pid"], "nixl"))


def test_routers_are_small_and_have_no_torch(server: Served) -> None:
    assert len(routers(server)) == 2
    for router in routers(server):
        assert router.memory_info().rss < ROUTER_LIMIT_BYTES
        assert not any(mapped(router.pid, "torch"))


def test_both_routers_take_requests_and_have_proven_the_pair(server: Served) -> None:
    states = router_states(server)
    assert len(states) == 2
    for state in states.values():
        assert [pair["state"] for pair in state["pairs"]] == ["proven"]


def test_any_router_names_the_metrics_of_all_processes(server: Served) -> None:
    everybody = {*router_states(server), *(worker["id"] for worker in server.workers())}
    assert len(everybody) == 4
    for _ in range(4):  # the routers take turns
        assert targets(server).keys() == everybody
    for replica, address in targets(server).items():
        page = scrape(f"http://{address}/metrics")
        # A worker's series bear its id; a router's do not, and are not those of a worker.
        assert (f'replica="{replica}"' in page) != ("baton_requests_total" in page)
    assert "baton_requests_total" in scrape(f"{server.url}/metrics")


def test_who_asks_from_elsewhere_is_told_addresses_that_are_not_his_own(server: Served) -> None:
    """The API listens on all addresses, so metrics do; workers are for routers only."""
    elsewhere = Client(server.url.replace("127.0.0.1", "127.0.0.2"))
    for address in targets(elsewhere).values():
        assert address.startswith("127.0.0.2:")
        assert "baton_event_loop_lag_seconds" in scrape(f"http://{address}/metrics")
    for worker in server.workers():
        assert worker["host"] == "127.0.0.1"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", worker["port"]))


def targets(server: Client) -> dict[str, str]:
    """Addresses of metrics ports, by the ids of their processes."""
    status, groups = server.get("/internal/prometheus/targets")
    assert status == 200
    return {group["labels"]["__meta_baton_replica"]: group["targets"][0] for group in groups}


def router_states(server: Served) -> dict[str, dict[str, Any]]:
    """/internal/state of each router that answers."""
    answers = [server.get("/internal/state") for _ in range(6)]
    return {state["router"]: state for status, state in answers if status == 200}


def routers(server: Served) -> list[psutil.Process]:
    family = psutil.Process(server.process.pid).children(recursive=True)
    return [p for p in family if p.name().startswith("ray::ServeReplica:baton:Router")]


def mapped(pid: int, word: str) -> list[str]:
    """Files with ``word`` in their path that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line for line in lines if word in line.partition("/")[2]]


# --- the API, by the official client -----------------------------------------------------------


@pytest.fixture
def api(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat_by_the_official_client(api: openai.OpenAI) -> None:
    answer = api.chat.completions.create(model=MODEL, messages=CAPITAL, temperature=0)  # type: ignore[arg-type]
    (choice,) = answer.choices
    assert choice.message.content == ANSWER
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8  # <|im_end|> counts
    total = answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.total_tokens == total


def test_streamed_chat_by_the_official_client(api: openai.OpenAI) -> None:
    text, finish, usage = "", None, None
    with api.chat.completions.create(
        model=MODEL,
        messages=CAPITAL,  # type: ignore[arg-type]
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
    assert (text, finish) == (ANSWER, "stop")
    assert usage is not None
    assert usage.completion_tokens == 8


def test_completions_by_the_official_client(api: openai.OpenAI) -> None:
    answer = api.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=2, temperature=0
    )
    assert answer.choices[0].text == " Paris."
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("headers", "named", "expected"),
    [
        ({}, {}, None),
        ({"x-request-id": "mine-1"}, {}, "mine-1"),
        ({"x-request-id": "mine-2"}, {"request_id": "body-2"}, "body-2"),
        ({"X-Request-ID": "two words"}, {}, None),  # unfit for a log: it gets one of ours
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_has_one_request_id(
    server: Served, headers: dict[str, str], named: dict[str, str], expected: str | None,
    stream: bool,
) -> None:  # fmt: skip
    """Serve adds one of its own to each response."""
    body = {"prompt": PROMPT, "max_tokens": 2, "stream": stream, **named}
    address = server.url.removeprefix("http://")
    with closing(http.client.HTTPConnection(address, timeout=60)) as connection:
        connection.request(
            "POST", "/v1/completions", json.dumps(body),
            {"Content-Type": "application/json", **headers},
        )  # fmt: skip
        response = connection.getresponse()
        text = response.read().decode()
    (found,) = response.headers.get_all("x-request-id", [])
    assert f'"id":"cmpl-{found}"' in text
    assert expected in (None, found)


def test_an_error_as_the_official_client_shows_it(api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        api.completions.create(model=MODEL, prompt="a", temperature=-1)
    with pytest.raises(openai.NotFoundError, match="nobody"):
        api.completions.create(model="nobody", prompt="a")


# --- clients that leave ------------------------------------------------------------------------


def test_a_client_that_leaves_in_mid_stream_stops_the_decoding(server: Served) -> None:
    before = role(server, "decode")
    body = {"prompt": [*range(900, 930)], "max_tokens": 1500, "ignore_eos": True}
    chunks = server.stream("/v1/completions", body)
    for _ in range(5):
        next(chunks)
    chunks.close()  # type: ignore[attr-defined]  # closes the connection
    left = role(server, "decode")
    assert 3 <= rest_of(left, before, "generated_tokens") < 700


def test_a_client_that_leaves_without_a_stream_stops_the_decoding(server: Served) -> None:
    before = role(server, "decode")
    with closing(open_request(server, prompt=[*range(700, 730)], max_tokens=1500)):
        until(lambda: server.workers("decode")[0]["running"], "it is being decoded")
    left = role(server, "decode")
    assert rest_of(left, before, "generated_tokens") < 700


def test_a_client_that_leaves_during_a_long_prefill_stops_it(server: Served) -> None:
    before = {name: role(server, name) for name in ("prefill", "decode")}
    prompt = [2 + 7 * i % 40_000 for i in range(2000)]
    with closing(open_request(server, prompt=prompt, max_tokens=8)):
        until(lambda: server.workers("prefill")[0]["running"], "its prefill has begun")
    left = role(server, "prefill")
    assert rest_of(left, before["prefill"], "computed_prompt_tokens") < len(prompt)
    assert rest_of(role(server, "decode"), before["decode"], "generated_tokens") == 0


def test_nothing_failed_and_nobody_was_replaced(server: Served) -> None:
    """The last look at the shared server: what was cancelled is counted, and that was all."""
    assert server.post("/v1/chat/completions", {"messages": CAPITAL, "temperature": 0})["choices"]
    printed = {line.split()[0] for line in server.text.splitlines() if "blocks, " in line}
    states = router_states(server)
    assert sum(state["requests"]["finished"] for state in states.values()) >= 5
    for state in states.values():
        requests = state["requests"]
        assert (requests["running"], requests["queued"], requests["retries"]) == (0, 0, 0)
        assert {worker["id"] for worker in state["workers"]} == printed


# --- what ends or leaves (the shared server is not the same afterwards) ------------------------


def test_a_killed_router_costs_only_its_own_streams(server: Served) -> None:
    undisturbed = server.complete_ids(PROMPT, 40)
    streams = [Stream(server, 40) for _ in range(4)]
    victim, other = routers(server)
    known = router_states(server).keys()
    victim.kill()
    for stream in streams:
        stream.join()
    cut = [stream for stream in streams if not stream.done]
    assert 0 < len(cut) < len(streams)
    for stream in streams:
        assert stream.error is None
        assert stream.ids == undisturbed[: len(stream.ids)]
        assert stream in cut or len(stream.ids) == 40
    until(lambda: len(router_states(server)) == 2, "another router takes its place", 60)
    gone = "no target is a router that is gone"
    until(lambda: targets(server).keys() & known == router_states(server).keys() & known, gone, 20)
    assert other in routers(server)
    assert server.complete_ids(PROMPT, 40) == undisturbed


def test_a_drained_worker_leaves_and_is_replaced(server: Served) -> None:
    undisturbed = server.complete_ids(PROMPT, 40)
    stream = Stream(server, 40)
    leaves = server.workers("prefill")[0]
    until(lambda: "Ctrl-C stops" in server.text, "the end of what is printed")
    (line,) = re.findall(r"^  (\S*baton drain WORKER .*)$", server.text, re.MULTILINE)
    command = [leaves["id"] if word == "WORKER" else word for word in shlex.split(line)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines()[-1] == f"{leaves['id']}: left, 0 running, 0 tickets"
    stream.join()
    assert (stream.done, stream.error, stream.ids) == (True, None, undisturbed)

    def replaced() -> bool:
        workers = [w for w in server.workers("prefill") if w["state"] == "ready"]
        return bool(workers) and workers[0]["id"] != leaves["id"]

    until(replaced, "another worker takes its place", 60)
    until(lambda: all(server.get("/ready")[0] == 200 for _ in range(4)), "it is proven", 30)
    assert server.complete_ids(PROMPT, 40) == undisturbed


def open_request(server: Served, **fields: Any) -> socket.socket:
    """A request that was sent and whose answer nobody has read yet."""
    body = json.dumps({**fields, "ignore_eos": True, "temperature": 0}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    host, _, port = server.url.removeprefix("http://").partition(":")
    client = socket.create_connection((host, int(port)))
    client.sendall(head.encode())
    time.sleep(0.05)  # as many clients do; a proxy that splices bodies then missed their end
    client.sendall(body)
    return client


# --- the end -----------------------------------------------------------------------------------


def test_ctrl_c_under_load_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # A short path of our own: everything that is left of the server's files would be in it.
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(folder))
    shared_before = shared_memory()
    try:
        with served(*SIZES) as server:
            (work,) = folder.iterdir()
            assert work.name.startswith("baton-")
            family = psutil.Process(server.process.pid).children(recursive=True)
            ports = listening(family)
            assert len(ports) > 5
            streams = [Stream(server, 1900) for _ in range(4)]
            started = time.monotonic()
            os.kill(server.process.pid, signal.SIGINT)
            assert server.process.wait(STOP_S) == 0
            assert time.monotonic() - started < STOP_S
            for stream in streams:
                stream.join()
                assert stream.done, "a stream was cut"
                assert stream.error["type"] == "ServiceUnavailableError"
                assert stream.ids
        assert "stopping" in server.text
        assert "error" not in server.text
        assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        assert not [port for port in ports if accepts(port)]
        assert list(folder.iterdir()) == []
        assert not shared_memory() - shared_before
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Stream:
    """A stream that has begun, and is read to whatever end it comes to."""

    def __init__(self, server: Served, max_tokens: int) -> None:
        self.ids: list[int] = []
        self.error: Any = None
        self.done = False
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(server, max_tokens))
        self._thread.start()
        assert self._begun.wait(60)

    def join(self) -> None:
        """Wait until it has ended."""
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _read(self, server: Served, max_tokens: int) -> None:
        body = {
            "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        # Without [DONE] it was cut, which shows in one of these ways.
        with suppress(AssertionError, OSError, http.client.HTTPException):
            for chunk in server.stream("/v1/completions", body):
                self.error = chunk.get("error")
                for choice in chunk.get("choices", ()):
                    self.ids += choice.get("token_ids") or []
                self._begun.set()
            self.done = True


def listening(family: list[psutil.Process]) -> set[int]:
    """TCP ports on which these processes listen."""
    ports = set()
    for process in family:
        for connection in process.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                ports.add(connection.laddr.port)
    return ports


def accepts(port: int) -> bool:
    """Whether somebody listens on this port of the loopback interface."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
