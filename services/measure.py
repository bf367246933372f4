"""How many tokens a step may compute here: what the worker's own model does in a quarter second.

The length of a step bounds how fast a worker reacts: to an abort, to a short prompt behind a long
one, to the next token of everybody else. What fits depends on model, machine and neighbours, so it
is timed at start, with the runner that will run. Knows no torch.
"""

import time
from collections.abc import Callable

from services.engine.config import EngineConfig
from services.engine.engine import Runner
from services.engine.scheduler import Plan, Row
from services.engine.sequence import SamplingParams

TARGET_S = 0.25
LOWEST = 64  # smaller steps would mostly read weights
HIGHEST = {"cpu": 2048, "cuda": 8192}
FIRST = 32  # tokens of the first chunk that is timed
ENOUGH = 4  # a chunk that takes a quarter of the target is long enough to extrapolate from


def token_budget(
    runner: Runner, config: EngineConfig, clock: Callable[[], float] = time.perf_counter
) -> int:
    """Tokens that fit ``TARGET_S``: whole blocks, at most the device's ``HIGHEST``, at least
    ``LOWEST`` and one for each sequence.

    Writes into blocks from 1 on, so nothing may be in them yet.
    """
    highest = HIGHEST[config.device]
    room = min(highest, config.max_model_len, (config.kv_blocks - 1) * config.block_size)
    _time(runner, config, min(config.block_size, room), clock)  # the first run sets things up
    chunk = min(FIRST, room)
    while True:
        # the better of two, since others use the machine as well
        took = min(_time(runner, config, chunk, clock) for _ in range(2))
        if took * ENOUGH >= TARGET_S or chunk == room:
            break
        chunk = min(chunk * ENOUGH, room)
    blocks = int(min(highest, chunk * TARGET_S / took)) // config.block_size
    least = -(-max(LOWEST, config.max_num_seqs) // config.block_size)
    return max(blocks, least) * config.block_size


def _time(runner: Runner, config: EngineConfig, chunk: int, clock: Callable[[], float]) -> float:
    """Seconds for a step that computes a prompt's first ``chunk`` tokens and samples."""
    blocks = tuple(range(1, 1 - (-chunk // config.block_size)))
    row = Row(
        key=(b"", 0),
        ids=(0,) * chunk,
        start=0,
        blocks=blocks,
        sample=True,
        params=SamplingParams(max_tokens=1, temperature=0.0),
        num_prompt=chunk,
    )
    began = clock()
    runner.run(Plan(rows=(row,), opened=(), spoiled=[]))
    return clock() - began
