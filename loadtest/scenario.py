"""Workloads: classes of requests, each with lengths, arrivals and an SLO, made into conversations.

A scenario says what is asked, never how much of it: the rate and the duration are `build`'s. Knows
nothing of files, servers and clocks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from loadtest.arrivals import POISSON, Arrivals, Times
from loadtest.conversation import Conversation, Turn
from loadtest.lengths import Lengths, parse_lengths
from loadtest.slo import SLO
from loadtest.writer import Key, Writer, prompt, rng_of

TURN_MARGIN = 16
"""Tokens of the context left free for what a chat template puts around each later turn."""


@dataclass(frozen=True)
class Think:
    """How long a user waits before the next turn."""

    mean_s: float = 0.0
    varies: bool = False  # exponential; otherwise always the mean

    def sample(self, rng: np.random.Generator) -> float:
        """Draw one, in seconds."""
        return float(rng.exponential(self.mean_s)) if self.varies else self.mean_s


@dataclass(frozen=True)
class ClassSpec:
    """Requests of one kind. Its fields are the keys of a scenario file."""

    name: str
    input: Lengths  # tokens of a first prompt, behind the shared prefix
    output: Lengths  # tokens of an answer
    share: float = 1.0  # of the requests, in proportion to the other classes' shares
    arrivals: Arrivals | None = None  # its own; None: drawn from the scenario's common stream
    prefix: int = 0  # tokens at the front of first prompts, shared with others
    prefixes: int = 1  # how many different ones there are
    popularity: float = 0.0  # the k-th is asked for as often as k ** -popularity (Zipf)
    turns: Lengths = parse_lengths(1)  # of a conversation
    turn_input: Lengths | None = None  # tokens that each later turn adds; None: as input
    think: Think = Think()  # from the end of an answer to the next turn
    slo: SLO = SLO()

    @property
    def later_input(self) -> Lengths:
        """Tokens that each turn after the first adds."""
        return self.turn_input or self.input

    def scaled(self, factor: float) -> "ClassSpec":
        """With all lengths, the prefix's too, ``factor`` times as long."""
        return replace(
            self,
            input=self.input.scaled(factor),
            output=self.output.scaled(factor),
            turn_input=self.turn_input and self.turn_input.scaled(factor),
            prefix=max(1, round(self.prefix * factor)) if self.prefix else 0,
        )


@dataclass(frozen=True)
class Scenario:
    """Classes of requests that arrive together."""

    name: str
    classes: tuple[ClassSpec, ...]
    about: str = ""  # for people
    arrivals: Arrivals = POISSON  # of all classes that have none of their own

    def __post_init__(self) -> None:
        names = [spec.name for spec in self.classes]
        if not names:
            raise ValueError("there are no classes")
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two classes are named {name!r}")

    @property
    def slos(self) -> dict[str, SLO]:
        """By the name of the class."""
        return {spec.name: spec.slo for spec in self.classes}


def scaled(scenario: Scenario, factor: float) -> Scenario:
    """All lengths times ``factor``, for a smaller or a larger deployment; SLOs stay as they are.

    Raises ValueError for a factor that is not above 0.
    """
    if not 0 < factor < math.inf:
        raise ValueError(f"a scale of {factor:g}: want a number above 0")
    return replace(scenario, classes=tuple(spec.scaled(factor) for spec in scenario.classes))


@dataclass(frozen=True)
class Workload:
    """What `plan` has made of a scenario."""

    conversations: tuple[Conversation, ...]  # by the time at which they are due
    num_clipped: Mapping[str, int]  # class → conversations cut to fit the context


def build(
    scenario: Scenario,
    writer: Writer,
    *,
    rate: float,
    duration_s: float = 0.0,
    num_requests: int = 0,
    seed: int = 0,
    text_seed: int | None = None,
    max_model_len: int = 0,
) -> list[Conversation]:
    """The conversations of `plan`, which has the same arguments."""
    workload = plan(
        scenario,
        writer,
        rate=rate,
        duration_s=duration_s,
        num_requests=num_requests,
        seed=seed,
        text_seed=text_seed,
        max_model_len=max_model_len,
    )
    return list(workload.conversations)


def plan(
    scenario: Scenario,
    writer: Writer,
    *,
    rate: float,
    duration_s: float = 0.0,
    num_requests: int = 0,
    seed: int = 0,
    text_seed: int | None = None,
    max_model_len: int = 0,
) -> Workload:
    """All conversations that begin within a duration, or so many that they hold so many requests.

    ``rate`` is of requests, later turns counted: conversations of three turns begin at a third of
    it. It may be infinite with ``num_requests``: all are due at once, as closed loops want it. The
    number is met to the nearest whole conversation.

    The same seed gives the same schedule, lengths and texts; at another rate, the same lengths and
    texts in the same order. Servers that cache prefixes know these texts from the last run: another
    ``text_seed`` (by default the seed) gives the same schedule and lengths with other texts.

    ``max_model_len`` is the model's context, 0 if unknown. Raises ValueError that names the class
    whose fixed lengths are beyond it. What a distribution's tail has drawn beyond it is cut: the
    first turn's lengths, and the turns that no longer fit.
    """
    if (duration_s > 0) == (num_requests > 0):
        raise ValueError("want either a duration or a number of requests, and above 0")
    for spec in scenario.classes if max_model_len else ():
        _check_context(spec, max_model_len)
    starts = _starts(scenario, rate, duration_s, num_requests, seed)
    texts = seed if text_seed is None else text_seed
    conversations: list[Conversation] = []
    num_clipped = {}
    for spec, times in zip(scenario.classes, starts, strict=True):
        found, num_clipped[spec.name] = _conversations(
            spec, times, writer, (seed, texts), max_model_len
        )
        conversations += found
    conversations.sort(key=lambda conversation: conversation.at_s)
    return Workload(tuple(conversations), num_clipped)


