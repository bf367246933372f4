"""docs/kubernetes.md names what there is: values, objects, labels, flags, checks, commands.

The commands themselves need a cluster; what can be wrong in them without one is looked at here.
"""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from router.config import RouterConfig
from services.cli import build_parser
from services.config import AppConfig, WorkerConfig, keys
from tests.support.chart import (
    ROOT,
    VALUE_SETS,
    Rendered,
    chart_values,
    render,
    value_set,
    with_value,
)

PAGE = (ROOT / "docs" / "kubernetes.md").read_text()


def commands() -> list[list[str]]:
    """The words of each line after a ``$`` in a console block."""
    blocks = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    return [shlex.split(line[2:]) for line in lines if line.startswith("$ ")]


def of(program: str, *words: str) -> list[list[str]]:
    """The commands that begin so; kubectl's words for the namespace are left out."""
    found = []
    for command in commands():
        if command[:3] == ["kubectl", "-n", "baton"]:
            command = ["kubectl", *command[3:]]
        if command[: 1 + len(words)] == [program, *words]:
            found.append(command)
    assert found, f"{program} {' '.join(words)}"
    return found


@pytest.fixture(scope="module")
def chart() -> Rendered:
    return render({}, name="baton", namespace="baton")


@pytest.mark.parametrize("action", ["install", "upgrade"])
def test_what_helm_is_asked_for_renders(action: str) -> None:
    for words in of("helm", action):
        if words[2:4] != ["baton", "helm/baton"]:
            assert "kuberay/kuberay-operator" in words
            continue
        values: dict[str, Any] = {}
        for flag, value in zip(words, words[1:], strict=False):
            if flag == "-f" and value != "mine.yaml":  # the reader's own
                assert (ROOT / value).is_file(), value
                values = value_set(Path(value).stem)
            elif flag == "--set":
                key, _, text = value.partition("=")
                values = with_value(values, key, yaml.safe_load(text))
        assert render(values, name="baton", namespace="baton").all("RayService")
        assert words[words.index("--namespace") + 1] == "baton"


def test_every_value_that_is_named_is_there() -> None:
    values = chart_values()
    named = re.findall(r"[`']((?:[a-z][A-Za-z]*)(?:\.[A-Za-z_]+)+)[:=`']", PAGE)
    top = set(values) | {"shm", "resources"}
    paths = {name for name in named if name.split(".")[0] in top}
    assert len(paths) >= 20
    for path in paths:
        first, *rest = path.split(".")
        if first == "config":
            assert rest[0] in keys(AppConfig), path
            continue
        at = values if first in values else values["prefill"]  # of any role
        if first != "autoscaling" and len(rest) > 1 and rest[0] == "config":
            assert rest[1] in keys(RouterConfig if first == "router" else WorkerConfig), path
            continue
        for key in (first, *rest):
            assert key in at, f"{path}: there is no {key}"
            at = at[key]


def test_keys_of_roles_and_of_the_configuration() -> None:
    values = chart_values()
    for key in ("replicas", "maxReplicas", "minReplicas", "terminationGracePeriodSeconds"):
        assert f"`{key}`" in PAGE
        assert key in values["decode"]
    config = keys(AppConfig)
    known = set(config) | set(keys(config["router"])) | set(keys(config["decode"]))
    for key in ("drain_s", "request_timeout_s", "kv_blocks"):
        assert f"`{key}`" in PAGE
        assert key in known


def test_objects_labels_and_containers(chart: Rendered) -> None:
    assert chart.one("RayService", "baton")
    service = chart.one("Service", "baton")
    assert [port["port"] for port in service["spec"]["ports"]] == [8000]
    for words in of("kubectl", "wait") + of("kubectl", "port-forward"):
        assert any(word in ("rayservice/baton", "svc/baton") for word in words), words
    roles = {role: template["metadata"]["labels"] for role, template in chart.pods().items()}
    for role in re.findall(r"baton/role=(\w+)", PAGE):
        assert roles[role]["baton/role"] == role
    containers = {c["name"] for pod in chart.pods().values() for c in pod["spec"]["containers"]}
    named = set(re.findall(r"-c (ray-\w+)", PAGE))
    assert named
    assert named <= containers


def test_the_running_cluster_is_told_of_the_role_that_the_values_are_about(chart: Rendered) -> None:
    (scale,) = [words for words in of("helm", "upgrade") if "--set" in words]
    key, _, number = scale[-1].partition("=")
    role, _, _ = key.partition(".")
    (patch,) = of("kubectl", "patch", "raycluster")
    groups = chart.cluster()["workerGroupSpecs"]
    changed = {}
    for change in json.loads(patch[-1]):
        *above, place, name = change["path"].split("/")
        assert above == ["", "spec", "workerGroupSpecs"]
        assert groups[int(place)]["groupName"] == role
        assert name in groups[int(place)]
        changed[name] = change["value"]
    assert changed == dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), int(number))


