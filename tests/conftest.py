"""Markers from the path: ``pytest -m unit`` runs what lies in ``tests/unit``."""

from pathlib import Path

import pytest

from services.machine import calm_openmp
from services.warm_kernels import warm_kernels

TESTS = Path(__file__).parent

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if any(not item.path.is_relative_to(TESTS / "unit") for item in items):
        # Workers that compile are slower to start than tests wait.
        warm_kernels(lambda text: print(f"\n{text}"))
    for item in items:
        if item.path.is_relative_to(TESTS):
            item.add_marker(item.path.relative_to(TESTS).parts[0])
