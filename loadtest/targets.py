"""What is compared: servers that run already, and ``baton serve`` configurations of our own.

A configuration is started on a free port, waited for at ``/ready``, and stopped as a terminal does
it, by SIGINT; what does not end is killed with all that it has started, and what the load test
itself leaves behind when it is killed is interrupted by the kernel (Linux). Its output is kept in a
file. While it has no turn it can be paused, so that it costs the others nothing but memory. Knows
nothing about requests.
"""

import asyncio
import contextlib
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

READY_S = 900.0  # the first start of a model fetches it
STOP_S = 20.0  # baton serve itself gives up after 9
POLL_S = 0.1  # nobody tells when a server is ready
PORTS = range(10_000, 20_000)  # below those of outgoing connections and of baton serve's own parts
OURS = ("--port", "--host")  # flags that a target may not set
TAIL_LINES = 20

# The kernel interrupts a server when the load test dies; asked for by the process itself, since
# nothing may run between fork and exec of a process with threads. Who was started in the background
# of a script has SIGINT ignored, and would pass that on.
_DIES_WITH_PARENT = (
    "import ctypes, os, signal, sys;"
    "signal.signal(signal.SIGINT, signal.SIG_DFL);"
    "ctypes.CDLL(None).prctl(1, int(signal.SIGINT), 0, 0, 0);"  # 1: PR_SET_PDEATHSIG
    "os.getppid() == int(sys.argv[1]) and os.execv(sys.argv[2], sys.argv[2:])"
)


# Wakes what was paused when its input ends: when we say so, and when we are no more.
_WAKER = """
import os, signal, sys
for pid in reversed(sys.stdin.read().split()):
    try:
        os.kill(int(pid), signal.SIGCONT)
    except ProcessLookupError:
        pass
"""


class TargetError(Exception):
    """A target is not what it should be, or does not start; the message is one line."""


@dataclass(frozen=True)
class Target:
    """A server by URL, or the flags of a ``baton serve`` to be started."""

    name: str
    url: str = ""
    flags: tuple[str, ...] = ()

    @property
    def managed(self) -> bool:
        """Whether it is started here."""
        return not self.url

    @property
    def what(self) -> str:
        """For people: the URL or the command line."""
        return self.url or shlex.join(["baton", "serve", *self.flags])


def parse_targets(texts: Sequence[str]) -> tuple[Target, ...]:
    """Two targets or more, by different names; raises TargetError."""
    targets = tuple(parse_target(text) for text in texts)
    names = [target.name for target in targets]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise TargetError(
            f"two targets are called {twice[0]!r}: give each a name of its own, NAME=..."
        )
    if len(targets) < 2:
        raise TargetError(f"a comparison needs two targets or more, got {len(targets)}")
    return targets


def parse_target(text: str) -> Target:
    """Read ``URL``, ``NAME=URL``, ``NAME=FILE.yaml`` or ``NAME="--mixed 1 --prefill 0"``.

    A URL or file without a name is called by its address or stem. Raises TargetError.
    """
    named = re.fullmatch(r"([\w.+-]+)=(.*)", text, re.DOTALL)
    name, rest = (named[1], named[2].strip()) if named else ("", text.strip())
    if name.startswith("-"):  # --prefill=1: flags without a name
        name, rest = "", text.strip()
    if re.match(r"https?://", rest):
        url = rest.rstrip("/")
        return Target(name or url.split("://")[1], url=url)
    if rest.endswith((".yaml", ".yml")) and not rest.startswith("-"):
        if not Path(rest).is_file():
            raise TargetError(f"target {text!r}: there is no file {rest}")
        return Target(name or Path(rest).stem, flags=("--config", rest))
    if rest.startswith("-") and name:
        return Target(name, flags=_flags(text, rest))
    raise TargetError(
        f"target {text!r}: want URL, NAME=URL, NAME=FILE.yaml, or NAME=FLAGS with flags of"
        " baton serve, as in mixed='--mixed 1 --prefill 0 --decode 0'"
    )


def _flags(text: str, rest: str) -> tuple[str, ...]:
    try:
        flags = tuple(shlex.split(rest))
    except ValueError as error:
        raise TargetError(f"target {text!r}: {error}") from None
    for flag in flags:
        if flag.split("=")[0] in OURS:
            raise TargetError(
                f"target {text!r}: {flag} is chosen by the load test; a server that listens where"
                " you want is a target by its URL"
            )
    return flags


def baton_command() -> tuple[str, ...]:
    """The console script of this installation. Raises TargetError where there is none."""
    beside = Path(sys.executable).with_name("baton")
    found = str(beside) if beside.exists() else shutil.which("baton")
    if found is None:
        raise TargetError("the command baton is not installed here: only URLs can be targets")
    return (found,)


