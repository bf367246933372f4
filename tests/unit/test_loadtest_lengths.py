"""Lengths: what is drawn has the mean, the bounds and the shape that were written."""

import re

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from loadtest.lengths import parse_lengths

FORMS = [
    "128",
    "uniform:64..256",
    "uniform:1..1",
    "choice:64",
    "choice:64,64,512",
    "normal:128,32",
    "normal:128,32.5..140",
    "lognormal:128,0.8",
    "lognormal:128,0.8..200",
    "exponential:50",
    "exponential:50..60",
]


@settings(max_examples=60, deadline=None)
@given(text=st.sampled_from(FORMS), n=st.integers(0, 200), seed=st.integers(0, 99))
def test_lengths_are_whole_positive_and_within_their_limits(text: str, n: int, seed: int) -> None:
    lengths = parse_lengths(text)
    drawn = lengths.sample(np.random.default_rng(seed), n)
    assert drawn.shape == (n,)
    assert drawn.dtype == np.int64
    assert np.all(drawn >= 1)
    for limit in filter(None, (lengths.limit, lengths.maximum)):
        assert np.all(drawn <= limit)


@pytest.mark.parametrize("text", FORMS)
def test_the_mean_is_that_of_what_is_drawn(text: str) -> None:
    drawn = parse_lengths(text).sample(np.random.default_rng(1), 200_000)
    error = 5 * drawn.std() / np.sqrt(drawn.size)
    assert parse_lengths(text).mean == pytest.approx(drawn.mean(), abs=error + 0.002 * drawn.mean())


@pytest.mark.parametrize(
    ("text", "mean"), [("lognormal:128,0.8", 128), ("normal:128,32", 128), ("exponential:50", 50)]
)
def test_a_distribution_has_the_mean_that_was_written(text: str, mean: float) -> None:
    assert parse_lengths(text).mean == pytest.approx(mean, rel=0.01)


def test_distributions_have_their_shape() -> None:
    def drawn(text: str) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        return parse_lengths(text).sample(np.random.default_rng(2), 100_000)

    assert np.log(drawn("lognormal:1000,0.8")).std() == pytest.approx(0.8, rel=0.02)
    assert drawn("normal:1000,100").std() == pytest.approx(100, rel=0.02)
    assert drawn("exponential:1000").std() == pytest.approx(1000, rel=0.02)
    values, counts = np.unique(drawn("uniform:3..6"), return_counts=True)
    assert values.tolist() == [3, 4, 5, 6]
    assert counts / 100_000 == pytest.approx(np.full(4, 0.25), abs=0.01)
    values, counts = np.unique(drawn("choice:64,512,64"), return_counts=True)
    assert values.tolist() == [64, 512]
    assert counts[0] / 100_000 == pytest.approx(2 / 3, abs=0.01)


def test_more_draws_leave_the_first_as_they_are() -> None:
    lengths = parse_lengths("lognormal:128,0.8")
    few = lengths.sample(np.random.default_rng(3), 10)
    assert np.array_equal(lengths.sample(np.random.default_rng(3), 99)[:10], few)


@pytest.mark.parametrize(
    ("text", "scaled"),
    [
        ("128", "32"),
        ("uniform:64..256", "uniform:16..64"),
        ("choice:1,2,512", "choice:1,1,128"),
        ("normal:128,32..1024", "normal:32,8..256"),
        ("lognormal:128,0.8..1024", "lognormal:32,0.8..256"),
        ("normal:2,0.5", "normal:1,0.125"),
        ("exponential:50", "exponential:12.5"),
    ],
)
def test_scaling_changes_lengths_and_not_shapes(text: str, scaled: str) -> None:
    assert str(parse_lengths(text).scaled(0.25)) == scaled


def test_only_a_tail_has_no_maximum() -> None:
    maxima = {text: parse_lengths(text).maximum for text in FORMS}
    assert maxima["128"] == 128
    assert maxima["uniform:64..256"] == 256
    assert maxima["choice:64,64,512"] == 512
    assert {maxima[text] for text in FORMS if text.startswith(("normal", "log", "exp"))} == {None}


@pytest.mark.parametrize("text", FORMS)
def test_lengths_read_back_as_they_are_written(text: str) -> None:
    assert str(parse_lengths(text)) == text


def test_a_number_is_a_length_and_spaces_do_not_matter() -> None:
    assert parse_lengths(128) == parse_lengths(" 128 ")
    assert parse_lengths("lognormal: 128, 0.8 ..200") == parse_lengths("lognormal:128,0.8..200")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "a length is 1 at the least"),
        ("-3", "want N, uniform:A..B"),
        ("12.5", "want N, uniform:A..B"),
        ("", "want N, uniform:A..B"),
        ("fixed:3", "no distribution 'fixed'; want N, uniform:A..B"),
        ("unifrom:1..2", "no distribution 'unifrom'; want N, uniform:A..B"),
        ("uniform:1,2", "want uniform:A..B"),
        ("uniform:0..2", "a length is 1 at the least"),
        ("uniform:3..2", "the range's end is before its beginning"),
        ("choice:", "want choice:A,B,..."),
        ("choice:4,0", "a length is 1 at the least"),
        ("normal:128", "want normal:MEAN,STD[..MAX]"),
        ("normal:128,32..", "want normal:MEAN,STD[..MAX]"),
        ("lognormal:128,0.8..100", "the limit 100 is below the mean"),
        ("lognormal:128,big", "want lognormal:MEAN,SIGMA[..MAX]"),
        ("exponential:0.5", "a length is 1 at the least"),
    ],
)
def test_what_is_wrong_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        parse_lengths(text)
    assert repr(text) in str(error.value)
