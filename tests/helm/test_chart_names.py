"""Names and labels: valid however long a release's name is, and of no two releases the same."""

import json
import re
from typing import Any

import pytest

from tests.support.chart import RELEASE, Rendered, refusal, render
from tests.support.chart_references import nodes, pods_with_labels, selectors
from tests.support.chart_variants import LONG, VARIANTS
from tests.support.network import selects

PARTS = ("name", "instance", "component")
LONGEST_RAY_SERVICE = 47  # KubeRay makes longer names of it
LABEL_NAME = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
LABEL_VALUE = rf"({LABEL_NAME})?"
DNS_LABEL = r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?"
DNS_NAME = r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"

NAMES: list[tuple[str, dict[str, Any]]] = [
    ("b", {}),
    ("baton", {}),
    (LONG, {}),
    (LONG, {"nameOverride": "x" * 63}),
    ("1-starts-with-a-digit", {}),
    ("a.name.with.dots", {}),
    ("baton", {"fullnameOverride": "y" * 80}),
    ("baton", {"fullnameOverride": "8.short"}),
    ("baton", {"fullnameOverride": "z" * 32 + "-metrics"}),
    ("baton", {"nameOverride": "n" * 39 + ".cut-behind-the-dot"}),
    ("baton", {"fullnameOverride": "f" * 30 + "-.-.-." + "cut-in-the-middle-of-these"}),
]


def everything(name: str, overrides: dict[str, Any] | None = None) -> Rendered:
    return render(VARIANTS["everything-on"] | (overrides or {}), name)


@pytest.mark.parametrize(("name", "overrides"), NAMES, ids=str)
def test_names_are_valid(name: str, overrides: dict[str, Any]) -> None:
    chart = everything(name, overrides)
    for thing in chart.objects:
        own = thing["metadata"]["name"]
        pattern = DNS_LABEL if thing["kind"] in ("Service", "RayService") else DNS_NAME
        assert re.fullmatch(pattern, own), f"{thing['kind']} {own}"
    assert len(chart.one("RayService")["metadata"]["name"]) <= LONGEST_RAY_SERVICE


@pytest.mark.parametrize("override", ["n" * 60, "n" * 39 + ".cut-behind-the-dot"])
@pytest.mark.parametrize("name", ["b", LONG])
def test_labels_are_valid(name: str, override: str) -> None:
    for thing in everything(name, {"nameOverride": override}).objects:
        for path, node in nodes(thing, thing["kind"]):
            if path.endswith((".labels", ".matchLabels", ".nodeSelector")):
                for key, value in node.items():
                    assert re.fullmatch(LABEL_NAME, key.rpartition("/")[2]), f"{path}: {key}"
                    assert re.fullmatch(LABEL_VALUE, value), f"{path}.{key}: {value}"


def named(word: str) -> Rendered:
    """Everything on, and a word wherever a name or a text of the user's can be."""
    role = {
        "priorityClassName": word, "runtimeClassName": word, "nodeSelector": {"pool": word},
        "podLabels": {"team": word}, "podAnnotations": {"example.com/team": word},
        "env": [{"name": "TEAM", "value": word}],
    }  # fmt: skip
    secret = {"existingSecret": word, "key": word}
    values = VARIANTS["everything-on"]
    roles = ("head", "router", "prefill", "decode", "mixed")
    store = values["ray"]["gcsFaultTolerance"] | secret | {"externalStorageNamespace": word}
    upgrade = values["ray"]["upgradeStrategy"] | {"gatewayClassName": word}
    return render(
        values
        | {each: values[each] | role for each in roles}
        | {
            "nameOverride": word,
            "commonLabels": {"team": word},
            "commonAnnotations": {"example.com/team": word},
            "image": {"repository": word, "pullSecrets": [word]},
            "config": values["config"] | {"model": word, "served_model_name": word},
            "service": values["service"] | {"loadBalancerClass": word},
            "secrets": dict.fromkeys(("clusterSecret", "apiKeys", "hubToken"), secret),
            "modelCache": {"enabled": True, "existingClaim": word},
            "ray": {"gcsFaultTolerance": store, "upgradeStrategy": upgrade},
            "serviceAccount": {"name": word},
            "ingress": {"enabled": True, "className": word},
            "inferencePool": {"enabled": True, "endpointPicker": {"name": word}},
            "tests": {"image": word},
        },
        name=word,
        namespace=word,
    )


@pytest.mark.parametrize("word", ["true", "null", "on", "y"])
def test_a_name_that_is_a_word_of_yaml_stays_a_name(word: str) -> None:
    def parsed(name: str) -> str:
        chart = named(name)
        config = chart.serve_config()
        chart.one("RayService")["spec"]["serveConfigV2"] = config
        return json.dumps(chart.objects)

    assert parsed("zzusual").replace("zzusual", word) == parsed(word)


