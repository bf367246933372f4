"""``make bench-batching``: 16 streams through ``baton serve`` against the engine's own batch of 16.

A: decode rate of 16 HTTP streams, one prefill and one decode worker, over the time in which all 16
are being decoded. B: the same model, threads, batch and context lengths in ``Engine.step`` in this
process, with nothing around it. Rounds alternate A B A B, so that a machine that changes its speed
changes both; the server idles during B. Needs an idle machine. Status 1 below the target ratio.
"""

import argparse
import statistics
import sys
import threading
import time
from functools import partial
from pathlib import Path

import torch

from kvtransfer.layout import KVLayout
from kvtransfer.region import Region
from services.engine.config import EngineConfig
from services.engine.engine import Engine
from services.engine.model import Model
from services.engine.model_config import read_config
from services.engine.runner import ModelRunner
from services.engine.sequence import SamplingParams
from services.engine.weights import read_weights
from services.fetch import DEFAULT_MODEL, fetch
from tests.support.serving import Client, served

STREAMS = 16
PROMPT = 64
TARGET = 0.8
MAX_MODEL_LEN = 1024
KV_BLOCKS = 900
MIN_STEPS = 32  # that all streams must be decoded together for
VOCAB = 49152


def prompts(run: int) -> list[list[int]]:
    """Of a length, all different, and different in each round: no prefix is cached."""
    return [[(7 * i + 131 * s + 977 * run) % VOCAB for i in range(PROMPT)] for s in range(STREAMS)]


# --- A: over HTTP --------------------------------------------------------------------------------


def over_http(client: Client, run: int, num_tokens: int) -> tuple[float, list[int], int]:
    """Tokens per second while all streams decode, each one's context when that began, and how many
    steps it lasted.
    """
    begun = threading.Barrier(STREAMS)

    def stream(prompt: list[int]) -> list[float]:
        body = {
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,  # a chunk for each token, also where it adds no text
        }
        begun.wait(60)
        chunks = client.stream("/v1/completions", body)
        return [time.monotonic() for chunk in chunks for _ in chunk["choices"][0]["token_ids"]]

    arrivals = client.at_once([partial(stream, prompt) for prompt in prompts(run)])
    assert all(len(times) == num_tokens for times in arrivals)
    start = max(times[1] for times in arrivals)  # the first token of each comes from P
    end = min(times[-1] for times in arrivals)
    rate = sum(start < at <= end for times in arrivals for at in times) / (end - start)
    contexts = [PROMPT + sum(at <= start for at in times) for times in arrivals]
    steps = min(sum(start < at <= end for at in times) for times in arrivals)
    assert steps >= MIN_STEPS, f"the streams shared {steps} steps; raise --tokens"
    return rate, contexts, steps


# --- B: the engine alone -------------------------------------------------------------------------


def build_engine(threads: int) -> Engine:
    """As a worker builds it, in this process."""
    torch.set_num_threads(threads)
    folder: Path = fetch(DEFAULT_MODEL)
    shape = read_config(folder)
    config = EngineConfig(
        kv_blocks=KV_BLOCKS,
        max_model_len=MAX_MODEL_LEN,
        token_budget=256,
        threads=threads,
        dtype="float32",
        device="cpu",
    )
    layout = KVLayout(
        "", shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.rope,
        config.block_size, config.dtype,
    )  # fmt: skip
    model = Model(shape, read_weights(folder), torch.float32, torch.device("cpu"))
    return Engine(config, ModelRunner(model, Region(layout, KV_BLOCKS), epoch=1))


def in_process(engine: Engine, run: int, contexts: list[int], num_steps: int) -> float:
    """Tokens per second of ``num_steps`` steps of all sequences, from these contexts on."""
    keys = [(run.to_bytes(16, "big"), i) for i in range(STREAMS)]
    for key, prompt, length in zip(keys, prompts(run), contexts, strict=True):
        ids = [(prompt[i % PROMPT] + i // PROMPT) % VOCAB for i in range(length)]
        params = SamplingParams(max_tokens=num_steps + STREAMS * MAX_MODEL_LEN // 256 + 8)
        engine.add(key, ids, len(ids), params)
    decoding: set[object] = set()
    while len(decoding) < STREAMS:
        decoding |= {output.key for output in engine.step(time.monotonic())}
    started = time.monotonic()
    count = sum(len(engine.step(time.monotonic())) for _ in range(num_steps))
    rate = count / (time.monotonic() - started)
    assert count == num_steps * STREAMS
    for key in keys:
        engine.abort(key)
    return rate


# --- both ----------------------------------------------------------------------------------------


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=160, help="of each stream")
    parser.add_argument("--threads", type=int, default=1, help="of the engine, on both sides")
    args, flags = parser.parse_known_args()
    sizes = ("--max-model-len", str(MAX_MODEL_LEN), "--kv-blocks", str(KV_BLOCKS))
    engine = build_engine(args.threads)
    http: list[float] = []
    alone: list[float] = []
    with served(*sizes, "--threads", str(args.threads), *flags) as server:
        over_http(server, 0, args.tokens)  # both warm up once
        for run in range(1, args.rounds + 1):
            rate, contexts, steps = over_http(server, run, args.tokens)
            http.append(rate)
            server.idle_workers()
            if run == 1:
                in_process(engine, 0, contexts, 8)
            alone.append(in_process(engine, run, contexts, steps))
            print(
                f"round {run}: {http[-1]:6.1f} tokens/s over HTTP, {alone[-1]:6.1f} in process,"
                f" ratio {http[-1] / alone[-1]:.3f}"
                f"  ({steps} steps from contexts of {min(contexts)} to {max(contexts)})",
                flush=True,
            )
    ratios = [a / b for a, b in zip(http, alone, strict=True)]
    ratio = statistics.median(ratios)
    print(
        f"\n{STREAMS} streams, {args.threads} thread(s): median"
        f" {statistics.median(http):.1f} against {statistics.median(alone):.1f} tokens/s"
        f"\nratio {ratio:.3f}, from {min(ratios):.3f} to {max(ratios):.3f} in {len(ratios)} rounds;"
        f" the target is {TARGET}: {'ok' if ratio >= TARGET else 'FAILED'}"
    )
    return 0 if ratio >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
