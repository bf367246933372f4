"""Configuration: YAML and flags, wrong use, and what ``auto`` becomes."""

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from services import settings
from services.config import (
    ROLES,
    AppConfig,
    ConfigError,
    apply_flags,
    from_yaml,
    keys,
    load,
)
from services.engine.config import EngineConfig
from services.resolve import Machine, ModelFacts, resolve
from services.settings import WorkerSettings, router_settings, worker_settings

GIB = 2**30
LAPTOP = Machine(cores=8, memory_bytes=16 * GIB)
GPU = Machine(cores=64, memory_bytes=512 * GIB, cuda=True, cuda_bytes=80 * GIB)
MODEL = ModelFacts("tiny", max_model_len=8192, num_layers=30, num_kv_heads=3, head_dim=64)


def configured(**flags: object) -> AppConfig:
    return load(None, flags)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "baton.yaml"
    path.write_text(text)
    return path


# --- YAML and flags ----------------------------------------------------------------------------


def test_without_anything_there_is_one_pair() -> None:
    config = load()
    assert [role for role, _ in config.pools()] == ["prefill", "decode"]
    assert config.num_workers == 2


def test_yaml_may_differ_by_role(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        """
        port: 8123
        router: {policy: round-robin, api_keys: [one, two]}
        prefill: {replicas: 2, token_budget: 2048, lease_s: 5}
        decode: {max_num_seqs: 64, prefix_cache: false}
        mixed:
        """,
    )
    config = load(file)
    assert config.port == 8123
    assert config.router.policy == "round-robin"
    assert config.router.api_keys == ("one", "two")
    assert config.prefill.replicas == 2
    assert config.prefill.lease_s == 5.0
    assert config.prefill.engine.token_budget == 2048
    assert config.decode.engine == replace(EngineConfig(), max_num_seqs=64, prefix_cache=False)
    assert config.mixed == AppConfig().mixed


def test_keys_at_the_top_hold_for_all_roles(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        """
        transport: tcp
        kv_blocks: 700
        policy: round-robin
        prefill: 2
        decode: {kv_blocks: 900}
        """,
    )
    config = load(file, {"transport": "nixl"})
    assert [getattr(config, role).transport for role in ROLES] == ["nixl"] * 3
    assert [getattr(config, role).engine.kv_blocks for role in ROLES] == [700, 900, 700]
    assert (config.router.policy, config.prefill.replicas) == ("round-robin", 2)


