"""Prometheus finds the targets of a router that asks for keys, by the shipped configuration.

Which has the line for that as a comment: it is taken as it stands there, but for the file's path.
"""

import asyncio
import re
from pathlib import Path
from typing import Any

import yaml

from tests.integration.deployed import deployed, run
from tests.support.prometheus import prometheus
from tests.support.promql import FOLDER
from tests.support.serving import until

FOUND_S = 30


def authorization(key_file: Path) -> dict[str, Any]:
    """What prometheus.yaml says that one should write there."""
    (line,) = re.findall(r"# (authorization: .*)", (FOLDER / "prometheus.yaml").read_text())
    said: dict[str, Any] = yaml.safe_load(line)["authorization"]
    return {**said, "credentials_file": str(key_file)}


def test_prometheus_shows_a_key_where_it_is_asked_for_one(tmp_path: Path) -> None:
    key_file = tmp_path / "baton-api-key"
    key_file.write_text("k1\n")

    def watch(url: str) -> set[str]:
        with prometheus(url, tmp_path, authorization(key_file)) as server:
            until(server.targets, "there are targets", FOUND_S)
            return set(server.targets())

    async def scenario() -> None:
        async with deployed(api_keys=("k1",)) as system:
            assert (await system.http.get("/internal/prometheus/targets")).status_code == 401
            assert await asyncio.to_thread(watch, system.url) == {"R"}

    run(scenario)
