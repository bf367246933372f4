"""Metrics on Kubernetes: the chart's monitors against the Prometheus configuration that is tested.

``deploy/observability/prometheus.yaml`` is what tests/serve runs a real Prometheus with. Here each
monitor is held against it, against the pods that it selects, and against what the rules ask for.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from router.scraping import Target, discovery
from tests.support.chart import ROOT, Rendered, refusal, render
from tests.support.network import Object, selects

OBSERVABILITY = ROOT / "deploy" / "observability"
PROMETHEUS = yaml.safe_load((OBSERVABILITY / "prometheus.yaml").read_text())
(JOB,) = PROMETHEUS["scrape_configs"]
ALL_ROLES = {role: {"replicas": 1} for role in ("router", "prefill", "decode", "mixed")}
METERED = {"router", "prefill", "decode", "mixed"}


def monitored(kind: str, **settings: Any) -> Rendered:
    return render(ALL_ROLES | {"monitoring": {kind: {"enabled": True} | settings}})


def selected(chart: Rendered, selector: Object) -> set[str]:
    """The roles whose pods a LabelSelector fits."""
    return {
        role
        for role, template in chart.pods().items()
        if selects(selector, template["metadata"]["labels"])
    }


def container_port(chart: Rendered, role: str, name: str) -> int | None:
    """The number of a named port of a role's pod, as Kubernetes looks it up."""
    containers = chart.pods()[role]["spec"]["containers"]
    ports = [port for each in containers for port in each.get("ports", ()) if port["name"] == name]
    assert len(ports) < 2
    return ports[0]["containerPort"] if ports else None


def endpoint(chart: Rendered, kind: str) -> Object:
    spec = chart.one(kind)["spec"]
    (only,) = spec["podMetricsEndpoints" if kind == "PodMonitor" else "endpoints"]
    return dict(only)


def test_a_pod_monitor_reads_each_router_and_worker() -> None:
    chart = monitored("podMonitor")
    assert selected(chart, chart.one("PodMonitor")["spec"]["selector"]) == METERED
    port = endpoint(chart, "PodMonitor")["port"]
    for role in METERED:
        assert container_port(chart, role, port) == chart.serve_args()["metrics_port"]


