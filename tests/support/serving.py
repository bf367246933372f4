"""Starts the real ``baton serve`` and talks to it as a user would: process, HTTP, state."""

import contextlib
import json
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from services.serve import PORT_RANGE, PORTS

# Of what a test listens on; test_serve_ports has those between these and baton serve's.
PORTS_OF_TESTS = range(10_000, PORT_RANGE[0] - 2 * PORTS)
READY_LINES = ("curl -N", "(Ctrl-C stops)")  # of baton serve, of baton local
BATON = Path(sys.executable).with_name("baton")
READY_S = 180
STOP_S = 10


def free_port() -> int:
    """A port that nobody listens on now, and that no outgoing connection is given meanwhile."""
    while True:
        port = random.choice(PORTS_OF_TESTS)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def until(condition: Callable[[], Any], what: str, timeout_s: float = 10.0) -> Any:
    """Wait for a remote condition that can only be asked for; the value when it is true."""
    end = time.monotonic() + timeout_s
    tick = threading.Event()
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {timeout_s:g} s: {what}"
        tick.wait(0.05)
    return value


@dataclass
class Client:
    """Requests to one server."""

    url: str

    def post(self, path: str, body: dict[str, Any] | bytes, timeout: float = 300) -> Any:
        """The JSON answer; raises urllib.error.HTTPError with the server's error."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return json.loads(response.read())

    def get(self, path: str, timeout: float = 30) -> tuple[int, Any]:
        """Status and JSON."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=timeout) as response:
                return response.status, json.loads(response.read() or b"null")
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read() or b"null")

    def stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any]]:
        """The chunks of a stream as they come; asserts that it ends with [DONE]."""
        data = json.dumps({**body, "stream": True}).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            for line in response:
                text = line.decode().strip()
                if text == "data: [DONE]":
                    return
                if text.startswith("data: "):
                    yield json.loads(text.removeprefix("data: "))
        raise AssertionError("the stream ended without [DONE]")

    def complete_ids(self, prompt: list[int], num_tokens: int, **options: Any) -> list[int]:
        """Token ids of a completion of exactly ``num_tokens`` tokens."""
        body = {
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **options,
        }
        (choice,) = self.post("/v1/completions", body)["choices"]
        assert choice["prompt_token_ids"] == prompt
        assert choice["finish_reason"] == "length"
        ids: list[int] = choice["token_ids"]
        assert len(ids) == num_tokens
        return ids

    def at_once(self, calls: list[Callable[[], Any]], in_flight: int = 0) -> list[Any]:
        """Run calls at the same time, all or so many; their results in order."""
        with ThreadPoolExecutor(in_flight or len(calls)) as pool:
            return [future.result() for future in [pool.submit(call) for call in calls]]

    def workers(self, role: str = "") -> list[dict[str, Any]]:
        """Workers in /internal/state."""
        _, state = self.get("/internal/state")
        return [w for w in state["workers"] if not role or w["role"] == role]

    def idle_workers(self, role: str = "") -> list[dict[str, Any]]:
        """Workers once nothing runs, waits or is held for a hand-off any more, and what they
        computed to prove themselves is in their reports.
        """

        def idle() -> list[dict[str, Any]]:
            workers = self.workers(role)
            busy = [
                w
                for w in workers
                if w["running"] or w["waiting"] or w["tickets"] or not w["steps"]
                or any(w["blocks"][kind] for kind in ("active", "leased", "quarantined"))
            ]  # fmt: skip
            return [] if busy else workers

        found: list[dict[str, Any]] = until(idle, f"idle workers, state {self.workers()}")
        return found


@dataclass
class Served(Client):
    """A ``baton serve`` process that is ready."""

    process: subprocess.Popen[str]
    output: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Everything it has printed."""
        return "".join(self.output)


@contextlib.contextmanager
def served(
    *args: str,
    port: int = 0,
    command: list[str] | None = None,
    program: Sequence[str | Path] = (BATON, "serve"),
) -> Iterator[Served]:
    """``baton serve ARGS`` until the block ends; then Ctrl-C must leave nothing within 10 s.

    ``program`` takes the same flags in its place, ``command`` is one that takes them as ``ARGS``.
    """
    port = port or free_port()
    flags = ["--port", str(port), *args]
    process = subprocess.Popen(
        [*command, f"ARGS={' '.join(flags)}"] if command else [*program, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    server = Served(f"http://127.0.0.1:{port}", process)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    reader = threading.Thread(target=_read, args=(process, server.output, lines), daemon=True)
    reader.start()
    family: list[psutil.Process] = []
    try:
        _wait_until_it_says_so(lines, server)
        family = psutil.Process(process.pid).children(recursive=True)
        yield server
    finally:
        left = _stop(process, family)
        reader.join(5)
        assert process.stdout is not None
        process.stdout.close()
        assert not left, f"still running: {[p.info for p in left]}\n{server.text}"


def _read(process: Any, output: list[str], lines: "queue.SimpleQueue[str]") -> None:
    for line in process.stdout:
        output.append(line)
        lines.put(line)
    lines.put("")


def _wait_until_it_says_so(lines: "queue.SimpleQueue[str]", server: Served) -> None:
    end = time.monotonic() + READY_S
    while True:
        line = lines.get(timeout=max(0.1, end - time.monotonic()))
        assert line, f"baton serve ended with {server.process.wait()}:\n{server.text}"
        if any(mark in line for mark in READY_LINES):
            return


def _stop(process: subprocess.Popen[str], family: list[psutil.Process]) -> list[psutil.Process]:
    """Ctrl-C; processes that are still there after 10 s, which are then killed."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    _, left = psutil.wait_procs(family, 0.5)
    for orphan in left:
        orphan.info = orphan.as_dict(["pid", "cmdline", "status"])
        with contextlib.suppress(psutil.NoSuchProcess):
            orphan.kill()
    if process.poll() is None:
        process.kill()
        process.wait()
    return left