class Server:
    """A target that can be asked. One that was started here is to be stopped."""

    def __init__(
        self, target: Target, url: str, process: subprocess.Popen[bytes] | None, log: Path | None
    ) -> None:
        self.target = target
        self.url = url
        self.log = log
        self.ready_s = 0.0  # from its start
        self._process = process
        self._waker: subprocess.Popen[str] | None = None

    @property
    def died(self) -> str:
        """How it ended by itself: ``"ended with status 1"``; empty while it runs or is not ours."""
        status = self._process.poll() if self._process else None
        if status is None:
            return ""
        if status < 0:
            return f"was killed by signal {-status}"
        return f"ended with status {status}"

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The end of what it has printed."""
        if self.log is None or not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    async def wait_ready(self, patience_s: float = READY_S) -> None:
        """Return when /ready says 200; raises TargetError if it ends before, or takes too long."""
        started = time.monotonic()
        while True:
            status, answer = await asyncio.to_thread(_get, f"{self.url}/ready")
            self.ready_s = time.monotonic() - started
            if how := self.died:
                raise TargetError(f"{self.target.name}: {self.target.what} {how}: {self._reason()}")
            if status == 200:
                return
            if self.ready_s > patience_s:
                raise TargetError(
                    f"{self.target.name}: {self.target.what} was not ready within"
                    f" {patience_s:g} s; /ready says: {answer}; its output is in {self.log}"
                )
            await asyncio.sleep(POLL_S)

    def memory_bytes(self) -> int:
        """What its processes hold, shared memory counted once; 0 if that is not known."""
        if self._process is None:
            return 0
        return _held_bytes([self._process.pid, *map(_pid, descendants(self._process.pid))])

    def pause(self) -> None:
        """Let none of its processes run until ``resume`` (SIGSTOP; only of a managed one)."""
        if self._process is None or self._waker or sys.platform != "linux":
            return
        words = [sys.executable, "-IS", "-c", _WAKER]
        self._waker = subprocess.Popen(
            words, stdin=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self._waker.stdin
        paused: set[int] = set()
        # Who still runs may start others: look until there is nobody new.
        while found := {self._process.pid, *map(_pid, descendants(self._process.pid))} - paused:
            for pid in sorted(found):  # those who watch others first
                print(pid, file=self._waker.stdin, flush=True)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            paused |= found

    def resume(self) -> None:
        """Go on after ``pause``; else nothing."""
        if self._waker:
            self._waker.communicate()
            self._waker = None

    async def stop(self, patience_s: float = STOP_S) -> None:
        """SIGINT, and after so long SIGKILL for it and all it has started. URLs are left alone."""
        if self._process is None:
            return
        self.resume()
        family = descendants(self._process.pid)
        try:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGINT)
            end = time.monotonic() + patience_s
            while self._process.poll() is None and time.monotonic() < end:
                await asyncio.sleep(POLL_S)
        finally:  # also when this task is cancelled: nothing may be left
            if self._process.poll() is None:
                family |= descendants(self._process.pid)
                self._process.kill()
                self._process.wait()
            for pid, born in family:
                if _born(pid) == born:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    def _reason(self) -> str:
        """The last line that says something, without our own prefix."""
        lines = [line.strip() for line in self.tail().splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("baton: error: ")]
        last = (errors or lines or ["it printed nothing"])[-1]
        return f"{last.removeprefix('baton: error: ')} (output: {self.log})"


async def start(
    target: Target,
    folder: Path,
    command: Sequence[str] | None = None,
    patience_s: float = READY_S,
) -> Server:
    """A server for the target, ready if it is started here.

    ``folder`` gets its output, ``NAME.log``, appended to what is there. ``command`` stands for
    ``baton``. Raises TargetError, with nothing left running.
    """
    if not target.managed:
        return Server(target, target.url, None, None)
    port = free_port()
    words = [*(command or baton_command()), "serve", *target.flags]
    words += ["--host", "127.0.0.1", "--port", str(port)]
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{target.name}.log"
    with log.open("ab") as output:
        output.write(f"$ {shlex.join(words)}\n".encode())
        output.flush()
        process = subprocess.Popen(
            _dying_with_us(words),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the load test, which then stops it
        )
    server = Server(target, f"http://127.0.0.1:{port}", process, log)
    try:
        await server.wait_ready(patience_s)
    except BaseException:
        await server.stop()
        raise
    return server


def _dying_with_us(words: Sequence[str]) -> list[str]:
    """A command that the kernel interrupts when this process ends, however it ends (Linux)."""
    program = shutil.which(words[0])
    if sys.platform != "linux" or program is None:
        return list(words)
    return [sys.executable, "-IS", "-c", _DIES_WITH_PARENT, str(os.getpid()), program, *words[1:]]


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    for port in random.sample(PORTS, len(PORTS)):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise TargetError(f"no free port between {PORTS.start} and {PORTS.stop}")


def _get(address: str) -> tuple[int, str]:
    """Status and the start of the body, or 0 and why there is none; never through a proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(address, timeout=5) as response:
            return response.status, ""
    except urllib.error.HTTPError as error:
        with error:
            body = error.read(300).decode(errors="replace")
            return error.code, f"{error.code} {' '.join(body.split())}"
    except (OSError, ValueError) as error:
        return 0, str(error)


# --- processes ---------------------------------------------------------------------------------


def descendants(root: int) -> set[tuple[int, str]]:
    """Processes that ``root`` has started, and theirs, as (pid, when born). Empty but on Linux."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        if fields := _stat(int(entry.name)):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: set[tuple[int, str]] = set()
    todo = list(children.get(root, ()))
    while todo:
        pid = todo.pop()
        found.add((pid, _born(pid)))
        todo += children.get(pid, ())
    return found


def _held_bytes(pids: Sequence[int]) -> int:
    """Sum of the proportional set sizes: what several share is divided among them."""
    found = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            found += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return found * 1024


def _pid(process: tuple[int, str]) -> int:
    return process[0]


def _born(pid: int) -> str:
    """Tells a process from a later one of the same number; empty when it has ended."""
    fields = _stat(pid)
    return fields[19] if fields and fields[0] not in "ZX" else ""


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third on: state, parent, ..., [19] start time."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return []
