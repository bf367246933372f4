"""``make bench-handoff``: what the hand-off costs beyond moving the bytes.

A: NIXL reads the spans of a prompt from another process, over shared memory. B: the whole hand-off
of the same blocks by the same descriptors: lease, sign, open, compare the prefix, clear, the same
read, the second read for the seals, verify, renew, release. Both read in a thread of their own, as
a worker does, since a post holds Python's lock. Checksums are off; the stamps in the producer's
blocks belong to its steps. Spans are the default model's in float32.

Each round is A B B A: A and B read the same blocks one after the other, then B and A other ones, so
that neither gains by what the first has left in the processor's caches, and a machine that changes
its speed changes both. Blocks go round the whole pool, as those of real prompts do. Printed is the
median over the rounds of B's time by A's, with its bootstrap interval. Needs an idle machine.
Status 1 when the interval's upper end is too high.
"""

import argparse
import base64
import dataclasses
import functools
import gc
import json
import queue
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import torch

from kvtransfer.exporter import Exporter
from kvtransfer.hashing import pack_ids, packed_prefix_hash
from kvtransfer.importer import Arrived, Event, Importer
from kvtransfer.layout import KVLayout
from kvtransfer.puller import Puller
from kvtransfer.region import Region
from kvtransfer.ticket import AgentCard, open_ticket
from kvtransfer.transport import Part, Status
from kvtransfer.transports import open_transport

LAYOUT = KVLayout("w", 30, 3, 64, "rope", 16, "float32")
NUM_BLOCKS = 300
SECRET = secrets.token_bytes(32)
GENERATION = 2
LIMITS = {512: 1.05, 2000: 1.02}  # of B/A, by tokens
WARM_UP = 5
PATIENCE_S = 60.0


def produce() -> None:
    """The other process: a sealed pool, until its standard input ends."""
    epoch = secrets.randbits(64) | 1
    region = Region(LAYOUT, NUM_BLOCKS)
    region.kv.normal_()
    region.seal(epoch, [(block, GENERATION) for block in range(NUM_BLOCKS)])
    transport = open_transport("nixl", f"p-{secrets.token_hex(4)}", epoch)
    metadata = transport.register(region)
    fingerprint = LAYOUT.fingerprint()
    card = AgentCard("p", epoch, fingerprint, NUM_BLOCKS, transport.name, metadata)
    fields = dataclasses.asdict(card)
    for name in ("metadata", "fingerprint"):
        fields[name] = base64.b64encode(fields[name]).decode()
    print(json.dumps(fields), flush=True)
    sys.stdin.read()
    transport.close()


