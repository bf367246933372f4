"""Requests as the router has seen them, for tests of who shows them."""

from __future__ import annotations

from router.observation import ChoiceSeen, Observation

NOON = 1_700_000_000.0  # a multiple of five


def seen(
    at: float,
    ttft: float | None = 0.1,
    end: float | None = 1.0,
    tpot: float | None = 0.02,
    good: bool | None = True,
    tokens: int = 10,
) -> Observation:
    """One that began at ``at``; ``end`` is None while it goes on."""
    return Observation(
        request_id="r",
        model="m",
        endpoint="chat",
        stream=True,
        at=at,
        origin=0.0,
        arrived_at=0.0,
        ended_at=end,
        code=0 if end is None else 200,
        choices=(ChoiceSeen(prompt_tokens=5, cached_tokens=0, tokens=tokens),),
        ttft_s=ttft,
        tpot_s=tpot,
        good=good,
    )
