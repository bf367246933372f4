"""The chaos harness's plan: what is asked and which faults come when, from the seed alone."""

from collections import Counter

from tests.chaos.questions import MAX_PROMPT, MAX_TOKENS, asking, long_question, questions
from tests.chaos.schedule import CALM_S, KINDS, WARM_UP_S, schedule

TEXT_IDS = list(range(3000))


def test_a_schedule_is_a_function_of_its_seed() -> None:
    assert schedule(1, 600) == schedule(1, 600)
    assert schedule(1, 600) != schedule(2, 600)


def test_a_run_of_ten_minutes_has_each_kind_at_least_five_times() -> None:
    for seed in range(5):
        counts = Counter(fault.kind for fault in schedule(seed, 600))
        assert min(counts[kind] for kind in KINDS) >= 5, counts


def test_a_short_run_repeats_no_kind() -> None:
    kinds = [fault.kind for fault in schedule(1, 60)]
    assert len(kinds) == len(set(kinds)) > 4


def test_faults_come_in_order_and_within_the_load() -> None:
    times = [fault.at_s for fault in schedule(3, 120)]
    assert times == sorted(times)
    assert times[0] >= WARM_UP_S
    assert times[-1] <= 120 - CALM_S


def test_what_lasts_lasts_as_long_as_its_kind_says() -> None:
    for fault in schedule(4, 600):
        low, high = fault.kind.hold_s
        assert low <= fault.hold_s <= high


def test_questions_are_a_function_of_the_seed_and_fit_the_model() -> None:
    asked = questions(1, 64, TEXT_IDS)
    assert asked == questions(1, 64, TEXT_IDS)
    assert asked != questions(2, 64, TEXT_IDS)
    prompts = [q.body["prompt"] for q in asked if "prompt" in q.body]
    assert all(1 <= len(prompt) <= MAX_PROMPT for prompt in prompts)
    assert all(1 <= q.body["max_tokens"] <= MAX_TOKENS for q in asked)


def test_questions_are_of_all_sorts() -> None:
    asked = questions(1, 64, TEXT_IDS)
    prompts = [tuple(q.body["prompt"]) for q in asked if "prompt" in q.body]
    assert any(a != b and a == b[: len(a)] for a in prompts for b in prompts), "a shared prefix"
    for key in ("messages", "stop", "n", "seed"):
        assert any(key in q.body for q in asked), key


def test_a_choice_is_asked_for_twice_only_where_it_is_drawn() -> None:
    assert all(q.body["temperature"] for q in questions(1, 200, TEXT_IDS) if "n" in q.body)


def test_askings_are_of_all_sorts() -> None:
    ways = [asking(1, number, 10) for number in range(300)]
    assert ways == [asking(1, number, 10) for number in range(300)]
    assert {way.question for way in ways} == set(range(10))
    salts = [way.salt for way in ways if way.salt]
    assert 0 < len(salts) == len(set(salts)) < len(ways), "some may hit the cache, some must not"
    cuts = [way.cut for way in ways if way.cut]
    assert len({way.stream for way in ways}) == len({cut.hard for cut in cuts}) == 2


def test_the_long_question_has_the_length_asked_for() -> None:
    body = long_question(1, TEXT_IDS, 280, 8).body
    assert (len(body["prompt"]), body["max_tokens"]) == (280, 8)
