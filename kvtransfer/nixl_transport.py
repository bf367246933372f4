"""Blocks by NIXL: one-sided READs over RDMA, shared memory or whatever UCX finds between workers.

The only file that imports nixl. An agent is named by worker id and epoch, so a restarted worker is
another agent. Both pools are described once, as lists of blocks; a read then names blocks by their
index, and NIXL joins neighbours.

**A read is settled only by DONE, by a disconnected remote, or by the end of our agent.** After any
other error bytes may still land: such a read is logged and never reported, so its blocks stay in
quarantine until :meth:`NixlTransport.close`. NIXL has no way to end a read early.

Knows no tickets, and never moves blocks by other means: what does not work is a TransportError.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from kvtransfer.errors import PeerGone, TransportError
from kvtransfer.region import Region
from kvtransfer.ticket import AgentCard
from kvtransfer.transport import Completion, Part, Status, check_blocks, check_peer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Peer:
    agent: str  # its name in NIXL
    sides: dict[Part, Any]  # prepared lists of its blocks


@dataclass
class _Read:
    peer: tuple[str, int]
    part: Part
    handle: Any
    broken: bool = False  # it failed in a way that settles nothing


class NixlTransport:
    """A NIXL agent with the UCX backend, for one incarnation of a worker."""

    name = "nixl"

    def __init__(self, worker_id: str, epoch: int, net_devices: str = "lo") -> None:
        """``net_devices``: the network devices for UCX ("mlx5_0:1,mlx5_1:1", "eth0", "all").

        The default is for workers of one host, which then meet over shared memory: UCX would
        otherwise listen on every interface. Shared memory needs no device.
        """
        self._agent_name = f"{worker_id}-{epoch:016x}"
        # UCX takes its settings from the environment, when its library opens the devices.
        os.environ["UCX_NET_DEVICES"] = net_devices
        self._net_devices = net_devices
        self._nixl, self._agent = self._create_agent()
        self._region: Region | None = None
        self._registered: Any = None
        self._sides: dict[Part, Any] = {}
        self._peers: dict[tuple[str, int], _Peer] = {}
        self._gone: set[tuple[str, int]] = set()
        self._reads: dict[int, _Read] = {}
        self._ended: list[Completion] = []
        self._next_handle = 0

    def _create_agent(self) -> tuple[Any, Any]:
        try:
            from nixl import _api, _bindings
        except ImportError as error:
            raise TransportError(
                f"nixl cannot be imported ({error}): install the package nixl, which exists for "
                "Linux, or choose the tcp transport"
            ) from error
        try:
            agent = _api.nixl_agent(self._agent_name, _api.nixl_agent_config(backends=["UCX"]))
        except Exception as error:  # the bindings' errors have no base class of their own
            raise self._failure("create an agent", error) from error
        if "UCX" not in agent.backends:
            raise TransportError("this build of nixl has no UCX backend: reinstall the package")
        return _bindings, agent

    def register(self, region: Region) -> bytes:
        """Give NIXL the pool; the metadata is that of the agent, and where the blocks lie."""
        memory = "DRAM" if region.spans.device.type == "cpu" else "VRAM"
        device = max(region.spans.get_device(), 0)
        tensors = (region.spans, region.seals, region.staging)
        areas = [(t.data_ptr(), t.numel() * t.element_size(), device, "") for t in tensors]
        spans, seals, staging = (
            (address, num_bytes // region.num_blocks, device) for address, num_bytes, *_ in areas
        )
        try:
            self._registered = self._agent.register_memory(areas, memory)
            for part, rows in ((Part.KV, spans), (Part.SEALS, staging)):
                self._sides[part] = self._prepare("", rows, region.num_blocks, memory)
            fields = {
                "agent": self._agent.get_agent_metadata(),
                "memory": memory,
                "kv": spans,
                "seals": seals,
            }
        except Exception as error:
            raise self._failure(f"register {region.num_blocks} blocks", error) from error
        self._region = region
        metadata: bytes = msgpack.packb(fields)
        return metadata

    def connect(self, peer: AgentCard) -> None:
        """Load the peer's agent and prepare the list of its blocks."""
        key = (peer.worker_id, peer.epoch)
        if key in self._gone:
            raise PeerGone(f"{peer.worker_id} disconnected in this incarnation")
        if key in self._peers:
            return
        if self._region is None:
            raise TransportError("the nixl transport is closed, or has no pool registered")
        check_peer(self.name, self._region, peer)
        try:
            fields = msgpack.unpackb(peer.metadata)
            rows = {part: tuple(map(int, fields[part.value])) for part in Part}
            memory, metadata = str(fields["memory"]), bytes(fields["agent"])
        except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
            raise TransportError(f"the nixl card of {peer.worker_id} is malformed") from error
        try:
            loaded = self._agent.add_remote_agent(metadata)
            agent = loaded.decode() if isinstance(loaded, bytes) else str(loaded)
            sides = {
                part: self._prepare(agent, rows[part], peer.num_blocks, memory) for part in Part
            }
        except Exception as error:
            raise self._failure(f"reach {peer.worker_id}", error) from error
        self._peers[key] = _Peer(agent, sides)

    def pull(self, peer: AgentCard, part: Part, blocks: Sequence[tuple[int, int]]) -> int:
        """Post a READ. Over shared memory the copy runs in here."""
        key = (peer.worker_id, peer.epoch)
        if key in self._gone:
            raise PeerGone(f"{peer.worker_id} disconnected in this incarnation")
        known = self._peers.get(key)
        if known is None or self._region is None:
            raise TransportError(f"{peer.worker_id} is not connected over nixl")
        check_blocks(blocks, peer.num_blocks, self._region.num_blocks)
        remote, local = np.array(blocks, dtype=np.int32).T.copy()
        try:
            handle = self._agent.make_prepped_xfer(
                "READ", self._sides[part], local, known.sides[part], remote
            )
        except Exception as error:
            raise self._failure(f"prepare a read from {peer.worker_id}", error) from error
        self._next_handle += 1
        self._reads[self._next_handle] = _Read(key, part, handle)
        self._follow(self._next_handle, self._agent.transfer)
        return self._next_handle

    def poll(self) -> list[Completion]:
        """Ask NIXL for the state of each read."""
        for number in [n for n, read in self._reads.items() if not read.broken]:
            self._follow(number, self._agent.check_xfer_state)
        ended, self._ended = self._ended, []
        return ended

    def abandon(self, handle: int) -> None:
        """Nothing: releasing a handle does not keep its bytes from landing."""

    def forget(self, peer: AgentCard) -> None:
        """Remove the peer's agent."""
        key = (peer.worker_id, peer.epoch)
        if any(read.peer == key for read in self._reads.values()):
            raise TransportError(f"{peer.worker_id} has reads in flight")
        known = self._peers.pop(key, None)
        if known is None:
            return
        for side in known.sides.values():
            _quietly("release a peer's blocks", side.release)
        _quietly("remove a peer", lambda: self._agent.remove_remote_agent(known.agent))

    def close(self) -> None:
        """Destroy the agent: nothing lands, and nothing can be read, after this."""
        if self._agent is None:
            return
        for read in self._reads.values():
            _release(read.handle)
        self._reads.clear()
        for peer in self._peers.values():
            for side in peer.sides.values():
                _release(side)
        for side in self._sides.values():
            _release(side)
        self._peers.clear()
        self._sides.clear()
        if self._registered is not None:
            _quietly("deregister", lambda: self._agent.deregister_memory(self._registered))
        self._registered = self._region = self._agent = None
        gc.collect()  # the agent ends with its last reference

    def _prepare(self, agent: str, rows: tuple[int, ...], num_blocks: int, memory: str) -> Any:
        """A prepared list of ``num_blocks`` neighbours; ``rows``: first address, bytes, device."""
        address, num_bytes, device = rows
        # As (address, length, device) rows: NIXL's own serialised lists are pickles.
        descriptors = np.empty((num_blocks, 3), dtype=np.uint64)
        descriptors[:, 0] = address + num_bytes * np.arange(num_blocks, dtype=np.uint64)
        descriptors[:, 1] = num_bytes
        descriptors[:, 2] = device
        return self._agent.prep_xfer_dlist(agent, descriptors, memory)

    def _follow(self, number: int, ask: Callable[[Any], str]) -> None:
        """Post a read or ask for its state, and end it when that settles it."""
        read = self._reads[number]
        try:
            state = ask(read.handle)
        except self._nixl.nixlRemoteDisconnectError:
            self._gone.add(read.peer)
            self._end(number, Status.FAILED, f"{read.peer[0]} disconnected during a nixl read")
            return
        except Exception as error:  # not settled, see above
            state = f"{type(error).__name__}: {error}"
        if state == "DONE":
            self._end(number, Status.DONE, "")
        elif state != "PROC":
            read.broken = True
            logger.error("a nixl read from %s fails, but is not over: %s", read.peer[0], state)

    def _end(self, number: int, status: Status, reason: str) -> None:
        read = self._reads.pop(number)
        _release(read.handle)
        self._ended.append(Completion(number, status, reason))

    def _failure(self, what: str, error: Exception) -> TransportError:
        return TransportError(
            f"nixl could not {what} ({type(error).__name__}: {error}); the agent is "
            f"{self._agent_name}, the network devices are {self._net_devices!r}: check that they "
            "exist on both hosts (ucx_info -d), or choose the tcp transport"
        )


def _release(handle: Any) -> None:
    """Free a handle for good: its finalizer must not try again."""
    _quietly("release a handle", handle.release)
    handle._released = True


def _quietly(what: str, act: Callable[[], object]) -> None:
    """On the way out an error changes nothing any more."""
    try:
        act()
    except Exception as error:
        logger.warning("nixl could not %s: %s: %s", what, type(error).__name__, error)
