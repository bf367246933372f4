"""A NIXL agent with the UCX backend: how one is made, and what we ask of it.

The only file that imports nixl. Not its Python class, which keeps a core busy, but the bindings
below it. Knows no pools, no peers and no tickets.
"""

from __future__ import annotations

import logging
import logging.config
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvtransfer.errors import TransportError
from kvtransfer.ucx import PREFIX, Setting, UcxOptions, described, settle

logger = logging.getLogger(__name__)

Indices = np.ndarray[Any, np.dtype[np.int32]]  # of blocks in a prepared list

# How long NIXL's own thread waits for an event before it looks by itself. nixl's Python class sets
# 0, with which that thread burns a core while nothing happens.
_PROGRESS_US = 10_000

_environment = threading.Lock()


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """For the import of nixl, which configures logging as if it were alone: that closes every
    handler of the process. Ray Serve takes a replica whose log is closed for broken, and ends it
    when its controller restarts.
    """
    configure = logging.config.dictConfig
    logging.config.dictConfig = lambda config: None
    try:
        yield
    finally:
        logging.config.dictConfig = configure


def advice(error: ImportError) -> str:
    """What to do when NIXL cannot be imported. It comes with large libraries, and the linker's
    words for too little memory are not those of a missing package.
    """
    if isinstance(error, ModuleNotFoundError):
        return "install the package nixl, which exists for Linux, or choose the tcp transport"
    words = str(error)
    unmapped = "failed to map segment" in words and "not permitted" not in words  # else: noexec
    if unmapped or "allocate memory" in words:
        return "there is not enough memory for its libraries: give this process more"
    return "install the package nixl anew, or choose the tcp transport"


class NixlAgent:
    """``raw`` is the agent of the bindings ``nixl``, None once it is destroyed."""

    def __init__(self, name: str, ucx: UcxOptions) -> None:
        """See :class:`kvtransfer.nixl_transport.NixlTransport`. Raises TransportError."""
        self._name = name
        with _told(ucx) as settings:
            self._settings = described(settings)
            logger.info("nixl agent %s: %s", name, self._settings)
            self.nixl, self.raw = self._create()

    def _create(self) -> tuple[Any, Any]:
        try:
            with _handlers_kept():
                from nixl import _bindings as nixl
        except ImportError as error:
            raise TransportError(f"nixl cannot be imported ({error}): {advice(error)}") from error
        config = nixl.nixlAgentConfig()
        config.useProgThread = True  # connections are made while nobody polls
        config.pthrDelay = _PROGRESS_US
        try:
            agent = nixl.nixlAgent(self._name, config)
            agent.createBackend("UCX", {})
        except Exception as error:  # the bindings' errors have no base class of their own
            raise self.failure("create an agent with the UCX backend", error) from error
        return nixl, agent

    def segment(self, on_host: bool) -> Any:
        """The kind of memory."""
        return self.nixl.DRAM_SEG if on_host else self.nixl.VRAM_SEG

    def register(self, segment: Any, areas: list[tuple[int, int, int, str]]) -> Any:
        """Make ``(address, bytes, device, "")`` readable; returns what :meth:`destroy` wants."""
        registered = self.nixl.nixlRegDList(segment, areas)
        self.raw.registerMem(registered, [])
        return registered

    def load(self, metadata: bytes) -> str:
        """Learn another agent; returns its name."""
        loaded = self.raw.loadRemoteMD(metadata)
        return loaded.decode() if isinstance(loaded, bytes) else str(loaded)

    def prepare(
        self,
        owner: str,
        rows: tuple[int, ...],
        num_rows: int,
        segment: Any,
        used: int | None = None,
    ) -> int:
        """A prepared list of neighbours; ``rows``: first address, bytes, device.

        ``owner``: another agent's name, or "" for this one. ``used``: how many bytes of each row,
        if not all.
        """
        address, num_bytes, device = rows
        # As (address, length, device) rows: NIXL's own serialised lists are pickles.
        descriptors = np.empty((num_rows, 3), dtype=np.uint64)
        descriptors[:, 0] = address + num_bytes * np.arange(num_rows, dtype=np.uint64)
        descriptors[:, 1] = used or num_bytes
        descriptors[:, 2] = device
        areas = self.nixl.nixlXferDList(segment, descriptors)
        handle: int = self.raw.prepXferDlist(owner or self.nixl.NIXL_INIT_AGENT, areas, [])
        return handle

    def request(self, ours: int, local: Indices, theirs: int, remote: Indices) -> int:
        """A READ between prepared lists that is not posted yet."""
        handle: int = self.raw.makeXferReq(self.nixl.NIXL_READ, ours, local, theirs, remote)
        return handle

    def release(self, request: int) -> None:
        """Forget a request. Does not keep its bytes from landing."""
        _quietly("release a read", self.raw.releaseXferReq, request)

    def forget(self, name: str, prepared: list[int]) -> None:
        """Remove another agent and the lists of its memory."""
        self._release_lists(prepared)
        _quietly("remove a peer", self.raw.invalidateRemoteMD, name)

    def destroy(self, requests: list[int], prepared: list[int], registered: Any) -> None:
        """End the agent: nothing lands, and nothing can be read, after this."""
        for request in requests:
            self.release(request)
        self._release_lists(prepared)
        if registered is not None:
            _quietly("deregister the pool", self.raw.deregisterMem, registered, [])
        self.raw = None  # the last reference

    def failure(self, what: str, error: Exception) -> TransportError:
        """An error that says what to look at."""
        return TransportError(
            f"nixl could not {what} ({type(error).__name__}: {error}); the agent is {self._name}, "
            f"with {self._settings}: check that both hosts have them (ucx_info -d), or choose the "
            "tcp transport"
        )

    def _release_lists(self, prepared: list[int]) -> None:
        for side in prepared:
            _quietly("release a list of blocks", self.raw.releasedDlistH, side)


@contextmanager
def _told(ucx: UcxOptions) -> Iterator[dict[str, Setting]]:
    """UCX takes its settings from the environment while a backend is created, and only then."""
    with _environment:
        before = {name: v for name, v in os.environ.items() if name.startswith(PREFIX)}
        settings = settle(ucx, before)
        _replace(before, {name: setting.value for name, setting in settings.items()})
        try:
            yield settings
        finally:
            _replace(settings, before)


def _replace(names: Iterable[str], variables: dict[str, str]) -> None:
    for name in names:
        os.environ.pop(name, None)
    os.environ.update(variables)


def _quietly(what: str, act: Callable[..., object], *args: object) -> None:
    """On the way out an error changes nothing any more."""
    try:
        act(*args)
    except Exception as error:
        logger.warning("nixl could not %s: %s: %s", what, type(error).__name__, error)
