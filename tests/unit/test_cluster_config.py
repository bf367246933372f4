"""What differs where each worker has a host of its own: who decides what, keys, limits of pods."""

from pathlib import Path

import pytest

from router.config import RouterConfig
from router.key_file import LOOK_S, Keys
from services import machine
from services.config import AppConfig, ConfigError, from_yaml
from services.machine import check_api_keys, this_machine
from services.resolve import Machine, ModelFacts, resolve_shared, resolve_worker
from services.settings import router_settings

GIB = 2**30
BUILDER = Machine(cores=1, memory_bytes=GIB // 2, one_host=False)  # Ray's head, without a GPU
GPU_POD = Machine(cores=16, memory_bytes=96 * GIB, cuda=True, cuda_bytes=80 * GIB, one_host=False)
CPU_POD = Machine(cores=4, memory_bytes=8 * GIB, one_host=False)
MODEL = ModelFacts("tiny", max_model_len=8192, num_layers=30, num_kv_heads=3, head_dim=64)
ON_GPUS = {"prefill": {"device": "cuda"}, "decode": {"device": "cuda"}}


def shared(**raw: object) -> AppConfig:
    return resolve_shared(from_yaml(raw), BUILDER, MODEL)


# --- what all hosts agree on ---------------------------------------------------------------------


def test_the_builder_s_machine_decides_nothing_of_the_workers() -> None:
    """Neither that it has no GPU, nor that no pool of the model fits its memory."""
    for config, transport in ((shared(**ON_GPUS), "nixl"), (shared(), "tcp")):
        for role in ("prefill", "decode"):
            engine = getattr(config, role).engine
            assert (engine.threads, engine.kv_blocks, engine.token_budget) == (0, 0, 0)
            assert engine.max_model_len == 8192
            assert getattr(config, role).transport == transport
            assert getattr(config, role).net_devices == "auto"  # its environment may say
        assert config.served_model_name == "tiny"


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"mixed": 0, "prefill": 0, "decode": 1}, "needs at least one prefill and one decode"),
        ({"prefill": {"max_model_len": 9000}}, "prefill.max_model_len: 9000 is more than"),
        ({"prefill": {"transport": "nixl"}}, "prefill.transport: 'nixl' differs from"),
        ({"prefill": {"transport": "memory"}}, "prefill.transport: 'memory' works inside one"),
        ({"prefill": {"block_size": 8}}, "prefill.block_size: 8 differs from decode.block_size"),
        # found before any GPU is waited for: the pools would have KV of two types
        ({"prefill": {"device": "cuda"}, "decode": {"device": "cpu"}}, "prefill.dtype: 'bfloat16'"),
    ],
)
def test_what_can_work_on_no_host_is_found_by_the_builder(
    raw: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_shared(from_yaml(raw), BUILDER, MODEL)
    assert said in str(error.value)


# --- what each host decides ----------------------------------------------------------------------


def test_a_worker_fills_in_its_own_role_and_no_other() -> None:
    config = shared(**ON_GPUS, workers_per_host=1)
    mine = resolve_worker("decode", config, GPU_POD, MODEL)
    assert mine.prefill == config.prefill
    assert mine.decode.engine.threads == 16
    assert mine.decode.engine.dtype == "bfloat16"
    assert mine.decode.engine.kv_blocks == 4 * 8192 // 16 + 1  # four longest requests fit


def test_a_worker_without_the_device_says_so() -> None:
    with pytest.raises(ConfigError, match="decode.device: 'cuda', but there is no CUDA device"):
        resolve_worker("decode", shared(**ON_GPUS), CPU_POD, MODEL)


def test_who_is_alone_on_a_host_takes_more_of_it() -> None:
    pools = {"prefill": {"replicas": 8}, "decode": {"replicas": 8}}
    alone = resolve_worker("prefill", shared(**pools, workers_per_host=1), CPU_POD, MODEL)
    assert alone.prefill.engine.threads == 4
    among_many = resolve_worker("prefill", shared(**pools, workers_per_host=4), CPU_POD, MODEL)
    assert among_many.prefill.engine.threads == 1
    # unless it is said, all may be on one host
    with pytest.raises(ConfigError, match="prefill.kv_blocks: .* hold"):
        resolve_worker("prefill", shared(**pools), CPU_POD, MODEL)


@pytest.mark.parametrize(
    ("cpu_max", "cores"),
    [
        ("200000 100000", 2),
        ("250000 100000", 2),  # what is left of a third would hold two others up
        ("50000 100000", 1),
        ("max 100000", 6),
        ("nonsense", 6),
        (None, 6),
    ],
)
def test_cores_are_those_that_the_container_may_use(
    cpu_max: str | None, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quota = tmp_path / "cpu.max"
    if cpu_max is not None:
        quota.write_text(cpu_max + "\n")
    monkeypatch.setattr(machine, "CPU_QUOTA", quota)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)))
    assert this_machine().cores == cores


# --- keys of clients -----------------------------------------------------------------------------


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_keys_of_a_file_come_to_those_of_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n  two \nthree")
    keys = Keys(("zero",), str(file))
    assert keys
    words = (b"zero", b"one", b"two", b"three", b"four", b"")
    assert [word for word in words if keys.known(word)] == [b"zero", b"one", b"two", b"three"]


def test_without_keys_none_is_asked_for() -> None:
    assert not Keys()
    assert Keys(("one",))


def test_a_file_that_has_changed_is_read_again_after_some_seconds(tmp_path: Path) -> None:
    file, clock = tmp_path / "keys", Clock()
    file.write_text("old")
    keys = Keys((), str(file), clock)
    changed = tmp_path / "new"
    changed.write_text("new\n")
    changed.replace(file)  # as Kubernetes does with a secret
    assert keys.known(b"old")
    clock.now += LOOK_S
    assert keys.known(b"new")
    assert not keys.known(b"old")


def test_a_file_that_goes_bad_changes_nothing_until_it_is_good_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, clock = tmp_path / "keys", Clock()
    file.write_text("old")
    keys = Keys((), str(file), clock)
    for damage in (lambda: file.write_text("\n"), file.unlink):
        damage()
        clock.now += LOOK_S
        assert keys.known(b"old")
        assert not keys.known(b"")
    said = [record.getMessage().partition(": ")[2] for record in caplog.records]
    assert said == [
        "holds no key; the keys that were in it still hold",
        "No such file or directory; the keys that were in it still hold",
    ]
    file.write_text("new")
    clock.now += LOOK_S
    assert keys.known(b"new")
    assert not keys.known(b"old")


@pytest.mark.parametrize("text", ["", "\n", " \n\t\n"])
def test_a_file_without_a_key_does_not_open_the_door(text: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    app = from_yaml({"router": {"api_keys": ["one"], "api_keys_file": str(file)}})
    with pytest.raises(ConfigError) as error:
        router_settings(app, tmp_path, b"0123456789abcdef")
    assert str(error.value) == f"router.api_keys_file {file}: holds no key"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="router.api_keys_file .*: No such file or directory"):
        check_api_keys(RouterConfig(api_keys_file=str(tmp_path / "keys")))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="router.api_keys_file .*: 'utf-8' codec"):
        check_api_keys(RouterConfig(api_keys_file=str(tmp_path / "bytes")))
