"""The moments in the making of one answer, noted by the dispatcher as they pass.

Some ten notes for each attempt, none for a token after the second. What they mean is said in
``router.observation``; here moments are on the clock, there they count from the request's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from router.observation import AttemptSeen

_MOMENTS = frozenset(item.name for item in fields(AttemptSeen) if item.name.endswith("_at"))


class Marks:
    """Of one answer, over all its attempts. Each note is about the latest attempt."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.cached_tokens = 0  # of the prompt, when its first token was made
        self._clock = clock
        self._notes: list[dict[str, Any]] = []  # by attempt: fields of AttemptSeen
        self._begun = False  # the first token of all attempts is known

    def attempts(self, origin: float = 0.0) -> tuple[AttemptSeen, ...]:
        """What was noted so far, with moments counted from ``origin``."""
        return tuple(
            AttemptSeen(
                **{k: v - origin if k in _MOMENTS else v for k, v in notes.items()},
            )
            for notes in self._notes
        )

    def began(self, prefill: str, decode: str) -> None:
        """A pair has room, and an attempt begins there."""
        notes = {"prefill": prefill, "decode": decode, "began_at": self._clock()}
        self._notes.append(notes)

    def reserved(self) -> None:
        """The decode worker has set blocks aside; a second one does so off the path."""
        if "reserved_at" not in self._notes[-1]:
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
        if "handed_at" not in self._notes[-1]:
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
        self._note(replaced=self._notes[-1]["decode"], decode=decode)

    def failed(self, cause: str) -> None:
        """The attempt is over, and another one may follow."""
        self._note(ended_at=self._clock(), failure=cause)

    def refused(self) -> None:
        """There was no room after all: it never was an attempt, unless P has done its part."""
        if "first_at" not in self._notes[-1]:
            self._notes.pop()
        else:
            self.failed("refused")

    def _note(self, **changes: Any) -> None:
        self._notes[-1] |= changes
