"""The sampler: its noise is the published generator, its choices follow softmax, nothing else; and
the fast form chooses what the plain one does.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from services.engine.sampler import (
    BLOCK,
    LIGHTEST,
    UNIT_BITS,
    log,
    philox,
    sample,
    weigh,
    weight_scale,
)
from services.engine.sampler_reference import gumbel_noise, sample_row, scores
from services.engine.scheduler import NO_TOKEN, Row
from services.engine.sequence import SamplingParams

VOCAB = 6


def row(params: SamplingParams, position: int = 10, num_prompt: int = 10) -> Row:
    """A row that samples the token at ``position``."""
    return Row((b"a", 0), (1,), position - 1, (1,), True, params, num_prompt)


def make_logits(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


LOGITS = make_logits(1.0, 2.5, -0.5, 2.0, 0.0, 1.5)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    arrays = [np.array([value, 0], dtype=np.uint64) for value in counter + key]
    assert tuple(int(word[0]) for word in philox(*arrays)) == expected


def test_noise_is_a_function_of_seed_choice_position_and_token_alone() -> None:
    base = gumbel_noise(10, seed=5, choice=0, position=7)
    assert np.array_equal(base, gumbel_noise(10, 5, 0, 7))
    assert np.array_equal(base, gumbel_noise(13, 5, 0, 7)[:10])  # the vocabulary's size is no input
    others = [(6, 0, 7), (5 + (1 << 32), 0, 7), (5, 1, 7), (5, 0, 8)]
    for seed, choice, position in others:
        assert not np.isclose(base, gumbel_noise(10, seed, choice, position)).any()


def test_noise_is_finite_and_has_the_moments_of_gumbel() -> None:
    noise = gumbel_noise(200_000, seed=(1 << 64) - 1, choice=3, position=8191)
    assert np.isfinite(noise).all()
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.std() == pytest.approx(1.2825, abs=0.01)


@pytest.mark.parametrize("vary", ["seed", "position", "choice"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_frequencies_follow_softmax(vary: str, temperature: float) -> None:
    n = 2000
    params = SamplingParams(max_tokens=1, temperature=temperature, seed=11)
    rows = [
        row(params, position=10 + i) if vary == "position" else row(replace(params, **{vary: i}))  # type: ignore[arg-type]
        for i in range(n)
    ]
    tokens = sample(LOGITS.expand(n, -1), rows)
    observed = np.bincount(tokens, minlength=VOCAB)
    expected = (LOGITS.double() / temperature).softmax(-1).numpy() * n
    chi_square = ((observed - expected) ** 2 / expected).sum()
    assert chi_square < 25.7  # the 0.9999 quantile at 5 degrees of freedom


def support(params: SamplingParams, logits: torch.Tensor = LOGITS) -> set[int]:
    """Tokens that can be chosen at all."""
    return set(np.flatnonzero(np.isfinite(scores(logits, row(params)))).tolist())


SAMPLED = SamplingParams(max_tokens=9, seed=1)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {0, 1, 2, 3, 4, 5}),
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 3, 5}),
        ({"top_k": 6}, {0, 1, 2, 3, 4, 5}),
        ({"top_k": 100}, {0, 1, 2, 3, 4, 5}),
        # softmax: 0.09 0.41 0.02 0.25 0.03 0.15, ordered: 1 3 5 0 4 2
        ({"top_p": 0.01}, {1}),
        ({"top_p": 0.4}, {1}),
        ({"top_p": 0.5}, {1, 3}),
        ({"top_p": 0.7}, {1, 3, 5}),
        ({"top_p": 0.99}, {0, 1, 3, 4, 5, 2}),
        ({"min_p": 1.0}, {1}),
        ({"min_p": 0.5}, {1, 3}),
        ({"min_p": 0.3}, {1, 3, 5}),
        ({"top_k": 2, "top_p": 0.99}, {1, 3}),
        ({"top_k": 2, "top_p": 0.5}, {1}),
        ({"top_p": 0.7, "min_p": 0.5}, {1, 3}),
        ({"temperature": 0.1, "top_p": 0.99}, {1}),
        ({"temperature": 100.0, "min_p": 0.9}, {0, 1, 2, 3, 4, 5}),
    ],
)
def test_truncation_keeps_the_right_tokens(changes: dict[str, float], expected: set[int]) -> None:
    found = support(replace(SAMPLED, **changes))  # type: ignore[arg-type]
    if changes == {"top_p": 0.99}:
        found |= {2}  # within rounding of the border
    assert found == expected


def test_truncation_only_removes_tokens() -> None:
    """Who stays keeps his noise: what wins among all and is not removed wins again."""
    for seed in range(50):
        whole = sample(LOGITS[None], [row(replace(SAMPLED, seed=seed))])[0]
        params = replace(SAMPLED, seed=seed, top_k=3)
        assert whole not in support(params) or sample(LOGITS[None], [row(params)])[0] == whole


def test_greedy_takes_the_best_whatever_else_is_set() -> None:
    params = SamplingParams(max_tokens=9, temperature=0.0, top_k=2, top_p=0.1, seed=3)
    assert sample(LOGITS[None], [row(params)]) == [1]


@pytest.mark.parametrize("temperature", [1e-3, 1e-300, 5e-324])
def test_a_tiny_temperature_is_greedy_and_overflows_nowhere(temperature: float) -> None:
    for seed in range(20):
        params = SamplingParams(max_tokens=9, temperature=temperature, seed=seed)
        assert sample(make_logits(20.0, 30.0, 29.9, -5.0)[None], [row(params)]) == [1]


def test_a_huge_temperature_is_uniform() -> None:
    tokens = sample(
        make_logits(9.0, -9.0).expand(2000, -1),
        [row(SamplingParams(9, temperature=1e9, seed=s)) for s in range(2000)],
    )
    assert 900 < sum(tokens) < 1100


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("generated", [0, 1, 2, 3, 4])
def test_stop_ids_are_masked_until_min_tokens(temperature: float, generated: int) -> None:
    logits = make_logits(0.0, 50.0, 40.0, 0.0)
    params = SamplingParams(9, min_tokens=3, temperature=temperature, stop_ids=(1, 2))
    token = sample(logits[None], [row(params, 10 + generated, 10)])[0]
    assert token == 1 if generated >= 3 else token in (0, 3)


def test_without_stop_ids_min_tokens_changes_nothing() -> None:
    params = SamplingParams(9, min_tokens=5, temperature=0.0)
    assert sample(LOGITS[None], [row(params)]) == [1]


def test_a_row_does_not_depend_on_its_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(16, 50, generator=generator)
    rows = [
        row(
            SamplingParams(
                9,
                temperature=[0.0, 0.8, 1.5][i % 3],
                top_k=[0, 5][i % 2],
                top_p=[1.0, 0.9][i % 2],
                seed=i // 4,
                choice=i % 4,
            ),
            position=10 + i,
        )
        for i in range(16)
    ]
    together = sample(logits, rows)
    assert together == [sample(logits[i : i + 1], [rows[i]])[0] for i in range(16)]
    backwards = sample(logits.flip(0), rows[::-1])
    assert backwards == together[::-1]


def test_any_logits_dtype_is_taken_and_left_as_it_is() -> None:
    params = replace(SAMPLED, temperature=0.8, min_tokens=3, stop_ids=(1,), top_k=2)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits = LOGITS.to(dtype)
        before = logits.clone()
        assert sample(logits[None], [row(params)]) == sample(LOGITS[None], [row(params)])
        assert torch.equal(logits, before), "the caller's logits were changed"


def test_a_view_of_logits_is_as_good() -> None:
    wide = torch.randn(4, 200, generator=torch.Generator().manual_seed(0))
    rows = [row(replace(SAMPLED, seed=seed)) for seed in range(4)]
    assert sample(wide[:, 20:150], rows) == sample(wide[:, 20:150].contiguous(), rows)


# --- what is not a number -------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("size", [3, BLOCK, 2 * BLOCK + 5])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [NAN, -NAN, INF])
def test_logits_that_are_not_finite_give_no_token(
    bad: float, temperature: float, size: int
) -> None:
    params = replace(SAMPLED, temperature=temperature)
    for place in (0, size // 2, size - 1):
        logits = torch.zeros(3, size)
        logits[1, place] = bad
        tokens = sample(logits, [row(params)] * 3)
        assert tokens[1] == NO_TOKEN == sample_row(logits[1], row(params))
        assert NO_TOKEN not in (tokens[0], tokens[2]), "a neighbour suffered"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_minus_infinity_is_no_damage_unless_there_is_nothing_else(temperature: float) -> None:
    params = replace(SAMPLED, temperature=temperature)
    assert sample(make_logits(-INF, 3.0, -INF)[None], [row(params)]) == [1]
    assert sample(make_logits(-INF, -INF)[None], [row(params)]) == [NO_TOKEN]
    masked = replace(params, min_tokens=1, stop_ids=(0, 1))
    assert sample(make_logits(1.0, 2.0, -INF)[None], [row(masked)]) == [NO_TOKEN]
    beyond = replace(params, min_tokens=1, stop_ids=(0, 99))  # a token that there is not
    assert sample(make_logits(9.0, -INF, 1.0)[None], [row(beyond)]) == [2]


# --- equals ---------------------------------------------------------------------------------------


def test_of_equals_greedy_takes_the_first() -> None:
    logits = torch.zeros(3, 4 * BLOCK + 3)
    logits[0, [70, 140, -1]] = 1.0
    logits[1, 5] = -0.0
    assert sample(logits, [row(SamplingParams(9, temperature=0.0))] * 3) == [70, 0, 0]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 2}, {1, 2, 3, 5}),  # all that equal the second
        # softmax: 0.06 0.42 0.155 0.155 0.06 0.155
        ({"top_p": 0.42}, {1}),
        ({"top_p": 0.43}, {1, 2, 3, 5}),  # above any of the three equals there is less
        ({"top_p": 0.88}, {1, 2, 3, 5}),
        ({"top_p": 0.89}, {0, 1, 2, 3, 4, 5}),
    ],
)
def test_equals_stay_or_go_together(changes: dict[str, float], expected: set[int]) -> None:
    logits = make_logits(0.0, 2.0, 1.0, 1.0, 0.0, 1.0)
    assert support(replace(SAMPLED, **changes), logits) == expected  # type: ignore[arg-type]
    tokens = sample(
        logits.expand(300, -1),
        [row(replace(SAMPLED, seed=seed, **changes)) for seed in range(300)],  # type: ignore[arg-type]
    )
    assert set(tokens) == expected


# --- its arithmetic -------------------------------------------------------------------------------


def test_log_is_the_logarithm() -> None:
    x = np.concatenate([np.geomspace(1e-11, 40.0, 20_000), 1 - np.geomspace(2.0**-33, 0.5, 20_000)])
    expected = np.log(x)
    assert (np.abs(log(x) - expected) <= 4e-16 * np.abs(expected)).all()


@pytest.mark.parametrize("temperature", [0.01, 0.8, 1.0, 7.0])
def test_weights_are_those_of_softmax(temperature: float) -> None:
    logits = np.linspace(-40.0, 0.0, 30_001).astype(np.float32) * np.float32(temperature)
    weights = weigh(np.maximum(logits * weight_scale(1 / temperature), LIGHTEST))
    expected = np.exp(logits.astype(np.float64) / temperature) * 2.0**UNIT_BITS
    assert weights.dtype == np.int32
    assert weights[-1] == 2**UNIT_BITS
    # One unit for what is cut off, and what float32 makes of a logit over a temperature.
    assert (np.abs(weights - expected) <= 1 + 4e-6 * expected).all()


# --- against the plain form -----------------------------------------------------------------------

TEMPERATURES = [0.0, 5e-324, 1e-6, 0.1, 0.8, 1.0, 2.0, 10.0, 1e300]
TOP_P = st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.9999999, 1e-9]) | st.floats(1e-3, 1.0)


@st.composite
def sampled_rows(draw: st.DrawFn, size: int) -> Row:
    """A row with any parameters."""
    position = draw(st.integers(1, 1 << 20))
    params = SamplingParams(
        max_tokens=9,
        min_tokens=draw(st.integers(0, 3)),
        temperature=draw(st.sampled_from(TEMPERATURES) | st.floats(1e-6, 10.0)),
        top_k=draw(st.sampled_from([0, 0, 1, 2, size - 1, size, size + 1]) | st.integers(1, size)),
        top_p=draw(TOP_P),
        min_p=draw(st.just(0.0) | st.floats(0.0, 1.0)),
        seed=draw(st.integers(0, (1 << 64) - 1)),
        choice=draw(st.integers(0, 200)),
        stop_ids=tuple(draw(st.lists(st.integers(0, size - 1), max_size=3))),
    )
    return row(params, position, max(1, position - draw(st.integers(0, 3))))


def draw_logits(kind: str, size: int, random: np.random.Generator) -> np.ndarray:
    logits = random.normal(0.0, 3.0, size)
    if kind == "equals":
        logits = logits.round()
    elif kind == "flat":
        logits *= 0.01
    elif kind == "even":
        logits[:] = random.choice([0.0, -0.0], size)
    elif kind == "peaked":
        logits[random.integers(0, size, 4)] += random.normal(20.0, 2.0, 4)
    elif kind == "huge":
        logits *= 1e37
    elif kind == "masked":
        logits[random.random(size) < 0.7] = -np.inf
    elif kind == "damaged":
        logits[random.integers(size)] = random.choice([np.nan, -np.nan, np.inf])
    return logits


KINDS = ["normal", "equals", "flat", "even", "peaked", "huge", "masked", "damaged"]


@settings(max_examples=100, deadline=None)
@given(
    st.data(),
    st.sampled_from([1, 3, BLOCK - 1, BLOCK, BLOCK + 1, 130, 1003]),
    st.integers(0, 1 << 32),
)
def test_all_rows_at_once_give_the_tokens_of_the_plain_form(
    data: st.DataObject, size: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=6))
    values = np.stack([draw_logits(kind, size, random) for kind in kinds])
    logits = torch.from_numpy(values.astype(np.float32))
    rows = [data.draw(sampled_rows(size)) for _ in kinds]
    expected = [sample_row(logits[i], rows[i]) for i in range(len(rows))]
    assert sample(logits, rows) == expected


@pytest.mark.parametrize("spread", [0.5, 2.2, 6.0])
@pytest.mark.parametrize(
    "changes", [{}, {"top_p": 0.95}, {"top_k": 50}, {"top_k": 3000, "top_p": 0.9}, {"min_p": 0.05}]
)
def test_a_vocabulary_of_full_size(changes: dict[str, float], spread: float) -> None:
    """Where blocks are skipped, and the winner is rarely the best."""
    logits = spread * torch.randn(6, 49_153, generator=torch.Generator().manual_seed(1))
    rows = [
        row(SamplingParams(9, temperature=0.8, seed=i << 31, **changes), position=50 + i)  # type: ignore[arg-type]
        for i in range(6)
    ]
    tokens = sample(logits, rows)
    assert tokens == [sample_row(logits[i], rows[i]) for i in range(6)]
    if spread < 6:
        assert tokens != logits.argmax(-1).tolist()
