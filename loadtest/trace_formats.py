"""The public trace formats, line by line: Mooncake, Azure 2023 and 2024, BurstGPT, ShareGPT.

Readers are generators over a file that may be larger than memory, compressed by gzip or not. They
know what a line means and when it is wrong; windows, limits and prompts are ``traces``' business.
"""

import csv
import gzip
import io
import json
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

UNREADABLE = (UnicodeDecodeError, EOFError, OSError, zlib.error)
"""What reading a file may raise that is no text, or a broken gzip."""


class TraceError(ValueError):
    """A trace that cannot be read; names the file, the line and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class TraceTurn:
    """One prompt and the length of its answer, in tokens."""

    input_tokens: int  # what is new in this turn
    output_tokens: int
    text: str = ""  # where the format has texts


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace; a conversation where the format has those."""

    line: int
    at_s: float  # seconds, from any zero; 0 where the format has no times
    turns: tuple[TraceTurn, ...]
    hash_ids: tuple[int, ...] = ()  # of the first turn's blocks: equal id, equal block and prefix


@dataclass(frozen=True)
class TraceFile:
    """A file, its lines, and how its errors read."""

    path: Path

    def error(self, line: int, what: str) -> TraceError:
        """The error to raise for a line; 0 is for the file as a whole."""
        return TraceError(f"{self.path}{f':{line}' if line else ''}: {what}")

    def open(self) -> TextIO:
        """As text; raises TraceError where the file cannot be opened."""
        try:
            with self.path.open("rb") as raw:
                zipped = raw.read(2) == b"\x1f\x8b"
            opened = gzip.open if zipped else io.open
            return opened(self.path, "rt", encoding="utf-8-sig", newline="")
        except OSError as error:
            raise self.error(0, error.strerror or str(error)) from None

    def lines(self) -> Iterator[tuple[int, str]]:
        """Lines with their numbers, from 1; empty ones are left out."""
        number = 0
        with self.open() as text:
            try:
                for number, line in enumerate(text, 1):
                    if line.strip():
                        yield number, line
            except UNREADABLE as error:
                # Bytes are decoded ahead of lines, so that this is not the very line.
                raise self.error(0, f"cannot be read behind line {number}: {error}") from None


MOONCAKE_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")

Skipped = Counter[str]
"""Why lines were left out, and how many."""


def read_mooncake(file: TraceFile, block: int) -> Iterator[TraceRequest]:
    """Mooncake (FAST'25): JSON lines with times in ms and a hash id for each ``block`` tokens.

    The last block of a prompt is a partial one where ``input_length`` is no multiple of it. A line
    whose number of ids does not fit its ``input_length`` is an error.
    """
    for number, line in file.lines():
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            raise file.error(number, f"not JSON: {error.msg} at column {error.colno}") from None
        if not isinstance(values, dict):
            raise file.error(number, "want a JSON object")
        at_ms = _number(file, number, values, "timestamp")
        tokens = _count(file, number, values, "input_length")
        answer = _count(file, number, values, "output_length")
        ids = values.get("hash_ids")
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise file.error(number, f"hash_ids: want a list of whole numbers, got {_short(ids)}")
        if len(ids) != math.ceil(tokens / block):
            raise file.error(
                number,
                f"{len(ids)} hash_ids for input_length {tokens}: want {math.ceil(tokens / block)},"
                f" one for each {block} tokens and one for the rest",
            )
        yield TraceRequest(number, at_ms / 1000, (TraceTurn(tokens, answer),), tuple(ids))


def read_azure(file: TraceFile, block: int) -> Iterator[TraceRequest]:
    """Azure LLM inference traces: 2023 has times to 100 ns, 2024 with or without a fraction."""
    for number, (at, tokens, answer) in _csv(file, AZURE_COLUMNS):
        try:
            moment = datetime.fromisoformat(at.strip())
        except ValueError:
            raise file.error(
                number, f"TIMESTAMP {_short(at)}: want a time such as 2023-11-16 18:17:03.9799600"
            ) from None
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        turn = TraceTurn(
            _parse_count(file, number, "ContextTokens", tokens),
            _parse_count(file, number, "GeneratedTokens", answer),
        )
        yield TraceRequest(number, moment.timestamp(), (turn,))


def read_burstgpt(file: TraceFile, block: int) -> Iterator[TraceRequest]:
    """BurstGPT, with or without its columns of sessions: these are not followed."""
    for number, (at, tokens, answer) in _csv(file, BURSTGPT_COLUMNS):
        try:
            at_s = float(at)
        except ValueError:
            at_s = math.nan
        if not math.isfinite(at_s):
            raise file.error(number, f"Timestamp {_short(at)}: want seconds")
        turn = TraceTurn(
            _parse_count(file, number, "Request tokens", tokens),
            _parse_count(file, number, "Response tokens", answer),
        )
        yield TraceRequest(number, at_s, (turn,))


Reader = Callable[[TraceFile, int], Iterator[TraceRequest]]


def _csv(file: TraceFile, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Line numbers and the values of the columns, which are found by the header's names."""
    lines = file.lines()
    _, header = next(lines, (0, ""))
    names = [name.strip() for name in next(csv.reader([header]), [])]
    missing = [name for name in columns if name not in names]
    if missing:
        raise file.error(1, f"no column {', '.join(missing)} in the header {_short(header)}")
    places = [names.index(name) for name in columns]
    for number, line in lines:
        values = next(csv.reader([line]))
        if len(values) != len(names):
            raise file.error(number, f"{len(values)} values; the header has {len(names)}")
        yield number, [values[place] for place in places]


def _parse_count(file: TraceFile, line: int, name: str, text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value >= 0 and value.is_integer()):
        raise file.error(line, f"{name} {_short(text)}: want a whole number of tokens")
    return int(value)


def _number(file: TraceFile, line: int, values: Mapping[str, Any], name: str) -> float:
    if name not in values:
        raise file.error(line, f"no {name!r}; a line has {', '.join(MOONCAKE_KEYS)}")
    value = values[name]
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise file.error(line, f"{name}: want a number, got {_short(value)}")
    return value


def _count(file: TraceFile, line: int, values: Mapping[str, Any], name: str) -> int:
    value = _number(file, line, values, name)
    if value < 0 or value != int(value):
        raise file.error(line, f"{name}: want a whole number of tokens, got {_short(value)}")
    return int(value)


def _short(value: object) -> str:
    text = repr(value.strip() if isinstance(value, str) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."
