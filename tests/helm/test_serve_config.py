"""What the chart tells Serve is what our code takes, for all sets of values.

``services.app.build_app`` and ``baton serve --config`` read the same keys by the same function. One
set is run by test_rendered_serves.py.
"""

from typing import Any

import pytest

from services.config import from_yaml
from services.resolve import Machine, ModelFacts, resolve_shared, resolve_worker
from tests.support.chart import (
    VALUE_SETS,
    Rendered,
    chart_values,
    render,
    value_set,
    with_value,
)

MODEL = ModelFacts("model", max_model_len=8192, num_layers=2, num_kv_heads=2, head_dim=64)
HEAD = Machine(cores=1, memory_bytes=2 * 2**30, one_host=False)  # builds the application
GPU_POD = Machine(
    cores=8, memory_bytes=64 * 2**30, cuda=True, cuda_bytes=80 * 2**30, one_host=False
)


def rendered(name: str) -> Rendered:
    return render(value_set(name) if name else {})


def deployments(chart: Rendered) -> dict[str, Any]:
    (application,) = chart.serve_config()["applications"]
    return {each["name"]: each for each in application["deployments"]}


@pytest.mark.parametrize("name", ["", *VALUE_SETS])
def test_every_set_of_values_is_a_configuration(name: str) -> None:
    chart = rendered(name)
    config = from_yaml(chart.serve_args())
    shared = resolve_shared(config, HEAD, MODEL)
    for role, pool in config.pools():
        group = chart.pods()[role]["spec"]["containers"][0]["resources"]
        has_gpu = any("gpu" in resource for resource in group["limits"])
        assert pool.engine.device == ("cuda" if has_gpu else "cpu")
        machine = GPU_POD if has_gpu else HEAD
        engine = getattr(resolve_worker(role, shared, machine, MODEL), role).engine
        assert engine.dtype == ("bfloat16" if has_gpu else "float32")
        assert engine.threads == pool.engine.threads > 0  # said, as pods see all of a node's cores
    assert config.workers_per_host == 1


@pytest.mark.parametrize("name", ["", *VALUE_SETS])
def test_a_replica_fits_the_pods_of_its_role_and_no_others(name: str) -> None:
    chart = rendered(name)
    groups = {group["groupName"]: group for group in chart.cluster()["workerGroupSpecs"]}
    head = chart.cluster()["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert "baton/role" not in head.get("labels", {})
    names = {"router": "Router", "prefill": "PrefillWorker", "decode": "DecodeWorker"}
    assert {names[role] for role in groups} == set(deployments(chart))
    for role, group in groups.items():
        wants = deployments(chart)[names[role]]
        options = wants["ray_actor_options"]
        assert options["label_selector"] == group["labels"] == {"baton/role": role}
        assert group["template"]["metadata"]["labels"]["baton/role"] == role
        start = group["rayStartParams"]
        assert str(options["num_cpus"]) == start["num-cpus"]
        assert str(options.get("num_gpus", 0)) == start.get("num-gpus", "0")
        # where Baton decides on the pools, what there is to begin with
        replicas = wants.get("num_replicas", group["replicas"])
        assert group["minReplicas"] <= replicas <= group["maxReplicas"]
        # a new replica before an old one goes, only where there is a pod for it
        assert wants["max_surge_percent"] == (replicas < group["maxReplicas"])


def test_a_pool_of_mixed_workers_alone() -> None:
    chart = render(
        {"prefill": {"replicas": 0}, "decode": {"replicas": 0}, "mixed": {"replicas": 3}}
    )
    assert [pool for pool, _ in from_yaml(chart.serve_args()).pools()] == ["mixed"]
    assert set(deployments(chart)) == {"Router", "MixedWorker"}
    assert set(chart.pods()) == {"head", "router", "mixed"}


def test_a_role_s_own_config_wins() -> None:
    values = {
        "kvTransfer": {"transport": "nixl"},
        "slo": {"ttftSeconds": 3, "tpotSeconds": 0.2},
        "router": {"config": {"slo_ttft_s": 4.0}},
        "prefill": {"config": {"transport": "tcp", "threads": 7, "drain_s": 5}},
        "decode": {"config": {"transport": "tcp", "device": "auto"}},
    }
    config = from_yaml(render(values).serve_args())
    assert (config.router.slo_ttft_s, config.router.slo_tpot_s) == (4.0, 0.2)
    assert (config.prefill.transport, config.prefill.engine.threads) == ("tcp", 7)
    assert config.prefill.drain_s == 5
    assert config.decode.engine.device == "auto"


def test_a_role_s_own_config_wins_also_with_nothing() -> None:
    """0, "" and false are values; a merge that takes them for empty puts the derived ones there."""
    own = {"threads": 0, "checksums": False, "drain_s": 0, "ucx_tls": ""}
    chart = render({"prefill": {"config": own}})
    assert chart.serve_args()["prefill"].items() >= own.items()
    assert chart.serve_args()["decode"]["threads"] == 2
    assert from_yaml(chart.serve_args()).prefill.engine.threads == 0


@pytest.mark.parametrize(
    ("resources", "threads"),
    [
        ({"limits": {"cpu": 4}, "requests": {"cpu": "2"}}, 4),
        ({"requests": {"cpu": "2500m"}}, 2),
        ({"requests": {"cpu": "500m"}}, 1),
        ({"requests": {"cpu": "3.5"}}, 3),
        ({"requests": {"cpu": None}}, 0),  # nothing is known: the worker looks for itself
    ],
)
def test_threads_are_the_pod_s_processors(resources: dict[str, Any], threads: int) -> None:
    config = from_yaml(render({"prefill": {"resources": resources}}).serve_args())
    assert config.prefill.engine.threads == threads


def test_changing_numbers_leaves_what_replicas_are_told_as_it_is() -> None:
    """Serve restarts all replicas when ``args`` change, and none for the rest."""
    few = render({})
    many = render(
        {"router": {"replicas": 5}, "prefill": {"replicas": 4}, "decode": {"replicas": 3}}
    )
    assert few.serve_args() == many.serve_args()
    wanted = {name: each["num_replicas"] for name, each in deployments(many).items()}
    assert wanted == {"Router": 5, "PrefillWorker": 4, "DecodeWorker": 3}
    told = {"routers": 5, "workers": {"prefill": 4, "decode": 3}}
    assert deployments(many)["Router"]["user_config"] == told


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("config.model", "org/other"),
        ("config.tracing_ratio", 0.5),
        ("router.config.max_queue", 3),
        ("prefill.config.token_budget", 99),
        ("decode.config.max_num_seqs", 9),
        ("slo.ttftSeconds", 9),
        ("kvTransfer.transport", "nixl"),
        ("secrets.apiKeys.existingSecret", "keys"),
    ],
)
def test_a_changed_value_is_a_changed_application(path: str, value: Any) -> None:
    """B126: ``args`` are Serve's version of the application: another one is rolled out."""
    base = chart_values()
    assert render(with_value({}, path, value)).serve_args() != render(base).serve_args()
    # and where a rollout in place is not wanted, the pods change with it
    new_cluster = with_value({}, "ray.upgradeStrategy.onConfigChange", "NewCluster")
    before, after = render(new_cluster), render(with_value(new_cluster, path, value))
    mark = "baton/config"
    marks = [each.pods()["head"]["metadata"]["annotations"][mark] for each in (before, after)]
    assert marks[0] != marks[1]
    assert "annotations" not in render({}).pods()["head"]["metadata"]


