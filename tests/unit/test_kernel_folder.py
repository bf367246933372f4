"""Compiled kernels are found again by the text of all that they were compiled from."""

import shutil
import subprocess
import sys
from pathlib import Path

from services.engine import kernel_folder as module
from services.engine.kernel_folder import kernel_folder

HERE = Path(module.__file__).parent
COMPILE = """
import pathlib, sys
source = pathlib.Path(sys.argv[1])
source.write_text("def double(x):\\n    return 2 * x\\n")
sys.path.insert(0, str(source.parent))
from doubling import double
from services.engine.compiled import compiled
print(compiled("int64(int64)")(double)(21))
"""


def test_a_change_of_any_kernel_file_is_another_folder(tmp_path: Path) -> None:
    copy = tmp_path / "engine"
    shutil.copytree(HERE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    before = kernel_folder(copy)
    assert before == kernel_folder()
    # A kernel that is inlined elsewhere: numba itself would go by the other file alone.
    with (copy / "kernels.py").open("a") as file:
        file.write("# changed\n")
    after = kernel_folder(copy)
    assert after != before
    with (copy / "scheduler.py").open("a") as file:
        file.write("# nothing is compiled from this one\n")
    assert kernel_folder(copy) == after


def run(tmp_path: Path, cache: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(tmp_path / "doubling.py")],
        env={"XDG_CACHE_HOME": cache, "PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_compiled_code_is_kept(tmp_path: Path) -> None:
    assert run(tmp_path, str(tmp_path / "cache")).endswith("42\n")
    assert list((tmp_path / "cache/baton/kernels").rglob("doubling.*.nbi"))


def test_without_a_place_to_keep_it_all_works(tmp_path: Path) -> None:
    said = run(tmp_path, "/dev/null")
    assert "42\n" in said
    assert "/dev/null/baton/kernels" in said