def test_a_service_monitor_reads_the_same_through_a_service() -> None:
    chart = monitored("serviceMonitor")
    monitor = chart.one("ServiceMonitor")["spec"]
    found = [
        each
        for each in chart.all("Service")
        if selects(monitor["selector"], each["metadata"]["labels"])
    ]
    (service,) = found  # and not that of clients, which has another port
    (port,) = service["spec"]["ports"]
    assert port["name"] == endpoint(chart, "ServiceMonitor")["port"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"]
    roles = selected(chart, {"matchLabels": service["spec"]["selector"]})
    with_port = {role for role in roles if container_port(chart, role, port["targetPort"])}
    assert with_port == METERED, "the head has no such port, and so no endpoint"


@pytest.mark.parametrize("kind", ["podMonitor", "serviceMonitor"])
def test_targets_have_the_labels_that_rules_ask_for(kind: str) -> None:
    chart = monitored(kind)
    one = endpoint(chart, kind[0].upper() + kind[1:])
    assert one["honorLabels"] is JOB["honor_labels"] is True
    set_by = {each["targetLabel"]: each for each in one["relabelings"]}
    assert set_by["job"]["replacement"] == JOB["job_name"]
    (label,) = set_by["role"]["sourceLabels"]
    assert label == "__meta_kubernetes_pod_label_" + re.sub(r"\W", "_", "baton/role")
    for role, template in chart.pods().items():
        assert template["metadata"]["labels"]["baton/role"] == role
    rules = (OBSERVABILITY / "alerts.yaml").read_text()
    assert set(re.findall(r'job="([^"]*)"', rules)) == {JOB["job_name"]}
    asked = {
        label
        for labels in re.findall(r"up\{(.*?)\}", rules)
        for label in re.findall(r"(\w+)=", labels)
    }
    assert {"job", "role"} <= asked <= set_by.keys()


def test_a_served_name_is_the_targets_model() -> None:
    values = {"config": {"served_model_name": "m"}}
    chart = render(ALL_ROLES | values | {"monitoring": {"podMonitor": {"enabled": True}}})
    assert {"targetLabel": "model", "replacement": "m"} in endpoint(chart, "PodMonitor")[
        "relabelings"
    ]


def test_a_scrape_config_is_the_tested_prometheus_yaml() -> None:
    chart = monitored("scrapeConfig")
    spec = chart.one("ScrapeConfig")["spec"]
    (sd,), (tested,) = spec["httpSDConfigs"], JOB["http_sd_configs"]
    service = chart.one("Service")
    base = f"http://{service['metadata']['name']}.{service['metadata']['namespace']}.svc:8000"
    assert sd["url"] == base + tested["url"].removeprefix("http://127.0.0.1:8000")
    assert spec["jobName"] == JOB["job_name"]
    assert spec["honorLabels"] is True
    ours = [
        {"source_labels": each["sourceLabels"], "target_label": each["targetLabel"]}
        for each in spec["relabelings"]
        if "sourceLabels" in each
    ]
    assert ours == JOB["relabel_configs"]
    (target,) = discovery([Target("10.0.0.1", 9400, "router", "router-1", "m")])
    asked = {label for each in ours for label in each["source_labels"]}
    assert asked <= target["labels"].keys(), "what routers tell"


def test_where_keys_are_asked_for_a_scrape_config_needs_one() -> None:
    keys = {"secrets": {"apiKeys": {"existingSecret": "keys"}}}
    asking = keys | {"monitoring": {"scrapeConfig": {"enabled": True}}}
    assert "monitoring.scrapeConfig.apiKey" in refusal(asking)
    monitor = {"enabled": True, "apiKey": {"name": "one-key", "key": "token"}}
    chart = render(keys | {"monitoring": {"scrapeConfig": monitor}})
    (sd,) = chart.one("ScrapeConfig")["spec"]["httpSDConfigs"]
    assert sd["authorization"] == {"credentials": {"name": "one-key", "key": "token"}}


def test_settings_of_a_monitor_have_effect() -> None:
    extra = [{"targetLabel": "cluster", "replacement": "a"}]
    drop = [{"sourceLabels": ["__name__"], "regex": "python_.*", "action": "drop"}]
    settings: dict[str, Any] = {
        "interval": "15s", "scrapeTimeout": "9s", "labels": {"release": "p"},
        "annotations": {"a": "b"}, "relabelings": extra, "metricRelabelings": drop,
    }  # fmt: skip
    for kind in ("podMonitor", "serviceMonitor", "scrapeConfig"):
        chart = monitored(kind, **settings)
        made = chart.one(kind[0].upper() + kind[1:])
        assert made["metadata"]["labels"]["release"] == "p"
        assert made["metadata"]["annotations"] == {"a": "b"}
        alone = kind == "scrapeConfig"
        how = made["spec"] if alone else endpoint(chart, made["kind"])
        assert how["scrapeInterval" if alone else "interval"] == "15s"
        assert how["scrapeTimeout"] == "9s"
        assert how["relabelings"][-1:] == extra
        assert how["metricRelabelings"] == drop


@pytest.mark.parametrize("pair", [("podMonitor", "serviceMonitor"), ("podMonitor", "scrapeConfig")])
def test_two_monitors_of_the_same_processes_are_refused(pair: tuple[str, str]) -> None:
    message = refusal({"monitoring": {kind: {"enabled": True} for kind in pair}})
    assert f"{pair[0]} and {pair[1]}" in message
    assert "enable one of them" in message


def test_rules_are_those_of_the_repository() -> None:
    chart = monitored("prometheusRule", labels={"release": "p"})
    rule = chart.one("PrometheusRule")
    groups = [
        group
        for name in ("rules.yaml", "alerts.yaml")
        for group in yaml.safe_load((OBSERVABILITY / name).read_text())["groups"]
    ]
    assert rule["spec"]["groups"] == groups
    assert rule["metadata"]["labels"]["release"] == "p"


def test_boards_are_those_of_the_repository() -> None:
    chart = monitored("dashboards", annotations={"grafana_folder": "Baton"})
    boards: dict[str, Path] = {
        path.name: path for path in (OBSERVABILITY / "dashboards").glob("*.json")
    }
    maps = chart.all("ConfigMap")
    assert len(boards) > 3
    assert {file: json.loads(text) for each in maps for file, text in each["data"].items()} == {
        name: json.loads(path.read_text()) for name, path in boards.items()
    }
    for each in maps:
        assert each["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert each["metadata"]["annotations"] == {"grafana_folder": "Baton"}
        assert len(json.dumps(each["data"])) < 2**20, "a ConfigMap holds 1 MiB"


def test_nothing_of_it_is_there_unless_it_is_enabled() -> None:
    kinds = {each["kind"] for each in render().objects}
    assert not kinds & {
        "PodMonitor", "ServiceMonitor", "ScrapeConfig", "PrometheusRule", "ConfigMap",
    }  # fmt: skip
