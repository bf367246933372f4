"""Moves KV blocks between two processes, as a prefill and a decode worker would: does it work?

The same transports, regions and layouts that workers use, so whatever is wrong with devices,
permissions, limits or shared memory fails here in the same way. UCX ends its process over some
faults, so the two ends of each try are processes of their own, forked from one that has loaded
torch. As a module this is that process: ways come as JSON on stdin, outcomes go to stdout.

Knows neither models nor Ray. Both ends are on this host: what is between hosts is not tried.
"""

import json
import multiprocessing
import os
import re
import secrets
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from kvtransfer.layout import KVLayout
from kvtransfer.ucx import UcxOptions

LAYOUT = KVLayout("trial", 8, 8, 64, "", 16, "float32")  # 512 KiB a block
NUM_BLOCKS = 32
GENERATION = 2  # even: sealed
TRY_S = 30.0  # for both processes and the last byte
START_S = 60.0  # for the import of torch
PAUSE_S = 0.0005  # between looks at a read: NIXL can only be polled
TAIL_BYTES = 600
# UCX: "transports 'rc','dc' are not available, please use ...", "network device 'lo' is not ..."
LEFT_OUT = r"(?:transport|network device)s? ((?:'[^']+',? ?)+) ?(?:is|are) not available"


@dataclass(frozen=True)
class Way:
    """How blocks could move."""

    name: str  # for people
    transport: str  # tcp or nixl
    ucx_tls: str = "auto"  # these three: see kvtransfer.ucx
    net_devices: str = "lo"
    one_host: bool = True
    device: str = "cpu"  # where the pools are: cpu or cuda

    @property
    def ucx(self) -> UcxOptions:
        """What a worker would tell its agent."""
        return UcxOptions(self.ucx_tls, self.net_devices, self.one_host)


@dataclass(frozen=True)
class Outcome:
    """What became of a try; ``error`` is empty when every byte arrived by the way asked for."""

    error: str = ""
    left_out: str = ""  # what was asked of UCX and it has gone on without
    seconds: float = 0.0  # of the read alone, over a connection that is there
    started: bool = True  # False: nothing was tried, so the way itself is not to blame

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return NUM_BLOCKS * LAYOUT.span_bytes / self.seconds if self.seconds else 0.0


