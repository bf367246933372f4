"""A request's observation as the spans that the console draws."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from router.console.timeline import MAX_ERROR, spans, timeline
from router.observation import AttemptSeen, ChoiceSeen, Observation

PAIR = AttemptSeen(
    prefill="p1",
    decode="d1",
    began_at=0.05,
    reserved_at=0.06,
    sent_at=0.06,
    first_at=0.30,
    handed_at=0.30,
    pulled_at=0.34,
    next_at=0.36,
    prefill_s=0.20,
)


def seen(*attempts: AttemptSeen, **changes: Any) -> Observation:
    choice = ChoiceSeen(
        prompt_tokens=100, cached_tokens=16, tokens=9, attempts=attempts, first_at=0.3, last_at=0.5
    )
    fields: dict[str, Any] = {
        "request_id": "r",
        "model": "m",
        "endpoint": "chat",
        "stream": True,
        "at": 1_700_000_000.0,
        "origin": 0.0,
        "arrived_at": -0.01,
        "tokenized_at": 0.01,
        "ended_at": 0.51,
        "code": 200,
        "choices": (choice,),
        "ttft_s": 0.3,
        "tpot_s": 0.025,
        "good": True,
    }
    return Observation(**(fields | changes))


def rows(observation: Observation) -> list[tuple[str, float, float | None, str]]:
    return [
        (s.stage, round(s.start_s, 6), s.end_s and round(s.end_s, 6), s.worker)
        for s in spans(observation)
    ]


def running(*attempts: AttemptSeen) -> Observation:
    return seen(*attempts, ended_at=None, code=0, ttft_s=None, tpot_s=None, good=None)


def test_a_request_over_two_workers() -> None:
    assert rows(seen(PAIR)) == [
        ("tokenize", 0.0, 0.01, ""),
        ("queue", 0.01, 0.06, ""),
        ("queue", 0.06, 0.10, "p1"),
        ("prefill", 0.10, 0.30, "p1"),
        ("transfer", 0.30, 0.34, "d1"),
        ("decode", 0.34, 0.5, "d1"),
    ]


def test_news_of_the_kv_that_come_late_do_not_make_the_transfer_longer() -> None:
    """As where they come with the token: the worker's clock says when it began to decode."""
    late = replace(PAIR, pulled_at=0.36, next_at=0.36, admit_s=0.01, step_s=0.03)
    assert rows(seen(late))[-2:] == [
        ("transfer", 0.30, 0.32, "d1"),
        ("decode", 0.32, 0.5, "d1"),
    ]


def test_spans_leave_no_gap_and_do_not_overlap() -> None:
    lost = replace(PAIR, first_at=None, handed_at=None, pulled_at=None, next_at=None,
                   ended_at=0.2, failure="prefill lost")  # fmt: skip
    again = AttemptSeen(prefill="p2", decode="d2", began_at=0.25, sent_at=0.26, first_at=0.4,
                        handed_at=0.4, next_at=0.45)  # fmt: skip
    found = spans(seen(lost, again))
    assert found[0].start_s == 0.0
    assert [s.end_s for s in found[:-1]] == [s.start_s for s in found[1:]]


def test_all_of_it_came_early() -> None:
    """Parts were pulled while the prompt was computed: the curve is there, the bar is not."""
    early = replace(PAIR, pulled_at=0.29)
    assert [row[0] for row in rows(seen(early))][-2:] == ["prefill", "decode"]
    assert rows(seen(early))[-1] == ("decode", 0.30, 0.5, "d1")


def test_a_prefill_that_was_lost_and_another() -> None:
    lost = replace(PAIR, first_at=None, handed_at=None, pulled_at=None, next_at=None,
                   ended_at=0.2, failure="prefill lost")  # fmt: skip
    again = replace(PAIR, prefill="p2", began_at=0.21, sent_at=0.22)
    observation = seen(lost, again)
    assert [(row[0], row[3]) for row in rows(observation)] == [
        ("tokenize", ""),
        ("queue", ""),
        ("lost", "p1"),
        ("queue", ""),
        ("prefill", "p2"),
        ("transfer", "d1"),
        ("decode", "d1"),
    ]  # the worker says 0.2 s of work, which is all that there was time for since it was sent
    assert timeline(observation)["retries"] == [[0.2, "prefill lost"]]


