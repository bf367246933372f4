"""Our load test's medians at a server of fixed delays are those of ``vllm bench serve``.

In the full form only, and where `make bench-tools` has installed the tool: too much for each run.
"""

from pathlib import Path

import pytest

from services.fetch import DEFAULT_MODEL, fetch
from tests.bench_tools import Load, against_stub
from tests.support import vllm_bench

LOAD = Load(count=40, rate=10, inputs=(32, 256), outputs=(16, 48))


def test_medians_at_a_stub_are_those_of_a_public_tool(full: bool) -> None:
    if not full:
        pytest.skip("only in the full form")
    if not vllm_bench.installed():
        pytest.skip(f"vllm bench serve is not in {vllm_bench.folder()}: make bench-tools puts it")
    python: Path = vllm_bench.environment(print)
    part = against_stub(fetch(DEFAULT_MODEL), python, LOAD, rounds=2, seed=2)
    assert part.agrees, str(part)
