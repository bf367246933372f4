"""Follows one HTTP request for tokens, and says at any time what it has seen.

::

    arrived ──► read ──► tokenized ──► first token ──► … ──► ended
       └──────────┴──────────┴─────failed────┴───────────────┘

Everything here runs on the event loop. For a token it costs a bisection and some additions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from router.errors import ClientGone, RequestError
from router.ledger import Ledger
from router.marks import Marks
from router.observation import (
    AttemptSeen,
    ChoiceSeen,
    Observation,
    error_type,
    first_stages,
    judged,
    second_stages,
    stage_of,
)

if TYPE_CHECKING:
    from router.otlp import Trace

ORDER = ("queue", "prefill", "transfer", "decode")


@dataclass(eq=False)
class ChoiceWatch:
    """One answer that is being made. Grows by what others do to ``ids`` and ``marks``."""

    prompt_tokens: int  # 0: another choice counts this prompt
    ids: Sequence[int]
    marks: Marks
    first_at: float | None = None  # on the clock, as all moments here
    second_at: float | None = None
    last_at: float | None = None
    written: int = 0  # tokens, as of the last write
    finished: bool = False


class RequestRecorder:
    """``clock`` is monotonic, ``time_of_day`` counts from 1970; ``ledger`` hears of it all."""

    def __init__(
        self,
        model: str,
        endpoint: str,
        ledger: Ledger,
        clock: Callable[[], float] = time.monotonic,
        time_of_day: Callable[[], float] = time.time,
    ) -> None:
        self.request_id = ""
        self.stream = False
        self.choices: tuple[ChoiceWatch, ...] = ()
        self.trace: Trace | None = None  # its span, when it is traced
        self._model = model
        self._endpoint = endpoint
        self._ledger = ledger
        self._clock = clock
        self._time_of_day = time_of_day
        self._arrived_at = self._origin = clock()
        self._at = time_of_day()  # of the origin
        self._read = False
        self._tokenized_at: float | None = None
        self._first: ChoiceWatch | None = None  # the answer whose content was written first
        self._counted = 0  # generated tokens that the ledger knows of
        self._error: RequestError | None = None
        self._ended_at: float | None = None

    # --- what happens ----------------------------------------------------------------------------

    def read(self) -> None:
        """The last byte of the request is here: from now on the client waits for us."""
        self._origin, self._at, self._read = self._clock(), self._time_of_day(), True

    def tokenized(self, request_id: str, stream: bool, choices: Sequence[ChoiceWatch]) -> None:
        """The prompts are ids, and the answers can be made."""
        self.request_id, self.stream, self.choices = request_id, stream, tuple(choices)
        self._tokenized_at = self._clock()

    def wrote(self, index: int, finish: bool) -> None:
        """Something of this answer was written to the client; not streamed: became known."""
        now = self._clock()
        choice = self.choices[index]
        if choice.last_at is None:
            choice.first_at = now
            self._begun(choice)
        else:
            self._ledger.gaps.add(now - choice.last_at)
        choice.last_at = now
        made = len(choice.ids)
        if made == 2 and choice.written == 1:
            choice.second_at = now
        self._ledger.generated_tokens += made - choice.written
        self._counted += made - choice.written
        choice.written = made
        choice.finished = choice.finished or finish

    def failed(self, error: RequestError) -> None:
        """The request ends by this; what comes after it changes nothing."""
        if self._error is None and not (isinstance(error, ClientGone) and self._complete):
            self._error = error

    def ended(self) -> Observation:
        """It is over: the ledger counts it. To be called once."""
        assert self._ended_at is None, "it has ended already"
        self._ended_at = self._clock()
        seen = self.seen()
        self._ledger.generated_tokens += seen.tokens - self._counted
        self._ledger.finished(seen)
        return seen

    # --- what it has seen ------------------------------------------------------------------------

    def seen(self) -> Observation:
        """All of it, as of now."""
        status = 0
        if self._ended_at is not None:
            status = 200 if self._error is None else self._error.status
        choices = tuple(self._choice(choice) for choice in self.choices)
        ttft_s, stages, next_stages = self._first_token(choices)
        seen = Observation(
            request_id=self.request_id,
            model=self._model,
            endpoint=self._endpoint,
            stream=self.stream,
            at=self._at,
            origin=self._origin,
            arrived_at=self._arrived_at - self._origin,
            tokenized_at=self._since(self._tokenized_at),
            ended_at=self._since(self._ended_at),
            code=status,
            error_type=error_type(status),
            error=self._error.message if self._error is not None else "",
            rejection=self._error.rejection if self._error is not None else "",
            left_in=self._left_in(choices) if status == ClientGone.status else "",
            choices=choices,
            ttft_s=ttft_s,
            tpot_s=self._tpot(),
            stages=stages,
            next_stages=next_stages,
        )
        return judged(seen, self._ledger.objectives.ttft_s, self._ledger.objectives.tpot_s)

    @property
    def _complete(self) -> bool:
        """The client has everything but the last formalities."""
        return bool(self.choices) and all(choice.finished for choice in self.choices)

    def _begun(self, choice: ChoiceWatch) -> None:
        self._ledger.prompt_tokens += choice.prompt_tokens
        if choice.prompt_tokens:
            self._ledger.cached_tokens += choice.marks.cached_tokens
        if self._first is None:
            self._first = choice
            self._ledger.first_token(self.seen())

    def _since(self, moment: float | None) -> float | None:
        return None if moment is None else moment - self._origin

    def _choice(self, choice: ChoiceWatch) -> ChoiceSeen:
        return ChoiceSeen(
            prompt_tokens=choice.prompt_tokens,
            cached_tokens=choice.marks.cached_tokens if choice.prompt_tokens else 0,
            tokens=len(choice.ids),
            attempts=choice.marks.attempts(self._origin),
            first_at=self._since(choice.first_at),
            second_at=self._since(choice.second_at),
            last_at=self._since(choice.last_at),
        )

    def _first_token(
        self, choices: Sequence[ChoiceSeen]
    ) -> tuple[float | None, dict[str, float] | None, dict[str, float] | None]:
        """TTFT, and the stages of the first two tokens of the answer that began first."""
        if self._first is None or self._tokenized_at is None:
            return None, None, None
        choice = choices[self.choices.index(self._first)]
        assert choice.first_at is not None
        tokenized_at = self._tokenized_at - self._origin
        made = [attempt for attempt in choice.attempts if attempt.first_at is not None]
        first = first_stages(tokenized_at, made[0], choice.first_at) if made else None
        once = len(choice.attempts) == 1
        second = second_stages(choice.attempts[0], choice) if once else None
        return choice.first_at, first, second

    def _tpot(self) -> float | None:
        """Seconds a token after the first, over all answers that have a second."""
        seconds, tokens = 0.0, 0
        for choice in self.choices:
            if choice.written > 1 and choice.first_at is not None and choice.last_at is not None:
                seconds += choice.last_at - choice.first_at
                tokens += choice.written - 1
        return seconds / tokens if tokens else None

    def _left_in(self, choices: Sequence[ChoiceSeen]) -> str:
        """Where the client left: where the answer was that had come furthest."""
        attempts: list[tuple[AttemptSeen, ...]] = [choice.attempts for choice in choices]
        return max((stage_of(one) for one in attempts), key=ORDER.index, default="queue")
