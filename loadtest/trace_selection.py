"""What of a trace is taken: a window of its time, lengths to a scale, limits.

Works on requests one by one, so that a file larger than memory can pass through.
"""

import heapq
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from loadtest.trace_formats import Skipped, TraceFile, TraceRequest, TraceTurn

REORDER = 10_000
"""Lines that are held back to put them in order of time."""
MIN_BLOCK = 4
"""Tokens of a scaled block: texts of fewer are too often alike by chance."""

Notes = Counter[str]
"""What is to be said of requests that were taken, and of how many."""


@dataclass(frozen=True)
class Selection:
    """What is taken. Limits are in tokens after scaling; 0 is no limit.

    Raises ValueError for a value that makes no sense.
    """

    start_s: float = 0.0  # of the trace's own time, which begins with its first request
    duration_s: float = math.inf
    max_requests: int = 0
    length_scale: float = 1.0  # of prompts, answers and blocks alike
    max_input: int = 0  # of all that is asked in a conversation
    max_output: int = 0  # of one answer
    max_model_len: int = 0  # of a whole conversation, answers included
    too_long: str = "skip"  # or "clip": later turns go first, then the ends of prompts and answers
    block: int = 512  # tokens that a hash id stands for
    first_turn: bool = False  # of conversations, in a format that has them

    def __post_init__(self) -> None:
        if self.too_long not in ("skip", "clip"):
            raise ValueError(f"too_long {self.too_long!r}: want skip or clip")
        if not (self.duration_s > 0 and 0 <= self.start_s < math.inf):
            raise ValueError("a window starts at 0 s or later and lasts more than 0 s")
        if not 0 < self.length_scale < math.inf:
            raise ValueError(f"length_scale {self.length_scale}: want a number above 0")
        for name in ("max_requests", "max_input", "max_output", "max_model_len"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} {getattr(self, name)}: want 0 (no limit) or more")
        if self.max_model_len == 1:
            raise ValueError("max_model_len 1: want room for a prompt and an answer")
        if self.block < 1:
            raise ValueError(f"block {self.block}: want 1 or more tokens")

    @property
    def scaled_block(self) -> int:
        """Tokens of a hash id's block in the prompts that are built; raises ValueError if few."""
        tokens = round(self.block * self.length_scale)
        if tokens < MIN_BLOCK:
            raise ValueError(
                f"length_scale {self.length_scale}: blocks of {self.block} tokens would become"
                f" {tokens}; fewer than {MIN_BLOCK} do not tell one block from another"
            )
        return tokens


def in_order(
    file: TraceFile, requests: Iterable[TraceRequest], notes: Notes
) -> Iterator[TraceRequest]:
    """By time, with the order of lines where times are equal.

    Raises TraceError for a line that comes more than REORDER lines too late.
    """
    waiting: list[tuple[float, int, TraceRequest]] = []
    newest = passed = -math.inf
    for request in requests:
        if request.at_s < passed:
            raise file.error(
                request.line, f"more than {REORDER:,} lines out of order: sort the file by time"
            )
        if request.at_s < newest:
            notes["lines were out of order in time, and are sorted"] += 1
        newest = max(newest, request.at_s)
        heapq.heappush(waiting, (request.at_s, request.line, request))
        if len(waiting) > REORDER:
            passed, _, first = heapq.heappop(waiting)
            yield first
    while waiting:
        yield heapq.heappop(waiting)[2]


def select(
    requests: Iterable[TraceRequest], selection: Selection, skipped: Skipped, notes: Notes
) -> Iterator[TraceRequest]:
    """What is taken, scaled and within the limits; ``at_s`` from the start of the window.

    Stops reading where the window ends or enough are taken.
    """
    begin: float | None = None
    chains: dict[int, tuple[int, int]] = {}
    taken = 0
    for request in requests:
        begin = request.at_s if begin is None else begin
        at_s = request.at_s - begin - selection.start_s
        if at_s < 0:
            continue
        if at_s >= selection.duration_s:
            return
        if not all(turn.input_tokens and turn.output_tokens for turn in request.turns):
            skipped["failed or empty: no tokens asked, or none answered"] += 1
            continue
        if not _agrees(request, selection.block, chains):
            notes["requests have a hash id behind another prefix than before: less is shared"] += 1
        fitting = _fit(_scaled(request, selection), selection, skipped, notes)
        if fitting is not None:
            yield replace(fitting, at_s=at_s)
            taken += 1
            if taken == selection.max_requests:
                return


