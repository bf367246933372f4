"""Steps that take at least so long: one machine acts as several slower ones, for tests and trials.

Tokens stay the model's own. Workers that share cores are no faster together than one alone, so
nothing could be gained there by one more; with a pace below what the cores can do, each has a speed
of its own.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from math import inf

from services.engine.engine import Runner
from services.engine.scheduler import Plan, Row


@dataclass(frozen=True)
class Pace:
    """Seconds. A step takes the sum of its parts."""

    step: float = 0.0  # whatever is in it
    prompt_token: float = 0.0  # for each token of a prompt
    seq: float = 0.0  # for each sequence that generates

    def seconds(self, rows: tuple[Row, ...]) -> float:
        """Of a step."""
        decoding = [row for row in rows if row.start >= row.num_prompt]
        prompts = sum(len(row.ids) for row in rows) - sum(len(row.ids) for row in decoding)
        return self.step + self.prompt_token * prompts + self.seq * len(decoding)


def parse_pace(text: str) -> Pace | None:
    """The pace of "step=0.02,prompt_token=0.001,seq=0.005", None for an empty text; raises
    ValueError.
    """
    if not text.strip():
        return None
    names = [field.name for field in fields(Pace)]
    values: dict[str, float] = {}
    for item in text.split(","):
        name, _, value = item.strip().partition("=")
        if name not in names:
            raise ValueError(f"{name!r} is not one of {', '.join(names)}")
        try:
            values[name] = float(value)
        except ValueError:
            raise ValueError(f"{name}: {value!r} is not a number") from None
        if not 0 <= values[name] < inf:
            raise ValueError(f"{name}: {value} is not a time")
    return Pace(**values)


class PacedRunner:
    """A runner whose steps last until their time has come."""

    def __init__(
        self,
        runner: Runner,
        pace: Pace,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._runner = runner
        self._pace = pace
        self._clock, self._sleep = clock, sleep

    def run(self, plan: Plan) -> list[int]:
        """See :class:`~services.engine.engine.Runner`."""
        ends_at = self._clock() + self._pace.seconds(plan.rows)
        tokens = self._runner.run(plan)
        left = ends_at - self._clock()
        if left > 0:
            self._sleep(left)
        return tokens

    def zero(self, blocks: list[int]) -> None:
        """See :class:`~services.engine.engine.Runner`."""
        self._runner.zero(blocks)

    def publish(self, opened: tuple[tuple[int, int], ...], sealed: list[tuple[int, int]]) -> None:
        """See :class:`~services.engine.engine.Runner`."""
        self._runner.publish(opened, sealed)
