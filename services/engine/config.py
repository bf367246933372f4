"""Limits of one engine."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineConfig:
    """What one engine may use; ``0`` and ``auto`` are filled in by ``services.resolve``."""

    kv_blocks: int = 0  # in the pool, one for padding; 0: four longest requests, if memory allows
    block_size: int = 16  # token slots per block
    max_model_len: int = 0  # longest prompt + answer in tokens; 0: what the model was trained for
    max_num_seqs: int = 32  # sequences in one step
    token_budget: int = (
        0  # tokens computed in one step; 0: what 250 ms are enough for, measured at start
    )
    chunk_budget: int = 0  # prompt tokens in one step; 0: all of token_budget, in decode a quarter
    threads: int = 0  # torch threads; 0: the cores shared by the workers of this host
    dtype: str = "auto"  # float32, bfloat16, float16; auto: float32 on CPU, bfloat16 on CUDA
    weights_dtype: str = "auto"  # float32, or int8 on CPU: rounded at start; auto: dtype
    device: str = "auto"  # cpu or cuda
    prefix_cache: bool = True  # keep KV for later requests that begin alike
