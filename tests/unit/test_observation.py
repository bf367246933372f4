"""What a request has seen: sums of stages, verdicts, where a client left, and what is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from router.errors import BadRequest, ClientGone, InternalError, QueueFull, RequestError
from router.ledger import Ledger, Objectives
from router.marks import Marks
from router.observation import (
    FIRST_STAGES,
    SECOND_STAGES,
    AttemptSeen,
    ChoiceSeen,
    Observation,
    error_type,
    first_stages,
    judged,
    second_stages,
    stage_of,
)
from router.recorder import ChoiceWatch, RequestRecorder

OBJECTIVES = Objectives(ttft_s=2.0, tpot_s=0.1)


class Clock:
    """Moves when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def after(self, seconds: float) -> None:
        self.now += seconds


class Script:
    """A recorder, its ledger and the marks of its answers, on one clock."""

    def __init__(self, num_choices: int = 1, stream: bool = True, prompt: int = 7) -> None:
        self.clock = Clock()
        self.ledger = Ledger(OBJECTIVES)
        self.recorder = RequestRecorder(
            "tiny", "chat", self.ledger, self.clock, lambda: 5000.0 + self.clock.now
        )
        self.ids: list[list[int]] = [[] for _ in range(num_choices)]
        self.marks = [Marks(self.clock) for _ in range(num_choices)]
        self.stream, self.prompt = stream, prompt

    def begin(self, arrives: float = 0.5, tokenize: float = 0.25) -> Script:
        """Arrived, read and tokenized."""
        self.clock.after(arrives)
        self.recorder.read()
        self.clock.after(tokenize)
        watches = [
            ChoiceWatch(0 if index else self.prompt, ids, marks)
            for index, (ids, marks) in enumerate(zip(self.ids, self.marks, strict=True))
        ]
        self.recorder.tokenized("r1", self.stream, watches)
        return self

    def prefilled(self, index: int = 0, cached: int = 0) -> None:
        """0.5 s until there is room, 0.125 s to reserve, 1 s at P, 0.75 s of it computing."""
        marks = self.marks[index]
        self.clock.after(0.5)
        marks.began("P0", "D0")
        self.clock.after(0.125)
        marks.reserved()
        marks.sent()
        self.clock.after(1.0)
        marks.first(cached, 750.0)
        self.ids[index].append(1)

    def handed_over(self, index: int = 0) -> None:
        """0.25 s for the KV, then 1.5 s to the token: 0.5 s waiting, 0.75 s computing, the way."""
        marks = self.marks[index]
        marks.handed()
        self.clock.after(0.25)
        marks.pulled()
        self.clock.after(1.5)
        marks.next(500.0, 750.0)
        self.ids[index].append(2)

    def wrote(self, after: float = 0.0625, index: int = 0, finish: bool = False) -> None:
        self.clock.after(after)
        self.recorder.wrote(index, finish)

    def end(self, after: float = 0.0) -> Observation:
        self.clock.after(after)
        return self.recorder.ended()


def test_a_disaggregated_request_in_all_its_stages() -> None:
    script = Script().begin()
    script.prefilled(cached=3)
    script.wrote()
    script.handed_over()
    script.wrote(after=0.125, finish=True)
    seen = script.end(after=0.5)
    assert seen.ttft_s == 0.25 + 0.5 + 0.125 + 1.0 + 0.0625
    assert seen.stages == {
        "tokenize": 0.25, "route": 0.125, "queue": 0.5 + 0.25, "prefill": 0.75, "write": 0.0625,
    }  # fmt: skip
    assert sum(seen.stages.values()) == seen.ttft_s
    gap = 0.25 + 1.5 + 0.125  # from the first to the second, as they were written
    assert seen.next_stages == {
        "kv_transfer": 0.25 + 1.5 - 0.5 - 0.75, "decode_admit": 0.5, "first_decode": 0.75 + 0.125,
    }  # fmt: skip
    assert sum(seen.next_stages.values()) == seen.tpot_s == gap
    assert (seen.code, seen.error_type, seen.left_in) == (200, "", "")
    assert (seen.arrived_at, seen.tokenized_at, seen.ended_at) == (-0.5, 0.25, 1.9375 + 1.875 + 0.5)
    assert (seen.prompt_tokens, seen.cached_tokens, seen.tokens, seen.retries) == (7, 3, 2, 0)
    assert (seen.at, seen.origin) == (6000.5, 1000.5)
    assert (seen.ttft_good, seen.tpot_good, seen.good) == (True, False, False)
    (choice,) = seen.choices
    (attempt,) = choice.attempts
    assert (attempt.prefill, attempt.decode, attempt.began_at) == ("P0", "D0", 0.75)


