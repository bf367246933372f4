"""What goes wrong while pools scale: starts that fail, processes that are killed or stand still.

In full only: each test has a deployment of its own. The short form of the first is in
``test_scaling``.
"""

import contextlib
import os
import signal
import threading
import time
import urllib.error
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.reference import Judge
from tests.support.scaling import Beat, Scaled, Stream, Watch, config, prompt, scaled
from tests.support.serving import until

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("only_in_full")]

REPORTED_S = 30
HOLD_S = 60  # of the planner, after three starts in a row that failed
PREFILL, DECODE = "prefill", "decode"


@pytest.fixture(scope="session")
def only_in_full(full: bool) -> None:
    if not full:
        pytest.skip("only in the full form")


@contextlib.contextmanager
def without_weights(model: Path) -> Iterator[None]:
    """No worker can start meanwhile; those that run have theirs mapped."""
    weights, away = model / "model.safetensors", model / "away"
    weights.rename(away)
    try:
        yield
    finally:
        away.rename(weights)


def failed_starts(found: Scaled, reason: str = "exception") -> float:
    """Of both pools."""
    name = "baton_worker_start_failures_total"
    return sum(found.metric(name, role=role, reason=reason) for role in (PREFILL, DECODE))


@contextlib.contextmanager
def asked(*calls: Any) -> Iterator[list[Future[Any]]]:
    """Requests that are under way; all have ended when the block has."""
    with ThreadPoolExecutor(len(calls)) as pool:
        yield [pool.submit(call) for call in calls]


# --- workers that cannot start --------------------------------------------------------------------


def test_starts_that_fail_are_tried_later_and_go_well_when_the_cause_is_mended(
    small_model: Path, small_judge: Judge, tmp_path: Path
) -> None:
    """After three in a row nothing is tried for a minute. Who waits is told what is wrong."""
    settings = config(small_model, prefill=(0, 1, 1), decode=(0, 1, 1), wake_timeout_s=HOLD_S)
    with scaled(settings, tmp_path) as found:
        found.settle(0, 0)
        with asked(lambda: found.ask(1)) as (first,), without_weights(small_model):

            def held_back() -> bool:
                pools = found.state()["pools"]
                return all(
                    (pools[role]["target"], pools[role]["reason"]) == (0, "start_failures")
                    for role in (PREFILL, DECODE)
                )

            until(held_back, "both pools hold back", 90)
            status, answer = found.server.get("/ready")
            assert (status, answer["ready"]) == (503, False)
            assert {f["in_a_row"] for f in found.failures().values()} <= {3, 4}
            until(lambda: not found.processes(PREFILL, DECODE), "no worker starts any more")
            count, began = failed_starts(found), time.monotonic()
            error = first.exception(2 * HOLD_S)
            assert isinstance(error, urllib.error.HTTPError)
            with error:
                text = error.read().decode()
            assert error.code == 503
            assert "failed to start 3 times in a row" in text
            assert int(error.headers["Retry-After"]) > 0
            assert failed_starts(found) == count, "it was tried in the meantime"
            print(f"nothing was tried for {time.monotonic() - began:.0f} s")
        with asked(lambda: found.ask(2)) as (second,):
            small_judge.check(prompt(2), second.result(2 * HOLD_S))
        assert found.failures() == {}
        assert failed_starts(found) == count


def test_workers_that_get_no_memory_say_so(
    small_model: Path, small_judge: Judge, tmp_path: Path
) -> None:
    """Their address space is limited from outside: what does not fit any more is the KV pool."""
    settings = config(small_model, prefill=(0, 1, 1), decode=(0, 1, 1), kv_blocks=60_000)
    with scaled(settings, tmp_path) as found:
        started = found.processes(PREFILL, DECODE)
        enough = min(process.memory_info().vms for process in started)
        found.settle(0, 0)
        size = enough - 200 * 2**20
        with limited(found, size) as mended, asked(lambda: found.ask(1)) as (first,):
            until(lambda: found.failures(), "a worker fails to start", REPORTED_S)
            failures = found.failures().values()
            mended.set()
            small_judge.check(prompt(1), first.result(120))
        for failure in failures:
            assert failure["reason"] == "exception"
            assert "memory" in failure["message"].lower(), failure
        assert failed_starts(found) >= 1


@contextlib.contextmanager
def limited(found: Scaled, size: int) -> Iterator[threading.Event]:
    """Workers that start get so many bytes of address space, until the event is set."""
    mended = threading.Event()

    def limit() -> None:
        known: set[int] = set()
        while not mended.wait(0.02):
            for process in found.processes(PREFILL, DECODE):
                if process.pid not in known:
                    known.add(process.pid)
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.rlimit(psutil.RLIMIT_AS, (size, size))

    thread = threading.Thread(target=limit, daemon=True)
    thread.start()
    try:
        yield mended
    finally:
        mended.set()
        thread.join()


