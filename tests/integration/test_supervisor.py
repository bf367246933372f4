"""However a supervised body ends, its whole session and its folder are gone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.supervisor import session_members

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sessions are read from /proc")

# A body that starts a child in a process group of its own, as Ray does, and tells when it is there.
PROGRAM = """
import os, signal, subprocess, sys, time
from pathlib import Path
from services.supervisor import supervise

folder = Path(sys.argv[1])
folder.mkdir()

def body():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                             preexec_fn=os.setpgrp)
    {first}
    print(os.getpid(), child.pid, flush=True)
    {body}

sys.exit(supervise(body, folder, patience_s={patience}))
"""


def start(
    tmp_path: Path, body: str, patience: float = 30, first: str = ""
) -> tuple[subprocess.Popen[str], int]:
    """The front process, and the leader of the session that it looks after. ``first`` has been done
    when this returns.
    """
    program = PROGRAM.format(first=first, body=body, patience=patience)
    command = [sys.executable, "-c", program, str(tmp_path / "work")]
    root = Path(__file__).parents[2]
    front = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert front.stdout is not None
    leader, child = map(int, front.stdout.readline().split())
    assert {leader, child} <= session_members(leader)
    return front, leader


def check_gone(front: subprocess.Popen[str], leader: int, tmp_path: Path) -> None:
    """Nothing is left, at the latest within some seconds."""
    front.communicate(timeout=20)  # closes its stdin, for which some bodies wait
    deadline = time.monotonic() + 20
    while session_members(leader) or (tmp_path / "work").exists():
        assert time.monotonic() < deadline, session_members(leader)
        time.sleep(0.02)


def test_the_body_ends(tmp_path: Path) -> None:
    front, leader = start(tmp_path, "sys.stdin.read(); return 7")
    check_gone(front, leader, tmp_path)
    assert front.returncode == 7


def test_the_body_raises(tmp_path: Path) -> None:
    front, leader = start(tmp_path, "sys.stdin.read(); os.close(2); raise ValueError")
    check_gone(front, leader, tmp_path)
    assert front.returncode == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_interrupts_the_body(tmp_path: Path, number: signal.Signals) -> None:
    front, leader = start(tmp_path, "time.sleep(600)")
    front.send_signal(number)
    check_gone(front, leader, tmp_path)
    assert front.returncode == 0


STUBBORN = 'signal.signal(signal.SIGINT, lambda *_: print("once more", flush=True))'


def test_a_second_signal_kills(tmp_path: Path) -> None:
    front, leader = start(tmp_path, "time.sleep(600)", first=STUBBORN)
    front.send_signal(signal.SIGINT)
    assert front.stdout is not None
    assert front.stdout.readline() == "once more\n"
    front.send_signal(signal.SIGINT)
    check_gone(front, leader, tmp_path)
    assert front.returncode == 1


def test_patience_ends(tmp_path: Path) -> None:
    front, leader = start(tmp_path, "time.sleep(600)", patience=0.2, first=STUBBORN)
    front.send_signal(signal.SIGINT)
    check_gone(front, leader, tmp_path)
    assert front.returncode == 1


def test_the_leader_is_killed(tmp_path: Path) -> None:
    front, leader = start(tmp_path, "time.sleep(600)")
    os.kill(leader, signal.SIGKILL)
    check_gone(front, leader, tmp_path)
    assert front.returncode == 128 + signal.SIGKILL


def test_the_front_is_killed(tmp_path: Path) -> None:
    front, leader = start(tmp_path, "time.sleep(600)")
    front.kill()
    check_gone(front, leader, tmp_path)
