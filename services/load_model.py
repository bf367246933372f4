"""A model as workers have it: read from its folder, once per process."""

import functools
from pathlib import Path

import torch

from services.engine.model import Model
from services.engine.model_config import read_config
from services.engine.weights import read_weights


@functools.lru_cache(maxsize=1)
def load_model(folder: str, dtype: str, device: str, int8: bool) -> Model:
    """The model of a folder; workers of one process share it. Raises ModelError."""
    path = Path(folder)
    kind = getattr(torch, dtype)
    return Model(read_config(path), read_weights(path), kind, torch.device(device), int8)
