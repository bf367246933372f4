"""The token budget that is measured at start: what fits a quarter second, within its bounds."""

from __future__ import annotations

import pytest

from services import measure
from services.engine.config import EngineConfig
from services.engine.scheduler import Plan


class TimedRunner:
    """Takes ``per_step_s`` and ``per_token_s`` of its own clock; the first run takes longer."""

    def __init__(self, per_token_s: float, per_step_s: float = 0.0) -> None:
        self.now = 0.0
        self.chunks: list[int] = []
        self._per_token_s, self._per_step_s = per_token_s, per_step_s

    def run(self, plan: Plan) -> list[int]:
        (row,) = plan.rows
        assert 0 not in row.blocks, "block 0 is for padding"
        assert len(row.blocks) == -(-len(row.ids) // 16)
        self.now += self._per_step_s + len(row.ids) * self._per_token_s
        self.now += 0 if self.chunks else 10.0
        self.chunks.append(len(row.ids))
        return [0]

    def publish(self, opened: object, sealed: object) -> None:
        raise AssertionError("nothing is published")


def config(**changes: object) -> EngineConfig:
    values = {"kv_blocks": 1025, "max_model_len": 8192, "device": "cpu", **changes}
    return EngineConfig(**values)  # type: ignore[arg-type]


def measured(runner: TimedRunner, config: EngineConfig) -> int:
    return measure.token_budget(runner, config, lambda: runner.now)


def test_the_budget_takes_a_quarter_second() -> None:
    assert measured(TimedRunner(0.001), config()) == 240  # 250, in whole blocks


def test_the_time_of_a_step_itself_does_not_fool_it() -> None:
    # 32 tokens take 8 ms, most of it for the step: a line through them would say 1,000.
    budget = measured(TimedRunner(0.0001, per_step_s=0.005), config())
    assert budget * 0.0001 + 0.005 == pytest.approx(0.25, rel=0.2)


@pytest.mark.parametrize(
    ("per_token_s", "changes", "budget"),
    [
        (1.0, {}, 64),
        (1.0, {"max_num_seqs": 100}, 112),  # one token for each of them in every step
        (1e-6, {}, 2048),
        (1e-7, {"device": "cuda"}, 8192),
        (1e-6, {"kv_blocks": 3}, 2048),  # the chunk has to fit the pool, the budget has not
    ],
)
def test_it_stays_within_its_bounds(
    per_token_s: float, changes: dict[str, object], budget: int
) -> None:
    assert measured(TimedRunner(per_token_s), config(**changes)) == budget


@pytest.mark.parametrize(
    ("per_token_s", "chunks"),
    [(0.02, [16, 32, 32]), (0.004, [16, 32, 32]), (0.0004, [16, 32, 32, 128, 128, 512, 512])],
)
def test_measuring_is_short(per_token_s: float, chunks: list[int]) -> None:
    runner = TimedRunner(per_token_s)
    measured(runner, config())
    assert runner.chunks == chunks
