"""Who runs a test beside which others, when two processes do."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.conftest import lane_of

ROOT = Path(__file__).parents[2]
OWN = "tests/unit/test_lanes.py"
DEPLOYMENTS = {"tests/serve/test_registry_table.py", "tests/serve/test_readme.py"}


def test_a_lane_is_a_file_or_all_deployments() -> None:
    assert lane_of(f"{OWN}::test_a[x::y]") == OWN
    assert lane_of("tests/serve/test_serve.py::test_a") == "deployments"
    assert lane_of("tests/chaos/test_chaos_short.py::test_b") == "deployments"


def test_one_process_runs_a_lane() -> None:
    """With the flags of ``make test``, which what pytest and its plugins are may make void."""
    (flags,) = re.findall(
        r"^test:.*\n.*-m pytest (.*) \$\(ARGS\)", (ROOT / "Makefile").read_text(), re.M
    )
    tests = [*DEPLOYMENTS, f"{OWN}::{test_a_lane_is_a_file_or_all_deployments.__name__}"]
    command = [sys.executable, "-m", "pytest", *flags.split(), "-v", "-k", "table or flags or lane"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    ended = subprocess.run(
        [*command, *tests], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stdout
    ran = set(re.findall(r"\[(gw\d)\].* PASSED (tests/[^:]+)", ended.stdout))
    assert {file for _, file in ran} == {*DEPLOYMENTS, OWN}
    assert len({process for process, file in ran if file in DEPLOYMENTS}) == 1
