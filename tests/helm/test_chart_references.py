"""What one template names is in another one or in the code: ports, paths, secrets, labels, files.

With all that is optional on and off, for each set of values, and with the longest names.
"""

import ast
import copy
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.cli import build_parser
from services.config import from_yaml
from tests.support.chart import ROOT, Rendered, refusal
from tests.support.chart_references import (
    closed_ports,
    lost_mounts,
    missing_objects,
    missing_secrets,
    nodes,
    selectors_of_nothing,
    services_without_port,
)
from tests.support.chart_variants import LONG, VARIANTS, rendered


def package(name: str) -> Path:
    """Where a package is installed; importing Ray would take seconds."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


RAY = package("ray")
RAY_PATHS = {
    "/-/healthz": "serve/_private/haproxy.py",
    "/-/routes": "serve/_private/haproxy_templates.py",
    "/api/local_raylet_healthz": "dashboard/modules/reporter/healthz_agent.py",
    "/api/gcs_healthz": "dashboard/modules/reporter/reporter_head.py",
}
OPTIONS_OF_NOTHING = {"block"}  # KubeRay adds it itself
AGENT_PORT = "52365"  # where every node's Ray agent answers probes

CASES = [*((variant, "baton") for variant in VARIANTS), ("everything-on", LONG)]


each_case = pytest.mark.parametrize(("variant", "name"), CASES)
each_variant = pytest.mark.parametrize("variant", VARIANTS)


@each_case
def test_objects_that_are_named_are_there(variant: str, name: str) -> None:
    chart, values = rendered(variant, name), VARIANTS[variant]
    assert missing_secrets(chart, values) == []
    assert missing_objects(chart, values) == []
    assert services_without_port(chart, values) == []


@each_case
def test_selectors_find_pods_and_ports_are_open_in_them(variant: str, name: str) -> None:
    chart = rendered(variant, name)
    assert selectors_of_nothing(chart, VARIANTS[variant]) == []
    assert [port for port in closed_ports(chart) if not port.endswith(f": {AGENT_PORT}")] == []
    assert f"_AGENT_LISTEN_PORT = {AGENT_PORT}" in ray_source("_private/ray_constants.py")


@each_variant
def test_volumes_and_mounts_are_pairs(variant: str) -> None:
    assert lost_mounts(rendered(variant)) == []


def test_each_kind_of_loose_end_is_found() -> None:
    values = VARIANTS["everything-on"]
    whole = rendered("everything-on")
    assert missing_secrets(without(whole, "Secret"), values)
    for kind in ("PersistentVolumeClaim", "ServiceAccount", "Role"):
        assert missing_objects(without(whole, kind), values), kind
    assert services_without_port(without(whole, "Service"), values)

    broken = without(whole, "")
    broken.one("Service")["spec"]["ports"][0] |= {"port": 1, "targetPort": "nowhere"}
    assert closed_ports(broken)[0] == "Service baton: nowhere"
    assert services_without_port(broken, values)
    broken.one("PodMonitor")["spec"]["selector"]["matchLabels"]["other"] = "thing"
    assert any("PodMonitor" in found for found in selectors_of_nothing(broken, values))
    (container, *_) = broken.pods()["decode"]["spec"]["containers"]
    container["volumeMounts"][0]["name"] = "nothing"
    assert "decode: nothing" in lost_mounts(broken)


def without(chart: Rendered, kind: str) -> Rendered:
    """A copy that may be changed, but for the objects of a kind."""
    kept = [thing for thing in chart.objects if thing["kind"] != kind]
    return Rendered(chart.files, tuple(copy.deepcopy(kept)))


# --- HTTP paths ----------------------------------------------------------------------------------


@cache
def routes() -> set[str]:
    """Of the router, as its source lists them; ``{...}`` is any text."""
    tree = ast.parse((ROOT / "router" / "api.py").read_text())
    return {
        element.elts[1].value
        for element in ast.walk(tree)
        if isinstance(element, ast.Tuple)
        and len(element.elts) == 3
        and isinstance(element.elts[0], ast.Constant)
        and isinstance(element.elts[1], ast.Constant)
        and element.elts[0].value in ("GET", "POST")
    }


def paths(chart: Rendered) -> Iterator[tuple[str, str]]:
    """HTTP paths that the chart asks for, with where."""
    for thing in chart.objects:
        if thing["kind"] == "ConfigMap":
            continue  # boards, whose links are Grafana's
        for place, node in nodes(thing, f"{thing['kind']} {thing['metadata']['name']}: "):
            if place.endswith(".httpGet"):
                yield place, node["path"]
            elif place.endswith(".httpHealthCheck"):
                yield place, node["requestPath"]
            elif place.endswith((".podMetricsEndpoints[]", ".endpoints[]")):
                yield place, node.get("path", "/metrics")
            elif isinstance(node, str) and not place.endswith((".expr", ".description")):
                urls = re.findall(r"https?://[\w.:$(){}-]+(/[\w/.?=&-]*)", node)
                asked = re.findall(r"""ask\(["'](/[^"']*)["']""", node)
                yield from ((place, path) for path in urls + asked)


def known_path(path: str) -> bool:
    bare = path.partition("?")[0]
    if bare in RAY_PATHS:
        return bare in (RAY / RAY_PATHS[bare]).read_text()
    return bare in routes() or bare in ("", "/", "/v1", "/console")


@each_variant
def test_paths_are_routes(variant: str) -> None:
    asked = list(paths(rendered(variant)))
    assert asked
    unknown = [
        (place, path)
        for place, path in asked
        if not known_path(path) and path not in str(VARIANTS[variant])
    ]
    assert unknown == []


def test_a_path_that_is_no_route_is_found() -> None:
    assert known_path("/ready?settled=1")
    assert not known_path("/readyz")
    assert not known_path("/-/health")


# --- the application -----------------------------------------------------------------------------


@each_variant
def test_the_application_takes_its_arguments(variant: str) -> None:
    chart = rendered(variant)
    config = from_yaml(chart.serve_args())
    (application,) = chart.serve_config()["applications"]
    # without a number, Baton decides on it
    numbers = {each["name"]: each.get("num_replicas") for each in application["deployments"]}
    for role, default in (("router", 2), ("prefill", 1), ("decode", 1), ("mixed", 0)):
        wanted = VARIANTS[variant].get(role, {}).get("replicas", default)
        number = numbers.get(deployment_of(role), 0)
        assert number == wanted or (number is None and config.autoscaling.scales), role
        if role != "router":
            assert bool(getattr(config, role).replicas) == bool(wanted), role


def constant(name: str) -> Any:
    """Of services/app.py, which imports Ray."""
    for node in ast.parse((ROOT / "services" / "app.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise AssertionError(f"services/app.py has no {name}")


def deployment_of(role: str) -> str:
    return "Router" if role == "router" else str(constant("DEPLOYMENTS")[role])


@each_variant
def test_each_deployment_of_the_application_goes_to_pods_of_its_role(variant: str) -> None:
    chart = rendered(variant)
    (application,) = chart.serve_config()["applications"]
    assert application["name"] == constant("APP_NAME")
    module, _, function = application["import_path"].partition(":")
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
    assert function in {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}

    roles = {deployment_of(role): role for role in ("router", "prefill", "decode", "mixed")}
    groups = {g["groupName"]: g for g in chart.cluster()["workerGroupSpecs"]}
    placed = {}
    for deployment in application["deployments"]:
        role = roles[deployment["name"]]
        wanted = deployment["ray_actor_options"]["label_selector"]
        fitting = [
            name for name, group in groups.items() if wanted.items() <= group["labels"].items()
        ]
        assert fitting == [role], f"{deployment['name']} would run in {fitting}"
        placed[role] = deployment
    config = from_yaml(application["args"])
    assert placed.keys() == {"router", *(role for role, _ in config.pools())}
    assert groups.keys() == placed.keys()


@each_variant
def test_files_in_the_arguments_are_mounted_where_they_are_read(variant: str) -> None:
    """The cluster's secret by who builds the application, on any node; API keys by routers."""
    chart = rendered(variant)
    args = chart.serve_args()
    files = {args["secret_file"]: set(chart.pods())}
    if "api_keys_file" in args["router"]:
        files[args["router"]["api_keys_file"]] = {"router"}
    for file, readers in files.items():
        mounted = {
            name
            for name, template in chart.pods().items()
            for mount in template["spec"]["containers"][0]["volumeMounts"]
            if file.startswith(f"{mount['mountPath'].rstrip('/')}/")
        }
        assert mounted == readers, file


# --- Ray and the image ---------------------------------------------------------------------------


@cache
def ray_source(path: str) -> str:
    return (RAY / path).read_text()


@each_variant
def test_ray_knows_its_options_and_variables(variant: str) -> None:
    chart = rendered(variant)
    cluster = chart.cluster()
    start = ray_source("scripts/scripts.py")
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        for option in group.get("rayStartParams", {}).keys() - OPTIONS_OF_NOTHING:
            assert f'"--{option}"' in start, option
    serve = ray_source("serve/_private/constants.py")
    for name, template in chart.pods().items():
        for container in template["spec"]["containers"]:
            for variable in container.get("env", ()):
                if variable["name"].startswith("RAY_SERVE_"):
                    assert f'"{variable["name"]}"' in serve, f"{name}: {variable['name']}"


PORTS = {
    8404: ("serve/_private/constants.py", '"RAY_SERVE_HAPROXY_STATS_PORT", 8404'),
    8500: ("serve/_private/constants.py", '"RAY_SERVE_FALLBACK_PROXY_HTTP_PORT", 8500'),
    9101: ("serve/_private/constants.py", '"RAY_SERVE_HAPROXY_METRICS_PORT", "9101"'),
    30000: ("serve/_private/constants.py", '"RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT", "30000"'),
    31000: ("serve/_private/constants.py", '"RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT", "31000"'),
    6379: ("_private/ray_constants.py", "DEFAULT_PORT = 6379"),
    8265: ("_private/ray_constants.py", "DEFAULT_DASHBOARD_PORT = 8265"),
    52365: ("_private/ray_constants.py", "DEFAULT_DASHBOARD_AGENT_LISTEN_PORT = 52365"),
    10002: ("scripts/scripts.py", "default=10002"),
    19999: ("scripts/scripts.py", "default=19999"),
}


@pytest.mark.parametrize("port", PORTS)
def test_a_port_that_ray_or_serve_has_is_not_ours(port: int) -> None:
    source, text = PORTS[port]
    assert text in ray_source(source)
    assert f"config.metrics_port: {port} is the port of" in refusal(
        {"config": {"metrics_port": port}}
    )


def test_ports_that_pods_name_are_not_ours_either() -> None:
    ports = {
        port["containerPort"]
        for template in rendered("defaults").pods().values()
        for port in template["spec"]["containers"][0]["ports"]
    }
    for port in ports - {9400}:
        assert "config.metrics_port" in refusal({"config": {"metrics_port": port}}), port


def commands(chart: Rendered) -> Iterator[tuple[str, list[str]]]:
    """What the chart's own containers run."""
    for name, spec in chart.pod_specs():
        for path, node in nodes(spec, name):
            if path.endswith((".command", ".exec.command")) and node[0] != "true":
                yield path, node


@each_variant
def test_commands_are_in_the_image(variant: str) -> None:
    own = {action.dest: action for action in build_parser()._actions}["command"].choices
    for path, command in commands(rendered(variant)):
        if command[0] in ("sleep", "true"):
            continue  # of the tests' own sidecars
        words = " ".join(map(str, command))
        assert Path(command[0]).name in ("sh", "bash", "python3", "python", "baton"), path
        for subcommand in re.findall(r"\bbaton ([a-z]+)", words):
            assert subcommand in own, f"{path}: baton {subcommand}"


def test_what_the_image_must_have_is_made_by_the_dockerfile() -> None:
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    wrapper = {
        variable["value"]
        for template in rendered("defaults").pods().values()
        for variable in template["spec"]["containers"][0]["env"]
        if variable["name"] == "RAY_SERVE_HAPROXY_BINARY_PATH"
    }
    assert len(wrapper) == 1
    assert wrapper.pop() in dockerfile


def test_images_are_the_packages() -> None:
    version = yaml.safe_load((ROOT / "helm/baton/Chart.yaml").read_text())["appVersion"]
    images: set[Any] = {
        container["image"]
        for _, spec in rendered("defaults").pod_specs()
        for container in [*spec["containers"], *spec.get("initContainers", ())]
    }
    assert images == {f"ghcr.io/baton-serving/baton:{version}"}