def _agrees(request: TraceRequest, block: int, chains: dict[int, tuple[int, int]]) -> bool:
    """Whether each hash id has the prefix and the size that it had before, which are kept."""
    left, before, agrees = request.turns[0].input_tokens, -1, True
    for hash_id in request.hash_ids:
        here = (before, min(block, left))
        agrees &= chains.setdefault(hash_id, here) == here
        left, before = left - block, hash_id
    return agrees


def _scaled(request: TraceRequest, selection: Selection) -> TraceRequest:
    scale = selection.length_scale
    if scale == 1.0:
        return request
    turns = tuple(
        replace(
            _cut(turn, max(1, round(turn.input_tokens * scale))),
            output_tokens=max(1, round(turn.output_tokens * scale)),
        )
        for turn in request.turns
    )
    if request.hash_ids:
        # Whole blocks become whole blocks, and a rest a rest of one token at least.
        block, whole = selection.scaled_block, len(request.hash_ids) - 1
        rest = request.turns[0].input_tokens - selection.block * whole
        tokens = block * whole + max(1, round(rest * block / selection.block))
        turns = (replace(turns[0], input_tokens=tokens),)
    return replace(request, turns=turns)


def _fit(
    request: TraceRequest, selection: Selection, skipped: Skipped, notes: Notes
) -> TraceRequest | None:
    """The request, or what the limits leave of it."""
    broken = _broken_limit(request.turns, selection)
    if not broken:
        return request
    if selection.too_long == "skip":
        skipped[f"over {broken} {getattr(selection, broken)}"] += 1
        return None
    notes[f"were clipped to {broken} {getattr(selection, broken)}"] += 1
    most = selection.max_output or math.inf
    turns = tuple(
        replace(turn, output_tokens=int(min(turn.output_tokens, most))) for turn in request.turns
    )
    while len(turns) > 1 and _broken_limit(turns, selection):
        turns = turns[:-1]
    if len(turns) == 1:
        turns = (_clipped(turns[0], selection),)
    num_ids = math.ceil(turns[0].input_tokens / selection.scaled_block) if request.hash_ids else 0
    return replace(request, turns=turns, hash_ids=request.hash_ids[:num_ids])


def _broken_limit(turns: tuple[TraceTurn, ...], selection: Selection) -> str:
    """The name of the first limit that a conversation is over; empty: none."""
    asked = sum(turn.input_tokens for turn in turns)
    answers = [turn.output_tokens for turn in turns]
    values = {
        "max_input": asked,
        "max_output": max(answers),
        "max_model_len": asked + sum(answers),
    }
    return next((name for name, n in values.items() if n > (getattr(selection, name) or n)), "")


def _clipped(turn: TraceTurn, selection: Selection) -> TraceTurn:
    """One turn within the limits; room for the answer is taken from the prompt, up to its start."""
    room = selection.max_model_len or math.inf
    answer = int(min(turn.output_tokens, room - 1))
    asked = int(min(turn.input_tokens, selection.max_input or math.inf, room - answer))
    return replace(_cut(turn, asked), output_tokens=answer)


def _cut(turn: TraceTurn, tokens: int) -> TraceTurn:
    """A prompt of so many tokens; of a text the same share of its words, one at least."""
    if not turn.text:
        return replace(turn, input_tokens=tokens)
    if tokens >= turn.input_tokens:
        return turn
    ends = [word.end() for word in re.finditer(r"\S+", turn.text)]
    keep = max(1, len(ends) * tokens // turn.input_tokens)
    return replace(turn, input_tokens=tokens, text=turn.text[: ends[keep - 1]])
