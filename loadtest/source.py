"""Where requests come from: the options of a workload, made into conversations for any rate.

A source is checked before a server is asked anything. Texts come from a writer, which the server
may first have to be asked for. Knows nothing of HTTP and clocks.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from loadtest.arrivals import parse_arrivals
from loadtest.conversation import Conversation
from loadtest.options import WorkloadOptions
from loadtest.scenario import Scenario, plan, scaled
from loadtest.scenario_file import load_scenario, single
from loadtest.slo import SLO, parse_slo
from loadtest.trace_selection import Selection
from loadtest.traces import Trace, read_trace
from loadtest.wording import digits
from loadtest.writer import IdWriter, WordWriter, Writer, rng_of

DURATION_S = 60.0  # of a run that is told neither a duration nor a number of requests
PER_PLACE = 20  # requests of a closed loop that is told no number
MAX_REQUESTS = 200_000  # some GB of prompts of 1,000 tokens
VOCABULARY = 16_384  # tokens that about any model's vocabulary has


@dataclass(frozen=True)
class Extent:
    """How much is asked. ``rate`` is of requests, infinite for all at once."""

    rate: float
    duration_s: float = 0.0  # either this
    num_requests: int = 0  # or this
    seed: int = 0  # of lengths and times
    text_seed: int = 0  # of what is in the prompts


class Source(Protocol):
    """Makes the conversations of a workload."""

    @property
    def name(self) -> str:
        """In a word or two."""

    @property
    def about(self) -> str:
        """In a sentence."""

    @property
    def slos(self) -> Mapping[str, SLO]:
        """By class."""

    @property
    def extent(self) -> Extent:
        """What the options ask for, when nobody asks for another rate."""

    def conversations(self, writer: Writer, extent: Extent) -> tuple[list[Conversation], list[str]]:
        """By the time at which they are due, and notes for people. Raises ValueError."""


def source_of(options: WorkloadOptions) -> Source:
    """Raises ValueError that names the option, the value and what is wanted."""
    _check(options)
    if options.trace:
        return _trace(options)
    if options.scenario:
        scenario = scaled(load_scenario(options.scenario), options.scale)
    else:
        scenario = scaled(_of_flags(options), options.scale)
    classes = [spec.name for spec in scenario.classes]
    return ScenarioSource(
        scenario,
        slos_of(options.slo, classes, scenario.slos),
        _extent(options, DURATION_S),
        options.max_model_len,
    )


def _check(options: WorkloadOptions) -> None:
    """What is wrong whatever the workload is, and what would be ignored."""
    if options.duration_s < 0 or options.requests < 0 or options.concurrency < 0:
        raise ValueError("duration, requests and concurrency must not be negative")
    for name in ("rate", "speed", "length_scale", "scale"):
        if not (value := getattr(options, name)) > 0:
            raise ValueError(f"{name} {value:g}: want a number above 0")
    if options.trace and options.scenario:
        raise ValueError("want either a scenario or a trace, not both")
    if options.requests and options.duration_s:
        raise ValueError("want either a number of requests or a duration, not both")
    if not options.trace:
        plain = WorkloadOptions()
        for name in ("speed", "length_scale", "max_input", "trace_format"):
            if getattr(options, name) != getattr(plain, name):
                raise ValueError(f"{name} is of a trace, and there is none")


def _bounded(extent: Extent) -> Extent:
    """All requests are made before the first is sent, so that nothing but sending is left then."""
    number = extent.num_requests or extent.rate * extent.duration_s
    if number > MAX_REQUESTS:
        raise ValueError(
            f"these are {number:,.0f} requests, and a run has {MAX_REQUESTS:,} at most: a lower"
            " rate, or a shorter duration"
        )
    return extent


def _of_flags(options: WorkloadOptions) -> Scenario:
    return single(
        arrivals=options.arrivals,
        input=options.input,
        output=options.output,
        prefix=options.prefix,
        prefixes=options.prefixes,
        turns=options.turns,
        think=options.think,
    )


def _extent(options: WorkloadOptions, duration_s: float) -> Extent:
    seeds = {"seed": options.seed, "text_seed": options.seed}
    if options.concurrency:
        number = options.requests or PER_PLACE * options.concurrency
        return _bounded(Extent(math.inf, num_requests=number, **seeds))
    if options.requests:
        return _bounded(Extent(options.rate, num_requests=options.requests, **seeds))
    if math.isinf(options.rate):
        raise ValueError("an infinite rate needs a number of requests")
    return _bounded(Extent(options.rate, duration_s=options.duration_s or duration_s, **seeds))


@dataclass(frozen=True)
class ScenarioSource:
    """See :class:`Source`."""

    scenario: Scenario
    slos: Mapping[str, SLO]
    extent: Extent
    max_model_len: int = 0

    @property
    def name(self) -> str:
        return self.scenario.name

    @property
    def about(self) -> str:
        if self.scenario.about:
            return self.scenario.about
        return "; ".join(
            f"{spec.input} tokens in, {spec.output} out"
            + (f", behind {spec.prefix} shared by all" if spec.prefix else "")
            + (f", {spec.turns} turns" if str(spec.turns) != "1" else "")
            for spec in self.scenario.classes
        )

    def conversations(self, writer: Writer, extent: Extent) -> tuple[list[Conversation], list[str]]:
        """See :class:`Source`."""
        made = plan(
            self.scenario,
            writer,
            rate=extent.rate,
            duration_s=extent.duration_s,
            num_requests=extent.num_requests,
            seed=extent.seed,
            text_seed=extent.text_seed,
            max_model_len=self.max_model_len,
        )
        notes = [
            f"{count:,} conversations of class {name} were cut to fit the model's context"
            for name, count in made.num_clipped.items()
            if count
        ]
        return list(made.conversations), notes


# --- traces --------------------------------------------------------------------------------------


def _trace(options: WorkloadOptions) -> "TraceSource":
    duration_s = options.duration_s or math.inf
    timed_by_trace = not (options.requests or options.concurrency)
    trace = read_trace(
        options.trace,
        options.trace_format,
        Selection(
            duration_s=duration_s * options.speed if timed_by_trace else math.inf,
            max_requests=options.requests,
            length_scale=options.length_scale,
            max_input=options.max_input,
            max_model_len=options.max_model_len,
        ),
    )
    if trace.timed and not options.concurrency:
        seeds = {"seed": options.seed, "text_seed": options.seed}
        last_s = trace.requests[-1].at_s / options.speed
        extent = Extent(trace.rate * options.speed, duration_s=last_s + 1e-3, **seeds)
    else:
        extent = _extent(options, DURATION_S)
    slos = slos_of(options.slo, [TraceSource.class_name], {})
    return TraceSource(trace, slos, extent, options.arrivals)


@dataclass(frozen=True)
class TraceSource:
    """See :class:`Source`. At another rate the same requests come faster or slower."""

    trace: Trace
    slos: Mapping[str, SLO]
    extent: Extent
    arrivals: str = "poisson"

    class_name = "trace"

    @property
    def name(self) -> str:
        return Path(self.trace.path).name

    @property
    def about(self) -> str:
        first, _, _ = self.trace.describe().partition("\n")
        return first.removeprefix(f"{self.trace.path} ")

    def conversations(self, writer: Writer, extent: Extent) -> tuple[list[Conversation], list[str]]:
        """See :class:`Source`."""
        trace, speed = self.trace, 1.0
        if math.isinf(extent.rate):
            trace = replace(trace, requests=trace.requests[: extent.num_requests], timed=True)
        elif not trace.timed:
            rng = rng_of((extent.seed, "arrivals"))
            arrivals = parse_arrivals(self.arrivals)
            if extent.num_requests:
                times = arrivals.times_of(extent.rate, extent.num_requests, rng)
            else:
                times = arrivals.times(extent.rate, extent.duration_s, rng)
            trace = trace.arriving(times)
        else:
            if not trace.rate:
                raise ValueError(f"{trace.path}: one moment is all it has, so it has no rate")
            speed = extent.rate / trace.rate
        made = trace.conversations(
            writer, speed=speed, class_name=self.class_name, seed=extent.text_seed
        )
        if extent.duration_s:
            made = [conversation for conversation in made if conversation.at_s < extent.duration_s]
        return made, [
            *trace.describe().split("\n")[1:],
            *filter(None, [trace.template_note(writer)]),
        ]


# --- words ---------------------------------------------------------------------------------------


def slos_of(text: str, classes: list[str], given: Mapping[str, SLO]) -> dict[str, SLO]:
    """SLOs by class: ``"ttft=1s,tpot=50ms"`` for all, ``"chat:tpot=50ms;long:ttft=9s"`` for each.

    Classes that are not named keep theirs. Raises ValueError for a class that is not there.
    """
    slos = {name: given.get(name, SLO()) for name in classes}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        named = re.fullmatch(r"([\w.+-]+)\s*:\s*(\w+\s*[=:].*)", part)
        if named is None:
            slos = dict.fromkeys(slos, parse_slo(part))
        elif named[1] in slos:
            slos[named[1]] = parse_slo(named[2])
        else:
            raise ValueError(f"slo {part!r}: no class {named[1]!r}, only {', '.join(classes)}")
    return slos


def load_words(options: WorkloadOptions, extent: Extent) -> str:
    """How the requests arrive."""
    if options.concurrency:
        return f"{options.concurrency} at a time, {extent.num_requests:,} requests"
    if options.trace:
        how = f"the trace's own times, {options.speed:g} times as fast"
    elif options.scenario:
        how = "arrivals as the scenario has them"
    else:
        how = f"{options.arrivals} arrivals"
    if math.isinf(extent.rate):
        return f"{extent.num_requests:,} requests at once"
    much = (
        f"{extent.num_requests:,} requests"
        if extent.num_requests
        else f"for {digits(extent.duration_s)} s"
    )
    return f"{how}, {digits(extent.rate)} requests/s, {much}"


def writer_of(prompts: str) -> tuple[Writer, bool]:
    """The writer that an option names, and whether a server has to be asked to complete it.

    ``words``, ``ids``, ``ids:VOCABULARY``, or the path of a tokenizer.json. Raises ValueError.
    """
    kind, _, number = prompts.partition(":")
    if kind == "ids":
        if number and not number.isdecimal():
            raise ValueError(f"prompts {prompts!r}: want ids:N with N tokens in the vocabulary")
        return IdWriter(int(number or VOCABULARY)), False
    if prompts == "words":
        return WordWriter(), True
    path = Path(prompts)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"prompts {prompts!r}: want words, ids, ids:N, or a tokenizer.json")
    return WordWriter.from_tokenizer(path), True
