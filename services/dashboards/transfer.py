"""The board of the hand-off: how much KV moves, how long it takes, what is held for it (pure)."""

from services.dashboards.board import Board, Kind, Panel, Query, Row
from services.dashboards.promql import (
    ENDS,
    WORKERS,
    highest,
    mean,
    quantile,
    rate,
    series,
    share,
    total,
)

PULLS = "baton_kv_transfers_total"
SECONDS = "baton_kv_transfer_seconds"
BYTES = "baton_kv_transfer_bytes"
STAGES = "baton_stage_duration_seconds"
HAND_OFF = "kv_transfer|decode_admit|first_decode"


def board() -> Board:
    """KV transfer."""
    return Board(
        uid="baton-kv-transfer",
        title="Baton: KV transfer",
        says="Decode workers pull the KV of each prompt from prefill workers. The first token does "
        "not wait for it, the second one does.",
        by_replica=True,
        rows=(
            Row("How much", _amounts()),
            Row("How long", _times()),
            Row("What is held", _held()),
        ),
    )


def _amounts() -> tuple[Panel, ...]:
    return (
        Panel(
            "Transfers by result",
            "Each request whose KV was to be pulled, once. Failed: the read ended with an error or "
            "brought what the ticket does not name. Stalled: nothing came for pull_stall_s. "
            "Expired: the lease ended first. Cancelled: the request did. All but ok and cancelled "
            "cost another prefill.",
            (
                Query(
                    total(rate(PULLS, of=WORKERS), "transport", "result"),
                    "{{transport}} {{result}}",
                ),
            ),
            Kind.STACKED, unit="ops",
        ),
        Panel(
            "Share that fails",
            "Of all transfers but the cancelled ones. Anything above zero for long is a network "
            "or a prefill worker that is going.",
            (
                Query(
                    share(
                        total(rate(PULLS, 'result=~"failed|stalled|expired"', of=WORKERS)),
                        total(rate(PULLS, 'result!="cancelled"', of=WORKERS)),
                    ),
                    "failed",
                ),
            ),
            unit="percentunit", highest=1,
        ),
        Panel(
            "Parts pulled early",
            "Runs of blocks that were pulled while the rest of the prompt was still being "
            "computed. Long prompts only; what fails here is pulled again with the ticket.",
            (Query(total(rate("baton_kv_transfer_parts_total", of=WORKERS), "result"),
                   "{{result}}"),),
            unit="ops",
        ),
        Panel(
            "Bytes per second",
            "What all decode workers pull, by transport.",
            (Query(total(rate(f"{BYTES}_sum", of=WORKERS), "transport"), "{{transport}}"),),
            unit="Bps",
        ),
        Panel(
            "Size of a pull",
            "Of every pull that arrived, early ones as well. Grows with prompt lengths; blocks "
            "that decode has cached are not pulled.",
            (
                *(Query(quantile(q, BYTES, of=WORKERS), name) for q, name in ENDS),
                Query(mean(BYTES, of=WORKERS), "mean"),
            ),
            unit="bytes",
        ),
        Panel(
            "Blocks of a pull",
            "A block is one descriptor, whatever the number of layers.",
            tuple(
                Query(quantile(q, "baton_kv_transfer_blocks", of=WORKERS), name) for q, name in ENDS
            ),
        ),
    )  # fmt: skip


def _times() -> tuple[Panel, ...]:
    return (
        Panel(
            "Where a pull's time goes",
            "Mean of each phase. Queue: until the read is posted. Wire: the read. Seals: reading "
            "the seals after it, which shows that no block was reused meanwhile.",
            (
                Query(
                    mean(SECONDS, 'phase!="total"', by=("phase",), of=WORKERS), "{{phase}}"
                ),
            ),
            Kind.STACKED, unit="s",
        ),
        Panel(
            "Whole pulls",
            "From the wish to pull to verified blocks. Compare with the gap to the second token.",
            tuple(
                Query(quantile(q, SECONDS, 'phase="total"', of=WORKERS), name) for q, name in ENDS
            ),
            unit="s",
        ),
        Panel(
            "99 of 100 pulls are faster, by phase",
            "A long queue: the thread that pulls has too much to do, or its transport is being "
            "rebuilt. A long wire: the network, or a producer without time.",
            (
                Query(
                    quantile(0.99, SECONDS, 'phase!="total"', by=("phase",), of=WORKERS),
                    "{{phase}}",
                ),
            ),
            unit="s",
        ),
        Panel(
            "Speed of a read",
            "Bytes by seconds on the wire: what the transport reaches for one pull.",
            (
                Query(
                    share(
                        total(rate(f"{BYTES}_sum", of=WORKERS), "transport"),
                        total(rate(f"{SECONDS}_sum", 'phase="wire"', of=WORKERS), "transport"),
                    ),
                    "{{transport}}",
                ),
            ),
            unit="Bps",
        ),
        Panel(
            "The gap to the second token",
            "Mean of each part, as the router sees it: the transfer, the wait for a place in the "
            "decode batch, and the first decode step. This is what disaggregation costs a stream.",
            (
                Query(mean(STAGES, f'stage=~"{HAND_OFF}"', by=("stage",)), "{{stage}}"),
            ),
            Kind.STACKED, unit="s",
        ),
        Panel(
            "99 of 100 are faster, by part of the gap",
            "Which part makes second tokens late.",
            (
                Query(
                    quantile(0.99, STAGES, f'stage=~"{HAND_OFF}"', by=("stage",)), "{{stage}}"
                ),
            ),
            unit="s",
        ),
    )  # fmt: skip


def _held() -> tuple[Panel, ...]:
    return (
        Panel(
            "In flight",
            "Send: tickets that prefill workers keep blocks for. Recv: pulls under way. Send "
            "without recv means that tickets wait: decode is full, or releases are lost.",
            (
                Query(
                    total(series("baton_kv_transfer_in_flight", of=WORKERS), "side"), "{{side}}"
                ),
            ),
        ),
        Panel(
            "Leases",
            "Tickets that hold blocks, by prefill worker.",
            (Query(total(series("baton_kv_leases", of=WORKERS), "replica"), "{{replica}}"),),
        ),
        Panel(
            "Age of the oldest lease",
            "By prefill worker. Seconds; what stays for minutes is a ticket that is renewed and "
            "never pulled.",
            (Query(highest(series("baton_kv_lease_age_seconds", of=WORKERS), "replica"),
                   "{{replica}}"),),
            unit="s",
        ),
        Panel(
            "Blocks leased and quarantined",
            "Leased at prefill, quarantined at decode: pulls that were given up and may still "
            "write. Neither may grow while nothing is in flight.",
            (
                Query(
                    total(
                        series("baton_kv_blocks", 'state=~"leased|quarantined"', of=WORKERS),
                        "role", "state",
                    ),
                    "{{role}} {{state}}",
                ),
            ),
        ),
        Panel(
            "Leases that expired",
            "Nobody released or renewed them: a router or a decode worker died, or its messages "
            "were lost.",
            (Query(total(rate("baton_kv_leases_expired_total", of=WORKERS), "replica"),
                   "{{replica}}"),),
            unit="ops",
        ),
        Panel(
            "Agents rebuilt",
            "A decode worker tore its transport down, as reads that it had given up did not end.",
            (Query(total(rate("baton_kv_agent_rebuilds_total", of=WORKERS), "replica"),
                   "{{replica}}"),),
            unit="ops",
        ),
    )  # fmt: skip
