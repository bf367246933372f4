"""What README and docs say is true: commands run, links lead somewhere, flags and names exist."""

import ast
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from services.cli import build_parser
from tests.support.serving import served

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands() -> list[str]:
    """The commands of README's console blocks."""
    blocks = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    joined = "\n".join(blocks).replace("\\\n", " ")
    return [line[2:] for line in joined.splitlines() if line.startswith("$ ")]


def test_the_commands_and_the_request_work(tmp_path: Path) -> None:
    serve, test, curl, loadtest = commands()
    assert (serve, test) == ("make serve", "make test")
    with served(command=["make", "--no-print-directory", "-C", str(ROOT), "serve"]) as server:
        assert "http://127.0.0.1:8000/" in curl
        command = curl.replace("http://127.0.0.1:8000", server.url)
        answer = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True
        )
        assert loadtest.startswith(".venv/bin/baton loadtest ")
        asked = subprocess.run(
            [*shlex.split(loadtest), "--url", server.url, "--out", str(tmp_path)],
            cwd=ROOT, capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
    chunks = re.findall(r"^data: (\{.*\})$", answer.stdout, re.MULTILINE)
    text = "".join(json.loads(c)["choices"][0]["delta"].get("content", "") for c in chunks)
    assert text == "The capital of France is Paris."
    assert "Goodput" in asked.stdout
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_flags_exist() -> None:
    text = build_parser().parse_args(["serve"])  # builds without an error
    assert text.command == "serve"
    known = "".join(
        subprocess.run(
            [".venv/bin/baton", *words, "--help"],
            cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
        ).stdout
        for words in (["serve"], ["loadtest"], ["loadtest", "compare"])
    )  # fmt: skip
    pages = README + (ROOT / "docs" / "loadtest.md").read_text()
    flags = set(re.findall(r"--[a-z][a-z-]+", pages)) - {"--help"}
    assert flags
    for flag in flags:
        assert re.search(rf"{flag}\b", known), f"{flag} is named, which there is not"


def test_the_reading_order_names_what_there_is() -> None:
    section = README.split("## Read the code in this order")[1].split("\n## ")[0]
    for file, function in re.findall(r"\]\(([\w/]+\.py)\) `(\w+)\(\)`", section):
        tree = ast.parse((ROOT / file).read_text())
        names = {
            n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert function in names, f"{file} has no {function}()"
