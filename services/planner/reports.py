"""What a worker reports to who scales the pools: plain numbers by name (pure)."""

from collections.abc import Mapping

from router import wire


def worker_stats(
    card: wire.WorkerCard, load: wire.Load, profile: Mapping[str, float]
) -> dict[str, float]:
    """Of one worker. ``profile``: its half of the time model, as ``profile_<field>``; it is passed
    on as it is. Tokens of prompts only grow.
    """
    usable = max(1, card.kv_blocks - 1)  # block 0 is reserved
    free = load.blocks.get("free", 0) + load.blocks.get("cached", 0) - load.owed_blocks
    held = load.blocks.get("active", 0) * card.block_size
    running = load.running + load.waiting
    return {
        "running": running,
        "waiting_tokens": load.waiting_tokens,
        "computed_prompt_tokens": load.computed_prompt_tokens,
        "cached_prompt_tokens": load.cached_prompt_tokens,
        "kv_use": min(1.0, max(0.0, 1 - free / usable)),
        "seqs": card.max_num_seqs,
        "kv_tokens": usable * card.block_size,
        "context": held / load.running if load.running else 0.0,
        **profile,
    }
