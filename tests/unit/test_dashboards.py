"""The boards: what is committed is what the code makes, and each panel is whole."""

import json
from collections import Counter

import pytest

from services.dashboards.__main__ import FOLDER, files
from services.dashboards.board import GRID, Board, Kind, Panel, Query, places
from services.dashboards.boards import all_boards
from services.dashboards.grafana import to_json
from services.dashboards.promql import quantile, rate
from tests.support.promql import ROOT

BOARDS = {board.uid: board for board in all_boards()}


def test_what_is_committed_is_what_the_code_makes() -> None:
    made = files()
    stale = [str(path) for path, text in made.items() if _read(path) != text]
    assert not stale, f"run make dashboards: {stale}"
    committed = {path.relative_to(ROOT) for path in (ROOT / FOLDER).glob("*")}
    assert committed == {path for path in made if path.parent == FOLDER}


def _read(path: object) -> str:
    file = ROOT / str(path)
    return file.read_text() if file.exists() else "(missing)"


def test_all_five_boards_are_there() -> None:
    assert list(BOARDS) == [
        "baton-slo", "baton-pools", "baton-kv-transfer", "baton-router", "baton-roofline"
    ]  # fmt: skip


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_grafana_gets_every_panel_and_query(board: Board) -> None:
    made = json.loads(to_json(board))
    assert made["uid"] == board.uid
    drawn = [panel for panel in made["panels"] if panel["type"] != "row"]
    assert [panel["title"] for panel in drawn] == [panel.title for panel in board.panels()]
    for panel, said in zip(drawn, board.panels(), strict=True):
        assert [target["expr"] for target in panel["targets"]] == [q.expr for q in said.queries]
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)
        assert panel["description"] == said.says
        assert panel["datasource"]["uid"] == "${datasource}"
    ids = Counter(panel["id"] for panel in made["panels"])
    assert set(ids.values()) == {1}
    variables = [variable["name"] for variable in made["templating"]["list"]]
    assert variables == ["datasource", "model"] + ["replica"] * board.by_replica


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_panels_can_be_told_apart_and_do_not_overlap(board: Board) -> None:
    titles = [panel.title for panel in board.panels()]
    assert len(set(titles)) == len(titles)
    taken = [
        (x, y)
        for panel in json.loads(to_json(board))["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(taken)) == len(taken)
    assert max(x for x, _ in taken) < GRID


def test_every_choice_of_a_board_is_used_by_all_of_its_queries() -> None:
    for board in BOARDS.values():
        for panel in board.panels():
            for query in panel.queries:
                bare = "baton_event_loop_lag_seconds" in query.expr or "slo_budget" in query.expr
                assert "$model" in query.expr or bare, f"{panel.title}: {query.expr}"
                assert board.by_replica or "$replica" not in query.expr, panel.title


def _panel(width: int, height: int) -> Panel:
    return Panel("a panel", "says so", (Query("up"),), width=width, height=height)


def test_low_panels_stand_beside_a_high_one() -> None:
    panels = (_panel(12, 14), _panel(12, 7), _panel(12, 7), _panel(24, 3))
    assert places(panels, 1) == [(0, 1), (12, 1), (12, 8), (0, 15)]


def test_a_panel_that_does_not_fit_beside_goes_below() -> None:
    assert places((_panel(16, 4), _panel(16, 4), _panel(8, 4)), 0) == [(0, 0), (0, 4), (16, 0)]


def test_a_panel_without_queries_or_words_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks queries"):
        Panel("empty", "says so", ())
    with pytest.raises(ValueError, match="description"):
        Panel("silent", "", (Query("up"),))


def test_rates_are_taken_before_sums_and_quantiles_from_buckets() -> None:
    assert rate("a_total", 'x="y"', of="") == 'rate(a_total{x="y"}[$__rate_interval])'
    assert quantile(0.9, "b", by=("z",), of="") == (
        "histogram_quantile(0.9, sum by (le, z) (rate(b_bucket[$__rate_interval])))"
    )


def test_a_heat_map_and_a_table_are_asked_for_in_their_formats() -> None:
    formats = {
        panel["type"]: {target["format"] for target in panel["targets"]}
        for board in BOARDS.values()
        for panel in json.loads(to_json(board))["panels"]
        if panel["type"] in ("heatmap", "table", "xychart")
    }
    assert formats == {"heatmap": {"heatmap"}, "table": {"table"}, "xychart": {"table"}}
    assert {panel.kind for board in BOARDS.values() for panel in board.panels()} == set(Kind)
