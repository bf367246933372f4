"""docs/faults.md is complete, and what it says is there: each test exists and names the fault."""

import ast
import re
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "faults.md"

REQUIRED = {
    *(f"B{n:03}" for n in (*range(1, 20), *range(21, 26))),  # the most damaging
    *(f"B{n:03}" for n in (26, 28, 29, 31, 32, 34, 35, *range(37, 43), 44, 46)),  # KV transfer
    *(f"B{n:03}" for n in (47, 48, 50, 51, 52, 53, 55, 56)),  # lifecycle and abort
    *(f"B{n:03}" for n in (89, 90, 92, 94, 95)),  # scheduling and numerics
    "B098",
    *(f"B{n}" for n in (103, 104, 105, 108, 109)),  # metrics
    *(f"B{n}" for n in (111, 112, 113, 115, 117)),  # scaling
    *(f"B{n}" for n in (118, 119, 120, 122, 124, 126)),  # deploy
}


def rows() -> dict[str, str]:
    """By id, what the page says: tests, or why there are none."""
    found: dict[str, str] = {}
    for line in PAGE.read_text().splitlines():
        row = re.match(r"\| (B\d{3}) \| [^|]+ \| ([^|]+) \|$", line)
        if row:
            assert row[1] not in found, f"{row[1]} is listed twice"
            found[row[1]] = row[2]
    return found


def cited(cell: str) -> list[tuple[str, str]]:
    return re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", cell)


@lru_cache
def sources(path: str) -> dict[str, str]:
    """Functions of a test file: each with what stands above it, and the file's docstring."""
    if not (ROOT / path).is_file():
        return {}
    text = (ROOT / path).read_text()
    lines, tree, begin = text.splitlines(), ast.parse(text), 0
    found = {}
    for node in tree.body:
        assert node.end_lineno is not None
        if isinstance(node, ast.FunctionDef):
            own = lines[begin : node.end_lineno]
            found[node.name] = "\n".join([ast.get_docstring(tree) or "", *own])
        begin = node.end_lineno
    return found


def test_every_fault_is_listed() -> None:
    assert not REQUIRED - rows().keys()


def test_each_has_a_test_or_a_reason() -> None:
    for fault, cell in rows().items():
        assert cited(cell) or cell.startswith("cannot apply"), fault


def test_the_tests_exist() -> None:
    missing = [
        f"{fault}: {path}::{name}"
        for fault, cell in rows().items()
        for path, name in cited(cell)
        if name not in sources(path)
    ]
    assert not missing


def test_a_test_of_each_names_it() -> None:
    silent = [
        f"{fault}: {tests}"
        for fault, cell in rows().items()
        if (tests := cited(cell))
        and not any(fault in sources(path).get(name, "") for path, name in tests)
    ]
    assert not silent