def test_a_lost_attempt_is_time_in_the_queue_and_has_no_second_stages() -> None:
    script = Script().begin()
    marks = script.marks[0]
    marks.began("P1", "D1")
    script.clock.after(1.0)
    marks.failed("prefill lost")
    script.prefilled()
    script.wrote(after=0.0)
    script.handed_over()
    script.wrote(after=0.0, finish=True)
    seen = script.end()
    assert seen.stages is not None
    assert seen.stages["queue"] == 1.0 + 0.5 + 0.25
    assert sum(seen.stages.values()) == seen.ttft_s
    assert seen.next_stages is None
    assert seen.retries == 1
    assert [attempt.failure for attempt in seen.choices[0].attempts] == ["prefill lost", ""]


def test_a_refused_attempt_never_was_one() -> None:
    script = Script().begin()
    script.marks[0].began("P0", "D0")
    script.clock.after(1.0)
    script.marks[0].refused()
    script.prefilled()
    script.wrote(after=0.0, finish=True)
    seen = script.end()
    assert seen.retries == 0
    assert seen.stages is not None
    assert seen.stages["queue"] == 1.0 + 0.5 + 0.25


def test_a_decode_worker_that_refuses_after_the_first_token_keeps_its_attempt() -> None:
    script = Script().begin()
    script.prefilled()
    script.wrote(after=0.0)
    script.marks[0].refused()
    script.marks[0].began("P1", "D1")
    script.wrote(after=0.5, finish=True)
    seen = script.end()
    assert [attempt.failure for attempt in seen.choices[0].attempts] == ["refused", ""]
    assert seen.stages is not None
    assert sum(seen.stages.values()) == seen.ttft_s


def test_a_worker_that_does_it_all() -> None:
    script = Script().begin()
    marks = script.marks[0]
    marks.began("", "M0")
    marks.sent()
    script.clock.after(2.0)
    marks.first(0, 1500.0)
    script.ids[0].append(1)
    script.wrote(after=0.0, finish=True)
    seen = script.end()
    assert seen.stages == {
        "tokenize": 0.25, "route": 0.0, "queue": 0.5, "prefill": 1.5, "write": 0.0,
    }  # fmt: skip
    assert seen.next_stages is None
    assert seen.choices[0].attempts[0].made_first == "M0"


def test_another_d_in_the_place_of_one_that_failed_is_off_the_path_of_the_first_token() -> None:
    script = Script().begin()
    marks = script.marks[0]
    marks.began("P0", "D0")
    marks.reserved()
    marks.sent()
    script.clock.after(0.5)
    marks.replaced("D1")
    script.clock.after(0.25)
    marks.reserved()
    script.clock.after(0.25)
    marks.first(0, 750.0)
    script.ids[0].append(1)
    script.wrote(after=0.0)
    script.handed_over()
    script.wrote(after=0.0, finish=True)
    seen = script.end()
    assert seen.stages is not None
    assert (seen.stages["route"], seen.stages["prefill"]) == (0.0, 0.75)
    assert sum(seen.stages.values()) == seen.ttft_s
    assert seen.next_stages is None
    assert seen.retries == 1
    assert (seen.choices[0].attempts[0].replaced, seen.choices[0].attempts[0].decode) == (
        "D0", "D1",
    )  # fmt: skip


MOMENTS = st.floats(0, 100, allow_nan=False)


@given(
    st.lists(MOMENTS, min_size=5, max_size=5).map(sorted),
    MOMENTS,
    MOMENTS,
    MOMENTS,
    st.booleans(),
)
def test_sums_are_exact_whatever_the_workers_say(
    moments: list[float], computed: float, admit: float, step: float, reserved: bool
) -> None:
    tokenized, began, sent, first, later = moments
    attempt = AttemptSeen(
        "P0", "D0", began, sent if reserved else None, sent, first, first, later, later,
        prefill_s=computed, admit_s=admit, step_s=step,
    )  # fmt: skip
    stages = first_stages(tokenized, attempt, later)
    assert stages is not None
    assert tuple(stages) == FIRST_STAGES
    assert sum(stages.values()) == pytest.approx(later)
    assert min(stages.values()) >= 0
    for written, second, gap in (
        (None, None, later - first),  # one chunk held both
        (first + 1, later + 3, later + 2 - first),
        (later + 2, later + 3, 1.0),  # the second was known before the first was written
    ):
        choice = ChoiceSeen(7, 0, 2, (attempt,), written, second, second)
        stages = second_stages(attempt, choice)
        assert stages is not None
        assert tuple(stages) == SECOND_STAGES
        assert sum(stages.values()) == pytest.approx(gap)
        assert min(stages.values()) >= 0


