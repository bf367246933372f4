"""What a deployment is made of: frozen dataclasses, composed; YAML keys and flags come from fields.

``load`` turns a YAML file and flags into an :class:`AppConfig`, or raises :class:`ConfigError` that
names the key, the value and what is allowed. Knows neither ray nor torch: ``baton --help`` must
answer at once. What ``auto`` and ``0`` become is decided by :mod:`services.resolve`.
"""

import difflib
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from kvtransfer.faults import parse_faults
from kvtransfer.layout import DTYPE_BYTES
from router.config import RouterConfig
from router.tracing import traces_url
from services.engine.config import EngineConfig
from services.engine.pace import parse_pace
from services.fetch import DEFAULT_MODEL
from services.planner.config import ScalingConfig, check_budget

ROLES = ("prefill", "decode", "mixed")
TRANSPORTS = ("auto", "nixl", "tcp", "nccl", "memory")


class ConfigError(ValueError):
    """The configuration cannot work; the message says which key, which value, and what would."""


@dataclass(frozen=True)
class WorkerConfig:
    """One pool of equal workers. Its YAML block also holds the keys of :class:`EngineConfig`."""

    replicas: int = 0
    transport: str = "auto"  # how KV moves; auto: nixl on one Linux host, else tcp
    lease_s: float = 30.0  # how long a prefill worker keeps KV that nobody pulled or renewed
    net_devices: str = "auto"  # of NIXL; auto: UCX_NET_DEVICES, else lo on one host, else all
    ucx_tls: str = "auto"  # transports of NIXL (tcp, rc, cuda_ipc ...); auto: UCX_TLS, else all
    checksums: bool = False  # check every pulled block's bytes, not only its seal
    pull_stall_s: float = 5.0  # a pull that moves nothing for so long has failed
    stall_s: float = 20.0  # an engine that has work and makes no step for so long is replaced
    drain_s: float = 30.0  # a worker that leaves hands its requests back after so long
    local_prefill: bool = False  # decode: compute new prompts here when no prefill worker is left
    pull_faults: str = (
        ""  # for tests: faults to inject into transfers, "drop=0.01,delay=0.1,seed=7"
    )
    pace: str = ""  # for trials: seconds a step takes, "step=0.02,prompt_token=0.001,seq=0.005"
    engine: EngineConfig = field(default_factory=EngineConfig)


