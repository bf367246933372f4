"""A run's folder, the terminal's texts, plots and pages."""

import asyncio
import io
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from loadtest.comparison import Cell, ComparisonReport, MaxRate, Measured, Ratio, Section
from loadtest.comparison_html import chosen_rate, comparison_html, side_of, verdicts
from loadtest.figures import Summary, summarize
from loadtest.html_report import run_html
from loadtest.plot_style import Line, standalone
from loadtest.plots import (
    MOST_POINTS,
    Points,
    attainment_against_rate,
    cdf,
    errors_over_time,
    max_rate_bars,
    timeline,
    ttft_over_time,
)
from loadtest.record import INTERRUPTED, Record, RunResult
from loadtest.slo import SLO
from loadtest.store import REQUESTS, SUMMARY, RunFolder, RunInfo, read_records, read_run
from loadtest.terminal import Progress, comparison_table, summary_table
from loadtest.wording import digits, percent, slo_words, time_words, verdict

INFO = RunInfo(
    "http://127.0.0.1:8000",
    "chat <b>&",
    "Poisson",
    "tiny",
    "baton loadtest --rate 4",
    {"Seed": "0"},
)
SLOS = {"chat": SLO(ttft=0.2, tpot=0.05), "long": SLO(e2e=3.0)}


def some_run(count: int = 120, seed: int = 0, slow: float = 1.0) -> RunResult:
    rng = np.random.default_rng(seed)
    records = []
    for index in range(count):
        error = "http 429" if index % 20 == 7 else INTERRUPTED if index == count - 1 else ""
        gaps = [0.05 * slow, *rng.exponential(0.02 * slow, 9)]
        records.append(
            Record(
                index=index,
                class_name="long" if index % 3 else "chat",
                conversation=index,
                turn=0,
                due_s=index * 0.25,
                sent_s=index * 0.25 + 0.0004,
                planned_tokens=100,
                max_tokens=10,
                error=error,
                message="queue <full>" if error else "",
                prompt_tokens=100,
                output_tokens=0 if error else 10,
                chunk_s=() if error else tuple(np.cumsum(gaps).tolist()),
            )
        )
    return RunResult(tuple(records), count * 0.25 + 1, "2026-01-02T03:04:05+00:00", count)


class Tags(HTMLParser):
    """Every tag that is opened is closed, in order."""

    VOID = frozenset(("meta", "br", "link", "img"))

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_page(html: str) -> None:
    tags = Tags()
    tags.feed(html)
    assert tags.open == []
    assert all(source.startswith("#") for source in tags.sources)  # nothing from outside
    assert "url(http" not in html
    assert "@import" not in html
    assert "<script" not in html
    assert not re.search(r"\bnan\b", html)
    assert "None" not in html


# --- the folder --------------------------------------------------------------------------------


def test_a_run_is_read_back(tmp_path: Path) -> None:
    run = some_run()
    summary = summarize(run, SLOS)
    with RunFolder(tmp_path / "run", INFO, SLOS) as folder:
        for record in reversed(run.records):  # as they end
            folder.add(record)
        folder.finish(run, summary, "<html>")
    stored = read_run(tmp_path / "run")
    assert stored.info == INFO
    assert stored.slos == SLOS
    assert replace(stored.result, records=()) == replace(run, records=())
    assert [record.index for record in stored.result.records] == list(range(120))
    for before, after in zip(run.records, stored.result.records, strict=True):
        assert after.chunk_s == pytest.approx(before.chunk_s, abs=1e-6)
        assert replace(after, chunk_s=()) == replace(before, chunk_s=())
    written = json.loads((tmp_path / "run" / SUMMARY).read_text())
    assert written["figures"]["total"]["attainment"]["met"] == summary.total.attainment.met
    assert written["slos"]["long"] == {"ttft": None, "tpot": None, "e2e": 3.0}


