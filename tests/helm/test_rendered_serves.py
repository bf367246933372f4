"""The chart's Serve config on a real Ray, with a node for each pod of cpu-laptop."""

import subprocess
import warnings
from typing import Any

from tests.support.chart import render, value_set, with_value
from tests.support.ray_pods import HEAD_IP, RayPods, ray_pods
from tests.support.serving import BATON, until

PROMPT = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}


def test_deployments_have_the_names_of_the_code() -> None:
    with warnings.catch_warnings(action="ignore"):  # Ray's own
        from services.app import DEPLOYMENTS
    (application,) = render({"mixed": {"replicas": 1}}).serve_config()["applications"]
    names = {each["name"] for each in application["deployments"]}
    assert names == {"Router", *DEPLOYMENTS.values()}


def test_the_rendered_config_serves_and_a_changed_value_changes_it(full: bool) -> None:
    """B126 on a real Ray, with a node for each pod of cpu-laptop."""
    values = value_set("cpu-laptop")
    with ray_pods("router", "prefill", "decode") as pods:
        deploy(pods, values)
        answer = pods.post("/v1/completions", PROMPT)
        assert answer["choices"][0]["text"].startswith(" Paris")
        placed = {name: [ip for ip, _ in places] for name, places in pods.replicas().items()}
        assert placed == {
            "Router": [pods.ips["router"]],
            "PrefillWorker": [pods.ips["prefill"]],
            "DecodeWorker": [pods.ips["decode"]],
        }
        values = with_value(values, "config.served_model_name", "renamed")
        values = with_value(values, "decode.config.max_num_seqs", 7)
        before = ids(pods)
        replaced(pods, values)
        if full:
            until_it_runs(pods)
            assert not before & ids(pods)
            assert pods.get("/v1/models")[1]["data"][0]["id"] == "renamed"
            assert pods.post("/v1/completions", PROMPT)["model"] == "renamed"
            prefill_ip = scale_and_leave(pods, values)
            the_cluster_goes(pods, prefill_ip)


def deploy(pods: RayPods, values: dict[str, Any]) -> None:
    pods.deploy(render(values).serve_config())
    until_it_runs(pods)


def replaced(pods: RayPods, values: dict[str, Any]) -> None:
    """Deploy, and see another replica start in the place of each; loading models takes longer."""
    before = pods.incarnations()
    pods.deploy(render(values).serve_config())

    def all_replaced() -> bool:
        now = pods.incarnations()
        return now.keys() == before.keys() and all(
            now[name] and not now[name] & there for name, there in before.items()
        )

    until(all_replaced, "replaced", 120)


def until_it_runs(pods: RayPods) -> None:
    until(pods.runs, "deployed", 180)
    until(lambda: pods.get("/ready")[0] == 200, "ready", 60)


def ids(pods: RayPods) -> set[str]:
    """Of the router and of the workers: each incarnation has one of its own."""
    _, state = pods.get("/internal/state")
    return {state["router"], *(worker["id"] for worker in state["workers"])}


GONE = "nothing is left on this node\n"


def leave(pods: RayPods, ip: str, deadline_s: int, *flags: str) -> subprocess.Popen[str]:
    """What the preStop of a pod runs."""
    command = [BATON, "leave", "--address", pods.address, "--node-ip", ip, *flags]
    command += ["--deadline", str(deadline_s)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def scale_and_leave(pods: RayPods, values: dict[str, Any]) -> str:
    """One more prefill pod changes nobody else; then the first one goes, as its preStop says.

    The address of the other.
    """
    before = ids(pods)
    first, second = pods.ips["prefill"], pods.add("prefill")
    deploy(pods, with_value(values, "prefill.replicas", 2))
    until(lambda: len(pods.workers("prefill")) == 2, "two prefill workers")
    assert before < ids(pods)
    target = 'baton_autoscale_replicas{kind="target",model="renamed",role="prefill"} 2.0'
    assert target in pods.text("/metrics")

    stream = pods.stream("/v1/completions", PROMPT | {"max_tokens": 60, "ignore_eos": True})
    chunks = [next(stream)]
    left = leave(pods, first, 60, "--after", "routers")
    assert left.communicate(timeout=120)[0] == GONE
    assert left.returncode == 0
    chunks += stream
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert reasons[-1] == "length"
    there = [ip for ip, state in pods.replicas()["PrefillWorker"] if state == "RUNNING"]
    assert there == [second]
    assert pods.post("/v1/completions", PROMPT)["choices"][0]["text"].startswith(" Paris")
    return second


def the_cluster_goes(pods: RayPods, prefill_ip: str) -> None:
    """All pods are told at once: what runs is finished, by the workers that it has."""
    stream = pods.stream("/v1/completions", PROMPT | {"max_tokens": 400, "ignore_eos": True})
    chunks = [next(stream)]
    leavers = {
        "router": leave(pods, pods.ips["router"], 630),
        "prefill": leave(pods, prefill_ip, 60, "--after", "routers"),
        "decode": leave(pods, pods.ips["decode"], 60, "--after", "routers"),
        "head": leave(pods, HEAD_IP, 60, "--after", "all"),
    }
    chunks += stream
    finished = {name for name, process in leavers.items() if process.poll() is not None}
    assert not finished, "somebody went before the stream had ended"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    said = {name: process.communicate(timeout=120)[0] for name, process in leavers.items()}
    assert said == {"router": GONE, "prefill": GONE, "decode": GONE, "head": ""}
