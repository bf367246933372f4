"""``make bench-step``: what a step costs outside the model: all of ``Engine.step`` but the layers.

A batch of sequences decodes with a stub for a model, which plans attention as a real one does and
whose logits were made before, shaped like those of a language model. Shown are the medians of many
steps, in microseconds, by part. Needs an idle machine. Status 1 when a step takes longer than 2 ms.
"""

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvtransfer.layout import KVLayout
from kvtransfer.region import Region
from services.engine import runner as runner_module
from services.engine.config import EngineConfig
from services.engine.engine import Engine
from services.engine.paged_attention import PagedAttention
from services.engine.runner import ModelRunner
from services.engine.sequence import SamplingParams

BATCH = 32
BLOCK = 16
LIMIT_US = 2000
PARAMS = {
    "greedy": SamplingParams(max_tokens=100_000, temperature=0.0),
    "top-p 0.95": SamplingParams(max_tokens=100_000, temperature=0.8, top_p=0.95, seed=7),
    "top-k 50": SamplingParams(max_tokens=100_000, temperature=0.8, top_k=50, seed=7),
    "untruncated": SamplingParams(max_tokens=100_000, temperature=1.0, seed=7),
}


class StubModel:
    """Does nothing in no time; its logits were made before."""

    def __init__(self, logits: list[Tensor]) -> None:
        self._logits = logits
        self._step = 0
        self.plan = PagedAttention(num_heads=9, num_kv_heads=3, head_dim=64).plan

    def forward(self, ids: Tensor, *_: Any) -> Tensor:
        return torch.zeros(len(ids), 1)

    def logits(self, hidden: Tensor) -> Tensor:
        self._step += 1
        return self._logits[self._step % len(self._logits)][: len(hidden)]


def language_logits(vocab: int, seed: int) -> Tensor:
    """float32 ``[BATCH, vocab]``, like those of the default model at a temperature of 0.8: the best
    token has 0.6 of the mass in the median row, the nucleus of 0.95 has 1 to 40 tokens, 11 in the
    median, and most tokens are 23 below the best one.
    """
    random = np.random.default_rng(seed)
    logits = random.normal(0.0, 2.2, (BATCH, vocab))
    for i, row in enumerate(logits):
        good = random.choice(vocab, 400, replace=False)
        row[good] += 7.0 + random.exponential(1.1 + 0.8 * i / BATCH, 400)
    return torch.from_numpy(logits.astype(np.float32))


class Clock:
    """Time by part."""

    def __init__(self) -> None:
        self.steps: dict[str, list[float]] = defaultdict(list)
        self._now: dict[str, float] = defaultdict(float)

    def wrap(self, owner: Any, name: str, part: str = "") -> None:
        """Count the time in ``owner.name`` as ``part``."""
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = inner(*args, **kwargs)
            self._now[part or name] += time.perf_counter() - began
            return result

        setattr(owner, name, timed)

    @contextmanager
    def step(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._now["step"] = time.perf_counter() - began
        for part, seconds in self._now.items():
            self.steps[part].append(seconds)
        self._now.clear()

    def medians(self) -> dict[str, float]:
        """Microseconds of a step by part."""
        return {part: 1e6 * statistics.median(values) for part, values in self.steps.items()}


def build(context: int, num_steps: int, stub: Any, params: SamplingParams) -> Engine:
    """An engine whose batch has this many tokens of context each and decodes."""
    blocks = BATCH * -(-(context + num_steps + 2) // BLOCK) + 1
    layout = KVLayout("", 1, 1, 8, "", BLOCK, "float32")
    config = EngineConfig(
        kv_blocks=blocks, block_size=BLOCK, max_model_len=context + num_steps + 2,
        max_num_seqs=BATCH, token_budget=BATCH * context,
    )  # fmt: skip
    engine = Engine(config, ModelRunner(stub, Region(layout, blocks), epoch=1))
    for i in range(BATCH):
        ids = [(7 * j + 131 * i) % 1000 for j in range(context)]
        engine.add((i.to_bytes(16, "big"), 0), ids, context, params)
    engine.step(0.0)
    assert len(engine.scheduler.running) == BATCH
    return engine


def measure(context: int, num_steps: int, logits: list[Tensor], params: SamplingParams) -> Clock:
    stub = StubModel(logits)
    engine = build(context, num_steps, stub, params)
    clock = Clock()
    clock.wrap(engine.scheduler, "schedule")
    clock.wrap(engine.scheduler, "update")
    clock.wrap(engine.runner, "run")
    clock.wrap(engine.runner, "publish")
    clock.wrap(stub, "plan")
    original = runner_module.sample
    clock.wrap(runner_module, "sample")
    try:
        for _ in range(num_steps):
            with clock.step():
                outputs = engine.step(0.0)
            assert len(outputs) == BATCH
    finally:
        runner_module.sample = original
    return clock


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=49152)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logits = [language_logits(args.vocab, seed) for seed in range(3)]
    slow = False
    for context in (256, 2000):
        for name, params in PARAMS.items():
            parts = measure(context, args.steps, logits, params).medians()
            total = parts.pop("step")
            slow |= total > LIMIT_US and name != "untruncated"
            shown = " ".join(f"{part} {value:.0f}" for part, value in parts.items())
            print(f"{context:5} {name:12} {total:7.0f} µs: {shown}", flush=True)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
