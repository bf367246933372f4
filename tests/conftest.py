"""Markers from the path: ``pytest -m unit`` runs what lies in ``tests/unit``.

``make test`` runs two processes side by side (pytest-xdist): half of a test's time is waiting.
"""

from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from services.machine import calm_openmp
from services.warm_kernels import warm_kernels

TESTS = Path(__file__).parent
# Tests of these start many processes, or keep all cores busy: one after the other.
DEPLOYMENTS = (
    "chaos",
    "serve",
    "helm/test_rendered_serves.py",
    "integration/test_proof.py",
    "integration/test_loadtest_command.py",
)

calm_openmp()  # before any test imports torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="all cases and counts of tests that have a short form"
    )


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether the full form was asked for: make faults, make equality."""
    return bool(request.config.getoption("--full"))


def pytest_configure(config: pytest.Config) -> None:
    for level in sorted(path.name for path in TESTS.iterdir() if path.is_dir()):
        if not level.startswith((".", "_")):
            config.addinivalue_line("markers", f"{level}: tests in tests/{level}")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Before the processes that run the tests: workers that compile are slower than tests wait."""
    if not hasattr(session.config, "workerinput"):
        warm_kernels(lambda text: print(f"\n{text}"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not _deploys(item.path))  # stable; first what takes longest
    for item in items:
        if item.path.is_relative_to(TESTS):
            item.add_marker(item.path.relative_to(TESTS).parts[0])


def lane_of(nodeid: str) -> str:
    """Tests of one lane are run by one process, in their order."""
    file = nodeid.partition("::")[0]
    return "deployments" if _deploys(TESTS.parent / file) else file


class Lanes(LoadScopeScheduling):
    """A file's tests share what its fixtures set up, and come in their order: one process runs them
    all. So it is with all of ``DEPLOYMENTS``. Own code, since the groups of pytest-xdist 3.8 do
    nothing under pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        return lane_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Lanes:
    return Lanes(config, log)


def _deploys(path: Path) -> bool:
    return any(path.is_relative_to(TESTS / part) for part in DEPLOYMENTS)
