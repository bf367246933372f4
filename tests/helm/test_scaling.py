"""Pools whose size Baton decides: what the chart tells it, and what it leaves to it."""

import itertools
from dataclasses import fields, replace

import pytest
import yaml

from services.config import from_yaml, settled
from services.planner.config import SPANS, PoolScaling, check_budget
from tests.support.chart import refusal, render

FROM_PODS = ("min", "max", "devices")
POOL = [each.name for each in fields(PoolScaling) if each.name not in FROM_PODS]
BY_LOAD = {"enabled": True, "byLoad": True}
POOLS = {
    "prefill": {"replicas": 2, "minReplicas": 1, "maxReplicas": 4},
    "decode": {"replicas": 1, "minReplicas": 0, "maxReplicas": 3},
    "router": {"replicas": 3},
}


def serve_config(values: dict[str, object]) -> dict[str, object]:
    (application,) = yaml.safe_load(render(values).one("RayService")["spec"]["serveConfigV2"])[
        "applications"
    ]
    return dict(application)


def test_the_bounds_of_pods_are_those_of_pools() -> None:
    application = serve_config({**POOLS, "autoscaling": BY_LOAD})
    config = settled(from_yaml(application["args"]))
    scaling = config.autoscaling
    assert (scaling.prefill.min, scaling.prefill.max) == (1, 4)
    assert (scaling.decode.min, scaling.decode.max) == (0, 3)
    assert config.routers == 3
    assert config.wakes


def test_serve_gets_no_numbers_beside_them() -> None:
    """It takes either a number of replicas or who decides on it."""
    application = serve_config({**POOLS, "autoscaling": BY_LOAD})
    for deployment in application["deployments"]:
        assert "num_replicas" not in deployment, deployment["name"]
    application = serve_config({**POOLS, "mixed": {"replicas": 2}, "autoscaling": BY_LOAD})
    numbers = {each["name"]: each.get("num_replicas") for each in application["deployments"]}
    assert numbers["MixedWorker"] == 2


def test_a_worker_takes_its_gpus_from_the_budget() -> None:
    gpu = {"gpus": 1, "resources": {"limits": {"memory": "8Gi"}}}
    pools = {role: {**POOLS[role], **gpu} for role in ("prefill", "decode")}
    config = {"budget": 5, "attainment": 0.9, "decode": {"down_after_s": 600}}
    application = serve_config({**pools, "autoscaling": {**BY_LOAD, "config": config}})
    scaling = settled(from_yaml(application["args"])).autoscaling
    assert (scaling.budget, scaling.attainment) == (5, 0.9)
    assert (scaling.decode.devices, scaling.decode.down_after_s) == (1, 600)


def test_without_it_numbers_are_those_of_the_values() -> None:
    application = serve_config({**POOLS, "autoscaling": {"enabled": True}})
    assert "autoscaling" not in application["args"]
    numbers = {each["name"]: each["num_replicas"] for each in application["deployments"]}
    assert numbers == {"Router": 3, "PrefillWorker": 2, "DecodeWorker": 1}


def test_wrong_use_says_what_to_do() -> None:
    assert "byLoad needs autoscaling.enabled" in refusal({"autoscaling": {"byLoad": True}})
    bounds = {**BY_LOAD, "config": {"prefill": {"max": 3}}}
    assert "max" in refusal({"autoscaling": bounds})
    assert "attainment" in refusal({"autoscaling": {**BY_LOAD, "config": {"attainment": "all"}}})
    mixed = {"mixed": {"replicas": 2}, "prefill": {"replicas": 0}, "decode": {"replicas": 0}}
    assert "with mixed ones only there are none" in refusal({**mixed, "autoscaling": BY_LOAD})


def test_numbers_that_the_planner_would_refuse_are_refused_before() -> None:
    """Each of them a little below and above what the code takes, all at once."""
    for side, step in ((0, -0.01), (1, 1)):
        block = {name: span[side] + step for name, span in SPANS.items()}
        pool = {name: block.pop(name) for name in POOL if name in block}
        own = {name: value for name, value in block.items() if name not in FROM_PODS}
        config = {**own, "prefill": pool, "decode": pool}
        message = refusal({"autoscaling": {**BY_LOAD, "config": config}})
        for name in own:
            assert f"/autoscaling/config/{name}'" in message, message
        for role, name in itertools.product(("prefill", "decode"), pool):
            assert f"/autoscaling/config/{role}/{name}'" in message, message
    for values in (own, pool):
        assert len(values) > 3


def test_the_smallest_pools_fit_into_the_budget() -> None:
    def values(budget: int) -> dict[str, object]:
        pools = {**POOLS, "prefill": {**POOLS["prefill"], "minReplicas": 2}}
        return {**pools, "autoscaling": {**BY_LOAD, "config": {"budget": budget}}}

    assert "budget: 2 is less than the 3" in refusal(values(2)), "none is one, when somebody asks"
    scaling = settled(from_yaml(serve_config(values(3))["args"])).autoscaling
    check_budget(scaling, {})
    with pytest.raises(ValueError, match="budget is 2"):
        check_budget(replace(scaling, budget=2), {})


def test_an_objective_is_one_that_the_planner_takes() -> None:
    most = int(SPANS["objective_s"][1])
    scaled = {**POOLS, "autoscaling": BY_LOAD}
    assert "slo.ttftSeconds: " in refusal({**scaled, "slo": {"ttftSeconds": most + 1}})
    router = {**POOLS["router"], "config": {"slo_tpot_s": most + 1}}
    assert "slo.tpotSeconds: " in refusal({**scaled, "router": router})
    render({**scaled, "slo": {"ttftSeconds": most}})
    render({**POOLS, "slo": {"ttftSeconds": most + 1}})
