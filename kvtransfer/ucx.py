"""What UCX is told to use, and who says so (pure).

What a configuration names holds. Where it says ``auto``, the worker's environment decides, by UCX's
own variables, which reach UCX as they are. Where both are silent UCX chooses, but for one thing:
workers of one host meet on loopback, as UCX would listen on every interface.
"""

from collections.abc import Mapping
from dataclasses import dataclass

AUTO = "auto"
PREFIX = "UCX_"
TLS, NET_DEVICES = "UCX_TLS", "UCX_NET_DEVICES"
LOOPBACK = "lo"
ENVIRONMENT, BY_DEFAULT = "environment", "by default on one host"


@dataclass(frozen=True)
class UcxOptions:
    """What a configuration says of UCX."""

    tls: str = AUTO  # its ways to a peer: "tcp", "rc,cuda_copy"
    net_devices: str = AUTO  # "mlx5_0:1,mlx5_1:1", "eth0", "all"
    one_host: bool = True  # all peers are on this host


AUTOMATIC = UcxOptions()


@dataclass(frozen=True)
class Setting:
    """A variable as UCX sees it."""

    name: str
    value: str
    source: str  # for people: ENVIRONMENT, BY_DEFAULT, or which key of the configuration

    def __str__(self) -> str:
        return f"{self.name}={self.value} ({self.source})"


def settle(options: UcxOptions, environment: Mapping[str, str]) -> dict[str, Setting]:
    """All variables that UCX will see, by name, those first that the configuration can set.

    An empty text, of a variable or of a key, says nothing.
    """
    found = {
        name: Setting(name, value, ENVIRONMENT)
        for name, value in sorted(environment.items())
        if name.startswith(PREFIX) and value
    }
    chosen: dict[str, Setting] = {}
    for name, key, value in (
        (TLS, "ucx_tls", options.tls),
        (NET_DEVICES, "net_devices", options.net_devices),
    ):
        if value not in (AUTO, ""):
            chosen[name] = Setting(name, value, f"configuration, {key}")
        elif name in found:
            chosen[name] = found[name]
    if options.one_host:
        chosen.setdefault(NET_DEVICES, Setting(NET_DEVICES, LOOPBACK, BY_DEFAULT))
    return chosen | {name: setting for name, setting in found.items() if name not in chosen}


def described(settings: Mapping[str, Setting]) -> str:
    """In one line for a log; of what a configuration could set also that nobody has."""
    own = [f"{name} not set (UCX chooses)" for name in (TLS, NET_DEVICES) if name not in settings]
    return ", ".join([*map(str, settings.values()), *own])