# --- what it comes to -----------------------------------------------------------------------------

SEEN = Observation(
    "r", "tiny", "chat", True, at=0.0, origin=0.0, arrived_at=0.0, tokenized_at=0.0, ended_at=9.0
)


@pytest.mark.parametrize(
    ("code", "ttft", "tpot", "ended", "verdicts"),
    [
        (200, 2.0, 0.1, 9, (True, True, True)),  # the objective itself is good
        (200, 2.1, 0.1, 9, (False, True, False)),
        (200, 2.0, 0.2, 9, (True, False, False)),
        (200, 1.0, None, 9, (True, None, True)),  # one token
        (200, 3.0, None, 9, (False, None, False)),
        (500, 1.0, 0.05, 9, (True, False, False)),  # it broke on the way to the other tokens
        (503, None, None, 1, (False, None, False)),
        (429, None, None, 0.1, (False, None, False)),
        (504, None, None, 9, (False, None, False)),
        (499, None, None, 1, (None, None, None)),  # left before it could have been late
        (499, None, None, 3, (False, None, False)),  # waited for too long
        (499, 1.0, 0.05, 9, (True, True, True)),
        (499, 1.0, None, 9, (True, None, True)),
        (499, 1.0, 0.5, 9, (True, False, False)),
        (400, None, None, 9, (None, None, None)),
        (404, None, None, 9, (None, None, None)),
        (401, None, None, 9, (None, None, None)),
    ],
)
def test_verdicts(
    code: int,
    ttft: float | None,
    tpot: float | None,
    ended: float,
    verdicts: tuple[bool | None, ...],
) -> None:
    seen = replace(
        SEEN, code=code, error_type=error_type(code), ttft_s=ttft, tpot_s=tpot, ended_at=ended
    )
    result = judged(seen, 2.0, 0.1)
    assert (result.ttft_good, result.tpot_good, result.good) == verdicts


def test_a_client_that_left_while_it_sent_says_nothing() -> None:
    seen = replace(SEEN, code=499, error_type="cancelled", tokenized_at=None, ended_at=99.0)
    assert judged(seen, 2.0, 0.1).good is None


def test_the_types_of_errors() -> None:
    statuses = (200, 400, 401, 404, 405, 413, 429, 499, 500, 503, 504)
    assert [error_type(status) for status in statuses] == [
        "", "validation", "unauthorized", "not_found", "validation", "too_large", "overload",
        "cancelled", "internal", "unavailable", "deadline",
    ]  # fmt: skip


PAIR = AttemptSeen("P0", "D0", 1.0)
ALONE = AttemptSeen("", "M0", 1.0)


@pytest.mark.parametrize(
    ("attempts", "stage"),
    [
        ((), "queue"),
        ((replace(PAIR, ended_at=2.0),), "queue"),
        ((PAIR,), "prefill"),
        ((replace(PAIR, ended_at=2.0), PAIR), "prefill"),
        ((replace(PAIR, first_at=2.0),), "transfer"),
        ((replace(PAIR, first_at=2.0, pulled_at=3.0),), "decode"),
        ((replace(PAIR, first_at=2.0, next_at=3.0),), "decode"),
        ((ALONE,), "prefill"),
        ((replace(ALONE, first_at=2.0),), "decode"),
    ],
)
def test_where_an_answer_is(attempts: tuple[AttemptSeen, ...], stage: str) -> None:
    assert stage_of(attempts) == stage


# --- the ledger -----------------------------------------------------------------------------------


