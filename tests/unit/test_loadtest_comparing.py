"""Comparisons: what targets are called, whose turn it is, which requests missed, and ratios."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from loadtest.client import Reply
from loadtest.conversation import Conversation, Turn
from loadtest.ratios import FIGURES, goodput, max_rate_ratio, notes, ratio, section
from loadtest.record import INTERRUPTED, Record, RunResult
from loadtest.slo import SLO
from loadtest.targets import Target, TargetError, parse_target, parse_targets
from loadtest.trial import OVERDUE, Comparison, Trial, Window, deadline_s, judge, patience_s
from loadtest.trial_run import wait_quiet

SLOS = {"": {"chat": SLO(ttft=0.5, tpot=0.05)}}
WINDOW_S = 30.0


# --- targets -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("http://a:1/", Target("a:1", url="http://a:1")),
        ("https://h/v1?key=2", Target("h/v1?key=2", url="https://h/v1?key=2")),
        ("pd=http://a:1", Target("pd", url="http://a:1")),
        ("pd=--prefill 2 --decode=1", Target("pd", flags=("--prefill", "2", "--decode=1"))),
        ("m=--model 'a b'", Target("m", flags=("--model", "a b"))),
    ],
)
def test_targets_are_read(text: str, target: Target) -> None:
    assert parse_target(text) == target


def test_a_target_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    file.touch()
    assert parse_target(f"pd={file}") == Target("pd", flags=("--config", str(file)))
    assert parse_target(str(file)).name == "two"


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("pd=", "want URL, NAME=URL"),
        ("localhost:8000", "want URL, NAME=URL"),
        ("--prefill=1", "want URL, NAME=URL"),
        ("pd=none.yaml", "there is no file none.yaml"),
        ("pd=--port 1", "--port is chosen by the load test"),
        ("pd=--host=::", "--host=:: is chosen by the load test"),
        ("pd=--model 'a", "No closing quotation"),
    ],
)
def test_wrong_targets_are_named(text: str, wrong: str) -> None:
    with pytest.raises(TargetError, match=wrong) as caught:
        parse_target(text)
    assert text in str(caught.value)


def test_targets_have_different_names() -> None:
    with pytest.raises(TargetError, match="two targets are called 'a'"):
        parse_targets(["a=http://x", "a=http://y"])
    with pytest.raises(TargetError, match="two targets or more, got 1"):
        parse_targets(["a=http://x"])


# --- what a cut-off request is -------------------------------------------------------------------


def cut_off(chunk_s: Sequence[float] = (), max_tokens: int = 11) -> Record:
    return Record(0, "chat", 0, 0, 0.0, 0.0, 8, max_tokens, INTERRUPTED, chunk_s=tuple(chunk_s))


@pytest.mark.parametrize(
    ("chunk_s", "elapsed_s", "missed"),
    [
        ((), 0.4, False),  # the first token may still come in time
        ((), 0.6, True),
        ((0.6,), 0.65, True),  # it came too late
        ((0.1, 0.2), 0.55, False),  # ten more in 0.05 s each: until 0.6
        ((0.1, 0.2), 0.65, True),
    ],
)
def test_a_cut_off_request_has_missed_if_it_could_not_have_met(
    chunk_s: tuple[float, ...], elapsed_s: float, missed: bool
) -> None:
    judged = judge(cut_off(chunk_s), SLOS, elapsed_s)
    assert judged.error == (OVERDUE if missed else INTERRUPTED)


def test_it_must_have_missed_by_all_objectives() -> None:
    both = {**SLOS, "loose": {"chat": SLO(ttft=2.0)}}
    assert judge(cut_off(), both, 0.6).error == INTERRUPTED
    assert judge(cut_off(), both, 2.1).error == OVERDUE


def test_the_end_of_an_answer_has_a_limit_too() -> None:
    whole = {"": {"chat": SLO(ttft=0.5, e2e=0.7)}}
    assert judge(cut_off((0.1, 0.2)), whole, 0.65).error == INTERRUPTED
    assert judge(cut_off((0.1, 0.2)), whole, 0.75).error == OVERDUE


def test_how_long_answers_are_waited_for() -> None:
    assert deadline_s(11, SLO(ttft=0.5, tpot=0.05)) == pytest.approx(1.0)
    assert deadline_s(11, SLO(ttft=0.5, tpot=0.05, e2e=0.7)) == 0.7
    assert deadline_s(1, SLO(ttft=0.5, tpot=0.05)) == 0.5
    asked = [Conversation(0.0, "chat", (Turn("a", 1, 11), Turn("b", 1, 21)))]
    assert patience_s(asked, Window(9.0), SLOS) == pytest.approx(1.5)
    only_tpot = {"": {"chat": SLO(tpot=0.05)}}  # the first token may always be still to come
    assert patience_s(asked, Window(9.0, drain_s=7.0), only_tpot) == 7.0


def test_requests_of_unknown_outcome_are_no_evidence() -> None:
    records = (cut_off(), record_of(1, 1.0, 0.1, 0.01), record_of(2, 2.0, 0.9, 0.01))
    trial = Trial("a", 0, 1.0, 0, RunResult(records, 9.0, "", 3), 0.0, 9.0)
    assert trial.probe(SLOS[""]).met == (True, False)


def test_what_is_sent_late_has_waited() -> None:
    """A client that cannot keep up finds no server fast (coordinated omission)."""
    limit = SLOS[""]["chat"].ttft
    prompt = record_of(0, 1.0, limit / 2, 0.01)
    late = replace(prompt, sent_s=prompt.due_s + limit)
    trial = Trial("a", 0, 1.0, 0, RunResult((prompt, late), 9.0, "", 2), 0.0, 9.0)
    assert trial.probe(SLOS[""]).met == (True, False)
    assert SLOS[""]["chat"].met(late)  # by itself, from when it was sent


class Answers:
    """A client of a server that takes so long for each answer, or fails."""

    def __init__(self, *seconds: float, error: str = "") -> None:
        self.seconds, self.error = list(seconds), error

    async def send(self, prompt: str, max_tokens: int) -> Reply:
        if self.seconds:
            await asyncio.sleep(self.seconds.pop(0))
        return Reply(error=self.error)


@pytest.mark.parametrize(
    ("client", "why"),
    [
        (Answers(), ""),
        (Answers(0.1), ""),  # busy for one more answer
        (Answers(*[0.08] * 99), "it was still busy 0.5 s after the turn before"),
        (Answers(error="connect"), "it did not answer before its turn"),
    ],
)
def test_a_turn_waits_for_an_idle_server(client: Answers, why: str) -> None:
    waited = wait_quiet(client, 0.001, 0.5, asyncio.Event())  # type: ignore[arg-type]
    assert asyncio.run(waited) == why
    assert len(client.seconds) in (0, *range(90, 98))  # it asked until it was idle, or for 0.5 s


# --- ratios --------------------------------------------------------------------------------------


def record_of(index: int, due_s: float, ttft_s: float, tpot_s: float, tokens: int = 11) -> Record:
    chunks = tuple(ttft_s + tpot_s * k for k in range(tokens))
    return Record(index, "chat", index, 0, due_s, due_s, 8, tokens, "", "", 8, tokens, chunks)


def trials(
    name: str, factor: float, rounds: Sequence[float], rng: np.random.Generator, rate: float = 4.0
) -> list[Trial]:
    """A target whose times are ``factor`` times the usual, on a machine that has its good and bad
    rounds; ``rng`` of the same seed asks the same.
    """
    made = []
    for number, weather in enumerate(rounds):
        due = np.sort(rng.uniform(0, WINDOW_S, rng.poisson(rate * WINDOW_S)))
        slow = factor * weather * rng.lognormal(0, 0.3, len(due))
        records = tuple(
            record_of(i, at, 0.2 * each, 0.02 * each)
            for i, (at, each) in enumerate(zip(due.tolist(), slow.tolist(), strict=True))
        )
        result = RunResult(records, WINDOW_S + 1.0, "", len(records))
        made.append(Trial(name, number, rate, number, result, 0.0, WINDOW_S))
    return made


def comparison(made: Sequence[Trial], **others: object) -> Comparison:
    names = list(dict.fromkeys(trial.target for trial in made))
    targets = tuple(Target(name, url=f"http://{name}") for name in names)
    return Comparison(targets, tuple(made), SLOS, 0.9, "", **others)  # type: ignore[arg-type]


def two(seed: int, factor: float = 2.0, spread: float = 0.3, num_rounds: int = 5) -> Comparison:
    weather = np.random.default_rng(seed).lognormal(0, spread, num_rounds).tolist()
    a, b = (np.random.default_rng((seed, place)) for place in (0, 1))
    return comparison([*trials("a", 1.0, weather, a), *trials("b", factor, weather, b)])


@pytest.mark.parametrize("name", ["TTFT p50", "TTFT p99", "TPOT p50", "ITL p99", "E2E p50"])
def test_ratios_of_times(name: str) -> None:
    found = ratio(two(1), "b", 4.0, FIGURES[name], np.random.default_rng(0))
    assert found is not None
    assert found.ratio.low < 2.0 < found.ratio.high
    assert found.ratio.value == found.value / found.base
    assert found.ratio.value == pytest.approx(2.0, rel=0.2)
    assert (found.figure, found.target) == (f"{name} at 4/s", "b")


def test_values_are_those_of_all_rounds_together() -> None:
    compared = two(1)
    found = ratio(compared, "b", 4.0, FIGURES["TTFT p99"], np.random.default_rng(0))
    assert found is not None
    seen = [r.ttft_s for trial in compared.of("b") for r in trial.result.records]
    assert found.value == np.percentile(seen, 99)


def test_what_a_round_does_to_all_targets_cancels() -> None:
    """Rounds differ by 30 %; drawn for each target by itself, the interval would be far wider."""
    found = ratio(two(1), "b", 4.0, FIGURES["TTFT p50"], np.random.default_rng(0))
    assert found is not None
    assert found.ratio.high / found.ratio.low < 1.3


def test_intervals_of_ratios_cover() -> None:
    hits = 0
    for seed in range(20):
        found = ratio(two(seed), "b", 4.0, FIGURES["TTFT p50"], np.random.default_rng(seed))
        assert found is not None
        hits += found.ratio.low <= 2.0 <= found.ratio.high
    assert hits >= 18


def test_goodput_counts_requests_that_met_over_the_duration() -> None:
    compared = two(1, factor=3.0)
    found = ratio(compared, "b", 4.0, goodput(SLOS[""]), np.random.default_rng(0))
    assert found is not None
    for name, value in (("a", found.base), ("b", found.value)):
        met = sum(SLOS[""]["chat"].met(r) for t in compared.of(name) for r in t.result.records)
        assert value == met / sum(t.result.duration_s for t in compared.of(name))
    assert found.ratio.low < found.ratio.value < found.ratio.high < 1.0
    assert found.better == "higher"


def test_only_rounds_of_both_count() -> None:
    made = [*trials("a", 1.0, [1.0, 9.0], np.random.default_rng(1)),
            *trials("b", 2.0, [1.0], np.random.default_rng(2))]  # fmt: skip
    found = ratio(comparison(made), "b", 4.0, FIGURES["TTFT p50"], np.random.default_rng(0))
    assert found is not None
    assert found.ratio.value == pytest.approx(2.0, rel=0.15)  # 0.4 or so with the round of nine
    assert ratio(comparison(made), "b", 5.0, FIGURES["TTFT p50"], np.random.default_rng(0)) is None


def test_one_round_is_said_to_know_little() -> None:
    one = two(1, num_rounds=1)
    assert any("not how much one run differs" in " ".join(note.split()) for note in notes(one))
    assert not notes(two(1))
    stopped = comparison(one.trials, interrupted=True, notes=("b died",))
    assert notes(stopped)[:2] == ["b died", "Interrupted after 2 trials: figures are of those."]


def curve(name: str, top: float, rates: Sequence[float]) -> list[Trial]:
    """A target of which 90 % meet at the rate ``top``, ten percent more or less with each 20 %."""
    made = []
    for rate in rates:
        share = min(1.0, 0.9 - 0.1 * math.log(rate / top) / math.log(1.2))
        good = np.diff(np.floor(np.arange(1001) * max(share, 0.0))) > 0  # spread evenly
        records = tuple(
            record_of(k, k * WINDOW_S / 1000, 0.1 if fine else 9.0, 0.01, tokens=2)
            for k, fine in enumerate(good)
        )
        result = RunResult(records, WINDOW_S, "", 1000)
        made.append(Trial(name, 0, rate, 0, result, 0.0, WINDOW_S))
    return made


def test_ratio_of_the_highest_rates() -> None:
    rates = [2.2 * 1.1**k for k in range(11)]
    compared = comparison([*curve("a", 3.0, rates), *curve("b", 5.1, rates)])
    found = max_rate_ratio(compared, "b", "", np.random.default_rng(0))
    assert found is not None
    assert found.ratio.value == pytest.approx(1.7, rel=0.06)
    assert found.ratio.low < 1.7 < found.ratio.high < 2.3
    bound = comparison([*curve("a", 3.0, rates), *curve("b", 50.0, rates)])
    found = max_rate_ratio(bound, "b", "", np.random.default_rng(0))
    assert found is not None
    assert "at least" in found.figure
    assert found.ratio.high == math.inf


def test_a_section_has_it_all() -> None:
    shown = section(two(1), "chat", "5 rounds")
    assert [cell.target for cell in shown.cells] == ["a", "b"]
    assert shown.slos == {"": "TTFT ≤ 500 ms and TPOT ≤ 50 ms"}
    for cell in shown.cells:
        attained = cell.attainment[""]
        assert attained.value == cell.summary.total.attainment.share
        assert attained.low < attained.value < attained.high
        assert 0 < len(cell.itl_s) <= 2000
    assert {item.figure for item in shown.ratios} >= {"goodput at 4/s", "ITL p99 at 4/s"}
    assert [rate.target for rate in shown.max_rates] == ["a", "b"]
