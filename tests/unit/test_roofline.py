"""The benchmark's arithmetic: operations, bytes, roofs, shares; rounds; tables; targets."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support import bench
from tests.support.bench import Case, Cell, Results, Target, Timing
from tests.support.roofline import (
    SMOLLM,
    Ceilings,
    Shape,
    decode_bytes,
    decode_flops,
    decode_roof_s,
    prefill_flops,
    prefill_share,
)


def test_the_default_model() -> None:
    assert SMOLLM.head_dim == 64
    assert SMOLLM.layer_weights == 576 * 960 + 576 * 576 + 576 * 3072 + 1536 * 576
    # 134.5 million parameters, without the norms: the head is the embedding.
    norms = 61 * 576
    assert 30 * SMOLLM.layer_weights + 576 * 49152 + norms == 134_515_008
    assert SMOLLM.weight_bytes() == 4 * (134_515_008 - norms)
    scales = 9 * (30 * (960 + 576 + 3072) + 49152) + 24 * 30 * 576  # for 64 inputs each
    assert SMOLLM.weight_bytes(int8=True) == 134_515_008 - norms + 4 * scales
    assert SMOLLM.kv_bytes(16) == 16 * 30 * 2 * 3 * 64 * 4  # a block of the pool


def test_a_shape_without_what_may_be_left_out() -> None:
    raw = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 3, "vocab_size": 5}
    assert Shape.of({**raw, "num_attention_heads": 2}) == Shape(1, 8, 2, 2, 4, 3, 5)
    assert Shape.of({**raw, "num_attention_heads": 2, "head_dim": 16}).head_dim == 16


def test_a_prompt_by_hand() -> None:
    shape = Shape(
        num_layers=2, hidden=4, num_heads=2, num_kv_heads=1, head_dim=3, intermediate=5, vocab=7
    )
    weights = 4 * (2 + 2) * 3 + 6 * 4 + 4 * 10 + 5 * 4
    linear = 3 * 2 * (2 * weights)  # three tokens, two layers
    head = 2 * 4 * 7  # of one row
    pairs = 1 + 2 + 3
    attention = 2 * 2 * pairs * (2 * 3 + 2 * 3)  # layers, heads, scores and sums
    assert prefill_flops(shape, 3) == linear + head + attention


def test_prompt_and_steps_are_the_same_work() -> None:
    """A token that is decoded at context n costs what it adds to a prompt, and its row of the
    head.
    """
    for n in (0, 1, 255):
        added = prefill_flops(SMOLLM, n + 1) - prefill_flops(SMOLLM, n)
        assert decode_flops(SMOLLM, 1, n) == added + 2 * 576 * 49152
    assert decode_flops(SMOLLM, 8, 100) == 8 * decode_flops(SMOLLM, 1, 100)


def test_bytes_of_a_step() -> None:
    assert decode_bytes(SMOLLM, 1, 0) == SMOLLM.weight_bytes() + SMOLLM.kv_bytes(1)
    assert decode_bytes(SMOLLM, 32, 2000) - SMOLLM.weight_bytes() == SMOLLM.kv_bytes(32 * 2001)
    assert decode_bytes(SMOLLM, 1, 9, int8=True) < decode_bytes(SMOLLM, 1, 9) / 3.7


def test_the_roof_is_the_higher_one() -> None:
    bytes_s = decode_bytes(SMOLLM, 4, 256)
    flops_s = decode_flops(SMOLLM, 4, 256)
    assert decode_roof_s(SMOLLM, 4, 256, Ceilings(flops_s, bytes_s / 3)) == pytest.approx(3)
    assert decode_roof_s(SMOLLM, 4, 256, Ceilings(flops_s / 5, bytes_s)) == pytest.approx(5)


def test_the_share_of_a_prompt() -> None:
    ceilings = Ceilings(prefill_flops(SMOLLM, 512) * 2.0, 1.0)
    assert prefill_share(SMOLLM, 512, 1.0, ceilings) == pytest.approx(0.5)


# --- rounds ---------------------------------------------------------------------------------------


@dataclass
class Clocked:
    name: str
    seconds: list[float]
    log: list[str]
    weights: str = "float32"
    decodes: bool = True
    taken: int = field(default=0)

    def can(self, case: Case) -> bool:
        return self.decodes or not case.batch

    def measure(self, case: Case) -> Timing:
        self.log.append(f"{self.name} {case}")
        self.taken += 1
        return Timing(self.seconds[self.taken - 1], case.tokens)


def test_contenders_take_turns_and_each_case_has_its_ceilings() -> None:
    log: list[str] = []
    ceilings = iter([Ceilings(1e12, x * 1e9) for x in (1, 2, 4)])

    def measured() -> Ceilings:
        log.append("ceilings")
        return next(ceilings)

    results = Results(SMOLLM)
    case, other = Case(100, 2), Case(7, 1)
    contenders = [
        Clocked("a", [1.0, 1.0, 1.0], log),
        Clocked("b", [2.0, 8.0, 4.0], log),
        Clocked("c", [], log, decodes=False),
    ]
    bench.run(results, contenders, [case], 3, measured, lambda: log.append("end"))
    a, b = "a decode 2 x 100", "b decode 2 x 100"
    assert log == ["ceilings", a, b, "end", "ceilings", b, a, "end", "ceilings", a, b, "end"]
    cell = results.cell("b", case)
    assert cell is not None
    assert cell.seconds == 4
    assert cell.tokens_s == 0.5
    assert cell.spread == (8 - 2) / 2 / 4
    needed = decode_bytes(SMOLLM, 2, 100) / 1e9
    assert cell.share(SMOLLM) == pytest.approx(
        sorted([needed / 2, needed / 2 / 8, needed / 4 / 4])[1]
    )
    assert results.ratio("a", "b", case) == 4
    assert results.ratio("b", "a", case) == 0.25
    assert results.ratio("a", "c", case) is None
    assert results.cell("a", other) is None


def test_selection_by_part_of_a_name() -> None:
    assert bench.selected([], "anything")
    assert bench.selected(["prefill", "x"], str(Case(2048)))
    assert not bench.selected(["decode"], str(Case(2048)))


# --- targets and tables ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "at_most", "missed", "word"),
    [
        (80.0, False, False, "met"),
        (79.9, False, True, "NOT MET"),
        (80.1, True, True, "NOT MET"),
        (80.0, True, False, "met"),
        (float("nan"), False, True, "NOT MET"),
        (float("nan"), True, True, "NOT MET"),
        (None, False, False, "not measured"),
    ],
)
def test_a_target(value: float | None, at_most: bool, missed: bool, word: str) -> None:
    target = Target("t", value, 80, at_most)
    assert target.missed == missed
    assert target.row[-1] == word


def test_a_table_is_aligned_and_its_bars_are_text() -> None:
    assert bench.table(["who", "tokens/s"], [["a|b", "1.5"], ["c", "12,345.0"]]).splitlines() == [
        "| who  | tokens/s |",
        "| :--- | -------: |",
        "| a\\|b |      1.5 |",
        "| c    | 12,345.0 |",
    ]


def test_the_tables_have_a_row_for_each_cell() -> None:
    timings, ceilings = [Timing(0.5, 256.0)] * 2, [Ceilings(1e11, 1e10)] * 2
    cells = [Cell("us", case, "float32", timings, ceilings) for case in (Case(512), Case(256, 8))]
    results = Results(SMOLLM, cells)
    row = bench.prefill_table(results).splitlines()[2:]
    share = 100 * prefill_flops(SMOLLM, 512) / 0.5 / 1e11
    assert [cell.split() for cell in row] == [
        f"| us | 512 | 1024 | 500 | {share:.0f} % | 0 % |".split()
    ]
    row = bench.decode_table(results).splitlines()[2:]
    share = 100 * decode_bytes(SMOLLM, 8, 256) / 1e10 / 0.5
    assert [cell.split() for cell in row] == [
        f"| us | 256 | 8 | 16.0 | 500.0 | {share:.0f} % | 0 % |".split()
    ]
    needed = decode_bytes(SMOLLM, 8, 256, int8=True)
    cells[1].weights = "int8"
    assert cells[1].share(SMOLLM) == pytest.approx(
        max(needed / 1e10, decode_flops(SMOLLM, 8, 256) / 1e11) / 0.5
    )
    cells[1].weights = ""
    assert bench.decode_table(results).splitlines()[2].split()[-6:-4] == ["500.0", "|"]


PAGE = "# A\n\n<!-- m -->\n\nold\n\n<!-- /m -->\n\nrest <!-- n -->\n"


def test_tables_go_between_their_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    for _ in range(2):
        bench.write_between(page, "m", "| new |")
        assert page.read_text() == PAGE.replace("old", "| new |")


@pytest.mark.parametrize(
    "text", ["", PAGE * 2, PAGE.replace("/m", "/x"), "<!-- /m -->\n<!-- m -->\n"]
)
def test_a_page_without_its_marks_stays_as_it_is(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValueError, match="lacks the lines"):
        bench.write_between(page, "m", "x")
    assert page.read_text() == text