# --- when ----------------------------------------------------------------------------------------


def _starts(
    scenario: Scenario, rate: float, duration_s: float, num_requests: int, seed: int
) -> list[Times]:
    """For each class, when its conversations begin."""
    classes = scenario.classes
    total_share = sum(spec.share for spec in classes)
    per_request = [spec.share / total_share / spec.turns.mean for spec in classes]
    # A class with arrivals of its own is a stream, all others together are one. At an infinite rate
    # there are no arrivals, so all are mixed.
    common = [i for i, spec in enumerate(classes) if spec.arrivals is None or rate == math.inf]
    streams = [
        (spec.arrivals, [i]) for i, spec in enumerate(classes) if spec.arrivals and i not in common
    ]
    if common:
        streams.append((scenario.arrivals, common))
    weights = [sum(per_request[i] for i in members) for _, members in streams]
    counts = _apportion(max(1, round(num_requests * sum(weights))), weights)

    starts: list[Times] = [np.empty(0)] * len(classes)
    for (arrivals, members), weight, count in zip(streams, weights, counts, strict=True):
        rng = rng_of((seed, "arrivals", *(classes[i].name for i in members)))
        if num_requests:
            times = arrivals.times_of(rate * weight, count, rng)
        else:
            times = arrivals.times(rate * weight, duration_s, rng)
        shares = np.array([per_request[i] for i in members]) / weight
        whose = rng.choice(len(members), times.size, p=shares)
        for place, i in enumerate(members):
            starts[i] = times[whose == place]
    return starts


def _apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers that add up to ``total``, in proportion to the weights (largest remainders)."""
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


# --- what ----------------------------------------------------------------------------------------


def _conversations(
    spec: ClassSpec, times: Times, writer: Writer, seeds: tuple[int, int], max_model_len: int
) -> tuple[list[Conversation], int]:
    """A class's conversations, and how many of them were cut to fit the context."""
    seed, text_seed = seeds

    def stream(what: str) -> np.random.Generator:
        # One for each thing that is drawn: more conversations leave the first ones as they are.
        return rng_of((seed, what, spec.name))

    n = times.size
    num_turns = spec.turns.sample(stream("turns"), n)
    total = int(num_turns.sum())
    first = spec.input.sample(stream("input"), n).tolist()
    later = iter(spec.later_input.sample(stream("turn_input"), total - n).tolist())
    outputs = iter(spec.output.sample(stream("output"), total).tolist())
    ranks = np.arange(1, spec.prefixes + 1, dtype=np.float64) ** -spec.popularity
    prefixes = stream("prefix").choice(spec.prefixes, n, p=ranks / ranks.sum()).tolist()
    think = stream("think")

    found, num_clipped = [], 0
    for i, at_s in enumerate(times.tolist()):
        inputs = [first[i], *(next(later) for _ in range(num_turns[i] - 1))]
        lengths = [(length, next(outputs)) for length in inputs]
        fitting = _fit(spec, lengths, max_model_len) if max_model_len else lengths
        num_clipped += fitting != lengths
        shared: Key = (text_seed, "prefix", spec.name, prefixes[i])
        turns = _turns(spec, writer, fitting, (text_seed, spec.name, i), shared, think)
        found.append(Conversation(at_s, spec.name, turns))
    return found, num_clipped


def _turns(
    spec: ClassSpec,
    writer: Writer,
    lengths: Sequence[tuple[int, int]],
    key: Key,
    shared: Key,
    think: np.random.Generator,
) -> tuple[Turn, ...]:
    (num_input, num_output), *others = lengths
    parts = [(shared, spec.prefix)] if spec.prefix else []
    text = prompt(writer, [*parts, ((*key, 0), num_input)])
    # A prompt that is shorter than what the server adds to it cannot be had.
    num_tokens = spec.prefix + max(num_input, writer.overhead + 1)
    turns = [Turn(text, num_tokens, num_output)]
    for number, (num_input, num_output) in enumerate(others, 1):
        text = writer.write((*key, number), num_input)
        turns.append(Turn(text, num_input, num_output, spec.think.sample(think)))
    return tuple(turns)


# --- the model's context -------------------------------------------------------------------------


def _check_context(spec: ClassSpec, max_model_len: int) -> None:
    """Raises ValueError where lengths that have no tail, which could be cut, are too long."""
    answer = spec.output.maximum or 1
    later = (spec.turns.maximum or 1) - 1
    longest = spec.prefix + (spec.input.maximum or 1) + answer
    longest += later * ((spec.later_input.maximum or 1) + answer + TURN_MARGIN)
    if longest > max_model_len:
        raise ValueError(
            f"class {spec.name}: its conversations hold up to {longest:,} tokens, prompts and"
            f" answers together, which do not fit the model's context of {max_model_len:,};"
            " use a smaller scale, prefix, input, output or number of turns"
        )


def _fit(
    spec: ClassSpec, lengths: Sequence[tuple[int, int]], max_model_len: int
) -> list[tuple[int, int]]:
    """Lengths (input, output) of the turns, cut to fit; `_check_context` has passed."""
    num_input, num_output = lengths[0]
    room = max_model_len - spec.prefix
    if spec.input.maximum is None:
        num_input = max(1, min(num_input, room - num_output))
    num_output = min(num_output, room - num_input)
    fitting = [(num_input, num_output)]
    room -= num_input + num_output
    for turn in lengths[1:]:
        room -= sum(turn) + TURN_MARGIN
        if room < 0:
            break
        fitting.append(turn)
    return fitting
