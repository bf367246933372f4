"""Servers that a comparison starts, waits for and stops, by a stand-in for ``baton serve``."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from loadtest.targets import Server, Target, TargetError, start
from tests.support.fake_baton import COMMAND, ROOT
from tests.support.serving import until

PATIENCE_S = 20.0


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


def pids(log: Path) -> list[int]:
    """As the stand-in has told them."""
    return [int(pid) for pid in re.findall(r"^pid (\d+)$", log.read_text(), re.MULTILINE)]


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def started(tmp_path: Path, *flags: str) -> Coroutine[Any, Any, Server]:
    return start(Target("pd", flags=flags), tmp_path, COMMAND, PATIENCE_S)


def test_a_server_is_ready_and_its_output_kept(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = await started(tmp_path, "--ttft-ms", "1")
        assert urllib.request.urlopen(f"{server.url}/ready", timeout=5).status == 200
        assert 0 < server.ready_s < PATIENCE_S
        assert not server.died
        (pid,) = pids(tmp_path / "pd.log")
        await server.stop()
        assert not running(pid)
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(f"{server.url}/ready", timeout=5)

    run(scenario())
    first = (tmp_path / "pd.log").read_text().splitlines()[0]
    assert re.search(r"fake_baton\.py serve --ttft-ms 1 --host 127\.0\.0\.1 --port \d+$", first)


def state(pid: int) -> str:
    return str(psutil.Process(pid).status())


def test_a_paused_server_does_not_run_and_goes_on_after_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = await started(tmp_path, "--behaviour", "stubborn")  # it has a child
        family = pids(tmp_path / "pd.log")
        server.pause()
        server.pause()  # twice is as once
        until(lambda: {state(pid) for pid in family} == {"stopped"}, "both are stopped")
        server.resume()
        assert "stopped" not in {state(pid) for pid in family}
        assert urllib.request.urlopen(f"{server.url}/ready", timeout=5).status == 200
        server.pause()
        await server.stop(patience_s=0.1)
        until(lambda: not any(map(running, family)), "a paused one is stopped as well")

    run(scenario())


def test_a_url_is_left_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = await start(Target("other", url="http://127.0.0.1:9"), tmp_path)
        assert server.url == "http://127.0.0.1:9"
        await server.stop()
        assert (server.died, server.tail()) == ("", "")

    run(scenario())
    assert not list(tmp_path.iterdir())


def test_an_error_at_start_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(TargetError) as caught:
        run(started(tmp_path, "--behaviour", "refuse"))
    message = str(caught.value)
    assert message.startswith(
        "pd: baton serve --behaviour refuse ended with status 2: --threads 99:"
    )
    assert "\n" not in message
    assert str(tmp_path / "pd.log") in message


def test_who_never_gets_ready_is_stopped(tmp_path: Path) -> None:
    work = start(Target("pd", flags=("--behaviour", "mute")), tmp_path, COMMAND, patience_s=0.5)
    with pytest.raises(TargetError, match="not ready within 0.5 s; /ready says: .*refused"):
        run(work)
    assert not any(map(running, pids(tmp_path / "pd.log")))


def test_who_does_not_stop_is_killed_with_all_it_has_started(tmp_path: Path) -> None:
    async def scenario() -> list[int]:
        server = await started(tmp_path, "--behaviour", "stubborn")
        found = pids(tmp_path / "pd.log")
        assert len(found) == 2
        assert all(map(running, found))
        await server.stop(patience_s=0.3)
        return found

    found = run(scenario())
    until(lambda: not any(map(running, found)), "both are gone")


def test_who_dies_says_how(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = await started(tmp_path)
        (pid,) = pids(tmp_path / "pd.log")
        os.kill(pid, signal.SIGKILL)
        until(lambda: server.died, "its death is seen")
        assert server.died == "was killed by signal 9"
        assert f"pid {pid}" in server.tail()
        await server.stop()

    run(scenario())


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel")
@pytest.mark.parametrize("then", ["pass", "server.pause()"])
@pytest.mark.parametrize("first", ["pass", "signal.signal(signal.SIGINT, signal.SIG_IGN)"])
def test_a_killed_load_test_leaves_no_server(tmp_path: Path, first: str, then: str) -> None:
    """Nor one that was paused when nobody is left to wake it, nor when it was started in the
    background of a script, where SIGINT is ignored.
    """
    code = f"""
import asyncio, os, signal
from pathlib import Path
from loadtest.targets import Target, start
{first}
server = asyncio.run(start(Target("pd"), Path({str(tmp_path)!r}), {COMMAND!r}, {PATIENCE_S}))
{then}
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    (pid,) = pids(tmp_path / "pd.log")
    until(lambda: not running(pid), "the server was interrupted")


def test_the_real_one(tmp_path: Path, full: bool) -> None:
    if not full:
        pytest.skip("--full: takes half a minute")

    async def scenario() -> list[psutil.Process]:
        target = Target("mixed", flags=("--mixed", "1", "--prefill", "0", "--decode", "0"))
        server = await start(target, tmp_path)
        family = psutil.Process().children(recursive=True)
        assert len(family) > 3  # Ray and what it runs
        server.pause()
        await asyncio.sleep(20)  # Ray's processes ask after one another every few seconds
        server.resume()
        body = b'{"prompt": "Hello", "max_tokens": 4}'
        question = urllib.request.Request(
            f"{server.url}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(question, timeout=30) as response:
            assert response.status == 200
        assert set(psutil.Process().children(recursive=True)) == set(family)  # nobody was replaced
        await server.stop()
        return family

    family = asyncio.run(scenario())
    until(lambda: not any(running(process.pid) for process in family), "all of it is gone")
    assert "ready in" in (tmp_path / "mixed.log").read_text()
