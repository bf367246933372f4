"""``make proof`` in small: real engines, each in one process, and all three stages."""

import json
from pathlib import Path

from loadtest.command import in_loop
from loadtest.comparison_html import comparison_html
from loadtest.proof import SMALL, Proof
from loadtest.proof_page import BEGIN, END, write_page
from loadtest.results import read_comparison
from tests.support.local_baton import COMMAND


def test_a_small_proof_is_made_and_written(tmp_path: Path) -> None:
    path = tmp_path / "proof"
    path.mkdir()
    proof = Proof(SMALL, path, "", command=COMMAND)
    assert in_loop(proof.run()) is False
    proof.write(1.0)
    assert proof.alone is not None
    assert proof.alone.tpot_s > 0
    assert proof.alone.prefill_rate > 0

    report, sweep = read_comparison(path), read_comparison(path / "sweep")
    (section,) = report.sections
    assert list(report.targets)[1:] == ["disaggregated"]
    assert list(report.targets)[0].startswith("mixed-1x")
    assert set(section.slos) == {"tight", "loose"}
    sent = [cell.summary.total.num_sent for cell in section.cells]
    assert len(set(sent)) == 1, "both were asked the same"
    assert sent[0] > 0
    assert all(cell.summary.total.num_ok == cell.summary.total.num_sent for cell in section.cells)
    assert [list(part.summary.total.errors) for part in sweep.sections[0].cells] == [[]]
    lines = (path / "requests.jsonl").read_text().splitlines()
    assert {json.loads(line)["target"] for line in lines} == set(report.targets)
    assert comparison_html(report) == (path / "report.html").read_text()

    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_page(page, report, sweep)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "\nold\n" not in text
    assert "| disaggregated |" in text
    for name in ("bursts-attainment", "bursts-itl", "bursts-ttft"):
        assert f"(proof/{name}.svg)" in text
        assert (tmp_path / "proof" / f"{name}.svg").stat().st_size > 1000