def environment(chart: Rendered, role: str) -> dict[str, Any]:
    entries = chart.pods()[role]["spec"]["containers"][0]["env"]
    assert len({entry["name"] for entry in entries}) == len(entries), "a name stands twice"
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in entries}


@pytest.mark.parametrize(("config", "seconds"), [({}, "610"), ({"request_timeout_s": 59.5}, "70")])
def test_an_haproxy_that_was_replaced_lets_the_longest_request_end(
    config: dict[str, float], seconds: str
) -> None:
    chart = render({"router": {"config": config}})
    for role in chart.pods():
        assert environment(chart, role)["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"] == seconds


def test_a_variable_that_is_set_to_nothing_is_set() -> None:
    chart = render({"ray": {"env": {"RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": 0, "HF_HOME": ""}}})
    for role in chart.pods():
        env = environment(chart, role)
        assert (env["RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS"], env["HF_HOME"]) == ("0", "")


@pytest.mark.parametrize(
    ("value", "text"), [(1, "1"), (16777216, "16777216"), (0.5, "0.5"), (True, "true"), ("", "")]
)
def test_a_variable_of_a_role_is_a_text(value: object, text: str) -> None:
    """Kubernetes takes no others; ``value: 1`` is what people write."""
    entries = [{"name": "MINE", "value": value}, {"name": "NODE", "valueFrom": {"a": "b"}}]
    env = environment(render({"decode": {"env": entries}}), "decode")
    assert env["MINE"] == text
    assert env["NODE"] == {"a": "b"}


def test_a_variable_of_a_role_wins_over_those_of_all_and_these_over_the_chart_s() -> None:
    values = {
        "ray": {"env": {"RAY_USAGE_STATS_ENABLED": 1, "UCX_TLS": "tcp", "MINE": "all"}},
        "secrets": {"hubToken": {"existingSecret": "hub"}},
        "prefill": {"env": [{"name": "MINE", "value": "prefill"}]},
        "decode": {"env": [{"name": "HF_TOKEN", "value": "of decode"}]},
    }
    chart = render(values)
    everywhere = [environment(chart, role) for role in chart.pods()]
    assert {env["RAY_USAGE_STATS_ENABLED"] for env in everywhere} == {"1"}
    assert {env["UCX_TLS"] for env in everywhere} == {"tcp"}
    assert environment(chart, "prefill")["MINE"] == "prefill"
    assert environment(chart, "decode")["MINE"] == "all"
    assert environment(chart, "decode")["HF_TOKEN"] == "of decode"
    hub = {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert environment(chart, "prefill")["HF_TOKEN"] == hub
