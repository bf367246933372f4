"""``baton drain``: asks workers to leave, and watches them until they have.

Where they are is asked from a router; everything else is between this command and each worker, over
the connection that routers use and with the deployment's secret. A worker takes it for a router
that opens no request, so nothing ends when the command does: a drain that has begun goes on.
"""

import asyncio
import json
import math
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from router import wire
from router.errors import LinkError
from router.link import Link, connect_worker
from services.config import ConfigError
from services.machine import read_secret_file

HTTP_TIMEOUT_S = 10.0
PATIENCE_S = 15.0  # for the end of a worker, after its deadline
FAILED = 1


@dataclass(frozen=True)
class DrainOptions:
    """The flags of the command."""

    worker: str = ""  # one of the two says which
    on: str = ""  # host
    url: str = "http://127.0.0.1:8000"
    secret_file: str = ""
    deadline_s: float = 30.0
    api_key_file: str = ""


def run_drain(options: DrainOptions, say: Callable[[str], None] = print) -> int:
    """The exit status; 0 when all of the workers are gone. Raises ConfigError for wrong use."""
    if bool(options.worker) == bool(options.on):
        raise ConfigError("which worker? Name one, or all of a host by --on HOST")
    if not options.secret_file:
        raise ConfigError(
            "--secret-file: workers ask for the deployment's secret; baton serve prints where it is"
        )
    if not 0 <= options.deadline_s < math.inf:
        raise ConfigError(f"--deadline: {options.deadline_s} is not a time")
    secret = read_secret_file(Path(options.secret_file), "--secret-file")
    targets = choose(read_workers(options.url, options.api_key_file), options.worker, options.on)
    return asyncio.run(_drain_all(targets, secret, options.deadline_s, say))


def read_workers(url: str, api_key_file: str = "") -> list[dict[str, Any]]:
    """The workers that a router knows, as in its /internal/state."""
    request = urllib.request.Request(url.rstrip("/") + "/internal/state")
    if api_key_file:
        try:
            key = Path(api_key_file).read_text().strip()
        except OSError as error:
            raise ConfigError(f"--api-key-file {api_key_file}: {error.strerror}") from error
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=HTTP_TIMEOUT_S) as answer:
            workers: list[dict[str, Any]] = json.loads(answer.read())["workers"]
            return workers
    except urllib.error.HTTPError as error:
        with error:
            hint = "; give one of its keys by --api-key-file" if error.code == 401 else ""
            raise ConfigError(f"--url {url}: {error.code} {error.reason}{hint}") from error
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(f"--url {url}: no router answers there: {reason}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--url {url}: what answers there is no router of ours") from error


def choose(workers: list[dict[str, Any]], worker: str, host: str) -> list[dict[str, Any]]:
    """Those that were asked for, without the ones that are gone already."""
    here = [w for w in workers if w["state"] != "dead"]
    chosen = [w for w in here if w["id"] == worker or w["host"] == host]
    if not chosen:
        asked = f"no worker {worker!r}" if worker else f"no worker on {host!r}"
        known = ", ".join(f"{w['id']} on {w['host']}" for w in here) or "none"
        raise ConfigError(f"there is {asked}; there are: {known}")
    return chosen


async def _drain_all(
    targets: list[dict[str, Any]], secret: bytes, deadline_s: float, say: Callable[[str], None]
) -> int:
    ends = [_drain(target, secret, deadline_s, say) for target in targets]
    gone = await asyncio.gather(*ends, return_exceptions=True)  # one must not stop the others
    for error in gone:
        if isinstance(error, BaseException):
            raise error
    return 0 if all(gone) else FAILED


class _Progress:
    """What a worker says of itself, passed on when it has changed."""

    def __init__(self, name: str, say: Callable[[str], None]) -> None:
        self.ended = asyncio.Event()
        self.state = ""
        self._name, self._say = name, say
        self._told = ""

    def on_message(self, link: Link, message: wire.Message) -> None:
        if isinstance(message, wire.Load):
            self.state = message.state
            self.tell(f"{message.state}, {message.running} running, {message.tickets} tickets")

    def on_close(self, link: Link) -> None:
        self.ended.set()

    def tell(self, text: str) -> None:
        if text != self._told:
            self._told = text
            self._say(f"{self._name}: {text}")


async def _drain(
    target: dict[str, Any], secret: bytes, deadline_s: float, say: Callable[[str], None]
) -> bool:
    """Ask one worker to leave; True once it has said good-bye."""
    progress = _Progress(target["id"], say)
    link = await _connect(target, secret, progress)
    link.send(wire.Drain(int(deadline_s * 1000)))
    try:
        async with asyncio.timeout(deadline_s + PATIENCE_S):
            await progress.ended.wait()
    except TimeoutError:
        progress.tell(f"still there {PATIENCE_S:.0f} s after the deadline")
        link.close()
        return False
    if progress.state != "left":
        progress.tell(f"ended before it was drained: {link.close_reason}")
    return progress.state == "left"


async def _connect(target: dict[str, Any], secret: bytes, progress: _Progress) -> Link:
    try:
        return await connect_worker(
            target["host"],
            target["port"],
            target["id"],
            target["epoch"],
            router_id=f"drain-{os.urandom(8).hex()}",
            router_epoch=1,
            secret=secret,
            tickets=(),
            on_message=progress.on_message,
            on_close=progress.on_close,
        )
    except LinkError as error:
        hint = "; is --secret-file the one of this deployment?" if "secret" in str(error) else ""
        raise ConfigError(f"{error}{hint}") from error