@pytest.mark.parametrize("word", ["123", "1e3", "0x1f", "1.5"])
def test_a_name_that_looks_like_a_number_is_quoted(word: str) -> None:
    """In the text: readers of YAML do not agree on what is a number."""
    bare = re.compile(rf"(?:[:\[{{,-]|^)[ ]*{re.escape(word)}[ ]*(?:[,}}\]]|$)", re.MULTILINE)
    assert bare.search(f"name: {word}\n")
    assert bare.search(f"- {{name: {word}, key: a}}")
    assert not bare.search(f'name: "{word}"')
    for path, text in named(word).files.items():
        if not path.endswith(("NOTES.txt", "dashboards.yaml", "prometheusrule.yaml")):
            assert not bare.findall(text), path


def test_every_object_says_whose_it_is() -> None:
    for thing in everything("baton").objects:
        if thing["metadata"]["name"] == "extra":
            continue
        where = f"{thing['kind']} {thing['metadata']['name']}"
        assert thing["metadata"]["namespace"] == "serving", where
        labels = thing["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == "baton", where
        assert labels["cost-center"] == "serving", f"{where}: commonLabels"
        assert thing["metadata"]["annotations"]["example.com/contact"], f"{where}: annotations"


@pytest.mark.parametrize("key", ["commonLabels", "podLabels"])
def test_labels_by_which_things_are_found_are_not_for_others_to_give(key: str) -> None:
    own = ["baton/role", "ray.io/cluster", *(f"app.kubernetes.io/{part}" for part in PARTS)]
    given = dict.fromkeys([*own, "app.kubernetes.io/owner", "ray"], "x")
    message = refusal({key: given} if key == "commonLabels" else {"decode": {key: given}})
    assert set(re.findall("invalid propertyName '(.*?)'", message)) == set(own)


def test_labels_that_are_given_win_over_common_ones_and_ours_over_both() -> None:
    ours = {"app.kubernetes.io/part-of": "theirs"}
    chart = render(
        {
            "commonLabels": ours | {"team": "all", "tier": "all"},
            "service": {"labels": ours | {"team": "one"}},
        }
    )
    labels = chart.one("Service")["metadata"]["labels"]
    assert (labels["team"], labels["tier"]) == ("one", "all")
    assert labels["app.kubernetes.io/part-of"] == "baton"


@pytest.mark.parametrize(
    ("one", "other"),
    [("one", "two"), ("baton", "baton-2"), (LONG, LONG[:-1] + "x"), ("a.b", "a-b")],
)
def test_two_releases_in_one_namespace_do_not_meet(one: str, other: str) -> None:
    charts = [render({**VARIANTS["everything-on"], "extraObjects": []}, n) for n in (one, other)]
    names = [{(t["kind"], t["metadata"]["name"]) for t in chart.objects} for chart in charts]
    assert not names[0] & names[1]
    for mine, theirs in (charts, charts[::-1]):
        foreign = [labels for _, labels, _ in pods_with_labels(theirs)]
        foreign += [thing["metadata"]["labels"] for thing in theirs.all("Service")]
        for path, selector, _ in selectors(mine):
            if selector in ({"matchLabels": {"team": "serving"}}, {}):
                continue  # the user's own, in topologySpreadConstraints; where traces go
            assert not any(selects(selector, labels) for labels in foreign), path


def test_no_release_has_the_name_of_anothers_account_or_service() -> None:
    """``baton`` has a service ``baton-metrics``, and KubeRay makes ``baton-serve-svc``."""
    on = {"autoscaling": {"enabled": True}, "monitoring": {"serviceMonitor": {"enabled": True}}}
    theirs = names(render(on))
    theirs |= {("Service", f"{RELEASE}-{end}") for end in ("head-svc", "serve-svc")}
    ends = sorted(name.removeprefix(RELEASE) for _, name in theirs if name != RELEASE)
    assert {"-head", "-metrics"} < set(ends)
    for end in ("-head", "-metrics", "-head-svc", "-serve-svc"):
        mine = names(render(on, f"{RELEASE}{end}"))
        assert not mine & theirs, end


def names(chart: Rendered) -> set[tuple[str, str]]:
    return {(thing["kind"], thing["metadata"]["name"]) for thing in chart.objects}


def test_kuberays_own_services_have_no_names_of_ours() -> None:
    chart = everything("baton")
    ours = {thing["metadata"]["name"] for thing in chart.all("Service")}
    name = chart.one("RayService")["metadata"]["name"]
    assert not ours & {f"{name}-head-svc", f"{name}-serve-svc"}
