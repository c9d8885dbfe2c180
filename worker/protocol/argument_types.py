"""Types of a function's arguments, for parsing and generating tagged tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Schemas = Mapping[str, Any]
"""JSON schemas of one function's arguments, by argument name."""

_ALL = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_MAX_DEPTH = 16
"""Maximum nesting depth of references and alternatives."""


def argument_types(parameters: Mapping[str, Any]) -> Schemas:
    """Reduces the schema of each argument to `type` and `enum`.

    References and alternatives are resolved: each reduced schema has all types that may be valid,
    or the allowed values.

    Args:
        parameters: JSON schema of the function's arguments.
    """
    properties = parameters.get("properties")
    if not isinstance(properties, dict):
        return {}
    return {name: _reduced(parameters, schema) for name, schema in properties.items()}


def _reduced(root: Mapping[str, Any], schema: Any) -> dict[str, Any]:
    for _ in range(_MAX_DEPTH):
        found = _target(root, schema)
        if found is None:
            break
        schema = found
    if isinstance(schema, dict) and isinstance(values := schema.get("enum"), list):
        return {"enum": values}
    if isinstance(schema, dict) and "const" in schema:
        return {"enum": [schema["const"]]}
    types = _types(root, schema, 0)
    return {} if types == _ALL else {"type": sorted(types)}


def _target(root: Mapping[str, Any], schema: Any) -> Any:
    """Target of a schema's `$ref`; None if there is none."""
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for part in reference.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _types(root: Mapping[str, Any], schema: Any, depth: int) -> frozenset[str]:
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return _ALL
    given = schema.get("type")
    listed = [given] if isinstance(given, str) else given
    types = _ALL
    if isinstance(listed, list):
        types = frozenset(name for name in listed if isinstance(name, str))
    for values in ([schema["const"]] if "const" in schema else None, schema.get("enum")):
        if isinstance(values, list):
            types &= frozenset().union(*map(_types_of, values))
    parts: list[Sequence[Any]] = [
        branches for name in ("anyOf", "oneOf") if isinstance(branches := schema.get(name), list)
    ]
    if isinstance(schema.get("allOf"), list):
        parts += [[part] for part in schema["allOf"]]
    if (found := _target(root, schema)) is not None:
        parts.append([found])
    for branches in parts:
        found_types = [_types(root, branch, depth + 1) for branch in branches]
        types &= frozenset().union(*found_types)
    return types


def _types_of(value: Any) -> frozenset[str]:
    if isinstance(value, bool):
        return frozenset({"boolean"})
    names = {str: "string", float: "number", list: "array", dict: "object", type(None): "null"}
    if isinstance(value, int):
        return frozenset({"integer", "number"})
    return frozenset({names.get(type(value), "string")})