def test_a_killed_run_leaves_what_it_saw(tmp_path: Path) -> None:
    run = some_run(10)
    folder = RunFolder(tmp_path, INFO, SLOS)
    for record in run.records[:4]:
        folder.add(record)
    with (tmp_path / REQUESTS).open("a") as file:  # the line that was being written
        file.write('{"index": 5, "class_na')
    stored = read_run(tmp_path)
    folder.__exit__()
    assert len(stored.result.records) == 4
    assert stored.result.interrupted
    assert stored.result.duration_s > 0.75


def test_a_folder_is_not_written_twice(tmp_path: Path) -> None:
    with RunFolder(tmp_path, INFO, SLOS):
        pass
    with pytest.raises(FileExistsError, match="holds a run already"):
        RunFolder(tmp_path, INFO, SLOS)


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / REQUESTS
    path.write_text('{"index": 1}\n')
    with pytest.raises(ValueError, match=r"requests\.jsonl:1: not a request .*class_name"):
        read_records(path)
    path.write_text("{}x\n{}\n")
    with pytest.raises(ValueError, match=r"requests\.jsonl:1: not JSON"):
        read_records(path)
    path.write_text("")
    (tmp_path / SUMMARY).write_text('{"format": 99}')
    with pytest.raises(ValueError, match="format 99"):
        read_run(tmp_path)


# --- words -------------------------------------------------------------------------------------


def test_figures_in_words() -> None:
    assert [digits(x) for x in (0, 0.9999999, 1234.6, 12.34, 0.0123, math.nan, math.inf)] == [
        "0", "1.00", "1,235", "12.3", "0.012", "–", "∞",
    ]  # fmt: skip
    assert [time_words(x) for x in (0.0432, 1.3, 725)] == ["43.2 ms", "1.30 s", "12 min 5 s"]
    assert [percent(x) for x in (0.9, 0.99999, 1.0, math.nan)] == ["90.0 %", "99.9 %", "100 %", "–"]
    assert (
        slo_words(SLO(ttft=0.5, tpot=0.05, e2e=10)) == "TTFT ≤ 500 ms, TPOT ≤ 50 ms and E2E ≤ 10 s"
    )


def test_the_verdict() -> None:
    total = summarize(some_run(), {name: SLO(ttft=0.2) for name in SLOS}).total
    assert verdict(total) == (
        "Goodput 3.65 requests/s: 95.0 % (89.4 to 97.7 %) of 119 requests met TTFT ≤ 200 ms."
    )
    assert "No objectives were set" in verdict(summarize(some_run(), {}).total)
    assert verdict(summarize(some_run(0), SLOS).total) == "No request ended."


# --- the terminal ------------------------------------------------------------------------------


def spoiled() -> Summary:
    run = some_run()
    late = tuple(replace(record, sent_s=record.due_s + 0.5) for record in run.records)
    return summarize(replace(run, records=late, interrupted=True, num_planned=500), SLOS)