def test_a_flag_beats_the_yaml_for_all_roles(tmp_path: Path) -> None:
    file = write(tmp_path, "port: 8123\nprefill: {block_size: 8, threads: 3}\n")
    config = load(file, {"port": "9000", "block_size": "32", "mixed": "1"})
    assert config.port == 9000
    assert [getattr(config, role).engine.block_size for role in ROLES] == [32, 32, 32]
    assert config.prefill.engine.threads == 3
    assert config.mixed.replicas == 1


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert load(write(tmp_path, "# nothing\n")) == AppConfig()


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"prefil": {}}, "prefil: unknown key (did you mean prefill?)"),
        (
            {"prefill": {"blok_size": 1}},
            "prefill.blok_size: unknown key (did you mean block_size?)",
        ),
        ({"router": {"xyz": 1}}, "router.xyz: unknown key"),
        ({"prefill": "many"}, "prefill: 'many' is not a mapping of keys"),
        ({"prefill": -1}, "prefill.replicas: -1 is out of range"),
        ({"replicas": 2}, "replicas: unknown key"),
        ({"transport": "nxil"}, "transport: 'nxil' is not one of"),
        ([1], "the top level: [1] is not a mapping of keys"),
        ({"port": "http"}, "port: 'http' is not a whole number"),
        ({"port": True}, "port: True is not a whole number"),
        ({"port": 80.5}, "port: 80.5 is not a whole number"),
        ({"port": 70000}, "port: 70000 is out of range, allowed is from 1 to 65535"),
        ({"model": 5}, "model: 5 is not a text"),
        ({"decode": {"checksums": "yes"}}, "decode.checksums: 'yes' is neither true nor false"),
        ({"decode": {"lease_s": float("nan")}}, "decode.lease_s: nan is out of range"),
        (
            {"decode": {"kv_blocks": -1}},
            "decode.kv_blocks: -1 is out of range, allowed is at least 0",
        ),
        ({"mixed": {"dtype": "fp16"}}, "mixed.dtype: 'fp16' is not one of auto, float32, bfloat16"),
        ({"mixed": {"transport": "nxil"}}, "(did you mean nixl?)"),
        ({"router": {"api_keys": ["a", 1]}}, "router.api_keys[1]: 1 is not a text"),
        ({"router": {"policy": "best"}}, "router.policy is 'best'"),
        (
            {"decode": {"pull_faults": "drop"}},
            "decode.pull_faults: 'drop': drop: '' is not a number",
        ),
        ({"router": {"link_faults": "seed=x"}}, "router.link_faults: 'seed=x': seed: 'x' is not"),
        ({"router": {"max_queue": -1}}, "router.max_queue"),
        ({"router": {"request_timeout_s": float("inf")}}, "router.request_timeout_s"),
        ({"router": {"queue_timeout_s": float("nan")}}, "router.queue_timeout_s"),
        ({"router": {"keep_alive_s": 1e30}}, "router.keep_alive_s"),
    ],
)
def test_wrong_yaml_names_key_value_and_what_is_allowed(raw: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_yaml(raw)
    assert message in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="is not YAML"):
        load(write(tmp_path, "a: [1\n"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"port": "0"}, "--port: 0 is out of range"),
        ({"prefill": "two"}, "--prefill: 'two' is not a whole number"),
        ({"max_model_len": "8k"}, "--max-model-len: '8k' is not a whole number"),
        ({"policy": "best"}, "policy"),
        ({"routers": "0"}, "--routers: 0 is out of range"),
        ({"pull_faults": "drop=0.1,dealy=1"}, "--pull-faults: 'drop=0.1,dealy=1': 'dealy' is not"),
        ({"link_faults": "drop=2"}, "--link-faults: 'drop=2': the probabilities must lie"),
        ({"metrics_port": "65536"}, "--metrics-port: 65536 is out of range"),
        ({"metrics_compat": "sglang"}, "--metrics-compat: 'sglang': it can be vllm, or empty"),
    ],
)
def test_wrong_flags(flags: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_flags(AppConfig(), flags)
    assert message in str(caught.value)


def test_every_key_of_the_engine_is_a_key_of_a_worker_block() -> None:
    block = keys(type(AppConfig().prefill))
    assert set(keys(EngineConfig)) < set(block)
    assert "engine" not in block


# --- resolving ---------------------------------------------------------------------------------


def test_auto_on_a_cpu() -> None:
    config = resolve(load(), LAPTOP, MODEL)
    engine = config.decode.engine
    assert (engine.device, engine.dtype) == ("cpu", "float32")
    assert (engine.token_budget, engine.chunk_budget) == (0, 0)  # the worker measures
    assert engine.max_model_len == 8192
    assert engine.kv_blocks == 4 * 512 + 1  # four longest requests, and block 0
    assert engine.threads == 4  # eight cores, two workers
    assert config.decode.transport == "nixl"
    assert config.served_model_name == "tiny"
    assert config.mixed == load().mixed  # nobody runs it: left alone


def test_a_pool_for_short_requests_holds_many_of_them() -> None:
    config = resolve(load(None, {"max_model_len": "256"}), LAPTOP, MODEL)
    assert config.decode.engine.kv_blocks == 1024 + 1


def test_auto_on_a_gpu() -> None:
    engine = resolve(load(), GPU, MODEL).prefill.engine
    assert (engine.device, engine.dtype, engine.token_budget) == ("cuda", "bfloat16", 0)


def test_what_was_asked_for_stays() -> None:
    config = configured(
        dtype="bfloat16", threads="3", kv_blocks="600", token_budget="99", served_model_name="me"
    )
    resolved = resolve(config, LAPTOP, MODEL)
    engine = resolved.prefill.engine
    assert (engine.dtype, engine.threads, engine.kv_blocks) == ("bfloat16", 3, 600)
    assert (engine.token_budget, resolved.served_model_name) == (99, "me")


@pytest.mark.parametrize("flags", [{}, {"token_budget": "512"}])
def test_resolving_twice_changes_nothing(flags: dict[str, str]) -> None:
    once = resolve(load(None, flags), LAPTOP, MODEL)
    assert resolve(once, LAPTOP, MODEL) == once


@pytest.mark.parametrize(
    ("flags", "prefill", "decode"),
    [
        ({"token_budget": "512"}, 512, 128),
        ({"token_budget": "32"}, 32, 16),  # a block at least
        ({"token_budget": "8"}, 8, 8),
        ({"token_budget": "512", "chunk_budget": "100"}, 100, 100),
    ],
)
def test_prompts_get_a_quarter_of_a_decode_workers_step(
    flags: dict[str, str], prefill: int, decode: int
) -> None:
    resolved = resolve(load(None, flags), LAPTOP, MODEL)
    budgets = [pool.engine.chunk_budget for _, pool in resolved.pools()]
    assert budgets == [prefill, decode]


@pytest.mark.parametrize(
    ("machine", "transport"),
    [
        (replace(LAPTOP, one_process=True), "memory"),
        (replace(LAPTOP, linux=False), "tcp"),
        (replace(LAPTOP, one_host=False), "tcp"),
    ],
)
def test_auto_transport(machine: Machine, transport: str) -> None:
    assert resolve(load(), machine, MODEL).prefill.transport == transport


def test_threads_are_never_none() -> None:
    config = configured(prefill="8", decode="8", max_model_len="64")
    assert resolve(config, replace(LAPTOP, cores=2), MODEL).prefill.engine.threads == 1


def test_the_pool_takes_its_share_of_little_memory() -> None:
    small = replace(LAPTOP, memory_bytes=4 * GIB)
    engine = resolve(load(), small, MODEL).decode.engine
    assert 513 <= engine.kv_blocks < 2049
    assert engine.kv_blocks * MODEL.block_bytes(engine) <= 4 * GIB // 10


@pytest.mark.parametrize(
    ("flags", "machine", "words"),
    [
        (
            {"prefill": "0"},
            LAPTOP,
            ["prefill 0", "decode 1", "at least one prefill and one decode"],
        ),
        ({"prefill": "0", "decode": "0"}, LAPTOP, ["mixed 0", "mixed one"]),
        ({"kv_blocks": "512"}, LAPTOP, ["8192 tokens", "513 blocks", "pool's 512", "to 8176"]),
        ({"kv_blocks": "1"}, LAPTOP, ["pool's 1", "lower max_model_len"]),
        ({}, replace(LAPTOP, memory_bytes=GIB), ["513 blocks", "0.1 GiB hold"]),
        ({"kv_blocks": "20000"}, LAPTOP, ["prefill 1 x 20000", "27.5 GiB", "16.0 GiB"]),
        ({"max_model_len": "9000"}, LAPTOP, ["9000", "8192 tokens", "tiny"]),
        ({"device": "cuda"}, LAPTOP, ["'cuda'", "no CUDA device"]),
        ({"transport": "memory"}, LAPTOP, ["'memory'", "nixl, tcp and nccl"]),
        ({"token_budget": "64", "chunk_budget": "65"}, LAPTOP, ["prefill.chunk_budget: 65", "64"]),
        ({"metrics_port": "7998"}, LAPTOP, ["metrics_port: 3 processes", "8000", "at most 7997"]),
    ],
)
def test_what_cannot_work_is_refused(
    flags: dict[str, str], machine: Machine, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(load(None, flags), machine, MODEL)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("name", "values"),
    [("block_size", (16, 32)), ("dtype", ("float32", "bfloat16")), ("transport", ("nixl", "tcp"))],
)
def test_a_pair_must_agree_on_the_form_of_its_kv(name: str, values: tuple[object, object]) -> None:
    raw = {"prefill": {name: values[0]}, "decode": {name: values[1]}}
    with pytest.raises(ConfigError) as caught:
        resolve(from_yaml(raw), LAPTOP, MODEL)
    assert f"prefill.{name}: {values[0]!r}" in str(caught.value)
    assert f"decode.{name}: {values[1]!r}" in str(caught.value)


def test_metrics_ports_beside_the_apis_are_fine() -> None:
    for first in (0, 7997, 8001):
        assert resolve(load(None, {"metrics_port": str(first)}), LAPTOP, MODEL)
    # on several hosts each has fewer of the processes
    resolve(load(None, {"metrics_port": "7998"}), replace(LAPTOP, one_host=False), MODEL)


def test_mixed_workers_alone_need_no_pair() -> None:
    config = configured(prefill="0", decode="0", mixed="2")
    assert [role for role, _ in resolve(config, LAPTOP, MODEL).pools()] == ["mixed"]


def test_worker_settings_can_be_pickled_and_hide_the_secret() -> None:
    settings = WorkerSettings(
        worker_id="prefill-1", role="prefill", model_dir="m", served_model="m", weights="w",
        host="127.0.0.1", transport="tcp", secret=b"never shown", lease_s=30, net_devices="lo",
        checksums=False, engine=EngineConfig(),
    )  # fmt: skip
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert "never shown" not in repr(settings)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "192.0.2.7"])
def test_on_one_host_metrics_are_where_the_api_is_and_workers_are_not(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks the API where the metrics are has to reach them; nobody but routers the workers."""
    config = resolve(configured(host=host), LAPTOP, MODEL)
    monkeypatch.setattr(settings, "weights_id", lambda folder: "digest")
    folder = Path("model")
    worker = worker_settings("decode", config, folder, "127.0.0.1", b"s" * 32)
    assert (worker.host, worker.metrics_host) == ("127.0.0.1", host)
    assert router_settings(config, folder, b"s" * 32).metrics_host == host
    # On a cluster, where Serve's own configuration says where the API is, at the node's address.
    node = "10.0.0.3"
    worker = worker_settings("decode", config, folder, node, b"s" * 32, one_host=False)
    assert (worker.host, worker.metrics_host) == (node, node)
    router = router_settings(config, folder, b"s" * 32, node, one_host=False)
    assert router.metrics_host == node


def test_the_example_can_be_used() -> None:
    config = load(Path(__file__).parents[2] / "deploy" / "baton.example.yaml")
    resolved = resolve(config, LAPTOP, MODEL)
    assert resolved.prefill.engine.token_budget == 512
    assert resolved.served_model_name == "smollm2"


def test_the_example_of_a_serve_config_can_be_used() -> None:
    file = Path(__file__).parents[2] / "deploy" / "serve.example.yaml"
    (app,) = yaml.safe_load(file.read_text())["applications"]
    config = from_yaml(app["args"])
    resolved = resolve(config, replace(LAPTOP, one_host=False), MODEL)
    assert (resolved.routers, resolved.decode.drain_s) == (2, 60)
