"""``make bench-roofline``: where a worker's gauges put it, and where ``make bench-engine`` does.

A real worker, scraped over HTTP, computes a case for as long as its gauges look back; then the
benchmark's contender measures the same case. What is compared was counted in two ways: by the
worker from its plans, against ceilings that it timed at its start; by the benchmark from the
model's shape, against ceilings that it times before each case, of which the middle counts: one look
at a machine that others use as well may be far off. Last, the same answers are decoded in static
batches and in continuous ones: the counters show the seats that stay empty.
The ceilings that workers keep are timed anew. Needs an idle machine. Status 1 when a gauge is more
than 15 % from the benchmark.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

from services.machine import calm_openmp

calm_openmp()  # as every worker does, before torch is imported

from kvtransfer.hashing import pack_ids  # noqa: E402
from router import wire  # noqa: E402
from router.connection import Link  # noqa: E402
from router.link import connect_worker  # noqa: E402
from services.engine.config import EngineConfig  # noqa: E402
from services.engine.meter import RECENT_S  # noqa: E402
from services.fetch import DEFAULT_MODEL, fetch  # noqa: E402
from services.model_cache import cache_dir  # noqa: E402
from services.settings import WorkerSettings  # noqa: E402
from services.worker import Worker  # noqa: E402
from tests.support import bench  # noqa: E402
from tests.support.bench import Case, Target, Timing, say  # noqa: E402
from tests.support.bench_contenders import Baton, Machine, Setup  # noqa: E402
from tests.support.roofline import Ceilings, Shape, decode_roof_s, prefill_share  # noqa: E402
from tests.support.scrape import Page, scrape  # noqa: E402

SECRET = b"of this benchmark"
PREFILL = (512, 2048)
DECODE = (1, 4, 8, 16, 32)
CONTEXT = 256
STEP_TOKENS = 512
LIMIT = 15.0  # percent
ROOM = 64  # tokens that a sequence of the contender may grow
SEATS, ANSWERS, PROMPT = 8, 32, 64  # of the batching part
WARM_S = 1.5  # more than the gauges look back
NEVER_ENDS = 1800  # tokens


@dataclass
class Gauges:
    """What one scrape says of the roofline."""

    flops: float
    bandwidth: float
    intensity: float
    peak_flops: float
    peak_bytes: float

    @classmethod
    def of(cls, page: Page) -> Gauges:
        return cls(
            page.value("baton_model_flops_utilization_ratio"),
            page.value("baton_memory_bandwidth_utilization_ratio"),
            page.value("baton_arithmetic_intensity"),
            page.value("baton_roofline_peak_flops"),
            page.value("baton_roofline_peak_bytes_per_second"),
        )

    @property
    def roof(self) -> float:
        """Of the roof that is nearer."""
        return max(self.flops, self.bandwidth)


@dataclass
class Row:
    """One case, a round each."""

    case: Case
    gauges: list[Gauges] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)  # the benchmark's

    def share(self, timing: Timing, shape: Shape, ceilings: Ceilings) -> float:
        """The benchmark's."""
        if self.case.batch:
            roof_s = decode_roof_s(shape, self.case.batch, timing.context, ceilings)
            return roof_s / timing.seconds
        return prefill_share(shape, self.case.tokens, timing.seconds, ceilings)

    def shares(self, shape: Shape, ceilings: Ceilings) -> list[float]:
        """Of all rounds."""
        return [self.share(timing, shape, ceilings) for timing in self.timings]

    def off(self, shares: list[float]) -> float:
        """Percent by which the gauge is from the benchmark: the median."""
        pairs = zip(self.gauges, shares, strict=True)
        return statistics.median(100 * (gauge.roof / share - 1) for gauge, share in pairs)

    def cells(self, shares: list[float]) -> list[str]:
        """Of a table."""

        def middle(name: str) -> float:
            return statistics.median(getattr(gauge, name) for gauge in self.gauges)

        return [
            str(self.case),
            f"{100 * middle('flops'):.0f} %",
            f"{100 * middle('bandwidth'):.0f} %",
            f"{middle('intensity'):.1f}",
            f"{100 * statistics.median(shares):.0f} %",
            f"{self.off(shares):+.1f} %",
        ]


