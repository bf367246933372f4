"""What a metrics page says: series by name and labels."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.request import urlopen

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_S = 10.0


class Page:
    """All samples of one scrape."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self.families = {family.name: family for family in families}
        self.samples = [sample for family in self.families.values() for sample in family.samples]

    @property
    def names(self) -> set[str]:
        """Of series; a histogram's have its suffixes."""
        return {sample.name for sample in self.samples}

    def labels(self, name: str) -> list[dict[str, str]]:
        """Of each series of that name."""
        return [dict(sample.labels) for sample in self.samples if sample.name == name]

    def value(self, name: str, **labels: str) -> float:
        """Of the one series with that name and at least these labels."""
        found = [
            sample.value
            for sample in self.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert len(found) == 1, f"{len(found)} series are called {name} {labels}"
        return found[0]

    def values(self, name: str, label: str, zero: bool = False) -> dict[str, float]:
        """By the value of one label; what is 0 is left out, unless asked for."""
        return {
            sample.labels[label]: sample.value
            for sample in self.samples
            if sample.name == name and (zero or sample.value)
        }


def scrape(host: str, port: int) -> Page:
    """What Prometheus would read."""
    with urlopen(f"http://{host}:{port}/metrics", timeout=TIMEOUT_S) as answer:
        return Page(text_string_to_metric_families(answer.read().decode()))
