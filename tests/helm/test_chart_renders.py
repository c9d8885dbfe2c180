"""Rendered objects are valid for Kubernetes, KubeRay, Ray Serve and rayfleet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.support.helm.chart import CHART, EXAMPLES, LOADER, Helm, Object, only, pod_specs
from tests.support.helm.kuberay_fields import violations
from tests.support.paths import ROOT

KUBERNETES = "1.33"
OUR_KINDS = {"HTTPRoute", "PodMonitor", "PrometheusRule", "RayJob", "RayService", "ServiceMonitor"}
"""Kinds of custom resources; all others are built in."""

CASES = [*EXAMPLES, "everything"]


def arguments_of(case: str, everything: Path) -> list[str]:
    return ["-f", str(everything if case == "everything" else CHART / case)]


@pytest.fixture(scope="session")
def rendered(helm4: Helm, everything: Path) -> dict[str, list[Object]]:
    return {case: helm4.template(*arguments_of(case, everything)) for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_lint_and_template(
    helm: Helm, case: str, everything: Path, rendered: dict[str, list[Object]]
) -> None:
    arguments = arguments_of(case, everything)
    assert "0 chart(s) failed" in helm.run("lint", "--strict", str(CHART), *arguments)
    if helm.major != 4:
        assert helm.template(*arguments) == rendered[case]


@pytest.mark.parametrize("case", CASES)
def test_kubernetes_takes_the_objects(rendered: dict[str, list[Object]], case: str) -> None:
    names = [(o["kind"], o["metadata"]["name"]) for o in rendered[case]]
    assert len(names) == len(set(names))
    for o in rendered[case]:
        if o["kind"] not in OUR_KINDS:
            kubernetes_validate.validate(o, KUBERNETES, strict=True)


@pytest.mark.parametrize("case", CASES)
def test_kubernetes_takes_the_pods(rendered: dict[str, list[Object]], case: str) -> None:
    """Templates inside custom resources, whose schemas do not cover them completely."""
    for _, pod in pod_specs(rendered[case]):
        whole = {"apiVersion": "v1", "kind": "Pod", **pod}
        whole["metadata"] = {"name": "pod", **pod["metadata"]}
        kubernetes_validate.validate(whole, KUBERNETES, strict=True)


@pytest.mark.parametrize("release", ["1.5.1", "1.7.0"])
@pytest.mark.parametrize("case", CASES)
def test_kuberay_takes_its_resources(
    rendered: dict[str, list[Object]], case: str, release: str
) -> None:
    ours = [o for o in rendered[case] if o["apiVersion"] == "ray.io/v1"]
    assert ours
    for o in ours:
        assert violations(o, release) == []


@pytest.mark.parametrize("case", CASES)
def test_serve_and_rayfleet_take_the_configuration(
    rendered: dict[str, list[Object]], case: str
) -> None:
    from ray._common.utils import import_attr
    from ray.serve._private.utils import DEFAULT
    from ray.serve.schema import ServeDeploySchema

    from cluster.config import serve_config_from_mapping

    text = only(rendered[case], "RayService")["spec"]["serveConfigV2"]
    schema = ServeDeploySchema.model_validate(yaml.load(text, Loader=LOADER))
    (application,) = schema.applications
    assert import_attr(application.import_path).__module__ == "cluster.app"
    config = serve_config_from_mapping(application.args)
    assert config.endpoint.num_gateways >= 1
    assert all(model.engine.device in ("cpu", "cuda") for model in config.models)
    overridden = {deployment.name for deployment in application.deployments}
    assert overridden == {"gateway", *(model.deployment for model in config.models)}
    for model, deployment in zip(config.models, application.deployments[1:], strict=True):
        assert len(deployment.placement_group_bundles) == model.engine.tensor_parallel_size
        # Autoscaled numbers are not fixed as well.
        assert deployment.autoscaling_config is DEFAULT.VALUE
        assert (deployment.num_replicas is DEFAULT.VALUE) == model.autoscaling.enabled
    follows = any(model.autoscaling.enabled for model in config.models)
    assert (application.deployments[0].num_replicas is DEFAULT.VALUE) == follows
    assert follows == (case in ("values-mixed-diffusion.yaml", "everything"))


def test_every_value_is_described(helm4: Helm) -> None:
    schema = yaml.load((CHART / "values.schema.json").read_text(), Loader=LOADER)

    def undescribed(node: Any, path: str) -> list[str]:
        found = []
        for name, child in node.get("properties", {}).items():
            if not child.get("description"):
                found.append(f"{path}{name}")
            found += undescribed(child, f"{path}{name}.")
            found += undescribed(child.get("items", {}), f"{path}{name}[].")
        return found

    assert undescribed(schema, "") == []


def test_versions_agree() -> None:
    constraints = (ROOT / "constraints.txt").read_text().split()
    pins = dict(line.split("==") for line in constraints if "==" in line)
    values = yaml.load((CHART / "values.yaml").read_text(), Loader=LOADER)
    assert values["rayVersion"] == pins["ray"]
    chart = yaml.load((CHART / "Chart.yaml").read_text(), Loader=LOADER)
    assert f'version = "{chart["appVersion"]}"' in (ROOT / "pyproject.toml").read_text()