class Client:
    """A router of one worker: sends what the benchmark wants computed."""

    def __init__(self, worker: Worker, vocab: int) -> None:
        self.worker = worker
        self.vocab = vocab
        self._names = count(1)
        self._random = random.Random(7)
        self._tokens: dict[bytes, int] = {}
        self._ends: dict[bytes, asyncio.Future[None]] = {}
        self._moved = asyncio.Event()
        self.link: Link

    async def connect(self) -> None:
        card = self.worker.card
        assert card is not None
        self.link = await connect_worker(
            card.host, card.port, card.worker_id, card.epoch, "bench", 1, SECRET, (),
            self._receive, lambda link: None,
        )  # fmt: skip

    def _receive(self, link: Link, message: wire.Message) -> None:
        match message:
            case wire.Tokens(request=request, finish=finish):
                self._tokens[request] += 1
                self._moved.set()
                if finish:
                    self._ends[request].set_result(None)
            case wire.Prefilled(request=request):
                self._ends[request].set_result(None)
            case wire.Failed(request=request, kind="aborted"):
                self._ends[request].set_result(None)
            case wire.Failed(request=request):
                self._ends[request].set_exception(RuntimeError(message.message))

    def send(self, prompt: int, max_tokens: int) -> bytes:
        """A prompt of random tokens, which no cache knows; 1 token: nothing but its prefill."""
        request = next(self._names).to_bytes(16, "big")
        ids = pack_ids([self._random.randrange(self.vocab) for _ in range(prompt)])
        sampling = wire.Sampling(max_tokens=max_tokens, temperature=0.0)
        self._tokens[request] = 0
        self._ends[request] = asyncio.get_running_loop().create_future()
        if max_tokens == 1:
            self.link.send(wire.Prefill(request, 0, ids, prompt, sampling, export=False))
        else:
            self.link.send(wire.Decode(request, 0, ids, prompt, sampling))
        return request

    async def end(self, *requests: bytes) -> None:
        for request in requests:
            await self._ends[request]

    async def all_decode(self, requests: Sequence[bytes]) -> None:
        """Until each has a token: from then on there are no prompts in a step."""
        while not all(self._tokens[request] for request in requests):
            self._moved.clear()
            await self._moved.wait()

    def num_tokens(self, request: bytes) -> int:
        return self._tokens[request]

    async def abort(self, requests: Sequence[bytes]) -> None:
        for request in requests:
            self.link.send(wire.Abort(request, 0))
        await self.end(*requests)

    async def page(self) -> Page:
        card = self.worker.card
        assert card is not None
        return await asyncio.to_thread(scrape, card.host, card.metrics_port)


@asynccontextmanager
async def running(role: str, setup: Setup, num_tokens: int) -> AsyncIterator[Client]:
    """A worker of that role with room for so many tokens."""
    engine = EngineConfig(
        kv_blocks=num_tokens // EngineConfig.block_size + 2 * DECODE[-1],
        max_model_len=max(PREFILL) + ROOM,
        max_num_seqs=DECODE[-1],
        token_budget=STEP_TOKENS,
        chunk_budget=STEP_TOKENS,
        threads=setup.threads,
        dtype="float32",
        weights_dtype="float32",
        device="cpu",
    )
    settings = WorkerSettings(
        worker_id=f"{role}-bench",
        role=role,
        model_dir=str(setup.folder),
        served_model="bench",
        weights="bench",
        host="127.0.0.1",
        transport="memory",
        secret=SECRET,
        lease_s=30.0,
        net_devices="lo",
        engine=engine,
    )
    worker = Worker(settings)
    await worker.start()
    client = Client(worker, setup.config["vocab_size"])
    try:
        await client.connect()
        yield client
    finally:
        await worker.close()


async def prefill_gauges(client: Client, case: Case) -> Gauges:
    """One prompt after the other, for as long as the gauges look back."""
    until = time.monotonic() + RECENT_S + WARM_S
    while time.monotonic() < until:
        await client.end(client.send(case.tokens, 1))
    return Gauges.of(await client.page())


async def decode_gauges(client: Client, case: Case) -> tuple[Gauges, int]:
    """The same, of a batch; and the context in the middle of that time."""
    requests = [client.send(case.tokens, NEVER_ENDS) for _ in range(case.batch)]
    await client.all_decode(requests)
    await asyncio.sleep(WARM_S)
    before = client.num_tokens(requests[0])
    await asyncio.sleep(RECENT_S)
    page, after = await client.page(), client.num_tokens(requests[0])
    assert page.values("baton_engine_requests", "state") == {"running": case.batch}
    await client.abort(requests)
    return Gauges.of(page), case.tokens + (before + after) // 2


async def measure(
    row: Row, prefill: Client, decode: Client, baton: Baton, machine: Machine, shape: Shape
) -> None:
    """The worker, then the contender, so that the latter has the former's context."""
    await asyncio.to_thread(machine)
    if row.case.batch:
        gauges, context = await decode_gauges(decode, row.case)
        timing = await asyncio.to_thread(baton.decode, row.case.batch, context)
    else:
        gauges = await prefill_gauges(prefill, row.case)
        timing = await asyncio.to_thread(baton.prefill, baton.engine, row.case.tokens)
    row.gauges.append(gauges)
    row.timings.append(timing)
    share = row.share(timing, shape, middle_ceilings(machine))
    say(f"{row.case!s:<18} gauge {100 * gauges.roof:5.1f} %   benchmark {100 * share:5.1f} %")


def middle_ceilings(machine: Machine) -> Ceilings:
    """The best form of each kind, by the middle of all looks."""
    forms = {name: statistics.median(rates) for name, rates in machine.forms.items()}
    products = max(forms[name] for name in machine.products)
    return Ceilings(products, max(forms[name] for name in machine.reads))


# --- static and continuous batches ----------------------------------------------------------------


