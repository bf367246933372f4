"""``make bench-observability``: what metrics and the open console cost of throughput.

One server under the same load again and again, by turns with and without: with, it notes what it
does, all its metrics ports are scraped every five seconds, vLLM's names included, and two consoles
are open; without, the noting code does nothing (:mod:`tests.support.switched_baton`), and nobody
reads. It is ``baton local``: router and workers share one interpreter there, so whatever any of
them notes holds up all. Needs an idle machine. Status 1 when the median cost is 2 % of tokens per
second or more.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import psutil

from tests.support.scrape import scrape
from tests.support.serving import Served, served, until
from tests.support.switched_baton import COMMAND, OFF, ON

LIMIT = 0.02
STREAMS, PROMPT = 16, 64
VOCAB = 49152
SCRAPE_EVERY_S = 5.0  # as deploy/observability/prometheus.yaml has it
CONSOLES = 2
FLAGS = (
    "--max-model-len", "512", "--kv-blocks", "512", "--threads", "1", "--metrics-compat", "vllm",
)  # fmt: skip


# --- who watches ---------------------------------------------------------------------------------


class Watchers:
    """Scraper and consoles. They rest between two rounds, and go on where they were."""

    def __init__(self, server: Served) -> None:
        self.scrapes = self.events = 0
        self._server = server
        self._next_s = 0.0  # until the next scrape, while they watch

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Until the block ends."""
        stop = threading.Event()
        acts = (self._scrape, *[self._read_events] * CONSOLES)
        threads = [threading.Thread(target=act, args=(stop,)) for act in acts]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()

    def _scrape(self, stop: threading.Event) -> None:
        since = time.monotonic()
        while not stop.wait(max(0.0, since + self._next_s - time.monotonic())):
            for group in self._server.get("/internal/prometheus/targets")[1]:
                for target in group["targets"]:
                    with urlopen(f"http://{target}/metrics", timeout=10) as page:
                        assert b"baton_" in page.read()
                    self.scrapes += 1
            since, self._next_s = since + self._next_s, SCRAPE_EVERY_S
        self._next_s -= time.monotonic() - since

    def _read_events(self, stop: threading.Event) -> None:
        with urlopen(f"{self._server.url}/internal/events", timeout=30) as events:
            for line in events:
                self.events += line.startswith(b"event:")
                if stop.is_set():
                    return


# --- the load ------------------------------------------------------------------------------------


class Side:
    """With, or without."""

    def __init__(self, server: Served, switch: signal.Signals, watchers: Watchers | None) -> None:
        self.rates: list[float] = []  # tokens per second, a round each
        self.cpu_ms: list[float] = []  # of the server, per token
        self._server, self._switch, self._watchers = server, switch, watchers
        self._process = psutil.Process(server.process.pid)

    def measure(self, prompts: list[list[int]], num_tokens: int) -> None:
        """All prompts, so many at a time."""
        self._server.idle_workers()
        self._process.send_signal(self._switch)
        with self._watchers.watching() if self._watchers is not None else nullcontext():
            before, started = self._cpu_s(), time.monotonic()
            calls: list[Callable[[], int]] = [
                partial(answer, self._server, prompt, num_tokens) for prompt in prompts
            ]
            tokens = sum(self._server.at_once(calls, in_flight=STREAMS))
            seconds = time.monotonic() - started
            cpu_s = self._cpu_s() - before
        assert tokens == len(prompts) * num_tokens
        self.rates.append(tokens / seconds)
        self.cpu_ms.append(1000 * cpu_s / tokens)

    def _cpu_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)


def answer(server: Served, prompt: list[int], num_tokens: int) -> int:
    """Tokens of one streamed answer; its lines are not parsed, which would cost our cores."""
    body = {
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,  # a chunk for each token, also where it adds no text
        "stream": True,
    }
    headers = {"Content-Type": "application/json"}
    request = Request(server.url + "/v1/completions", json.dumps(body).encode(), headers)
    with urlopen(request, timeout=300) as stream:
        return sum(line.startswith(b"data: {") for line in stream)


def listens(server: Served) -> bool:
    """Whether it answers."""
    try:
        return server.get("/ready")[0] == 200
    except OSError:
        return False


def prompts_of(run: int, count: int) -> list[list[int]]:
    """Different in each round: no prefix is cached."""
    draw = random.Random(run)
    return [[draw.randrange(VOCAB) for _ in range(PROMPT)] for _ in range(count)]


# --- both ----------------------------------------------------------------------------------------


def interval(ratios: list[float]) -> tuple[float, float]:
    """95 % for the mean of such ratios, of twice as many standard errors of their logarithms."""
    logs = [math.log(ratio) for ratio in ratios]
    spread = 2 * statistics.stdev(logs) / math.sqrt(len(logs))
    middle = statistics.fmean(logs)
    return math.exp(middle - spread), math.exp(middle + spread)


def report(watched: Side, bare: Side) -> float:
    """Print the outcome; the share of throughput that watching costs."""
    ratios = [a / b for a, b in zip(watched.rates, bare.rates, strict=True)]
    cpu = [a / b for a, b in zip(watched.cpu_ms, bare.cpu_ms, strict=True)]
    cost = 1 - statistics.median(ratios)
    low, high = interval(ratios)
    print(
        f"\n{STREAMS} streams: median {statistics.median(watched.rates):.1f} tokens/s watched,"
        f" {statistics.median(bare.rates):.1f} not; cost {100 * cost:+.2f} %"
        f" (95 % of the mean: {100 * (1 - high):+.2f} to {100 * (1 - low):+.2f} %)"
        f"\nCPU per token: {statistics.median(watched.cpu_ms):.2f} ms watched,"
        f" {statistics.median(bare.cpu_ms):.2f} not: {100 * (statistics.median(cpu) - 1):+.2f} %"
        f"\nthe limit is {100 * LIMIT:.0f} % of tokens per second:"
        f" {'ok' if cost < LIMIT else 'FAILED'}"
    )
    return cost


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    # Many short rounds: the machine's speed changes from one ten seconds to the next.
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--requests", type=int, default=STREAMS, help="of each side in a round")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    args, flags = parser.parse_known_args()
    with served(*FLAGS, *flags, program=COMMAND) as server:
        until(lambda: listens(server), "it listens")  # it says so a moment before
        watchers = Watchers(server)
        watched, bare = Side(server, ON, watchers), Side(server, OFF, None)
        Side(server, OFF, None).measure(prompts_of(0, STREAMS), 8)  # warms up
        for run in range(1, args.rounds + 1):
            prompts = prompts_of(2 * run, args.requests), prompts_of(2 * run + 1, args.requests)
            turns = (watched, bare) if run % 2 else (bare, watched)
            for side, asked in zip(turns, prompts, strict=True):
                side.measure(asked, args.tokens)
            print(
                f"round {run}: {watched.rates[-1]:6.1f} tokens/s watched, {bare.rates[-1]:6.1f} not"
                f", ratio {watched.rates[-1] / bare.rates[-1]:.3f}",
                flush=True,
            )
        expected = args.rounds * args.requests * args.tokens
        address = urlsplit(server.url)
        page = scrape(str(address.hostname), int(address.port or 80))
        assert page.value("baton_generated_tokens_total") == expected, "it is not what it claims"
        assert watchers.scrapes >= args.rounds // 2, watchers.scrapes
        assert watchers.events >= args.rounds * CONSOLES, watchers.events
    return 0 if report(watched, bare) < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
