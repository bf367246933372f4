"""Workers with a real model and real KV memory, but without threads or sockets: every step, every
read and every message happens when a test says so.

So a test can put a fault exactly between two steps of the protocol, see what the guard against it
does, and what would happen without that guard. All numbers are a tiny random model's; the text that
is right is what one engine with plenty of room makes of the same prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import count

import torch

from kvtransfer.exporter import Exporter
from kvtransfer.hashing import pack_ids
from kvtransfer.importer import Importer
from kvtransfer.layout import KVLayout, Stamp
from kvtransfer.memory_transport import MemoryTransport
from kvtransfer.region import Region
from kvtransfer.ticket import AgentCard, Ticket
from kvtransfer.transport import Completion, Part, Status
from router import wire
from services.decode import DecodeService
from services.engine.config import EngineConfig
from services.engine.engine import Engine
from services.engine.model import Model
from services.engine.runner import ModelRunner
from services.engine.sequence import SamplingParams
from services.engine.weights import random_weights
from services.outbox import Outbox, Peer
from services.prefill import PrefillService
from services.roles import Roles
from tests.support.tiny_model import INTERMEDIATE, SHAPE
from tests.support.worker_box import RecordingLink

BLOCK = 16
CHUNK = 15  # less than a block: its last slot comes with the next step
SECRET = b"of this deployment"
LEASE_S = 30.0
MAX_TOKENS = 8
SAMPLING = wire.Sampling(max_tokens=MAX_TOKENS, temperature=0.0)
LAYOUT = KVLayout(
    weights="tiny",
    num_layers=SHAPE.num_layers,
    num_kv_heads=SHAPE.num_kv_heads,
    head_dim=SHAPE.head_dim,
    rope=SHAPE.rope,
    block_size=BLOCK,
    dtype="float32",
)

# Two prompts that have nothing in common; each fills two blocks, with room for what a second
# attempt brings along.
ASKED = [(7 * i + 3) % SHAPE.vocab_size for i in range(30)]
OTHER = [(11 * i + 5) % SHAPE.vocab_size for i in range(30)]

Pairs = Sequence[tuple[int, int]]


@lru_cache(maxsize=1)
def model() -> Model:
    weights = random_weights(SHAPE, INTERMEDIATE, seed=4)
    return Model(SHAPE, weights, torch.float32, torch.device("cpu"))


@cache
def _right(ids: tuple[int, ...]) -> list[int]:
    config = EngineConfig(
        9, BLOCK, SHAPE.max_model_len, max_num_seqs=1, token_budget=CHUNK, prefix_cache=False
    )
    engine = Engine(config, ModelRunner(model(), Region(LAYOUT, 9), 1))
    engine.add((b"", 0), list(ids), len(ids), SamplingParams(MAX_TOKENS, temperature=0.0))
    tokens = []
    while engine.has_work:
        tokens += [output.token for output in engine.step(0.0)]
    return tokens


def right(ids: Sequence[int]) -> list[int]:
    """The answer to a prompt."""
    return _right(tuple(ids))


class Reads(MemoryTransport):
    """Reads that wait until the test lets them land, and may go wrong on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[tuple[int, AgentCard, Part, Pairs]] = []
        self.fault: Callable[[Pairs], Pairs] = lambda pairs: pairs  # what of the KV is read, where
        self.on_read: Callable[[], None] = lambda: None  # the KV of a pull has been read
        self.address: AgentCard | None = None  # who answers, whatever the peer's card says
        self.seals_with_data = False  # one read for both, of which the seals come first
        self._handles = count(1)
        self._landed: list[Completion] = []

    def connect(self, peer: AgentCard) -> None:
        super().connect(self.address or peer)

    def pull(self, peer: AgentCard, part: Part, blocks: Pairs) -> int:
        handle = next(self._handles)
        self.waiting.append((handle, peer, part, tuple(blocks)))
        if part is Part.KV and self.seals_with_data:
            super().pull(self.address or peer, Part.SEALS, blocks)
        return handle

    def land(self) -> None:
        """The bytes of all posted reads are there, and each of them says that it is done."""
        waiting, self.waiting = self.waiting, []
        for handle, peer, part, blocks in waiting:
            if part is Part.KV:
                super().pull(self.address or peer, part, self.fault(blocks))
                self.on_read()
            elif not self.seals_with_data:
                super().pull(self.address or peer, part, blocks)
            self._landed.append(Completion(handle, Status.DONE))
        super().poll()

    def poll(self) -> list[Completion]:
        landed, self._landed = self._landed, []
        return landed


