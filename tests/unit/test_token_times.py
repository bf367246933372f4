"""A worker's first token of an answer says how long it waited, and how long its step took."""

from __future__ import annotations

from router import wire
from tests.support.worker_box import Box, Pair, decode


def times(messages: list[wire.Message]) -> list[tuple[float, float]]:
    """(queue_ms, compute_ms) of each message with tokens."""
    return [
        (round(message.queue_ms), round(message.compute_ms))
        for message in messages
        if isinstance(message, wire.Tokens)
    ]


def test_after_a_pull_they_count_from_the_admission() -> None:
    pair = Pair()
    _, key = pair.pulling()
    pair.d.now += 5.0  # the pull takes its time: that is Pulled.pull_ms
    assert isinstance(pair.arrive(key)[0], wire.Pulled)
    pair.d.now += 0.25  # and the step before it, too
    pair.d.step_s = 0.125
    assert times(pair.d.run()) == [(250, 125), (0, 0), (0, 0)]


def test_with_a_prompt_they_are_the_prompts() -> None:
    box = Box("m")
    box.say(decode())
    box.now += 0.5
    box.step_s = 0.25
    assert times(box.run()) == [(500, 250), (0, 0), (0, 0), (0, 0)]


def test_a_prompt_of_several_steps_takes_all_of_them() -> None:
    box = Box("m")
    box.say(decode([i % 7 for i in range(20)]))  # of 8 tokens each
    box.step_s = 0.25
    assert times(box.run())[0] == (0, 750)
