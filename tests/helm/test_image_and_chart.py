"""The image and the chart agree: who pods run as, what they start, what is in the environment.

``tests/unit/test_dockerfile.py`` shows that what is named here is in the image.
"""

from typing import Any

import pytest

from services.cli import build_parser
from tests.support.chart import ROOT, VALUE_SETS, Rendered, render, value_set
from tests.support.dockerfile import Dockerfile, read_dockerfile

ELSEWHERE = {"HOME", "XDG_CACHE_HOME"}  # the chart has volumes for these
STARTED = {"baton", "python3"}  # by pods themselves; Ray is started by KubeRay


@pytest.fixture(scope="module")
def image() -> Dockerfile:
    return read_dockerfile(ROOT / "deploy" / "Dockerfile")


@pytest.fixture(scope="module", params=["", *VALUE_SETS])
def chart(request: pytest.FixtureRequest) -> Rendered:
    return render(value_set(request.param) if request.param else {})


def test_the_same_environment(image: Dockerfile, chart: Rendered) -> None:
    in_image = {name: v for stage in image.chain() for name, v in stage.environment.items()}
    for role, template in chart.pods().items():
        (container, *_) = template["spec"]["containers"]
        env = {each["name"]: each.get("value") for each in container["env"]}
        both = (env.keys() & in_image.keys()) - ELSEWHERE
        assert "RAY_SERVE_HAPROXY_BINARY_PATH" in both, role
        assert {name: env[name] for name in both} == {name: in_image[name] for name in both}, role
        assert "PATH" not in env
        assert "PYTHONSAFEPATH" not in env  # it is the image's


def test_the_same_user(image: Dockerfile) -> None:
    chart = render({})
    (user,) = image.stages[-1].all("USER")
    for name, spec in chart.pod_specs():
        assert str(spec["securityContext"]["runAsUser"]) == user.partition(":")[0], name


def test_what_pods_start_is_in_the_image(chart: Rendered) -> None:
    started = [words for _, spec in chart.pod_specs() for words in commands(spec)]
    assert {words[0] for words in started} == STARTED


def test_baton_takes_what_pods_ask_of_it() -> None:
    asked = [words for _, spec in render({}).pod_specs() for words in commands(spec)]
    parser = build_parser()
    for words in asked:
        if words[0] == "baton":
            assert parser.parse_args(words[1:]).command == "leave"


def commands(spec: dict[str, Any]) -> list[list[str]]:
    """What the containers of a pod start of themselves, before they stop, and to be asked."""
    found = []
    for container in spec["containers"]:
        found += [container["command"]] if "command" in container else []
        hooks = container.get("lifecycle", {}).values()
        probes = [probe for name, probe in container.items() if name.endswith("Probe")]
        found += [each["exec"]["command"] for each in (*hooks, *probes) if "exec" in each]
    return [[str(word) for word in words] for words in found]