class Bench:
    """A consumer with a pool, and the blocks of one prompt in both pools."""

    def __init__(self, card: AgentCard, num_tokens: int) -> None:
        self.card = card
        self.region = Region(LAYOUT, NUM_BLOCKS)
        self.region.kv.fill_(0)
        # An agent each, since a transport belongs to one thread; their descriptors are the same.
        self.reader, self.transport = (
            open_transport("nixl", f"d-{secrets.token_hex(4)}", 1) for _ in range(2)
        )
        for transport in (self.reader, self.transport):
            transport.register(self.region)
        self.reader.connect(card)
        self.num_tokens, self.ids = num_tokens, pack_ids(range(num_tokens))  # as they travel
        count = -(-num_tokens // LAYOUT.block_size)
        self._order = np.random.default_rng(0).permutation(NUM_BLOCKS)  # few are neighbours
        self.remote, self.local = self.take(count), self.take(count)
        self.exporter = Exporter("p", card.epoch, card.fingerprint, SECRET, 30.0)
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.reads: queue.SimpleQueue[list[tuple[int, int]] | None] = queue.SimpleQueue()
        self.read_ends: queue.SimpleQueue[Status] = queue.SimpleQueue()
        self.puller: Puller | None = None

    def take(self, count: int) -> list[int]:
        """The next blocks, round and round."""
        blocks, self._order = self._order[:count], np.roll(self._order, -count)
        return blocks.tolist()

    def move_on(self) -> None:
        """Take other blocks, of which the processor has nothing in its caches."""
        self.remote = self.take(len(self.remote))
        self.local = self.take(len(self.local))

    def read(self) -> None:
        """A: the bytes."""
        self.reads.put(list(zip(self.remote, self.local, strict=True)))
        assert self.read_ends.get(timeout=PATIENCE_S) is Status.DONE

    def serve_reads(self) -> None:
        """The thread of A."""
        while (pairs := self.reads.get()) is not None:
            self.reader.pull(self.card, Part.KV, pairs)
            while not (done := self.reader.poll()):
                time.sleep(0.0002)
            self.read_ends.put(done[0].status)

    def hand_off(self) -> None:
        """B: all of it."""
        assert self.puller is not None
        blocks = [(block, GENERATION) for block in self.remote]
        now = time.monotonic()
        # The producer.
        prefix = packed_prefix_hash(self.ids)
        export = self.exporter.export("r", blocks, self.num_tokens, prefix, now)
        # The consumer.
        ticket = open_ticket(export.packed, SECRET)
        assert ticket.prefix == packed_prefix_hash(self.ids)
        pairs = list(enumerate(self.local))
        self.puller.pull(ticket.ticket_id, ticket, self.card, pairs, now + PATIENCE_S)
        event = self.events.get(timeout=PATIENCE_S)
        assert isinstance(event, Arrived), event
        # The producer.
        assert self.exporter.renew([export.ticket_id], now) == []
        assert self.exporter.release(export.ticket_id) == self.remote

    def on_events(self, events: list[Event]) -> None:
        for event in events:
            self.events.put(event)

    def run(self, num_rounds: int) -> list[tuple[float, float]]:
        """Seconds of A and B, by round."""
        self.puller = Puller(Importer(self.region, self.transport), self.on_events)
        thread = threading.Thread(target=self.serve_reads)
        thread.start()
        try:
            for _ in range(WARM_UP):
                self.read()
                self.hand_off()
            gc.collect()
            gc.freeze()  # as a worker does when it has started
            rounds = []
            for _ in range(num_rounds):
                self.move_on()
                first = timed(self.read), timed(self.hand_off)
                self.move_on()
                second = timed(self.hand_off), timed(self.read)
                rounds.append(((first[0] + second[1]) / 2, (first[1] + second[0]) / 2))
        finally:
            self.puller.close()
            self.reads.put(None)
            thread.join()
            self.reader.close()
        assert self.puller.failure == ""
        return rounds


def timed(act: Callable[[], None]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def interval(values: np.ndarray) -> tuple[float, float]:
    """Of the median, 95 %, by bootstrap."""
    picks = np.random.default_rng(1).integers(0, len(values), (4000, len(values)))
    low, high = np.quantile(np.median(values[picks], axis=1), [0.025, 0.975])
    return float(low), float(high)


def measure(card: AgentCard, num_tokens: int, num_rounds: int) -> bool:
    """Print one line; whether the cost is within its limit."""
    rounds = np.array(Bench(card, num_tokens).run(num_rounds))
    read_ms, hand_off_ms = 1000 * np.median(rounds, axis=0)
    ratios = rounds[:, 1] / rounds[:, 0]
    low, high = interval(ratios)
    limit = LIMITS.get(num_tokens, float("inf"))
    num_blocks = -(-num_tokens // LAYOUT.block_size)
    gib_s = num_blocks * LAYOUT.span_bytes / 2**30 / (read_ms / 1000)
    print(
        f"{num_tokens:5} tokens, {num_blocks:3} blocks: read {read_ms:6.2f} ms "
        f"({gib_s:.2f} GiB/s), "
        f"hand-off {hand_off_ms:6.2f} ms\n"
        f"      ratio {np.median(ratios):.4f}, 95 % interval [{low:.4f}, {high:.4f}] of "
        f"{num_rounds} rounds, limit {limit}: {'ok' if high < limit else 'TOO HIGH'}",
        flush=True,
    )
    return high < limit


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(LIMITS))
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--produce", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.produce:
        produce()
        return 0
    command = [sys.executable, "-m", "tests.bench_handoff", "--produce"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as producer:
        assert producer.stdout is not None
        fields = json.loads(producer.stdout.readline())
        decode = functools.partial(base64.b64decode, validate=True)
        card = AgentCard(
            **{k: decode(v) if k in ("metadata", "fingerprint") else v for k, v in fields.items()}
        )
        good = [measure(card, num_tokens, args.rounds) for num_tokens in args.tokens]
        assert producer.stdin is not None
        producer.stdin.close()
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
