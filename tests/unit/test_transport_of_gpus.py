"""KV on a GPU needs a transport that reaches it; who chooses for it knows that."""

from dataclasses import replace

import pytest

from services.config import ConfigError, load
from services.resolve import Machine, ModelFacts, resolve, resolve_shared, resolve_worker

GIB = 2**30
MODEL = ModelFacts("tiny", max_model_len=8192, num_layers=4, num_kv_heads=2, head_dim=64)
GPU = Machine(cores=64, memory_bytes=512 * GIB, cuda=True, cuda_bytes=80 * GIB)
GPU_NODE = replace(GPU, one_host=False)
CPU_NODE = Machine(cores=4, memory_bytes=16 * GIB, one_host=False)


def test_on_a_cluster_auto_is_nixl_for_gpus_and_tcp_for_host_memory() -> None:
    on_gpus = load(None, {"device": "cuda"})  # said, as the builder may have none
    assert resolve_shared(on_gpus, CPU_NODE, MODEL).decode.transport == "nixl"
    assert resolve_shared(load(), GPU_NODE, MODEL).decode.transport == "nixl"
    assert resolve_shared(load(), CPU_NODE, MODEL).decode.transport == "tcp"
    on_cpus = load(None, {"device": "cpu"})
    assert resolve_shared(on_cpus, GPU_NODE, MODEL).decode.transport == "tcp"


def test_tcp_for_a_gpu_is_refused_before_a_model_is_loaded() -> None:
    config = load(None, {"transport": "tcp"})
    with pytest.raises(ConfigError, match=r"prefill\.transport: 'tcp' moves what is in host mem"):
        resolve(config, GPU, MODEL)
    shared = resolve_shared(config, CPU_NODE, MODEL)
    with pytest.raises(ConfigError, match=r"decode\.transport: 'tcp'"):
        resolve_worker("decode", shared, GPU_NODE, MODEL)
    assert resolve_worker("decode", shared, CPU_NODE, MODEL).decode.engine.device == "cpu"
    assert resolve(load(None, {"transport": "tcp", "device": "cpu"}), GPU, MODEL)
