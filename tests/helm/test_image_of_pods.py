"""Which image pods run, and numbers in their environment."""

from typing import Any

import pytest
import yaml

from tests.support.chart import CHART, Rendered, chart_values, refusal, render, value_set

ON_GPUS = ("autoscaling", "eks-efa", "gke", "gpu-rdma", "gpu-single-node", "openshift")


def images(rendered: Rendered) -> set[str]:
    return {each["image"] for _, pod in rendered.pod_specs() for each in pod["containers"]}


@pytest.mark.parametrize("name", ["cpu-laptop", *ON_GPUS])
def test_pools_with_gpus_run_the_image_that_has_cuda(name: str) -> None:
    repository = chart_values()["image"]["repository"]
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    tag = f"{version}-cuda" if name in ON_GPUS else version
    assert images(render(value_set(name))) == {f"{repository}:{tag}"}


def test_a_tag_that_is_given_is_the_one() -> None:
    values = {"image": {"tag": "mine"}, "prefill": {"gpus": 1}, "decode": {"gpus": 1}}
    (image,) = images(render(values))
    assert image.endswith(":mine")


@pytest.mark.parametrize("where", ["ray", "kvTransfer"])
def test_whole_numbers_in_the_environment_are_written_out(where: str) -> None:
    env: dict[str, Any] = {"UCX_X": 16777216, "UCX_Y": 1.5, "UCX_Z": "1e3"}
    values = {"ray": {"env": env}} if where == "ray" else {"kvTransfer": {"ucx": {"env": env}}}
    (ray,) = render(values).pods()["decode"]["spec"]["containers"]
    found = {each["name"]: each.get("value") for each in ray["env"]}
    assert (found["UCX_X"], found["UCX_Y"], found["UCX_Z"]) == ("16777216", "1.5", "1e3")


@pytest.mark.parametrize(
    "values",
    [
        {"networkPolicy": {"operator": []}},
        {"networkPolicy": {"dns": {"ports": []}}},
        {"networkPolicy": {"apiServer": {"ports": []}}},
    ],
)
def test_an_empty_list_opens_nothing_to_everybody(values: dict[str, Any]) -> None:
    assert "minItems" in refusal(values)
