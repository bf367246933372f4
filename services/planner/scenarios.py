"""The worlds and loads on which the planner is tried in virtual time, and what it is told there."""

from __future__ import annotations

from router.config import RouterConfig
from services.engine.config import EngineConfig
from services.planner.config import PoolScaling, ScalingConfig
from services.planner.profile import Profile
from services.planner.sim_control import Reports
from services.planner.sim_pool import World
from services.planner.workload import Trace, bursts, draw, ramp, sine, steps, turns

TTFT_S, TPOT_S = 30.0, 0.25

LAPTOP = Profile(
    prefill_step=0.05,
    prefill_token=10e-3,
    prefill_pair=1.3e-6,
    decode_step=0.08,
    decode_seq=0.022,
    decode_pair=7e-6,
)
"""About a model of some hundred million parameters on a core or two."""

WORLD = World(
    profile=LAPTOP,
    prefill=EngineConfig(
        kv_blocks=257, block_size=128, max_model_len=16384, max_num_seqs=32, token_budget=512,
        prefix_cache=False,
    ),
    decode=EngineConfig(
        kv_blocks=513, block_size=64, max_model_len=16384, max_num_seqs=32, token_budget=512,
        prefix_cache=False,
    ),
    router=RouterConfig(slo_ttft_s=TTFT_S, slo_tpot_s=TPOT_S),
)  # fmt: skip

SCALING = ScalingConfig(
    interval_s=5.0,
    prefill=PoolScaling(min=1, max=24, objective_s=TTFT_S, down_after_s=60.0),
    decode=PoolScaling(min=1, max=24, objective_s=TPOT_S, down_after_s=60.0),
)

REPORTS = {"clean": Reports(), "late": Reports(late_s=10.0), "lost": Reports(lost=0.2)}
"""How reports get to the planner: at once, 10 s late, or four of five."""

HOUR_S = 3600.0
HOURS = 1.0  # of each load
NAMES = ("steps", "ramp", "sine", "bursts", "shift")


def trace(name: str, hours: float = HOURS, seed: int = 1) -> Trace:
    """One of the loads. ``shift`` keeps its rate and turns from long prompts to long answers."""
    span_s = hours * HOUR_S
    if name == "shift":
        return draw(name, span_s, lambda _: 0.8, turns(0.1, 0.9, HOUR_S), seed=seed)
    rates = {
        "steps": steps(0.5, 1.0, HOUR_S / 4),
        "ramp": ramp(0.3, 1.3, span_s),
        "sine": sine(0.3, 1.3, HOUR_S),
        "bursts": bursts(0.5, 0.5, every_s=1800.0, lasts_s=900.0, rise_s=150.0),
    }
    return draw(name, span_s, rates[name], seed=seed)
