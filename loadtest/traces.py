"""Traces of real services as workloads: what was asked when, and what it shared.

``read_trace`` streams a file through a window, scaling and limits into a ``Trace``;
``Trace.conversations`` rebuilds prompts by a ``Writer``. A trace with hash ids (Mooncake) gets one
text for each id, so that prompts share as real token prefixes what the trace's requests shared;
``Trace.sharing`` is what to expect. Formats are ``trace_formats``' and ``sharegpt``'s business.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loadtest.conversation import Conversation, Turn
from loadtest.sharegpt import estimate_tokens, read_sharegpt
from loadtest.sharing import Sharing, chain_sharing
from loadtest.trace_formats import (
    AZURE_COLUMNS,
    BURSTGPT_COLUMNS,
    MOONCAKE_KEYS,
    UNREADABLE,
    Reader,
    Skipped,
    TraceError,
    TraceFile,
    TraceRequest,
    read_azure,
    read_burstgpt,
    read_mooncake,
)
from loadtest.trace_selection import Notes, Selection, in_order, select
from loadtest.writer import Key, Writer, prompt

__all__ = ["Selection", "Trace", "TraceError", "read_trace", "sample_path"]

SAMPLES = Path(__file__).parent / "samples"
READERS: Mapping[str, Reader] = {
    "mooncake": read_mooncake,
    "azure": read_azure,
    "burstgpt": read_burstgpt,
}
FORMATS = (*READERS, "sharegpt")


@dataclass(frozen=True)
class Trace:
    """Requests in order of time, scaled and limited, and what is to be said of them."""

    path: str
    format: str
    requests: tuple[TraceRequest, ...]  # ``at_s`` from the start of the window
    block: int = 0  # tokens of a hash id's block, scaled; 0 where the format has no hash ids
    timed: bool = True  # False where arrivals must come from elsewhere: see ``arriving``
    skipped: Mapping[str, int] = field(default_factory=dict)  # why, and how many
    notes: tuple[str, ...] = ()

    @property
    def duration_s(self) -> float:
        """From the first request to the last."""
        return self.requests[-1].at_s - self.requests[0].at_s if self.requests else 0.0

    @property
    def rate(self) -> float:
        """Mean requests/s at speed 1; 0 for less than two requests. Speed = wanted rate / this."""
        return (len(self.requests) - 1) / self.duration_s if self.duration_s else 0.0

    def sharing(self, *, full_only: bool = False) -> Sharing:
        """Of prompts by their hash ids, by ``loadtest.sharing``'s rule; none without hash ids."""
        return chain_sharing(
            [block for block in self._blocks(request) if not full_only or block[1] == self.block]
            for request in self.requests
            if request.hash_ids
        )

    def arriving(self, times: Sequence[float] | NDArray[np.float64]) -> "Trace":
        """The same requests, in their order, at other times (seconds, ascending).

        As many as there are both of requests and of times.
        """
        requests = tuple(
            replace(request, at_s=float(at))
            for request, at in zip(self.requests, times, strict=False)
        )
        return replace(self, requests=requests, timed=True)

    def conversations(
        self,
        writer: Writer,
        *,
        speed: float = 1.0,
        class_name: str = "trace",
        seed: int = 0,
        think_s: float = 0.0,
    ) -> list[Conversation]:
        """Build the workload; ``iterate`` does the same one by one, for traces of great lengths.

        ``speed`` divides times. Another ``seed`` gives other texts that share in the same way, so
        that a server which is asked again finds nothing of the run before in its cache.
        Raises ValueError for a speed of 0 or less, and where the trace has no times.
        """
        return list(
            self.iterate(writer, speed=speed, class_name=class_name, seed=seed, think_s=think_s)
        )

    def iterate(
        self,
        writer: Writer,
        *,
        speed: float = 1.0,
        class_name: str = "trace",
        seed: int = 0,
        think_s: float = 0.0,
    ) -> Iterator[Conversation]:
        """Conversations in order of time, each built when it is asked for."""
        if not 0 < speed < math.inf:
            raise ValueError(f"speed {speed}: want a number above 0")
        if not self.timed:
            raise ValueError(f"{self.format} has no times: its requests need arrivals")
        return (
            Conversation(
                request.at_s / speed, class_name, tuple(self._turns(request, writer, seed, think_s))
            )
            for request in self.requests
        )

    def _turns(
        self, request: TraceRequest, writer: Writer, seed: int, think_s: float
    ) -> Iterator[Turn]:
        parts: list[tuple[Key, int]]
        for i, turn in enumerate(request.turns):
            parts = [(("block", seed, number), size) for number, size in self._blocks(request)]
            parts = parts or [(("request", seed, request.line, i), turn.input_tokens)]
            text = turn.text or prompt(writer, parts)
            yield Turn(text, turn.input_tokens, turn.output_tokens, think_s if i else 0.0)

    def _blocks(self, request: TraceRequest) -> list[tuple[int, int]]:
        """Hash ids with the tokens of each: whole blocks, and what is left for the last."""
        if not request.hash_ids:
            return []
        whole = [(hash_id, self.block) for hash_id in request.hash_ids[:-1]]
        rest = request.turns[0].input_tokens - self.block * len(whole)
        return [*whole, (request.hash_ids[-1], rest)]

    def template_note(self, writer: Writer) -> str:
        """What a server's chat template does to short blocks, for people; empty: nothing to say.

        Room for it is made in the last block. Where that is too small, prompts are longer than
        the trace's, and all of them share the template's front.
        """
        if not 0 < self.block <= writer.overhead:
            return ""
        return (
            f"the server puts {writer.overhead} tokens around a prompt, blocks have {self.block}:"
            " prompts are longer than the trace's and share more (a larger length_scale, or the"
            " completions endpoint, avoids that)"
        )

    def describe(self) -> str:
        """Lines for the terminal: how much, how long, how often, what is shared and left out."""
        lines = [f"{self.path} ({self.format}): {len(self.requests):,} requests"]
        if self.timed and self.requests:
            lines[0] += f" in {self.duration_s:,.1f} s, {self.rate:.3g}/s"
        if self.requests:
            asked = [sum(t.input_tokens for t in r.turns) for r in self.requests]
            answers = [t.output_tokens for r in self.requests for t in r.turns]
            lines += [_percentiles("input", asked), _percentiles("output", answers)]
        turns = sum(len(request.turns) for request in self.requests)
        if turns > len(self.requests):
            lines.append(f"  {turns:,} turns; input is of whole conversations")
        if self.block:
            seen = self.sharing()
            lines.append(
                f"  sharing {seen.rate:.1%}: {seen.shared:,} of {seen.asked:,} blocks"
                f" of {self.block} tokens were asked before"
            )
        lines += [f"  left out: {count:,} {why}" for why, count in self.skipped.items()]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def _percentiles(name: str, tokens: Sequence[int]) -> str:
    p50, p99 = np.percentile(tokens, [50, 99])
    return f"  {name} tokens: p50 {p50:,.0f}, p99 {p99:,.0f}, mean {np.mean(tokens):,.1f}"


