"""The console's files fit together, and ask no other host for anything."""

from __future__ import annotations

import asyncio
import re
import tomllib
from pathlib import Path

import pytest

from router.console import pages

FOLDER = pages.FOLDER
FILES = sorted(path for path in FOLDER.iterdir() if path.suffix in pages.TYPES)
SCRIPTS = [path for path in FILES if path.suffix == ".js"]
SVG = "http://www.w3.org/2000/svg"  # a name, nothing that is loaded


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_other_host(path: Path) -> None:
    text = path.read_text().replace(SVG, "")
    assert not re.findall(r"(?:https?:|wss?:)?//[a-z0-9-]+\.", text), "an address"
    assert "@import" not in text
    assert not re.search(r"url\(", text)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_text_is_never_markup(path: Path) -> None:
    """What clients and workers say is shown; it must not become part of the page."""
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert word not in path.read_text()


def test_all_that_the_page_names_is_there() -> None:
    names = {path.name for path in FILES}
    page = (FOLDER / "index.html").read_text()
    loaded = set(re.findall(r'(?:src|href)="console/([^"]+)"', page))
    for path in SCRIPTS:
        loaded |= set(re.findall(r'from "\./([^"]+)"', path.read_text()))
    assert loaded == names - {"index.html"}  # nothing is missing, nothing is left over


def test_all_that_the_scripts_look_for_is_in_the_page() -> None:
    page = (FOLDER / "index.html").read_text()
    ids = set(re.findall(r'\bid="([^"]+)"', page))
    assert len(ids) == len(re.findall(r'\bid="', page)), "twice the same id"
    for path in SCRIPTS:
        wanted = set(re.findall(r'(?:\$|querySelector)\("#([a-z-]+)', path.read_text()))
        assert wanted <= ids, path.name
    labels = re.findall(r'aria-labelledby="([^"]+)"|\bfor="([^"]+)"|href="#([^"]+)"', page)
    assert {name for found in labels for name in found if name} <= ids


def test_colours_that_pictures_use_are_in_both_themes() -> None:
    style = (FOLDER / "console.css").read_text()
    light, dark = (
        dict(re.findall(r"--([a-z0-9-]+): ([^;]+);", block))
        for block in re.findall(r":root[^{]*\{([^}]+)\}", style)
    )
    (names,) = re.findall(r"const NAMES = \[([^\]]+)\]", (FOLDER / "draw.js").read_text())
    for name in re.findall(r'"([^"]+)"', names):
        for theme in (light, dark):
            assert re.fullmatch(r"#[0-9a-f]{6}", theme[name]), name  # draw.js appends opacity


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize(
    "name",
    ["ink", "ink-2", "ink-3", "prefill-ink", "decode-ink", "mixed-ink", "good-ink", "bad-ink"],
)
def test_text_can_be_read(name: str, theme: int) -> None:
    """WCAG AA: at least 4.5 to 1 on panels and on the page."""
    style = (FOLDER / "console.css").read_text()
    block = re.findall(r":root[^{]*\{([^}]+)\}", style)[theme]
    colours = dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6});", block))
    for ground in ("panel", "bg"):
        assert contrast(colours[name], colours[ground]) >= 4.5, ground


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_the_files_are_packaged() -> None:
    root = FOLDER.parents[1]
    data = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = data["package-data"]["router.console"]
    assert {f"*{path.suffix}" for path in FILES} <= set(patterns)


def test_a_file_that_is_not_there() -> None:
    sent = asyncio.run(asked("../feed.py"))
    assert sent[0]["status"] == 404
    assert asyncio.run(asked("app.js"))[0]["status"] == 200


async def asked(name: str) -> list[dict[str, object]]:
    sent: list[dict[str, object]] = []

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    async def receive() -> dict[str, object]:
        return {"type": "http.request"}

    scope = {"type": "http", "method": "GET", "headers": [], "path_params": {"name": name}}
    await pages.Files()(scope, receive, send)  # type: ignore[arg-type]
    return sent
