"""``baton drain`` against the graph in one process: streams go on elsewhere, wrong use is told.

The same command against ``baton serve`` is in ``test_serve``.
"""

import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.drain import DrainOptions, run_drain
from tests.support.local_server import LocalServer, local_server
from tests.support.serving import BATON, until

WRONG_USE = 2
SIZES = ("--max-model-len", "256", "--kv-blocks", "80", "--token-budget", "64")
NUM_STREAMS = 2
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("drain") / "secret"
    file.write_text("of this deployment only\n")
    return file


@pytest.fixture(scope="module")
def server(secret: Path) -> Iterator[LocalServer]:
    with local_server((*SIZES, "--decode", "2", "--secret-file", str(secret))) as server:
        yield server


def drain(server: LocalServer, *args: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of ``baton drain ARGS``."""
    command = [BATON, "drain", *args, *([] if "--url" in args else ["--url", server.url])]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return ended.returncode, ended.stdout, ended.stderr


def prompt(number: int) -> list[int]:
    return [100 + number, *range(200, 230)]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["decode-0"], ["--secret-file", "baton serve prints"]),
        (["--secret-file", "SECRET"], ["which worker", "--on HOST"]),
        (["decode-0", "--on", "here", "--secret-file", "SECRET"], ["which worker"]),
        (["decode-0", "--secret-file", "SECRET"], ["'decode-0'", "KNOWN"]),
        (["--on", "elsewhere", "--secret-file", "SECRET"], ["'elsewhere'", "KNOWN"]),
        (["KNOWN", "--secret-file", "/nonexistent"], ["/nonexistent", "No such file"]),
        (["KNOWN", "--secret-file", "WRONG"], ["KNOWN", "secret", "--secret-file the one"]),
        (["KNOWN", "--secret-file", "SECRET", "--deadline", "-1"], ["--deadline", "-1"]),
        (["KNOWN", "--secret-file", "SECRET", "--deadline", "soon"], ["--deadline", "soon"]),
        (["KNOWN", "--secret-file", "SECRET", "--url", "http://127.0.0.1:1"], ["no router"]),
    ],
)  # fmt: skip
def test_wrong_use(
    args: list[str], words: list[str], server: LocalServer, secret: Path, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("of another deployment")
    known = server.workers("decode")[0]["id"]
    names = {"SECRET": str(secret), "WRONG": str(wrong), "KNOWN": known}
    status, out, err = drain(server, *(names.get(arg, arg) for arg in args))
    assert (status, out) == (WRONG_USE, "")
    assert err.startswith("baton: error: ")
    assert err.count("\n") == 1
    for word in words:
        assert names.get(word, word) in err
    assert {worker["state"] for worker in server.workers()} == {"ready"}


def test_a_drained_decode_workers_streams_go_on_elsewhere(
    server: LocalServer, secret: Path
) -> None:
    """Last in this file: one worker less is left."""
    undisturbed = [server.complete_ids(prompt(i), NUM_TOKENS) for i in range(NUM_STREAMS)]
    begun = threading.Barrier(NUM_STREAMS + 1)

    def read(number: int) -> list[int]:
        body = {
            "prompt": prompt(number), "max_tokens": NUM_TOKENS, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True, "cache_salt": "drained",
        }  # fmt: skip
        ids: list[int] = []
        for chunk in server.stream("/v1/completions", body):
            new = [token for choice in chunk["choices"] for token in choice["token_ids"] or []]
            if new and not ids:
                begun.wait(60)
            ids += new
        return ids

    def drain_one() -> str:
        begun.wait(60)
        busy = until(lambda: [w for w in server.workers("decode") if w["running"]], "it decodes")
        leaves = busy[0]["id"]
        lines: list[str] = []
        # Not as a process: the streams would be over before it has started.
        options = DrainOptions(leaves, url=server.url, secret_file=str(secret), deadline_s=0)
        assert run_drain(options, lines.append) == 0
        assert all(line.startswith(f"{leaves}: ") for line in lines)
        assert any(": draining" in line for line in lines)
        assert lines[-1].startswith(f"{leaves}: left, 0 running")
        return str(leaves)

    *streams, leaves = server.at_once(
        [*(lambda i=i: read(i) for i in range(NUM_STREAMS)), drain_one]  # type: ignore[misc]
    )
    assert streams == undisturbed
    state = server.get("/internal/state")[1]
    assert state["requests"]["retries"] >= 1, "nothing was handed back"
    assert state["requests"]["failed"] == 0
    (gone,) = [worker for worker in server.graph.workers if not worker.alive]
    assert gone.settings.worker_id == leaves
    assert gone.load().state == "left"
    server.idle_workers("prefill")