def test_hundreds_that_wait_for_a_worker_are_bounded(
    small_model: Path, small_judge: Judge, tmp_path: Path
) -> None:
    limit, many = 100, 300
    settings = config(small_model, max_queue=limit)
    with scaled(settings, tmp_path) as found:
        found.settle(0, 0)
        (router,) = found.processes("router")
        before = router.memory_info().rss
        with without_weights(small_model):
            pool = ThreadPoolExecutor(many)
            futures = [pool.submit(found.ask, n) for n in range(many)]
            too_many = many - limit
            until(lambda: sum(f.done() for f in futures) == too_many, "the others are told", 60)
            began = time.monotonic()
            assert found.server.get("/health", timeout=2)[0] == 200
            assert time.monotonic() - began < 1
            assert found.state()["requests"]["queued"] == limit
        for future in [f for f in futures if f.done()]:
            error = future.exception()
            assert isinstance(error, urllib.error.HTTPError)
            with error:
                assert error.code == 429
                assert int(error.headers["Retry-After"]) > 0
        answers = {n: f for n, f in enumerate(futures) if not f.done() or not f.exception()}
        for number, answer in list(answers.items())[:10]:
            small_judge.check(prompt(number), answer.result(120))
        assert all(len(answer.result(120)) == 4 for answer in answers.values())
        pool.shutdown()
        assert router.memory_info().rss - before < 64 * 2**20


# --- processes that are killed --------------------------------------------------------------------


def test_a_worker_that_is_killed_while_it_starts_is_missed(
    small_model: Path, small_judge: Judge, tmp_path: Path
) -> None:
    with scaled(config(small_model), tmp_path) as found:
        found.settle(0, 0)
        with asked(lambda: found.ask(1)) as (first,):
            victim = until(lambda: begun(found, DECODE), "a decode worker starts", 30)[0]
            victim.kill()
            killed = time.monotonic()
            until(lambda: DECODE in found.failures(), "it is missed", REPORTED_S)
            print(f"missed after {time.monotonic() - killed:.1f} s")
            failure = found.failures()[DECODE]
            assert (failure["reason"], failure["in_a_row"]) == ("died", 1)
            assert "killed" in failure["message"]
            assert found.logged("a decode worker did not start")
            small_judge.check(prompt(1), first.result(60))
        assert failed_starts(found, "died") == 1
        assert failed_starts(found) == 0


def begun(found: Scaled, role: str) -> list[psutil.Process]:
    """Workers that have begun to start, and have said so: they have loaded torch."""
    return [p for p in found.processes(role) if any("libtorch" in m.path for m in maps(p))]


def maps(process: psutil.Process) -> list[Any]:
    with contextlib.suppress(psutil.Error):
        return list(process.memory_maps())
    return []


@pytest.mark.parametrize("when", ["just chosen", "at its last requests"])
def test_a_worker_that_is_killed_when_it_is_to_go(
    when: str, small_model: Path, small_judge: Judge, tmp_path: Path
) -> None:
    """Its streams go on elsewhere, and nobody takes its place."""
    settings = config(
        small_model, prefill=(1, 1, 1), decode=(1, 2, 2), drain_s=30, down_after_s=8.0
    )
    with scaled(settings, tmp_path) as found, Watch(found) as watch:
        found.settle(1, 2)
        before = found.processes(DECODE)
        streams = [Stream(found.server, prompt(n, 40), 400, f"{when} {n}") for n in range(4)]

        def leaving() -> list[int]:
            workers = found.server.workers(DECODE)
            return [w["pid"] for w in workers if w["state"] == "draining" and w["running"]]

        (victim,) = until(leaving, "one is too many", 30)
        if when == "at its last requests":
            first = len(streams[0].ids)
            until(lambda: len(streams[0].ids) > first + 20, "its streams go on")
            assert leaving() == [victim]
        os.kill(victim, signal.SIGKILL)
        for stream in streams:
            stream.check(small_judge)
        found.settle(1, 1)
        until(lambda: len(found.processes(DECODE)) == 1, "its process is gone")
        assert found.processes(DECODE)[0] in before
        requests = found.state()["requests"]
    assert watch.sizes(DECODE) == [2, 1]
    assert requests["failed"] == 0
    assert requests["retries"] > 0


