"""The token budget that is measured at start: what fits a quarter second, in time, and kept."""

from __future__ import annotations

import json
import logging
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import example, given, settings, strategies as st

from services import measure
from services.engine.config import EngineConfig
from services.engine.scheduler import Plan

KEY: dict[str, str | int] = {"weights": "w", "threads": 2}


@dataclass
class TimedModel:
    """Takes its time by its own clock: for a step, and for each layer of each token. ``noise`` is
    by how much a step is longer, step by step.
    """

    num_layers: int = 30
    per_layer_s: float = 0.0  # of one token
    per_step_s: float = 0.0
    noise: tuple[float, ...] = ()
    now: float = 0.0
    runs: list[tuple[int, int]] = field(default_factory=list)  # layers, tokens

    def runner_of(self, count: int) -> TimedRunner:
        assert 1 <= count <= self.num_layers
        return TimedRunner(self, count)

    def tokens(self, **changes: object) -> float:
        return measure.tokens_in_time(
            self.runner_of, self.num_layers, config(**changes), lambda: self.now
        )


@dataclass
class TimedRunner:
    model: TimedModel
    num_layers: int

    def run(self, plan: Plan) -> list[int]:
        (row,) = plan.rows
        assert 0 not in row.blocks, "block 0 is for padding"
        assert len(row.blocks) == -(-len(row.ids) // 16)
        model = self.model
        took = model.per_step_s + self.num_layers * len(row.ids) * model.per_layer_s
        factor = 1.0 + (model.noise[len(model.runs) % len(model.noise)] if model.noise else 0)
        first = self.num_layers not in [layers for layers, _ in model.runs]
        model.now += took * factor + (0.01 if first else 0.0)
        model.runs.append((self.num_layers, len(row.ids)))
        return [0]

    def publish(self, opened: object, sealed: object) -> None:
        raise AssertionError("nothing is published")

    def zero(self, blocks: list[int]) -> None:
        raise AssertionError("nothing is spoiled")


def config(**changes: object) -> EngineConfig:
    values = {"kv_blocks": 1025, "max_model_len": 8192, "device": "cpu", **changes}
    return EngineConfig(**values)  # type: ignore[arg-type]


def test_what_fits_takes_a_quarter_second() -> None:
    assert TimedModel(num_layers=10, per_layer_s=1e-4).tokens() == pytest.approx(250, rel=1e-6)


def test_the_time_of_a_step_itself_does_not_fool_it() -> None:
    # 32 tokens take 8 ms, most of it for the step: a line through them would say 1,000.
    tokens = TimedModel(num_layers=10, per_layer_s=1e-5, per_step_s=0.005).tokens()
    assert tokens * 1e-4 + 0.005 == pytest.approx(0.25, rel=0.2)


def test_a_step_that_others_disturb_is_not_believed() -> None:
    model = TimedModel(num_layers=10, per_layer_s=1e-4, noise=(0.9, 0.3, 0.7, 0.0, 1.5))
    assert model.tokens() == pytest.approx(250, rel=1e-6)


def test_of_a_slow_model_no_whole_step_is_run() -> None:
    model = TimedModel(num_layers=80, per_layer_s=0.0005)  # 32 tokens take 1.3 s
    assert model.tokens() == pytest.approx(0.25 / (80 * 0.0005), rel=0.01)
    assert {layers for layers, _ in model.runs} == {1, 2}


def test_a_model_of_one_layer_is_timed_too() -> None:
    assert TimedModel(num_layers=1, per_layer_s=0.001).tokens() == pytest.approx(250)


@settings(max_examples=200, deadline=None)
@given(
    num_layers=st.integers(1, 120),
    layer_s=st.floats(1e-6, 0.4),
    per_step_s=st.floats(0, 0.4),
    noise=st.lists(st.floats(0, 0.15), max_size=5).map(tuple),
)
@example(94, 0.015625, 0.25, (0.0, 0.125))  # noise hides the layers
@example(120, 0.06, 0.4, (0.15, 0.0))
def test_measuring_ends_in_time(
    num_layers: int, layer_s: float, per_step_s: float, noise: tuple[float, ...]
) -> None:
    """Whatever the model, as long as two layers and what is around them are done in 1.2 s."""
    model = TimedModel(num_layers, layer_s / measure.FIRST, per_step_s, noise)
    model.tokens()
    assert model.now < 5 * 1.15 * (layer_s + per_step_s) + 3.0
    if layer_s + per_step_s < 0.1:
        assert model.now < 3.0


@pytest.mark.parametrize("kv_blocks", [2, 3, 9])
def test_a_chunk_fits_the_pool(kv_blocks: int) -> None:
    model = TimedModel(per_layer_s=1e-8)
    model.tokens(kv_blocks=kv_blocks)
    assert max(tokens for _, tokens in model.runs) == (kv_blocks - 1) * 16


@pytest.mark.parametrize(
    ("tokens", "changes", "budget"),
    [
        (250.0, {}, 240),  # whole blocks
        (1.0, {}, 64),
        (1.0, {"max_num_seqs": 100}, 112),  # one token for each of them in every step
        (1e9, {}, 2048),
        (1e9, {"device": "cuda"}, 8192),
        (1e9, {"kv_blocks": 3}, 2048),
    ],
)
def test_the_budget_stays_within_its_bounds(
    tokens: float, changes: dict[str, object], budget: int
) -> None:
    assert measure.clamped(tokens, config(**changes)) == budget


# --- cache ----------------------------------------------------------------------------------------


def never() -> float:
    raise AssertionError("measured once more")


def test_what_was_measured_is_kept(tmp_path: Path) -> None:
    assert measure.cached(KEY, lambda: 123.5, tmp_path) == (123.5, False)
    assert measure.cached(dict(reversed(KEY.items())), never, tmp_path) == (123.5, True)


@pytest.mark.parametrize("change", [{"weights": "v"}, {"threads": 1}])
def test_what_differs_is_measured(
    tmp_path: Path, change: dict[str, str | int], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure.cached(KEY, lambda: 1.0, tmp_path)
    assert measure.cached({**KEY, **change}, lambda: 2.0, tmp_path) == (2.0, False)
    monkeypatch.setattr(measure, "VERSION", measure.VERSION + 1)
    assert measure.cached(KEY, lambda: 3.0, tmp_path) == (3.0, False)


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b'{"value": 5}',
        b'{"key": {}, "value": 5}',
        *(
            json.dumps({"key": {**KEY, "version": measure.VERSION}, "value": value}).encode()
            for value in ("many", None, [], -3, 0, float("nan"), float("inf"))
        ),
    ],
)
def test_a_damaged_file_is_ignored_and_replaced(
    tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    measure.cached(KEY, lambda: 7.0, tmp_path)
    (file,) = tmp_path.glob("*.json")
    file.write_bytes(damage)
    assert measure.cached(KEY, lambda: 8.0, tmp_path) == (8.0, False)
    assert f"{file} is ignored" in caplog.text
    assert measure.cached(KEY, never, tmp_path) == (8.0, True)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".lock"]