def sample_path(name: str) -> Path:
    """The file of a sample of our own making; raises ValueError that lists them."""
    found = {path.stem: path for path in SAMPLES.iterdir() if path.suffix in _DATA}
    if name not in found:
        raise ValueError(f"no sample {name!r}; there are {', '.join(sorted(found))}")
    return found[name]


_DATA = (".jsonl", ".csv", ".json")


def read_trace(
    path: str | Path,
    format: str = "auto",
    selection: Selection | None = None,
    *,
    count_tokens: Callable[[str], int] = estimate_tokens,
) -> Trace:
    """Read what is selected of a trace; ``sample:NAME`` is one that comes with the project.

    ``count_tokens`` gives lengths to real texts (ShareGPT). Memory is that of the requests taken;
    reading ends with the window. Raises TraceError, a ValueError, for a file that cannot be read.
    """
    selection = selection or Selection()
    name = str(path)
    file = TraceFile(sample_path(name[7:]) if name.startswith("sample:") else Path(path))
    kind = find_format(file) if format == "auto" else format
    if kind not in FORMATS:
        raise ValueError(f"trace format {kind!r}: want auto, {', '.join(FORMATS)}")
    skipped, notes = Skipped(), Notes()
    if kind == "sharegpt":
        if selection.start_s:
            raise ValueError(f"{name}: sharegpt has no times, so there is no window of it")
        rows = read_sharegpt(file, skipped, count_tokens, selection.first_turn)
    else:
        rows = in_order(file, READERS[kind](file, selection.block), notes)
    taken = tuple(select(rows, selection, skipped, notes))
    if not taken:
        why = ", ".join(f"{count:,} {what}" for what, count in skipped.items())
        raise file.error(0, f"no request was taken{f': {why}' if why else ''}")
    return Trace(
        name,
        kind,
        taken,
        block=selection.scaled_block if kind == "mooncake" else 0,
        timed=kind != "sharegpt",
        skipped=dict(skipped),
        notes=tuple(f"{count:,} {what}" for what, count in notes.items()),
    )


def find_format(file: TraceFile) -> str:
    """By the first line; raises TraceError that says what it would know."""
    with file.open() as text:
        try:
            start = text.read(1 << 16)
        except UNREADABLE as error:
            raise file.error(0, f"cannot be read: {error}") from None
    line = start.lstrip().split("\n", 1)[0]
    names = {name.strip() for name in line.split(",")}
    if line.startswith("["):
        return "sharegpt"
    if line.startswith("{"):
        return "sharegpt" if '"conversations"' in start else "mooncake"
    if names.issuperset(AZURE_COLUMNS):
        return "azure"
    if names.issuperset(BURSTGPT_COLUMNS):
        return "burstgpt"
    raise file.error(
        1,
        f"no known format: {line[:60]!r}. Known are JSON lines with {', '.join(MOONCAKE_KEYS)}"
        f" (mooncake), csv with {', '.join(AZURE_COLUMNS)} (azure) or"
        f" {', '.join(BURSTGPT_COLUMNS)} (burstgpt), JSON with conversations (sharegpt)",
    )
