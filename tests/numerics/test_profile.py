"""Profiles of real models: steps that were not timed take about as long as the model says; nothing
of the timing is left in the worker; and what was timed is kept.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from services.engine.config import EngineConfig
from services.engine.engine import Engine
from services.engine.runner import ModelRunner
from services.engine.scheduler import Plan
from services.engine.sequence import SamplingParams
from services.fetch import DEFAULT_MODEL, fetch
from services.planner import command, profiling
from services.planner.fit import Fit, Point, as_json, fit
from services.planner.halves import as_stats, from_stats
from services.planner.profiling import build_runner, half_of, profile_of
from services.planner.trials import TrialError, Trials
from services.settings import WorkerSettings
from tests.support.tiny_model import save_model

CLOCK = time.process_time
GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)
ENGINE = EngineConfig(
    kv_blocks=65,
    block_size=4,
    max_model_len=120,
    max_num_seqs=4,
    token_budget=32,
    chunk_budget=32,
    threads=1,
    dtype="float32",
    device="cpu",
)


def worker(folder: Path, role: str = "decode", engine: EngineConfig = ENGINE) -> WorkerSettings:
    return WorkerSettings(
        worker_id=f"{role}-1",
        role=role,
        model_dir=str(folder),
        served_model="m",
        weights="w",
        host="127.0.0.1",
        transport="memory",
        secret=b"s" * 32,
        lease_s=30.0,
        net_devices="auto",
        engine=engine,
    )


@pytest.fixture
def tiny(tmp_path: Path) -> WorkerSettings:
    save_model(tmp_path / "model")
    return worker(tmp_path / "model")


def never(plan: Plan) -> list[int]:
    raise AssertionError("timed once more")


# --- the default model ---


def prompt_s(engine: Engine, name: str, tokens: int) -> float:
    """Seconds from a prompt to its first token; no prefix of it is cached."""
    ids = [(7 * i + len(name) * i * i + 11) % 40_000 for i in range(tokens)]
    began = CLOCK()
    engine.add((name.encode(), 0), ids, tokens, replace(GREEDY, max_tokens=1))
    while not engine.step(began):
        pass
    return CLOCK() - began


def steps_s(engine: Engine, name: str, batch: int, context: int) -> float:
    """Median seconds of steps that decode; the contexts are computed first."""
    for i in range(batch):
        ids = [(13 * j + 5 * i + 3) % 40_000 for j in range(context)]
        engine.add((name.encode(), i), ids, context, GREEDY)
    while engine.scheduler.waiting or any(s.num_lacking > 1 for s in engine.scheduler.running):
        engine.step(0.0)
    taken = []
    for _ in range(7):
        began = CLOCK()
        assert len(engine.step(began)) == batch
        taken.append(CLOCK() - began)
    for i in range(batch):
        engine.abort((name.encode(), i))
    return median(taken)


def test_steps_that_were_not_timed_take_as_long_as_the_model_says() -> None:
    """In processor time of one thread, whatever else this machine does. The times differ by more
    than the model may be off: one number for all of them would not do, nor one of them for another.
    """
    engine_config = EngineConfig(
        kv_blocks=321,
        max_model_len=1100,
        max_num_seqs=8,
        token_budget=128,
        chunk_budget=128,
        threads=1,
        dtype="float32",
        device="cpu",
    )
    settings = worker(fetch(DEFAULT_MODEL), engine=engine_config)
    runner = build_runner(settings)
    trials = Trials(engine_config, runner, partial(profiling._fill, runner.region), CLOCK)
    prefill = fit("prefill", trials.points("prefill", 3.0, thorough=False))
    decode = fit("decode", trials.points("decode", 1.0, thorough=False))
    engine = Engine(replace(engine_config, prefix_cache=False), runner)
    found = {
        "50 tokens": (prompt_s(engine, "a", 50), prefill.seconds(50)),
        "400 tokens": (prompt_s(engine, "b", 400), prefill.seconds(400)),
        "1 sequence": (steps_s(engine, "c", 1, 40), decode.seconds(1, 45)),
        "7 sequences": (steps_s(engine, "d", 7, 300), decode.seconds(7, 305)),
    }
    for name, (real, said) in found.items():
        assert 0.5 < said / real < 2.0, f"{name}: {real:.4f} s, the model says {said:.4f} s"
    real = {name: measured for name, (measured, _) in found.items()}
    assert real["400 tokens"] > 4 * real["50 tokens"]
    assert real["400 tokens"] > 4 * real["7 sequences"]
    assert prefill.largest_error < 1.0
    assert decode.largest_error < 1.0


# --- a tiny one ---


def answer(runner: ModelRunner, engine_config: EngineConfig = ENGINE) -> list[int]:
    """What a worker's own engine makes of a prompt."""
    engine = Engine(engine_config, runner)
    engine.add((b"q", 0), list(range(1, 40)), 39, replace(GREEDY, max_tokens=9))
    tokens = []
    while engine.has_work:
        tokens += [output.token for output in engine.step(0.0)]
    engine.check_integrity()
    return tokens


