"""What fits a machine and a model: replaces every ``auto`` and ``0`` of a configuration (pure).

What cannot work is refused by a :class:`~services.config.ConfigError` before any process starts.
Two things are left to the worker: a ``token_budget`` of 0 is measured when its model is there, and
what UCX is told depends on its environment (:mod:`kvtransfer.ucx`). What a machine has is told by
:mod:`services.machine`.
"""

from dataclasses import dataclass, replace
from typing import Any

from kvtransfer.layout import KVLayout
from router.tracing import MISSING
from services.config import ROLES, AppConfig, ConfigError, WorkerConfig
from services.engine.config import EngineConfig

MIN_POOL_BLOCKS = 1024  # of a pool whose size was not asked for


@dataclass(frozen=True)
class Machine:
    """What the workers of one host share."""

    cores: int
    memory_bytes: int
    cuda: bool = False
    cuda_bytes: int = 0  # of one device; 0: unknown
    linux: bool = True
    one_host: bool = True  # all workers are here
    one_process: bool = False  # they are even in this process
    tracing: bool = True  # the packages of the extra are installed


@dataclass(frozen=True)
class ModelFacts:
    """What the size of the KV pool depends on."""

    name: str
    max_model_len: int  # what the model was trained for
    num_layers: int
    num_kv_heads: int
    head_dim: int

    def block_bytes(self, engine: EngineConfig) -> int:
        """Bytes of one block in the pool; ``dtype`` must be resolved."""
        return KVLayout(
            "",
            self.num_layers,
            self.num_kv_heads,
            self.head_dim,
            "",
            engine.block_size,
            engine.dtype,
        ).span_bytes


def resolve(config: AppConfig, machine: Machine, model: ModelFacts) -> AppConfig:
    """A copy without ``auto`` and ``0``, checked against the machine and the model (pure)."""
    if machine.one_host:
        _check_metrics_ports(config)
    resolved = resolve_shared(config, machine, model)
    for role, _ in config.pools():
        resolved = resolve_worker(role, resolved, machine, model)
    if config.most("prefill"):
        _check_form(resolved.prefill, resolved.decode)
    _check_memory(resolved, machine, model)
    return resolved


def resolve_shared(config: AppConfig, machine: Machine, model: ModelFacts) -> AppConfig:
    """What all hosts of a deployment must agree on; ``machine`` is any of them (pure).

    The builder of a cluster's application may have no CUDA device, and another size than the hosts
    of the workers. What depends on these is found where each worker runs: :func:`resolve_worker`.
    """
    p, d, m = (config.most(role) for role in ROLES)
    if bool(p) != bool(d) or not p + m:
        raise ConfigError(
            f"prefill {p}, decode {d}, mixed {m}: needs at least one prefill and one decode worker,"
            " or none of both and a mixed one"
        )
    if config.tracing_endpoint and not machine.tracing:
        raise ConfigError(f"tracing_endpoint: {config.tracing_endpoint!r}: {MISSING}")
    pools: dict[str, Any] = {}
    for role, pool in config.pools():
        engine = replace(pool.engine, max_model_len=_resolve_length(role, pool.engine, model))
        if engine.device != "auto":
            engine = replace(engine, dtype=_resolve_dtype(engine.dtype, engine.device))
        pools[role] = replace(
            pool,
            transport=_resolve_transport(role, pool.transport, machine, engine.device),
            engine=engine,
        )
    resolved = replace(config, served_model_name=config.served_model_name or model.name, **pools)
    if p:
        _check_form(resolved.prefill, resolved.decode)
    return resolved


def resolve_worker(role: str, config: AppConfig, machine: Machine, model: ModelFacts) -> AppConfig:
    """A shared configuration, and one role's engine as it fits the worker's own machine (pure)."""
    pool: WorkerConfig = getattr(config, role)
    engine = _resolve_engine(role, pool.engine, config.sharers, machine, model)
    if engine.device == "cuda" and pool.transport == "tcp":
        raise ConfigError(
            f"{role}.transport: 'tcp' moves what is in host memory, but KV is on the GPU here; use"
            " nixl, which takes TCP where there is no RDMA"
        )
    changes: dict[str, Any] = {role: replace(pool, engine=engine)}
    return replace(config, **changes)


def _check_metrics_ports(config: AppConfig) -> None:
    """The API's port must not be one that a process of this host would take for its metrics."""
    first, num = config.metrics_port, config.num_workers + config.routers
    if first and first <= config.port < first + num:
        raise ConfigError(
            f"metrics_port: {num} processes take ports from {first} on, and {config.port} (port) is"
            f" among them; use one above {config.port}, or at most {config.port - num}"
        )


def _resolve_length(role: str, engine: EngineConfig, model: ModelFacts) -> int:
    length = engine.max_model_len or model.max_model_len
    if length > model.max_model_len:
        raise ConfigError(
            f"{role}.max_model_len: {length} is more than the {model.max_model_len} tokens that"
            f" {model.name} was trained for"
        )
    return length


def _resolve_dtype(dtype: str, device: str) -> str:
    # bf16 GEMM on a CPU without such instructions is hundreds of times slower than fp32
    return ("float32" if device == "cpu" else "bfloat16") if dtype == "auto" else dtype


