"""Blocks by NIXL: one-sided READs over RDMA, shared memory or whatever UCX finds between workers.

An agent is named by worker id and epoch, so a restarted worker is another one. Both pools are
described once, as lists of blocks; a read then names blocks by their index, and NIXL joins
neighbours. Seals are read all at once (:mod:`kvtransfer.seal_windows`).

**A read is settled only by DONE, by a disconnected remote, or by the end of our agent.** After any
other error bytes may still land: such a read is logged and never reported, so its blocks stay in
quarantine until :meth:`NixlTransport.close`. NIXL has no way to end a read early.

Knows no tickets, and never moves blocks by other means: what does not work is a TransportError.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np

from kvtransfer.errors import PeerGone, TransportError
from kvtransfer.nixl_agent import Indices, NixlAgent
from kvtransfer.region import Region
from kvtransfer.seal_windows import NUM_WINDOWS, WINDOW_ROWS, SealWindows
from kvtransfer.ticket import AgentCard
from kvtransfer.transport import Completion, Part, Status, check_blocks, check_peer
from kvtransfer.ucx import AUTOMATIC, UcxOptions

logger = logging.getLogger(__name__)

# Bytes per post. Over shared memory a post copies, and nixl holds Python's lock meanwhile: in one
# piece a long prompt's KV would stop the engine's thread for 50 ms.
_POST_BYTES = 4 * 1024 * 1024

_MAX_GONE = 1024  # dead incarnations that are remembered until they are forgotten


@dataclass
class _Peer:
    agent: str  # its name in NIXL
    num_blocks: int
    sides: dict[Part, int]  # prepared lists of its blocks
    windows: tuple[int, int] | None  # prepared lists: windows here, and all its seals as one piece
    requests: dict[int, int] = field(default_factory=dict)  # window → NIXL's request, posted anew
    finished: int = 0  # posts whose bytes are here
    asked: Sequence[tuple[int, int]] = ()  # by the last read, and the same as two columns
    columns: Indices = field(default_factory=lambda: np.empty((2, 0), dtype=np.int32))

    @property
    def prepared(self) -> list[int]:
        """All lists."""
        return [*self.sides.values(), *(self.windows or ())]


@dataclass
class _Read:
    peer: tuple[str, int]
    source: _Peer
    remote: Indices
    local: Indices
    window: int | None = None  # where seals arrive, unless it is the staging array
    handles: list[int] = field(default_factory=list)  # NIXL's, those that are not over
    failure: str = ""


class NixlTransport:
    """A NIXL agent with the UCX backend, for one incarnation of a worker.

    After :meth:`close` another one takes its place under the next ``build``: a name is not used
    twice, so that no peer mistakes one for the other.
    """

    name = "nixl"

    def __init__(
        self,
        worker_id: str,
        epoch: int,
        ucx: UcxOptions = AUTOMATIC,
        build: int = 0,
    ) -> None:
        """``ucx``: what UCX is told, see :mod:`kvtransfer.ucx`. The default is for workers of one
        host, which meet over shared memory; that needs no network device.
        """
        name = f"{worker_id}-{epoch:016x}" + (f"-{build}" if build else "")
        self._agent = NixlAgent(name, ucx)
        self._region: Region | None = None
        self._windows: SealWindows | None = None
        self._segment: Any = None
        self._registered: Any = None
        self._sides: dict[Part, int] = {}
        self._peers: dict[tuple[str, int], _Peer] = {}
        self._gone: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._reads: dict[int, _Read] = {}
        self._next_handle = 0

    def register(self, region: Region) -> bytes:
        """Give NIXL the pool; the metadata is that of the agent, and where the blocks lie."""
        on_host = region.spans.device.type == "cpu"
        segment = self._agent.segment(on_host)
        device = max(region.spans.get_device(), 0)
        windows = SealWindows(region)
        tensors = (region.spans, region.seals, region.staging, windows.rows)
        areas = [(t.data_ptr(), t.numel() * t.element_size(), device, "") for t in tensors]
        spans, seals, staging = (
            (address, num_bytes // region.num_blocks, device)
            for address, num_bytes, *_ in areas[:3]
        )
        try:
            self._registered = self._agent.register(segment, areas)
            for part, rows in ((Part.KV, spans), (Part.SEALS, staging)):
                self._sides[part] = self._agent.prepare("", rows, region.num_blocks, segment)
            fields = {
                "agent": self._agent.raw.getLocalMD(),
                "on_host": on_host,
                "kv": spans,
                "seals": seals,
            }
        except Exception as error:
            raise self._agent.failure(f"register {region.num_blocks} blocks", error) from error
        self._region, self._windows, self._segment = region, windows, segment
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
            on_host, metadata = bool(fields["on_host"]), bytes(fields["agent"])
        except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
            raise TransportError(f"the nixl card of {peer.worker_id} is malformed") from error
        segment = self._agent.segment(on_host)
        try:
            agent = self._agent.load(metadata)
            sides = {
                part: self._agent.prepare(agent, rows[part], peer.num_blocks, segment)
                for part in Part
            }
            windows = self._prepare_windows(agent, rows[Part.SEALS], peer.num_blocks, segment)
        except Exception as error:
            raise self._agent.failure(f"reach {peer.worker_id}", error) from error
        self._peers[key] = _Peer(agent, peer.num_blocks, sides, windows)

    def pull(self, peer: AgentCard, part: Part, blocks: Sequence[tuple[int, int]]) -> int:
        """Post a READ. Over shared memory the copy runs in here."""
        key = (peer.worker_id, peer.epoch)
        if key in self._gone:
            raise PeerGone(f"{peer.worker_id} disconnected in this incarnation")
        known = self._peers.get(key)
        if known is None or self._region is None:
            raise TransportError(f"{peer.worker_id} is not connected over nixl")
        if blocks is not known.asked:  # a sequence's seals are asked for right after its data
            check_blocks(blocks, peer.num_blocks, self._region.num_blocks)
            known.asked, known.columns = blocks, np.array(blocks, dtype=np.int32).T.copy()
        read = _Read(key, known, *known.columns)
        self._prepare_read(read, part)
        self._next_handle += 1
        self._reads[self._next_handle] = read
        self._follow(read, self._agent.raw.postXferReq)
        return self._next_handle

    def poll(self) -> list[Completion]:
        """Ask NIXL for the state of each read."""
        completions = []
        for number, read in list(self._reads.items()):
            self._follow(read, self._agent.raw.getXferStatus)
            if not read.handles:
                del self._reads[number]
                self._leave_window(read)
                status = Status.FAILED if read.failure else Status.DONE
                completions.append(Completion(number, status, read.failure))
        return completions

    def moved(self, handle: int) -> int:
        """Posts that this peer has answered: reads from it wait behind each other."""
        read = self._reads.get(handle)
        return read.source.finished if read else 0

    def abandon(self, handle: int) -> None:
        """Nothing: releasing a handle does not keep its bytes from landing."""

    def forget(self, peer: AgentCard) -> None:
        """Remove the peer's agent."""
        key = (peer.worker_id, peer.epoch)
        if any(read.peer == key for read in self._reads.values()):
            raise TransportError(f"{peer.worker_id} has reads in flight")
        self._gone.pop(key, None)
        known = self._peers.pop(key, None)
        if known is None:
            return
        for request in known.requests.values():
            self._agent.release(request)
        self._agent.forget(known.agent, known.prepared)

    def close(self) -> None:
        """Destroy the agent: nothing lands, and nothing can be read, after this."""
        if self._agent.raw is None:
            return
        peers = self._peers.values()
        requests = {handle for peer in peers for handle in peer.requests.values()}
        requests = requests.union(*(read.handles for read in self._reads.values()))
        sides = [side for peer in peers for side in peer.prepared]
        self._agent.destroy(list(requests), [*sides, *self._sides.values()], self._registered)
        self._reads.clear()
        self._peers.clear()
        self._sides.clear()
        self._registered = self._region = self._windows = None

    def _prepare_windows(
        self, agent: str, seals: tuple[int, ...], num_blocks: int, segment: Any
    ) -> tuple[int, int] | None:
        """The lists for reading all seals of a peer at once; None when it has too many."""
        assert self._windows is not None
        if num_blocks > WINDOW_ROWS:
            return None
        address, row_bytes, device = seals
        used = num_blocks * row_bytes
        here = self._windows.rows
        rows = (here.data_ptr(), here[0].nbytes, max(here.get_device(), 0))
        return (
            self._agent.prepare("", rows, NUM_WINDOWS, self._segment, used),
            self._agent.prepare(agent, (address, used, device), 1, segment),
        )

    def _prepare_read(self, read: _Read, part: Part) -> None:
        """NIXL requests for the blocks of a read, not posted yet."""
        assert self._region is not None
        assert self._windows is not None
        step = (
            max(1, _POST_BYTES // self._region.span_bytes) if part is Part.KV else len(read.local)
        )
        ours, theirs = self._sides[part], read.source.sides[part]
        try:
            if part is Part.SEALS and self._use_window(read):
                return
            for i in range(0, len(read.local), step):
                some = slice(i, i + step)
                read.handles.append(
                    self._agent.request(ours, read.local[some], theirs, read.remote[some])
                )
        except Exception as error:
            for handle in read.handles:
                self._release(read, handle)
            read.failure = "not posted"
            self._leave_window(read)
            raise self._agent.failure(f"prepare a read from {read.source.agent}", error) from error

    def _use_window(self, read: _Read) -> bool:
        """Read all seals of the peer at once, unless it has too many or no window is free."""
        assert self._windows is not None
        source = read.source
        if source.windows is None:
            return False
        read.window = self._windows.take(source.num_blocks)
        if read.window is None:
            return False
        request = source.requests.get(read.window)
        if request is None:
            ours, theirs = source.windows
            indices = np.array([[read.window], [0]], dtype=np.int32)
            request = self._agent.request(ours, indices[0], theirs, indices[1])
            source.requests[read.window] = request
        read.handles.append(request)
        return True

    def _leave_window(self, read: _Read) -> None:
        """The read is settled: what came into its window goes on to the staging array."""
        if read.window is None:
            return
        assert self._windows is not None
        if not read.failure:
            self._windows.deliver(read.window, read.remote, read.local)
        self._windows.give_back(read.window)

    def _follow(self, read: _Read, ask: Callable[[int], Any]) -> None:
        """Post a read's requests or ask for their state; drop those that are settled."""
        for handle in list(read.handles):
            try:
                state = ask(handle)
            except self._agent.nixl.nixlRemoteDisconnectError:
                self._note_gone(read.peer)
                read.failure = f"{read.peer[0]} disconnected during a nixl read"
            except Exception as error:
                self._keep_unsettled(read, f"{type(error).__name__}: {error}")
                continue
            else:
                if state == self._agent.nixl.NIXL_IN_PROG:
                    continue
                if state != self._agent.nixl.NIXL_SUCCESS:
                    self._keep_unsettled(read, str(state))
                    continue
                read.source.finished += 1
            read.handles.remove(handle)
            if read.failure or read.window is None:
                self._release(read, handle)

    def _release(self, read: _Read, handle: int) -> None:
        """A request that is not to be posted again."""
        if read.window is not None:
            del read.source.requests[read.window]
        self._agent.release(handle)

    def _note_gone(self, peer: tuple[str, int]) -> None:
        self._gone[peer] = None
        if len(self._gone) > _MAX_GONE:
            self._gone.popitem(last=False)

    def _keep_unsettled(self, read: _Read, error: str) -> None:
        """An error that proves nothing: the request stays, and is asked again."""
        if not read.failure:
            logger.error("a nixl read from %s fails, but is not over: %s", read.peer[0], error)
        read.failure = f"a nixl read from {read.peer[0]} failed: {error}"
