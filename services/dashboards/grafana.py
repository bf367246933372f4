"""A board as the JSON that Grafana imports (grafana-foundation-sdk, for Grafana 11.6 and later).

Knows how each kind of panel is drawn; what is drawn is said by the boards. The only file that needs
the SDK.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from string import ascii_uppercase

from grafana_foundation_sdk.builders import (
    common,
    dashboard as build,
    heatmap,
    prometheus,
    stat,
    table,
    timeseries,
    xychart,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import (
    common as options,
    dashboard as model,
    heatmap as heatmap_options,
    prometheus as prometheus_options,
    xychart as xychart_options,
)

from services.dashboards.board import GRID, Board, Kind, Panel, Row, places

SOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
TAG = "baton"
ALL = ".*"  # what $model and $replica are for "All": a matcher that matches everything

Drawing = (
    timeseries.Panel | stat.Panel | heatmap.Panel | table.Panel | xychart.Panel
)  # builders of the SDK; they share no base that has these methods


def to_json(board: Board) -> str:
    """The dashboard, as it is committed."""
    built = (
        build.Dashboard(board.title)
        .uid(board.uid)
        .description(board.says)
        .tags([TAG])
        .time("now-1h", "now")
        .refresh("10s")
        .timezone("browser")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .editable()
        .link(
            build.DashboardLink("Baton")
            .type(model.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
        .with_variable(build.DatasourceVariable("datasource").type("prometheus"))
        .with_variable(_choice("model", "label_values(baton_workers, model)"))
    )
    if board.by_replica:
        query = 'label_values(baton_engine_requests{model=~"$model"}, replica)'
        built = built.with_variable(_choice("replica", query))
    result = built.build()
    result.panels = _place(board.rows)
    return json.dumps(result, cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def _choice(name: str, query: str) -> build.QueryVariable:
    return (
        build.QueryVariable(name)
        .datasource(SOURCE)
        .query(query)
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .include_all(True)
        .all_value(ALL)
        .multi(True)
        .current(model.VariableOption(text="All", value="$__all"))
    )


def _place(rows: tuple[Row, ...]) -> list[model.Panel | model.RowPanel]:
    """All panels and headings, numbered, each at its place on the grid."""
    placed: list[model.Panel | model.RowPanel] = []
    top = 0
    for row in rows:
        heading = build.Row(row.title).build()
        heading.id_val = len(placed) + 1
        heading.grid_pos = model.GridPos(x=0, y=top, w=GRID, h=1)
        placed.append(heading)
        top += 1
        corners = places(row.panels, top)
        for panel, (x, y) in zip(row.panels, corners, strict=True):
            drawn = _draw(panel).build()
            drawn.id_val = len(placed) + 1
            drawn.grid_pos = model.GridPos(x=x, y=y, w=panel.width, h=panel.height)
            placed.append(drawn)
        top = max(y + p.height for p, (_, y) in zip(row.panels, corners, strict=True))
    return placed


def _draw(panel: Panel) -> Drawing:
    drawn = _DRAW[panel.kind](panel)
    drawn = drawn.title(panel.title).description(panel.says).datasource(SOURCE).unit(panel.unit)
    if panel.highest is not None:
        drawn = drawn.max(panel.highest)
    for ref, query in zip(ascii_uppercase, panel.queries, strict=False):
        drawn = drawn.with_target(_target(panel.kind, ref, query.expr, query.legend))
        if query.dashed:
            drawn = drawn.override_by_query(
                ref,
                [
                    model.DynamicConfigValue("custom.lineStyle", {"fill": "dash", "dash": [8, 8]}),
                    model.DynamicConfigValue("custom.fillOpacity", 0),
                ],
            )
    return drawn


def _target(kind: Kind, ref: str, expr: str, legend: str) -> prometheus.Dataquery:
    query = prometheus.Dataquery().expr(expr).ref_id(ref).datasource(SOURCE)
    if kind in (Kind.TABLE, Kind.SCATTER):
        return query.instant().format(prometheus_options.PromQueryFormat.TABLE)
    query = query.legend_format(legend or "__auto")
    if kind is Kind.STAT:
        return query.instant()
    if kind is Kind.HEATMAP:
        return query.range().format(prometheus_options.PromQueryFormat.HEATMAP)
    return query.range()


# --- one way of drawing each ---------------------------------------------------------------------


def _log_scale() -> common.ScaleDistributionConfig:
    return common.ScaleDistributionConfig().type(options.ScaleDistribution.LOG).log(10)


def _legend() -> common.VizLegendOptions:
    return (
        common.VizLegendOptions()
        .show_legend(True)
        .display_mode(options.LegendDisplayMode.LIST)
        .placement(options.LegendPlacement.BOTTOM)
    )


def _lines(panel: Panel) -> timeseries.Panel:
    drawn = (
        timeseries.Panel()
        .min(0)
        .line_width(1)
        .fill_opacity(0)
        .show_points(options.VisibilityMode.AUTO)
        .legend(_legend())
        .tooltip(
            common.VizTooltipOptions()
            .mode(options.TooltipDisplayMode.MULTI)
            .sort(options.SortOrder.DESCENDING)
        )
    )
    if panel.log_axis:
        drawn = drawn.scale_distribution(_log_scale())
    return drawn


def _stacked(panel: Panel) -> timeseries.Panel:
    return (
        _lines(panel)
        .fill_opacity(60)
        .stacking(common.StackingConfig().mode(options.StackingMode.NORMAL).group("A"))
    )


def _stat(panel: Panel) -> stat.Panel:
    return (
        stat.Panel()
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
        .graph_mode(options.BigValueGraphMode.NONE)
        .color_mode(options.BigValueColorMode.NONE)
    )


def _heatmap(panel: Panel) -> heatmap.Panel:
    return (
        heatmap.Panel()
        .calculate(False)  # the buckets are the histogram's own
        .y_axis(heatmap.YAxisConfig().unit(panel.unit))
        .color(
            heatmap.HeatmapColorOptions()
            .mode(heatmap_options.HeatmapColorMode.SCHEME)
            .scheme("Blues")
            .fill("dark-blue")
            .scale(heatmap_options.HeatmapColorScale.EXPONENTIAL)
            .exponent(0.5)
            .steps(64)
        )
    )


def _table(panel: Panel) -> table.Panel:
    """Queries joined by their labels; a query without a legend only brings labels."""
    values = {
        f"Value #{ref}": q.legend for ref, q in zip(ascii_uppercase, panel.queries, strict=False)
    }
    return (
        table.Panel()
        .with_transformation(model.DataTransformerConfig("merge", options={}))
        .with_transformation(
            model.DataTransformerConfig(
                "organize",
                options={
                    "excludeByName": {"Time": True}
                    | {name: True for name, title in values.items() if not title},
                    "renameByName": {name: title for name, title in values.items() if title},
                },
            )
        )
    )


def _scatter(panel: Panel) -> xychart.Panel:
    """The first query is x; each of the others is a series of points over it."""
    x, *ys = (f"Value #{ref}" for ref, _ in zip(ascii_uppercase, panel.queries, strict=False))
    first, *others = panel.queries
    log = {"type": "log", "log": 10}
    return (
        xychart.Panel()
        .with_transformation(model.DataTransformerConfig("merge", options={}))
        .mapping(xychart_options.SeriesMapping.MANUAL)
        .series(
            [
                xychart.XYSeriesConfig()
                .name(xychart.XychartXYSeriesConfigName().fixed(query.legend))
                .frame(xychart.XychartXYSeriesConfigFrame().matcher(_match("byIndex", 0)))
                .x(xychart.XychartXYSeriesConfigX().matcher(_match("byName", x)))
                .y(xychart.XychartXYSeriesConfigY().matcher(_match("byName", y)))
                for y, query in zip(ys, others, strict=True)
            ]
        )
        .legend(_legend())
        .scale_distribution(_log_scale())
        .override_by_name(
            x,
            [
                model.DynamicConfigValue("unit", "short"),
                model.DynamicConfigValue("custom.axisLabel", first.legend),
                model.DynamicConfigValue("custom.scaleDistribution", log),
            ],
        )
    )


def _match(how: str, what: object) -> xychart.MatcherConfig:
    return xychart.MatcherConfig().id(how).options(what)


_DRAW: dict[Kind, Callable[[Panel], Drawing]] = {
    Kind.LINES: _lines,
    Kind.STACKED: _stacked,
    Kind.STAT: _stat,
    Kind.HEATMAP: _heatmap,
    Kind.TABLE: _table,
    Kind.SCATTER: _scatter,
}
