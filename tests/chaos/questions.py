"""What is asked: a set of requests whose right answers are known, and how each is put (pure).

A question is a request's body; the same question is asked many times, streaming or not, with cached
prefixes or without, by clients that stay or leave. None of that changes its right answer.
"""

import random
from dataclasses import dataclass, field
from typing import Any

MAX_PROMPT, MAX_TOKENS = 220, 20
SHARED_SALT = 0.35  # of the requests that may hit prefixes that others have left
CUT = 0.12  # of the requests whose client leaves
STOPS = (["\n"], [" the"], [",", "."], [" of a"])
CHATS = (
    "What is the capital of France?",
    "Name three colours.",
    "Is water wet?",
    "Write one sentence about the sea.",
)


@dataclass(frozen=True)
class Question:
    """A request without how it is asked."""

    path: str
    body: dict[str, Any] = field(hash=False)


@dataclass(frozen=True)
class Cut:
    """When a client leaves: at the first of both. ``hard``: by a reset of the connection."""

    after_s: float
    after_events: int
    hard: bool


@dataclass(frozen=True)
class Asking:
    """One request as it is sent."""

    number: int
    question: int
    stream: bool
    salt: str
    cut: Cut | None


def questions(seed: int, count: int, text_ids: list[int]) -> list[Question]:
    """So many, most of them short; ``text_ids`` is a long text that prompts are taken from."""
    chance = random.Random(f"questions {seed}")
    prompts: list[list[int]] = []
    found = []
    for index in range(count):
        if index % 8 == 7:
            path, body = "/v1/chat/completions", _chat(chance)
        else:
            prompts.append(_prompt(chance, prompts, text_ids))
            path, body = "/v1/completions", {"prompt": prompts[-1]}
        body |= {"max_tokens": log_uniform(chance, 1, MAX_TOKENS), "return_token_ids": True}
        found.append(Question(path, body | _sampling(chance)))
    return found


def long_question(seed: int, text_ids: list[int], num_prompt: int, num_tokens: int) -> Question:
    """One that takes about all the blocks it can."""
    offset = random.Random(f"long {seed}").randrange(len(text_ids) - num_prompt)
    body = {
        "prompt": text_ids[offset : offset + num_prompt],
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return Question("/v1/completions", body)


def _prompt(chance: random.Random, earlier: list[list[int]], text_ids: list[int]) -> list[int]:
    """A piece of the text; sometimes an earlier prompt and more, as in a conversation."""
    length = log_uniform(chance, 1, MAX_PROMPT)
    offset = chance.randrange(len(text_ids) - length)
    piece = text_ids[offset : offset + length]
    if earlier and chance.random() < 0.2:
        piece = chance.choice(earlier) + piece
    return piece[:MAX_PROMPT]


def _chat(chance: random.Random) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": chance.choice(CHATS)}]}


def _sampling(chance: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {"temperature": 0}
    if chance.random() < 0.5:
        options = {"temperature": chance.choice([0.7, 1.0]), "seed": chance.randrange(2**40)}
        if chance.random() < 0.2:
            options["n"] = 2
    if chance.random() < 0.15:
        options["stop"] = chance.choice(STOPS)
    return options


def asking(seed: int, number: int, num_questions: int) -> Asking:
    """How the request of this number is made."""
    chance = random.Random(f"asking {seed} {number}")
    stream = chance.random() < 0.6
    salt = "" if chance.random() < SHARED_SALT else f"{seed}-{number}"
    cut = None
    if chance.random() < CUT:
        after_s = log_uniform(chance, 1, 400) / 100
        cut = Cut(after_s, log_uniform(chance, 1, 20), chance.random() < 0.5)
    return Asking(number, chance.randrange(num_questions), stream, salt, cut)


def log_uniform(chance: random.Random, low: int, high: int) -> int:
    """Small numbers as often as large ones."""
    return round(low * (high / low) ** chance.random())
