"""``make bench-tools``: our load test and ``vllm bench serve`` measure the same server the same.

Both send the same workload in turns, rounds long: as many requests at the same regular intervals
to the same endpoint, prompts and answers as long, the prompts new in each run, so that no run finds
the one's before in a prefix cache. First to a stub server whose delays are fixed, where medians of
TTFT and TPOT agree within 3 %; then to a live ``baton serve``, where they agree within the tools'
own spread from round to round. What is compared are the figures that each tool itself prints. The
tool gets an environment of its own, once. Needs an idle machine. Status 1 when they disagree.

Known: ``vllm bench serve`` has aiohttp look for proxies and a ``.netrc`` before each request, in
another thread, while the request's clock runs: 1 to 2 ms of each of its TTFTs (on two busy cores)
are its own. The stub's log tells, and so does its first delay, which is long enough for 3 % not to
be about that.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loadtest.client import Client, ClientOptions
from loadtest.conversation import Conversation, Turn
from loadtest.event_loop import new_event_loop
from loadtest.figures import Summary, summarize
from loadtest.runner import run
from loadtest.writer import WordWriter
from services.fetch import DEFAULT_MODEL, fetch, public_name
from tests.support import vllm_bench
from tests.support.agreement import Medians, compare, table
from tests.support.bench import say, write_between
from tests.support.serving import served
from tests.support.stub_server import Seen, running_stub
from tests.support.vllm_bench import Ask

MARK = "bench-tools"
OTHER = f"vllm bench serve {vllm_bench.version()}"
STUB_SHARE = 0.03
STUB_TTFT_MS, STUB_ITL_MS = 200, 10


@dataclass(frozen=True)
class Load:
    """What both tools send in each round; lengths are uniform between two numbers of tokens."""

    count: int
    rate: float  # requests/s, at regular intervals
    inputs: tuple[int, int]
    outputs: tuple[int, int]

    def __str__(self) -> str:
        return (
            f"{self.count} requests, {self.rate:g} a second, prompts of {self.inputs[0]} to "
            f"{self.inputs[1]} tokens, answers of {self.outputs[0]} to {self.outputs[1]}"
        )

    def asks(self, writer: WordWriter, seed: int, run_name: str) -> list[Ask]:
        """The lengths depend on ``seed`` only; the words on the run as well."""
        rng = np.random.default_rng(seed)
        inputs = rng.integers(*self.inputs, self.count, endpoint=True).tolist()
        outputs = rng.integers(*self.outputs, self.count, endpoint=True).tolist()
        return [
            Ask(writer.write((run_name, seed, i), inputs[i]), inputs[i], outputs[i])
            for i in range(self.count)
        ]


STUB_LOAD = Load(count=150, rate=10, inputs=(32, 256), outputs=(32, 64))
LIVE_LOAD = Load(count=20, rate=0.5, inputs=(64, 192), outputs=(16, 48))


@dataclass(frozen=True)
class Place:
    """Where to measure."""

    url: str
    model: str  # its name there
    tokenizer: Path  # a folder
    vllm_python: Path
    work: Path  # for files


def ours(place: Place, asks: Sequence[Ask], rate: float) -> Summary:
    """Says when the client was too late to be trusted; raises RuntimeError if a request fails."""
    conversations = [
        Conversation(i / rate, "all", (Turn(ask.prompt, ask.num_tokens, ask.max_tokens),))
        for i, ask in enumerate(asks)
    ]
    options = ClientOptions(place.url, model=place.model, endpoint="completions")

    async def load() -> Summary:
        async with Client(options) as client:
            return summarize(await run(conversations, client), {})

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        summary = runner.run(load())
    total = summary.total
    if total.num_ok != len(asks):
        raise RuntimeError(
            f"our load test: {total.num_ok} of {len(asks)} requests ended, {dict(total.errors)}"
        )
    if total.output_tokens != sum(ask.max_tokens for ask in asks):
        raise RuntimeError(f"answers of {total.output_tokens} tokens in all are not as asked for")
    if summary.spoiled:
        say(summary.spoiled)
    return summary


def medians(summary: Summary) -> Medians:
    """Of a run of ours."""
    total = summary.total
    return Medians(total.ttft.p50, total.tpot.p50, total.itl.p50, total.e2e.p50)


def measure(
    place: Place, load: Load, rounds: int, seed: int
) -> tuple[list[Medians], list[Medians]]:
    """Both tools by turns, and the other one first in each second round: ours, theirs."""
    writer = WordWriter.from_tokenizer(place.tokenizer / "tokenizer.json")
    found: dict[str, list[Medians]] = {"ours": [], "theirs": []}
    for index in range(rounds):
        for who in ("ours", "theirs") if index % 2 == 0 else ("theirs", "ours"):
            asks = load.asks(writer, seed, f"{who} {index}")
            if who == "ours":
                seen = medians(ours(place, asks, load.rate))
            else:
                seen = vllm_bench.run(
                    place.vllm_python,
                    place.url,
                    place.model,
                    place.tokenizer,
                    asks,
                    load.rate,
                    place.work,
                )
            found[who].append(seen)
            say(
                f"round {index + 1} of {rounds}, {who}: TTFT {1000 * seen.ttft:.2f} ms, "
                f"TPOT {1000 * seen.tpot:.2f} ms"
            )
    return found["ours"], found["theirs"]


@contextlib.contextmanager
def place_at(url: str, model: str, tokenizer: Path, python: Path) -> Iterator[Place]:
    """With a folder for files until the block ends."""
    with tempfile.TemporaryDirectory(prefix="bench-tools-") as work:
        yield Place(url, model, tokenizer, python, Path(work))


def against_stub(tokenizer: Path, python: Path, load: Load, rounds: int, seed: int) -> Part:
    """Fixed delays."""
    with (
        running_stub(ttft_ms=STUB_TTFT_MS, itl_ms=STUB_ITL_MS, model="stub") as stub,
        place_at(stub.url, "stub", tokenizer, python) as place,
    ):
        found = measure(place, load, rounds, seed)
        ttft, tpot = own_medians(stub.requests())
    heading = (
        f"A stub, {STUB_TTFT_MS} ms to the first chunk, {STUB_ITL_MS} ms to the next (by its own "
        f"log {1000 * ttft:.2f} and {1000 * tpot:.2f} ms): {load}"
    )
    return Part(heading, *found, STUB_SHARE)


def own_medians(log: Sequence[Seen]) -> tuple[float, float]:
    """TTFT and TPOT as the stub kept them, in seconds from a request's arrival."""
    ttft = statistics.median(seen.sent_s[0] - seen.arrived_s for seen in log)
    tpot = statistics.median(
        (seen.sent_s[-1] - seen.sent_s[0]) / (seen.max_tokens - 1) for seen in log
    )
    return ttft, tpot


