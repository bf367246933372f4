"""What Prometheus's own tool says of our configuration, rules and alerts."""

import subprocess

from tests.support.prometheus import need
from tests.support.promql import FOLDER

TIMEOUT_S = 120


def promtool(*args: str) -> str:
    """What it prints; asserts that it is content."""
    done = subprocess.run(
        [need("promtool"), *args], cwd=FOLDER, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_accepts_the_configuration_and_all_rules() -> None:
    """B109, where it is about the form of rules."""
    found = promtool("check", "config", "prometheus.yaml")
    assert "2 rule files found" in found
    promtool("check", "rules", "rules.yaml", "alerts.yaml")


def test_every_alert_fires_when_it_should_and_only_then() -> None:
    files = sorted(path.name for path in FOLDER.glob("*_test.yaml"))
    assert len(files) >= 2
    assert promtool("test", "rules", *files).count("SUCCESS") == len(files)
