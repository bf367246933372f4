"""The request models: defaults, forms, and what the workers get. Wrong fields: test_api."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from router.config import RouterConfig
from router.errors import BadRequest
from router.openai_api import (
    ChatRequest,
    CompletionRequest,
    check_generation,
    check_supported,
    parse,
    parse_json,
    sampling,
)

API = Path(__file__).parents[2] / "docs/api.md"
CHAT = {"messages": [{"role": "user", "content": "x"}]}


def completion(**fields: object) -> CompletionRequest:
    return parse(CompletionRequest, {"prompt": "x", **fields})


def test_limits() -> None:
    assert completion().limit == 16
    assert completion(max_tokens=None).limit == 16
    assert completion(max_tokens=3).limit == 3
    assert parse(ChatRequest, CHAT).limit is None
    assert parse(ChatRequest, {**CHAT, "max_tokens": 3}).limit == 3
    both = {**CHAT, "max_tokens": 3, "max_completion_tokens": 4}
    assert parse(ChatRequest, both).limit == 4


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompts(prompt: object, prompts: object) -> None:
    assert completion(prompt=prompt).prompts == prompts


def test_stop() -> None:
    assert completion().stop_strings == ()
    assert completion(stop="a").stop_strings == ("a",)
    assert completion(stop=["a", "b"]).stop_strings == ("a", "b")


def test_sampling_defaults() -> None:
    got = sampling(completion(), seed=5, choice=2, eos_ids=(7, 8))
    assert (got.temperature, got.top_p, got.top_k, got.min_p) == (1.0, 1.0, 0, 0.0)
    assert (got.seed, got.choice, got.min_tokens, got.stop_ids) == (5, 2, 0, (7, 8))


def test_sampling_values() -> None:
    asked = completion(temperature=0, top_k=-1, stop_token_ids=[3, 7], ignore_eos=True)
    got = sampling(asked, -1, 0, (7,))
    assert (got.temperature, got.top_k, got.seed) == (0.0, 0, 2**64 - 1)
    assert got.stop_ids == (3, 7)
    asked = completion(temperature=1e-6, stop_token_ids=[3, 7], top_p=1)
    got = sampling(asked, 0, 0, (7, 9))
    assert got.temperature == 0.01
    assert got.stop_ids == (3, 7, 9)
    assert isinstance(got.top_p, float)


def test_messages_keep_what_the_template_may_want() -> None:
    message = {"role": "tool", "content": "x", "tool_call_id": "1"}
    assert parse(ChatRequest, {"messages": [message]}).conversation() == [message]
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert parse(ChatRequest, {"messages": [called]}).conversation() == [called]


def test_template_arguments() -> None:
    kwargs = {"enable_thinking": False, "messages": [], "add_generation_prompt": False}
    asked = parse(ChatRequest, {**CHAT, "chat_template_kwargs": kwargs, "reasoning_effort": "low"})
    assert asked.template_kwargs() == {"enable_thinking": False, "reasoning_effort": "low"}


@pytest.mark.parametrize("value", [None, 0, 0.0])
def test_values_that_ask_for_nothing(value: object) -> None:
    check_supported({"presence_penalty": value, "whatever": 5})


@pytest.mark.parametrize(
    "fields",
    [{"presence_penalty": False}, {"echo": 1}, {"tools": []}, {"logprobs": 0}, {"top_logprobs": 1}],
)
def test_values_that_ask_for_something(fields: dict[str, object]) -> None:
    with pytest.raises(BadRequest, match="not supported"):
        check_supported(fields)


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"NaN", b'{"a": Infinity}', b'{"a": -Infinity}', b"[" * 100_000, b"\xff\xfe"],
)
def test_not_json(body: bytes) -> None:
    with pytest.raises(BadRequest):
        parse_json(body)


def test_limits_of_the_operator() -> None:
    config = RouterConfig(max_choices=2, max_stop_strings=1, max_stop_chars=3)
    check_generation(completion(n=2, stop="abc"), config)
    for fields, name in (
        ({"n": 3}, "n"),
        ({"stop": ["a", "b"]}, "stop"),
        ({"stop": "abcd"}, "stop"),
    ):
        with pytest.raises(BadRequest) as caught:
            check_generation(completion(**fields), config)
        assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "values"),
    [("n", range(1, 99)), ("stop", [["x"] * i for i in range(1, 99)]),
     ("stop_token_ids", [[1] * i for i in range(1, 99)])],
)  # fmt: skip
def test_the_limits_that_the_page_of_the_api_names(name: str, values: Sequence[object]) -> None:
    (row,) = [line for line in API.read_text().splitlines() if line.startswith(f"| `{name}`")]
    limit = re.search(r"(?:at most|up to) (\d+)", row)
    assert limit, row
    most = int(limit[1])
    check_generation(completion(**{name: values[most - 1]}), RouterConfig())
    with pytest.raises(BadRequest, match=f"{name}: at most {most} "):
        check_generation(completion(**{name: values[most]}), RouterConfig())


@pytest.mark.parametrize(
    "fields",
    [{"policy": "random"}, {"max_queue": 0}, {"queue_timeout_s": 0}, {"prefill_attempts": 0}],
)
def test_router_config_is_checked(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"router\.\w+"):
        RouterConfig(**fields)  # type: ignore[arg-type]
