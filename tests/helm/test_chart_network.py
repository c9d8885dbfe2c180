"""NetworkPolicy: connections to and from the pods."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.helm.chart import Helm, Object, only, pod_specs

OPERATORS = {
    # way to install KubeRay: the labels of its pod
    "helm": {
        "app.kubernetes.io/name": "kuberay-operator",
        "app.kubernetes.io/instance": "kuberay-operator",
        "app.kubernetes.io/component": "kuberay-operator",
    },
    "kustomize": {
        "app.kubernetes.io/name": "kuberay",
        "app.kubernetes.io/component": "kuberay-operator",
    },
}


@pytest.fixture(scope="module")
def objects(helm4: Helm, everything: Path) -> list[Object]:
    return helm4.template("-f", str(everything))


def blocks(peers: list[Object]) -> list[str]:
    return [peer["ipBlock"]["cidr"] for peer in peers if "ipBlock" in peer]


def test_only_the_api_port_is_open_to_clients(objects: list[Object]) -> None:
    policy = only(objects, "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    among_ray, clients, operator, monitoring = policy["ingress"]
    (ray,) = among_ray["from"]
    assert "ports" not in among_ray
    selected = {
        name: pod["metadata"]["labels"] for name, pod in pod_specs(objects) if "smoke" not in name
    }
    for labels in selected.values():
        for selector in (policy["podSelector"], ray["podSelector"]):
            assert selector["matchLabels"].items() <= labels.items()
            (expression,) = selector["matchExpressions"]
            assert labels[expression["key"]] in expression["values"]
    assert [p["port"] for p in clients["ports"]] == [8000]
    assert blocks(clients["from"]) == ["10.0.0.0/16", "fd00::/8"]
    assert 8265 in [p["port"] for p in operator["ports"]]
    assert {p["port"] for p in monitoring["ports"]} == {9464, 8080}


@pytest.mark.parametrize("way", OPERATORS)
@pytest.mark.parametrize("namespace", ["", "kuberay-system"])
def test_the_operator_reaches_the_dashboard_from_its_namespace_only(
    helm4: Helm, way: str, namespace: str
) -> None:
    arguments = ("--set", f"networkPolicy.operatorNamespace={namespace}")
    rules = only(helm4.template(*arguments), "NetworkPolicy")["spec"]["ingress"]
    (rule,) = (r for r in rules if 8265 in [p["port"] for p in r.get("ports", ())])
    namespaces = [peer["namespaceSelector"]["matchLabels"] for peer in rule["from"]]
    expected = namespace or "demo"  # the release's
    assert namespaces == [{"kubernetes.io/metadata.name": expected}] * len(OPERATORS)
    assert any(
        peer["podSelector"]["matchLabels"].items() <= OPERATORS[way].items()
        for peer in rule["from"]
    )


def test_restricted_egress_is_no_way_to_anywhere(helm4: Helm) -> None:
    """The same with the autoscaler, which only needs the API server."""
    arguments = "networkPolicy.egress.restricted=true,autoscaler.enabled=true"
    server = "networkPolicy.egress.apiServerCidrs={10.96.0.1/32,192.168.4.7/32}"
    policy = only(helm4.template("--set", f"{arguments},{server}"), "NetworkPolicy")["spec"]
    assert "Egress" in policy["policyTypes"]
    for rule in policy["egress"]:
        ports = {port["port"] for port in rule.get("ports", ())}
        assert rule.get("to") or ports == {53}, "open to anywhere"
        assert "0.0.0.0/0" not in blocks(rule.get("to", []))
    (api_server,) = (r for r in policy["egress"] if blocks(r.get("to", [])))
    assert blocks(api_server["to"]) == ["10.96.0.1/32", "192.168.4.7/32"]
    assert {port["port"] for port in api_server["ports"]} == {443, 6443}


def test_checkpoints_come_from_the_internet_only_where_that_is_said(objects: list[Object]) -> None:
    (rule,) = (
        r
        for r in only(objects, "NetworkPolicy")["spec"]["egress"]
        if "0.0.0.0/0" in blocks(r.get("to", []))
    )
    assert [port["port"] for port in rule["ports"]] == [443]
    assert rule["to"][0]["ipBlock"]["except"] == ["169.254.0.0/16"]


def test_an_operator_without_token_authentication_leaves_ray_closed(
    helm4: Helm, tmp_path: Path
) -> None:
    """KubeRay before 1.5.1 drops authOptions and sets no token."""
    rendered = helm4.template("--set", "benchmark.enabled=true")
    for name, pod in pod_specs(rendered):
        if "Ray" in name:
            (container,) = pod["spec"]["containers"]
            entries = {e["name"]: e.get("value") for e in container["env"]}
            assert entries["RAY_AUTH_MODE"] == "token"
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "RAY_AUTH_MODE": "token",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--port", "0"]
    done = subprocess.run(start, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "no authentication token was found" in done.stderr


def test_token_authentication_is_disabled_explicitly(helm4: Helm) -> None:
    for _, pod in pod_specs(helm4.template("--set", "rayAuth.enabled=false")):
        for entry in pod["spec"]["containers"][0]["env"]:
            assert entry["name"] != "RAY_AUTH_MODE" or entry["value"] == "disabled"
