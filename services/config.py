"""What a deployment is made of: frozen dataclasses, composed; YAML keys and flags come from fields.

``load`` turns a YAML file and flags into an :class:`AppConfig`, or raises :class:`ConfigError` that
names the key, the value and what is allowed. ``resolve`` replaces every ``auto`` and ``0`` by what
fits a machine and a model, and refuses what cannot work. Knows neither ray nor torch: ``baton
--help`` must answer at once. What a machine has is told by :mod:`services.machine`.
"""

import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from kvtransfer.layout import DTYPE_BYTES, KVLayout
from router.config import RouterConfig
from services.engine.config import EngineConfig
from services.fetch import DEFAULT_MODEL

ROLES = ("prefill", "decode", "mixed")
TRANSPORTS = ("auto", "nixl", "tcp", "memory")
MIN_POOL_BLOCKS = 1024  # of a pool whose size was not asked for


class ConfigError(ValueError):
    """The configuration cannot work; the message says which key, which value, and what would."""


@dataclass(frozen=True)
class WorkerConfig:
    """One pool of equal workers. Its YAML block also holds the keys of :class:`EngineConfig`."""

    replicas: int = 0
    transport: str = "auto"  # how KV moves; auto: nixl on one Linux host, else tcp
    lease_s: float = 30.0  # how long a prefill worker keeps KV that nobody pulled or renewed
    net_devices: str = (
        "auto"  # network devices for NIXL; auto: loopback on one host, else UCX's own
    )
    ucx_tls: str = "auto"  # UCX transports for NIXL (tcp, rc, cuda_ipc ...); auto: UCX chooses
    checksums: bool = False  # check every pulled block's bytes, not only its seal
    pull_stall_s: float = 5.0  # a pull that moves nothing for so long has failed
    stall_s: float = 20.0  # an engine that has work and makes no step for so long is replaced
    drain_s: float = 30.0  # a worker that leaves hands its requests back after so long
    local_prefill: bool = False  # decode: compute new prompts here when no prefill worker is left
    pull_faults: str = (
        ""  # for tests: faults to inject into transfers, "drop=0.01,delay=0.1,seed=7"
    )
    engine: EngineConfig = field(default_factory=EngineConfig)


@dataclass(frozen=True)
class AppConfig:
    """A whole deployment."""

    model: str = DEFAULT_MODEL  # alias, folder as Hugging Face lays it out, or GGUF file
    served_model_name: str = ""  # name in the API; empty: the model's own
    host: str = "127.0.0.1"
    port: int = 8000
    routers: int = 1  # router processes behind the ingress
    secret_file: str = ""  # shared by routers and workers, 16 bytes or more; empty: random
    router: RouterConfig = field(default_factory=RouterConfig)
    prefill: WorkerConfig = field(default_factory=lambda: WorkerConfig(replicas=1))
    decode: WorkerConfig = field(default_factory=lambda: WorkerConfig(replicas=1))
    mixed: WorkerConfig = field(default_factory=WorkerConfig)

    def pools(self) -> Iterator[tuple[str, WorkerConfig]]:
        """The roles that have workers."""
        for role in ROLES:
            if getattr(self, role).replicas:
                yield role, getattr(self, role)

    @property
    def num_workers(self) -> int:
        """Workers of all roles."""
        return sum(pool.replicas for _, pool in self.pools())


# --- limits ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limit:
    """What a value may be, beyond its type."""

    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()


LIMITS = {
    "port": Limit(1, 65535),
    "replicas": Limit(0, 512),
    "transport": Limit(choices=TRANSPORTS),
    "routers": Limit(1, 64),
    "lease_s": Limit(1, 3600),
    "pull_stall_s": Limit(0.1, 3600),
    "stall_s": Limit(1, 3600),
    "drain_s": Limit(0, 3600),
    "chunk_budget": Limit(0),
    "kv_blocks": Limit(0),
    "block_size": Limit(1, 1024),
    "max_model_len": Limit(0),
    "max_num_seqs": Limit(1, 4096),
    "token_budget": Limit(0),
    "threads": Limit(0, 1024),
    "dtype": Limit(choices=("auto", *DTYPE_BYTES)),
    "device": Limit(choices=("auto", "cpu", "cuda")),
}


