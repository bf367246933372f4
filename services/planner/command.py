"""``baton profile``: times the steps of a deployment's workers here, and says what they can do.

What heavy modules do is imported when it is needed: ``baton --help`` looks at the options here.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from services.config import ROLES, AppConfig, ConfigError
from services.engine.config import EngineConfig
from services.engine.model_config import ModelError
from services.engine.pace import PacedRunner, parse_pace
from services.fetch import fetch, pinned
from services.machine import calm_openmp, model_facts, processor_name, this_machine
from services.model_cache import cache_dir, print_now
from services.planner import words
from services.planner.fit import Fit, FitError, as_json
from services.planner.halves import kinds_of, with_zeros
from services.planner.observation import Seats
from services.planner.trials import TrialError
from services.resolve import resolve
from services.settings import WorkerSettings, worker_settings
from services.warm_kernels import warm_kernels

FAILED = 1
MINUTES = (0.05, 600.0)
TICK_S = 5.0  # between two lines on how far it is


@dataclass(frozen=True)
class ProfileOptions:
    """The flags of the command, beside those of ``baton serve``."""

    minutes: float = 2.0  # for all of it, about; the model must be loaded besides
    out: str = ""  # write points, coefficients and errors to this file as well, as JSON
    role: str = ""  # only this one's steps; else prefill and decode, or mixed where that is all


@dataclass(frozen=True)
class Timed:
    """One kind of steps of one role's workers."""

    role: str
    engine: EngineConfig  # complete
    fit: Fit


def run_profile(
    config: AppConfig, options: ProfileOptions, say: Callable[[str], None] = print_now
) -> int:
    """The exit status. Raises ConfigError and FetchError for wrong use."""
    out = _check(config, options)
    model = pinned(config.model, report=say)
    folder = fetch(model, report=say)
    warm_kernels(say)
    config = resolve(replace(config, model=model), this_machine(), model_facts(folder, model))
    roles = _roles(config, options.role)
    limit_s = 60 * options.minutes / sum(len(kinds_of(role)) for role in roles)
    say(f"baton profile: {config.served_model_name} on {processor_name()}")
    found: list[Timed] = []
    try:
        for role in roles:
            found += _times(worker_settings(role, config, folder, "127.0.0.1", b""), limit_s, say)
    except ModelError as error:
        raise ConfigError(f"model {config.model}: {error}") from error
    except (FitError, TrialError) as error:
        print(f"baton: error: {error}", file=sys.stderr)
        return FAILED
    objectives = _objectives(config)
    say("one worker, at the objectives:")
    for timed in found:
        say(f"  {timed.role}: {_capacity(timed, objectives)}")
    say(f"kept in {cache_dir() / 'profiles'}, where workers that do the same here find it")
    if out is not None:
        _write(out, config, found, objectives)
        say(f"written to {out}")
    return 0


def _check(config: AppConfig, options: ProfileOptions) -> Path | None:
    """What can be known to be wrong before anything takes its time; the file to write."""
    low, high = MINUTES
    if not low <= options.minutes <= high:  # also NaN
        raise ConfigError(f"--minutes: {options.minutes:g} is not from {low:g} to {high:g}")
    _roles(config, options.role)
    if not options.out:
        return None
    out = Path(options.out)
    if out.is_dir() or not out.parent.is_dir():
        what = "is a folder" if out.is_dir() else f"there is no folder {out.parent}"
        raise ConfigError(f"--out {out}: {what}; it needs the name of a file")
    if not os.access(out if out.exists() else out.parent, os.W_OK):
        raise ConfigError(f"--out {out}: it cannot be written")
    return out


def _roles(config: AppConfig, role: str) -> list[str]:
    there = [name for name, _ in config.pools()]
    if not role:
        pair = [name for name in there if name != "mixed"]
        return pair or there
    if role not in ROLES:
        raise ConfigError(f"--role: {role!r} is not one of {', '.join(ROLES)}")
    if role not in there:
        raise ConfigError(f"--role: this deployment has no {role} worker, but {', '.join(there)}")
    return [role]


def _times(settings: WorkerSettings, limit_s: float, say: Callable[[str], None]) -> list[Timed]:
    """All kinds of steps of a role's workers, with a line for each point."""
    calm_openmp()  # before torch is imported
    from services.budget import with_budgets
    from services.planner.profiling import build_runner, half_of

    model = build_runner(settings)
    engine = with_budgets(settings, model)
    settings = replace(settings, engine=engine)
    pace = parse_pace(settings.pace)
    runner = model if pace is None else PacedRunner(model, pace)
    say(
        f"  {settings.role}: {engine.device}, threads {engine.threads}, {engine.dtype}, steps of"
        f" {engine.token_budget} tokens, {engine.max_num_seqs} sequences, {engine.kv_blocks} blocks"
    )
    found = []
    for kind in kinds_of(settings.role):
        ticks = _Ticks(kind, limit_s, say)
        fit = half_of(kind, settings, runner, model.region, limit_s, thorough=True, progress=ticks)
        say(words.fit_text(fit))
        if fit.is_doubtful:
            say("  too far off to rely on: was the machine busy with something else?")
        found.append(Timed(settings.role, engine, fit))
    return found


class _Ticks:
    """Says how far it is, now and then."""

    def __init__(self, kind: str, limit_s: float, say: Callable[[str], None]) -> None:
        self._kind, self._limit_s, self._say = kind, limit_s, say
        self._next = TICK_S

    def __call__(self, points: int, elapsed_s: float) -> None:
        if elapsed_s >= self._next:
            self._next = elapsed_s + TICK_S
            text = f"{points} points, {elapsed_s:.0f} of {self._limit_s:.0f} s"
            self._say(f"  {self._kind}: {text}")


# --- results --------------------------------------------------------------------------------------


def _objectives(config: AppConfig) -> words.Objectives:
    scaling, router = config.autoscaling, config.router
    return words.Objectives(
        scaling.prefill.objective_s or router.slo_ttft_s,
        scaling.decode.objective_s or router.slo_tpot_s,
        scaling.attainment,
    )


def _seats(engine: EngineConfig) -> Seats:
    return Seats(engine.max_num_seqs, (engine.kv_blocks - 1) * engine.block_size)


def _capacity(timed: Timed, objectives: words.Objectives) -> str:
    profile = with_zeros(timed.fit.half)
    if timed.fit.kind == "prefill":
        return words.prefill_capacity(profile, objectives)
    return words.decode_capacity(profile, objectives, _seats(timed.engine))


def _write(file: Path, config: AppConfig, found: list[Timed], objectives: words.Objectives) -> None:
    """All of it as JSON."""
    what: dict[str, Any] = {
        "model": config.served_model_name,
        "processor": processor_name(),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "profile": {name: value for timed in found for name, value in timed.fit.half.items()},
        "steps": [
            {
                "role": timed.role,
                "threads": timed.engine.threads,
                "device": timed.engine.device,
                "dtype": timed.engine.dtype,
                "weights_dtype": timed.engine.weights_dtype,
                "token_budget": timed.engine.token_budget,
                "max_num_seqs": timed.engine.max_num_seqs,
                "kv_tokens": _seats(timed.engine).kv_tokens,
                **as_json(timed.fit),
                "one_worker": _capacity(timed, objectives),
            }
            for timed in found
        ],
    }
    try:
        file.write_text(json.dumps(what, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"--out {file}: {error.strerror}") from error
