"""Any server that speaks OpenAI's completions, as a contender: what a client sees of it.

Prompts are random token ids, never the same twice. Prefill is the time to the first chunk of an
answer of one token. For decode, each prompt is sent once with an answer of one token, which a
server that keeps prefixes remembers; then all streams start together, and counted is the time in
which all of them run.
"""

from __future__ import annotations

import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tests.support.bench import Case, Timing

PATIENCE_S = 600.0
LENGTHS = (64, 256, 1024)  # of answers: the next when the streams did not run together for
TOGETHER = 16  # tokens each


@dataclass(frozen=True)
class Stream:
    """When each chunk came, and how many tokens there were in all."""

    times: list[float]
    tokens: int

    def between(self, start: float, end: float) -> float:
        """Tokens of that time; a chunk may hold several."""
        count = sum(start < at <= end for at in self.times)
        return count * self.tokens / len(self.times)


def rate(streams: list[Stream]) -> tuple[float, float, float]:
    """Tokens per second of all streams while all run; how many tokens of each that was; and how
    many each had in the middle of it.
    """
    start = max(stream.times[0] for stream in streams)
    end = min(stream.times[-1] for stream in streams)
    if end <= start:
        return 0.0, 0.0, 0.0
    each = [stream.between(start, end) for stream in streams]
    before = [stream.between(0.0, start) for stream in streams]
    middle = (sum(before) + sum(each) / 2) / len(streams)
    return sum(each) / (end - start), min(each), middle


class UrlPeer:
    """``url`` as far as what precedes ``/v1``."""

    weights = ""  # nobody says what they are

    def __init__(self, name: str, url: str, vocab: int, max_batch: int) -> None:
        self.name = name
        self._url = url.rstrip("/").removesuffix("/v1")
        self._vocab = vocab
        self._pool = ThreadPoolExecutor(max(1, max_batch))
        with urllib.request.urlopen(f"{self._url}/v1/models", timeout=30) as answer:
            self._model = json.load(answer)["data"][0]["id"]

    def can(self, case: Case) -> bool:
        return True

    def measure(self, case: Case) -> Timing:
        if not case.batch:
            return Timing(self.prefill(case.tokens))
        prompts = [self.prompt(case.tokens) for _ in range(case.batch)]
        for length in LENGTHS:
            list(self._pool.map(lambda ids: self.stream(ids, 1), prompts))
            begin = threading.Barrier(case.batch)

            def together(ids: list[int], length: int = length, begin: Any = begin) -> Stream:
                begin.wait(PATIENCE_S)
                return self.stream(ids, length)

            tokens_s, each, middle = rate(list(self._pool.map(together, prompts)))
            if each >= TOGETHER:
                return Timing(case.batch / tokens_s, case.tokens + middle)
        raise RuntimeError(f"{self.name}: {case.batch} streams never ran together for long enough")

    def prompt(self, count: int) -> list[int]:
        return [random.randrange(self._vocab // 2, self._vocab) for _ in range(count)]

    def prefill(self, tokens: int) -> float:
        ids = self.prompt(tokens)
        began = time.monotonic()
        return self.stream(ids, 1).times[0] - began

    def stream(self, ids: list[int], num_tokens: int) -> Stream:
        """One completion of exactly ``num_tokens``, as far as the server can be told so."""
        body = {
            "model": self._model,
            "prompt": ids,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        times, tokens = [], 0
        for at, chunk in self.chunks(body):
            if chunk.get("choices"):
                times.append(at)
            tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
        if not times:
            raise RuntimeError(f"{self.name} streamed nothing")
        return Stream(times, tokens or len(times))

    def chunks(self, body: dict[str, Any]) -> Iterator[tuple[float, dict[str, Any]]]:
        headers = {"Content-Type": "application/json"}
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}/v1/completions", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                for line in answer:
                    at, text = time.monotonic(), line.decode().strip().removeprefix("data:").strip()
                    if text.startswith("{"):
                        yield at, json.loads(text)
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(500).decode(errors="replace")
            raise RuntimeError(f"{self.name} answered {error.code}: {said}") from error
