"""``make soak SECONDS=600``: steady mixed load on a real server; does anything grow, leak or fail?

Starts ``baton serve`` itself (flags that are not its own are passed on), keeps a bounded number of
requests in flight, of random kind, length and sampling, some of them abandoned by their client, and
samples resident memory and open files of every process of the server. Ends with a table and a
verdict: status 1 if a request failed, a process was replaced, the router is too large, blocks are
missing at the end, or a process grows.
"""

import argparse
import random
import statistics
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil

from tests.support.serving import Client, Served, served

SIZES = ("--max-model-len", "2048", "--kv-blocks", "400")
VOCAB = 49152
ROUTER_LIMIT_BYTES = 300e6
SAMPLE_EVERY_S = 2.0
REPORT_EVERY_S = 10.0
MIB = 2**20
# What counts as growth, over the second half of the run by its straight line: this share of the
# process's memory and this much, and by so many standard errors. Allocators move by less.
GROWTH_SHARE = 0.05
GROWTH_BYTES = 4 * MIB
GROWTH_ERRORS = 3
MORE_FILES = 20
CAPITAL = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
}


# --- load ----------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What came of the requests, from all threads."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, **counts: int) -> None:
        """Add to the counters."""
        with self.lock:
            self.counts.update(counts)

    def fail(self, what: str) -> None:
        """A request that should have been answered was not, or not rightly."""
        with self.lock:
            self.counts["failed"] += 1
            self.failures.append(what)


class Load:
    """Threads that send one request after the other until told to stop."""

    def __init__(self, client: Client, num_clients: int, seed: int) -> None:
        self.tally = Tally()
        self._client = client
        self._stop = threading.Event()
        chance = random.Random(seed)
        self._prefixes = [[chance.randrange(VOCAB) for _ in range(64)] for _ in range(4)]
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(f"{seed} {i}"),))
            for i in range(num_clients)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Wait until the requests that are under way have ended."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, chance: random.Random) -> None:
        kinds: list[tuple[Callable[[random.Random], None], int]] = [
            (self._stream, 40),
            (self._whole, 35),
            (self._leave, 20),
            (self._capital, 5),
        ]
        actions, weights = zip(*kinds, strict=True)
        while not self._stop.is_set():
            (action,) = chance.choices(actions, weights)
            try:
                action(chance)
            except Exception as error:  # whatever it is, it is what this run is made to find
                self.tally.fail(f"{action.__name__}: {error!r}")
                self._stop.wait(1)  # a server that is gone is not asked a thousand times

    def _body(self, chance: random.Random) -> dict[str, Any]:
        prompt = [chance.randrange(VOCAB) for _ in range(_log_uniform(chance, 1, 600))]
        if chance.random() < 0.3:
            prompt = chance.choice(self._prefixes) + prompt
        return {
            "prompt": prompt,
            "max_tokens": _log_uniform(chance, 1, 64),
            "ignore_eos": True,
            "temperature": chance.choice([0, 0.8, 1.0]),
            "top_p": chance.choice([1.0, 0.9]),
        }

    def _stream(self, chance: random.Random) -> None:
        body = self._body(chance) | {"stream_options": {"include_usage": True}}
        finish, usage = None, None
        for chunk in self._client.stream("/v1/completions", body):
            if "error" in chunk:
                raise AssertionError(chunk["error"])
            usage = chunk["usage"] or usage
            for choice in chunk["choices"]:
                finish = choice["finish_reason"] or finish
        self._check(body, finish, usage)

    def _whole(self, chance: random.Random) -> None:
        body = self._body(chance)
        answer = self._client.post("/v1/completions", body)
        self._check(body, answer["choices"][0]["finish_reason"], answer["usage"])

    def _check(self, body: dict[str, Any], finish: str | None, usage: Any) -> None:
        wanted = (len(body["prompt"]), body["max_tokens"])
        got = (usage["prompt_tokens"], usage["completion_tokens"])
        assert (finish, got) == ("length", wanted), f"{finish}, {got} instead of {wanted} tokens"
        self.tally.add(answered=1, tokens=body["max_tokens"])

    def _leave(self, chance: random.Random) -> None:
        """A stream whose client goes away after some tokens, before or after the first."""
        body = self._body(chance) | {"max_tokens": 500}
        chunks = self._client.stream("/v1/completions", body)
        for _ in range(_log_uniform(chance, 1, 30)):
            next(chunks)
        chunks.close()  # type: ignore[attr-defined]  # closes the connection
        self.tally.add(abandoned=1)

    def _capital(self, chance: random.Random) -> None:
        answer = self._client.post("/v1/chat/completions", CAPITAL)
        content = answer["choices"][0]["message"]["content"]
        assert content == "The capital of France is Paris.", content
        self.tally.add(answered=1, tokens=8)


