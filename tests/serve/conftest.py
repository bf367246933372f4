"""A private local Ray for tests in this process."""

import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from services.serve import ray_environment, short_folder

if TYPE_CHECKING:
    from tests.support.reference import Judge


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """Ray in this process, as ``baton serve`` starts it, without Serve."""
    folder = Path(tempfile.mkdtemp(prefix="baton-test-", dir=short_folder()))
    before = dict(os.environ)
    os.environ.update(ray_environment(folder, 0))
    with warnings.catch_warnings(action="ignore"):  # Ray's own, at import and start
        from services import own_ray

        own_ray.start_ray(folder)
    try:
        yield
    finally:
        own_ray.stop_ray(10)
        os.environ.clear()
        os.environ.update(before)
        _remove(folder)


def _remove(folder: Path) -> None:
    """Ray's last processes may still write for a moment."""
    deadline = time.monotonic() + 10
    while folder.exists() and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small model with the default model's tokenizer."""
    from tests.support import scaling

    return scaling.small_model(tmp_path_factory.mktemp("scaling"))


@pytest.fixture(scope="session")
def small_judge(small_model: Path) -> "Judge":
    """Of what that model answers."""
    from tests.support import scaling

    return scaling.judge_of(small_model)
