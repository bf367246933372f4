"""Where traces go, and what the router says of a request that is over."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from router import tracing
from router.observation import AttemptSeen, ChoiceSeen, Observation
from router.openai_api import ChatRequest, CompletionRequest
from router.request_spans import answered, asked, parts_of, seen_of, span_name
from router.tracing import Span, open_tracing, traces_url
from services.config import ConfigError, load
from services.resolve import Machine, ModelFacts, resolve

URL = "http://127.0.0.1:4318"
LAPTOP = Machine(cores=8, memory_bytes=16 * 2**30)
MODEL = ModelFacts("tiny", max_model_len=8192, num_layers=30, num_kv_heads=3, head_dim=64)

PAIR = AttemptSeen(
    "P0", "D0", 0.4, reserved_at=0.5, sent_at=0.5, first_at=1.0, handed_at=1.0, pulled_at=1.2,
    next_at=1.3, prefill_s=0.3,
)  # fmt: skip
SEEN = Observation(
    request_id="r-1",
    model="tiny",
    endpoint="chat",
    stream=True,
    at=1.8e9,
    origin=100.0,
    arrived_at=-0.01,
    tokenized_at=0.1,
    ended_at=2.0,
    code=200,
    choices=(ChoiceSeen(20, 16, 5, (PAIR,), first_at=1.01, last_at=1.9),),
    ttft_s=1.01,
    tpot_s=0.2,
    stages={"tokenize": 0.1, "route": 0.1},
    next_stages={"kv_transfer": 0.2},
    good=True,
)
FAILED = AttemptSeen("P1", "D0", 0.2, sent_at=0.2, ended_at=0.3, failure="prefill lost")


# --- where to ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("", ""),
        (URL, f"{URL}/v1/traces"),
        (f"{URL}/", f"{URL}/v1/traces"),
        ("https://host/otel/v1/traces", "https://host/otel/v1/traces"),
        ("http://[::1]:4318", "http://[::1]:4318/v1/traces"),
    ],
)
def test_endpoints(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url
    assert load(None, {"tracing_endpoint": endpoint}).tracing_endpoint == endpoint


@pytest.mark.parametrize(
    "endpoint", ["127.0.0.1:4318", "grpc://host:4317", "http://", "http://host:port", "http://h:0"]
)
def test_what_is_no_endpoint_is_refused_by_name(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--tracing-endpoint: .*"):
        load(None, {"tracing_endpoint": endpoint})


@pytest.mark.parametrize("ratio", ["-0.1", "1.01", "nan"])
def test_a_ratio_is_a_share(ratio: str) -> None:
    with pytest.raises(ConfigError, match="--tracing-ratio: .* from 0 to 1"):
        load(None, {"tracing_ratio": ratio})


def test_without_its_packages_tracing_is_refused_before_anything_starts() -> None:
    config = load(None, {"tracing_endpoint": URL})
    with pytest.raises(ConfigError, match=r"tracing_endpoint: 'http.*pip install .*\[tracing\]"):
        resolve(config, replace(LAPTOP, tracing=False), MODEL)
    assert resolve(config, LAPTOP, MODEL).tracing_endpoint == URL
    resolve(load(None, {}), replace(LAPTOP, tracing=False), MODEL)  # nobody asked for it


def test_off_by_default() -> None:
    assert open_tracing(load(None, {}).tracing_endpoint, "router", "R") is None


def test_a_process_that_lacks_the_packages_serves_without_spans(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "tracing_installed", lambda: False)
    with caplog.at_level(logging.WARNING):
        assert open_tracing(URL, "prefill", "prefill-1") is None
    assert "prefill-1" in caplog.text
    assert tracing.MISSING in caplog.text


# --- what of -------------------------------------------------------------------------------------


def brief(parts: list[Span]) -> list[tuple[str, float, float, str]]:
    return [(p.name, round(p.start, 3), round(p.end, 3), p.error) for p in parts]


def test_the_parts_of_a_request() -> None:
    parts = parts_of(SEEN)
    assert brief(parts) == [
        ("tokenize", 100.0, 100.1, ""),
        ("queue", 100.1, 100.4, ""),
        ("attempt", 100.4, 101.9, ""),
    ]
    attempt = parts[-1]
    assert attempt.attributes == {
        "baton.attempt": 1,
        "baton.prefill": "P0",
        "baton.decode": "D0",
    }
    assert [(event.name, round(event.at, 3)) for event in attempt.events] == [
        ("reserved", 100.5),
        ("prompt_sent", 100.5),
        ("first_token", 101.0),
        ("handed_off", 101.0),
        ("pulled", 101.2),
        ("second_token", 101.3),
    ]


def test_a_retry_waits_again_and_the_lost_attempt_is_an_error() -> None:
    choice = replace(SEEN.choices[0], attempts=(FAILED, PAIR))
    assert brief(parts_of(replace(SEEN, choices=(choice,)))) == [
        ("tokenize", 100.0, 100.1, ""),
        ("queue", 100.1, 100.2, ""),
        ("attempt", 100.2, 100.3, "prefill lost"),
        ("queue", 100.3, 100.4, ""),
        ("attempt", 100.4, 101.9, ""),
    ]


def test_who_waits_in_vain_has_waited() -> None:
    refused = replace(
        SEEN, code=429, error_type="overload", rejection="queue_timeout", choices=(), ttft_s=None
    )
    none = replace(refused, choices=(ChoiceSeen(20, 0, 0),))
    assert brief(parts_of(none))[1:] == [("queue", 100.1, 102.0, "overload")]
    after = replace(refused, choices=(ChoiceSeen(20, 0, 0, (FAILED,)),))
    assert brief(parts_of(after))[1:] == [
        ("queue", 100.1, 100.2, ""),
        ("attempt", 100.2, 100.3, "prefill lost"),
        ("queue", 100.3, 102.0, "overload"),
    ]


def test_what_is_refused_unread_has_no_parts() -> None:
    wrong = Observation(
        "",
        "tiny",
        "chat",
        False,
        1.8e9,
        100.0,
        -0.1,
        ended_at=0.0,
        code=400,
        error_type="validation",
    )
    assert parts_of(wrong) == []
    assert seen_of(wrong)["http.response.status_code"] == 400


def test_parts_of_several_answers_say_which() -> None:
    two = replace(SEEN, choices=SEEN.choices * 2)
    queues = [part for part in parts_of(two) if part.name == "queue"]
    assert [queue.attributes["baton.choice"] for queue in queues] == [0, 1]


def test_attributes_have_the_names_of_the_conventions() -> None:
    about = seen_of(SEEN)
    assert about == about | {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.usage.input_tokens": 20,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 16,
        "gen_ai.response.time_to_first_chunk": 1.01,
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "baton.request.id": "r-1",
        "baton.slo.good": True,
        "baton.stage.tokenize": 0.1,
        "baton.stage.kv_transfer": 0.2,
    }
    assert "gen_ai.response.time_to_first_chunk" not in seen_of(replace(SEEN, stream=False))
    assert seen_of(replace(SEEN, endpoint="completions"))["http.route"] == "/v1/completions"
    assert span_name("chat", "tiny") == "chat tiny"
    assert span_name("completions", "tiny") == "text_completion tiny"


def test_what_was_asked_for_but_no_text_of_it() -> None:
    request = ChatRequest(
        messages=[{"role": "user", "content": "a secret"}], temperature=0.5, max_tokens=9, n=2,
        stop="secret",
    )  # fmt: skip
    about = asked(request, "chatcmpl-1")
    assert about == {
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.id": "chatcmpl-1",
    }
    assert asked(CompletionRequest(prompt="secret"), "cmpl-1")["gen_ai.request.max_tokens"] == 16


def test_finish_reasons() -> None:
    assert answered(["stop", None, "length"]) == {
        "gen_ai.response.finish_reasons": ("stop", "length")
    }
    assert answered([None]) == {}
