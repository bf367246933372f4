"""Targets by turns, over HTTP, against servers of known delays."""

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadtest.client import Client, ClientOptions
from loadtest.compare import Comparer, Search, Sweep
from loadtest.conversation import Conversation, Turn
from loadtest.event_loop import new_event_loop
from loadtest.ratios import FIGURES, estimate, notes, ratio
from loadtest.search import RateSearch
from loadtest.slo import SLO
from loadtest.targets import Target, TargetError
from loadtest.trial import OVERDUE, Comparison, Trial, Window
from tests.support.fake_baton import COMMAND
from tests.support.stub_server import RunningStub, running_stub

SECONDS = 0.25
FAST, SLOW = ("--ttft-ms", "5", "--itl-ms", "2"), ("--ttft-ms", "10", "--itl-ms", "6")
SLOS = {"": {"chat": SLO(ttft=0.5, tpot=0.1)}}


def run(work: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(asyncio.wait_for(work, 60))


def workload(rate: float, seed: int) -> Sequence[Conversation]:
    """Requests at regular times, with texts that tell the seed."""
    times = np.arange(0, SECONDS, 1 / rate).tolist()
    return [Conversation(at, "chat", (Turn(f"{seed} {n}", 2, 6),)) for n, at in enumerate(times)]


def connect(url: str) -> AbstractAsyncContextManager[Client]:
    return Client(ClientOptions(url=url, endpoint="completions"))


def comparer(
    stop: asyncio.Event,
    said: list[str],
    on_trial: Callable[[Trial], None] = lambda trial: None,
    **others: Any,
) -> Comparer:
    return Comparer(
        workload, Window(SECONDS, lead=0.0), SLOS, connect, stop, said.append, on_trial, **others
    )


def compare(
    targets: Sequence[Target],
    plan: Sweep | Search,
    folder: Path,
    on_trial: Callable[[asyncio.Event, Trial], None] = lambda stop, trial: None,
    **options: Any,
) -> tuple[Comparison, list[str]]:
    said: list[str] = []

    async def scenario() -> Comparison:
        stop = asyncio.Event()
        turns = comparer(stop, said, lambda trial: on_trial(stop, trial))
        return await turns.compare(targets, plan, folder, command=COMMAND, **options)

    found: Comparison = run(scenario())
    return found, said


def prompts(stub: RunningStub) -> list[str]:
    """Of the workload, in the order of their arrival."""
    return [seen.prompt for seen in stub.requests() if seen.prompt != "Hello"]


def pid_of(log: Path) -> int:
    found = re.findall(r"^pid (\d+)$", log.read_text(), re.MULTILINE)
    return int(found[-1])


def test_targets_take_turns_and_are_asked_the_same(tmp_path: Path) -> None:
    with running_stub(ttft_ms=5, itl_ms=8) as a, running_stub(ttft_ms=5, itl_ms=24) as b:
        targets = [Target("a", url=a.url), Target("b", url=b.url)]
        found, said = compare(targets, Sweep((20.0, 40.0), rounds=2), tmp_path)
        asked = prompts(a), prompts(b)
    order = [(trial.round, trial.rate, trial.target) for trial in found.trials]
    assert order == [
        (0, 20.0, "a"), (0, 20.0, "b"), (0, 40.0, "b"), (0, 40.0, "a"),
        (1, 20.0, "b"), (1, 20.0, "a"), (1, 40.0, "a"), (1, 40.0, "b"),
    ]  # fmt: skip
    warm = 4
    assert asked[0][warm:] == asked[1][warm:]
    assert len(asked[0]) == warm + 2 * (5 + 10)
    assert len({text.split()[0] for text in asked[0][warm:]}) == 4  # seeds of rounds and rates
    assert all(len(trial.result.records) == trial.rate * SECONDS for trial in found.trials)
    tpot = ratio(found, "b", 40.0, FIGURES["TPOT p50"], np.random.default_rng(0))
    assert tpot is not None
    assert tpot.base == pytest.approx(0.008, rel=0.3)
    assert tpot.ratio.value == pytest.approx(3.0, rel=0.3)
    assert tpot.ratio.low <= tpot.ratio.value <= tpot.ratio.high
    last = said[-1]
    assert last.startswith("round 2, b at 40/s: 10 of 10 met their SLOs (100 %), TTFT p50 ")
    assert last.endswith("; that was the last")


def test_servers_of_our_own_are_paused_between_their_turns(tmp_path: Path) -> None:
    targets = [Target("fast", flags=FAST), Target("slow", flags=SLOW)]
    states: list[dict[str, str]] = []

    def look(stop: asyncio.Event, trial: Trial) -> None:
        pids = {name: pid_of(tmp_path / f"{name}.log") for name in ("fast", "slow")}
        states.append(
            {name: Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
             for name, pid in pids.items()} | {"turn": trial.target}
        )  # fmt: skip

    found, _ = compare(targets, Sweep((40.0,), rounds=2), tmp_path, look)
    assert [state["turn"] for state in states] == ["fast", "slow", "slow", "fast"]
    for state in states:
        assert {name for name, code in state.items() if code == "T"} == (
            {"fast", "slow"} - {state["turn"]}
        )
    assert all(not record.error for trial in found.trials for record in trial.result.records)
    for name in ("fast", "slow"):
        assert not Path(f"/proc/{pid_of(tmp_path / f'{name}.log')}").exists()


def test_with_restarts_each_turn_has_a_server_of_its_own(tmp_path: Path, full: bool) -> None:
    if not full:
        pytest.skip("--full: starts each server again")
    targets = [Target("fast", flags=FAST), Target("slow", flags=SLOW)]
    found, _ = compare(targets, Sweep((20.0, 40.0), rounds=1), tmp_path, restart=True)
    order = [(trial.target, trial.rate) for trial in found.trials]
    assert order == [("fast", 20.0), ("fast", 40.0), ("slow", 20.0), ("slow", 40.0)]
    assert len({pid_of(tmp_path / f"{name}.log") for name in ("fast", "slow")}) == 2


def test_what_does_not_fit_into_memory_is_started_for_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loadtest.fleet.memory_available", lambda: 1 << 20)  # less than a Python
    targets = [Target("fast", flags=FAST), Target("slow", flags=SLOW)]
    found, said = compare(targets, Sweep((20.0,), rounds=1), tmp_path)
    assert [trial.target for trial in found.trials] == ["fast", "slow"]
    (note,) = [note for note in found.notes if "memory" in note]
    assert note.startswith("slow does not fit into the memory beside the others (0.0 GiB left, one")
    assert note in said
    for name in ("fast", "slow"):
        assert (tmp_path / f"{name}.log").read_text().count("$ ") == 1


def test_a_target_that_dies_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    def kill(stop: asyncio.Event, trial: Trial) -> None:
        if trial.target == "slow" and trial.round == 0:
            # in the middle of its next turn, which is the first of the next round
            pid = pid_of(tmp_path / "slow.log")
            asyncio.get_running_loop().call_later(0.3 * SECONDS, os.kill, pid, signal.SIGKILL)

    targets = [Target("fast", flags=FAST), Target("slow", flags=SLOW)]
    found, said = compare(targets, Sweep((80.0,), rounds=3), tmp_path, kill)
    assert [(trial.round, trial.target) for trial in found.trials] == [
        (0, "fast"), (0, "slow"), (1, "slow"), (1, "fast"), (2, "fast")
    ]  # fmt: skip
    died = found.trials[2].result.records
    assert len(died) == 20
    assert {record.error for record in died} >= {"connect"}
    (note,) = [note for note in found.notes if "slow was" in note]
    assert note.startswith("slow was killed by signal 9 during the comparison")
    assert f"pid {pid_of(tmp_path / 'slow.log')}" in note
    assert note in said
    assert ratio(found, "slow", 80.0, FIGURES["TTFT p50"], np.random.default_rng(0)) is not None


def test_a_dead_url_is_errors(tmp_path: Path) -> None:
    def options(url: str) -> AbstractAsyncContextManager[Client]:
        return Client(ClientOptions(url=url, model="m", endpoint="completions"))

    async def scenario() -> Comparison:
        said: list[str] = []
        turns = comparer(asyncio.Event(), said)
        turns.connect = options
        return await turns.compare(
            [Target("gone", url="http://127.0.0.1:9")], Sweep((40.0,), rounds=1), tmp_path
        )

    (trial,) = run(scenario()).trials
    assert [record.error for record in trial.result.records] == ["connect"] * 10


def test_a_url_where_no_server_is_fails_at_once_if_it_must_name_the_model(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="gone: http://127.0.0.1:9"):
        compare([Target("gone", url="http://127.0.0.1:9")], Sweep((20.0,)), tmp_path)


def test_what_was_seen_before_an_interrupt_is_kept(tmp_path: Path) -> None:
    """Requests that hang would be waited for; the interrupt ends them too."""

    def interrupt(stop: asyncio.Event, trial: Trial) -> None:
        asyncio.get_running_loop().call_later(0.5 * SECONDS, stop.set)

    with running_stub(ttft_ms=100) as a:
        found, _ = compare([Target("a", url=a.url)], Sweep((40.0,), 3), tmp_path, interrupt)
    first, second = found.trials
    assert found.interrupted
    assert second.result.interrupted
    assert len(first.result.records) == 10
    assert 0 < len(second.result.records) < 10
    assert second.result.num_planned == 10
    assert any(note.startswith("Interrupted after 2 trials") for note in notes(found))


def test_an_interrupt_while_a_server_starts_leaves_nothing(tmp_path: Path) -> None:
    async def scenario() -> Comparison:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(0.6, stop.set)
        target = Target("mute", flags=("--behaviour", "mute"))
        return await comparer(stop, []).compare([target], Sweep((1.0,)), tmp_path, command=COMMAND)

    found: Comparison = run(scenario())
    assert found.interrupted
    assert not found.trials
    assert not Path(f"/proc/{pid_of(tmp_path / 'mute.log')}").exists()


def test_an_overloaded_server_is_cut_off_when_all_is_lost(tmp_path: Path) -> None:
    """Answers would take ten seconds; after the deadline of one second they have all missed."""

    async def scenario() -> Comparison:
        turns = comparer(asyncio.Event(), [], warm_up=0)
        return await turns.compare([Target("a", url=a.url)], Sweep((40.0,), rounds=1), tmp_path)

    with running_stub(ttft_ms=1, itl_ms=2000) as a:
        started = time.monotonic()
        found = run(scenario())
        took_s = time.monotonic() - started
    (trial,) = found.trials
    assert {record.error for record in trial.result.records} == {OVERDUE}
    assert trial.probe(SLOS[""]).met == (False,) * 10
    assert not trial.result.interrupted
    assert SECONDS + 1.0 < took_s < 8.0


def test_the_highest_rate_of_a_server(tmp_path: Path) -> None:
    """Half of the requests would be too late from 40/s on: the workload asks for more tokens."""

    def heavier(rate: float, seed: int) -> Sequence[Conversation]:
        tokens = 2 if rate < 40 else 60  # at 50 ms each: 2 s are far from both
        return [
            Conversation(each.at_s, "chat", (Turn(each.turns[0].text, 2, tokens),))
            for each in workload(rate, seed)
        ]

    async def scenario() -> Comparison:
        turns = comparer(asyncio.Event(), [])
        turns.workload, turns.objectives = heavier, {"": {"chat": SLO(e2e=2.0)}}
        plan = Search(RateSearch(16.0, probes=6))
        return await turns.compare([Target("a", url=a.url)], plan, tmp_path)

    with running_stub(ttft_ms=10, itl_ms=50) as a:
        found: Comparison = run(scenario())
    best = estimate(found, "a", "")
    assert best is not None
    assert best.low <= 40 <= best.high
    assert best.rate == pytest.approx(40, rel=0.2)
    assert len(found.trials) == 6
    assert [trial.rate for trial in found.trials][:3] == [16.0, 32.0, 64.0]
