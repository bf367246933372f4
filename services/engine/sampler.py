"""Chooses the next token of each row from its logits.

Sampling is the Gumbel-max trick: the token with the highest ``logit / temperature + noise`` wins.
The noise is counter-based, Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2,
3", SC 2011) keyed by the request's seed and counted by (token id, position, choice). So there is no
generator state to move: the same (seed, choice, position) gives the same noise on every worker, in
every batch and after every retry.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.engine.scheduler import NO_TOKEN, Row

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_NEGATIVE = float("-inf")


def philox(counter: Sequence[NDArray[np.uint64]], key: tuple[int, int]) -> NDArray[np.uint64]:
    """Philox4x32-10: four u32 words per counter; ``counter`` is four arrays ``[n]`` of u32 values.

    Returns ``[n, 4]`` u32 values (held in u64).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (p1 >> _SHIFT) ^ c1 ^ np.uint64(k0),
            p1 & _LOW,
            (p0 >> _SHIFT) ^ c3 ^ np.uint64(k1),
            p0 & _LOW,
        )
        k0 = (k0 + _KEY_STEPS[0]) & 0xFFFFFFFF
        k1 = (k1 + _KEY_STEPS[1]) & 0xFFFFFFFF
    return np.stack((c0, c1, c2, c3), axis=-1)


def gumbel_noise(vocab_size: int, seed: int, choice: int, position: int) -> Tensor:
    """Standard Gumbel noise, float64 ``[vocab_size]``, for the token at an absolute position."""
    groups = np.arange(-(-vocab_size // 4), dtype=np.uint64)
    fixed = [np.full_like(groups, value) for value in (position, choice, 0)]
    words = philox((groups, *fixed), (seed & 0xFFFFFFFF, seed >> 32)).reshape(-1)[:vocab_size]
    uniform = (words.astype(np.float64) + 0.5) * 2.0**-32  # never 0 or 1
    return torch.from_numpy(-np.log(-np.log(uniform)))


def scores(logits: Tensor, row: Row) -> Tensor:
    """What the winner of one row is the maximum of: float64 ``[vocab_size]`` from its logits."""
    params = row.params
    values = logits.double().cpu()
    if row.end - row.num_prompt < params.min_tokens and params.stop_ids:
        values[torch.tensor(params.stop_ids)] = _NEGATIVE
    if params.temperature == 0:
        return values
    values = (values - values.max()) / params.temperature  # a tiny temperature overflows otherwise
    values = _truncate(values, params.top_k, params.top_p, params.min_p)
    return values + gumbel_noise(values.numel(), params.seed, params.choice, row.end)


def _truncate(values: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """-inf for tokens outside top-k, then the nucleus of top-p, then below min-p of the best."""
    if 0 < top_k < values.numel():
        values[values < torch.topk(values, top_k).values[-1]] = _NEGATIVE
    if top_p < 1:
        ordered, order = values.sort(descending=True)
        probabilities = ordered.softmax(-1)
        # A token stays while the mass before it is below top_p; so the best one always stays.
        outside = probabilities.cumsum(-1) - probabilities >= top_p
        values[order[outside]] = _NEGATIVE
    if min_p > 0:
        values[values < values.max() + np.log(min_p)] = _NEGATIVE
    return values


def sample(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    """One token per row; ``logits`` is ``[num_rows, vocab_size]``.

    NO_TOKEN where they are not finite: an argmax would take the first NaN for the best.
    """
    tokens: list[int] = logits.argmax(-1).tolist()
    finite = logits.amax(-1).isfinite().tolist()
    for index, row in enumerate(rows):
        if not finite[index]:
            tokens[index] = NO_TOKEN
        elif row.params.temperature > 0 or row.end - row.num_prompt < row.params.min_tokens:
            tokens[index] = int(scores(logits[index], row).argmax())
    return tokens
