"""Small random checkpoints of every family that is served, made and judged by ``transformers``.

All parameters are drawn anew, norms and biases too: as they are initialised, ones and zeros,
leaving them out would change nothing. Numbers are small so that prompts of a hundred tokens are
longer than every window, and longer than the length that Llama 3's rope scaling starts from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

VOCAB_SIZE, MAX_LEN, WINDOW, ORIGINAL_LENGTH = 96, 256, 16, 64
STD = 0.2
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_LEN,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL_LENGTH,
}
HALF_WINDOWED = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}


@dataclass(frozen=True)
class Checkpoint:
    """How one is made and saved."""

    config: Any
    model: Any
    changes: dict[str, Any] = field(default_factory=dict)
    shard_size: str = "1GB"
    dtype: torch.dtype = torch.float32

    def save(self, folder: Path, seed: int = 0) -> PreTrainedModel:
        """Write the folder; returns the float32 model that ``transformers`` makes of it."""
        torch.manual_seed(seed)
        model = self.model(self.config(**{**SIZES, **self.changes})).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, STD)
        model.to(self.dtype).save_pretrained(folder, max_shard_size=self.shard_size)
        return self.model.from_pretrained(folder, dtype=torch.float32).eval()


llama = partial(Checkpoint, LlamaConfig, LlamaForCausalLM)
qwen2 = partial(Checkpoint, Qwen2Config, Qwen2ForCausalLM)
qwen3 = partial(Checkpoint, Qwen3Config, Qwen3ForCausalLM)
smollm3 = partial(Checkpoint, SmolLM3Config, SmolLM3ForCausalLM)

FAMILIES = {
    "llama2": llama({"num_key_value_heads": 4, "hidden_size": 48}),  # too narrow for CpuLayers
    "llama3": llama({"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama-linear-biases": llama(
        {
            "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
            "attention_bias": True,
            "mlp_bias": True,
        }
    ),
    "mistral": Checkpoint(
        MistralConfig, MistralForCausalLM, {"sliding_window": WINDOW, "head_dim": 24}
    ),
    "qwen2": qwen2(dtype=torch.bfloat16),
    "qwen2-windows": qwen2({**HALF_WINDOWED, "tie_word_embeddings": True}),
    "qwen3": qwen3({"head_dim": 24}, shard_size="50KB"),
    "smollm3": smollm3({"tie_word_embeddings": True}),
    "smollm3-windows": smollm3(
        {"no_rope_layers": [1, 0, 0, 1], "use_sliding_window": True, "sliding_window": WINDOW}
    ),
}
ONE_OF_EACH = ("llama3", "mistral", "qwen2", "qwen3", "smollm3")
