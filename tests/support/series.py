"""What ``GET /metrics`` of a router says, as numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable

import httpx2
from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]


class Series:
    """One page of samples. Labels that are not given may be anything: what matches is added up."""

    def __init__(self, page: str) -> None:
        self._samples: dict[str, list[tuple[Labels, float]]] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                labels = frozenset(sample.labels.items())
                self._samples.setdefault(sample.name, []).append((labels, sample.value))

    @classmethod
    async def of(cls, http: httpx2.AsyncClient) -> Series:
        """As the router says now."""
        response = await http.get("/metrics")
        assert response.status_code == 200, response.text
        return cls(response.text)

    def since(self, before: Series) -> Series:
        """What was added to counters and histograms since an earlier page."""
        difference = Series("")
        for name, samples in self._samples.items():
            earlier = dict(before._samples.get(name, ()))
            difference._samples[name] = [
                (labels, value - earlier.get(labels, 0.0)) for labels, value in samples
            ]
        return difference

    def labels(self) -> set[tuple[str, Labels]]:
        """Which series there are."""
        return {(name, known) for name, samples in self._samples.items() for known, _ in samples}

    def __getitem__(self, name: str) -> float:
        return self.value(name)

    def value(self, name: str, **labels: str) -> float:
        """The sum of all samples of this name with these labels."""
        return sum(value for _, value in self._matching(name, labels))

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """The sum for each value of a label; those that are zero are left out."""
        found: dict[str, float] = {}
        for known, value in self._matching(name, labels):
            key = dict(known)[label]
            found[key] = found.get(key, 0) + value
        return {key: value for key, value in found.items() if value}

    def count(self, name: str, **labels: str) -> float:
        """Values in a histogram."""
        return self.value(f"{name}_count", **labels)

    def mean(self, name: str, **labels: str) -> float:
        """Of a histogram."""
        return self.value(f"{name}_sum", **labels) / self.count(name, **labels)

    def borders(self, name: str) -> list[float]:
        """The upper ones, the infinite included."""
        return sorted(
            {float(dict(known)["le"]) for known, _ in self._matching(f"{name}_bucket", {})}
        )

    def bucket_of(self, name: str, share: float, **labels: str) -> int:
        """In which bucket the quantile is; counted from zero."""
        wanted = share * self.count(name, **labels)
        for index, border in enumerate(self.borders(name)):
            within = sum(
                value
                for known, value in self._matching(f"{name}_bucket", labels)
                if float(dict(known)["le"]) == border
            )
            if within >= wanted:
                return index
        raise AssertionError("more values than buckets have")

    def _matching(self, name: str, labels: dict[str, str]) -> list[tuple[Labels, float]]:
        assert name in self._samples, f"no series {name}"
        wanted = set(labels.items())
        return [(known, value) for known, value in self._samples[name] if wanted <= known]


def quantile(values: Iterable[float], share: float) -> float:
    """The smallest value that this share of them does not exceed, as ``bucket_of`` has it."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def bucket_of(value: float, borders: list[float]) -> int:
    """In which bucket a value is; counted from zero."""
    return next(index for index, border in enumerate(borders) if value <= border)
