"""The board of the roofline: what the engines reach of what their machines can do (pure).

The roofline model (Williams, Waterman, Patterson, 2009): at an intensity of I operations per byte,
a machine of P FLOP/s and B bytes/s can do at most min(P, I x B) FLOP/s.
"""

from services.dashboards.board import Board, Kind, Panel, Query, Row
from services.dashboards.pools import busy_share
from services.dashboards.promql import WORKERS, combine, highest, mean, rate, series, share, total

PEAK_FLOPS = "baton_roofline_peak_flops"
PEAK_BYTES = "baton_roofline_peak_bytes_per_second"
INTENSITY = "baton_arithmetic_intensity"
MFU = "baton_model_flops_utilization_ratio"
MBU = "baton_memory_bandwidth_utilization_ratio"
BUSY = "baton_engine_busy_seconds_total"
BY = ("role", "replica")
WORKER = "{{role}} {{replica}}"


def board() -> Board:
    """Roofline."""
    return Board(
        uid="baton-roofline",
        title="Baton: Roofline",
        says="Prefill should be near the compute roof, decode near the memory roof. What is far "
        "from both is overhead or an empty batch.",
        by_replica=True,
        rows=(
            Row("Under the roof", (_picture(), *_utilization())),
            Row("What is done", _work()),
            Row("Idle time", _idle()),
        ),
    )


def _gauge(name: str) -> str:
    return highest(series(name, of=WORKERS), *BY)


def _while_busy(counter: str) -> str:
    return share(total(rate(counter, of=WORKERS), *BY), total(rate(BUSY, of=WORKERS), *BY))


def roof() -> str:
    """The most FLOP/s that each worker's machine can do at the intensity of its work."""
    compute = f'label_replace({_gauge(PEAK_FLOPS)}, "roof", "compute", "", "")'
    memory = f"{_gauge(INTENSITY)} * {_gauge(PEAK_BYTES)}"
    memory = f'label_replace({memory}, "roof", "memory", "", "")'
    return combine("min", f"{compute} or {memory}", *BY)


def _picture() -> Panel:
    return Panel(
        "Operations per second over operations per byte",
        "One point per worker, and the roof above it. Both axes are logarithmic. Points at the "
        "left, under the slope, wait for memory; points at the right, under the flat part, for the "
        "processor. The distance to the roof is what could be gained.",
        (
            Query(_gauge(INTENSITY), "FLOP per byte"),
            Query(_while_busy("baton_engine_flops_total"), "reached"),
            Query(roof(), "roof"),
        ),
        Kind.SCATTER, unit="flops", width=12, height=14, log_axis=True,
    )  # fmt: skip


def _utilization() -> tuple[Panel, ...]:
    return (
        Panel(
            "Model FLOPs utilization",
            "Share of the processor's roof, over busy time. High for prefill with full steps, low "
            "for decode by nature. 0: idle.",
            (Query(_gauge(MFU), WORKER),),
            unit="percentunit", width=12, height=7,
        ),
        Panel(
            "Memory bandwidth utilization",
            "Share of the memory's roof, over busy time: every weight once a step, and the KV of "
            "each stream. High for decode. 0: idle.",
            (Query(_gauge(MBU), WORKER),),
            unit="percentunit", width=12, height=7,
        ),
    )  # fmt: skip


def _work() -> tuple[Panel, ...]:
    return (
        Panel(
            "Arithmetic intensity",
            "Operations per byte. Decode's grows with its batch, as all streams share one reading "
            "of the weights; the dashed line is where the two roofs meet.",
            (
                Query(_gauge(INTENSITY), WORKER),
                Query(share(_gauge(PEAK_FLOPS), _gauge(PEAK_BYTES)), f"{WORKER}: roofs meet",
                      dashed=True),
            ),
            log_axis=True,
        ),
        Panel(
            "Operations per second",
            "While busy, and what the machine can do as a dashed line.",
            (
                Query(_while_busy("baton_engine_flops_total"), WORKER),
                Query(_gauge(PEAK_FLOPS), f"{WORKER}: roof", dashed=True),
            ),
            unit="flops", log_axis=True,
        ),
        Panel(
            "Bytes per second",
            "While busy, and what the memory can do as a dashed line.",
            (
                Query(_while_busy("baton_engine_bytes_total"), WORKER),
                Query(_gauge(PEAK_BYTES), f"{WORKER}: roof", dashed=True),
            ),
            unit="Bps", log_axis=True,
        ),
    )  # fmt: skip


def _idle() -> tuple[Panel, ...]:
    return (
        Panel(
            "Share of the time within steps",
            "By role. The rest is idle. With continuous batching an engine with work is never "
            "idle; with static batches it waits for the longest answer of each.",
            (Query(busy_share("role"), "{{role}}"),),
            unit="percentunit", highest=1,
        ),
        Panel(
            "Idle seconds per second",
            "By worker.",
            (Query(total(rate("baton_engine_idle_seconds_total", of=WORKERS), *BY), WORKER),),
            unit="percentunit", highest=1,
        ),
        Panel(
            "Requests of a step",
            "Mean. Small batches on the left of the picture: more streams would cost little.",
            (Query(mean("baton_engine_batch_size", by=BY, of=WORKERS), WORKER),),
        ),
    )  # fmt: skip
