"""A pace stretches steps, and nothing else."""

from dataclasses import replace

import pytest

from services.engine.pace import Pace, PacedRunner, parse_pace
from services.engine.scheduler import Plan, Row
from services.engine.sequence import SamplingParams

PROMPT = Row(
    key=(b"a", 0),
    ids=(1,) * 30,
    start=0,
    blocks=(1, 2),
    sample=True,
    params=SamplingParams(max_tokens=4, temperature=0.0),
    num_prompt=30,
)
TOKEN = replace(PROMPT, key=(b"b", 0), ids=(7,), start=30)
PACE = Pace(step=0.5, prompt_token=0.01, seq=0.2)


class Runner:
    """Takes a second by its own clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []
        self.calls: list[object] = []

    def run(self, plan: Plan) -> list[int]:
        self.now += 1.0
        return [5] * len(plan.rows)

    def zero(self, blocks: list[int]) -> None:
        self.calls.append(blocks)

    def publish(self, opened: object, sealed: object) -> None:
        self.calls.append((opened, sealed))


def paced(pace: Pace) -> tuple[PacedRunner, Runner]:
    inner = Runner()
    return PacedRunner(inner, pace, clock=lambda: inner.now, sleep=inner.slept.append), inner


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [((PROMPT,), 0.8), ((TOKEN,), 0.7), ((TOKEN, TOKEN, PROMPT), 1.2), ((), 0.5)],
)
def test_a_step_is_the_sum_of_its_parts(rows: tuple[Row, ...], seconds: float) -> None:
    assert PACE.seconds(rows) == pytest.approx(seconds)


def test_only_what_is_left_is_waited_for() -> None:
    slow, inner = paced(Pace(seq=2.5))
    assert slow.run(Plan(rows=(TOKEN,), opened=(), spoiled=[])) == [5]
    assert inner.slept == [pytest.approx(1.5)]
    quick, inner = paced(Pace(seq=0.5))
    quick.run(Plan(rows=(TOKEN,), opened=(), spoiled=[]))
    assert inner.slept == []
    quick.zero([1])
    quick.publish((), [(1, 2)])
    assert inner.calls == [[1], ((), [(1, 2)])]


def test_its_text() -> None:
    assert parse_pace("") is None
    assert parse_pace("step=0.5, prompt_token=0.01,seq=0.2") == PACE


@pytest.mark.parametrize("text", ["pace=1", "step", "step=x", "step=-1", "step=nan", "seq=inf"])
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not"):
        parse_pace(text)
