"""What the console shows of a router and its workers, and the feed that tells it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from router.config import RouterSettings
from router.console.feed import Feed
from router.observe import Requests

OF_A_WORKER = (
    "id", "epoch", "role", "state", "stalled", "pid", "host", "port", "transport",
    "running", "waiting", "waiting_tokens", "blocks", "kv_blocks", "block_size", "tickets",
    "steps", "generated_tokens", "computed_prompt_tokens", "cached_prompt_tokens", "pulled_bytes",
    "flops", "bytes", "busy_s", "peak_flops", "peak_bytes",
)  # fmt: skip
"""Of an entry of ``GET /internal/state``."""
LONGEST_MESSAGE = 200  # characters of why a worker did not start; the state has all of it

State = Callable[[], dict[str, Any]]


def open_feed(settings: RouterSettings, state: State, requests: Requests) -> Feed:
    """A feed that hears of every request; ``state`` is what ``GET /internal/state`` answers."""
    feed = Feed(lambda: picture(settings, state(), len(requests)), requests.seen)
    requests.on_finished.append(feed.ended)
    return feed


def picture(settings: RouterSettings, state: dict[str, Any], in_flight: int) -> dict[str, Any]:
    """The part of each event that is about the router and its workers."""
    config = settings.config
    return {
        "id": settings.router_id,
        "model": settings.served_model,
        "slo": {"ttft": config.slo_ttft_s, "tpot": config.slo_tpot_s},
        "requests": {"in_flight": in_flight, "queued": state["requests"]["queued"]},
        "workers": [{name: entry[name] for name in OF_A_WORKER} for entry in state["workers"]],
        "pools": state["pools"],
        "start_failures": [
            {**one, "message": one["message"][:LONGEST_MESSAGE]} for one in state["start_failures"]
        ],
    }
