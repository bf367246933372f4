"""Debian's Prometheus, with the configuration that we ship, against a deployment that runs.

Needs the package ``prometheus`` (``apt-get install prometheus``): without it a test skips and says
so, and in CI it fails.
"""

import contextlib
import json
import math
import os
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.promql import FOLDER
from tests.support.serving import free_port, until

START_S = 30
STOP_S = 10
SCRAPE = "500ms"  # what takes 5 s in the shipped configuration


def need(command: str) -> str:
    """The path of a Debian command; skips the test where it is not installed."""
    path = shutil.which(command)
    if path is None:
        text = f"needs {command}: apt-get install prometheus"
        if os.environ.get("CI"):
            pytest.fail(text)
        pytest.skip(text)
    return path


@dataclass
class Prometheus:
    """A server that answers queries."""

    url: str
    log: Path

    def get(self, path: str, **params: str) -> Any:
        """``data`` of an API call; raises AssertionError with Prometheus's error."""
        address = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(params)}"
        try:
            with urllib.request.urlopen(address, timeout=30) as response:
                return json.loads(response.read())["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{params}: {error.read().decode()}") from None

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Series of an expression, now: each with ``metric`` and ``value``."""
        data = self.get("query", query=expr)
        assert data["resultType"] in ("vector", "scalar"), expr
        if data["resultType"] == "scalar":
            return [{"metric": {}, "value": data["result"]}]
        found: list[dict[str, Any]] = data["result"]
        return found

    def numbers(self, expr: str) -> list[float]:
        """Those of the values that are numbers: an average of nothing is none."""
        values = [float(series["value"][1]) for series in self.query(expr)]
        return [value for value in values if math.isfinite(value)]

    def value(self, expr: str) -> float:
        """The only value."""
        (series,) = self.query(expr)
        return float(series["value"][1])

    def targets(self) -> dict[str, str]:
        """Health of each target, by the id of its process."""
        active = self.get("targets", state="active")["activeTargets"]
        return {target["labels"]["instance"]: target["health"] for target in active}

    def alerts(self) -> list[dict[str, Any]]:
        """Those that fire or are about to."""
        found: list[dict[str, Any]] = self.get("alerts")["alerts"]
        return found


@contextlib.contextmanager
def prometheus(
    api: str, folder: Path, authorization: dict[str, Any] | None = None
) -> Iterator[Prometheus]:
    """Prometheus on the shipped configuration, which finds everybody by the router at ``api``.

    Only the router's address and the times between scrapes differ, and ``authorization`` where the
    router asks for a key. ``folder`` holds its data.
    """
    command = need("prometheus")
    config = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": SCRAPE, "evaluation_interval": SCRAPE}
    config["rule_files"] = [str(_hurried(name, folder)) for name in config["rule_files"]]
    (job,) = config["scrape_configs"]
    (discovery,) = job["http_sd_configs"]
    discovery["url"] = discovery["url"].replace("http://127.0.0.1:8000", api)
    discovery["refresh_interval"] = SCRAPE
    if authorization is not None:
        discovery["authorization"] = authorization
    assert discovery["url"].startswith(api)
    file = folder / "prometheus.yaml"
    file.write_text(yaml.safe_dump(config))
    url, log = f"http://127.0.0.1:{free_port()}", folder / "prometheus.log"
    arguments = [
        f"--config.file={file}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={url.removeprefix('http://')}",
    ]
    with log.open("wb") as output:
        process = subprocess.Popen([command, *arguments], stdout=output, stderr=output)
    server = Prometheus(url, log)
    try:
        until(lambda: _ready(server, process), "Prometheus is ready", START_S)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _hurried(name: str, folder: Path) -> Path:
    """A file of rules, of which all are evaluated as often as it is scraped."""
    rules = yaml.safe_load((FOLDER / name).read_text())
    for group in rules["groups"]:
        group.pop("interval", None)
    (folder / name).write_text(yaml.safe_dump(rules, sort_keys=False))
    return folder / name


def _ready(server: Prometheus, process: "subprocess.Popen[bytes]") -> bool:
    assert process.poll() is None, server.log.read_text()
    try:
        with urllib.request.urlopen(f"{server.url}/-/ready", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def scrape(address: str, accept: str = "text/plain") -> str:
    """What a metrics port or ``/metrics`` says."""
    request = urllib.request.Request(address, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=30) as response:
        assert response.status == 200
        return str(response.read().decode())
