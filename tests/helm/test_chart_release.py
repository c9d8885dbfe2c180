"""Install, upgrade, rollback and uninstall against a simulated API server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.helm.chart import Helm
from tests.support.helm.release import Release, release_of


@pytest.fixture
def release(helm: Helm, tmp_path: Path) -> Iterator[Release]:
    with release_of(helm, tmp_path) as release:
        yield release


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
    keep += ["modelCache.storageClassName=shared"]
    release.apply("install", "--set", ",".join(keep))
    release.run("uninstall", "fleet")
    assert list(release.cluster.kinds()) == [
        ("PersistentVolumeClaim", "fleet-rayfleet-model-cache")
    ]
