"""Rotary position embedding (Su et al., RoFormer, arXiv:2104.09864) in the half-split form.

A head's dimensions ``i`` and ``i + head_dim / 2`` are one pair, turned by ``position *
frequencies[i]``. Angles, sines and cosines are float32 whatever the model's dtype: at thousands of
positions they need the bits.
"""

import math

import torch
from torch import Tensor

from services.engine.model_config import ModelConfig


def frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    """float32 ``[head_dim / 2]``: radians per position, after the model's scaling."""
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
    plain = 1.0 / config.rope_theta ** (steps / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    if scaling.factors:
        return plain / torch.tensor(scaling.factors, dtype=torch.float32, device=device)
    if not scaling.original_length:
        return plain / scaling.factor
    # How often a wave fits into the length of the first training decides how far it is stretched.
    fits = scaling.original_length * plain / (2 * math.pi)
    kept = ((fits - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return kept * plain + (1 - kept) * plain / scaling.factor


def half_rotation(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of all angles, ``[num_tokens, head_dim / 2]`` each."""
    angles = torch.outer(positions.float(), frequencies)
    return angles.cos(), angles.sin()


def rotation(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines for :func:`rotate`, ``[num_tokens, 1, head_dim]`` each; the sines carry the
    sign of the first half.
    """
    cos, sin = (half[:, None] for half in half_rotation(positions, frequencies))
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x``, ``[num_tokens, num_heads, head_dim]``, turned."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    return (x * cos + swapped * sin).to(x.dtype)
