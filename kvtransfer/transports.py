"""Opens a transport by its name, and imports only that one."""

from kvtransfer.errors import TransportError
from kvtransfer.faults import Faults
from kvtransfer.transport import Transport
from kvtransfer.ucx import AUTOMATIC, UcxOptions

NAMES = ("memory", "tcp", "nixl", "nccl")


def open_transport(
    name: str,
    worker_id: str,
    epoch: int,
    host: str = "127.0.0.1",
    ucx: UcxOptions = AUTOMATIC,
    build: int = 0,
    faults: Faults | None = None,
) -> Transport:
    """The transport ``name`` for one incarnation of a worker.

    ``host`` is where peers reach this host (tcp, nccl); ``ucx`` is what UCX is told (nixl).
    ``build`` counts those that this incarnation had before. With ``faults`` its reads go wrong as
    they say. One that cannot be opened is an error; another is never taken instead.
    """
    transport = _open(name, worker_id, epoch, host, ucx, build)
    if faults is None:
        return transport
    from kvtransfer.fault_transport import FaultTransport

    return FaultTransport(transport, faults)


def _open(
    name: str, worker_id: str, epoch: int, host: str, ucx: UcxOptions, build: int
) -> Transport:
    if name == "memory":
        from kvtransfer.memory_transport import MemoryTransport

        return MemoryTransport()
    if name == "tcp":
        from kvtransfer.tcp_transport import TcpTransport

        return TcpTransport(host)
    if name == "nixl":
        from kvtransfer.nixl_transport import NixlTransport

        return NixlTransport(worker_id, epoch, ucx, build)
    if name == "nccl":
        from kvtransfer.nccl_transport import NcclTransport

        return NcclTransport(host)
    raise TransportError(f"unknown transport {name!r}: known are {', '.join(NAMES)}")