def parse_value(name: str, kind: Any, value: Any, path: str) -> Any:
    """``value``, given as YAML or as a flag's text, checked for a field of type ``kind``."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        kinds = [k for k in typing.get_args(kind) if k is not type(None)]
        return None if value is None else parse_value(name, kinds[0], value, path)
    if origin is tuple:
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, list):
            raise ConfigError(f"{path}: {value!r} is not a list")
        item_kind = typing.get_args(kind)[0]
        return tuple(parse_value(name, item_kind, x, f"{path}[{i}]") for i, x in enumerate(items))
    return _check_limit(name, _scalar(kind, value, path), path)


def _scalar(kind: type, value: Any, path: str) -> Any:
    if kind is bool:
        if not isinstance(value, bool):
            raise ConfigError(f"{path}: {value!r} is neither true nor false")
        return value
    words = {int: "a whole number", float: "a number", str: "a text"}
    right = isinstance(value, (int, float) if kind is float else kind)
    if isinstance(value, bool) or not (right or (isinstance(value, str) and kind is not str)):
        raise ConfigError(f"{path}: {value!r} is not {words[kind]}")
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(f"{path}: {value!r} is not {words[kind]}") from None


def _check_limit(name: str, value: Any, path: str) -> Any:
    limit = LIMITS.get(name, Limit())
    if limit.choices and value not in limit.choices:
        allowed = ", ".join(limit.choices)
        raise ConfigError(
            f"{path}: {value!r} is not one of {allowed}{_nearest(value, limit.choices)}"
        )
    # written so that NaN is refused as well
    above = limit.low is None or value >= limit.low
    if not (above and (limit.high is None or value <= limit.high)):
        span = (
            f"at least {limit.low}" if limit.high is None else f"from {limit.low} to {limit.high}"
        )
        raise ConfigError(f"{path}: {value!r} is out of range, allowed is {span}")
    return value


def _nearest(word: Any, words: typing.Iterable[str]) -> str:
    close = difflib.get_close_matches(str(word), list(words), 1)
    return f" (did you mean {close[0]}?)" if close else ""


# --- YAML and flags ----------------------------------------------------------------------------


def keys(cls: type) -> dict[str, Any]:
    """YAML keys of a block and their types; an inner ``engine``'s fields belong to the block."""
    hints = typing.get_type_hints(cls)
    inner = keys(hints["engine"]) if "engine" in hints else {}
    return {name: kind for name, kind in hints.items() if name != "engine"} | inner


def with_values(config: Any, values: Mapping[str, Any]) -> Any:
    """A copy of a block with some of its keys set, those of an inner ``engine`` there."""
    own = {f.name for f in fields(config)}
    changes = {name: value for name, value in values.items() if name in own}
    rest = {name: value for name, value in values.items() if name not in own}
    if rest:
        changes["engine"] = replace(config.engine, **rest)
    try:
        return replace(config, **changes)
    except ValueError as error:  # a dataclass that checks its own values
        raise ConfigError(str(error)) from error


def from_mapping(raw: Any, base: Any, path: str = "") -> Any:
    """``base`` with the values of a YAML mapping; unknown keys and wrong types are refused."""
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{path or 'the top level'}: {raw!r} is not a mapping of keys")
    known, values = keys(type(base)), {}
    for name, value in raw.items():
        at = f"{path}.{name}" if path else str(name)
        if name not in known:
            raise ConfigError(f"{at}: unknown key{_nearest(name, known)}")
        if is_dataclass(known[name]):
            values[name] = from_mapping({} if value is None else value, getattr(base, name), at)
        else:
            values[name] = parse_value(name, known[name], value, at)
    return with_values(base, values)


def load(file: str | Path | None = None, flags: Mapping[str, Any] | None = None) -> AppConfig:
    """The configuration of a YAML file and of flags, of which flags win.

    ``flags`` are by field name. A field of :class:`WorkerConfig` is set for all roles; ``prefill``,
    ``decode`` and ``mixed`` are numbers of workers.
    """
    config = AppConfig() if file is None else from_yaml(_read_yaml(Path(file)))
    return apply_flags(config, flags or {})


def from_yaml(raw: Any) -> AppConfig:
    """The configuration of a YAML mapping.

    Keys of workers and of the router may stand at the top, as flags do: there they hold for all
    roles, and the blocks come after them. ``prefill: 2`` is short for ``prefill: {replicas: 2}``.
    """
    config = AppConfig()
    if not isinstance(raw, Mapping):
        return typing.cast("AppConfig", from_mapping(raw, config))
    flat = (keys(RouterConfig) | keys(WorkerConfig)).keys() - keys(AppConfig).keys() - {"replicas"}
    shared = {name: value for name, value in raw.items() if name in flat}
    rest = {name: value for name, value in raw.items() if name not in flat}
    for role in ROLES:
        if type(rest.get(role)) is int:
            rest[role] = {"replicas": rest[role]}
    return typing.cast("AppConfig", from_mapping(rest, apply_flags(config, shared, prefix="")))


