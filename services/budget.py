"""Step lengths of a worker: those that were asked for, else what its model does in time here."""

import copy
import functools
import logging
import time
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

import torch

from services.engine.config import EngineConfig
from services.engine.kernel_folder import kernel_folder
from services.engine.runner import ModelRunner
from services.machine import processor_name
from services.measure import cached, clamped, tokens_in_time
from services.resolve import with_chunk_budget
from services.settings import WorkerSettings

log = logging.getLogger(__name__)


def with_budgets(settings: WorkerSettings, runner: ModelRunner) -> EngineConfig:
    """The worker's engine configuration without zeros. May run the model; nothing else does yet."""
    config = settings.engine
    if not config.token_budget:
        began = time.monotonic()
        runner_of = functools.partial(first_layers, runner)
        num_layers = len(runner.model.layers)
        tokens, known = cached(
            budget_key(settings), lambda: tokens_in_time(runner_of, num_layers, config)
        )
        config = replace(config, token_budget=clamped(tokens, config))
        config = replace(config, chunk_budget=min(config.chunk_budget, config.token_budget))
        how = "earlier" if known else f"in {time.monotonic() - began:.1f} s"
        log.info("a step computes %d tokens (measured %s)", config.token_budget, how)
    return with_chunk_budget(settings.role, config)


def budget_key(settings: WorkerSettings) -> dict[str, str | int]:
    """All that the speed of a step depends on."""
    config = settings.engine
    return {
        "weights": settings.weights,
        "weights_dtype": config.weights_dtype,
        "dtype": config.dtype,
        "processor": device_name(config.device),
        "threads": config.threads,
        "product": _version(),
        "kernels": kernel_folder().name,
    }


def device_name(device: str) -> str:
    """What computes: a GPU, or this host's processor."""
    return torch.cuda.get_device_name() if device == "cuda" else processor_name()


def _version() -> str:
    """Another version may have faster kernels."""
    try:
        return version("baton-serving")
    except PackageNotFoundError:
        return ""


def first_layers(runner: ModelRunner, count: int) -> ModelRunner:
    """The runner with a model of the first layers only."""
    part = copy.copy(runner)
    part.model = runner.model.first_layers(count)
    return part
