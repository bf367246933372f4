"""The block ``autoscaling``, its short form, and what else follows from it."""

from dataclasses import asdict
from pathlib import Path

import pytest

from services.config import AppConfig, ConfigError, from_yaml, load, settled
from services.planner.autoscaler import scaling_of
from services.planner.config import PoolScaling, ScalingConfig
from services.resolve import Machine, ModelFacts, resolve
from services.settings import router_settings

GIB = 2**30
LAPTOP = Machine(cores=4, memory_bytes=16 * GIB)
MODEL = ModelFacts("tiny", max_model_len=8192, num_layers=30, num_kv_heads=3, head_dim=64)


def of_yaml(raw: object) -> AppConfig:
    return settled(from_yaml(raw))


def test_pools_do_not_scale_unless_told() -> None:
    config = load()
    assert not config.autoscaling.scales
    assert not config.wakes
    assert config.num_workers == 2


@pytest.mark.parametrize("given", ["flags", "yaml"])
def test_a_range_is_short_for_min_and_max(given: str) -> None:
    ranges = {"prefill": "1..4", "decode": "0..3"}
    config = load(None, ranges) if given == "flags" else of_yaml(ranges)
    prefill, decode = config.autoscaling.prefill, config.autoscaling.decode
    assert (prefill.min, prefill.max, decode.min, decode.max) == (1, 4, 0, 3)
    assert (config.prefill.replicas, config.decode.replicas) == (1, 1)  # to begin with
    assert config.wakes
    assert config.num_workers == 7


def test_the_block_and_the_short_form_are_one() -> None:
    block = {"decode": {"down_after_s": 60, "devices": 2}, "budget": 9, "attainment": 0.9}
    config = of_yaml({"decode": "1..3", "autoscaling": block})
    assert config.autoscaling.decode == PoolScaling(
        min=1, max=3, objective_s=0.1, devices=2, down_after_s=60
    )
    assert (config.autoscaling.budget, config.autoscaling.attainment) == (9, 0.9)
    assert not config.autoscaling.prefill.scales


def test_objectives_are_the_router_s_unless_given() -> None:
    raw = {
        "router": {"slo_ttft_s": 3, "slo_tpot_s": 0.2},
        "autoscaling": {"prefill": {"max": 2}, "decode": {"max": 2, "objective_s": 0.05}},
    }
    scaling = of_yaml(raw).autoscaling
    assert (scaling.prefill.objective_s, scaling.decode.objective_s) == (3, 0.05)


def test_a_number_on_the_command_line_is_just_that(tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("autoscaling: {prefill: {min: 1, max: 4}, decode: {min: 2, max: 4}}")
    config = load(file, {"prefill": "2"})
    assert not config.autoscaling.prefill.scales
    assert config.prefill.replicas == 2
    assert config.autoscaling.decode.scales
    assert config.decode.replicas == 2  # its default, 1, is below min


def test_replicas_are_where_it_begins() -> None:
    raw = {"prefill": {"replicas": 3}, "autoscaling": {"prefill": {"min": 1, "max": 4}}}
    assert of_yaml(raw).prefill.replicas == 3
    raw["prefill"] = {"replicas": 9}
    assert of_yaml(raw).prefill.replicas == 4
    raw = {"decode": {"replicas": 0}, "autoscaling": {"decode": {"min": 0, "max": 4}}}
    assert of_yaml(raw).decode.replicas == 0
    assert [role for role, _ in of_yaml(raw).pools()] == ["prefill", "decode"]


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"autoscaling": {"prefill": {"min": 5, "max": 4}}}, "autoscaling.prefill.min 5 is above"),
        ({"autoscaling": {"prefill": {"max": -1}}}, "autoscaling.prefill.max is -1"),
        ({"autoscaling": {"prefill": {"maximum": 4}}}, "autoscaling.prefill.maximum: unknown"),
        ({"autoscaling": {"mixed": {"max": 4}}}, "autoscaling.mixed: unknown key"),
        ({"autoscaling": {"attainment": 1}}, "autoscaling.attainment is 1"),
        ({"autoscaling": {"interval_s": float("nan")}}, "autoscaling.interval_s is nan"),
        ({"prefill": "4..1"}, "prefill: '4..1'"),
        ({"prefill": "0..0"}, "prefill: '0..0'"),
        ({"prefill": "one"}, "prefill: 'one' is not a mapping"),
        ({"prefill": "1..x"}, "neither a number nor a range like 1..4"),
        ({"prefill": "1..900"}, "allowed is from 0 to 512"),
        ({"mixed": "1..2"}, "mixed workers do not scale"),
        (
            {"prefill": "2..4", "decode": "2..4", "autoscaling": {"budget": 3}},
            "autoscaling.budget is 3 accelerators, but the smallest pools that serve take 2 for",
        ),
        (
            {"prefill": 2, "decode": "1..4", "autoscaling": {"budget": 2}},
            "the smallest pools that serve take 2 for prefill and 1 for decode",
        ),
        (
            {"prefill": "0..4", "decode": "0..4", "autoscaling": {"budget": 1}},
            "the smallest pools that serve take 1 for prefill and 1 for decode",
        ),
    ],
)
def test_wrong_use_says_what_to_do(raw: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace(".", r"\.").replace("(", r"\(")):
        of_yaml(raw)


def test_a_start_that_the_budget_does_not_hold_begins_with_the_least() -> None:
    raw = {
        "prefill": {"replicas": 3},
        "decode": {"replicas": 3},
        "autoscaling": {
            "budget": 4,
            "prefill": {"min": 1, "max": 4},
            "decode": {"min": 2, "max": 4},
        },
    }
    config = of_yaml(raw)
    assert (config.prefill.replicas, config.decode.replicas) == (1, 2)
    assert config.num_workers == 4


def test_cores_and_memory_are_shared_by_as_many_as_there_may_be() -> None:
    config = resolve(load(None, {"prefill": "1..4", "decode": "1..4"}), LAPTOP, MODEL)
    assert (config.prefill.engine.threads, config.decode.engine.threads) == (1, 1)
    fixed = resolve(load(None, {"prefill": "1", "decode": "1"}), LAPTOP, MODEL)
    assert fixed.prefill.engine.threads == 2
    assert config.prefill.engine.kv_blocks <= fixed.prefill.engine.kv_blocks


def test_routers_know_that_there_may_be_no_worker(tmp_path: Path) -> None:
    config = resolve(load(None, {"prefill": "0..1", "decode": "1..2"}), LAPTOP, MODEL)
    assert router_settings(config, tmp_path, b"secret of sixteen").wakes
    config = resolve(load(None, {"prefill": "1..2"}), LAPTOP, MODEL)
    assert not router_settings(config, tmp_path, b"secret of sixteen").wakes


def test_it_travels_as_json() -> None:
    config = of_yaml({"prefill": "1..4", "autoscaling": {"budget": 8}}).autoscaling
    assert scaling_of(asdict(config)) == config
    assert isinstance(config, ScalingConfig)
