"""Objects of the chart for Prometheus and Grafana."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.support.helm.chart import Helm, Object, only, pod_specs
from tests.support.paths import ROOT

MONITORING = ROOT / "deploy" / "monitoring"


@pytest.fixture(scope="module")
def objects(helm4: Helm, everything: Path) -> list[Object]:
    return helm4.template("-f", str(everything))


def test_one_target_per_pod_with_a_part_of_the_fleet(objects: list[Object]) -> None:
    endpoints = only(objects, "PodMonitor")["spec"]["podMetricsEndpoints"]
    fleet, rays = endpoints
    assert (fleet["port"], rays["port"]) == ("fleet", "metrics")
    name = only(objects, "PodMonitor")["metadata"]["name"]
    assert fleet["relabelings"] == [
        {"targetLabel": "job", "replacement": "rayfleet"},
        {"targetLabel": "fleet", "replacement": name},
    ]
    assert "authorization" not in fleet  # the port requires no key; the NetworkPolicy protects it
    service = yaml.safe_load(only(objects, "RayService")["spec"]["serveConfigV2"])
    arguments = service["applications"][0]["args"]
    ports = {
        pod["metadata"]["labels"]["app.kubernetes.io/component"]: {
            port["name"]: port["containerPort"]
            for port in pod["spec"]["containers"][0].get("ports", ())
        }
        for name, pod in pod_specs(objects)
        if "RayService" in name
    }
    assert arguments["metrics_port"] == ports["gateway"]["fleet"] == ports["worker"]["fleet"]
    assert "fleet" not in ports["head"]


def test_dashboards_and_rules_are_those_of_the_repository(objects: list[Object]) -> None:
    (dashboards,) = (
        o
        for o in objects
        if o["kind"] == "ConfigMap" and o["metadata"]["name"].endswith("-dashboards")
    )
    expected = {p.name: json.loads(p.read_text()) for p in MONITORING.glob("dashboards/*.json")}
    assert {name: json.loads(text) for name, text in dashboards["data"].items()} == expected
    assert expected
    groups = only(objects, "PrometheusRule")["spec"]["groups"]
    rules = (MONITORING / "rules" / "rayfleet.yml").read_text()
    published = rules.replace("deploy/monitoring/RUNBOOK.md#", "https://example.com/runbook#")
    assert groups == yaml.safe_load(published)["groups"] != yaml.safe_load(rules)["groups"]


def test_links_are_paths_in_the_repository_where_the_runbook_is_not_published(helm4: Helm) -> None:
    objects = helm4.template(
        *("-f", str(ROOT / "helm" / "rayfleet" / "values-cpu-demo.yaml")),
        *("--set", "monitoring.rules.enabled=true"),
    )
    groups = only(objects, "PrometheusRule")["spec"]["groups"]
    assert groups == yaml.safe_load((MONITORING / "rules" / "rayfleet.yml").read_text())["groups"]
    assert "metrics_vllm_names" not in only(objects, "RayService")["spec"]["serveConfigV2"]


def test_workers_export_the_names_of_vllm(objects: list[Object]) -> None:
    service = yaml.safe_load(only(objects, "RayService")["spec"]["serveConfigV2"])
    assert service["applications"][0]["args"]["metrics_vllm_names"] is True
