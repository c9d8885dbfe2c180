"""The check of KubeRay's resources finds errors, and its tables follow the definitions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.helm.chart import Helm, Object, only
from tests.support.helm.kuberay_fields import POD_TEMPLATE, fields_of, violations


@pytest.fixture(scope="module")
def objects(helm4: Helm, everything: Path) -> list[Object]:
    return helm4.template("-f", str(everything))


def _put(*path: str | int, value: Any) -> Callable[[Object], None]:
    def put(o: Object) -> None:
        place: Any = o["spec"]
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value

    return put


CLUSTER = "rayClusterConfig"
BROKEN = {
    "a field that there is not": (_put("serveConfig", value=""), "serveConfig"),
    "one deep down": (_put(CLUSTER, "headGroupSpec", "replicas", value=1), "headGroupSpec"),
    "one in a list": (_put(CLUSTER, "workerGroupSpecs", 0, "maxReplica", value=1), "maxReplica"),
    "a type": (_put(CLUSTER, "headGroupSpec", "rayStartParams", "num-cpus", value=0), "num-cpus"),
    "a bound": (_put("rayClusterDeletionDelaySeconds", value=-1), "minimum of 0"),
    "an enumeration": (_put(CLUSTER, "authOptions", "mode", value="on"), "authOptions.mode"),
    "what is missing": (_put(CLUSTER, "headGroupSpec", value={"rayStartParams": {}}), "template"),
}


@pytest.mark.parametrize("release", ["1.5.1", "1.7.0"])
@pytest.mark.parametrize("case", BROKEN)
def test_what_the_api_server_would_refuse_or_drop_is_found(
    objects: list[Object], case: str, release: str
) -> None:
    breaking, says = BROKEN[case]
    service = only(objects, "RayService")
    assert violations(service, release) == []
    broken = copy.deepcopy(service)
    breaking(broken)
    (found,) = violations(broken, release)
    assert says in found


def test_a_job_is_checked_as_well(objects: list[Object]) -> None:
    job = copy.deepcopy(only(objects, "RayJob"))
    assert violations(job, "1.7.0") == []
    job["spec"]["submissionmode"] = "HTTPMode"
    assert len(violations(job, "1.7.0")) == 1
    cluster = {**job, "kind": "RayCluster", "spec": job["spec"]["rayClusterSpec"]}
    assert violations(cluster, "1.7.0") == []


def test_releases_differ_in_what_they_know(helm4: Helm) -> None:
    """The token's Secret is supported since 1.6; older versions drop it."""
    rendered = helm4.template("--set", "rayAuth.existingSecret=token")
    service = only(rendered, "RayService")
    assert violations(service, "1.7.0") == []
    (found,) = violations(service, "1.5.1")
    assert "secretName" in found


@pytest.mark.parametrize(
    ("values", "storage"),
    [
        ("storage.size=2Gi", {"size": "2Gi"}),
        ("storage.storageClassName=ssd", {"size": "1Gi", "storageClassName": "ssd"}),
        ("storage.claimName=mine", {"claimName": "mine"}),
    ],
)
def test_the_gcs_may_store_its_state_on_a_volume(
    helm4: Helm, values: str, storage: dict[str, str]
) -> None:
    rendered = helm4.template(
        "--set",
        "gcsFaultTolerance.enabled=true,gcsFaultTolerance.backend=rocksdb,"
        f"upgradeStrategy.type=None,gcsFaultTolerance.{values}",
    )
    service = only(rendered, "RayService")
    options = service["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    assert options == {"backend": "rocksdb", "storage": storage}
    assert violations(service, "1.7.0") == []


DEFINITION = """
spec:
  names: {kind: RayThing}
  versions:
    - name: v1alpha1
      schema: {openAPIV3Schema: {type: object}}
    - name: v1
      schema:
        openAPIV3Schema:
          description: A thing.
          type: object
          properties:
            metadata: {type: object}
            status: {type: object, properties: {phase: {type: string}}}
            spec:
              type: object
              required: [count, mode]
              x-kubernetes-validations: [{rule: self.count > 1}]
              properties:
                count: {description: How many., type: integer, format: int32, minimum: 1}
                description: {type: string, maxLength: 9}
                limit:
                  anyOf: [{type: integer}, {type: string}]
                  x-kubernetes-int-or-string: true
                mode: {type: string, enum: [a, b], default: a}
                labels: {type: object, additionalProperties: {type: string}}
                names: {type: array, minItems: 1, items: {type: string}}
                template:
                  type: object
                  properties:
                    metadata: {type: object}
                    spec:
                      type: object
                      properties: {containers: {type: array, items: {type: object}}}
"""


def test_the_table_keeps_what_a_definition_says(tmp_path: Path) -> None:
    (tmp_path / "thing.yaml").write_text(DEFINITION)
    cron = yaml.safe_load(DEFINITION)
    cron["spec"]["names"]["kind"] = "RayCronJob"
    (tmp_path / "cron.yaml").write_text(yaml.safe_dump(cron))
    table = fields_of(tmp_path)
    assert table["definitions"] == {}
    assert list(table["kinds"]) == ["RayThing"]
    thing = table["kinds"]["RayThing"]
    assert thing["properties"].keys() == {"metadata", "spec"}
    assert thing["properties"]["spec"] == {
        "type": "object",
        "additionalProperties": False,
        "required": ["count"],
        "properties": {
            "count": {"type": "integer", "minimum": 1},
            "description": {"type": "string", "maxLength": 9},
            "limit": {"type": ["integer", "string"]},
            "mode": {"type": "string", "enum": ["a", "b"]},
            "labels": {"type": "object", "additionalProperties": {"type": "string"}},
            "names": {"type": "array", "minItems": 1, "items": {"type": "string"}},
            "template": POD_TEMPLATE,
        },
    }
