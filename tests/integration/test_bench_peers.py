"""What the benchmark compares with: llama.cpp behind a pipe, and a server by its URL."""

from __future__ import annotations

import argparse
import json
import runpy
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests import bench_peers
from tests.support import bench_contenders, llama_contender, url_peer
from tests.support.bench import Case, Results, Timing
from tests.support.llama_contender import KINDS, llama_cpp, rewritten
from tests.support.roofline import Ceilings, Shape
from tests.support.url_peer import Stream, UrlPeer, rate

TINY = runpy.run_path(str(Path(__file__).parents[1] / "data" / "tiny_gguf.py"))
SHAPE = Shape(1, 64, 4, 4, 16, 128, 256)

# --- llama.cpp ------------------------------------------------------------------------------------

FAKE_LLAMA = """
import json, sys

class Llama:
    def __init__(self, path, n_ctx, n_threads, n_threads_batch, verbose):
        print("llama.cpp says hello", flush=True)
        self.n_tokens = 0
        self.log = open(path, "a")
        self.tell("init", n_ctx, n_threads, n_threads_batch)

    def tell(self, *words):
        print(json.dumps(words), file=self.log, flush=True)

    def eval(self, ids):
        self.tell("eval", self.n_tokens, len(ids))
        self.n_tokens += len(ids)

    def sample(self, temp):
        assert temp == 0
        return 1
"""


