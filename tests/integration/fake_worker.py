"""A scripted worker behind a real socket: it speaks the wire and "generates" a fixed answer."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvtransfer.hashing import unpack_ids
from kvtransfer.ticket import AgentCard
from router import wire
from router.link import Link, WorkerServer, serve_worker

SECRET = b"s" * 32
MODEL = "tiny"
EOS = 256
BLOCK = 16
LAYOUT = {
    "weights": "w",
    "num_layers": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "rope": "",
    "block_size": BLOCK,
    "dtype": "float32",
}
READY = wire.Load(
    state="ready",
    transport="memory",
    running=0,
    waiting=0,
    tickets=0,
    waiting_tokens=0,
    blocks={"free": 63, "active": 0, "cached": 0, "leased": 0, "quarantined": 0},
    steps=1,
    computed_prompt_tokens=0,
    cached_prompt_tokens=0,
    generated_tokens=0,
    pulled_bytes=0,
    pulled_blocks=0,
    preemptions=0,
    failed_pulls=0,
    expired_leases=0,
)

Hook = Callable[[Link, wire.Message], bool]


@dataclass
class Answer:
    """What every request is answered with, one UTF-8 byte a token, then EOS for ever."""

    text: str = "0123456789"

    def token(self, position: int) -> int:
        data = self.text.encode()
        return data[position] if position < len(data) else EOS


class FakeWorker:
    """``hook`` sees each message first; when it returns True, the worker does nothing with it.

    ``seen`` holds all messages except those of proofs, which are told by their random salt.
    """

    def __init__(self, role: str, name: str, answer: Answer | None = None, **card: object) -> None:
        self.answer = answer or Answer()
        self.seen: list[wire.Message] = []
        self.hook: Hook | None = None
        self.load = READY
        self.gate: asyncio.Event | None = None  # Tokens wait for it, one by one
        self.cached_tokens = 0
        self.queue_ms = self.prefill_ms = 0.0  # what it says that a prompt took
        self.lease_ms = 30_000
        self.links: list[Link] = []
        self.open: dict[tuple[bytes, int], asyncio.Task[None] | None] = {}
        self.tickets: set[bytes] = set()
        self.peers: set[tuple[str, int]] = set()
        self.introduced = False
        self.forgets_peers = False
        self._proofs: set[bytes] = set()
        self._changed = asyncio.Event()
        self.server: WorkerServer | None = None
        self.registered = True  # discovery knows it
        self.num_parts = 0  # early ones, of each ticket
        epoch = int.from_bytes(os.urandom(4), "big") | 1
        fields: dict[str, object] = {
            "worker_id": name,
            "epoch": epoch,
            "role": role,
            "model": MODEL,
            "host": "127.0.0.1",
            "port": 0,
            "pid": os.getpid(),
            "layout": LAYOUT,
            "agents": (AgentCard(name, epoch, b"f" * 16, 64, "memory", b""),),
            "kv_blocks": 64,
            "block_size": BLOCK,
            "max_model_len": 512,
            "max_num_seqs": 8,
            "token_budget": 256,
        }
        self.card = wire.WorkerCard(**(fields | card))  # type: ignore[arg-type]

    async def start(self, port: int = 0) -> FakeWorker:
        self.server = await serve_worker(
            "127.0.0.1",
            port,
            lambda: self.card,
            SECRET,
            self._on_connect,
            self._on_message,
            self._on_close,
            lambda: (self.load.steps, False),
        )
        self.card = replace(self.card, port=self.server.port)
        return self

    async def stop(self) -> None:
        assert self.server is not None
        await self.server.close()

    def die(self) -> None:
        """As a killed process: no goodbye, nobody listens any more."""
        assert self.server is not None
        assert self.server._server is not None
        self.server._server.close()
        for link in list(self.links):
            link._abort("killed")

    def freeze(self) -> None:
        """As a stopped process: sockets stay open, nothing is read, nothing is said."""
        assert self.server is not None
        assert self.server._server is not None
        self.server._server.close()
        for link in self.links:
            assert link._transport is not None
            assert link._timer is not None
            link._transport.pause_reading()
            link._timer.cancel()
            link._write = lambda messages: None  # type: ignore[method-assign]

    async def thaw(self) -> None:
        """It goes on, and finds its connections closed."""
        for link in list(self.links):
            link._abort("stopped for too long")
        await self.start(self.card.port)

    @property
    def key(self) -> tuple[str, int]:
        return self.card.worker_id, self.card.epoch

    def report(self, **changes: object) -> None:
        """Change the load report and send it."""
        self.load = replace(self.load, **changes)  # type: ignore[arg-type]
        for link in self.links:
            link.send(self.load)

    async def until(self, condition: Callable[[], object], timeout: float = 10) -> None:
        """Wait until ``condition`` holds; it is asked after each message."""
        async with asyncio.timeout(timeout):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def kinds(self) -> list[str]:
        return [type(message).__name__ for message in self.seen]

    @property
    def idle(self) -> bool:
        return not self.open and not self.tickets

    # --- the worker ------------------------------------------------------------------------------

    def _on_connect(self, link: Link, hello: wire.Hello, tickets: tuple[bytes, ...]) -> None:
        self.links.append(link)
        self.tickets &= set(tickets)
        link.send(self.load)
        self._changed.set()

    def _on_close(self, link: Link) -> None:
        self.links.remove(link)
        for task in self.open.values():
            if task is not None:
                task.cancel()
        self.open.clear()
        self._changed.set()

    def _on_message(self, link: Link, message: wire.Message) -> None:
        salt = getattr(message, "salt", b"")
        if salt.startswith(b"proof"):
            self._proofs.add(message.request)  # type: ignore[union-attr]
        proof = (
            getattr(message, "request", b"") in self._proofs
            or (isinstance(message, wire.Release) and message.ticket_id in self._proofs)
            or (isinstance(message, wire.Peer) and not self.introduced)  # comes with a proof
        )
        if not proof:
            self.seen.append(message)
            if self.hook is not None and self.hook(link, message):
                self._changed.set()
                return
        self._act(link, message)
        self._changed.set()

    def _act(self, link: Link, message: wire.Message) -> None:
        match message:
            case wire.Reserve(request, attempt):
                self.open[request, attempt] = None
                link.send(wire.Reserved(request, attempt, 0))
            case wire.Prefill(request, attempt):
                self._prefill(link, message)
            case wire.Peer(card):
                self.introduced = True
                self.peers.add((card.worker_id, card.epoch))
            case wire.Decode(request, attempt):
                if message.ticket and self.forgets_peers:
                    self.forgets_peers = False
                    self.peers.clear()
                    link.send(wire.UnknownPeer(request, attempt, "P", 1))
                    return
                assert not message.ticket or self.peers, "Decode before Peer"
                task = asyncio.create_task(self._decode(link, message))
                self.open[request, attempt] = task
            case wire.Forget(worker_id, epoch):
                self.peers.discard((worker_id, epoch))
            case wire.Check(request, attempt):
                if (request, attempt) not in self.open:
                    link.send(wire.Failed(request, attempt, "lost", "never heard of it"))
            case wire.Release(ticket_id):
                self.tickets.discard(ticket_id)
            case wire.Abort(request, attempt):
                if (request, attempt) in self.open:
                    task_or_none = self.open.pop((request, attempt))
                    if task_or_none is not None:
                        task_or_none.cancel()
                    link.send(wire.Failed(request, attempt, "aborted", "aborted"))

    def _prefill(self, link: Link, message: wire.Prefill) -> None:
        for part in range(self.num_parts if message.early else 0):
            link.send(wire.TicketPart(message.request, message.attempt, b"part %d" % part))
        position = len(unpack_ids(message.ids)) - message.num_prompt
        token, finish = self._next(message.sampling, position)
        answer = wire.Prefilled(
            message.request, message.attempt, token, self.cached_tokens, finish=finish,
            queue_ms=self.queue_ms, prefill_ms=self.prefill_ms,
        )  # fmt: skip
        if message.export and not finish:
            ticket_id = os.urandom(16)
            if message.request in self._proofs:
                self._proofs.add(ticket_id)
            self.tickets.add(ticket_id)
            answer = replace(answer, ticket=b"T" + ticket_id, ticket_id=ticket_id)
            answer = replace(answer, lease_ms=self.lease_ms, num_tokens=len(message.ids) // 4)
        link.send(answer)

    async def _decode(self, link: Link, message: wire.Decode) -> None:
        name = (message.request, message.attempt)
        if message.ticket:
            link.send(wire.Pulled(*name, num_blocks=1, num_bytes=4096, pull_ms=1.0))
        position = len(unpack_ids(message.ids)) - message.num_prompt
        finish = ""
        while not finish:
            gate = self.gate
            if gate is not None:
                await gate.wait()
                gate.clear()
            else:
                await asyncio.sleep(0)
            token, finish = self._next(message.sampling, position)
            if finish:
                self.open.pop(name)
            link.send(wire.Tokens(*name, position, (token,), finish, self.cached_tokens))
            position += 1

    def _next(self, sampling: wire.Sampling, position: int) -> tuple[int, str]:
        token = self.answer.token(position)
        if token in sampling.stop_ids and position + 1 > sampling.min_tokens:
            return token, "stop"
        return token, "length" if position + 1 >= sampling.max_tokens else ""
