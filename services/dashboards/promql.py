"""The few shapes of PromQL that the boards use (pure)."""

from __future__ import annotations

RATE = "$__rate_interval"  # Grafana: at least four scrapes, and no shorter than a pixel
RANGE = "$__range"  # Grafana: all of the time that is shown

ROUTERS = 'model=~"$model"'
WORKERS = f'{ROUTERS},replica=~"$replica"'

QUANTILES = ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))
ENDS = ((0.5, "p50"), (0.99, "p99"))


def series(name: str, *matchers: str, of: str = ROUTERS) -> str:
    """The samples of a metric: ``series("baton_workers", 'role="prefill"')``.

    ``of`` is whose: :data:`ROUTERS`, :data:`WORKERS`, or empty for a metric without these labels.
    """
    inside = ",".join(filter(None, (of, *matchers)))
    return f"{name}{{{inside}}}" if inside else name


def rate(name: str, *matchers: str, of: str = ROUTERS, over: str = RATE) -> str:
    """How fast a counter grows, per second."""
    return f"rate({series(name, *matchers, of=of)}[{over}])"


def increase(name: str, *matchers: str, of: str = ROUTERS, over: str = RANGE) -> str:
    """By how much a counter has grown."""
    return f"increase({series(name, *matchers, of=of)}[{over}])"


def combine(how: str, expr: str, *by: str) -> str:
    """``sum by (role) (expr)``; of everything when no label is named."""
    return f"{how} by ({', '.join(by)}) ({expr})" if by else f"{how}({expr})"


def total(expr: str, *by: str) -> str:
    """The sum over everything but the labels ``by``."""
    return combine("sum", expr, *by)


def highest(expr: str, *by: str) -> str:
    """The maximum."""
    return combine("max", expr, *by)


def once(expr: str, *by: str) -> str:
    """What every router says of the same thing, such as workers: of each model the most that one
    says, and the sum over models. ``by`` must name all that is to be counted side by side; what is
    to be added up, like the roles of ``total(once(expr, "role", "state"), "state")``, as well.
    """
    return total(highest(expr, "model", *by), *by)


def quantile(
    q: float, name: str, *matchers: str, by: tuple[str, ...] = (), of: str = ROUTERS
) -> str:
    """A quantile of a histogram, over all processes."""
    buckets = rate(f"{name}_bucket", *matchers, of=of)
    return f"histogram_quantile({q}, {total(buckets, 'le', *by)})"


def mean(name: str, *matchers: str, by: tuple[str, ...] = (), of: str = ROUTERS) -> str:
    """The mean of what a histogram has seen; exact, unlike its quantiles."""
    return share(
        total(rate(f"{name}_sum", *matchers, of=of), *by),
        total(rate(f"{name}_count", *matchers, of=of), *by),
    )


def share(part: str, whole: str) -> str:
    """One expression by another; no number, which is drawn as a gap, when the whole is zero."""
    return f"{part} / {whole}"


def cells(name: str, *matchers: str, of: str = ROUTERS) -> str:
    """A histogram's buckets for a heat map."""
    return total(increase(f"{name}_bucket", *matchers, of=of, over=RATE), "le")