async def answer(client: Client, lengths: Sequence[int], static: bool) -> None:
    """All of these answers, ``SEATS`` at once: the next when any has ended, or when all have."""
    if static:
        for first in range(0, len(lengths), SEATS):
            group = lengths[first : first + SEATS]
            await client.end(*[client.send(PROMPT, length) for length in group])
        return
    left = iter(lengths)

    async def seat() -> None:
        for length in left:
            await client.end(client.send(PROMPT, length))

    await asyncio.gather(*(seat() for _ in range(SEATS)))


async def batching(client: Client, static: bool) -> list[str]:
    """A table's row, from the counters before and after."""
    lengths = random.Random(3).choices(range(8, 160), k=ANSWERS)
    before, began = await client.page(), time.monotonic()
    await answer(client, lengths, static)
    after, took = await client.page(), time.monotonic() - began

    def more(name: str, **labels: str) -> float:
        return after.value(name, **labels) - before.value(name, **labels)

    busy = more("baton_engine_busy_seconds_total")
    seats = more("baton_engine_batch_size_sum") / more("baton_engine_batch_size_count")
    tokens = more("baton_engine_tokens_total", kind="generated")
    flops, num_bytes = more("baton_engine_flops_total"), more("baton_engine_bytes_total")
    return [
        "static" if static else "continuous",
        f"{tokens / took:.0f}",
        f"{100 * (1 - seats / SEATS):.0f} %",
        f"{100 * more('baton_engine_idle_seconds_total') / took:.1f} %",
        f"{100 * flops / busy / after.value('baton_roofline_peak_flops'):.0f} %",
        f"{100 * num_bytes / busy / after.value('baton_roofline_peak_bytes_per_second'):.0f} %",
        f"{flops / num_bytes:.1f}",
    ]


# --- all of it ------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    flags.add_argument("--model", default=DEFAULT_MODEL, help="alias, folder or GGUF file")
    flags.add_argument("--rounds", type=int, default=5)
    # As a deployment's two workers share the cores. With all of them, the worker's own event loop
    # and this client take some from the engine, as they do not from the benchmark's.
    flags.add_argument("--threads", type=int, default=max(1, cores // 2))
    return flags


async def run(args: argparse.Namespace) -> int:
    """The exit status."""
    folder = fetch(args.model, report=say)
    shutil.rmtree(cache_dir() / "ceilings", ignore_errors=True)  # of which nobody knows the hour
    setup = Setup(folder, args.threads, DECODE[-1], max(PREFILL) + ROOM)
    shape = Shape.of(setup.config)
    rows = [Row(Case(tokens)) for tokens in PREFILL]
    rows += [Row(Case(CONTEXT, batch)) for batch in DECODE]
    baton, machine = Baton(setup, "float32", STEP_TOKENS), Machine(shape, setup.threads)
    tables: list[list[str]] = []
    async with (
        running("prefill", setup, 2 * max(PREFILL)) as prefill,
        running("decode", setup, DECODE[-1] * 1024) as decode,
    ):
        for number in range(args.rounds):
            say(f"round {number + 1}/{args.rounds}")
            for row in rows:
                await measure(row, prefill, decode, baton, machine, shape)
        tables += [await batching(decode, static) for static in (True, False)]
    goals = report(args, rows, shape, middle_ceilings(machine), tables)
    return 1 if any(goal.missed for goal in goals) else 0


def report(
    args: argparse.Namespace,
    rows: list[Row],
    shape: Shape,
    best: Ceilings,
    batches: list[list[str]],
) -> list[Target]:
    """Print all tables; what was to be reached."""
    one = rows[0].gauges[0]
    shares = [row.shares(shape, best) for row in rows]
    head = ["ceiling", "the worker's", "the benchmark's", "unit"]
    ceilings = [
        ["products", f"{one.peak_flops / 1e9:.1f}", f"{best.flops_s / 1e9:.1f}", "GFLOP/s"],
        ["memory", f"{one.peak_bytes / 1e9:.1f}", f"{best.bytes_s / 1e9:.1f}", "GB/s"],
    ]
    print(f"{args.rounds} rounds of {args.model}, {args.threads} threads\n")
    print(bench.table(head, ceilings), "\n")
    head = ["case", "FLOPs gauge", "bandwidth gauge", "FLOP/byte", "bench-engine", "off"]
    print(bench.table(head, [row.cells(s) for row, s in zip(rows, shares, strict=True)]), "\n")
    head = ["batches", "tokens/s", "empty seats", "idle time", "FLOPs", "bandwidth", "FLOP/byte"]
    print(bench.table(head, batches), "\n")
    goals = [
        Target(f"{row.case}, off by", abs(row.off(s)), LIMIT, at_most=True, unit=" %")
        for row, s in zip(rows, shares, strict=True)
    ]
    print(bench.target_table(goals))
    return goals


def main() -> int:
    """The exit status."""
    return asyncio.run(run(parser().parse_args()))


if __name__ == "__main__":
    sys.exit(main())
