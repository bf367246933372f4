"""``make bench-observability``: what metrics, traces off, and the open console cost of throughput.

Two servers of the same kind, by turns under the same load, so that a machine that changes its speed
changes both. The one is read by a scraper of all its metrics ports every five seconds, vLLM's
names included, and by two open consoles; the other one's observing code does nothing at all
(:mod:`tests.support.unwatched_baton`). Each is ``baton local``: router and workers share one
interpreter there, so whatever any of them notes holds up all. Needs an idle machine. Status 1 when
the median cost is 2 % of tokens per second or more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import psutil

from tests.support import local_baton, unwatched_baton
from tests.support.scrape import scrape
from tests.support.serving import Served, served

LIMIT = 0.02
STREAMS, PROMPT = 16, 64
VOCAB = 49152
SCRAPE_EVERY_S = 5.0  # as deploy/observability/prometheus.yaml has it
CONSOLES = 2
FLAGS = ("--max-model-len", "512", "--kv-blocks", "512", "--threads", "1")


# --- who watches ---------------------------------------------------------------------------------


@contextlib.contextmanager
def watchers(server: Served) -> Iterator[dict[str, int]]:
    """Scraper and consoles until the block ends, and what they have read so far."""
    stop = threading.Event()
    seen = {"scrapes": 0, "events": 0}

    def scraper() -> None:
        while True:
            for group in server.get("/internal/prometheus/targets")[1]:
                for target in group["targets"]:
                    with urlopen(f"http://{target}/metrics", timeout=10) as page:
                        assert b"baton_" in page.read()
                    seen["scrapes"] += 1
            if stop.wait(SCRAPE_EVERY_S):
                return

    def console() -> None:
        with urlopen(f"{server.url}/internal/events", timeout=30) as events:
            for line in events:
                seen["events"] += line.startswith(b"event:")
                if stop.is_set():
                    return

    threads = [threading.Thread(target=each) for each in (scraper, *[console] * CONSOLES)]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        stop.set()
        for thread in threads:
            thread.join()


# --- the load ------------------------------------------------------------------------------------


class Side:
    """One of the two servers."""

    def __init__(self, name: str, server: Served) -> None:
        self.name, self.server = name, server
        self.rates: list[float] = []  # tokens per second, a round each
        self.cpu_ms: list[float] = []  # of the server, per token
        self._process = psutil.Process(server.process.pid)

    def measure(self, prompts: list[list[int]], num_tokens: int) -> None:
        """All prompts, so many at a time."""
        before, started = self._cpu_s(), time.monotonic()
        calls: list[Callable[[], int]] = [
            partial(answer, self.server, prompt, num_tokens) for prompt in prompts
        ]
        tokens = sum(self.server.at_once(calls, in_flight=STREAMS))
        seconds = time.monotonic() - started
        assert tokens == len(prompts) * num_tokens
        self.rates.append(tokens / seconds)
        self.cpu_ms.append(1000 * (self._cpu_s() - before) / tokens)

    def counted(self) -> float:
        """Generated tokens, by its own metrics."""
        address = urlsplit(self.server.url)
        page = scrape(str(address.hostname), int(address.port or 80))
        return float(page.value("baton_generated_tokens_total"))

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
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--requests", type=int, default=32, help="of each side in a round")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    args, flags = parser.parse_known_args()
    plain = (*local_baton.COMMAND, "serve")
    with (
        served(*FLAGS, "--metrics-compat", "vllm", *flags, program=plain) as first,
        served(*FLAGS, *flags, program=unwatched_baton.COMMAND) as second,
    ):
        watched, bare = Side("watched", first), Side("not", second)
        for side in (watched, bare):
            side.measure(prompts_of(0, STREAMS), 8)  # warms up
            side.rates.clear()
            side.cpu_ms.clear()
        for run in range(1, args.rounds + 1):
            prompts = prompts_of(run, args.requests)
            for side in (watched, bare) if run % 2 else (bare, watched):
                if side is bare:
                    side.measure(prompts, args.tokens)
                    continue
                with watchers(side.server) as saw:
                    side.measure(prompts, args.tokens)
                assert saw["scrapes"] >= 3, saw
                assert saw["events"] >= CONSOLES, saw
            print(
                f"round {run}: {watched.rates[-1]:6.1f} tokens/s watched, {bare.rates[-1]:6.1f} not"
                f", ratio {watched.rates[-1] / bare.rates[-1]:.3f}",
                flush=True,
            )
        asked = STREAMS * 8 + args.rounds * args.requests * args.tokens
        assert (watched.counted(), bare.counted()) == (asked, 0), "one side is not what it claims"
    return 0 if report(watched, bare) < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
