"""Pools of ``baton serve`` that scale by themselves: down by drain, to none, and up again.

Ray, Serve, its controller and the processes are the real ones, the model is small. The tests of the
short form share one server and come in this order: it starts with two decode workers, of which one
is too many. What goes wrong meanwhile is in ``test_scaling_failures``.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import yaml

from tests.support.reference import Judge
from tests.support.scaling import (
    SEQ_S,
    STEP_S,
    Beat,
    Scaled,
    Stream,
    Watch,
    config,
    prompt,
    scaled,
)
from tests.support.serving import BATON, free_port, until

WRONG_USE = 2
REPORTED_S = 30
FROZEN_S = 1.0
# Of Ray and Serve, all but the replicas and HAProxy, which is no Python.
RAYS = ("raylet", "gcs_server", "ray::ServeController", "ray::ProxyActor", "ray::HAProxyManager")


@pytest.fixture(scope="module")
def deployed(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scaled]:
    settings = config(small_model, (0, 1, 2), (0, 2, 2), down_after_s=6.0, idle_s=7.0)
    with scaled(settings, tmp_path_factory.mktemp("deployed")) as found:
        yield found


def test_a_budget_below_both_minima_is_told_before_anything_starts(
    small_model: Path, tmp_path: Path
) -> None:
    settings = config(small_model, prefill=(1, 1, 2), decode=(2, 2, 2))
    settings["autoscaling"] |= {"budget": 2}
    settings["port"] = free_port()
    (tmp_path / "baton.yaml").write_text(yaml.safe_dump(settings))
    command = [BATON, "serve", "--config", str(tmp_path / "baton.yaml")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == WRONG_USE
    assert ended.stdout == "", "it had begun"
    (line,) = ended.stderr.splitlines()
    assert line.startswith("baton: error: ")
    for words in ("autoscaling.budget is 2 accelerators", "1 for prefill and 2 for decode"):
        assert words in line


def test_a_pool_shrinks_while_its_streams_go_on(deployed: Scaled, small_judge: Judge) -> None:
    """A worker that is too many finishes what it can within its drain, and hands the rest back."""
    deployed.settle(1, 2)
    with Watch(deployed) as watch:
        streams = [Stream(deployed.server, prompt(n, 40), 600, f"down {n}") for n in range(4)]
        deployed.settle(1, 1)
        assert not any(stream.over for stream in streams), "too late to show anything"
        for stream in streams:
            stream.check(small_judge)
    assert watch.sizes("decode") == [2, 1]
    (left,) = watch.drained("decode")
    assert left not in {worker["id"] for worker in deployed.workers()}
    requests = deployed.state()["requests"]
    assert requests["retries"] > 0, "nothing was handed back"
    assert requests["failed"] == 0


def test_pools_go_to_none_when_nobody_asks(deployed: Scaled) -> None:
    """B115: and that is said; whoever looks after the deployment gets quick answers meanwhile."""
    deployed.settle(0, 0)
    until(lambda: not deployed.processes("prefill", "decode"), "their processes are gone")
    assert deployed.server.get("/ready", timeout=2) == (200, {"ready": True, "asleep": True})
    assert deployed.server.get("/health", timeout=2)[0] == 200
    pools = deployed.state()["pools"]
    for role in ("prefill", "decode"):
        assert (pools[role]["reason"], pools[role]["target"]) == ("idle", 0)
        assert pools[role]["actual"].keys() <= {"dead"}
        labels = {"role": role, "direction": "down", "reason": "idle"}
        assert deployed.metric("baton_autoscale_decisions_total", **labels) >= 1
        assert deployed.metric("baton_autoscale_replicas", role=role, kind="target") == 0


def test_the_first_request_wakes_workers_also_when_they_fail_at_first(
    deployed: Scaled, small_model: Path, small_judge: Judge, full: bool
) -> None:
    """What is wrong is said while the request waits; it is mended, and the request answered."""
    weights, away = small_model / "model.safetensors", small_model / "away"
    weights.rename(away)
    try:
        first = Stream(deployed.server, prompt(7, 60), 20, "first")
        # Beside other tests, the start itself may take longer than the report is to.
        patience_s = REPORTED_S if full else 3 * REPORTED_S
        failures = deployed.both_fail(patience_s)
        assert deployed.state()["requests"]["queued"] == 1
        assert not first.over
    finally:
        away.rename(weights)
    for role, failure in failures.items():
        assert failure["reason"] == "exception"
        assert "FetchError" in failure["message"]
        assert "*.safetensors" in failure["message"]
        assert deployed.logged(f"a {role} worker did not start"), "of the router"
        assert deployed.logged(f"a {role} worker could not start"), "of the worker"
        assert deployed.metric("baton_worker_start_failures_total", role=role, reason="exception")
    first.check(small_judge)
    deployed.settle(1, 1)
    assert deployed.failures() == {}
    for role in ("prefill", "decode"):
        labels = {"role": role, "direction": "up", "reason": "wake"}
        assert deployed.metric("baton_autoscale_decisions_total", **labels) == 1


def test_prompts_bring_a_prefill_worker_that_works_when_it_has_proven_itself(
    deployed: Scaled, small_judge: Judge, full: bool
) -> None:
    """B111: five prompts a second, of which one worker can do half."""
    if not full:
        pytest.skip("takes half a minute: --full; tests/unit/test_autoscaler.py has the decision")
    with Watch(deployed) as watch, Beat(5, deployed.ask) as beat:
        until(lambda: len(deployed.ready("prefill")) == 2, "two prefill workers", 90)
        before = {w["id"]: w["computed_prompt_tokens"] for w in deployed.ready("prefill")}

        def both_work() -> bool:
            now = {w["id"]: w["computed_prompt_tokens"] for w in deployed.ready("prefill")}
            return all(now[name] > tokens for name, tokens in before.items())

        until(both_work, "both compute prompts")
    assert (1, 2) in pairwise(watch.sizes("prefill"))
    seen, early = watch.early_birds()
    assert seen > 0, "no look saw the new worker before its proof"
    assert early == []
    for number, ids in enumerate(beat.results[:20]):
        small_judge.check(prompt(number), ids)
    assert deployed.state()["requests"]["failed"] == 0


def test_no_token_passes_through_ray(deployed: Scaled, small_judge: Judge) -> None:
    """B117: all of Ray and Serve but the replicas stands still, and streams do not notice."""
    streams = [Stream(deployed.server, prompt(n, 40), 50, f"frozen {n}") for n in range(4)]
    for stream in streams:
        stream.begun()
    family = psutil.Process(deployed.server.process.pid).children(recursive=True)
    frozen = [process for process in family if process.name().startswith(RAYS)]
    assert len(frozen) >= len(RAYS)
    before = [len(stream.ids) for stream in streams]
    for process in frozen:
        os.kill(process.pid, signal.SIGSTOP)
    try:
        time.sleep(FROZEN_S)  # it is the time that is measured
        came = [len(stream.ids) - n for stream, n in zip(streams, before, strict=True)]
    finally:
        for process in frozen:
            os.kill(process.pid, signal.SIGCONT)
    steps = FROZEN_S / (STEP_S + SEQ_S * len(streams))  # of the declared pace
    assert min(came) > steps / 2, came
    for stream in streams:
        stream.check(small_judge)
