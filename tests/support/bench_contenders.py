"""What computes in this process: Baton's engine as a worker builds it, and ``transformers``; and
what the machine could do at best.

Contexts for decoding are not computed: both get random keys and values, as many as a prompt would
have left. How long attention takes does not depend on what is in them.
"""

from __future__ import annotations

import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import njit, prange, set_num_threads

from kvtransfer.layout import KVLayout
from kvtransfer.region import Region
from services.budget import first_layers
from services.engine.config import EngineConfig
from services.engine.engine import Engine
from services.engine.runner import ModelRunner
from services.engine.sequence import Key, SamplingParams
from services.load_model import load_model
from services.measure import clamped, tokens_in_time
from tests.support.bench import Case, Timing
from tests.support.roofline import Ceilings, Shape

ROWS = 512  # of the GEMM that is the ceiling
READ_BYTES = 1 << 29  # far more than any cache
WARM_UP = 2  # steps
MIN_STEPS, MAX_STEPS, STEPS_S = 5, 24, 1.5  # of decode, in one round
GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=1 << 20, temperature=0.8, top_p=0.95, seed=7)


def steps(step: Callable[[], object]) -> list[float]:
    """Seconds of each of some calls: for about ``STEPS_S``, after a warm-up."""
    for _ in range(WARM_UP):
        step()
    taken: list[float] = []
    while len(taken) < MIN_STEPS or (len(taken) < MAX_STEPS and sum(taken) < STEPS_S):
        taken.append(timed(step))
    return taken


def timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def in_the_middle(taken: list[float], tokens: int) -> Timing:
    """A step of some, and the context that it had: one more token in each."""
    return Timing(statistics.median(taken), tokens + WARM_UP + (len(taken) - 1) / 2)


# --- ceilings -------------------------------------------------------------------------------------


@njit(parallel=True, fastmath=True)
def _sum(values):  # type: ignore[no-untyped-def]
    total = np.float32(0)
    for i in prange(values.size):
        total += values[i]
    return total


