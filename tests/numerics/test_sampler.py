"""The sampler: its noise is the published generator, its choices follow softmax, nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from services.engine.sampler import gumbel_noise, philox, sample, scores
from services.engine.scheduler import Row
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
    arrays = [np.array([value, 0], dtype=np.uint64) for value in counter]
    assert tuple(philox(arrays, key)[0].tolist()) == expected


def test_noise_is_a_function_of_seed_choice_position_and_token_alone() -> None:
    base = gumbel_noise(10, seed=5, choice=0, position=7)
    assert torch.equal(base, gumbel_noise(10, 5, 0, 7))
    assert torch.equal(base, gumbel_noise(13, 5, 0, 7)[:10])  # the vocabulary's size is no input
    others = [(6, 0, 7), (5 + (1 << 32), 0, 7), (5, 1, 7), (5, 0, 8)]
    for seed, choice, position in others:
        assert not torch.isclose(base, gumbel_noise(10, seed, choice, position)).any()


def test_noise_is_finite_and_has_the_moments_of_gumbel() -> None:
    noise = gumbel_noise(200_000, seed=(1 << 64) - 1, choice=3, position=8191)
    assert noise.dtype is torch.float64
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.std().item() == pytest.approx(1.2825, abs=0.01)


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
    return set(scores(logits, row(params)).isfinite().nonzero().flatten().tolist())


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


def test_any_logits_dtype_gives_scores_of_doubles() -> None:
    params = replace(SAMPLED, temperature=0.8)
    assert scores(LOGITS.bfloat16(), row(params)).dtype is torch.float64
    before = LOGITS.clone()
    sample(LOGITS[None], [row(replace(SAMPLED, min_tokens=3, stop_ids=(1,), top_k=2))])
    assert torch.equal(LOGITS, before), "the caller's logits were changed"
