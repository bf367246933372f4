"""ShareGPT conversations: real texts, no times.

The file is one JSON list, of any size: entries are decoded one by one from a buffer. JSON lines
and a single object are read as well. Knows what an entry means; who asks it when does ``traces``.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from loadtest.trace_formats import UNREADABLE, Skipped, TraceFile, TraceRequest, TraceTurn

ASKERS = ("human", "user")
ANSWERERS = ("gpt", "chatgpt", "assistant", "bing", "bard")
_CHUNK = 1 << 20  # characters read at a time
_LONGEST = 64 << 20  # characters of one entry: beyond it, it is not an entry


def estimate_tokens(text: str) -> int:
    """Tokens of English text by its words: four tokens for three words. Wrong for code and CJK."""
    return max(1, round(len(text.split()) * 4 / 3))


def read_sharegpt(
    file: TraceFile,
    skipped: Skipped,
    count_tokens: Callable[[str], int] = estimate_tokens,
    first_turn: bool = False,
) -> Iterator[TraceRequest]:
    """Conversations of human and gpt by turns; those without a question and an answer are skipped.

    What stands before the first question (a system text, an answer to nothing) is left out. A
    conversation ends at its last answer before the turns stop alternating or a text is missing.
    """
    for line, entry in _entries(file):
        if not isinstance(entry, dict):
            raise file.error(line, f"an entry is a JSON object, not {type(entry).__name__}")
        said = entry.get("conversations")
        pairs = list(_pairs(said)) if isinstance(said, list) else []
        if not pairs:
            skipped["without a question and an answer"] += 1
            continue
        turns = tuple(
            TraceTurn(count_tokens(question), count_tokens(answer), question)
            for question, answer in (pairs[:1] if first_turn else pairs)
        )
        yield TraceRequest(line, 0.0, turns)


def _pairs(said: list[Any]) -> Iterator[tuple[str, str]]:
    """Questions with their answers, from the first question on."""
    texts = [_speech(part) for part in said]
    start = next((i for i, (who, _) in enumerate(texts) if who in ASKERS), len(texts))
    for (who, question), (other, answer) in zip(
        texts[start::2], texts[start + 1 :: 2], strict=False
    ):
        if who not in ASKERS or other not in ANSWERERS or not question or not answer:
            return
        yield question, answer


def _speech(part: Any) -> tuple[str, str]:
    """Who says what; empty where it is not a text of somebody."""
    if not isinstance(part, dict):
        return "", ""
    who, text = part.get("from"), part.get("value")
    return str(who).lower(), text.strip() if isinstance(text, str) else ""


def _entries(file: TraceFile) -> Iterator[tuple[int, Any]]:
    """Entries with the line each begins in; raises TraceError where the JSON is broken."""
    decoder = json.JSONDecoder()
    between = re.compile(r"[\[\],\s]*")  # entries, whatever the layout
    with file.open() as text:
        line, buffer, at, last, ended = 1, _more(file, text, 1), 0, "", False
        is_list = buffer.lstrip().startswith("[")
        while True:
            gap = between.match(buffer, at)
            assert gap is not None  # it may be empty
            line, at, last = line + gap[0].count("\n"), gap.end(), gap[0].rstrip() or last
            if at < len(buffer):
                try:
                    entry, end = decoder.raw_decode(buffer, at)
                except json.JSONDecodeError as error:
                    if ended or len(buffer) - at > _LONGEST:
                        down = buffer.count("\n", at, error.pos)
                        raise file.error(line + down, f"not JSON: {error.msg}") from None
                else:
                    yield line, entry
                    line, at = line + buffer.count("\n", at, end), end
                    continue
            elif ended:
                break
            more = _more(file, text, line)
            buffer, at, ended = buffer[at:] + more, 0, not more
    if is_list and not last.endswith("]"):
        raise file.error(line, "the list has no end: the file was cut")


def _more(file: TraceFile, text: TextIO, line: int) -> str:
    try:
        return text.read(_CHUNK)
    except UNREADABLE as error:
        raise file.error(0, f"cannot be read behind line {line}: {error}") from None