def test_anything_can_be_kept_that_json_can_say(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def pair(value: list[int]) -> tuple[int, int]:
        first, second = value
        return first, second

    def keep(value: tuple[int, int] | None, anew: bool = False) -> tuple[tuple[int, int], bool]:
        def act() -> tuple[int, int]:
            assert value is not None, "measured once more"
            return value

        return measure.kept(KEY, act, tmp_path, pair, list, anew)

    assert keep((1, 2)) == ((1, 2), False)
    assert keep(None) == ((1, 2), True)
    assert keep((3, 4), anew=True) == ((3, 4), False)
    assert keep(None) == ((3, 4), True)
    (file,) = tmp_path.glob("*.json")
    file.write_text(file.read_text().replace("3,", ""))
    assert keep((5, 6)) == ((5, 6), False)
    assert f"{file} is ignored" in caplog.text


def test_a_folder_that_cannot_be_made_costs_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "x"
    assert measure.cached(KEY, lambda: 7.0, folder) == (7.0, False)
    assert measure.cached(KEY, lambda: 8.0, folder) == (8.0, False)
    assert "each start measures" in caplog.text


def test_a_disk_that_is_full_costs_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    assert measure.cached(KEY, lambda: 7.0, tmp_path) == (7.0, False)
    assert "is not kept: no space left" in caplog.text
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_an_error_of_the_model_is_no_error_of_the_cache(tmp_path: Path) -> None:
    def fails() -> float:
        raise OSError("the model's own")

    with pytest.raises(OSError, match="own"):
        measure.cached(KEY, fails, tmp_path)
    assert measure.cached(KEY, lambda: 7.0, tmp_path) == (7.0, False)


def test_of_those_that_start_together_one_measures(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    measuring, others_wait = threading.Event(), threading.Event()
    results: list[tuple[float, bool]] = []

    def slowly() -> float:
        measuring.set()
        assert others_wait.wait(10)
        return 7.0

    threads = [
        threading.Thread(target=lambda: results.append(measure.cached(KEY, slowly, tmp_path)))
    ]
    threads[0].start()
    assert measuring.wait(10)
    for _ in range(3):
        thread = threading.Thread(
            target=lambda: results.append(measure.cached(KEY, never, tmp_path))
        )
        thread.start()
        threads.append(thread)
    others_wait.set()
    for thread in threads:
        thread.join(10)
    assert sorted(results) == [(7.0, False), *[(7.0, True)] * 3]
