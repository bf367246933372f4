"""The plot of a run in which pools scaled: load, targets and workers, TTFT and TPOT."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from loadtest.plot_style import INK, SERIES, drawing, legend_above, svg_of
from loadtest.proof_page import standalone

if TYPE_CHECKING:
    from tests.scaling_run import Run

BIN_S = 10.0
_DOTTED = (0, (2, 2))


def plot(run: Run, ttft_s: float, tpot_s: float) -> str:
    """SVG that stands by itself."""
    until = max(look["at"] for look in run.pools)
    with drawing("", 7.2) as (figure, axes):
        axes.remove()
        load, prefill, decode, ttft, tpot = figure.subplots(5, 1, sharex=True)
        edges = np.arange(0, until + BIN_S, BIN_S)
        for place, name in enumerate(dict(run.phases)):
            sent = [answer.sent_s for answer in run.answers if answer.phase == name]
            rates = np.histogram(sent, edges)[0] / BIN_S
            load.stairs(rates, edges, color=SERIES[2 + place], label=name)
        load.set(ylabel="requests/s", ylim=(0, None))
        load.set_title("Load")
        legend_above(load)
        at = [look["at"] for look in run.pools]
        for axis, role, colour in ((prefill, "prefill", SERIES[0]), (decode, "decode", SERIES[1])):
            targets = [look[role]["target"] for look in run.pools]
            ready = [look[role]["ready"] for look in run.pools]
            axis.fill_between(at, ready, step="post", color=colour, alpha=0.25, lw=0, label="ready")
            axis.step(at, targets, where="post", color=colour, label="target")
            axis.set(ylabel="workers", ylim=(0, 3.4), yticks=(0, 1, 2, 3))
            axis.set_title(f"{role.capitalize()} workers")
            legend_above(axis)
        for axis, name, limit in ((ttft, "ttft_s", ttft_s), (tpot, "tpot_s", tpot_s)):
            kept = [answer for answer in run.answers if not answer.error]
            axis.scatter(
                [answer.sent_s for answer in kept],
                [getattr(answer, name) for answer in kept],
                s=7, color=SERIES[6], lw=0, alpha=0.8,
            )  # fmt: skip
            axis.axhline(limit, color=INK, lw=1.0, ls=_DOTTED)
            axis.set(ylabel="s", ylim=(0, None))
        ttft.set_title("Time to first token, and its objective")
        tpot.set_title("Time per token after it, and its objective")
        tpot.set(xlabel="time, s", xlim=(0, until))
        figure.align_ylabels()
        return standalone(svg_of(figure))
