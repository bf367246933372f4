"""Pools whose size Baton decides: what the chart tells it, and what it leaves to it."""

import yaml

from services.config import from_yaml, settled
from tests.support.chart import refusal, render

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
    mixed = {"mixed": {"replicas": 2}, "prefill": {"replicas": 0}, "decode": {"replicas": 0}}
    application = serve_config({**mixed, "autoscaling": BY_LOAD})
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
