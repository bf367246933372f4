"""The board to open first: are the objectives met, for how many, and by how much not (pure)."""

from router.observation import WRONG_REQUESTS
from services.dashboards.board import Board, Kind, Panel, Query, Row
from services.dashboards.promql import (
    ENDS,
    QUANTILES,
    cells,
    highest,
    increase,
    quantile,
    rate,
    series,
    share,
    total,
)

JUDGED = "baton_slo_requests_total"
ASKED = "baton_requests_total"
TTFT = "baton_time_to_first_token_seconds"
TPOT = "baton_time_per_output_token_seconds"
ITL = "baton_inter_token_latency_seconds"
OBJECTIVE = "baton_slo_objective_seconds"
BUDGET = "baton:slo_budget:ratio"  # of deploy/observability/rules.yaml, like the burn rates
ERRORS = 'slo="errors"'

GOOD = 'verdict="good"'
NOT_OURS = 'error_type!~"overload|unavailable|deadline|internal"'  # always has series: ok
WRONG = "|".join(WRONG_REQUESTS)
FAIR = f'error_type!~"{WRONG}"'  # what we could have served
WANTED = f'error_type!~"{WRONG}|cancelled"'  # ... and somebody wanted to the end


def board() -> Board:
    """SLO overview."""
    return Board(
        uid="baton-slo",
        title="Baton: SLO overview",
        says="Whether TTFT and TPOT objectives are met, as the routers measured each request.",
        rows=(
            Row("Over the time shown", _summary()),
            Row("Goodput", _goodput()),
            Row("Latency, and the objective as a dashed line", _latency()),
            Row("What was asked", _demand()),
        ),
    )


def _summary() -> tuple[Panel, ...]:
    return (
        _met("ttft", "First token in time", "the first token came within the objective"),
        _met("tpot", "Tokens in time", "the mean gap between tokens was within the objective"),
        _met("both", "Both in time", "both objectives were met: the share that is goodput"),
        Panel(
            "Failed by us",
            "Share of the requests that ended with an error which is not the client's: overload, "
            "no worker, deadline, internal. These count as bad above as well.",
            (Query(f"1 - {share(total(increase(ASKED, NOT_OURS)), total(increase(ASKED)))}"),),
            Kind.STAT, unit="percentunit", width=3, height=4,
        ),
        Panel(
            "Goodput now",
            "Requests per second that meet both objectives.",
            (Query(total(rate(JUDGED, 'slo="both"', GOOD))),),
            Kind.STAT, unit="reqps", width=3, height=4,
        ),
        Panel(
            "Objectives",
            "What the routers judge by: router.slo_ttft_s and router.slo_tpot_s.",
            (Query(highest(series(OBJECTIVE), "slo"), "{{slo}}"),),
            Kind.STAT, unit="s", width=3, height=4,
        ),
        Panel(
            "Error budget left",
            "If the time shown were the whole period: 1 is untouched, 0 is spent, below is missed. "
            "How much may be bad is said by baton:slo_budget:ratio in rules.yaml. Errors: requests "
            "that ended with an error of ours.",
            (
                Query(f"1 - {_bad_share()} / on (slo) {BUDGET}", "{{slo}}"),
                Query(f"1 - {_failed_share()} / on () {series(BUDGET, ERRORS, of='')}", "errors"),
            ),
            Kind.STAT, unit="percentunit", width=6, height=4,
        ),
    )  # fmt: skip


def _bad_share() -> str:
    judged = 'slo=~"ttft|tpot"'
    return share(
        total(increase(JUDGED, judged, 'verdict="bad"'), "slo"),
        total(increase(JUDGED, judged), "slo"),
    )


def _failed_share() -> str:
    succeeded = total(increase(ASKED, 'error_type=""'))
    return f"(1 - {share(succeeded, total(increase(ASKED, WANTED)))})"


def _met(slo: str, title: str, what: str) -> Panel:
    of = f'slo="{slo}"'
    ratio = share(total(increase(JUDGED, of, GOOD)), total(increase(JUDGED, of)))
    return Panel(
        title,
        f"Share of the judged requests of which {what}. Requests that we failed are bad; those "
        "that a client gave up count for what it had seen by then.",
        (Query(ratio),),
        Kind.STAT, unit="percentunit", width=3, height=4, highest=1,
    )  # fmt: skip


