"""Effects of changed values on a running cluster."""

from __future__ import annotations

import copy
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.helm.chart import CHART, EXAMPLES, Helm, Object, only, pod_specs
from tests.support.helm.release import Release, release_of

MANY = [
    "--set-json",
    'workerGroups=[{"name": "cpu", "replicas": 3, "numOfHosts": 2, "resources": {}}]',
]


def budgets(objects: list[Object]) -> dict[str, int]:
    """Minimum available pods, by the end of the budget's name."""
    return {
        o["metadata"]["name"].removeprefix("fleet-rayfleet-"): o["spec"]["minAvailable"]
        for o in objects
        if o["kind"] == "PodDisruptionBudget"
    }


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_budget_allows_an_eviction(helm4: Helm, example: str) -> None:
    """A RayCluster has no scale: maxUnavailable and percentages would block every eviction."""
    objects = helm4.template("-f", str(CHART / example))
    groups = only(objects, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    pods = {g["groupName"]: g["minReplicas"] * g.get("numOfHosts", 1) for g in groups}
    assert budgets(objects) == {name: count - 1 for name, count in pods.items() if count > 1}
    for o in objects:
        if o["kind"] == "PodDisruptionBudget":
            assert isinstance(o["spec"]["minAvailable"], int)
            assert "maxUnavailable" not in o["spec"]


def test_budgets_follow_the_pods(helm4: Helm) -> None:
    assert budgets(helm4.template(*MANY)) == {"gateway": 1, "cpu": 5}
    two = ["--set", "podDisruptionBudget.maxUnavailable=2"]
    assert budgets(helm4.template(*MANY, *two)) == {"cpu": 4}
    scaled = [*MANY, "--set", "autoscaler.enabled=true"]
    assert budgets(helm4.template(*scaled)) == {"gateway": 1}
    least = MANY[1].replace('"replicas"', '"minReplicas": 2, "replicas"')
    assert budgets(helm4.template(*scaled, "--set-json", least)) == {"gateway": 1, "cpu": 3}


def test_a_replaced_cluster_stays_for_its_streams(helm4: Helm) -> None:
    def delay(*arguments: str) -> Any:
        return only(helm4.template(*arguments), "RayService")["spec"][
            "rayClusterDeletionDelaySeconds"
        ]

    assert delay() >= 3600
    assert delay("--set", "longestStreamSeconds=7200") >= 7200
    assert delay("--set", "rayClusterDeletionDelaySeconds=0") == 0


def test_the_fleet_is_given_up_only_where_that_is_said(helm4: Helm) -> None:
    def annotation(*arguments: str) -> str | None:
        metadata = only(helm4.template(*arguments), "RayService")["metadata"]
        found: str | None = metadata["annotations"].get("ray.io/initializing-timeout")
        return found

    assert annotation() is None
    assert annotation("--set", "initializingTimeoutSeconds=7200") == "7200s"


@pytest.fixture
def release(helm: Helm, tmp_path: Path) -> Iterator[Release]:
    with release_of(helm, tmp_path) as release:
        yield release


@pytest.fixture
def release4(helm4: Helm, tmp_path: Path) -> Iterator[Release]:
    with release_of(helm4, tmp_path) as release:
        yield release


def cluster(release: Release) -> Object:
    """The cluster that KubeRay would create from the current RayService."""
    service = release.cluster.kinds()["RayService", "fleet-rayfleet"]
    return {"spec": copy.deepcopy(service["spec"]["rayClusterConfig"])}


def commands(notes: str) -> list[list[str]]:
    """Arguments of each kubectl command in the notes."""
    lines = [line.strip() for line in notes.splitlines()]
    return [shlex.split(line) for line in lines if line.startswith("kubectl ")]


def patched(target: Object, patch: list[Object]) -> Object:
    """`target` under a JSON patch (RFC 6902) of tests and additions."""
    target = copy.deepcopy(target)
    for operation in patch:
        *way, last = operation["path"].split("/")[1:]
        place: Any = target
        for step in way:
            place = place[int(step) if step.isdigit() else step]
        if operation["op"] == "test":
            assert place[last] == operation["value"]
        else:
            assert operation["op"] == "add"
            place[last] = operation["value"]
    return target


def pod_groups(cluster: Object) -> list[Object]:
    return [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]


def compared(cluster: Object) -> Object:
    """Parts of a RayCluster that KubeRay compares with a changed RayService, since 1.6.

    utils.GenerateHashWithoutReplicasAndWorkersToDelete; 1.5 compares tolerations as well.
    """
    cluster = copy.deepcopy(cluster)
    for group in pod_groups(cluster):
        for name in ("replicas", "minReplicas", "maxReplicas"):
            group.pop(name, None)
        group["template"]["spec"].pop("tolerations", None)
    return cluster


TAINTED = {"tolerations": [{"key": "it's", "operator": "Exists"}]}
GROUP = {"name": "cpu", "replicas": 1, "resources": {}}
SCALED = {"autoscaler.enabled": True}
STEPS: dict[str, Object] = {
    # values of one upgrade after the other
    "none": {},
    "replicas": {"gateway.replicas": 3, "workerGroups": [{**GROUP, "replicas": 4}]},
    "tolerations of a group": {"workerGroups": [{**GROUP, "pod": TAINTED}]},
    "tolerations of all": {"pod": TAINTED},
    "autoscaler": SCALED,
    "bounds": {**SCALED, "workerGroups": [{**GROUP, "minReplicas": 1, "maxReplicas": 9}]},
}


def test_the_notes_tell_how_numbers_and_tolerations_reach_the_cluster(release: Release) -> None:
    groups = {"workerGroups": [GROUP]}
    release.apply("install", *as_arguments(groups))
    for step, values in STEPS.items():
        running = cluster(release)
        notes = release.apply("upgrade", *as_arguments(groups | values))
        expected = cluster(release)
        for group in pod_groups(expected):  # none is the same as an empty list
            group["template"]["spec"].setdefault("tolerations", [])
        if step == "autoscaler":
            assert compared(running) != compared(expected)
            continue
        assert compared(running) == compared(expected), "KubeRay leaves the cluster as it is"
        (patch,) = (words for words in commands(notes) if "patch" in words)
        assert patch[1:5] == ["-n", "demo", "patch", "raycluster"]
        assert "get rayservice fleet-rayfleet" in patch[5]
        assert "{.status.activeServiceStatus.rayClusterName}" in patch[5]
        assert patch[6:9] == ["--type", "json", "-p"]
        assert patched(running, json.loads(patch[9])) == expected


def as_arguments(values: Object) -> list[str]:
    given = [f"{name}={json.dumps(value)}" for name, value in values.items()]
    return [word for value in given for word in ("--set-json", value)]


def test_the_autoscaler_keeps_its_own_number_of_pods(release4: Release) -> None:
    scaled = ["--set", "autoscaler.enabled=true"]
    release4.apply("install", *scaled)
    notes = release4.apply("upgrade", *scaled)
    (patch,) = (words[-1] for words in commands(notes) if "patch" in words)
    assert "minReplicas" in patch
    assert "/replicas" not in patch


def test_the_notes_tell_how_an_image_reaches_the_cluster(release4: Release) -> None:
    assert "patch raycluster" not in release4.apply("install")
    notes = release4.apply("upgrade", "--set", "image.tag=new")
    assert "starts a second cluster" in notes
    assert not any("delete" in words for words in commands(notes))
    notes = release4.apply("upgrade", "--set", "image.tag=newer,upgradeStrategy.type=None")
    assert "--set upgradeStrategy.type=NewCluster" in notes
    (delete,) = (words for words in commands(notes) if "delete" in words)
    assert delete[3:5] == ["delete", "raycluster"]


def test_the_notes_warn_of_exposed_routes(release4: Release) -> None:
    assert "/admin" not in release4.apply("install")
    opened = "service.type=LoadBalancer,allowOpenEndpoint=true"
    inside = "networkPolicy.clientCidrs={10.0.0.0/16}"
    notes = release4.apply("upgrade", "--set", f"{opened},{inside}")
    assert re.search("LoadBalancer exposes /metrics, /sessions and /admin", notes)


def test_pods_carry_no_annotation_that_a_secret_changes(helm4: Helm) -> None:
    for _, pod in pod_specs(helm4.template()):
        assert "checksum" not in str(pod["metadata"].get("annotations"))


@pytest.mark.parametrize("example", EXAMPLES)
def test_requests_outwait_the_loading_of_a_models_only_worker(helm4: Helm, example: str) -> None:
    """Without spare GPUs the worker stops before the next one loads, which takes minutes."""
    objects = helm4.template("-f", str(CHART / example))
    config = yaml.safe_load(only(objects, "RayService")["spec"]["serveConfigV2"])
    application = config["applications"][0]
    workers = {d["name"]: d for d in application["deployments"]}
    for model in application["args"]["models"]:
        deployment = workers[f"worker-{model['served_model_name']}"]
        alone = deployment.get("num_replicas") == 1 and not deployment["max_surge_percent"]
        if alone and model["device"] == "cuda":
            assert model["no_worker_timeout_s"] >= 1800