def _log_uniform(chance: random.Random, low: int, high: int) -> int:
    """Small numbers as often as large ones."""
    return round(low * (high / low) ** chance.random())


# --- memory --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """One look at one process."""

    at: float  # seconds since the load began
    rss: int  # bytes
    files: int


def look(server: Served, started: float) -> Iterator[tuple[tuple[str, int], Sample]]:
    """A sample of each process of the server, by (role, pid)."""
    front = psutil.Process(server.process.pid)
    for process in [front, *front.children(recursive=True)]:
        try:
            with process.oneshot():
                role = process.name().removeprefix("ray::").removeprefix("ServeReplica:baton:")
                role = role.partition(".")[0]  # of an actor: its class, without what it does now
                if role.startswith("python"):
                    role = next((a for a in process.cmdline()[1:] if a.endswith(".py")), role)
                rss, files = process.memory_info().rss, process.num_fds()
        except psutil.NoSuchProcess:
            continue
        name = (role.rpartition("/")[2], process.pid)
        yield name, Sample(time.monotonic() - started, rss, files)


@dataclass(frozen=True)
class Trend:
    """How the memory of a process has moved."""

    first: Sample
    last: Sample
    slope: float  # bytes per second over the second half, by least squares
    error: float  # its standard error
    span_s: float  # of the second half

    @property
    def grows(self) -> bool:
        grown = self.slope * self.span_s
        least = max(GROWTH_SHARE * self.last.rss, GROWTH_BYTES)
        return grown > least and self.slope > GROWTH_ERRORS * self.error


def trend(samples: list[Sample]) -> Trend:
    """The straight line through the second half of the samples."""
    half = [s for s in samples if s.at >= (samples[0].at + samples[-1].at) / 2]
    slope = error = 0.0
    if len(half) > 2:
        times, sizes = [s.at for s in half], [float(s.rss) for s in half]
        slope, intercept = statistics.linear_regression(times, sizes)
        residuals = [y - intercept - slope * x for x, y in zip(times, sizes, strict=True)]
        variance = sum(r * r for r in residuals) / (len(half) - 2)
        error = (variance / (statistics.pvariance(times) * len(half))) ** 0.5
    return Trend(samples[0], samples[-1], slope, error, half[-1].at - half[0].at)


def table(trends: dict[tuple[str, int], Trend]) -> str:
    """One line per process, the largest first."""
    lines = [
        f"{'process':<24}{'pid':>8}{'RSS start':>11}{'end MiB':>9}"
        f"{'slope MB/h':>13}{'± error':>10}{'files':>12}"
    ]
    for (role, pid), t in sorted(trends.items(), key=lambda item: -item[1].last.rss):
        lines.append(
            f"{role[:23]:<24}{pid:>8}{t.first.rss / MIB:>11.1f}{t.last.rss / MIB:>9.1f}"
            f"{t.slope * 3600 / 1e6:>13.1f}{t.error * 3600 / 1e6:>10.1f}"
            f"{f'{t.first.files} → {t.last.files}':>12}{'  grows' if t.grows else ''}"
        )
    return "\n".join(lines)


# --- the run -------------------------------------------------------------------------------------


