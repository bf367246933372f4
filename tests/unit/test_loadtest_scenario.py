"""What a scenario becomes: classes at their rates, lengths, shared prefixes and turns."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from loadtest.conversation import Conversation
from loadtest.scenario import TURN_MARGIN, Scenario, build, plan, scaled
from loadtest.scenario_file import builtin_scenarios, from_yaml, load_scenario, single
from loadtest.writer import IdWriter, WordWriter

IDS = IdWriter(49_152)


def first_ids(conversation: Conversation) -> tuple[int, ...]:
    text = conversation.turns[0].text
    assert not isinstance(text, str)
    return text


def num_requests(conversations: list[Conversation]) -> int:
    return sum(len(conversation.turns) for conversation in conversations)


MIX = from_yaml("""
name: mix
classes:
  - {name: chat, share: 6, input: 20, output: 30}
  - {name: code, share: 2, input: 50, output: 5}
  - {name: long, share: 2, input: 400, output: 2, arrivals: "bursts:4"}
""")


def test_each_class_gets_its_share_and_its_lengths() -> None:
    found = build(MIX, IDS, rate=10.0, duration_s=400.0)
    assert [c.at_s for c in found] == sorted(c.at_s for c in found)
    counts = Counter(c.class_name for c in found)
    assert counts["chat"] == pytest.approx(2400, abs=4 * math.sqrt(2400))
    assert counts["code"] == pytest.approx(800, abs=4 * math.sqrt(800))
    assert counts["long"] == 800
    for name, lengths in {"chat": (20, 30), "code": (50, 5), "long": (400, 2)}.items():
        turns = {
            (c.turns[0].num_tokens, c.turns[0].max_tokens) for c in found if c.class_name == name
        }
        assert turns == {lengths}
    assert all(len(first_ids(c)) == c.turns[0].num_tokens for c in found)


def test_a_class_with_arrivals_of_its_own_keeps_to_them() -> None:
    found = build(MIX, IDS, rate=10.0, duration_s=40.0)
    long = [c.at_s for c in found if c.class_name == "long"]
    assert long == sorted([1.0 + 2.0 * group for group in range(20)] * 4)
    chat = np.diff([c.at_s for c in found if c.class_name == "chat"])
    assert chat.std() / chat.mean() == pytest.approx(1.0, abs=0.25)


def test_the_common_arrivals_are_the_scenarios() -> None:
    even = replace(MIX, arrivals=single(input=1, output=1, arrivals="constant").arrivals)
    times = [c.at_s for c in build(even, IDS, rate=10.0, duration_s=40.0) if c.class_name != "long"]
    assert np.diff(times) == pytest.approx(np.full(len(times) - 1, 1 / 8))


@pytest.mark.parametrize("n", [1, 2, 7, 100, 1001])
def test_a_number_of_requests_is_met(n: int) -> None:
    found = build(MIX, IDS, rate=10.0, num_requests=n)
    assert len(found) == n
    if n > 100:
        assert Counter(c.class_name for c in found)["long"] == pytest.approx(n / 5, abs=1)
        assert found[-1].at_s == pytest.approx(n / 10, rel=0.02)


def test_an_infinite_rate_is_all_at_once_and_mixed() -> None:
    found = build(MIX, IDS, rate=math.inf, num_requests=200)
    assert {c.at_s for c in found} == {0.0}
    assert Counter(c.class_name for c in found)["chat"] == pytest.approx(120, abs=30)


def test_turns_count_as_requests() -> None:
    scenario = single(input=10, output=5, turns="uniform:2..4", arrivals="constant")
    found = build(scenario, IDS, rate=30.0, duration_s=100.0)
    assert len(found) == 1000
    assert num_requests(found) == pytest.approx(3000, rel=0.03)
    assert num_requests(build(scenario, IDS, rate=30.0, num_requests=3000)) == pytest.approx(
        3000, rel=0.03
    )


def test_classes_of_more_turns_begin_more_rarely() -> None:
    scenario = from_yaml("""
name: turns
classes:
  - {name: one, input: 5, output: 5}
  - {name: three, input: 5, output: 5, turns: 3}
