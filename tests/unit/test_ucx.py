"""Who says what UCX uses: the configuration, else the environment, else what fits."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvtransfer.nixl_agent import NixlAgent, advice
from kvtransfer.ucx import AUTOMATIC, UcxOptions, described, settle
from services import settings
from services.config import AppConfig, from_yaml
from services.resolve import Machine, ModelFacts, resolve, resolve_shared, resolve_worker
from services.settings import worker_settings

HERE = Machine(cores=2, memory_bytes=16 * 2**30)
NODE = Machine(cores=8, memory_bytes=16 * 2**30, one_host=False)
MODEL = ModelFacts("tiny", max_model_len=2048, num_layers=2, num_kv_heads=1, head_dim=64)
SET = {"UCX_TLS": "rc,tcp", "UCX_NET_DEVICES": "mlx5_0:1", "UCX_IB_GID_INDEX": "3", "HOME": "/"}
ON_HOSTS = UcxOptions(one_host=False)


def values(options: UcxOptions, environment: Mapping[str, str]) -> dict[str, str]:
    return {name: setting.value for name, setting in settle(options, environment).items()}


def test_where_nobody_says_anything_one_host_has_loopback_and_several_what_ucx_chooses() -> None:
    assert values(AUTOMATIC, {}) == {"UCX_NET_DEVICES": "lo"}
    assert values(ON_HOSTS, {}) == {}


@pytest.mark.parametrize("options", [AUTOMATIC, ON_HOSTS])
def test_the_environment_of_a_worker_is_what_it_gets(options: UcxOptions) -> None:
    assert values(options, SET) == {name: SET[name] for name in SET if name.startswith("UCX_")}
    alone = {"UCX_NET_DEVICES": "eth0"}
    assert values(options, alone) == alone


def test_a_configuration_that_says_something_wins_for_what_it_says() -> None:
    assert values(UcxOptions(tls="tcp"), SET) == {
        "UCX_TLS": "tcp", "UCX_NET_DEVICES": "mlx5_0:1", "UCX_IB_GID_INDEX": "3",
    }  # fmt: skip
    mine = UcxOptions(net_devices="all", one_host=False)
    assert values(mine, SET)["UCX_NET_DEVICES"] == "all"
    assert values(mine, SET)["UCX_TLS"] == "rc,tcp"


def test_an_empty_text_says_nothing() -> None:
    assert values(AUTOMATIC, {"UCX_TLS": "", "UCX_NET_DEVICES": ""}) == {"UCX_NET_DEVICES": "lo"}
    assert values(UcxOptions("", ""), SET) == values(AUTOMATIC, SET)


def test_a_log_line_says_what_is_used_and_who_said_so() -> None:
    assert described(settle(UcxOptions(tls="tcp"), SET)) == (
        "UCX_TLS=tcp (configuration, ucx_tls), UCX_NET_DEVICES=mlx5_0:1 (environment),"
        " UCX_IB_GID_INDEX=3 (environment)"
    )
    assert described(settle(AUTOMATIC, {})) == (
        "UCX_NET_DEVICES=lo (by default on one host), UCX_TLS not set (UCX chooses)"
    )


# --- from a deployment's configuration to the process in which UCX starts ------------------------


def worker(raw: dict[str, object], one_host: bool, monkeypatch: pytest.MonkeyPatch) -> UcxOptions:
    """What the decode worker of a deployment tells its agent."""
    monkeypatch.setattr(settings, "weights_id", lambda folder: "digest")
    config: AppConfig = from_yaml(raw)
    if one_host:
        config = resolve(config, HERE, MODEL)
    else:  # by the builder, in another pod, whose environment is its own
        config = resolve_worker("decode", resolve_shared(config, NODE, MODEL), NODE, MODEL)
    return worker_settings("decode", config, Path("m"), "127.0.0.1", b"s" * 32, one_host).ucx


@pytest.mark.parametrize("one_host", [True, False])
def test_what_reaches_ucx(
    one_host: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen: dict[str, str] = {}

    def create(_: NixlAgent) -> tuple[None, None]:
        seen.clear()
        seen.update({name: v for name, v in os.environ.items() if name.startswith("UCX_")})
        return None, None

    monkeypatch.setattr(NixlAgent, "_create", create)
    for name in [name for name in os.environ if name.startswith("UCX_")]:
        monkeypatch.delenv(name)
    pair = {"transport": "nixl"}
    loopback = {"UCX_NET_DEVICES": "lo"} if one_host else {}
    NixlAgent("a", worker(pair, one_host, monkeypatch))
    assert seen == loopback

    mine = {"UCX_TLS": "rc,tcp", "UCX_NET_DEVICES": "mlx5_1:1", "UCX_IB_GID_INDEX": "3"}
    for name, value in {**mine, "UCX_RNDV_SCHEME": ""}.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.INFO, "kvtransfer.nixl_agent"):
        NixlAgent("b", worker(pair, one_host, monkeypatch))
    assert seen == mine
    assert "nixl agent b: UCX_TLS=rc,tcp (environment), UCX_NET_DEVICES=mlx5_1:1" in caplog.text

    told = {**pair, "prefill": {"ucx_tls": "tcp"}, "decode": {"net_devices": "mlx5_2:1"}}
    NixlAgent("c", worker(told, one_host, monkeypatch))
    assert seen == {**mine, "UCX_NET_DEVICES": "mlx5_2:1"}  # each role by itself
    left = {name: v for name, v in os.environ.items() if name.startswith("UCX_")}
    assert left == {**mine, "UCX_RNDV_SCHEME": ""}


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ModuleNotFoundError("No module named 'nixl'"), "install the package nixl, which"),
        (ImportError("libgrpc.so: failed to map segment from shared object"), "not enough memory"),
        (
            ImportError("libucp.so: cannot open shared object file: Cannot allocate memory"),
            "memory",
        ),
        (ImportError("libucp.so: failed to map segment: Operation not permitted"), "anew"),
        (ImportError("libucp.so.0: cannot open shared object file: No such file"), "anew"),
    ],
)
def test_what_to_do_when_nixl_cannot_be_imported(error: ImportError, words: str) -> None:
    assert words in advice(error)