def test_the_first_token_counts_at_once_and_the_rest_at_the_end() -> None:
    script = Script().begin()
    script.prefilled(cached=3)
    script.wrote()
    ledger = script.ledger
    assert ledger.ttft[True].count == 1
    assert {stage: ledger.stages[stage].count for stage in FIRST_STAGES} == dict.fromkeys(
        FIRST_STAGES, 1
    )
    assert (ledger.prompt_tokens, ledger.cached_tokens, ledger.generated_tokens) == (7, 3, 1)
    assert not ledger.requests
    script.handed_over()
    script.ids[0] += [3, 4]  # made, and not written: the client is gone
    script.recorder.failed(ClientGone("gone"))
    seen = script.end()
    assert seen.left_in == "decode"
    assert ledger.requests == {("chat", "true", "499", "cancelled"): 1}
    assert ledger.disconnects == {("decode",): 1}
    assert ledger.generated_tokens == 4
    assert (ledger.tpot.count, ledger.gaps.count) == (0, 0)
    assert ledger.verdicts == {("ttft", "good"): 1, ("both", "good"): 1}
    assert ledger.stages["kv_transfer"].count == 1


def test_gaps_are_one_for_each_chunk_and_tpot_one_for_each_request() -> None:
    script = Script().begin()
    script.prefilled()
    script.wrote()
    script.ids[0] += [2, 3]  # two tokens in one chunk
    script.wrote(after=0.5)
    script.ids[0] += [4]
    script.wrote(after=0.25, finish=True)
    seen = script.end()
    assert seen.tpot_s == 0.75 / 3
    assert (script.ledger.tpot.count, script.ledger.tpot.total) == (1, 0.25)
    assert (script.ledger.gaps.count, script.ledger.gaps.total) == (2, 0.75)
    assert script.ledger.generated_tokens == 4
    assert script.ledger.answer_sizes.total == 4


def test_a_single_token_has_no_tpot() -> None:
    script = Script().begin()
    script.prefilled()
    script.wrote(finish=True)
    seen = script.end()
    assert (seen.tpot_s, seen.good) == (None, True)
    assert (script.ledger.tpot.count, script.ledger.gaps.count) == (0, 0)


def test_several_answers_are_one_request_and_one_prompt() -> None:
    script = Script(num_choices=2).begin()
    script.prefilled(index=1)
    script.wrote(index=1, after=0.0)
    first = script.clock.now
    script.prefilled(index=0, cached=2)
    script.wrote(index=0, after=0.0)
    for index in (0, 1):
        script.ids[index].append(2)
        script.wrote(index=index, after=0.5, finish=True)
    seen = script.end()
    assert seen.ttft_s == first - 1000.5  # of the answer that was first
    assert seen.stages is not None
    assert sum(seen.stages.values()) == seen.ttft_s
    # Per answer: 0.5 s for the first, 1.625 s and two times 0.5 s for the second.
    assert seen.tpot_s == (0.5 + 1.625 + 1.0) / 2
    ledger = script.ledger
    assert (ledger.prompt_tokens, ledger.cached_tokens, ledger.generated_tokens) == (7, 2, 4)
    assert (ledger.ttft[True].count, ledger.tpot.count, ledger.gaps.count) == (1, 1, 2)
    assert sum(ledger.requests.values()) == 1


def test_a_client_that_has_everything_did_not_leave() -> None:
    script = Script(num_choices=2).begin()
    for index in (0, 1):
        script.prefilled(index=index)
        script.wrote(index=index, finish=index == 0)
    script.recorder.failed(ClientGone("gone"))
    assert script.recorder.seen().error == "gone"
    script = Script().begin()
    script.prefilled()
    script.wrote(finish=True)
    script.recorder.failed(ClientGone("gone"))
    assert script.end().code == 200


@pytest.mark.parametrize(
    ("error", "label", "rejected"),
    [
        (BadRequest("x"), "validation", ""),
        (BadRequest("x").rejects("too_long"), "validation", "too_long"),
        (QueueFull("x").rejects("queue_full"), "overload", "queue_full"),
        (InternalError("x"), "internal", ""),
    ],
)
def test_the_first_failure_is_what_became_of_it(
    error: RequestError, label: str, rejected: str
) -> None:
    script = Script()
    script.recorder.failed(error)
    script.recorder.failed(ClientGone("and then the client left"))
    seen = script.end()
    assert (seen.code, seen.error_type, seen.rejection) == (error.status, label, rejected)
    assert script.ledger.requests == {("chat", "false", str(error.status), label): 1}
    assert script.ledger.rejections == ({(rejected,): 1} if rejected else {})
    assert script.ledger.durations[error.status].count == 1
    assert script.ledger.ttft[False].count == 0


def test_a_request_that_goes_on_has_no_code_and_no_verdict() -> None:
    script = Script().begin()
    script.prefilled()
    script.wrote()
    seen = script.recorder.seen()
    assert (seen.code, seen.ended_at, seen.good) == (0, None, None)
    assert seen.ttft_s is not None