def _resolve_engine(
    role: str, engine: EngineConfig, sharers: int, machine: Machine, model: ModelFacts
) -> EngineConfig:
    device = engine.device if engine.device != "auto" else ("cuda" if machine.cuda else "cpu")
    if device == "cuda" and not machine.cuda:
        raise ConfigError(f"{role}.device: 'cuda', but there is no CUDA device or torch is for CPU")
    dtype = _resolve_dtype(engine.dtype, device)
    _check_weights_dtype(role, engine.weights_dtype, dtype, device)
    engine = replace(
        engine,
        device=device,
        dtype=dtype,
        weights_dtype="auto" if engine.weights_dtype == dtype else engine.weights_dtype,
        threads=engine.threads or max(1, machine.cores // sharers),
    )
    if engine.token_budget:
        engine = with_chunk_budget(role, engine)
    return replace(engine, kv_blocks=_pool_blocks(role, engine, sharers, machine, model))


def _check_weights_dtype(role: str, weights_dtype: str, dtype: str, device: str) -> None:
    if weights_dtype == "int8" and (device, dtype) != ("cpu", "float32"):
        raise ConfigError(
            f"{role}.weights_dtype: 'int8' works on a CPU with dtype float32, not on {device} with"
            f" {dtype}"
        )
    if weights_dtype == "float32" != dtype:
        raise ConfigError(
            f"{role}.weights_dtype: 'float32' differs from dtype {dtype!r}; set dtype instead"
        )


def with_chunk_budget(role: str, engine: EngineConfig) -> EngineConfig:
    """The prompt tokens of a step, unless they were asked for; ``token_budget`` must be known.

    A decode worker computes prompts only when a prefill worker is missing. A quarter of each step
    for them keeps those going that are being decoded.
    """
    if engine.chunk_budget > engine.token_budget:
        raise ConfigError(
            f"{role}.chunk_budget: {engine.chunk_budget} is more than the {engine.token_budget}"
            " tokens of a step (token_budget)"
        )
    whole = engine.token_budget
    part = min(whole, max(whole // 4, engine.block_size)) if role == "decode" else whole
    return replace(engine, chunk_budget=engine.chunk_budget or part)


def _resolve_transport(role: str, transport: str, machine: Machine, device: str) -> str:
    if transport == "memory" and not machine.one_process:
        raise ConfigError(
            f"{role}.transport: 'memory' works inside one process only (baton local);"
            " allowed here are nixl, tcp and nccl"
        )
    if transport != "auto":
        return transport
    if machine.one_process:
        return "memory"
    on_gpu = device == "cuda" or (device == "auto" and machine.cuda)
    return "nixl" if machine.linux and (machine.one_host or on_gpu) else "tcp"


def _pool_blocks(
    role: str, engine: EngineConfig, num_workers: int, machine: Machine, model: ModelFacts
) -> int:
    """Blocks of the pool: what was asked for, or what fits four longest requests and, for short
    ones, ``MIN_POOL_BLOCKS``; less where memory is short.
    """
    longest = -(-engine.max_model_len // engine.block_size)
    needed = longest + 1  # block 0 is reserved for padding
    blocks, limit = engine.kv_blocks, "was asked for"
    if not blocks:
        share = machine.memory_bytes // max(10, 2 * num_workers)
        if engine.device == "cuda":
            share = machine.cuda_bytes // 2 or share
        blocks = min(max(4 * longest, MIN_POOL_BLOCKS) + 1, share // model.block_bytes(engine))
        limit = f"is what {share / 2**30:.1f} GiB hold"
    if blocks < needed:
        raise ConfigError(
            f"{role}.kv_blocks: one request of {engine.max_model_len} tokens (max_model_len) needs"
            f" {needed} blocks of {engine.block_size} tokens, more than the pool's {blocks}, which"
            f" {limit}; raise kv_blocks to {needed} or lower max_model_len to"
            f" {max(0, blocks - 1) * engine.block_size}"
        )
    return blocks


def _check_form(prefill: WorkerConfig, decode: WorkerConfig) -> None:
    """Blocks must look alike on both sides, and travel over the same transport."""
    for name, p, d in [
        ("block_size", prefill.engine.block_size, decode.engine.block_size),
        ("dtype", prefill.engine.dtype, decode.engine.dtype),
        ("weights_dtype", prefill.engine.weights_dtype, decode.engine.weights_dtype),
        ("transport", prefill.transport, decode.transport),
    ]:
        if p != d:
            raise ConfigError(
                f"prefill.{name}: {p!r} differs from decode.{name}: {d!r}; KV moves between these"
                " workers, so both must be equal"
            )


def _check_memory(config: AppConfig, machine: Machine, model: ModelFacts) -> None:
    """The KV pools in main memory together must leave room for weights and the rest."""
    total = sum(
        config.most(role) * pool.engine.kv_blocks * model.block_bytes(pool.engine)
        for role, pool in config.pools()
        if pool.engine.device == "cpu"
    )
    total = total * config.num_workers // sum(config.most(role) for role in ROLES)
    if machine.one_host and total > 0.8 * machine.memory_bytes:
        pools = ", ".join(
            f"{role} {config.most(role)} x {pool.engine.kv_blocks} blocks"
            for role, pool in config.pools()
        )
        raise ConfigError(
            f"the KV pools ({pools}) take {total / 2**30:.1f} GiB of this machine's"
            f" {machine.memory_bytes / 2**30:.1f} GiB; at most 80% may; lower kv_blocks or replicas"
        )
