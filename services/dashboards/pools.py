"""The two pools side by side: prefill on the left, decode on the right (pure).

Mixed workers, which do both, are on the right.
"""

from collections.abc import Callable

from services.dashboards.board import Board, Kind, Panel, Query, Row
from services.dashboards.promql import (
    ENDS,
    RATE,
    WORKERS,
    highest,
    increase,
    mean,
    once,
    quantile,
    rate,
    series,
    share,
    total,
)

SIDES = {"Prefill": 'role="prefill"', "Decode": 'role=~"decode|mixed"'}

RUNNING = "baton_engine_requests"
REPLICAS = "baton_autoscale_replicas"


def board() -> Board:
    """Pools."""
    return Board(
        uid="baton-pools",
        title="Baton: Pools",
        says="Prefill workers on the left, decode and mixed workers on the right.",
        by_replica=True,
        rows=(
            Row("Workers", (*_workers(), *_targets(), *_changes(), *_replicas())),
            Row("Work", (*_requests(), *_busy(), *_tokens())),
            Row("Steps", (*_steps(), *_batches(), *_first_wait())),
            Row("Memory", (*_blocks(), *_usage(), *_prefix(), *_preemptions())),
            Row("Each worker", (_table(),)),
        ),
    )


def _sides(
    title: str, prefill: str, decode: str, queries: Callable[[str], tuple[Query, ...]],
    *, kind: Kind = Kind.LINES, unit: str = "short", highest: float | None = None,
) -> tuple[Panel, ...]:  # fmt: skip
    """The same queries for both pools; ``prefill`` and ``decode`` say what they mean there."""
    return tuple(
        Panel(
            f"{side}: {title}", says, queries(role),
            kind=kind, unit=unit, width=12, height=7, highest=highest,
        )
        for (side, role), says in zip(SIDES.items(), (prefill, decode), strict=True)
    )  # fmt: skip


def _workers() -> tuple[Panel, ...]:
    return _sides(
        "workers",
        "By state, as the routers see them. Only ready ones get requests.",
        "By state. Stalled: its engine has work and makes no step.",
        lambda role: (
            Query(total(once(series("baton_workers", role), "role", "state"), "state"),
                  "{{state}}"),
        ),
        kind=Kind.STACKED,
    )  # fmt: skip


def _targets() -> tuple[Panel, ...]:
    return _sides(
        "actual and target",
        "How many workers are registered, and how many there should be: what the configuration "
        "says, or who scales the pool. Above what is there for long: no place is found for "
        "workers, or they do not start.",
        "The same. Where it moves against the prefill pool's, the load has moved from prompts to "
        "answers, or back.",
        lambda role: (
            Query(once(series(REPLICAS, role, 'kind="actual"'), "role"), "{{role}}"),
            Query(
                once(series(REPLICAS, role, 'kind="target"'), "role"), "{{role}} target",
                dashed=True,
            ),
        ),
    )  # fmt: skip


def _changes() -> tuple[Panel, ...]:
    return _sides(
        "changes of the target",
        "Of a pool that scales, by why; /internal/state has the latest reason in words. Limits and "
        "budget: it could not have what it needs.",
        "The same. Many changes in a short time: raise down_after_s or cooldown_s.",
        lambda role: (
            Query(
                total(
                    once(
                        increase("baton_autoscale_decisions_total", role, over=RATE),
                        "role", "direction", "reason",
                    ),
                    "reason",
                ),
                "{{reason}}",
            ),
        ),
        kind=Kind.STACKED,
    )  # fmt: skip


