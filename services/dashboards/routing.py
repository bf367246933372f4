"""The board of the routers: where the first token's time goes, choices, failures, loops (pure)."""

from services.dashboards.board import Board, Kind, Panel, Query, Row
from services.dashboards.promql import (
    ENDS,
    highest,
    mean,
    once,
    quantile,
    rate,
    series,
    share,
    total,
)

STAGES = "baton_stage_duration_seconds"
TO_FIRST = "tokenize|route|queue|prefill|write"
LAG = "baton_event_loop_lag_seconds"
STARTED = "baton_process_start_time_seconds"


def board() -> Board:
    """Router."""
    return Board(
        uid="baton-router",
        title="Baton: Router",
        says="What the routers do with requests: where time goes, what is chosen, what fails.",
        rows=(
            Row("Where the time to the first token goes", _stages()),
            Row("Choices", _choices()),
            Row("What went wrong", _trouble()),
            Row("The routers themselves", _processes()),
        ),
    )


def _stages() -> tuple[Panel, ...]:
    first = f'stage=~"{TO_FIRST}"'
    return (
        Panel(
            "Parts of the time to the first token",
            "Mean of each part; together they are the TTFT. Tokenize: text to ids. Route: choosing "
            "a pair and reserving room at its decode worker. Queue: waiting, in the router and at "
            "the prefill worker. Prefill: the computation. Write: the first token to the client.",
            (Query(mean(STAGES, first, by=("stage",)), "{{stage}}"),),
            Kind.STACKED, unit="s", width=12,
        ),
        Panel(
            "99 of 100 are faster, by part",
            "The part that makes the slowest first tokens slow; it need not be the largest mean.",
            (Query(quantile(0.99, STAGES, first, by=("stage",)), "{{stage}}"),),
            unit="s", width=12,
        ),
    )  # fmt: skip


def _choices() -> tuple[Panel, ...]:
    return (
        Panel(
            "Decisions",
            "Disagg: a prefill and a decode worker. Decode_only: a decode worker computes the "
            "prompt itself. Mixed: one ordinary engine. Retry: another attempt of a request.",
            (
                Query(
                    total(rate("baton_route_decisions_total"), "policy", "decision"),
                    "{{decision}} ({{policy}})",
                ),
            ),
            Kind.STACKED, unit="ops",
        ),
        Panel(
            "Time to choose",
            "The choice itself, without waiting. Grows with the number of workers and of waiting "
            "requests.",
            tuple(Query(quantile(q, "baton_route_overhead_seconds"), name) for q, name in ENDS),
            unit="s",
        ),
        Panel(
            "Prompt tokens from a prefix cache",
            "Share of all prompt tokens that needed no prefill, as reported in usage.",
            (
                Query(
                    share(
                        total(rate("baton_cached_prompt_tokens_total")),
                        total(rate("baton_prompt_tokens_total")),
                    ),
                    "cached",
                ),
            ),
            unit="percentunit", highest=1,
        ),
    )  # fmt: skip


def _trouble() -> tuple[Panel, ...]:
    return (
        _count(
            "Retries",
            "Attempts that failed and were made again elsewhere, by the side that failed and why. "
            "The client sees a longer gap, never a wrong token.",
            "baton_retries_total", "stage", "reason",
        ),
        _count(
            "How requests went on",
            "After a lost worker: the ticket reused by another decode worker, the prompt computed "
            "again, or computed by the decode worker itself.",
            "baton_failovers_total", "kind",
        ),
        _count(
            "Refused",
            "Queue_full and queue_timeout: too much is asked for the workers there are. Too_long: "
            "no worker has room for such a prompt. No_workers: no pair is left.",
            "baton_admission_rejections_total", "reason",
        ),
        _count(
            "Clients that left",
            "By what their request was at. Many in queue or prefill are clients whose patience is "
            "shorter than the TTFT.",
            "baton_client_disconnects_total", "stage",
        ),
        Panel(
            "Workers lost",
            "By role and reason. Closed: its connection ended. Silent, unread, stalled: it hangs. "
            "Each router counts each loss; the one that saw most of them is shown. Serve starts "
            "another worker in the place of each.",
            (Query(once(rate("baton_worker_losses_total"), "role", "reason"),
                   "{{role}} {{reason}}"),),
            unit="ops",
        ),
        Panel(
            "Workers by state",
            "What the routers know of. Starting ones are not proven yet.",
            (Query(once(series("baton_workers"), "role", "state"), "{{role}} {{state}}"),),
            Kind.STACKED,
        ),
    )  # fmt: skip


def _count(title: str, says: str, counter: str, *by: str) -> Panel:
    legend = " ".join(f"{{{{{label}}}}}" for label in by)
    return Panel(title, says, (Query(total(rate(counter), *by), legend),), unit="ops")


def _processes() -> tuple[Panel, ...]:
    return (
        Panel(
            "Requests by router",
            "Each router has its own queue; requests should be spread evenly.",
            (Query(total(rate("baton_requests_total"), "instance"), "{{instance}}"),),
            unit="reqps",
        ),
        Panel(
            "In flight and queued, by router",
            "A router whose queue is full refuses while another one may have room.",
            (
                Query(total(series("baton_requests_in_flight"), "instance"),
                      "{{instance}} in flight"),
                Query(total(series("baton_requests_queued"), "instance"), "{{instance}} queued"),
            ),
        ),
        Panel(
            "Lag of the event loops",
            "How late a process's loop is, routers and workers: 99 of 100 times less than this. "
            "Everything that passes through that process waits as long.",
            (
                Query(quantile(0.99, LAG, by=("role", "instance"), of=""), "{{role}} {{instance}}"),
            ),
            unit="s",
        ),
        Panel(
            "Routers",
            "How many answer Prometheus, and how many there should be.",
            (
                Query(total(series("up", 'job="baton"', 'role="router"')), "there"),
                Query(
                    once(series("baton_autoscale_replicas", 'role="router"', 'kind="target"')),
                    "asked for",
                    dashed=True,
                ),
            ),
            width=12,
        ),
        Panel(
            "Age of the processes",
            "Since it started, by process. One that starts again begins at zero, under a new name "
            "or under its pod's.",
            (
                Query(
                    f"time() - {highest(series(STARTED), 'role', 'instance')}",
                    "{{role}} {{instance}}",
                ),
            ),
            unit="s", width=12,
        ),
    )  # fmt: skip
