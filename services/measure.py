"""How many tokens a step may compute here: what the worker's own model does in a quarter second.

The length of a step bounds how fast a worker reacts: to an abort, to a short prompt behind a long
one, to the next token of everybody else. What fits depends on model, machine and threads, so it is
timed at start, with the runner that will run, in under ``BOX_S`` plus one step. One step of a large
model may take longer than that: so the first look is at one and two of its layers, the next at four
times as many, and where they say that not even ``FIRST`` tokens fit, no whole step is run.

Others use the same cores, above all while a deployment starts, and a disturbed step only ever takes
longer: the shortest of several counts. The result is kept in the user's cache, see :func:`cached`.
Knows no torch.
"""

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar

from services.engine.config import EngineConfig
from services.engine.engine import Runner
from services.engine.scheduler import Plan, Row
from services.engine.sequence import SamplingParams
from services.model_cache import cache_dir, locked

log = logging.getLogger(__name__)

T = TypeVar("T")

VERSION = 2
"""History: 1 first; 2 files hold any "value". Bump when the same would be timed, or would compute,
differently.
"""

TARGET_S = 0.25
LOWEST = 64  # smaller steps would mostly read weights
HIGHEST = {"cpu": 2048, "cuda": 8192}
FIRST = 32  # tokens of the first chunk that is timed
ENOUGH = 4  # a chunk that takes a quarter of the target is long enough to extrapolate from
MORE = 4  # times the layers in each look: whatever noise hid of the few, many show
BOX_S = 2.0
TRIES = 5  # of the chunk that decides, while there is time


def clamped(tokens: float, config: EngineConfig) -> int:
    """The token budget: whole blocks, at most the device's ``HIGHEST``, at least ``LOWEST`` and one
    token for each sequence.
    """
    blocks = int(min(HIGHEST[config.device], tokens)) // config.block_size
    least = -(-max(LOWEST, config.max_num_seqs) // config.block_size)
    return max(blocks, least) * config.block_size


def tokens_in_time(
    runner_of: Callable[[int], Runner],
    num_layers: int,
    config: EngineConfig,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Tokens of one prompt that a step computes in ``TARGET_S``.

    ``runner_of(n)`` runs the first ``n`` of the layers. Writes into blocks from 1 on, so nothing
    may be in them yet.
    """
    began = clock()
    room = (config.kv_blocks - 1) * config.block_size
    room = min(HIGHEST[config.device], config.max_model_len, room)
    chunk = min(FIRST, room)
    expected = _step_time(runner_of, num_layers, config, chunk, clock)
    if expected > 2 * TARGET_S:
        return chunk * TARGET_S / expected

    runner = runner_of(num_layers)
    while True:
        took = _time(runner, config, chunk, clock)
        if clock() - began + took <= BOX_S:
            took = min(took, _time(runner, config, chunk, clock))
        if took * ENOUGH >= TARGET_S or chunk == room:
            break
        chunk = min(chunk * ENOUGH, room)
    for _ in range(2, TRIES):
        if clock() - began + took > BOX_S:
            break
        took = min(took, _time(runner, config, chunk, clock))
    return chunk * TARGET_S / took


def _step_time(
    runner_of: Callable[[int], Runner],
    num_layers: int,
    config: EngineConfig,
    chunk: int,
    clock: Callable[[], float],
) -> float:
    """Seconds that a step of all layers takes. More and more of them are run, which sets things up;
    where a few say that all would take too long, not all are: layers are alike.
    """
    began = clock()
    _time(runner_of(1), config, chunk, clock)
    one = two = math.inf
    for _ in range(2):
        one = min(one, _time(runner_of(1), config, chunk, clock))
        if num_layers > 1:
            two = min(two, _time(runner_of(2), config, chunk, clock))
        if clock() - began > BOX_S / 4:
            break
    if num_layers == 1:
        return one
    count, took = 2, two
    while True:
        expected = one + (num_layers - 1) * max(0.0, took - one) / (count - 1)
        if count == num_layers or expected > 2 * TARGET_S:
            return expected
        count = min(MORE * count, num_layers)
        took = _time(runner_of(count), config, chunk, clock)


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


# --- cache ----------------------------------------------------------------------------------------


def cached(
    key: Mapping[str, str | int], measure: Callable[[], float], folder: Path | None = None
) -> tuple[float, bool]:
    """:func:`kept` for a number above zero, in the folder of token budgets unless one is named."""
    return kept(key, measure, folder or cache_dir() / "budgets", _positive, float)


def kept(
    key: Mapping[str, str | int],
    measure: Callable[[], T],
    folder: Path,
    parse: Callable[[Any], T],
    show: Callable[[T], object],
    anew: bool = False,
) -> tuple[T, bool]:
    """What ``measure`` returned when it was first called for this key, and whether that was before.

    One process of this host measures a key at a time: those that start together neither disturb
    each other nor measure twice. A file that is damaged, or a folder that cannot be used, costs a
    line in the log and the time to measure. Deleting a file lets it be measured again; so does
    ``anew``. ``show`` makes JSON of a value, ``parse`` a value of JSON, or raises ValueError,
    KeyError or TypeError.
    """
    named = {**key, "version": VERSION}
    name = sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:16]
    path = folder / f"{name}.json"
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(path, log.info))
        except OSError as error:
            log.warning("what was measured cannot be kept, so each start measures: %s", error)
            return measure(), False
        known = None if anew else _read(path, named, parse)
        if known is not None:
            return known, True
        value = measure()
        try:
            _write(path, {"key": named, "value": show(value)})
        except OSError as error:
            log.warning("what was measured is not kept: %s", error)
        return value, False


def _positive(value: Any) -> float:
    number = float(value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{value!r} is no number above zero")
    return number


def _read(path: Path, key: Mapping[str, str | int], parse: Callable[[Any], T]) -> T | None:
    try:
        entry = json.loads(path.read_bytes())
        value = parse(entry["value"])
        if entry["key"] == key:
            return value
        reason = "it holds something else"
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        reason = repr(error)
    log.warning("%s is ignored: %s", path, reason)
    return None


def _write(path: Path, entry: Mapping[str, object]) -> None:
    """Whole or not at all, whoever else writes."""
    with NamedTemporaryFile("w", dir=path.parent, prefix=f"{path.name}.", delete=False) as file:
        try:
            file.write(json.dumps(entry, indent=2) + "\n")
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
