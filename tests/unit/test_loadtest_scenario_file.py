"""Scenario files: they read back as they were written, and say what is wrong with them."""

import math
import re
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from loadtest.arrivals import parse_arrivals
from loadtest.lengths import parse_lengths
from loadtest.scenario import ClassSpec, Scenario, Think
from loadtest.scenario_file import (
    builtin_scenarios,
    from_yaml,
    load_scenario,
    parse_think,
    single,
    to_yaml,
)
from loadtest.slo import SLO

NAMES = st.from_regex(r"[a-z][a-z0-9._-]{0,8}", fullmatch=True)
LENGTHS = st.sampled_from(
    ["7", "uniform:3..9", "choice:1,5,5", "normal:12.5,0.25", "lognormal:1234567,0.8..2000000"]
).map(parse_lengths)
ARRIVALS = st.sampled_from(["constant", "poisson", "gamma:0.25", "bursts:4", "ramp:0.125..2"]).map(
    parse_arrivals
)
LIMITS = st.just(math.inf) | st.floats(1e-6, 1e6)
SPECS = st.builds(
    ClassSpec,
    name=NAMES,
    input=LENGTHS,
    output=LENGTHS,
    share=st.floats(1e-6, 1e6),
    arrivals=st.none() | ARRIVALS,
    prefix=st.integers(0, 9999),
    prefixes=st.integers(1, 9999),
    popularity=st.floats(0, 4),
    turns=LENGTHS,
    turn_input=st.none() | LENGTHS,
    think=st.builds(Think, st.sampled_from([0.0, 0.25, 30.0]), st.booleans()),
    slo=st.builds(SLO, LIMITS, LIMITS, LIMITS),
)
SCENARIOS = st.builds(
    Scenario,
    name=NAMES,
    classes=st.lists(SPECS, min_size=1, max_size=3, unique_by=lambda spec: spec.name).map(tuple),
    about=st.sampled_from(["", "Short: 'and' long. #1", "Grüße"]),
    arrivals=ARRIVALS,
)


@settings(max_examples=100, deadline=None)
@given(scenario=SCENARIOS)
def test_a_scenario_reads_back_as_it_was_written(scenario: Scenario) -> None:
    assert from_yaml(to_yaml(scenario)) == scenario


def test_the_strategy_covers_every_field() -> None:
    """A field that is added must be written and read as well."""
    assert {entry.name for entry in fields(ClassSpec)} == {
        *("name", "input", "output", "share", "arrivals", "prefix", "prefixes", "popularity"),
        *("turns", "turn_input", "think", "slo"),
    }


def test_keys_have_the_meaning_that_they_say() -> None:
    scenario = from_yaml("""
name: two
about: >
  Some words.
arrivals: gamma:0.5
classes:
  - name: chat
    share: 0.75
    input: 20
    output: uniform:5..9
    prefix: 64
    prefixes: 3
    popularity: 1.5
    turns: 3
    turn_input: 8
    think: 2
    slo: ttft=1s,tpot=50ms
  - name: long
    arrivals: bursts:4
    input: 400
    output: 2
    slo: {ttft: 9s, e2e: 1500}
""")
    chat, long = scenario.classes
    assert (scenario.name, scenario.about) == ("two", "Some words.")
    assert scenario.arrivals == parse_arrivals("gamma:0.5")
    assert (chat.share, chat.prefix, chat.prefixes, chat.popularity) == (0.75, 64, 3, 1.5)
    assert (chat.input, chat.output) == (parse_lengths("20"), parse_lengths("uniform:5..9"))
    assert (chat.turns, chat.turn_input) == (parse_lengths(3), parse_lengths(8))
    assert chat.think == Think(2.0)
    assert chat.arrivals is None
    assert chat.slo == SLO(ttft=1.0, tpot=0.05)
    assert long.arrivals == parse_arrivals("bursts:4")
    assert long.slo == SLO(ttft=9.0, e2e=1.5)
    assert (long.share, long.turns.mean, long.think) == (1.0, 1.0, Think())


def test_flags_make_a_class() -> None:
    scenario = single(
        input="128",
        output="64",
        arrivals="constant",
        prefix=64,
        turns="3",
        think="exponential:2",
        turn_input=None,
        slo="ttft=500ms,tpot=50ms",
    )
    (spec,) = scenario.classes
    assert spec.name == scenario.name == "requests"
    assert str(scenario.arrivals) == "constant"
    assert (spec.prefix, spec.turns.mean, spec.think) == (64, 3, Think(2.0, True))
    assert spec.slo == SLO(ttft=0.5, tpot=0.05)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"input": "12a"}, "input: lengths '12a': want N"),
        ({"slo": "tfft=1"}, "slo: SLO 'tfft=1': want NAME=LIMIT"),
        ({"slo": ""}, None),
        ({"arrivals": "often"}, "arrivals: arrivals 'often': no process 'often'"),
        ({"think": "long"}, "think: think time 'long': want SECONDS or exponential:SECONDS"),
        ({"turns": "0"}, "turns: lengths '0': a length is 1 at the least"),
        ({"prefix": "-1"}, "prefix: '-1': want a whole number from 0 up"),
        ({"inputs": "1"}, "no key 'inputs'; did you mean 'input'?"),
    ],
)
def test_a_wrong_flag_is_named(keys: dict[str, str], message: str | None) -> None:
    given_keys = {"input": "1", "output": "1", **keys}
    if message is None:
        assert single(**given_keys).classes[0].slo == SLO()
        return
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        single(**given_keys)