def test_the_table_fits_and_is_plain() -> None:
    text = summary_table(spoiled())
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text
    assert "\x1b" in summary_table(spoiled(), colour=True)
    assert "warning: The client was late" in text
    assert "120 of 500 planned requests" in text
    assert "6 × http 429" in text
    assert re.search(r"^chat +TTFT +50\.0 +", text, re.MULTILINE)
    empty = summary_table(summarize(some_run(0), {}))
    assert "No request ended." in empty
    assert "nan" not in empty


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_line_of_progress() -> None:
    clock = Clock()
    progress = Progress(io.StringIO(), 100, schedule_s=25.0, clock=clock)
    assert progress.line().startswith("0 s  sent 0/100  in flight 0")
    for record in some_run(40).records:
        progress.sent()
        if record.index < 30:
            progress.done(record)
    clock.now += 5
    line = progress.line()
    assert "5 s  sent 40/100  in flight 10  done 28  errors 2  5.60/s  TTFT 50.0 ms" in line
    assert line.endswith("ETA 21.0 s")  # 20 s of schedule, and the time of an answer
    assert len(line) <= 100
    clock.now += 60
    assert "TTFT –" in progress.line()  # nothing of late
    assert progress.line().endswith("ETA now")


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Tty()], ids=["log", "tty"])
def test_progress_is_shown_until_it_is_over(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOG_EVERY_S", "TTY_EVERY_S"):
        monkeypatch.setattr(f"loadtest.terminal.{name}", 0.0)

    async def watch() -> None:
        progress = Progress(stream, 5)
        showing = asyncio.create_task(progress.show())
        while stream.getvalue().count("sent 0/5") < 2:
            await asyncio.sleep(0)
        progress.sent()
        showing.cancel()
        await asyncio.wait([showing])

    asyncio.run(watch())
    text = stream.getvalue()
    assert text.endswith("\n")
    if stream.isatty():
        assert text.count("\n") == 1  # one line, written again and again
        assert "\r\x1b[K" in text
        assert "sent 1/5" in text.rsplit("\r", 1)[1]  # the last word
    else:
        assert "\x1b" not in text
        assert "\r" not in text


# --- plots -------------------------------------------------------------------------------------


def check_svg(svg: str) -> None:
    root = ElementTree.fromstring(standalone(svg))
    assert root.tag.endswith("svg")
    drawn = svg.replace("#000000", "")
    assert not re.search(r"#[0-9a-f]{6}\b(?!\")", re.sub(r"(url\(|href=\")#\w+", "", drawn))
    assert "nan" not in svg.lower()


def test_plots_are_small_well_formed_and_the_same_each_time() -> None:
    values = np.random.default_rng(0).lognormal(-3, 1, 50_000).tolist()
    line = Line("a & b", 0)
    svg = cdf([(line, values)], "ITL <x>", [(line, 0.1)], tail=True, legend=True)
    assert svg == cdf([(line, values)], "ITL <x>", [(line, 0.1)], tail=True, legend=True)
    check_svg(svg)
    assert len(svg) < 30_000
    longest = max(re.findall(r'd="([^"]*)"', svg), key=len)
    assert longest.count("L") <= 2 * MOST_POINTS
    assert "ITL &lt;x&gt;" in svg
    assert "<text" in svg


def test_a_cdf_has_its_values_where_they_belong() -> None:
    svg = cdf([(Line("a", 0), [0.01, 0.02, 0.03, 0.04, 0.05])], "TTFT")
    (path,) = [d for d in re.findall(r'd="([^"]*)"[^>]*--s0', svg) if d.count("L") == 4]
    points = np.array([[float(x) for x in p.split()] for p in re.split("[ML]", path)[1:]])
    steps = np.diff(points, axis=0)
    assert np.allclose(steps, steps[0], atol=0.02)  # even values: a straight line
    assert steps[0][0] > 0 > steps[0][1]


def test_plots_of_nothing() -> None:
    line = Line("a", 0)
    for svg in (
        cdf([], "none"),
        cdf([(line, [])], "none", tail=True),
        timeline([]),
        ttft_over_time([(line, [])]),
        errors_over_time([]),
        attainment_against_rate([Points(line, [], [])], 0.9, "none"),
        max_rate_bars([], "none"),
    ):
        check_svg(svg)


def test_plots_of_a_run() -> None:
    records = some_run().records
    for svg in (timeline(records), ttft_over_time([(Line("all", 0), records)])):
        check_svg(svg)
    assert "http 429" in errors_over_time(records)
    assert INTERRUPTED not in errors_over_time(records)


# --- pages -------------------------------------------------------------------------------------


def test_the_page_of_a_run() -> None:
    run = some_run()
    summary = summarize(run, SLOS)
    html = run_html(INFO, run, summary)
    check_page(html)
    assert "chat &lt;b&gt;&amp;" in html
    assert "queue &lt;full&gt;" in html
    assert "baton loadtest --rate 4" in html
    assert "vllm bench serve" in html
    assert digits(summary.total.ttft.p50 * 1e3) in html
    check_page(run_html(INFO, RunResult((), 0.0, "", 0), summarize(RunResult((), 0, "", 0), {})))


def some_comparison(names: list[str]) -> ComparisonReport:
    cells, max_rates, ratios = [], [], []
    for place, name in enumerate(names):
        for rate in (1.0, 4.0):
            run = some_run(40, place, slow=1 + place * rate)
            shares = {"tight": Measured(0.9, 0.8, 0.95), "loose": Measured(1.0, 0.97, 1.0)}
            cells.append(Cell(name, rate, summarize(run, SLOS), shares, [0.01, 0.02, 0.5]))
        max_rates.append(MaxRate(name, "tight", Measured(2.0, 1.5, 2.5)))
        max_rates.append(MaxRate(name, "loose", Measured(4.0, 3.1, math.inf), "at every rate"))
        if place:
            ratios += [
                Ratio("highest rate (tight)", name, 2, 4, Measured(2.0, 1.5, math.inf), "/s"),
                Ratio("ITL p99 at 2/s", name, 0.1, 0.3, Measured(3, 2.5, 3.5), "s", "lower"),
                Ratio("ITL p99 at 4/s", name, 0.1, 0.4, Measured(4, 3.5, 4.5), "s", "lower"),
                Ratio("TTFT p50 at 2/s", name, 0.1, 0.1, Measured(1.0), "s", "lower"),
            ]
    section = Section(
        "chat", "short in", {"tight": "TPOT ≤ 40 ms", "loose": "TPOT ≤ 80 ms"}, cells, max_rates,
        ratios, notes=["One round."],
    )  # fmt: skip
    targets = {name: f"http://{name}" for name in names}
    return ComparisonReport("A against B", "2026-01-02T03:04:05", "baton x", targets, [section])


@pytest.mark.parametrize("num_targets", [1, 5])
def test_the_page_of_a_comparison(num_targets: int) -> None:
    report = some_comparison([f"t{place}" for place in range(num_targets)])
    html = comparison_html(report)
    check_page(html)
    assert ("Ratios to t0" in html) == (num_targets > 1)
    assert "One round." in html
    assert "4.00/s (at least 3.10)" in html
    text = comparison_table(report)
    assert max(map(len, text.splitlines())) <= 100
    assert "highest rate at which 90 % meet" in text


def test_who_wins_in_words() -> None:
    (section,) = some_comparison(["a", "b"]).sections
    times = "\N{NO-BREAK SPACE}×"
    assert verdicts(section, "a") == [
        f"b is better than a: highest rate (tight) 2.00{times}.",
        f"b is worse than a: ITL p99 3.00{times} at 2/s, 4.00{times} at 4/s.",
        "b and a, no certain difference: TTFT p50 at 2/s.",
    ]
    (many,) = some_comparison(["a", "b", "c", "d", "e"]).sections
    assert len(verdicts(many, "a")) == 1
    lower = Ratio("x", "b", 1, 0.5, Measured(0.5, 0.4, 0.6), better="lower")
    assert side_of(lower) == "better"
    assert side_of(replace(lower, better="higher")) == "worse"
    assert side_of(replace(lower, ratio=Measured(0.5, 0.4, 1.0))) == "even"


def test_a_winner_is_named_with_care() -> None:
    ratio = Ratio("x at 2/s", "b", 1, 0.95, Measured(0.95, 0.91, 0.99), better="lower")
    assert side_of(ratio) == "better"
    assert side_of(ratio, num_judged=12) == "even"  # one of twelve intervals misses 1 by chance
    little = replace(ratio, ratio=Measured(0.99, 0.985, 0.995))
    assert side_of(little) == "even"
    bound = replace(ratio, ratio=Measured(2.0, 2.0, math.inf), better="higher")
    assert side_of(bound, num_judged=12) == "better"
    (section,) = some_comparison(["a", "b"]).sections
    assert verdicts(replace(section, rounds=2), "a") == [
        "b is better than a: highest rate (tight) 2.00\N{NO-BREAK SPACE}×."
    ]


def test_the_rate_whose_itl_is_shown() -> None:
    (section,) = some_comparison(["a", "b"]).sections
    assert chosen_rate(replace(section, itl_rate=1.0)) == 1.0
    assert chosen_rate(section) in (1.0, 4.0)
    assert chosen_rate(replace(section, cells=[])) is None
