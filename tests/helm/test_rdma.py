"""What pods need for KV by RDMA and GPUDirect, item by item, and that nobody else gets it."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from tests.support.chart import Object, Rendered, refusal, render, value_set
from tests.support.network import selects

RDMA_SETS = ("gpu-rdma", "gke", "eks-efa", "openshift")
WORKERS = ("prefill", "decode")
GPU_TRANSPORTS = {"cuda_copy", "cuda_ipc"}  # without them UCX does not reach a GPU's memory


@cache
def chart(name: str) -> Rendered:
    return render(value_set(name))


def container(name: str | Rendered, role: str) -> Object:
    rendered = chart(name) if isinstance(name, str) else name
    first: Object = rendered.pods()[role]["spec"]["containers"][0]
    return first


def environment(name: str | Rendered, role: str) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in container(name, role)["env"]}


@pytest.mark.parametrize("role", WORKERS)
@pytest.mark.parametrize(
    ("name", "resource"),
    [
        ("gpu-rdma", "rdma/ib"),
        ("gke", "networking.gke.io.networks/rdma-0"),
        ("eks-efa", "vpc.amazonaws.com/efa"),
        ("openshift", "rdma/roce_gdr"),
    ],
)
def test_an_adapter_for_each_gpu_in_requests_and_limits(
    name: str, resource: str, role: str
) -> None:
    resources = container(name, role)["resources"]
    for kind in ("requests", "limits"):
        assert resources[kind][resource] == resources[kind]["nvidia.com/gpu"] == 1, kind
        assert resources[kind]["memory"], "what the values say besides stays"


def test_gke_gives_adapters_as_interfaces() -> None:
    for role in WORKERS:
        annotations = chart("gke").pods()[role]["metadata"]["annotations"]
        interfaces = json.loads(annotations["networking.gke.io/interfaces"])
        networks = {each["network"] for each in interfaces} - {"default"}
        limits = container("gke", role)["resources"]["limits"]
        counted = {name for name in limits if name.startswith("networking.gke.io.networks/")}
        assert counted == {f"networking.gke.io.networks/{network}" for network in networks}


@pytest.mark.parametrize("name", RDMA_SETS)
def test_no_capability_is_added_that_would_have_no_effect(name: str) -> None:
    """Processes that are not root's get nothing of it, and *restricted* would refuse the pods."""
    for role in WORKERS:
        context = container(name, role)["securityContext"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["allowPrivilegeEscalation"] is False


@pytest.mark.parametrize("name", RDMA_SETS)
def test_shared_memory_is_large_and_in_memory(name: str) -> None:
    for role in WORKERS:
        spec = chart(name).pods()[role]["spec"]
        (volume,) = (
            mount["name"]
            for mount in spec["containers"][0]["volumeMounts"]
            if mount["mountPath"] == "/dev/shm"
        )
        (source,) = (each["emptyDir"] for each in spec["volumes"] if each["name"] == volume)
        assert source == {"medium": "Memory", "sizeLimit": "16Gi"}


@pytest.mark.parametrize("role", WORKERS)
def test_the_environment_of_ucx(role: str) -> None:
    env = environment("gpu-rdma", role)
    assert {"rc_x", "rc", "dc_x", "dc"} | GPU_TRANSPORTS <= set(env["UCX_TLS"].split(","))
    assert env["UCX_NET_DEVICES"] == "mlx5_0:1"
    assert env["UCX_RNDV_SCHEME"] == "get_zcopy"
    assert env["UCX_RNDV_THRESH"] == "0"
    assert env["UCX_IB_REG_METHODS"] == "odp,rcache"
    assert env["UCX_RC_TIMEOUT"] == "600s"
    assert not {"UCX_IB_GID_INDEX", "UCX_IB_ADDR_TYPE"} & env.keys(), "InfiniBand needs neither"


@pytest.mark.parametrize("name", ["gke", "openshift"])
def test_roce_has_a_gid_and_addresses_of_ethernet(name: str) -> None:
    for role in WORKERS:
        env = environment(name, role)
        assert (env["UCX_IB_GID_INDEX"], env["UCX_IB_ADDR_TYPE"]) == ("3", "eth")


def test_efa_has_its_own_transport_and_no_rc() -> None:
    transports = set(environment("eks-efa", "decode")["UCX_TLS"].split(","))
    assert GPU_TRANSPORTS | {"srd"} <= transports
    assert not {"rc", "rc_x", "dc", "dc_x"} & transports


def test_on_efa_prefill_keeps_away_from_nodes_with_decode() -> None:
    affinity = chart("eks-efa").pods()["prefill"]["spec"]["affinity"]["podAntiAffinity"]
    (term,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    decode = chart("eks-efa").pods()["decode"]["metadata"]["labels"]
    wanted = term["podAffinityTerm"]["labelSelector"]["matchLabels"]
    assert wanted.items() <= decode.items()


@pytest.mark.parametrize("name", RDMA_SETS)
def test_ucx_is_told_by_the_environment_alone(name: str) -> None:
    """Keys of the configuration would win over it, and so over ``rdma.env`` and a role's own."""
    args = chart(name).serve_args()
    for role in WORKERS:
        assert environment(name, role)["UCX_TLS"]
        assert args[role]["transport"] == "nixl"
        assert args[role]["device"] == "cuda"
        assert not {"ucx_tls", "net_devices"} & args[role].keys()


def test_multus_gives_a_second_network() -> None:
    for role in WORKERS:
        annotations = chart("openshift").pods()[role]["metadata"]["annotations"]
        assert annotations["k8s.v1.cni.cncf.io/networks"] == "multi-nic-compute"


def test_pods_on_their_nodes_network_still_find_services() -> None:
    nodes = {"networkPolicy": {"nodeCIDRs": ["10.0.0.0/16"]}}
    made = render({"rdma": {"enabled": True, "hostNetwork": True}, **nodes})
    for role in WORKERS:
        spec = made.pods()[role]["spec"]
        assert spec["hostNetwork"] is True
        assert spec["dnsPolicy"] == "ClusterFirstWithHostNet"
    for role in ("router", "head"):
        assert "hostNetwork" not in made.pods()[role]["spec"]


@pytest.mark.parametrize("name", RDMA_SETS)
def test_routers_and_head_get_none_of_it(name: str) -> None:
    for role in ("router", "head"):
        own = container(name, role)
        assert own["resources"]["limits"].keys() == {"memory"}
        assert own["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert not [variable for variable in environment(name, role) if variable[:4] == "UCX_"]
        annotations = chart(name).pods()[role]["metadata"].get("annotations", {})
        assert not {key for key in annotations if "cni.cncf.io" in key or "gke.io" in key}


def test_a_role_may_stay_out_of_it() -> None:
    values = value_set("gpu-rdma")
    values["prefill"]["rdma"] = False
    made = render(values)
    assert "rdma/ib" not in container(made, "prefill")["resources"]["limits"]
    assert container(made, "prefill")["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container(made, "decode")["resources"]["limits"]["rdma/ib"] == 1


def test_variables_given_for_rdma_win() -> None:
    env: dict[str, Any] = {"UCX_TLS": "rc", "UCX_RC_TIMEOUT": "10s"}
    made = render({"rdma": {"enabled": True, "env": env}})
    assert environment(made, "decode")["UCX_TLS"] == "rc"
    assert environment(made, "decode")["UCX_RC_TIMEOUT"] == "10s"


def test_without_rdma_there_is_nothing_of_it() -> None:
    made = render()
    for role in ("head", "router", *WORKERS):
        own = container(made, role)
        assert own["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert own["resources"]["limits"].keys() == {"memory"}
        assert not [variable for variable in environment(made, role) if variable[:4] == "UCX_"]
    assert made.serve_args()["decode"]["transport"] == "tcp"


def test_kv_of_gpus_goes_by_nixl_with_rdma_or_without() -> None:
    made = render({"decode": {"gpus": 1}, "prefill": {"gpus": 1}})
    assert {made.serve_args()[role]["transport"] for role in ("prefill", "decode")} == {"nixl"}
    auto = {"prefill": {"gpus": 1, "config": {"device": "auto"}}, "decode": {"gpus": 1}}
    assert render(auto).serve_args()["prefill"]["transport"] == "nixl"
    unused = {"mixed": {"gpus": 1, "replicas": 0}}
    assert render(unused).serve_args()["decode"]["transport"] == "tcp"
    message = refusal({"kvTransfer": {"transport": "tcp"}, "decode": {"gpus": 1}})
    assert "decode: its KV is on a GPU" in message


def test_an_added_capability_is_of_use_to_root_only_so_workers_can_be_that() -> None:
    """And nothing else in the release: not the others' containers, nor other pods."""
    values = value_set("gpu-rdma") | {"modelCache": {"enabled": True, "existingClaim": "models"}}
    values["rdma"]["runAsRoot"] = True
    values["decode"]["sidecars"] = [{"name": "beside", "image": "busybox:1.37"}]
    values["secrets"] = {"apiKeys": {"existingSecret": "keys"}}
    values["mixed"] = {"replicas": 1, "rdma": False}
    roots = set()
    for name, spec in render(values).pod_specs():
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == 1000
        for container in spec["containers"]:
            context = container.get("securityContext", {})
            if "runAsUser" in context or "runAsNonRoot" in context:
                roots.add(f"{name} {container['name']}")
                assert (context["runAsUser"], context["runAsNonRoot"]) == (0, False)
                assert context["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
                assert context["allowPrivilegeEscalation"] is False
                assert context["readOnlyRootFilesystem"] is True
                assert "privileged" not in context
    assert roots == {"prefill ray-worker", "decode ray-worker"}


def test_root_has_a_folder_of_its_own_in_the_models_volume() -> None:
    """Without capabilities root cannot write into folders of others, nor they into root's."""
    made = render({"rdma": {"enabled": True, "runAsRoot": True}, "modelCache": {"enabled": True}})
    for role, folder in (("router", "baton"), ("head", "baton"), ("decode", "baton/root")):
        assert environment(made, role)["XDG_CACHE_HOME"] == f"/var/cache/{folder}"
        assert environment(made, role)["HF_HOME"] == f"/var/cache/{folder}/huggingface"


def test_root_needs_to_be_asked_for() -> None:
    for values in ({"rdma": {"enabled": True}}, {"rdma": {"runAsRoot": True}}):
        for role in ("head", "router", *WORKERS):
            assert "runAsUser" not in container(render(values), role)["securityContext"], values


def test_capabilities_that_are_given_stay() -> None:
    given = {"capabilities": {"drop": ["ALL"], "add": ["SYS_NICE"]}}
    made = render({"rdma": {"enabled": True, "runAsRoot": True}, "securityContext": given})
    added = {
        role: container(made, role)["securityContext"]["capabilities"]["add"] for role in WORKERS
    }
    assert added == dict.fromkeys(WORKERS, ["SYS_NICE", "IPC_LOCK"])


def test_what_a_role_asks_for_itself_wins() -> None:
    own = {"limits": {"rdma/ib": 4, "memory": "9Gi"}, "requests": {"rdma/ib": 4}}
    pools = {"prefill": {"gpus": 1}, "decode": {"gpus": 1, "resources": own}}
    made = render({"rdma": {"enabled": True}, **pools})
    limits = container(made, "decode")["resources"]["limits"]
    assert limits == {"rdma/ib": 4, "memory": "9Gi", "nvidia.com/gpu": 1}
    assert container(made, "prefill")["resources"]["limits"]["rdma/ib"] == 1


def test_zero_and_nothing_are_values() -> None:
    rdma = {"enabled": True, "ibGidIndex": 0, "env": {"UCX_TLS": "", "UCX_RNDV_THRESH": 0}}
    made = render({"rdma": rdma, "kvTransfer": {"ucx": {"env": {"UCX_RNDV_THRESH": 8192}}}})
    env = environment(made, "decode")
    assert env["UCX_IB_GID_INDEX"] == "0"
    assert (env["UCX_TLS"], env["UCX_RNDV_THRESH"]) == ("", "0")
    assert "UCX_NET_DEVICES" not in env, "nothing is said of these"


def test_no_two_pods_of_a_release_are_on_one_nodes_network() -> None:
    """Their ports are the same."""
    nodes = {"networkPolicy": {"nodeCIDRs": ["10.0.0.0/16"]}}
    mine = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {}}}
    rdma = {"enabled": True, "hostNetwork": True}
    made = render({"rdma": rdma, "prefill": {"affinity": mine}, **nodes})
    for role in WORKERS:
        affinity = made.pods()[role]["spec"]["affinity"]
        (term,) = affinity["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["topologyKey"] == "kubernetes.io/hostname"
        for other, template in made.pods().items():
            labels = template["metadata"]["labels"]
            assert selects(term["labelSelector"], labels) == (other in WORKERS), other
    assert made.pods()["prefill"]["spec"]["affinity"].items() > mine.items()
    assert "affinity" not in made.pods()["router"]["spec"]
    own = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    made = render({"router": {"hostNetwork": True, "affinity": own}, **nodes})
    assert made.pods()["router"]["spec"]["affinity"] == own


def test_host_network_needs_the_nodes_addresses() -> None:
    message = refusal({"rdma": {"enabled": True, "hostNetwork": True}})
    assert "networkPolicy.nodeCIDRs" in message