def _read_yaml(file: Path) -> Any:
    try:
        raw = yaml.safe_load(file.read_text())
    except OSError as error:
        raise ConfigError(f"--config {file}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(f"--config {file} is not YAML: {text}") from error
    return {} if raw is None else raw


def apply_flags(config: AppConfig, flags: Mapping[str, Any], prefix: str = "--") -> AppConfig:
    """``config`` with flags set, see :func:`load`; ``prefix`` is for what errors call them."""
    top, router, worker = keys(AppConfig), keys(RouterConfig), keys(WorkerConfig)
    blocks: dict[str, dict[str, Any]] = {name: {} for name in ("router", *ROLES)}
    own = {}
    for name, value in flags.items():
        flag = prefix + name.replace("_", "-") if prefix else name
        if name in ROLES:
            blocks[name]["replicas"] = parse_value("replicas", int, value, flag)
        elif name in top:
            own[name] = parse_value(name, top[name], value, flag)
        elif name in router:
            blocks["router"][name] = parse_value(name, router[name], value, flag)
        else:
            for role in ROLES:
                blocks[role][name] = parse_value(name, worker[name], value, flag)
    inner = {name: with_values(getattr(config, name), values) for name, values in blocks.items()}
    return replace(config, **own, **inner)


# --- resolving ---------------------------------------------------------------------------------


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
    p, d, m = config.prefill.replicas, config.decode.replicas, config.mixed.replicas
    if bool(p) != bool(d) or not p + m:
        raise ConfigError(
            f"prefill {p}, decode {d}, mixed {m}: needs at least one prefill and one decode worker,"
            " or none of both and a mixed one"
        )
    changes: dict[str, Any] = {}
    for role, pool in config.pools():
        changes[role] = _resolve_pool(role, pool, config.num_workers, machine, model)
    resolved = replace(config, served_model_name=config.served_model_name or model.name, **changes)
    if p:
        _check_form(resolved.prefill, resolved.decode)
    _check_memory(resolved, machine, model)
    return resolved


def _resolve_pool(
    role: str, pool: WorkerConfig, num_workers: int, machine: Machine, model: ModelFacts
) -> WorkerConfig:
    engine = pool.engine
    device = engine.device if engine.device != "auto" else ("cuda" if machine.cuda else "cpu")
    if device == "cuda" and not machine.cuda:
        raise ConfigError(f"{role}.device: 'cuda', but there is no CUDA device or torch is for CPU")
    length = engine.max_model_len or model.max_model_len
    if length > model.max_model_len:
        raise ConfigError(
            f"{role}.max_model_len: {length} is more than the {model.max_model_len} tokens that"
            f" {model.name} was trained for"
        )
    on_cpu = device == "cpu"
    engine = replace(
        engine,
        device=device,
        # bf16 GEMM on a CPU without such instructions is hundreds of times slower than fp32
        dtype=("float32" if on_cpu else "bfloat16") if engine.dtype == "auto" else engine.dtype,
        max_model_len=length,
        token_budget=engine.token_budget or (256 if on_cpu else 8192),
        threads=engine.threads or max(1, machine.cores // num_workers),
    )
    engine = replace(engine, kv_blocks=_pool_blocks(role, engine, num_workers, machine, model))
    transport = _resolve_transport(role, pool.transport, machine)
    auto_devices = "lo" if machine.one_host else "all"
    devices = auto_devices if pool.net_devices == "auto" else pool.net_devices
    return replace(pool, transport=transport, net_devices=devices, engine=engine)


def _resolve_transport(role: str, transport: str, machine: Machine) -> str:
    if transport == "memory" and not machine.one_process:
        raise ConfigError(
            f"{role}.transport: 'memory' works inside one process only (baton local);"
            " allowed here are nixl and tcp"
        )
    if transport != "auto":
        return transport
    one_sided = "nixl" if machine.linux and machine.one_host else "tcp"
    return "memory" if machine.one_process else one_sided


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
        pool.replicas * pool.engine.kv_blocks * model.block_bytes(pool.engine)
        for _, pool in config.pools()
        if pool.engine.device == "cpu"
    )
    if machine.one_host and total > 0.8 * machine.memory_bytes:
        pools = ", ".join(
            f"{role} {pool.replicas} x {pool.engine.kv_blocks} blocks"
            for role, pool in config.pools()
        )
        raise ConfigError(
            f"the KV pools ({pools}) take {total / 2**30:.1f} GiB of this machine's"
            f" {machine.memory_bytes / 2**30:.1f} GiB; at most 80% may; lower kv_blocks or replicas"
        )
