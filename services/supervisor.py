"""Runs a body that starts many processes, so that none of them is left behind (POSIX).

::

    caller's process (light) ── fork ──► child, leader of a new session: body() and what it starts
       waits, passes signals on              interrupted when the caller's process dies

Each of the two cleans up after the other. When the child ends, however it ended, the front kills
what is left of its session and removes the folder; when the front is killed, the kernel interrupts
the child, which stops by itself and does the same. Knows nothing of what the body is.
"""

import ctypes
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD}
FAILED = 1
REAP_S = 2.0  # for what was killed to be gone


def supervise(body: Callable[[], int], folder: Path, patience_s: float) -> int:
    """Run ``body`` in a child until it ends, and return its exit status.

    The first SIGINT, SIGTERM or SIGHUP raises KeyboardInterrupt in it and gives it ``patience_s``;
    the second, or the end of that time, kills everything. ``folder`` is removed at the end. Call it
    before any thread is started: it forks.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of the session become ours, to be reaped
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # from here on they wait for sigtimedwait
    front = os.getpid()
    child = os.fork()
    if not child:
        os._exit(_in_child(body, folder, front))
    try:
        status = _wait(child, patience_s)
    finally:
        kill_session(child)
        shutil.rmtree(folder, ignore_errors=True)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    return status


def _in_child(body: Callable[[], int], folder: Path, front: int) -> int:
    """The child's whole life. Nothing may leave it: above it lies the caller's code."""
    status = FAILED
    try:
        os.setsid()
        _prctl(PR_SET_PDEATHSIG, signal.SIGINT)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if os.getppid() == front:  # else it died before the kernel was asked to tell us
            status = body()
    except KeyboardInterrupt:
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    if os.getppid() != front:
        kill_session(os.getpid(), but=os.getpid())
        shutil.rmtree(folder, ignore_errors=True)
    return status


def _wait(child: int, patience_s: float) -> int:
    """The child's exit status; passes the first signal on, kills at the second or when too late."""
    deadline = None
    while True:
        left = 3600.0 if deadline is None else max(0.0, deadline - time.monotonic())
        info = signal.sigtimedwait(SIGNALS, left)
        if info is not None and info.si_signo == signal.SIGCHLD:
            status = _reap(child)
            if status is not None:
                return status
        elif info is not None and deadline is None:
            deadline = time.monotonic() + patience_s
            os.kill(child, signal.SIGINT)
        elif info is not None or deadline is not None:
            return FAILED


def _reap(child: int) -> int | None:
    """Reap whoever ended; the exit status of ``child`` if it was among them."""
    found = None
    while True:
        try:
            pid, raw = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if not pid:
            return found
        if pid == child:
            code = os.waitstatus_to_exitcode(raw)
            found = code if code >= 0 else 128 - code


def _reap_all(patience_s: float) -> None:
    """Wait until no child is left. A process with many threads and much memory is a zombie, which
    nobody can reap yet, for some time before it has ended.
    """
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            time.sleep(0.01)


def kill_session(leader: int, but: int = 0) -> None:
    """Kill all processes of a session, until there are none."""
    while members := session_members(leader) - {but}:
        for pid in members:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.01)  # the kernel tells nobody when a process that is not a child has gone
    _reap_all(REAP_S)


def session_members(leader: int) -> set[int]:
    """Processes of a session that run; those that only wait to be reaped do not count."""
    members = set()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = entry.read_text().rsplit(")", 1)[1].split()[:4]
        except (OSError, ValueError):
            continue  # gone meanwhile
        if int(session) == leader and state not in "ZX":
            members.add(int(entry.parent.name))
    return members


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