def test_a_decode_that_was_lost_keeps_what_it_had_answered() -> None:
    lost = replace(PAIR, ended_at=0.4, failure="decode lost")
    again = AttemptSeen(prefill="", decode="d2", began_at=0.41, sent_at=0.41, first_at=0.48)
    assert [(row[0], row[3]) for row in rows(seen(lost, again))][-4:] == [
        ("decode", "d1"),
        ("queue", ""),
        ("prefill", "d2"),
        ("decode", "d2"),
    ]


def test_a_transfer_that_was_lost() -> None:
    lost = replace(PAIR, pulled_at=None, next_at=None, ended_at=0.4, failure="pull")
    row = next(row for row in rows(seen(lost, replace(PAIR, began_at=0.4))) if row[0] == "lost")
    assert row == ("lost", 0.3, 0.4, "d1")


def test_a_decode_worker_that_was_replaced() -> None:
    replaced = timeline(seen(replace(PAIR, replaced="d0")))
    assert replaced["retries"] == [[0.05, "d0 was replaced"]]


def test_one_worker_for_all() -> None:
    alone = AttemptSeen(prefill="", decode="m1", began_at=0.05, sent_at=0.05, first_at=0.3)
    assert rows(seen(alone))[-2:] == [("prefill", 0.05, 0.3, "m1"), ("decode", 0.3, 0.5, "m1")]


def test_an_answer_of_one_token_has_neither_transfer_nor_decode() -> None:
    only = replace(PAIR, decode="", reserved_at=None, handed_at=None, pulled_at=None, next_at=None)
    choice = ChoiceSeen(100, 0, 1, (only,), 0.3, 0.3)
    assert [row[0] for row in rows(seen(choices=(choice,)))][-1] == "prefill"


@pytest.mark.parametrize(
    ("attempt", "last"),
    [
        (None, ("queue", 0.01, None, "")),
        (AttemptSeen("p1", "d1", 0.05), ("queue", 0.01, None, "")),
        (AttemptSeen("p1", "d1", 0.05, 0.06, 0.06), ("prefill", 0.06, None, "p1")),
        (replace(PAIR, pulled_at=None, next_at=None), ("transfer", 0.3, None, "d1")),
        (PAIR, ("decode", 0.34, None, "d1")),
    ],
)
def test_a_request_that_goes_on(
    attempt: AttemptSeen | None, last: tuple[str, float, float | None, str]
) -> None:
    observation = running(attempt) if attempt else running()
    assert rows(observation)[-1] == last
    assert timeline(observation)["end"] is None


def test_a_client_that_left_while_the_prompt_was_computed() -> None:
    cut = AttemptSeen("p1", "d1", 0.05, 0.06, 0.06)
    left = seen(cut, code=499, ended_at=0.2, error_type="cancelled", ttft_s=None)
    assert rows(left)[-1] == ("prefill", 0.06, 0.2, "p1")
    assert timeline(left)["error"] == "cancelled"


def test_a_request_that_was_refused_unread() -> None:
    refused = seen(choices=(), tokenized_at=None, ended_at=0.002, code=401, error="no " * 500)
    row = timeline(refused)
    assert [span[0] for span in row["spans"]] == ["tokenize"]
    assert len(row["error"]) == MAX_ERROR
    at_once = seen(choices=(), tokenized_at=None, ended_at=0.0, code=401)
    assert timeline(at_once)["spans"] == []


def test_the_row() -> None:
    row = timeline(seen(PAIR))
    assert {name: row[name] for name in ("id", "prompt", "cached", "tokens", "choices")} == {
        "id": "r", "prompt": 100, "cached": 16, "tokens": 9, "choices": 1,
    }  # fmt: skip
    assert (row["ttft"], row["tpot"], row["end"], row["code"], row["good"]) == (
        0.3, 0.025, 0.51, 200, True,
    )  # fmt: skip
