"""How the next token is chosen from a row of logits: the definition, in plain numpy.

Sampling is the Gumbel-max trick: the token with the highest ``scaled logit + noise`` wins, of those
that truncation leaves. The noise is counter-based, Philox4x32-10 (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC 2011) keyed by the request's seed and counted by (token id,
position, choice). So there is no generator state to move: the same (seed, choice, position) gives
the same noise on every worker, in every batch and after every retry.

:func:`services.engine.sampler.sample` gives the same tokens, sooner. That can be tested because
nothing depends on an order of summation, nor on whose ``log`` and ``exp`` is at hand: those below
are sums and products of doubles alone, on arrays here and on numbers there.
"""

import math

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from services.engine.sampler import (
    LIGHTEST,
    gumbel,
    masks_stop_ids,
    philox,
    scale_of,
    weigh,
    weight_scale,
)
from services.engine.scheduler import NO_TOKEN, Row
from services.engine.sequence import SamplingParams


def gumbel_noise(vocab_size: int, seed: int, choice: int, position: int) -> NDArray[np.float64]:
    """Noise of every token, ``[vocab_size]``, for the token at an absolute position."""
    groups = np.arange(-(-vocab_size // 4), dtype=np.uint64)
    words = philox(
        groups,
        np.full_like(groups, position),
        np.full_like(groups, choice),
        np.zeros_like(groups),
        np.uint64(seed & 0xFFFFFFFF),
        np.uint64(seed >> 32),
    )
    noise: NDArray[np.float64] = gumbel(np.stack(words, axis=-1).reshape(-1)[:vocab_size])
    return noise


@np.errstate(over="ignore")  # at a temperature near zero, to minus infinity
def scores(logits: Tensor, row: Row) -> NDArray[np.float64]:
    """What the winner of one row is the first maximum of, ``[vocab_size]``, from its logits."""
    params = row.params
    values = logits.double().cpu().numpy().copy()
    if masks_stop_ids(row):
        values[list(params.stop_ids)] = -np.inf
    if params.temperature == 0:
        return values
    scaled = (values - values.max()) * scale_of(params.temperature)
    noise = gumbel_noise(values.size, params.seed, params.choice, row.end)
    stays = _stays(values, scaled, params)
    return np.where(stays, scaled + noise, -np.inf)


def _stays(
    values: NDArray[np.float64],
    scaled: NDArray[np.float64],
    params: SamplingParams,
) -> NDArray[np.bool_]:
    """Who is in the top-k, of these in the nucleus of top-p, and of these not below min-p of the
    best.

    Tokens with equal logits stay or go together: all that equal the k-th best; and all whose
    betters, by themselves, have less than ``top_p`` of the weight. So the best always stay.
    """
    stays = np.ones(values.shape, dtype=np.bool_)
    if 0 < params.top_k < values.size:
        stays &= values >= np.partition(values, -params.top_k)[-params.top_k]
    if params.top_p < 1:
        narrow = values.astype(np.float32)
        t = (narrow - narrow.max()) * weight_scale(scale_of(params.temperature))
        weights = np.where(stays, weigh(np.maximum(t, LIGHTEST)), 0)
        falling, place, count = np.unique(-values, return_inverse=True, return_counts=True)
        of_value = np.zeros(falling.size, dtype=np.int64)
        np.add.at(of_value, place, weights)  # as integers, which add up in any order
        betters = np.cumsum(of_value) - of_value
        stays &= (betters < params.top_p * of_value.sum())[place]
    if params.min_p > 0:
        stays &= scaled >= math.log(params.min_p)
    return stays


def sample_row(logits: Tensor, row: Row) -> int:
    """The token of one row, the first of equals; NO_TOKEN where the logits, ``[vocab_size]``, hold
    NaN or an infinity above zero, or leave nothing to choose.
    """
    values = logits.double().cpu().numpy()
    if np.isnan(values).any() or values.max() == np.inf:
        return NO_TOKEN
    if masks_stop_ids(row):
        values = np.delete(values, list(row.params.stop_ids))
    if not values.size or values.max() == -np.inf:
        return NO_TOKEN
    return int(scores(logits, row).argmax())
