"""Opens a transport by its name, and imports only that one."""

from kvtransfer.errors import TransportError
from kvtransfer.faults import Faults
from kvtransfer.transport import Transport

NAMES = ("memory", "tcp", "nixl", "nccl")


def open_transport(
    name: str,
    worker_id: str,
    epoch: int,
    host: str = "127.0.0.1",
    net_devices: str = "lo",
    ucx_tls: str = "auto",
    build: int = 0,
    faults: Faults | None = None,
) -> Transport:
    """The transport ``name`` for one incarnation of a worker.

    ``host`` is where peers reach this host (tcp, nccl); ``net_devices`` are the network devices
    that NIXL may use, as UCX names them: "lo" for workers of one host; ``ucx_tls`` are its ways to
    a peer. ``build`` counts those that this incarnation had before. With ``faults`` its reads go
    wrong as they say. One that cannot be opened is an error; another is never taken instead.
    """
    transport = _open(name, worker_id, epoch, host, net_devices, ucx_tls, build)
    if faults is None:
        return transport
    from kvtransfer.fault_transport import FaultTransport

    return FaultTransport(transport, faults)


def _open(
    name: str,
    worker_id: str,
    epoch: int,
    host: str,
    net_devices: str,
    ucx_tls: str,
    build: int,
) -> Transport:
    if name == "memory":
        from kvtransfer.memory_transport import MemoryTransport

        return MemoryTransport()
    if name == "tcp":
        from kvtransfer.tcp_transport import TcpTransport

        return TcpTransport(host)
    if name == "nixl":
        from kvtransfer.nixl_transport import NixlTransport

        return NixlTransport(worker_id, epoch, net_devices, ucx_tls, build)
    if name == "nccl":
        from kvtransfer.nccl_transport import NcclTransport

        return NcclTransport(host)
    raise TransportError(f"unknown transport {name!r}: known are {', '.join(NAMES)}")
