"""What one router or worker process is told: a deployment's configuration, made concrete."""

import secrets
from dataclasses import dataclass, field
from pathlib import Path

from kvtransfer.ucx import UcxOptions
from router.config import RouterSettings
from services.config import AppConfig, WorkerConfig
from services.engine.config import EngineConfig
from services.machine import check_api_keys
from services.model_folder import weights_id


@dataclass(frozen=True)
class WorkerSettings:
    """All that one worker process is told; it can be pickled."""

    worker_id: str  # of one incarnation, never used again
    role: str
    model_dir: str
    served_model: str
    weights: str  # digest of the weights, part of the KV layout's identity
    host: str  # where the worker listens, and where its peers find it
    transport: str
    secret: bytes = field(repr=False)
    lease_s: float
    net_devices: str
    engine: EngineConfig
    checksums: bool = False
    ucx_tls: str = "auto"
    one_host: bool = True  # all workers are on this one
    pull_stall_s: float = 5.0
    stall_s: float = 20.0
    local_prefill: bool = False
    pull_faults: str = ""
    pace: str = ""
    metrics_host: str = ""  # where its metrics port listens; empty: on ``host``
    metrics_port: int = 0  # it, or the first free one after it; 0: any free one
    metrics_compat: str = ""  # whose names series have besides
    tracing_endpoint: str = ""
    profile: bool = False  # it says how long its steps take, to whoever decides on the pools

    @property
    def ucx(self) -> UcxOptions:
        """What UCX is told where KV moves by NIXL."""
        return UcxOptions(self.ucx_tls, self.net_devices, self.one_host)


def metrics_host(config: AppConfig, host: str, one_host: bool) -> str:
    """Where a process on ``host`` shows its metrics: who reaches the API of one host, and asks it
    where they are, must reach them as well.
    """
    return config.host if one_host else host


def worker_settings(
    role: str, config: AppConfig, folder: Path, host: str, secret: bytes, one_host: bool = True
) -> WorkerSettings:
    """Settings of a new worker on ``host``; ``config`` is resolved, the model is in ``folder``."""
    pool: WorkerConfig = getattr(config, role)
    return WorkerSettings(
        worker_id=f"{role}-{secrets.token_hex(4)}",
        role=role,
        model_dir=str(folder),
        served_model=config.served_model_name,
        weights=weights_id(folder),
        host=host,
        transport=pool.transport,
        secret=secret,
        lease_s=pool.lease_s,
        net_devices=pool.net_devices,
        engine=pool.engine,
        checksums=pool.checksums,
        ucx_tls=pool.ucx_tls,
        one_host=one_host,
        pull_stall_s=pool.pull_stall_s,
        stall_s=pool.stall_s,
        local_prefill=pool.local_prefill,
        pull_faults=pool.pull_faults,
        pace=pool.pace,
        metrics_host=metrics_host(config, host, one_host),
        metrics_port=config.metrics_port,
        metrics_compat=config.metrics_compat,
        tracing_endpoint=config.tracing_endpoint,
        profile=config.autoscaling.scales,
    )


def router_settings(
    config: AppConfig,
    folder: Path,
    secret: bytes,
    host: str = "127.0.0.1",
    one_host: bool = True,
) -> RouterSettings:
    """Settings of a new router on ``host``; ``config`` is resolved, the model is in ``folder``."""
    check_api_keys(config.router)
    return RouterSettings(
        config=config.router,
        model_dir=str(folder),
        served_model=config.served_model_name,
        router_id=f"router-{secrets.token_hex(4)}",
        replicas=tuple((role, pool.replicas) for role, pool in config.pools()),
        wakes=config.wakes,
        routers=config.routers,
        secret=secret,
        metrics_host=metrics_host(config, host, one_host),
        metrics_port=config.metrics_port,
        metrics_compat=config.metrics_compat,
        tracing_endpoint=config.tracing_endpoint,
        tracing_ratio=config.tracing_ratio,
    )