@dataclass(frozen=True)
class AppConfig:
    """A whole deployment."""

    model: str = DEFAULT_MODEL  # alias, folder, GGUF file or hub id org/name[:file.gguf][@revision]
    served_model_name: str = ""  # name in the API; empty: the model's own
    host: str = "127.0.0.1"
    port: int = 8000
    routers: int = 1  # router processes behind the ingress
    secret_file: str = ""  # shared by routers and workers, 16 bytes or more; empty: random
    workers_per_host: int = 0  # on a cluster, for what share of a host each takes; 0: all of them
    metrics_port: int = 0  # each process takes the first free port from here on; 0: any free one
    metrics_compat: str = ""  # give series the names of another server as well: vllm
    tracing_endpoint: str = ""  # OTLP/HTTP receiver of traces, http://HOST:4318; empty: no tracing
    tracing_ratio: float = 1.0  # share of traced requests, of those whose client does not say
    router: RouterConfig = field(default_factory=RouterConfig)
    prefill: WorkerConfig = field(default_factory=lambda: WorkerConfig(replicas=1))
    decode: WorkerConfig = field(default_factory=lambda: WorkerConfig(replicas=1))
    mixed: WorkerConfig = field(default_factory=WorkerConfig)
    autoscaling: ScalingConfig = field(default_factory=ScalingConfig)

    def pools(self) -> Iterator[tuple[str, WorkerConfig]]:
        """The roles that have workers, or may have some."""
        for role in ROLES:
            if self.most(role):
                yield role, getattr(self, role)

    def most(self, role: str) -> int:
        """Workers that a role may have. Of pools that share a budget, not all at a time."""
        replicas: int = getattr(self, role).replicas
        scaling = getattr(self.autoscaling, role, None)
        return scaling.max if scaling is not None and scaling.scales else replicas

    @property
    def wakes(self) -> bool:
        """Whether there may be no worker on purpose, until somebody asks."""
        scaling = self.autoscaling
        return any(pool.scales and not pool.min for pool in (scaling.prefill, scaling.decode))

    @property
    def num_workers(self) -> int:
        """Workers of all roles, at most at a time."""
        scaling = self.autoscaling
        if not scaling.scales or not scaling.budget:
            return sum(self.most(role) for role in ROLES)
        cheapest = max(1, min(scaling.prefill.devices, scaling.decode.devices))
        pair = min(self.most("prefill") + self.most("decode"), scaling.budget // cheapest)
        return pair + self.mixed.replicas

    @property
    def sharers(self) -> int:
        """Workers that share the cores and the memory of one host."""
        return self.workers_per_host or self.num_workers


# --- limits ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limit:
    """What a value may be, beyond its type."""

    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    syntax: Callable[[str], object] | None = None  # raises ValueError for a text that is none


def compat_names(text: str) -> str:
    """Check a ``metrics_compat``."""
    if text not in ("", "vllm"):
        raise ValueError("it can be vllm, or empty for our own names only")
    return text


LIMITS = {
    "port": Limit(1, 65535),
    "metrics_port": Limit(0, 65535),
    "metrics_compat": Limit(syntax=compat_names),
    "replicas": Limit(0, 512),
    "transport": Limit(choices=TRANSPORTS),
    "routers": Limit(1, 64),
    "workers_per_host": Limit(0, 512),
    "lease_s": Limit(1, 3600),
    "pull_stall_s": Limit(0.1, 3600),
    "tracing_endpoint": Limit(syntax=traces_url),
    "tracing_ratio": Limit(0, 1),
    "pull_faults": Limit(syntax=parse_faults),
    "link_faults": Limit(syntax=parse_faults),
    "pace": Limit(syntax=parse_pace),
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
    "weights_dtype": Limit(choices=("auto", "float32", "int8")),
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
    if limit.syntax is not None:
        try:
            limit.syntax(value)
        except ValueError as error:
            raise ConfigError(f"{path}: {value!r}: {error}") from None
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


def with_values(config: Any, values: Mapping[str, Any], path: str = "") -> Any:
    """A copy of a block with some of its keys set, those of an inner ``engine`` there."""
    own = {f.name for f in fields(config)}
    changes = {name: value for name, value in values.items() if name in own}
    rest = {name: value for name, value in values.items() if name not in own}
    if rest:
        changes["engine"] = replace(config.engine, **rest)
    try:
        return replace(config, **changes)
    except ValueError as error:  # a dataclass that checks its own values
        at = f"{path}." if path and not str(error).startswith(path) else ""
        raise ConfigError(f"{at}{error}") from error


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
    return with_values(base, values, path)


def load(file: str | Path | None = None, flags: Mapping[str, Any] | None = None) -> AppConfig:
    """The configuration of a YAML file and of flags, of which flags win.

    ``flags`` are by field name. A field of :class:`WorkerConfig` is set for all roles; ``prefill``,
    ``decode`` and ``mixed`` are numbers of workers.
    """
    config = AppConfig() if file is None else from_yaml(_read_yaml(Path(file)))
    return settled(apply_flags(config, flags or {}))


def from_yaml(raw: Any) -> AppConfig:
    """The configuration of a YAML mapping.

    Keys of workers and of the router may stand at the top, as flags do: there they hold for all
    roles, and the blocks come after them. ``prefill: 2`` is short for ``prefill: {replicas: 2}``,
    and ``prefill: 1..4`` for ``autoscaling: {prefill: {min: 1, max: 4}}``.
    """
    config = AppConfig()
    if not isinstance(raw, Mapping):
        return typing.cast("AppConfig", from_mapping(raw, config))
    flat = (keys(RouterConfig) | keys(WorkerConfig)).keys() - keys(AppConfig).keys() - {"replicas"}
    shared = {name: value for name, value in raw.items() if name in flat}
    rest = {name: value for name, value in raw.items() if name not in flat}
    ranges = {}
    for role in ROLES:
        if type(rest.get(role)) is int:
            rest[role] = {"replicas": rest[role]}
        elif isinstance(rest.get(role), str) and ".." in rest[role]:
            ranges[role] = rest.pop(role)
    config = apply_flags(config, shared | ranges, prefix="")
    return typing.cast("AppConfig", from_mapping(rest, config))


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
    own: dict[str, Any] = {}
    for name, value in flags.items():
        flag = prefix + name.replace("_", "-") if prefix else name
        if name in ROLES and isinstance(value, str) and ".." in value:
            scaling = own.get("autoscaling", config.autoscaling)
            own["autoscaling"] = _with_range(scaling, name, value, flag)
            blocks[name]["replicas"] = max(1, getattr(own["autoscaling"], name).min)
        elif name in ROLES:
            blocks[name]["replicas"] = parse_value("replicas", int, value, flag)
            if name != "mixed":  # a number on the command line is just that
                scaling = own.get("autoscaling", config.autoscaling)
                fixed = replace(getattr(scaling, name), min=0, max=0)
                own["autoscaling"] = replace(scaling, **{name: fixed})
        elif name in top:
            own[name] = parse_value(name, top[name], value, flag)
        elif name in router:
            blocks["router"][name] = parse_value(name, router[name], value, flag)
        else:
            for role in ROLES:
                blocks[role][name] = parse_value(name, worker[name], value, flag)
    inner = {name: with_values(getattr(config, name), values) for name, values in blocks.items()}
    return replace(config, **own, **inner)


def _with_range(scaling: ScalingConfig, role: str, text: str, path: str) -> ScalingConfig:
    """``1..4``: from one to four workers, as they are needed."""
    if role == "mixed":
        raise ConfigError(f"{path}: {text!r}: mixed workers do not scale; give their number")
    ends = re.fullmatch(r"(\d+)\.\.(\d+)", text.strip())
    if ends is None:
        raise ConfigError(f"{path}: {text!r} is neither a number nor a range like 1..4")
    low, high = (parse_value("replicas", int, end, path) for end in ends.groups())
    if not high or low > high:
        raise ConfigError(f"{path}: {text!r}: the range must end at 1 or above, and not fall")
    return replace(scaling, **{role: replace(getattr(scaling, role), min=low, max=high)})


def settled(config: AppConfig) -> AppConfig:
    """With objectives and first sizes of pools that scale; raises ConfigError for a budget that
    cannot hold the smallest ones.
    """
    scaling = config.autoscaling
    if not scaling.scales:
        return config
    slo = {"prefill": config.router.slo_ttft_s, "decode": config.router.slo_tpot_s}
    pools: dict[str, Any] = {
        role: replace(pool, objective_s=pool.objective_s or slo[role])
        for role, pool in (("prefill", scaling.prefill), ("decode", scaling.decode))
    }
    scaling = replace(scaling, **pools)
    try:
        check_budget(scaling, {role: getattr(config, role).replicas for role in pools})
    except ValueError as error:
        raise ConfigError(f"autoscaling.{error}") from None
    first = {
        role: min(max(getattr(config, role).replicas, pool.min), pool.max)
        for role, pool in pools.items()
        if pool.scales
    }
    cost = sum(
        pools[role].devices * (first.get(role, getattr(config, role).replicas)) for role in pools
    )
    if scaling.budget and cost > scaling.budget:
        first = {role: pools[role].min for role in first}
    changes: dict[str, Any] = {
        role: replace(getattr(config, role), replicas=count) for role, count in first.items()
    }
    return replace(config, autoscaling=scaling, **changes)