def test_one_that_starts_goes_before_one_that_works(
    small_model: Path, small_judge: Judge, tmp_path: Path
) -> None:
    """B113: the second worker stands still while it starts, and is not needed any more then."""
    settings = config(
        small_model, prefill=(1, 1, 1), decode=(1, 1, 2), down_after_s=1.0, cooldown_s=1.0
    )
    with scaled(settings, tmp_path) as found, Watch(found) as watch:
        (works,) = found.processes(DECODE)
        long = [Stream(found.server, prompt(n, 40), 500, f"long {n}") for n in range(2)]
        short = [Stream(found.server, prompt(n, 40), 40, f"short {n}") for n in range(10)]
        starts = until(
            lambda: [p for p in begun(found, DECODE) if p != works], "another starts", 60
        )
        starts[0].suspend()
        for stream in short:
            stream.check(small_judge)
        until(lambda: found.targets()[1] == 1, "one is enough", 60)
        starts[0].resume()
        until(lambda: found.processes(DECODE) == [works], "the one that started has gone", 60)
        assert not any(stream.over for stream in long)
        for stream in long:
            stream.check(small_judge)
        found.settle(1, 1)
        assert found.failures() == {}
        requests = found.state()["requests"]
    assert watch.sizes(DECODE) == [1, 2, 1]
    assert watch.drained(DECODE) == set()
    assert requests["failed"] == requests["retries"] == 0


@pytest.mark.parametrize("who", ["controller", "registry"])
def test_targets_go_on_when_who_keeps_them_is_killed(
    who: str, small_model: Path, small_judge: Judge, tmp_path: Path
) -> None:
    settings = config(small_model, prefill=(1, 1, 2), decode=(1, 1, 2), attainment=0.5)
    with scaled(settings, tmp_path) as found:
        with Beat(4, lambda n: found.ask(n, 24, who, 10)) as beat:
            until(
                lambda: [len(found.ready(role)) for role in (PREFILL, DECODE)] == [2, 2],
                "both pools have grown", 90,
            )  # fmt: skip
            workers = found.processes(PREFILL, DECODE)
            # Serve replaces those that it has not seen to the end of their start.
            until(lambda: len(seen_to_start(found)) == 4, "Serve has seen that all have started")
            (victim,) = found.processes(who)
            with Watch(found) as watch:
                victim.kill()
                until(lambda: successor(found, who, victim), f"another {who}", 60)
                quiet = threading.Event()
                quiet.wait(20)  # in which nothing must happen
        assert found.processes(PREFILL, DECODE) == workers
        for role in (PREFILL, DECODE):
            assert watch.sizes(role) == [2]
            assert {look.state["pools"][role]["scales"] for look in watch.looks} == {True}
        for number, ids in enumerate(beat.results):
            small_judge.check(prompt(number % 10), ids)
        assert found.state()["requests"]["failed"] == 0
        found.settle(1, 1)  # it still decides, and that still arrives


def seen_to_start(found: Scaled) -> list[str]:
    lines = found.logged("started successfully", "serve/controller_*.log")
    return [line for line in lines if "Worker'" in line]


def successor(found: Scaled, who: str, victim: psutil.Process) -> bool:
    return any(process != victim for process in found.processes(who))


def test_what_is_known_of_failed_starts_outlives_the_registry(
    small_model: Path, tmp_path: Path
) -> None:
    with scaled(config(small_model), tmp_path) as found:
        found.settle(0, 0)
        with asked(lambda: found.ask(1)) as (first,):
            with without_weights(small_model):
                found.both_fail(REPORTED_S)
                count = failed_starts(found)
                (victim,) = found.processes("registry")
                with Watch(found) as watch:
                    victim.kill()
                    until(lambda: successor(found, "registry", victim), "another registry", 60)
                    until(lambda: failed_starts(found) > count, "the next one is counted", 60)
            first.result(120)
        assert all(look.state["start_failures"] for look in watch.looks), "forgotten meanwhile"
        assert failed_starts(found) > count
        found.settle(0, 0)
        victim = found.processes("registry")[0]
        with Watch(found) as watch:
            victim.kill()
            until(lambda: successor(found, "registry", victim), "another registry", 60)
            until(lambda: len(watch.looks) > 100, "looks", 30)
            assert found.server.get("/ready") == (200, {"ready": True, "asleep": True})
        assert watch.sizes(PREFILL) == watch.sizes(DECODE) == [0]


def test_while_the_controller_stands_still_at_zero_nobody_hangs(
    small_model: Path, small_judge: Judge, tmp_path: Path
) -> None:
    """B115: probes are quick, a request is told that no worker has come, and one after it is
    answered.
    """
    patience_s = 6
    with scaled(config(small_model, wake_timeout_s=patience_s), tmp_path) as found:
        found.settle(0, 0)
        (controller,) = found.processes("controller")
        controller.suspend()
        try:
            began = time.monotonic()
            with asked(lambda: found.ask(1)) as (first,):
                for path in ("/health", "/ready"):
                    assert found.server.get(path, timeout=1)[0] == 200
                error = first.exception(60)
                assert isinstance(error, urllib.error.HTTPError)
                with error:
                    assert error.code == 503
                    assert int(error.headers["Retry-After"]) > 0
            assert patience_s <= time.monotonic() - began < patience_s + 3
        finally:
            controller.resume()

        def answered() -> list[int]:
            try:
                return found.ask(2)
            except urllib.error.HTTPError as error:
                error.close()
                return []

        small_judge.check(prompt(2), until(answered, "the pools have woken up", 90))
