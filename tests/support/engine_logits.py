"""Logits of our engine's model for one text, without an engine around it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from services.engine.attention import plan_attention
from services.engine.model import Model
from services.engine.model_config import read_config
from services.engine.scheduler import Row
from services.engine.sequence import SamplingParams
from services.engine.weights import read_weights

BLOCK = 16
CPU = torch.device("cpu")


def engine_logits(folder: Path, ids: list[int]) -> Tensor:
    """``[len(ids), vocab_size]`` of the model in a folder."""
    config = read_config(folder)
    model = Model(config, read_weights(folder), torch.float32, CPU)
    num_blocks = -(-len(ids) // BLOCK)
    shape = config.num_layers, 2, config.num_kv_heads, BLOCK, config.head_dim
    row = Row(
        key=(b"", 0),
        ids=tuple(ids),
        start=0,
        blocks=tuple(range(1, 1 + num_blocks)),
        sample=False,
        params=SamplingParams(max_tokens=1),
        num_prompt=len(ids),
    )
    plan = plan_attention([row], BLOCK, CPU)
    with torch.inference_mode():
        kv = torch.zeros(1 + num_blocks, *shape)
        hidden = model.forward(torch.tensor(ids), torch.arange(len(ids)), kv, plan)
        return model.logits(hidden)
