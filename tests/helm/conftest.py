"""Fixtures: both versions of Helm, and values that enable everything in the chart."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.support.helm.binaries import HelmUnavailableError, find_helm
from tests.support.helm.chart import Helm

EVERYTHING = {
    "models": [
        {
            "name": "demo",
            "model": "/opt/rayfleet/deploy/models/demo",
            "group": "cpu",
            "autoscaling": {
                "minWorkers": 0,
                "maxWorkers": 3,
                "targetLoad": 0.6,
                "targetQueueDelayMs": 250,
                "targetKvUsage": 0.9,
                "backlogHorizonSeconds": 20,
                "upscaleDelaySeconds": 1.5,
                "downscaleDelaySeconds": 120,
                "downscaleToZeroDelaySeconds": 900,
            },
        }
    ],
    "workerGroups": [
        {
            "name": "cpu",
            "replicas": 2,
            "minReplicas": 2,
            "maxReplicas": 4,
            "resources": {"requests": {"cpu": "2"}, "limits": {"memory": "6Gi"}},
        }
    ],
    "gateway": {
        "replicas": 2,
        "maxReplicas": 6,
        "pod": {
            "initContainers": [{"name": "copy", "image": "busybox", "command": ["true"]}],
            "sidecars": [{"name": "collector", "image": "collector:1"}],
        },
    },
    "apiKeys": {"keys": ["key-one", "key-two"]},
    "adminApiKeys": {"keys": ["key-of-the-admin"]},
    "huggingFace": {"token": "hf_token"},
    "modelCache": {"persistent": True, "storageClassName": "shared"},
    "gcsFaultTolerance": {
        "enabled": True,
        "redisAddress": "redis:6379",
        "redisUsername": "ray",
        "existingSecret": "redis",
        "externalStorageNamespace": "fleet",
    },
    "autoscaler": {"enabled": True},
    "upgradeStrategy": {"type": "None"},
    "initializingTimeoutSeconds": 5400,
    "service": {"type": "LoadBalancer"},
    "ingress": {"enabled": True, "host": "llm.example.com", "tlsSecret": "tls"},
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]},
    "networkPolicy": {
        "clientCidrs": ["10.0.0.0/16", "fd00::/8"],
        "egress": {"restricted": True, "allowInternet": True, "apiServerCidrs": ["10.96.0.1/32"]},
    },
    "monitoring": {
        "monitor": "PodMonitor",
        "dashboards": {"enabled": True},
        "rules": {"enabled": True, "runbookUrl": "https://example.com/runbook"},
        "vllmNames": True,
    },
    "benchmark": {"enabled": True, "resultsClaim": "results-of-the-tests"},
    "extraObjects": [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "{{ .Release.Name }}-extra"},
            "data": {"a": "b"},
        }
    ],
}
"""Values that enable everything in the chart."""


def _helm(major: int) -> Helm:
    try:
        return Helm(find_helm(major), major)
    except HelmUnavailableError as error:
        pytest.skip(f"no Helm {major}: {error}")


@pytest.fixture(
    scope="session",
    params=[pytest.param(3, id="helm3", marks=pytest.mark.long), pytest.param(4, id="helm4")],
)
def helm(request: pytest.FixtureRequest) -> Helm:
    """Helm 3 and Helm 4."""
    return _helm(request.param)


@pytest.fixture(scope="session")
def helm4() -> Helm:
    """Helm 4, for tests that do not depend on the version."""
    return _helm(4)


@pytest.fixture(scope="session")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A values file that enables everything in the chart."""
    path = tmp_path_factory.mktemp("values") / "everything.yaml"
    path.write_text(yaml.safe_dump(EVERYTHING))
    return path
