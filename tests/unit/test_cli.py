"""The command line: flags come from fields, help is fast, wrong use is one line and status 2."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from router.config import RouterConfig
from services import cli
from services.config import AppConfig, WorkerConfig
from services.engine.config import EngineConfig


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr."""
    try:
        status = cli.main(argv)
    except SystemExit as end:
        status = int(end.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


def test_every_field_is_a_flag_with_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "serve", "--help")
    assert status == 0
    inner = {"router", "engine", "prefill", "decode", "mixed", "autoscaling"}
    inner |= {"replicas", "api_keys"}
    for cls in (AppConfig, WorkerConfig, EngineConfig, RouterConfig):
        for field in fields(cls):
            flag = "--" + field.name.replace("_", "-")
            assert field.name in inner or flag in out, flag
    for flag in ("--prefill", "--decode", "--mixed", "--config"):
        assert flag in out
    assert "token slots per block (default: 16)" in " ".join(out.split())


def test_notes_are_the_comments_beside_the_fields() -> None:
    notes = cli.field_notes(AppConfig)
    assert notes["secret_file"].startswith("shared by routers and workers")
    assert cli.field_notes(EngineConfig)["max_num_seqs"] == "sequences in one step"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["required", "baton --help"]),
        (["sreve"], ["sreve"]),
        (["serve", "--prefil", "1"], ["--prefil"]),  # no abbreviations
        (["serve", "--port"], ["--port"]),
        (["serve", "--port", "99999"], ["--port: 99999", "65535"]),
        (["serve", "--transport", "nxil"], ["--transport: 'nxil'", "nixl"]),
        (["serve", "--kv-blocks", "many"], ["--kv-blocks: 'many'"]),
        (["serve", "--config", "/nonexistent.yaml"], ["/nonexistent.yaml", "No such file"]),
        (["fetch", "no-such-model"], ["no-such-model", "smollm2-135m-instruct"]),
        (["serve", "--model", "no-such-model", "--port", "0"], ["--port: 0"]),
    ],
)
def test_wrong_use(argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, *argv)
    assert status == 2
    assert out == ""
    assert err.startswith("baton: error: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err


def test_help_needs_neither_torch_nor_ray() -> None:
    program = (
        "import sys; from services import cli\n"
        "try: cli.main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'ray', 'numpy', 'nixl', 'fastapi', 'tokenizers'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True, stdout=subprocess.DEVNULL)
