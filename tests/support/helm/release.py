"""A release of the chart on a simulated API server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from tests.support.helm.chart import CHART, Helm
from tests.support.helm.fake_api import FakeCluster, serve_api


class Release:
    """Helm, configured for the cluster."""

    def __init__(self, helm: Helm, cluster: FakeCluster, environment: dict[str, str]) -> None:
        self._helm = helm
        self._environment = environment
        self.cluster = cluster

    def run(self, *arguments: str) -> str:
        return self._helm.run(*arguments, "--namespace", "demo", env=self._environment)

    def apply(self, command: str, *arguments: str) -> str:
        """Installs or upgrades the release; the output ends with the chart's notes."""
        return self.run(command, "fleet", str(CHART), "--disable-openapi-validation", *arguments)

    def num_gateways(self) -> int:
        service = self.cluster.kinds()["RayService", "fleet-rayfleet"]
        config = yaml.safe_load(service["spec"]["serveConfigV2"])
        gateways = config["applications"][0]["args"]["num_gateways"]
        assert isinstance(gateways, int)
        return gateways


@contextmanager
def release_of(helm: Helm, folder: Path) -> Iterator[Release]:
    """Context with a separate simulated cluster for a release; `folder` gets the kubeconfig."""
    with serve_api() as (cluster, url):
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "fake", "cluster": {"server": url}}],
            "users": [{"name": "fake", "user": {"token": "x"}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake"}}],
            "current-context": "fake",
        }
        (folder / "kubeconfig").write_text(yaml.safe_dump(config))
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "KUBECONFIG": str(folder / "kubeconfig"),
        }
        yield Release(helm, cluster, environment)
