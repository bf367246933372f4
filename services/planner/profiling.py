"""The profile of a worker: its own steps timed on its own machine, and kept in the user's cache.

A worker that starts needs some seconds for that, once for each model, machine and configuration;
``baton profile`` takes minutes, is more exact, and leaves what it found in the same place. A worker
times the half that its pool needs, see :mod:`services.planner.halves`.
"""

import contextlib
import functools
import logging
from collections.abc import Callable
from pathlib import Path

import torch

from kvtransfer.layout import KVLayout
from kvtransfer.region import Region
from services.budget import budget_key
from services.engine.compiled import compile_all
from services.engine.engine import Runner
from services.engine.runner import ModelRunner
from services.load_model import load_model
from services.measure import kept
from services.model_cache import cache_dir, locked
from services.planner.fit import Fit, FitError, as_json, fit, from_json
from services.planner.halves import Half, kinds_of
from services.planner.trials import Progress, TrialError, Trials
from services.settings import WorkerSettings

log = logging.getLogger(__name__)

VERSION = 1
"""Bump when the same would be timed in another way."""

QUICK_S = 8.0  # of a worker that starts, about


def profile_of(
    settings: WorkerSettings,
    runner: Runner,
    region: Region,
    limit_s: float = QUICK_S,
    folder: Path | None = None,
) -> Half:
    """What a worker says of its steps, for :func:`services.planner.halves.as_stats`.

    ``runner`` is what computes them, into ``region``, in which nothing may be yet; the engine's
    configuration must be complete. Of the coefficients of a
    :class:`~services.planner.profile.Profile` prefill workers have the ``prefill_*``, decode
    workers the ``decode_*``, mixed ones all. What cannot be timed is left out, with a line in the
    log: that is no reason not to serve.
    """
    found: dict[str, float] = {}
    kinds = kinds_of(settings.role)
    for kind in kinds:
        try:
            share_s = limit_s / len(kinds)
            found |= half_of(kind, settings, runner, region, share_s, folder=folder).half
        except (FitError, TrialError) as error:
            log.warning("%s: no profile: %s", settings.worker_id, error)
    return found


def half_of(
    kind: str,
    settings: WorkerSettings,
    runner: Runner,
    region: Region,
    limit_s: float,
    thorough: bool = False,
    progress: Progress = lambda *_: None,
    folder: Path | None = None,
) -> Fit:
    """The fit of one ``kind`` of steps, as timed earlier or now. ``thorough``: now, over more
    points, whatever is kept; and kept for others.

    Of the processes of this host that want to, one times at a time. Raises FitError, TrialError.
    """
    folder = folder or cache_dir() / "profiles"

    def measure() -> Fit:
        trials = Trials(settings.engine, runner, functools.partial(_fill, region))
        return fit(kind, trials.points(kind, limit_s, thorough, progress))

    found, known = kept(
        profile_key(kind, settings),
        lambda: _alone(folder, measure),
        folder,
        functools.partial(_parse, kind),
        as_json,
        anew=thorough,
    )
    log.info(
        "%s steps: %s; error %.0f %% (%s)",
        kind,
        ", ".join(f"{name} {value:.3g} s" for name, value in found.half.items()),
        100 * found.median_error,
        "as timed earlier" if known else f"timed now, {len(found.points)} points",
    )
    if found.is_doubtful:
        log.warning("that is far off; baton profile does it better while the machine is idle")
    return found


def profile_key(kind: str, settings: WorkerSettings) -> dict[str, str | int]:
    """All that the timings depend on."""
    config = settings.engine
    return {
        **budget_key(settings),
        "what": f"{kind} steps, {VERSION}",
        "token_budget": config.token_budget,
        "chunk_budget": config.chunk_budget,
        "block_size": config.block_size,
        "kv_blocks": config.kv_blocks,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "pace": settings.pace,
    }


def build_runner(settings: WorkerSettings) -> ModelRunner:
    """The model and the KV memory that a worker would have, without its connections."""
    config = settings.engine
    torch.set_num_threads(config.threads)
    int8 = config.weights_dtype == "int8"
    model = load_model(settings.model_dir, config.dtype, config.device, int8)
    shape = model.config
    layout = KVLayout(
        weights=settings.weights,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rope=shape.rope,
        block_size=config.block_size,
        dtype=config.dtype,
    )
    region = Region(layout, config.kv_blocks, config.device)
    if config.device == "cpu":
        compile_all()
    return ModelRunner(model, region, epoch=1)


def _alone(folder: Path, measure: Callable[[], Fit]) -> Fit:
    """While nobody else of this host times its steps."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / "timing", log.info))
        except OSError as error:
            log.warning("other workers may disturb what is timed: %s", error)
        return measure()


def _parse(kind: str, value: object) -> Fit:
    found = from_json(value)
    if found.kind != kind:
        raise ValueError(f"it holds {found.kind} steps")
    return found


def _fill(region: Region, blocks: int) -> None:
    """Keys and values as large as a model's. Memory that nobody has written yet is one page of
    zeros for all of it, and read out of a cache.
    """
    noise = torch.randn(region.kv[:1].shape).to(region.kv)
    region.kv[1 : blocks + 1] = noise
