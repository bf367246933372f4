"""Stands for ``baton serve`` where a test wants to see how servers are started and stopped.

It takes ``--host`` and ``--port``, tells its pid and serves as ``tests.support.stub_server``
does with the other flags. ``--behaviour``: ``refuse`` ends at once with an error as ``baton`` has
them, ``mute`` never listens, ``stubborn`` ignores SIGINT, as does a child of it in a session of its
own.
"""

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, str(Path(__file__).resolve()))


def main() -> None:
    sys.path[0] = str(ROOT)
    from tests.support import stub_server

    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("--behaviour", default="")
    args, others = parser.parse_known_args()
    print(f"pid {os.getpid()}", flush=True)
    if args.behaviour == "refuse":
        print("baton: error: --threads 99: this machine has 2 cores", file=sys.stderr)
        raise SystemExit(2)
    if args.behaviour == "mute":
        signal.pause()
    if args.behaviour == "stubborn":
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the child inherits it
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        print(f"pid {child.pid}", flush=True)
    stub_server.main(others)


if __name__ == "__main__":
    main()