def against_live(model: str, python: Path, load: Load, rounds: int, seed: int) -> Part:
    """A deployment of its own, which both are the only ones to use."""
    tokenizer = fetch(model, report=say)
    with (
        served("--model", model) as server,
        place_at(server.url, public_name(model), tokenizer, python) as place,
    ):
        writer = WordWriter.from_tokenizer(tokenizer / "tokenizer.json")
        warm = Load(5, load.rate, load.inputs, load.outputs)
        ours(place, warm.asks(writer, seed, "warm-up"), load.rate)
        found = measure(place, load, rounds, seed)
    return Part(f"`baton serve --model {model}`: {load}", *found, None)


@dataclass(frozen=True)
class Part:
    """What was measured at one server."""

    heading: str
    ours: list[Medians]
    theirs: list[Medians]
    share: float | None  # rule of the judgement, as in tests.support.agreement

    @property
    def agrees(self) -> bool:
        return all(it.agrees for it in compare(self.ours, self.theirs, self.share) if it.judged)

    def __str__(self) -> str:
        rule = (
            f"within {100 * self.share:g} %"
            if self.share
            else "no further apart than half of both ranges over the rounds"
        )
        rows = table(compare(self.ours, self.theirs, self.share), OTHER)
        return f"{self.heading}. Milliseconds; the medians over the rounds {rule}.\n\n{rows}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("stub", "live"), help="one of the two servers")
    parser.add_argument("--rounds", type=int, default=5, help="two at least (5)")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="of the live server")
    parser.add_argument("--rate", type=float, default=LIVE_LOAD.rate, help="at the live server")
    parser.add_argument("--seed", type=int, default=1, help="of lengths and prompts")
    parser.add_argument("--markdown", type=Path, help=f"page with <!-- {MARK} --> to write into")
    args = parser.parse_args(argv)
    if args.rounds < 2:
        parser.error("--rounds: a spread from round to round needs two or more")
    python = vllm_bench.environment(say)
    gc.collect()
    gc.freeze()  # what is imported is no work for the collector in the middle of a run
    parts = []
    if args.only != "live":
        tokenizer = fetch(DEFAULT_MODEL, report=say)
        parts.append(against_stub(tokenizer, python, STUB_LOAD, args.rounds, args.seed))
    if args.only != "stub":
        live = Load(LIVE_LOAD.count, args.rate, LIVE_LOAD.inputs, LIVE_LOAD.outputs)
        parts.append(against_live(args.model, python, live, args.rounds, args.seed))
    given = shlex.join(sys.argv[1:] if argv is None else argv)
    command = f"make {MARK}" + (f' ARGS="{given}"' if given else "")
    text = "\n".join([f"`{command}`, {time.strftime('%Y-%m-%d')}.", "", *map(str, parts)])
    print(text)
    if args.markdown:
        write_between(args.markdown, MARK, text)
    disagreeing = [part.heading for part in parts if not part.agrees]
    for heading in disagreeing:
        say(f"the tools do NOT agree at: {heading}")
    return 1 if disagreeing else 0


if __name__ == "__main__":
    sys.exit(main())
