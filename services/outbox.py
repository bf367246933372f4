"""What the two roles of a worker share: where answers go, and how they get there."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Protocol

from router import wire
from services.engine.sequence import SamplingParams


class Peer(Protocol):
    """A router at the other end of a connection. ``name`` is the router's id."""

    name: str

    def send(self, *messages: wire.Message) -> None:
        """Queue messages; called from the event loop's thread only."""


class Outbox:
    """Messages that the engine's thread has made, handed over some at a time.

    ``deliver`` takes a list of (peer, messages) and must be thread-safe.
    """

    def __init__(self, deliver: Callable[[list[tuple[Peer, list[wire.Message]]]], None]) -> None:
        self._deliver = deliver
        self._pending: dict[int, tuple[Peer, list[wire.Message]]] = {}

    def put(self, peer: Peer, message: wire.Message) -> None:
        """Add a message; order per peer is kept."""
        self._pending.setdefault(id(peer), (peer, []))[1].append(message)

    def flush(self) -> None:
        """Deliver what has gathered."""
        if self._pending:
            batch = list(self._pending.values())
            self._pending.clear()
            self._deliver(batch)


def sampling_params(sampling: wire.Sampling) -> SamplingParams:
    """The engine's own form of the wire's."""
    return SamplingParams(**asdict(sampling))