def incarnations(client: Client) -> set[tuple[str, int]]:
    """Workers and router, each of a name that is never used again."""
    _, state = client.get("/internal/state")
    return {(w["id"], w["epoch"]) for w in state["workers"]} | {(state["router"], 0)}


def problems_at_the_end(
    server: Served, before: set[tuple[str, int]], trends: dict[tuple[str, int], Trend]
) -> Iterator[str]:
    """What must not be, once the load has ended."""
    try:
        workers = server.idle_workers()
    except AssertionError as error:
        yield f"something is still held: {error}"
        return
    for worker in workers:
        blocks = worker["blocks"]
        if blocks["free"] + blocks["cached"] != worker["kv_blocks"] - 1:
            yield f"{worker['id']} has lost blocks: {blocks} of {worker['kv_blocks']}"
        if worker["failed_pulls"] or worker["expired_leases"]:
            failed, expired = worker["failed_pulls"], worker["expired_leases"]
            yield f"{worker['id']}: {failed} pulls failed, {expired} leases ran out"
    now = incarnations(server)
    if now != before:
        yield f"processes were replaced: {sorted(before - now)} by {sorted(now - before)}"
    for (role, pid), t in trends.items():
        if t.grows:
            yield f"{role} ({pid}) grows"
        if t.last.files > t.first.files + MORE_FILES:
            yield f"{role} ({pid}) had {t.first.files} open files and has {t.last.files}"
        if role == "Router" and t.last.rss > ROUTER_LIMIT_BYTES:
            yield f"the router has {t.last.rss / 1e6:.0f} MB"


def soak(server: Served, seconds: float, num_clients: int, seed: int) -> list[str]:
    """Load it for so long, printing progress; what was wrong."""
    before = incarnations(server)
    samples: dict[tuple[str, int], list[Sample]] = defaultdict(list)
    started = time.monotonic()
    load = Load(server, num_clients, seed)
    pause = threading.Event()
    reported = 0.0
    try:
        while (elapsed := time.monotonic() - started) < seconds:
            for name, sample in look(server, started):
                samples[name].append(sample)
            if elapsed - reported >= REPORT_EVERY_S:
                reported = elapsed
                print(progress(elapsed, load.tally, samples), flush=True)
            pause.wait(min(SAMPLE_EVERY_S, seconds - elapsed))
    finally:
        load.stop()
    for name, sample in look(server, started):
        samples[name].append(sample)
    trends = {name: trend(values) for name, values in samples.items() if len(values) > 2}
    print(f"\n{progress(time.monotonic() - started, load.tally, samples)}\n\n{table(trends)}\n")
    counts = load.tally.counts
    found = [f"request failed: {failure}" for failure in load.tally.failures[:10]]
    if counts["failed"] > len(found):
        found.append(f"... {counts['failed']} requests failed in all")
    if not counts["answered"]:
        found.append("no request was answered")
    return found + list(problems_at_the_end(server, before, trends))


def progress(elapsed: float, tally: Tally, samples: dict[tuple[str, int], list[Sample]]) -> str:
    """One line."""
    counts = tally.counts
    replicas = ("Router", "PrefillWorker", "DecodeWorker", "MixedWorker")
    sizes = [
        f"{role} {values[-1].rss / MIB:.0f}"
        for (role, _), values in samples.items()
        if role in replicas
    ]
    return (
        f"{elapsed:6.0f} s  {counts['answered']} answered, {counts['abandoned']} abandoned,"
        f" {counts['failed']} failed, {counts['tokens'] / elapsed:.1f} tokens/s"
        f"  MiB: {', '.join(sizes)}"
    )


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=6, help="requests in flight")
    parser.add_argument("--seed", type=int, default=1)
    args, flags = parser.parse_known_args()
    with served(*SIZES, *flags) as server:
        print(server.text, flush=True)
        found = soak(server, args.seconds, args.clients, args.seed)
    for problem in found:
        print(f"problem: {problem}")
    print("FAILED" if found else "ok: nothing failed, leaked or grew")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