def test_llama_cpp_behind_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt is computed whole; a context only as far as it is not there."""
    (tmp_path / "llama_cpp.py").write_text(FAKE_LLAMA)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(bench_contenders, "STEPS_S", 0.0)
    log = tmp_path / "model.gguf"
    with llama_cpp("llama.cpp Q8_0", Path(sys.executable), log, 2, 100, 300) as peer:
        assert peer.weights == "int8"
        assert peer.can(Case(256, 1))
        assert not peer.can(Case(256, 2))
        assert not peer.can(Case(300))
        assert peer.measure(Case(64)).seconds > 0
        assert peer.measure(Case(128, 1)).context == 128 + 2 + (5 - 1) / 2
        peer.measure(Case(32, 1))
        assert len(set(map(tuple, (peer.ids(20), peer.ids(20))))) == 2
    said = [json.loads(line) for line in log.read_text().splitlines()]
    assert said[0] == ["init", 300, 2, 2]
    assert said[1] == ["eval", 0, 64]
    assert said[2] == ["eval", 64, 64]
    assert said[3:10] == [["eval", 128 + i, 1] for i in range(7)]
    assert said[10] == ["eval", 31, 1]
    assert said[11:] == [["eval", 32 + i, 1] for i in range(7)]
    assert peer.process.returncode == 0


def test_a_peer_that_ends_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama_cpp.py").write_text("raise SystemExit(7)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    starting = llama_cpp("x", Path(sys.executable), tmp_path, 1, 100, 300)
    with pytest.raises(RuntimeError, match="x has ended with status 7"), starting:
        pass


@pytest.mark.parametrize("name", KINDS)
def test_a_model_in_another_format(tmp_path: Path, name: str) -> None:
    """Everything but the matrices' format is as it was."""
    source, target = tmp_path / "source.gguf", tmp_path / "target.gguf"
    weights = TINY["random_weights"](1)
    TINY["write"](source, weights, frozenset(n for n in weights if weights[n].ndim > 1))
    rewritten(source, target, KINDS[name])
    old, new = gguf.GGUFReader(source), gguf.GGUFReader(target)
    left_out = {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count"}
    for key in (old.fields.keys() | new.fields.keys()) - left_out:
        assert new.fields[key].contents() == old.fields[key].contents(), key
        assert new.fields[key].types == old.fields[key].types, key
    assert [t.name for t in new.tensors] == [t.name for t in old.tensors]
    for ours, theirs in zip(new.tensors, old.tensors, strict=True):
        assert ours.shape.tolist() == theirs.shape.tolist()
        values = gguf.dequantize(ours.data, ours.tensor_type)
        expected = gguf.dequantize(theirs.data, theirs.tensor_type)
        if len(ours.shape) == 1:
            assert ours.tensor_type == gguf.GGMLQuantizationType.F32
        else:
            assert ours.tensor_type == KINDS[name]
        step = 0 if ours.tensor_type == gguf.GGMLQuantizationType.F32 else 1 / 127
        assert np.abs(values - expected).max() <= step * np.abs(expected).max()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source.gguf", "target.gguf"]


def test_the_environment_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the first build failed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made: list[list[str]] = []
    failing = [
        sys.executable,
        "-c",
        "print('  [3/9] Building x.cpp\\nnoise\\nerror: no compiler'); raise SystemExit(1)",
    ]
    working = [sys.executable, "-c", "print('Successfully installed')"]

    def run(command: list[str], check: bool) -> None:
        made.append(command)
        Path(command[-1]).mkdir(exist_ok=True)

    monkeypatch.setattr(llama_contender.subprocess, "run", run)
    said: list[str] = []
    monkeypatch.setattr(llama_contender, "install_command", lambda python: failing)
    with pytest.raises(SystemExit, match="no compiler"):
        llama_contender.environment(said.append)
    assert said[1:] == ["  [3/9] Building x.cpp", "  error: no compiler"]
    monkeypatch.setattr(llama_contender, "install_command", lambda python: working)
    python = llama_contender.environment(said.append)
    assert python == llama_contender.environment(said.append)
    assert python.is_relative_to(tmp_path)
    assert len(made) == 2


# --- a server -------------------------------------------------------------------------------------


class Handler(BaseHTTPRequestHandler):
    """Streams two tokens in a chunk, without a pause."""

    server: Server

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": "m"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        if self.server.broken:
            self.send_error(503, "no room")
            return
        self.send_response(200)
        self.end_headers()
        count = -(-body["max_tokens"] // 2)
        chunks = [{"choices": [{"text": "ab"}]}] * count
        chunks.append({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
        for chunk in chunks:
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b": a comment\n\ndata: [DONE]\n\n")

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.broken = False


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_server_by_its_url(server: Server) -> None:
    peer = UrlPeer("s", f"http://127.0.0.1:{server.server_port}/v1/", 100, 3)
    assert peer.measure(Case(40)).seconds > 0
    (body,) = server.bodies
    assert (body["model"], len(body["prompt"]), body["max_tokens"]) == ("m", 40, 1)
    stream = peer.stream(peer.prompt(8), 10)
    assert (len(stream.times), stream.tokens) == (5, 10)
    server.bodies.clear()
    peer.prefill(40)
    peer.prefill(40)
    first, second = (body["prompt"] for body in server.bodies)
    assert first != second, "a prefix cache would answer"


def test_streams_of_a_batch_have_their_prompts_sent_before(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[list[Stream]] = []

    def scripted(streams: list[Stream]) -> tuple[float, float, float]:
        tried.append(streams)
        return (30.0, 15.0, 40.0) if len(tried) == 1 else (60.0, 16.0, 50.0)

    monkeypatch.setattr(url_peer, "rate", scripted)
    peer = UrlPeer("s", f"http://127.0.0.1:{server.server_port}", 100, 3)
    assert peer.measure(Case(12, 3)) == Timing(3 / 60, 62.0)
    assert [body["max_tokens"] for body in server.bodies] == [
        1,
        1,
        1,
        *[64] * 3,
        1,
        1,
        1,
        *[256] * 3,
    ]
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 3


def test_the_rate_of_streams_counts_while_all_run() -> None:
    one = Stream([1.0, 2.0, 3.0, 4.0, 5.0], 10)  # two tokens in a chunk
    other = Stream([2.0, 4.0, 6.0], 3)
    tokens_s, least, middle = rate([one, other])
    # From 2.0, when the last has begun, to 5.0: six tokens of one, one of the other.
    assert tokens_s == pytest.approx((6 + 1) / 3)
    assert least == 1
    assert middle == pytest.approx(((4 + 6 / 2) + (1 + 1 / 2)) / 2)
    assert rate([Stream([1.0, 2.0], 2), Stream([3.0, 4.0], 2)])[0] == 0


def test_what_a_server_refuses_is_said(server: Server) -> None:
    server.broken = True
    peer = UrlPeer("s", f"http://127.0.0.1:{server.server_port}", 100, 1)
    with pytest.raises(RuntimeError, match=r"(?s)s answered 503: .*no room"):
        peer.measure(Case(4))


# --- all together ---------------------------------------------------------------------------------


def test_targets_are_ratios_of_the_same_rounds() -> None:
    results = Results(SHAPE)
    log: list[str] = []
    seconds = {
        "Baton fp32": (1.0, 1.0, 1.0),
        "llama.cpp fp32": (1.2, 1.4, 9.0),
        "Baton int8": (1.0, 2.0, 1.0),
        "llama.cpp Q8_0": (1.4, 2.9, 1.0),
    }

    class Timed:
        weights = "float32"

        def __init__(self, name: str) -> None:
            self.name = name
            self.seconds = {case: iter(seconds[name]) for case in cases}

        def can(self, case: Case) -> bool:
            return True

        def measure(self, case: Case) -> Timing:
            log.append(self.name)
            return Timing(next(self.seconds[case]), case.tokens)

    cases = [Case(512), Case(256, 1)]
    contenders = [Timed(name) for name in seconds]
    bench_peers.bench.run(results, contenders, cases, 3, lambda: Ceilings(1.0, 1.0))
    found = {target.name: target for target in bench_peers.targets(results)}
    prefill = found["prefill 512, fp32, by llama.cpp's"]
    assert (prefill.value, prefill.missed) == (pytest.approx(1.4), False)
    assert found["prefill 2,048, fp32, by llama.cpp's"].row[-1] == "not measured"
    int8 = found["decode 1 x 256, int8 by Q8_0"]
    assert (int8.value, int8.missed) == (pytest.approx(1.4), True)


@pytest.mark.parametrize("text", ["http://x", "=http://x", "a=", "a=x:80"])
def test_an_url_without_a_name_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not NAME=http://HOST:PORT"):
        bench_peers.named_url(text)


def test_a_model_that_is_no_gguf_leaves_llama_cpp_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_peers.models(str(tmp_path), []) == {}
    assert "is no GGUF file" in capsys.readouterr().err