def _goodput() -> tuple[Panel, ...]:
    return (
        Panel(
            "Asked and good",
            "All requests that could have been served, and those that met both objectives. The gap "
            "is what is lost: errors beside it, slowness below.",
            (
                Query(total(rate(ASKED, FAIR)), "asked"),
                Query(total(rate(JUDGED, 'slo="both"', GOOD)), "good"),
            ),
            unit="reqps", width=12,
        ),
        Panel(
            "Requests by outcome",
            "Each request once, by what became of it. Cancelled is the client's doing; overload "
            "means that queues are full; unavailable, that no pair of workers was left.",
            (
                Query(total(rate(ASKED, 'error_type=""')), "ok"),
                Query(total(rate(ASKED, 'error_type!=""'), "error_type"), "{{error_type}}"),
            ),
            Kind.STACKED, unit="reqps", width=12,
        ),
        Panel(
            "Share within the objectives",
            "Which of the two objectives is missed, and since when. When TTFT falls alone, look at "
            "queues and prefill; when TPOT falls alone, at decode.",
            (
                Query(
                    share(total(rate(JUDGED, GOOD), "slo"), total(rate(JUDGED), "slo")), "{{slo}}"
                ),
            ),
            unit="percentunit", width=12, highest=1,
        ),
        Panel(
            "How fast the error budget is spent",
            "1 spends exactly what is allowed. Above 14.4 over an hour or 6 over six hours, "
            "somebody is woken; above 1 over three days the objective will be missed.",
            tuple(
                Query(highest(series(f"baton:slo_burn:rate{over}"), "slo"), f"{{{{slo}}}} {over}")
                for over in ("5m", "1h", "6h", "3d")
            ),
            width=12,
        ),
    )  # fmt: skip


def _latency() -> tuple[Panel, ...]:
    return (
        Panel(
            "Time to first token",
            "From the request fully read to its first content written, queueing included. The "
            "objective is a border of the histogram, so no quantile is wrong about its side of it.",
            _quantiles(TTFT, "ttft"),
            unit="s", width=12,
        ),
        Panel(
            "Time per output token",
            "Mean gap of each request with two tokens or more.",
            _quantiles(TPOT, "tpot"),
            unit="s", width=12,
        ),
        Panel(
            "First tokens",
            "How first tokens are spread: two bands are two kinds of prompt, or a cold and a warm "
            "prefix cache; one that rises is a queue.",
            (Query(cells(TTFT), "{{le}}"),),
            Kind.HEATMAP, unit="s", width=12,
        ),
        Panel(
            "Output tokens",
            "How the mean gaps of requests are spread.",
            (Query(cells(TPOT), "{{le}}"),),
            Kind.HEATMAP, unit="s", width=12,
        ),
        Panel(
            "Gaps between tokens",
            "Every single gap. A p99 far above the TPOT is a stream that stutters: a preemption, "
            "a failover, a step with a long prompt in it.",
            tuple(Query(quantile(q, ITL), name) for q, name in QUANTILES),
            unit="s", width=12,
        ),
        Panel(
            "Whole requests that succeeded",
            "From a request's headers to its last byte. Long answers are long, not slow.",
            tuple(
                Query(quantile(q, "baton_request_duration_seconds", 'code="200"'), name)
                for q, name in QUANTILES
            ),
            unit="s", width=12,
        ),
    )  # fmt: skip


def _quantiles(histogram: str, slo: str) -> tuple[Query, ...]:
    lines = tuple(Query(quantile(q, histogram), name) for q, name in QUANTILES)
    return (
        *lines, Query(highest(series(OBJECTIVE, f'slo="{slo}"')), "objective", dashed=True)
    )  # fmt: skip


def _demand() -> tuple[Panel, ...]:
    return (
        Panel(
            "Tokens",
            "Of prompts, of these the ones whose KV was in a prefix cache, and of answers.",
            (
                Query(total(rate("baton_prompt_tokens_total")), "prompt"),
                Query(total(rate("baton_cached_prompt_tokens_total")), "prompt, cached"),
                Query(total(rate("baton_generated_tokens_total")), "generated"),
            ),
            unit="short", width=8,
        ),
        Panel(
            "Lengths",
            "Tokens of prompts and of answers. Longer prompts cost TTFT, longer answers hold their "
            "place in decode for longer.",
            tuple(
                Query(quantile(q, f"baton_request_{what}_tokens"), f"{what} {name}")
                for what in ("prompt", "generated")
                for q, name in ENDS
            ),
            unit="short", width=8,
        ),
        Panel(
            "In the routers",
            "Requests that are in flight, and of these the ones that wait for a pair of workers. "
            "Waiting is the first sign of too little capacity.",
            (
                Query(total(series("baton_requests_in_flight")), "in flight"),
                Query(total(series("baton_requests_queued")), "queued"),
            ),
            unit="short", width=8,
        ),
    )  # fmt: skip