class Machine:
    """Measures what products of ``ROWS`` rows and reads of memory reach; all threads."""

    def __init__(self, shape: Shape, threads: int) -> None:
        set_num_threads(threads)
        x = {size: torch.randn(ROWS, size) for pair in shape.matrices for size in pair}
        weights = [torch.randn(o, i) / i**0.5 for i, o in shape.matrices]
        packed = [torch.ops.mkldnn._reorder_linear_weight(w, ROWS) for w in weights]
        square = torch.randn(ROWS, ROWS)
        self.flops = {
            "F.linear": 2 * ROWS * shape.layer_weights,
            "oneDNN, prepacked": 2 * ROWS * shape.layer_weights,
            "square GEMM": 2 * ROWS**3,
        }
        pointwise = torch.ops.mkldnn._linear_pointwise
        self.products: dict[str, Callable[[], object]] = {
            "F.linear": lambda: [torch.nn.functional.linear(x[w.shape[1]], w) for w in weights],
            "oneDNN, prepacked": lambda: [
                pointwise(x[inputs], w, None, "none", [], "")
                for w, (inputs, _) in zip(packed, shape.matrices, strict=True)
            ],
            "square GEMM": lambda: square @ square,
        }
        memory = torch.ones(READ_BYTES // 4)
        as_array = memory.numpy()
        self.reads: dict[str, Callable[[], object]] = {
            "torch.sum": memory.sum,
            "loop by numba": lambda: _sum(as_array),
        }
        self.forms: dict[str, list[float]] = {n: [] for n in (*self.products, *self.reads)}

    @torch.inference_mode()
    def __call__(self) -> Ceilings:
        """The largest of each kind, now."""
        best: list[float] = []
        for acts, amounts in ((self.products, self.flops), (self.reads, {})):
            rates = []
            for name, act in acts.items():
                act()
                # Square ones are short: more of them, for about as long as the others.
                taken = [timed(act) for _ in range(40 if name == "square GEMM" else 7)]
                rates.append(amounts.get(name, READ_BYTES) / statistics.median(taken))
                self.forms[name].append(rates[-1])
            best.append(max(rates))
        return Ceilings(*best)


# --- Baton ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """What one run's contenders have in common."""

    folder: Path
    threads: int
    max_batch: int
    max_tokens: int  # of a sequence

    @property
    def config(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        return loaded


class Baton:
    """``Engine.step`` with scheduler, runner and sampler, as :class:`services.worker.Worker` builds
    them; only the threads around it are missing.
    """

    def __init__(self, setup: Setup, weights_dtype: str, max_rows: int) -> None:
        self.weights = weights_dtype
        self._ids: Iterator[int] = count(1)
        block = EngineConfig.block_size
        blocks = setup.max_batch * -(-setup.max_tokens // block) + 2
        config = EngineConfig(
            kv_blocks=blocks,
            max_model_len=setup.max_tokens,
            max_num_seqs=setup.max_batch,
            token_budget=max_rows,
            threads=setup.threads,
            dtype="float32",
            weights_dtype=weights_dtype,
            device="cpu",
        )
        torch.set_num_threads(setup.threads)
        self.model = load_model(str(setup.folder), "float32", "cpu", weights_dtype == "int8")
        shape = self.model.config
        self.vocab = shape.vocab_size
        layout = KVLayout(
            "", shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.rope, block, "float32"
        )
        region = Region(layout, blocks)
        self.runner = ModelRunner(self.model, region, epoch=1)
        # What a worker would take by itself; not from the cache, of which nobody knows the hour.
        runner_of = functools.partial(first_layers, self.runner)
        tokens = tokens_in_time(runner_of, shape.num_layers, config)
        self.default_budget = clamped(tokens, config)
        noise = torch.randn_like(region.kv[:1])
        region.kv.copy_(noise.expand_as(region.kv))
        self.engine = Engine(config, self.runner)

    def with_budget(self, tokens: int) -> Engine:
        """The engine with another token budget, over the same memory: nothing may be in either."""
        return Engine(replace(self.engine.config, token_budget=tokens), self.runner)

    def prompt(self, length: int) -> list[int]:
        """Never the same twice: no prefix is cached."""
        number = next(self._ids)
        return [(number * 7919 + i * 104_729 + number * i) % self.vocab for i in range(length)]

    def key(self) -> Key:
        return next(self._ids).to_bytes(16, "big"), 0

    def prefill(self, engine: Engine, tokens: int) -> Timing:
        """From the prompt to its first token."""
        ids, key = self.prompt(tokens), self.key()
        began = time.perf_counter()
        engine.add(key, ids, tokens, replace(GREEDY, max_tokens=1))
        while not engine.step(time.monotonic()):
            pass
        return Timing(time.perf_counter() - began)

    def admit(self, batch: int, context: int, sampled: int) -> list[Key]:
        """Sequences whose KV is there, as after a pull; ``sampled`` of them are not greedy."""
        keys = [self.key() for _ in range(batch)]
        for index, key in enumerate(keys):
            ids = self.prompt(context + 1)
            # The last token's KV is computed by the first step, as behind a hand-off.
            assert self.engine.reserve(key, ids[:-1]) is not None, "the pool is too small"
            params = SAMPLED if index < sampled else GREEDY
            self.engine.admit(key, ids, len(ids), params)
        return keys

    def step(self, batch: int) -> None:
        outputs = self.engine.step(time.monotonic())
        assert len(outputs) == batch, f"{len(outputs)} tokens of {batch} sequences"
        assert not any(output.finish for output in outputs)

    def decode(self, batch: int, context: int) -> Timing:
        """Greedy; from four sequences on one of them is sampled."""
        keys = self.admit(batch, context, sampled=1 if batch >= 4 else 0)
        taken = steps(lambda: self.step(batch))
        for key in keys:
            self.engine.abort(key)
        return in_the_middle(taken, context)

    def overhead_ms(self, batch: int, context: int, sampled: int) -> float:
        """Milliseconds of a step outside the model's own code: the median."""
        keys = self.admit(batch, context, sampled)
        model, inside = self.model, [0.0]

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                began = time.perf_counter()
                result = function(*args)
                inside[0] += time.perf_counter() - began
                return result

            return call

        outside: list[float] = []

        def step() -> None:
            inside[0] = 0.0
            outside.append(timed(lambda: self.step(batch)) - inside[0])

        plain = model.forward, model.logits
        model.forward, model.logits = map(counted, plain)  # type: ignore[method-assign]
        try:
            steps(step)
        finally:
            model.forward, model.logits = plain  # type: ignore[method-assign]
        for key in keys:
            self.engine.abort(key)
        return 1000 * statistics.median(outside[WARM_UP:])


@dataclass
class BatonContender:
    """Baton with one token budget. ``decodes``: one of several is enough for that."""

    name: str
    baton: Baton
    engine: Engine
    decodes: bool

    @property
    def weights(self) -> str:
        return self.baton.weights

    def can(self, case: Case) -> bool:
        return self.decodes or not case.batch

    def measure(self, case: Case) -> Timing:
        if case.batch:
            return self.baton.decode(case.batch, case.tokens)
        return self.baton.prefill(self.engine, case.tokens)


# --- transformers ---------------------------------------------------------------------------------


class Transformers:
    """The library's model with sdpa and its DynamicCache; every sequence of a batch has the same
    length, so that nothing is padded. Greedy, by argmax.
    """

    name = "transformers fp32"
    weights = "float32"

    def __init__(self, setup: Setup) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(
            setup.folder, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self.shape = Shape.of(setup.config)
        self._ids = count(1)
        sizes = setup.max_batch, self.shape.num_kv_heads, setup.max_tokens, self.shape.head_dim
        self.noise = torch.randn(sizes)

    def can(self, case: Case) -> bool:
        return True

    @torch.inference_mode()
    def measure(self, case: Case) -> Timing:
        if not case.batch:
            ids = torch.randint(0, self.shape.vocab, (1, case.tokens))
            return Timing(timed(lambda: self.next(ids, None)[0].tolist()))
        from transformers import DynamicCache

        cache = DynamicCache()
        noise = self.noise[: case.batch, :, : case.tokens]
        for layer in range(self.shape.num_layers):
            cache.update(noise.clone(), noise.clone(), layer)
        ids = torch.randint(0, self.shape.vocab, (case.batch, 1))

        def step() -> None:
            nonlocal ids
            ids, _ = self.next(ids, cache)
            ids.tolist()

        return in_the_middle(steps(step), case.tokens)

    def next(self, ids: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
        out = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values
