"""The moments in the making of one answer, noted by the dispatcher as they pass.

Some ten notes for each attempt, none for a token after the second. What they mean is said in
``router.observation``; here moments are on the clock, there they count from the request's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from router.observation import AttemptSeen


class Marks:
    """Of one answer, over all its attempts. Each note is about the latest attempt."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.attempts: list[AttemptSeen] = []
        self.cached_tokens = 0  # of the prompt, when its first token was made
        self._clock = clock
        self._begun = False  # the first token of all attempts is known

    def began(self, prefill: str, decode: str) -> None:
        """A pair has room, and an attempt begins there."""
        self.attempts.append(AttemptSeen(prefill, decode, self._clock()))

    def reserved(self) -> None:
        """The decode worker has set blocks aside; a second one does so off the path."""
        if self.attempts[-1].reserved_at is None:
            self._note(reserved_at=self._clock())

    def sent(self) -> None:
        """The prompt is on its way to who computes it."""
        self._note(sent_at=self._clock())

    def first(self, cached_tokens: int, computed_ms: float) -> None:
        """The first token of this attempt has come."""
        self._note(first_at=self._clock(), prefill_s=computed_ms / 1000)
        if not self._begun:
            self._begun = True
            self.cached_tokens = cached_tokens

    def handed(self) -> None:
        """The ticket is on its way to the decode worker."""
        if self.attempts[-1].handed_at is None:
            self._note(handed_at=self._clock())

    def pulled(self) -> None:
        """The decode worker has the KV."""
        self._note(pulled_at=self._clock())

    def next(self, waited_ms: float, computed_ms: float) -> None:
        """The first token of the decode worker has come, after that of the prefill worker."""
        now = self._clock()
        self._note(next_at=now, admit_s=waited_ms / 1000, step_s=computed_ms / 1000)

    def replaced(self, decode: str) -> None:
        """Another decode worker goes on with what was prefilled."""
        self._note(replaced=self.attempts[-1].decode, decode=decode)

    def failed(self, cause: str) -> None:
        """The attempt is over, and another one may follow."""
        self._note(ended_at=self._clock(), failure=cause)

    def refused(self) -> None:
        """There was no room after all: it never was an attempt, unless P has done its part."""
        if self.attempts[-1].first_at is None:
            self.attempts.pop()
        else:
            self.failed("refused")

    def _note(self, **changes: Any) -> None:
        self.attempts[-1] = replace(self.attempts[-1], **changes)
