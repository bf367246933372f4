"""Markers from the path: ``pytest -m unit`` runs what lies in ``tests/unit``.

``make test`` runs two processes side by side (pytest-xdist): half of a test's time is waiting.
"""

from pathlib import Path

import pytest

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
    items.sort(key=lambda item: not _deploys(item))  # stable; first what takes longest
    for item in items:
        if item.path.is_relative_to(TESTS):
            item.add_marker(item.path.relative_to(TESTS).parts[0])
            group = "deployments" if _deploys(item) else str(item.path)
            item.add_marker(pytest.mark.xdist_group(group))


def _deploys(item: pytest.Item) -> bool:
    return any(item.path.is_relative_to(TESTS / path) for path in DEPLOYMENTS)