def one_class(text: str) -> str:
    return f"name: x\nclasses:\n  - {{name: a, input: 3, output: 4, {text}}}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "[] is not a mapping of name, about, arrivals, classes"),
        ("", "None is not a mapping of name, about, arrivals, classes"),
        ("a: [", "not YAML: while parsing"),
        ("name: x", "the key 'classes' is missing"),
        ("classes: [{name: a, input: 3, output: 4}]", "the key 'name' is missing"),
        ("name: x\nclasses: []", "there are no classes"),
        ("name: x\nclasses: 3", "classes: 3 is not a list of classes"),
        ("name: x\nclasses: [3]", "class 1: 3 is not a mapping of name, input, output"),
        ("name: x\nclasses: [{name: a, input: 3}]", "class a: the key 'output' is missing"),
        ("name: x\nclasses: [{input: 3, output: 3}]", "class 1: the key 'name' is missing"),
        (
            "name: x\nclasses: [{name: a, input: 3, output: 4}, {name: a, input: 3, output: 4}]",
            "two classes are named 'a'",
        ),
        ("name: [x]\nclasses: []", "name: ['x']: want a name of letters, digits and . _ -"),
        ("name: a b\nclasses: []", "name: 'a b': want a name of letters, digits and . _ -"),
        ("name: x\nabout: 3\nclasses: []", "about: 3 is not a text"),
        ("name: x\narrivals: [1]\nclasses: []", "arrivals: [1] is neither a text nor a number"),
        ("name: x\narrival: constant\nclasses: []", "no key 'arrival'; did you mean 'arrivals'?"),
        ("name: x\nzzz: 1\nclasses: []", "no key 'zzz'; known are name, about, arrivals, classes"),
        (one_class("inptu: 3"), "class a: no key 'inptu'; did you mean 'input'?"),
        (one_class("turn_input: 'uniform:2'"), "class a: turn_input: lengths 'uniform:2': want"),
        (one_class("turn_input: true"), "class a: turn_input: True is neither a text nor a number"),
        (one_class("share: 0"), "class a: share: '0': want a number above 0"),
        (one_class("share: much"), "class a: share: 'much': want a number above 0"),
        (one_class("share: .inf"), "class a: share: 'inf': want a number above 0"),
        (one_class("popularity: -1"), "class a: popularity: '-1': want a number from 0"),
        (one_class("prefix: 1.5"), "class a: prefix: '1.5': want a whole number from 0 up"),
        (one_class("prefixes: 0"), "class a: prefixes: '0': want a whole number from 1 up"),
        (
            one_class("arrivals: 'bursts:0'"),
            "class a: arrivals: arrivals 'bursts:0': want bursts:N",
        ),
        (one_class("think: -1"), "class a: think: think time '-1': want SECONDS"),
        (one_class("slo: 3"), "class a: slo: SLO '3': want NAME=LIMIT"),
        (one_class("slo: {tpto: 3}"), "class a: slo: SLO 'tpto=3': want NAME=LIMIT with a name of"),
        (one_class("slo: [3]"), "class a: slo: [3] is neither a text nor a number"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"^my\.yaml: .*" + re.escape(message)):
        from_yaml(text, "my.yaml")


def test_files_are_read_and_their_names_are_in_errors(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(to_yaml(load_scenario("bursts")), encoding="utf-8")
    assert load_scenario(path) == load_scenario("bursts")
    path.write_text("name: 3", encoding="utf-8")
    with pytest.raises(ValueError, match="^" + re.escape(f"{path}: name: 3: want a name")):
        load_scenario(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=re.escape(f"{path}: not a text file")):
        load_scenario(path)


@pytest.mark.parametrize("name", ["chta", "no/such.yaml", "."])
def test_a_scenario_that_is_not_there_is_an_error_that_lists_what_is(name: str) -> None:
    message = f"scenario {name!r}: .*; built in are bursts, chat, multi-turn"
    with pytest.raises(ValueError, match=message):
        load_scenario(name)


@pytest.mark.parametrize("name", builtin_scenarios())
def test_those_built_in_read_back(name: str) -> None:
    assert from_yaml(to_yaml(load_scenario(name))) == load_scenario(name)


def test_think_times() -> None:
    assert parse_think("2") == Think(2.0)
    assert parse_think(" exponential:0.5 ") == Think(0.5, varies=True)


def test_the_example_of_the_docs_is_what_it_says() -> None:
    page = (Path(__file__).parents[2] / "docs" / "loadtest.md").read_text(encoding="utf-8")
    scenario = from_yaml(page.partition("```yaml\n")[2].partition("```")[0])
    assert [spec.name for spec in scenario.classes] == ["chat", "reports"]
    assert scenario.classes[1].slo == SLO(ttft=20.0, e2e=30.0)
    for name in builtin_scenarios():
        assert f"| `{name}` |" in page
