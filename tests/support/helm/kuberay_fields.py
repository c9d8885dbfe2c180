"""Fields of KubeRay's resources: a JSON schema per release, next to this file.

It is made from a release's CustomResourceDefinitions and keeps names, types, enumerations, bounds
and what is required. With a clone of KubeRay:

    git -C kuberay archive v1.7.0 ray-operator/config/crd/bases | tar -x
    python -m tests.support.helm.kuberay_fields ray-operator/config/crd/bases > 1.7.0.json

The schema omits status, pod templates (which are checked as pods), CEL rules, and the controller's
checks. An object with an unlisted field is rejected, although the API server would only drop the
field, because dropped fields are the faults to find.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import jsonschema
import yaml

from tests.support.helm.chart import LOADER, Object

TABLES = Path(__file__).with_name("kuberay_releases")
VERSION = "v1"
KEPT = ("enum", "maxLength", "minItems", "minLength", "minimum", "maximum", "pattern", "type")
POD_TEMPLATE: Object = {"type": "object"}
WORTH_SHARING = 200
"""Minimum number of characters of a part that is written only once and shared."""


def violations(o: Object, release: str) -> list[str]:
    """Fields that the API server of a cluster with this KubeRay release would reject or drop."""
    found = _validator(release, o["kind"]).iter_errors(o)
    return sorted(f"{error.json_path}: {error.message[:200]}" for error in found)


@cache
def _validator(release: str, kind: str) -> jsonschema.Draft7Validator:
    table = json.loads((TABLES / f"{release}.json").read_text())
    schema = {**table["kinds"][kind], "definitions": table["definitions"]}
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema)


def fields_of(folder: Path) -> Object:
    """The table of the definitions in a folder: a schema per kind, and parts that several schemas
    share.

    RayCronJobs, which newer releases have, are left out, because the chart creates none.
    """
    kinds = {}
    for path in sorted(folder.glob("*.yaml")):
        definition = yaml.load(path.read_text(), Loader=LOADER)["spec"]
        if definition["names"]["kind"] == "RayCronJob":
            continue
        (version,) = (v for v in definition["versions"] if v["name"] == VERSION)
        whole = version["schema"]["openAPIV3Schema"]
        del whole["properties"]["status"]
        schema = _closed(whole)
        schema["properties"]["metadata"] = {"type": "object"}
        kinds[definition["names"]["kind"]] = schema
    return _shared(kinds)


def _closed(node: Object) -> Object:
    """A node of an OpenAPI schema as a JSON schema that allows only the listed fields."""
    fields: Object = node.get("properties", {})
    if fields.keys() == {"metadata", "spec"} and "containers" in fields["spec"]["properties"]:
        return POD_TEMPLATE
    out: Object = {name: node[name] for name in KEPT if name in node}
    if node.get("x-kubernetes-int-or-string"):
        out = {**out, "type": ["integer", "string"]}
    if fields:
        out["properties"] = {name: _closed(field) for name, field in fields.items()}
        out["additionalProperties"] = False
        # The API server fills in defaults before it validates.
        required = [name for name in node.get("required", ()) if "default" not in fields[name]]
        if required:
            out["required"] = required
    if "items" in node:
        out["items"] = _closed(node["items"])
    if isinstance(node.get("additionalProperties"), dict):
        out["additionalProperties"] = _closed(node["additionalProperties"])
    return out


def _shared(kinds: Object) -> Object:
    """`kinds` in which each larger recurring part is defined once, named by its first place."""
    times: Counter[str] = Counter()
    names: dict[str, str] = {}

    def count(node: Object, path: str) -> None:
        text = json.dumps(node, sort_keys=True)
        times[text] += 1
        if times[text] > 1:
            return
        names[text] = path
        for field, child in node.get("properties", {}).items():
            count(child, f"{path}.{field}")
        for part in ("items", "additionalProperties"):
            if isinstance(node.get(part), dict):
                count(node[part], f"{path}.{part}")

    definitions: Object = {}

    def pack(node: Object) -> Object:
        text = json.dumps(node, sort_keys=True)
        packed = dict(node)
        if "properties" in node:
            packed["properties"] = {k: pack(v) for k, v in node["properties"].items()}
        for part in ("items", "additionalProperties"):
            if isinstance(node.get(part), dict):
                packed[part] = pack(node[part])
        if times[text] == 1 or len(text) < WORTH_SHARING:
            return packed
        definitions[names[text]] = packed
        return {"$ref": f"#/definitions/{names[text]}"}

    for kind, schema in kinds.items():
        count(schema, kind)
    return {"kinds": {k: pack(schema) for k, schema in kinds.items()}, "definitions": definitions}


if __name__ == "__main__":
    json.dump(fields_of(Path(sys.argv[1])), sys.stdout, indent=1, sort_keys=True)
    print()
