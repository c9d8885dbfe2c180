"""A release through its life, against a server that keeps objects."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.helm.chart import CHART, Helm
from tests.helm.fake_api import FakeCluster, serve_api


class Release:
    """Helm, told where the cluster is."""

    def __init__(self, helm: Helm, cluster: FakeCluster, environment: dict[str, str]) -> None:
        self._helm = helm
        self._environment = environment
        self.cluster = cluster

    def run(self, *arguments: str) -> str:
        return self._helm.run(*arguments, "--namespace", "demo", env=self._environment)

    def apply(self, command: str, *arguments: str) -> None:
        self.run(command, "fleet", str(CHART), "--disable-openapi-validation", *arguments)

    def num_gateways(self) -> int:
        service = self.cluster.kinds()["RayService", "fleet-rayfleet"]
        config = yaml.safe_load(service["spec"]["serveConfigV2"])
        gateways = config["applications"][0]["args"]["num_gateways"]
        assert isinstance(gateways, int)
        return gateways


@pytest.fixture
def release(helm: Helm, tmp_path: Path) -> Iterator[Release]:
    with serve_api() as (cluster, url):
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "fake", "cluster": {"server": url}}],
            "users": [{"name": "fake", "user": {"token": "x"}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake"}}],
            "current-context": "fake",
        }
        (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "KUBECONFIG": str(tmp_path / "kubeconfig"),
        }
        yield Release(helm, cluster, environment)


def test_install_upgrade_rollback_uninstall_leave_nothing(
    release: Release, everything: Path
) -> None:
    release.apply("install")
    first = release.cluster.kinds()
    assert release.num_gateways() == 2

    release.apply("upgrade", "-f", str(everything), "--set", "gateway.replicas=3")
    second = release.cluster.kinds()
    assert first.keys() < second.keys()
    assert ("Secret", "fleet-rayfleet-api-keys") in second
    assert release.num_gateways() == 3

    release.run("rollback", "fleet", "1")
    assert release.cluster.kinds().keys() == first.keys()
    assert release.num_gateways() == 2
    assert len(yaml.safe_load(release.run("history", "fleet", "-o", "yaml"))) == 3

    release.run("uninstall", "fleet")
    assert release.cluster.objects == {}


def test_checkpoints_may_outlive_the_release(release: Release) -> None:
    keep = ["modelCache.persistent=true", "modelCache.keepOnUninstall=true"]
    release.apply("install", "--set", ",".join(keep))
    release.run("uninstall", "fleet")
    assert list(release.cluster.kinds()) == [
        ("PersistentVolumeClaim", "fleet-rayfleet-model-cache")
    ]