""")
    found = build(scenario, IDS, rate=10.0, duration_s=300.0)
    requests = Counter(c.class_name for c in found for _ in c.turns)
    assert requests["one"] == pytest.approx(1500, abs=160)
    assert requests["three"] == pytest.approx(1500, abs=280)


def test_later_turns_have_lengths_and_think_times_of_their_own() -> None:
    scenario = single(input=100, turn_input=7, output=9, turns=3, think="exponential:2", prefix=16)
    found = build(scenario, IDS, rate=10.0, duration_s=100.0)
    assert {(tuple(t.num_tokens for t in c.turns)) for c in found} == {(116, 7, 7)}
    assert {t.max_tokens for c in found for t in c.turns} == {9}
    assert {len(t.text) for c in found for t in c.turns} == {116, 7}
    assert {c.turns[0].think_s for c in found} == {0.0}
    think = [t.think_s for c in found for t in c.turns[1:]]
    assert np.mean(think) == pytest.approx(2.0, rel=0.2)
    assert np.std(think) == pytest.approx(2.0, rel=0.3)
    steady = build(replace_think(scenario, "1.5"), IDS, rate=10.0, duration_s=10.0)
    assert {t.think_s for c in steady for t in c.turns[1:]} == {1.5}
    like_input = single(input=100, output=9, turns=3)
    assert {
        t.num_tokens for c in build(like_input, IDS, rate=10.0, duration_s=10.0) for t in c.turns
    } == {100}


def replace_think(scenario: Scenario, think: str) -> Scenario:
    (spec,) = scenario.classes
    (other,) = single(input=1, output=1, think=think).classes
    return replace(scenario, classes=(replace(spec, think=other.think),))


def test_prefixes_are_shared_and_nothing_else_is() -> None:
    scenario = single(input=24, output=1, prefix=32, prefixes=4)
    found = build(scenario, IDS, rate=10.0, duration_s=200.0)
    texts = [first_ids(c) for c in found]
    fronts = Counter(text[:32] for text in texts)
    assert len(fronts) == 4
    assert max(fronts.values()) < 1.25 * len(texts) / 4
    # Prefixes differ from one another at once, and so do the parts behind them.
    assert len({front[:2] for front in fronts}) == 4
    assert len({text[32:35] for text in texts}) == len(texts)


def test_popular_prefixes_are_asked_more_often() -> None:
    scenario = single(input=1, output=1, prefix=8, prefixes=4, popularity=1)
    texts = [first_ids(c)[:8] for c in build(scenario, IDS, rate=100.0, duration_s=100.0)]
    counts = [count for _, count in Counter(texts).most_common()]
    expected = np.array([1, 1 / 2, 1 / 3, 1 / 4]) / (25 / 12) * len(texts)
    assert counts == pytest.approx(expected.tolist(), rel=0.1)


def test_a_prefix_is_not_shared_between_classes() -> None:
    scenario = from_yaml("""
name: two
classes:
  - {name: a, input: 1, output: 1, prefix: 16}
  - {name: b, input: 1, output: 1, prefix: 16}