def _replicas() -> tuple[Panel, ...]:
    return (
        Panel(
            "Starts that failed",
            "Workers that did not start: exception, which /internal/state tells; or died, which is "
            "when nothing more was heard of one that was starting, as of one that was killed for "
            "its memory.",
            (
                Query(
                    once(
                        increase("baton_worker_start_failures_total", over=RATE), "role", "reason"
                    ),
                    "{{role}} {{reason}}",
                ),
            ),
            Kind.STACKED, height=7,
        ),
        Panel(
            "Ready prefill workers per decode worker",
            "The ratio that traffic needs follows from its prompts and answers; which pool waits "
            "says which one is too small.",
            (
                Query(
                    share(
                        once(series("baton_workers", 'role="prefill"', 'state="ready"')),
                        once(series("baton_workers", 'role="decode"', 'state="ready"')),
                    ),
                    "P : D",
                ),
            ),
            height=7,
        ),
        Panel(
            "How full the pools are",
            "Prefill by the share of time its engines work. Decode and mixed by what there is less "
            "of: the share of KV blocks in use, or of seats (max_num_seqs) taken. Of several "
            "models, the fullest. One full and one empty: move a worker to the other role.",
            (Query(highest(series("baton:pool_load:ratio"), "role"), "{{role}}"),),
            unit="percentunit", height=7, highest=1,
        ),
    )  # fmt: skip


def _requests() -> tuple[Panel, ...]:
    return _sides(
        "requests in the engines",
        "Prompts being computed and prompts that wait for the engine. Waiting prompts are TTFT.",
        "Streams being decoded and those that wait for a place in the batch or for blocks. Waiting "
        "ones have their first token and make the second late. When all seats (max_num_seqs, "
        "dashed) are taken, requests wait in the routers.",
        lambda role: (
            Query(total(series(RUNNING, role, of=WORKERS), "state"), "{{state}}"),
            Query(total(series("baton_engine_seats", role, of=WORKERS)), "seats", dashed=True),
            Query(
                total(series("baton_engine_waiting_tokens", role, of=WORKERS)), "waiting tokens"
            ),
        ),
    )  # fmt: skip


def _busy() -> tuple[Panel, ...]:
    return _sides(
        "share of the time within steps",
        "1 for a pool that never waits. Near 1 while prompts wait: more prefill workers.",
        "1 for a pool that never waits. Decode is busy with one stream as with many; the batch "
        "below says how full it is.",
        lambda role: (
            Query(busy_share("replica", role), "{{replica}}"),
        ),
        unit="percentunit", highest=1,
    )  # fmt: skip


def busy_share(by: str, *matchers: str) -> str:
    """The share of its time that an engine spends within steps."""
    busy, idle = (
        total(rate(f"baton_engine_{what}_seconds_total", *matchers, of=WORKERS), by)
        for what in ("busy", "idle")
    )
    return share(busy, f"({busy} + {idle})")


def _tokens() -> tuple[Panel, ...]:
    return _sides(
        "tokens per second",
        "Computed prompt tokens, and the first token of each answer.",
        "Generated tokens. Prompt tokens are computed here by mixed workers, and by decode workers "
        "that have no prefill worker left.",
        lambda role: (
            Query(
                total(rate("baton_engine_tokens_total", role, of=WORKERS), "kind"), "{{kind}}"
            ),
        ),
    )  # fmt: skip


def _steps() -> tuple[Panel, ...]:
    return _sides(
        "time of a step",
        "A prompt waits at least for the step that runs when it comes.",
        "One token for each stream of the batch: this is the TPOT, but for what the router adds.",
        lambda role: tuple(
            Query(quantile(q, "baton_engine_step_seconds", role, of=WORKERS), name)
            for q, name in ENDS
        ),
        unit="s",
    )  # fmt: skip


def _batches() -> tuple[Panel, ...]:
    return _sides(
        "batch: tokens and requests of a step",
        "Tokens near the token budget: the compute roof. Few tokens: there is room.",
        "Requests of a step. Large batches share one reading of the weights and cost TPOT.",
        lambda role: (
            Query(mean("baton_engine_batch_tokens", role, of=WORKERS), "tokens, mean"),
            Query(quantile(0.99, "baton_engine_batch_tokens", role, of=WORKERS), "tokens, p99"),
            Query(mean("baton_engine_batch_size", role, of=WORKERS), "requests, mean"),
            Query(quantile(0.99, "baton_engine_batch_size", role, of=WORKERS), "requests, p99"),
        ),
    )  # fmt: skip


