"""Opens a transport by its name, and imports only that one."""

from kvtransfer.errors import TransportError
from kvtransfer.transport import Transport

NAMES = ("memory", "tcp", "nixl")


def open_transport(
    name: str,
    worker_id: str,
    epoch: int,
    host: str = "127.0.0.1",
    net_devices: str = "lo",
) -> Transport:
    """The transport ``name`` for one incarnation of a worker.

    ``host`` is where peers reach this host (tcp); ``net_devices`` are the network devices that NIXL
    may use, as UCX names them: "lo" for workers of one host. One that cannot be opened is an error;
    another is never taken instead.
    """
    if name == "memory":
        from kvtransfer.memory_transport import MemoryTransport

        return MemoryTransport()
    if name == "tcp":
        from kvtransfer.tcp_transport import TcpTransport

        return TcpTransport(host)
    if name == "nixl":
        from kvtransfer.nixl_transport import NixlTransport

        return NixlTransport(worker_id, epoch, net_devices)
    raise TransportError(f"unknown transport {name!r}: known are {', '.join(NAMES)}")
