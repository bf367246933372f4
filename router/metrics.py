"""Everything one router exports, by name; the numbers are counted elsewhere (prometheus_client).

The ledger (``router.ledger``) and the dispatcher count in plain Python on the event loop; a scrape,
in its own thread, copies what is there. So no request and no token waits for an exporter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.core import HistogramMetricFamily

from router.buckets import Tally


def histogram(
    name: str,
    about: str,
    labels: Sequence[str],
    tallies: Iterable[tuple[Sequence[str], Tally]],
) -> HistogramMetricFamily:
    """A family of histograms: (values of ``labels``, tally) each."""
    family = HistogramMetricFamily(name, about, labels=labels)
    for values, tally in tallies:
        family.add_metric(values, tally.cumulative(), tally.total)
    return family


def counts_of(
    counts: Mapping[tuple[str, ...], float], known: Iterable[tuple[str, ...]] = ()
) -> dict[tuple[str, ...], float]:
    """A copy, with zeros for what is ``known`` and has not happened."""
    return dict.fromkeys(known, 0) | dict(counts)