def test_ports_and_the_metrics_of_the_check(chart: Rendered) -> None:
    ports = {
        port["containerPort"]
        for pod in chart.pods().values()
        for container in pod["spec"]["containers"]
        for port in container["ports"]
    }
    assert {int(port) for port in re.findall(r"\):(\d+)/metrics", PAGE)} <= ports
    contract = (ROOT / "docs" / "observability.md").read_text()
    for name in re.findall(r"baton_\w+_total|baton_\w+_seconds", PAGE):
        assert f"`{name}`" in contract, name


def test_what_baton_is_asked_for_is_a_command() -> None:
    parser = build_parser()
    asked = re.findall(r"-- (baton [a-z -]+(?:[a-z,]+)?)(?: \|\||$)", PAGE, re.MULTILINE)
    assert len(asked) >= 2
    for line in asked:
        parser.parse_args(shlex.split(line)[1:])
    for name in set(re.findall(r"`baton (\w+)", PAGE)):
        assert parser.parse_args([name]).command == name


def test_checks_of_the_doctor() -> None:
    code = "".join(path.read_text() for path in (ROOT / "services" / "doctor").glob("*.py"))
    known = set(re.findall(r'(?:Finding|Try)\(\s*f?"([a-z {}]+)"', code))
    known |= {name.replace("{tls}", tls) for name in known for tls in ("rc", "srd")}
    table = PAGE.split("### What RDMA needs")[1].split("\n\n")[1]
    named = set(re.findall(r"\| `([a-z ]+)`[^|]*\|$", table, re.MULTILINE))
    named |= set(re.findall(r"`((?:ucx |locked )[a-z ]+)`", PAGE))
    assert {"rdma", "locked memory", "shared memory", "ucx as set", "gpudirect"} <= named
    assert named <= known


def test_sets_in_which_kv_has_no_network_but_the_adapters() -> None:
    (named,) = re.findall(r"names an adapter only, as in (.*?), TCP", PAGE)
    devices = {name: value_set(name).get("rdma", {}).get("netDevices") for name in VALUE_SETS}
    assert {name for name, device in devices.items() if device} == set(re.findall("`(.*?)`", named))


def test_sets_whose_cache_needs_a_class_for_many_nodes() -> None:
    defaults = chart_values()["modelCache"]
    caches = {name: defaults | value_set(name).get("modelCache", {}) for name in VALUE_SETS}
    shared = {
        name: cache
        for name, cache in caches.items()
        if cache["enabled"] and cache["accessModes"] == ["ReadWriteMany"]
    }
    (by_default,) = re.findall(r"The sets (.*?) take the cluster's default class", PAGE)
    (named,) = re.findall(r"The sets (.*?) name classes", PAGE)
    for text, with_class in ((by_default, False), (named, True)):
        found = {
            name for name, cache in shared.items() if bool(cache["storageClassName"]) is with_class
        }
        assert found == set(re.findall("`(.*?)`", text))


def test_a_secret_for_what_renders_without_the_cluster() -> None:
    (made,) = [words for words in of("kubectl", "create", "secret") if "openssl" in words[-1]]
    (words,) = of("helm", "template")
    key, _, name = words[-1].partition("=")
    assert made[-2] == name
    values = with_value({}, key, name)
    assert render(values, "baton", "baton").files == render(values, "baton", "baton").files
    (source,) = (
        each["secret"]
        for each in render(values).pods()["decode"]["spec"]["volumes"]
        if each["name"] == "cluster-secret"
    )
    assert source["secretName"] == name
    assert made[-1].startswith(f"--from-literal={source['items'][0]['key']}=")


def test_make_and_files() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for words in of("make"):
        assert re.search(rf"^{words[1]}:.*##", makefile, re.MULTILINE), words
    assert re.search(r"^requirements:.*##", makefile, re.MULTILINE)
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    for argument in re.findall(r"--build-arg (\w+)=", PAGE):
        assert f"ARG {argument}=" in dockerfile, argument
    assert "/opt/model/current" in dockerfile


def test_anchors_lead_somewhere() -> None:
    def anchors(page: str) -> set[str]:
        titles = re.findall(r"^#+ (.*)$", (ROOT / "docs" / page).read_text(), re.MULTILINE)
        return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}

    links = re.findall(r"\]\(([\w./]*)#([\w-]+)\)", PAGE)
    assert links
    for page, anchor in links:
        assert anchor in anchors(page or "kubernetes.md"), f"{page}#{anchor}"