def run_trials(ways: list[Way]) -> list[Outcome]:
    """Try one way after the other. Never raises: what cannot be tried does not work."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "services.doctor.trial"],
            input=json.dumps([asdict(way) for way in ways]),
            capture_output=True,
            text=True,
            timeout=START_S + TRY_S * len(ways),
            cwd=Path(__file__).parents[2],  # so that these packages are found, whoever installed us
        )
        return [Outcome(**fields) for fields in json.loads(done.stdout)]
    except subprocess.TimeoutExpired:
        error = f"no answer within {START_S + TRY_S * len(ways):.0f} s"
    except (OSError, ValueError, TypeError) as problem:
        error = str(problem)
        if isinstance(problem, ValueError):  # no JSON: it has ended before, by what it says last
            *_, last = ["", *done.stderr.splitlines()]
            error = last[-TAIL_BYTES:] or f"exit status {done.returncode}"
    return [Outcome(f"the trial did not start: {error}", started=False)] * len(ways)


# --- in the process that has torch --------------------------------------------------------------


def main() -> None:
    """Try what stdin says; stdout is for the answer alone, which is written at the end."""
    import kvtransfer.region
    import kvtransfer.transports  # noqa: F401  # before the fork, once

    ways = [Way(**fields) for fields in json.load(sys.stdin)]
    json.dump([asdict(_try(way)) for way in ways], sys.stdout)


def _try(way: Way) -> Outcome:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    result, report = context.Pipe(duplex=False)
    log = os.memfd_create("log")  # there may be no folder for temporary files
    ends = [
        context.Process(target=_quiet, args=(log, _own, way, ours)),
        context.Process(target=_quiet, args=(log, _read, way, theirs, report)),
    ]
    for end in ends:
        end.start()
    try:
        outcome = _outcome(result, ends)
    finally:
        for end in ends:
            end.kill()
            end.join()
        for pipe in (ours, theirs, result, report):
            pipe.close()
        said = os.pread(log, os.fstat(log).st_size, 0).decode(errors="replace")
        os.close(log)
    error = _with_log(outcome.error, said) if outcome.error else ""
    return Outcome(error, left_out(said), outcome.seconds)


def _outcome(result: Connection, ends: list[Any]) -> Outcome:
    """What the reader reports, unless one of both ends has ended before."""
    ready = wait([result, *(end.sentinel for end in ends)], TRY_S)
    if result.poll():
        outcome: Outcome = result.recv()
        return outcome
    for name, end in zip(("owner", "reader"), ends, strict=True):
        if end.sentinel in ready:
            end.join()  # it has closed its files, and is about to be gone
            return Outcome(f"the {name} of the blocks ended by itself, with code {end.exitcode}")
    return Outcome(f"nothing within {TRY_S:.0f} s")


def left_out(said: str) -> str:
    """Transports and devices that were asked for, and that UCX has gone on without (pure)."""
    lists = re.findall(LEFT_OUT, said)
    names = [name for text in lists for name in re.findall("'([^']+)'", text)]
    return ", ".join(dict.fromkeys(names))


def _with_log(error: str, said: str) -> str:
    """UCX says on stdout what it does not like; the last of it."""
    words = " ".join(said.split())[-TAIL_BYTES:]
    return f"{error}; it said: {words}" if words else error


def _quiet(log: int, run: Any, *args: Any) -> None:
    """In a forked process: what libraries print goes to the file ``log``, behind what is there."""
    os.dup2(log, 1)
    os.dup2(log, 2)
    run(*args)


def _open(way: Way, name: str) -> tuple[Any, Any, Any]:
    """A pool and its transport; also its card, which the other side needs."""
    from kvtransfer.region import Region
    from kvtransfer.ticket import AgentCard
    from kvtransfer.transports import open_transport

    epoch = secrets.randbits(63) | 1
    region = Region(LAYOUT, NUM_BLOCKS, way.device)
    transport = open_transport(way.transport, name, epoch, ucx=way.ucx)
    metadata = transport.register(region)
    fingerprint = LAYOUT.fingerprint()
    card = AgentCard(name, epoch, fingerprint, NUM_BLOCKS, transport.name, metadata)
    return region, transport, card


def _own(way: Way, pipe: Connection) -> None:
    """The prefill side: seals blocks, and waits to be killed."""
    from kvtransfer.errors import TransportError

    try:
        region, _transport, card = _open(way, "owner")
        blocks = list(range(NUM_BLOCKS))
        for block in blocks:
            region.spans[block].fill_(block + 1)  # so that each is told from the others
        region.seal(card.epoch, [(block, GENERATION) for block in blocks])
        pipe.send(card)
    except (TransportError, RuntimeError, OSError) as error:
        pipe.send(str(error))
    pipe.recv()


def _read(way: Way, pipe: Connection, report: Connection) -> None:
    """The decode side."""
    from kvtransfer.errors import TransportError

    try:
        report.send(_pull(way, pipe))
    except (TransportError, RuntimeError, OSError) as error:
        report.send(Outcome(str(error)))


def _pull(way: Way, pipe: Connection) -> Outcome:
    from kvtransfer.transport import Part

    region, transport, _ = _open(way, "reader")
    owner = pipe.recv()
    if isinstance(owner, str):
        return Outcome(owner)
    blocks = list(range(NUM_BLOCKS))
    ids = blocks[::-1]  # not the same place on both sides
    expected = region.expect(blocks, owner.epoch, [GENERATION] * NUM_BLOCKS, ids)
    transport.connect(owner)
    pairs = list(zip(ids, blocks, strict=True))
    seconds = 0.0
    for part in (Part.SEALS, Part.KV):  # the first read waits for the connection as well
        started = time.monotonic()
        if error := _settle(transport, transport.pull(owner, part, pairs)):
            return Outcome(f"reading {part.value}: {error}")
        seconds = time.monotonic() - started
    middle = LAYOUT.kv_bytes // 2
    right = region.has(expected) and all(
        int(region.spans[block][middle]) == remote + 1 for remote, block in pairs
    )
    return (
        Outcome(seconds=seconds) if right else Outcome("the bytes that arrived are not those sent")
    )


def _settle(transport: Any, handle: int) -> str:
    """Wait for one read; what went wrong, or nothing."""
    from kvtransfer.transport import Status

    until = time.monotonic() + TRY_S
    while time.monotonic() < until:
        for completion in transport.poll():
            if completion.handle == handle:
                return "" if completion.status is Status.DONE else completion.reason
        time.sleep(PAUSE_S)
    return f"not done after {TRY_S:.0f} s"


if __name__ == "__main__":
    main()
