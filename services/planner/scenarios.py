"""The worlds and loads on which the planner is tried in virtual time, and what it is told there."""

from __future__ import annotations

from router.config import RouterConfig
from services.engine.config import EngineConfig
from services.planner.config import PoolScaling, ScalingConfig
from services.planner.profile import Profile
from services.planner.sim_pool import World

TTFT_S, TPOT_S = 15.0, 0.25

LAPTOP = Profile(
    prefill_step=0.05,
    prefill_token=4e-3,
    prefill_pair=5e-7,
    decode_step=0.08,
    decode_seq=0.012,
    decode_pair=4e-6,
)
"""About a model of a few hundred million parameters on two cores."""

WORLD = World(
    profile=LAPTOP,
    prefill=EngineConfig(
        kv_blocks=257, block_size=128, max_model_len=16384, max_num_seqs=32, token_budget=512,
        prefix_cache=False,
    ),
    decode=EngineConfig(
        kv_blocks=257, block_size=128, max_model_len=16384, max_num_seqs=32, token_budget=512,
        prefix_cache=False,
    ),
    router=RouterConfig(slo_ttft_s=TTFT_S, slo_tpot_s=TPOT_S),
)  # fmt: skip

SCALING = ScalingConfig(
    prefill=PoolScaling(min=1, max=16, objective_s=TTFT_S),
    decode=PoolScaling(min=1, max=16, objective_s=TPOT_S),
)