class Memory:
    """A region as the importer sees it. With a check switched off, what it would find is replaced
    by what it expects.
    """

    def __init__(self, region: Region) -> None:
        self.region = region
        self.num_blocks = region.num_blocks
        self.span_bytes = region.span_bytes
        self.check_trailers = self.check_seals = self.check_epochs = True
        self._expected: dict[int, Stamp] = {}

    def expect(
        self, blocks: Sequence[int], epoch: int, generations: Sequence[int], ids: Sequence[int]
    ) -> None:
        self.region.expect(blocks, epoch, generations, ids)
        for local, generation, remote in zip(blocks, generations, ids, strict=True):
            self._expected[local] = Stamp(epoch, generation, remote)

    def has(self, expected: None) -> bool:
        return False  # the guards are asked, block by block

    def trailers(self, blocks: Sequence[int]) -> list[Stamp]:
        expected = [self._expected[block] for block in blocks]
        if not self.check_trailers:
            return expected
        return self._see(self.region.trailers(blocks), expected)

    def staged_seals(self, blocks: Sequence[int]) -> list[Stamp]:
        expected = [self._expected[block] for block in blocks]
        if not self.check_seals:
            return expected
        return self._see(self.region.staged_seals(blocks), expected)

    def checksum(self, blocks: Sequence[int]) -> list[int]:
        return self.region.checksum(blocks)

    def _see(self, found: list[Stamp], expected: list[Stamp]) -> list[Stamp]:
        if self.check_epochs:
            return found
        return [
            Stamp(e.epoch, f.generation, f.block_id) for f, e in zip(found, expected, strict=True)
        ]


class Pulls:
    """The puller without its thread."""

    def __init__(self, importer: Importer, memory: Memory) -> None:
        self._importer = importer
        self._memory = memory

    def pull(
        self, key: bytes, ticket: Ticket, peer: AgentCard, pairs: Pairs, deadline: float
    ) -> None:
        self._importer.start(key, ticket, peer, pairs, deadline)

    def abort(self, key: bytes) -> None:
        self._importer.abort(key)

    def forget(self, peer: AgentCard) -> None:
        self._importer.forget(peer)


class Worker:
    """One worker, driven by hand. ``blocks`` counts the padding block."""

    def __init__(
        self, name: str, epoch: int, blocks: int, chunk: int = CHUNK, prefix_cache: bool = True
    ) -> None:
        self.now = 100.0
        self.region = Region(LAYOUT, blocks)
        self.runner = ModelRunner(model(), self.region, epoch)
        config = EngineConfig(
            kv_blocks=blocks,
            block_size=BLOCK,
            max_model_len=SHAPE.max_model_len,
            max_num_seqs=4,
            token_budget=chunk,
            prefix_cache=prefix_cache,
        )
        self.engine = Engine(config, self.runner)
        self.reads = Reads()
        self.memory = Memory(self.region)
        self.importer = Importer(self.memory, self.reads)
        metadata = self.reads.register(self.region)
        fingerprint = LAYOUT.fingerprint()
        self.exporter = Exporter(name, epoch, fingerprint, SECRET, LEASE_S)
        outbox = Outbox(self._deliver)
        pulls = Pulls(self.importer, self.memory)
        self.decode = DecodeService(self.engine, pulls, outbox, fingerprint, SECRET)
        self.roles = Roles(
            self.engine,
            PrefillService(self.engine, self.exporter, outbox),
            self.decode,
            outbox,
            SHAPE.vocab_size,
            "memory",
            lambda load: None,
        )
        self.card = AgentCard(name, epoch, fingerprint, blocks, "memory", metadata)
        self.link = RecordingLink()
        self.roles.connected(self.link, ())

    def _deliver(self, batch: list[tuple[Peer, list[wire.Message]]]) -> None:
        for peer, messages in batch:
            peer.send(*messages)

    def say(self, *messages: wire.Message, link: RecordingLink | None = None) -> None:
        """Give the worker messages; answers gather in the link."""
        for message in messages:
            self.roles.handle(link or self.link, message, self.now)
        self.roles.flush(self.now)

    def heard(self) -> list[wire.Message]:
        """What the worker has answered since the last call."""
        return self.link.take()

    def step(self, times: int = 1) -> None:
        """As the engine's loop does."""
        for _ in range(times):
            self.roles.tick(self.now)
            if self.engine.has_work:
                self.roles.on_outputs(self.engine.step(self.now), self.now)
            self.roles.flush(self.now)

    def run(self) -> None:
        """Step until nothing is left to do, or until there is no room to do it."""
        self.step()
        while self.engine.has_work and not self.engine.stalled:
            self.step()

    def poll(self) -> None:
        """Look after the reads, as the puller's thread does."""
        self.roles.on_events(self.importer.poll(self.now), self.now)
        self.roles.flush(self.now)

    def land(self) -> None:
        """All that is posted lands, and is looked after: the data, then the seals."""
        for _ in range(2):
            self.reads.land()
            self.poll()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.step()

    @property
    def held(self) -> int:
        """Blocks that nobody else can have."""
        return self.engine.pool.num_usable - self.engine.pool.num_available

    def check_idle(self) -> None:
        """Nothing is open and nothing is held."""
        self.engine.check_integrity()
        self.importer.check_integrity()
        self.exporter.check_integrity()
        assert not self.engine.has_work
        assert self.roles.num_open == 0
        assert self.held == 0, self.engine.pool.counts()