def _first_wait() -> tuple[Panel, ...]:
    return (
        Panel(
            "Prefill: a prompt in the engine",
            "How long prompts wait for their first step, and how long they are computed. The wait "
            "grows with load, the computing with prompt lengths.",
            tuple(
                Query(
                    quantile(q, f"baton_engine_{what}_seconds", SIDES["Prefill"], of=WORKERS),
                    f"{title} {name}",
                )
                for what, title in (("queue", "wait"), ("prefill", "compute"))
                for q, name in ENDS
            ),
            unit="s", width=12, height=7,
        ),
        Panel(
            "Steps per second",
            "By worker. A worker that has requests and makes no steps hangs.",
            (
                Query(
                    total(rate("baton_engine_steps_total", of=WORKERS), "role", "replica"),
                    "{{role}} {{replica}}",
                ),
            ),
            width=12, height=7,
        ),
    )  # fmt: skip


def _blocks() -> tuple[Panel, ...]:
    return _sides(
        "KV blocks",
        "Leased: kept for a decode worker that has not pulled them yet. Leased blocks without "
        "transfers mean that decode is full, or that releases are lost.",
        "Active ones belong to streams; cached ones can be taken. Quarantined: a pull was given up "
        "that may still write.",
        lambda role: (
            Query(total(series("baton_kv_blocks", role, of=WORKERS), "state"), "{{state}}"),
        ),
        kind=Kind.STACKED,
    )  # fmt: skip


def _usage() -> tuple[Panel, ...]:
    return _sides(
        "KV use",
        "Share of each worker's blocks that cannot be taken.",
        "Near 1: streams wait for room or are preempted. More decode workers, more kv_blocks, or "
        "shorter answers.",
        lambda role: (
            Query(
                highest(series("baton_kv_cache_usage_ratio", role, of=WORKERS), "replica"),
                "{{replica}}",
            ),
        ),
        unit="percentunit", highest=1,
    )  # fmt: skip


def _prefix() -> tuple[Panel, ...]:
    return _sides(
        "prefix cache hits",
        "Share of prompt tokens whose KV was there. When it falls, prefill has more to compute for "
        "the same traffic.",
        "Share of prompt tokens that were not pulled, as a decode worker had them.",
        lambda role: (
            Query(
                share(
                    total(rate("baton_prefix_cache_hit_tokens_total", role, of=WORKERS)),
                    total(rate("baton_prefix_cache_queried_tokens_total", role, of=WORKERS)),
                ),
                "hits",
            ),
        ),
        unit="percentunit", highest=1,
    )  # fmt: skip


def _preemptions() -> tuple[Panel, ...]:
    return _sides(
        "preemptions",
        "Prompts that lost their blocks to others and are computed again.",
        "Streams that lost their blocks and are computed again: gaps in somebody's answer. Should "
        "be none.",
        lambda role: (
            Query(total(rate("baton_preemptions_total", role, of=WORKERS), "replica"),
                  "{{replica}}"),
        ),
        unit="ops",
    )  # fmt: skip


def _table() -> Panel:
    by = ("role", "replica")
    return Panel(
        "Workers now",
        "One line for each: its pool of KV blocks, and what it is doing.",
        (
            Query(
                highest(
                    series("baton_cache_config_info", of=WORKERS),
                    *by, "block_size", "num_blocks", "dtype",
                )
            ),
            Query(total(series(RUNNING, 'state="running"', of=WORKERS), *by), "running"),
            Query(total(series(RUNNING, 'state="waiting"', of=WORKERS), *by), "waiting"),
            Query(total(series("baton_engine_seats", of=WORKERS), *by), "seats"),
            Query(highest(series("baton_kv_cache_usage_ratio", of=WORKERS), *by), "KV use"),
            Query(total(series("baton_kv_leases", of=WORKERS), *by), "leases"),
        ),
        Kind.TABLE, width=24,
    )  # fmt: skip
