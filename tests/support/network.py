"""Who may talk to whom, as Kubernetes' NetworkPolicies say.

    allowed(policies, Party("router", labels, "serving"), Party("head", ...), 6379)

What a policy means is Kubernetes' own definition: a pod that no policy selects for a direction is
open in it; else one of the rules of one of them must let the other side in, or out. What a
network's implementation makes of it, only a cluster can show.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Object = dict[str, Any]


@dataclass(frozen=True)
class Party:
    """One end of a connection: a pod, or an address where none is."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    namespace: str = ""  # empty: no pod
    address: str = "10.244.0.1"


def allowed(
    policies: Iterable[Object], source: Party, target: Party, port: int, protocol: str = "TCP"
) -> bool:
    """Whether ``source`` can open a connection to a port of ``target``."""
    policies = list(policies)
    return _open(policies, "Egress", source, target, port, protocol) and _open(
        policies, "Ingress", target, source, port, protocol
    )


def _open(
    policies: list[Object], way: str, pod: Party, other: Party, port: int, protocol: str
) -> bool:
    holding = [each for each in policies if _holds(each, way, pod)]
    key, side = ("ingress", "from") if way == "Ingress" else ("egress", "to")
    return not holding or any(
        _fits_port(rule, port, protocol) and _fits_peer(rule, side, other, pod.namespace)
        for policy in holding
        for rule in policy["spec"].get(key) or ()
    )


def _holds(policy: Object, way: str, pod: Party) -> bool:
    """Whether a policy is about a pod; about an address that is no pod none is."""
    return (
        pod.namespace == policy["metadata"]["namespace"]
        and way in policy["spec"]["policyTypes"]
        and selects(policy["spec"]["podSelector"], pod.labels)
    )


def _fits_port(rule: Object, port: int, protocol: str) -> bool:
    ports = rule.get("ports")
    return not ports or any(
        (each["port"], each.get("protocol", "TCP")) == (port, protocol) for each in ports
    )


def _fits_peer(rule: Object, side: str, party: Party, namespace: str) -> bool:
    peers = rule.get(side)
    return not peers or any(_is_peer(peer, party, namespace) for peer in peers)


def _is_peer(peer: Object, party: Party, namespace: str) -> bool:
    if block := peer.get("ipBlock"):
        return _inside(party.address, block["cidr"]) and not any(
            _inside(party.address, cidr) for cidr in block.get("except", ())
        )
    if not party.namespace:
        return False
    if "namespaceSelector" in peer:
        labels = {"kubernetes.io/metadata.name": party.namespace}
        if not selects(peer["namespaceSelector"], labels):
            return False
    elif party.namespace != namespace:
        return False
    return selects(peer.get("podSelector", {}), party.labels)


def _inside(address: str, cidr: str) -> bool:
    network = ipaddress.ip_network(cidr)
    return network.version == ipaddress.ip_address(address).version and (
        ipaddress.ip_address(address) in network
    )


def selects(selector: Object, labels: Mapping[str, str]) -> bool:
    """Whether a LabelSelector fits; an empty one fits everything."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    return all(_expression(each, labels) for each in selector.get("matchExpressions", ()))


def _expression(expression: Object, labels: Mapping[str, str]) -> bool:
    there = expression["key"] in labels
    match expression["operator"]:
        case "Exists":
            return there
        case "DoesNotExist":
            return not there
        case "In":
            return there and labels[expression["key"]] in expression["values"]
        case "NotIn":
            return not there or labels[expression["key"]] not in expression["values"]
    raise AssertionError(f"no such operator: {expression}")