class Answer:
    """One request as its router sees it: what the client has got, and how attempts ended."""

    def __init__(self, ids: Sequence[int], request: bytes = b"asked") -> None:
        self.ids = list(ids)
        self.request = request
        self.attempt = 0
        self.tokens: list[int] = []
        self.failures: list[wire.Failed] = []
        self.refused = False
        self.finished = False
        self.pulled = False
        self.prefilled: wire.Prefilled | None = None

    @property
    def so_far(self) -> list[int]:
        """Prompt and delivered tokens."""
        return [*self.ids, *self.tokens]

    def hear(self, *workers: Worker) -> None:
        """Take what the workers said about this request."""
        for worker in workers:
            kept: list[wire.Message] = []
            for message in worker.heard():
                if getattr(message, "request", None) != self.request:
                    kept.append(message)
                elif getattr(message, "attempt", None) == self.attempt:
                    self._take(message)
            worker.link.sent = kept + worker.link.sent

    def _take(self, message: wire.Message) -> None:
        match message:
            case wire.Prefilled():
                self.prefilled = message
                self.tokens.append(message.token)
            case wire.Tokens():
                assert message.first_index == len(self.tokens)
                self.tokens += message.ids
                self.finished = bool(message.finish)
            case wire.Pulled():
                self.pulled = True
            case wire.Refused():
                self.refused = True
            case wire.Failed():
                self.failures.append(message)

    def reserve(self, d: Worker) -> None:
        d.say(wire.Reserve(self.request, self.attempt, pack_ids(self.so_far)))
        self.hear(d)

    def prefill(self, p: Worker) -> None:
        """Send the prompt to P; :meth:`ticket` waits for the answer."""
        ids = pack_ids(self.so_far)
        p.say(wire.Prefill(self.request, self.attempt, ids, len(self.ids), SAMPLING))

    def ticket(self, d: Worker, p: Worker) -> None:
        """Up to the ticket: reserved at D, computed at P."""
        self.reserve(d)
        self.prefill(p)
        p.run()
        self.hear(p)
        assert self.prefilled is not None

    def decode(self, d: Worker, p: Worker | None = None) -> None:
        """Ask D to go on: with P's ticket, or by computing everything itself."""
        ticket = b""
        if p is not None:
            assert self.prefilled is not None
            ticket = self.prefilled.ticket
            d.say(wire.Peer(p.card))
        ids, num_prompt = pack_ids(self.so_far), len(self.ids)
        d.say(wire.Decode(self.request, self.attempt, ids, num_prompt, SAMPLING, ticket))
        self.hear(d)

    def finish(self, d: Worker) -> None:
        """Let D come to the end of it."""
        d.run()
        self.hear(d)

    def release(self, p: Worker) -> None:
        assert self.prefilled is not None
        p.say(wire.Release(self.prefilled.ticket_id))

    def hand_off(self, d: Worker, p: Worker) -> None:
        """All of it, as it should be."""
        self.ticket(d, p)
        self.decode(d, p)
        d.land()
        self.hear(d)
        assert self.pulled, self.failures
        self.release(p)
        self.finish(d)

    def retry(self, d: Worker, p: Worker) -> None:
        """After a failure: once more with the tokens so far, to the end."""
        assert not self.finished
        assert self.failures
        self.release(p)
        self.attempt += 1
        self.prefilled = None
        self.hand_off(d, p)