""")
    found = build(scenario, IDS, rate=10.0, duration_s=10.0)
    assert {c.class_name for c in found} == {"a", "b"}
    assert len({first_ids(c)[:2] for c in found}) == 2


def test_no_two_requests_are_alike() -> None:
    scenario = single(input=20, output=1, turns=2).classes[0]
    both = Scenario("both", (scenario, replace(scenario, name="other")))
    found = build(both, IDS, rate=10.0, duration_s=60.0)
    starts = [tuple(turn.text)[:4] for c in found for turn in c.turns]
    assert len(set(starts)) == len(starts) > 400


def test_what_the_server_adds_is_part_of_the_length() -> None:
    writer = WordWriter(overhead=30)
    scenario = single(input=100, output=1, prefix=20)
    (conversation,) = build(scenario, writer, rate=1.0, num_requests=1)
    assert conversation.turns[0].num_tokens == 120
    assert len(str(conversation.turns[0].text).split()) == 90
    # Less than the server adds cannot be had; the plan says what will come.
    (conversation,) = build(single(input=8, output=1), writer, rate=1.0, num_requests=1)
    assert conversation.turns[0].num_tokens == 31
    assert len(str(conversation.turns[0].text).split()) == 1


# --- seeds ---------------------------------------------------------------------------------------


def test_a_seed_decides_all() -> None:
    def made(seed: int) -> list[Conversation]:
        return build(load_scenario("multi-turn"), IDS, rate=5.0, duration_s=20.0, seed=seed)

    assert made(1) == made(1)
    assert made(1) != made(2)
    assert not {first_ids(c)[:4] for c in made(1)} & {first_ids(c)[:4] for c in made(2)}


def test_another_text_seed_changes_the_texts_alone() -> None:
    def made(text_seed: int) -> list[Conversation]:
        return build(
            load_scenario("shared-prefix"),
            IDS,
            rate=5.0,
            duration_s=20.0,
            seed=1,
            text_seed=text_seed,
        )

    assert [(c.at_s, c.turns[0].num_tokens) for c in made(1)] == [
        (c.at_s, c.turns[0].num_tokens) for c in made(2)
    ]
    assert not {first_ids(c)[:4] for c in made(1)} & {first_ids(c)[:4] for c in made(2)}


def test_at_another_rate_the_same_is_asked_in_the_same_order() -> None:
    def lengths(rate: float) -> list[tuple[int, int]]:
        found = build(load_scenario("chat"), IDS, rate=rate, duration_s=30.0)
        return [(c.turns[0].num_tokens, c.turns[0].max_tokens) for c in found]

    slow, fast = lengths(1.0), lengths(4.0)
    assert len(fast) > 2 * len(slow)
    assert fast[: len(slow)] == slow


# --- the model's context -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "longest"),
    [
        ({"input": 900, "output": 200}, 1100),
        ({"input": "uniform:1..900", "output": "choice:1,200"}, 1100),
        ({"input": 800, "output": 100, "prefix": 200}, 1100),
        ({"input": 300, "output": 100, "turns": 3}, 1200 + 2 * TURN_MARGIN),
        ({"input": 300, "turn_input": 100, "output": 300, "turns": "uniform:1..2"}, 1016),
        ({"input": "normal:100,9", "output": 1100}, 1101),
    ],
)
def test_fixed_lengths_beyond_the_context_are_refused(keys: dict[str, int], longest: int) -> None:
    scenario = single(name="big", **keys)
    with pytest.raises(ValueError, match=f"class big: .* up to {longest:,} tokens.* of 1,000;"):
        build(scenario, IDS, rate=1.0, num_requests=1, max_model_len=1000)
    assert build(scenario, IDS, rate=1.0, num_requests=1, max_model_len=longest)
    assert build(scenario, IDS, rate=1.0, num_requests=1)


@pytest.mark.parametrize(
    "keys",
    [
        {"input": "lognormal:300,1", "output": 100},
        {"input": 300, "output": "exponential:200"},
        {"input": "lognormal:300,1", "output": "lognormal:300,1..700", "prefix": 100},
        {"input": "exponential:100", "output": "exponential:100", "turns": "exponential:4"},
        {"input": 100, "output": "exponential:100", "turns": 3},
    ],
)
def test_tails_beyond_the_context_are_cut_and_counted(keys: dict[str, str]) -> None:
    scenario = single(**keys)
    whole = plan(scenario, IDS, rate=10.0, num_requests=300)
    cut = plan(scenario, IDS, rate=10.0, num_requests=300, max_model_len=600)
    changed = 0
    for before, after in zip(whole.conversations, cut.conversations, strict=True):
        used = sum(t.num_tokens + t.max_tokens for t in after.turns)
        used += TURN_MARGIN * (len(after.turns) - 1)
        assert used <= 600
        assert all(t.max_tokens >= 1 and t.num_tokens >= 1 for t in after.turns)
        changed += [t.num_tokens for t in before.turns] != [t.num_tokens for t in after.turns] or [
            t.max_tokens for t in before.turns
        ] != [t.max_tokens for t in after.turns]
    assert cut.num_clipped == {"requests": changed}
    assert 0 < changed < len(cut.conversations)
    assert whole.num_clipped == {"requests": 0}


def test_a_length_that_was_written_is_not_cut_for_one_that_was_drawn() -> None:
    scenario = single(input=300, output="exponential:400")
    found = build(scenario, IDS, rate=10.0, num_requests=100, max_model_len=600)
    assert {c.turns[0].num_tokens for c in found} == {300}


# --- built in ------------------------------------------------------------------------------------


def test_what_is_built_in() -> None:
    assert builtin_scenarios() == ("bursts", "chat", "multi-turn", "shared-prefix", "summarise")


@pytest.mark.parametrize("name", builtin_scenarios())
@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_those_built_in_suit_a_small_model(name: str, factor: float) -> None:
    scenario = scaled(load_scenario(name), factor)
    found = build(scenario, IDS, rate=2.0, duration_s=60.0, max_model_len=int(2048 * factor))
    assert num_requests(found) > 60
    for spec in scenario.classes:
        assert math.isfinite(min(spec.slo.ttft, spec.slo.e2e))
    assert scenario.name == name
    assert scenario.about


def test_scaling_shortens_everything_and_leaves_the_slo() -> None:
    whole, quarter = load_scenario("shared-prefix"), scaled(load_scenario("shared-prefix"), 0.25)
    assert quarter.classes[0].prefix == 128
    assert quarter.classes[0].input.mean == pytest.approx(whole.classes[0].input.mean / 4, rel=0.02)
    assert quarter.classes[0].output.mean == pytest.approx(
        whole.classes[0].output.mean / 4, rel=0.02
    )
    assert quarter.slos == whole.slos
    talk = scaled(load_scenario("multi-turn"), 0.5).classes[0]
    assert talk.turn_input is not None
    assert talk.turn_input.mean == pytest.approx(16, rel=0.1)
    assert talk.turns == load_scenario("multi-turn").classes[0].turns


@pytest.mark.parametrize("factor", [0.0, -1.0, math.nan, math.inf])
def test_a_scale_is_above_zero(factor: float) -> None:
    with pytest.raises(ValueError, match="a scale of .*: want a number above 0"):
        scaled(MIX, factor)


def test_either_a_duration_or_a_number() -> None:
    for amounts in ({}, {"duration_s": 1.0, "num_requests": 1}, {"duration_s": -1.0}):
        with pytest.raises(ValueError, match="either a duration or a number of requests"):
            build(MIX, IDS, rate=1.0, **amounts)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a rate of inf requests/s"):
        build(MIX, IDS, rate=math.inf, duration_s=1.0)