@pytest.mark.parametrize(
    ("role", "fields"),
    [("prefill", {"step", "token", "pair"}), ("decode", {"step", "seq", "pair"})],
)
def test_a_worker_says_its_own_half(tiny: WorkerSettings, role: str, fields: set[str]) -> None:
    settings = replace(tiny, role=role)
    runner = build_runner(settings)
    half = profile_of(settings, runner, runner.region, 0.3, Path(settings.model_dir) / "kept")
    assert set(half) == {f"{role}_{field}" for field in fields}
    assert all(value >= 0 for value in half.values())
    assert sum(half.values()) > 0
    assert from_stats(as_stats(half)) == half


def test_a_mixed_worker_says_both(tiny: WorkerSettings, tmp_path: Path) -> None:
    settings = replace(tiny, role="mixed")
    runner = build_runner(settings)
    assert len(profile_of(settings, runner, runner.region, 0.5, tmp_path / "kept")) == 6


def test_what_was_timed_is_kept_for_who_does_the_same(
    tiny: WorkerSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = build_runner(tiny)
    kept = tmp_path / "kept"
    half = profile_of(tiny, runner, runner.region, 0.3, kept)
    other = replace(tiny, worker_id="decode-2", host="10.0.0.7")
    again = build_runner(other)
    monkeypatch.setattr(again, "run", never)
    assert profile_of(other, again, again.region, 0.3, kept) == half
    for change in (
        {"weights": "v"},
        {"pace": "step=0.01"},
        {"engine": replace(ENGINE, threads=2)},
        {"engine": replace(ENGINE, max_num_seqs=3)},
        {"role": "prefill"},
    ):
        with pytest.raises(AssertionError, match="timed once more"):
            profile_of(replace(other, **change), again, again.region, 0.3, kept)  # type: ignore[arg-type]


def test_a_thorough_look_takes_the_place_of_a_short_one(
    tiny: WorkerSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[tuple[str, float, bool]] = []

    def points(self: Trials, *look: Any) -> list[Point]:
        looks.append(look[:3])
        return [
            Point(size, context, len(looks) * size * (1 + context))
            for size in (1, 2)
            for context in (10, 20)
        ]

    monkeypatch.setattr(profiling.Trials, "points", points)
    runner = build_runner(tiny)
    short, long, again = (
        half_of("decode", tiny, runner, runner.region, 8.0, thorough, folder=tmp_path)
        for thorough in (False, True, False)
    )
    assert looks == [("decode", 8.0, False), ("decode", 8.0, True)]
    assert short != long
    assert again == long


def test_a_damaged_file_is_timed_anew(
    tiny: WorkerSettings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner = build_runner(tiny)
    kept = tmp_path / "kept"
    profile_of(tiny, runner, runner.region, 0.2, kept)
    (file,) = kept.glob("*.json")
    entry = json.loads(file.read_text())
    entry["value"]["points"][0][2] = -1.0
    file.write_text(json.dumps(entry))
    assert profile_of(tiny, runner, runner.region, 0.2, kept)
    assert f"{file} is ignored" in caplog.text
    entry = json.loads(file.read_text())
    entry["value"]["kind"] = "prefill"
    file.write_text(json.dumps(entry))
    profile_of(tiny, runner, runner.region, 0.2, kept)
    assert "it holds prefill steps" in caplog.text


def test_nothing_of_it_is_left(tiny: WorkerSettings, tmp_path: Path) -> None:
    """Peers have heard of no block, and the worker's own engine computes what it would have."""
    expected = answer(build_runner(tiny))
    runner = build_runner(tiny)
    profile_of(replace(tiny, role="mixed"), runner, runner.region, 0.6, tmp_path / "kept")
    assert not runner.region.seals.any()
    assert all(stamp.generation == 0 for stamp in runner.region.trailers(range(ENGINE.kv_blocks)))
    assert runner.region.kv[1:3].any(), "the pool was used"
    assert torch.isfinite(runner.region.kv).all()
    assert answer(runner) == expected


def test_a_worker_without_a_profile_serves(
    tiny: WorkerSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(*args: object) -> list[object]:
        raise TrialError("no room")

    monkeypatch.setattr(profiling.Trials, "points", fails)
    runner = build_runner(tiny)
    assert profile_of(tiny, runner, runner.region, 0.2, tmp_path / "kept") == {}
    assert "decode-1: no profile: no room" in caplog.text


def test_of_one_host_one_worker_is_timed_at_a_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if they do not do the same: they would disturb each other."""
    caplog.set_level(logging.CRITICAL)
    here: list[str] = []
    both = threading.Event()
    first_is_in, second_comes = threading.Event(), threading.Event()

    def timed(name: str) -> Callable[[], Fit]:
        def act() -> Fit:
            here.append(name)
            if len(here) > 1:
                both.set()
            first_is_in.set()
            assert second_comes.wait(10)
            here.remove(name)
            return Fit("decode", (), {})

        return act

    def run(name: str) -> None:
        profiling._alone(tmp_path, timed(name))

    first = threading.Thread(target=run, args=("a",))
    second = threading.Thread(target=run, args=("b",))
    first.start()
    assert first_is_in.wait(10)
    second.start()
    assert not both.wait(0.2)  # it waits for the lock
    second_comes.set()
    first.join(10)
    second.join(10)
    assert not both.is_set()
    assert here == []


def test_the_command(
    tiny: WorkerSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """From its flags to its file; and workers with the same settings find what it has kept."""
    from services import cli

    monkeypatch.setattr(profiling, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(command, "cache_dir", lambda: tmp_path)
    folder, out = Path(tiny.model_dir), tmp_path / "out.json"
    (folder / "tokenizer.json").write_text("{}")
    argv = ["--model", str(folder), "--minutes", "0.05", "--out", str(out), "--transport", "tcp"]
    for name in ("kv_blocks", "block_size", "max_model_len", "max_num_seqs", "token_budget"):
        argv += [f"--{name.replace('_', '-')}", str(getattr(ENGINE, name))]
    assert cli.main(["profile", *argv, "--threads", "1", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    written = json.loads(out.read_text())
    assert len(written["profile"]) == 6
    prefill, decode = written["steps"]
    assert (prefill["role"], prefill["kind"]) == ("prefill", "prefill")
    assert (decode["role"], decode["kind"]) == ("decode", "decode")
    assert prefill["token_budget"] == 32
    assert decode["coefficients"].items() <= written["profile"].items()
    assert said.count(" % in the middle") == 2
    assert "prefill: " in said
    assert decode["one_worker"] in said
    for steps in (prefill, decode):
        assert len(steps["points"]) >= 4
    assert len(list((tmp_path / "profiles").glob("*.json"))) == 2


def test_a_deployment_that_cannot_be_timed_is_an_error(
    tiny: WorkerSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from services import cli

    folder = Path(tiny.model_dir)
    (folder / "tokenizer.json").write_text("{}")
    argv = ["--model", str(folder), "--max-model-len", "3", "--kv-blocks", "9", "--threads", "1"]
    argv += ["--token-budget", "64", "--device", "cpu", "--minutes", "0.05"]
    assert cli.main(["profile", *argv]) == 1
    assert "baton: error: " in capsys.readouterr().err


def test_json_of_a_fit_is_for_people_too(tiny: WorkerSettings, tmp_path: Path) -> None:
    runner = build_runner(tiny)
    found = half_of("decode", tiny, runner, runner.region, 0.2, folder=tmp_path / "kept")
    (file,) = (tmp_path / "kept").glob("*.json")
    assert json.loads(file.read_text())["value"] == json.loads(json.dumps(as_json(found)))
