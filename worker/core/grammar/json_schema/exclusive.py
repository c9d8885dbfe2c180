"""Checks whether JSON schemas are mutually exclusive, so that `oneOf` is equivalent to `anyOf`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from worker.core.grammar.json_schema.references import References

Json = Any

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_MAX_BRANCHES = 32
"""Maximum number of alternatives of a schema that are compared. A schema with more is treated as
unconstrained."""
_MAX_DEPTH = 6


@dataclass(frozen=True, slots=True)
class _Branch:
    """Known constraints of one alternative of a schema; the alternative may have further ones."""

    types: frozenset[str] = frozenset(TYPES)
    values: tuple[Json, ...] | None = None
    """The only allowed values; None if any value is allowed."""
    required: frozenset[str] = frozenset()
    properties: Mapping[str, tuple[Json, ...]] = field(default_factory=dict)
    """Schemas of properties; a property must match all of its schemas."""
    closed: tuple[frozenset[str], ...] = ()
    """Sets of names: the name of each property must be in all of these sets."""
    minimum: float = float("-inf")
    maximum: float = float("inf")


class Exclusion:
    """Compares schemas of a document.

    Args:
        references: resolves the schemas' references.
    """

    def __init__(self, references: References) -> None:
        self._references = references

    def are_exclusive(self, first: Json, second: Json, depth: int = 0) -> bool:
        """Whether it is certain that no value is valid under both schemas."""
        if depth > _MAX_DEPTH:
            return False
        ours, theirs = self._branches(first, depth), self._branches(second, depth)
        return all(self._differ(first, second, depth) for first in ours for second in theirs)

    def _branches(self, schema: Json, depth: int) -> list[_Branch]:
        """Alternatives of a schema; empty if no value is valid."""
        if schema is False:
            return []
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            return [_Branch()]
        branches = [_of_keywords(schema)]
        parts: list[Sequence[Json]] = [[part] for part in _listed(schema, "allOf")]
        if "$ref" in schema:
            parts.append([self._references.find(schema, "$ref")])
        parts += [found for name in ("anyOf", "oneOf") if (found := _listed(schema, name))]
        for alternatives in parts:
            found = [branch for part in alternatives for branch in self._branches(part, depth + 1)]
            if len(found) * len(branches) <= _MAX_BRANCHES:
                branches = [_both(first, second) for first in branches for second in found]
        return branches

    def _differ(self, first: _Branch, second: _Branch, depth: int) -> bool:
        """Whether no value is valid under both branches."""
        types = _shared(first.types, second.types)
        if first.values is not None or second.values is not None:
            return not _common_values(first, second, types)
        for name in types:
            if name in ("integer", "number"):
                if first.minimum <= second.maximum and second.minimum <= first.maximum:
                    return False
            elif name != "object" or not self._objects_differ(first, second, depth):
                return False
        return True

    def _objects_differ(self, first: _Branch, second: _Branch, depth: int) -> bool:
        names = first.required | second.required
        for name in sorted(names):
            if any(name not in known for known in (*first.closed, *second.closed)):
                return True
            for schema in first.properties.get(name, ()):
                for theirs in second.properties.get(name, ()):
                    if self.are_exclusive(schema, theirs, depth + 1):
                        return True
        return False


def _of_keywords(schema: Mapping[str, Json]) -> _Branch:
    branch = _Branch()
    given = schema.get("type")
    if isinstance(given, str):
        branch = replace(branch, types=frozenset((given,)))
    elif isinstance(given, list):
        branch = replace(branch, types=frozenset(name for name in given if isinstance(name, str)))
    if "const" in schema:
        branch = replace(branch, values=(schema["const"],))
    elif isinstance(schema.get("enum"), list):
        branch = replace(branch, values=tuple(schema["enum"]))
    if isinstance(required := schema.get("required"), list):
        names = frozenset(name for name in required if isinstance(name, str))
        branch = replace(branch, required=names)
    properties = schema.get("properties")
    if isinstance(properties, dict):
        known = {name: (part,) for name, part in properties.items()}
        branch = replace(branch, properties=known)
    if schema.get("additionalProperties") is False and not schema.get("patternProperties"):
        branch = replace(branch, closed=(frozenset(branch.properties),))
    bounds = [schema.get("minimum"), schema.get("maximum")]
    low, high = (
        value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
        for value in bounds
    )
    return replace(
        branch,
        minimum=branch.minimum if low is None else low,
        maximum=branch.maximum if high is None else high,
    )


def _both(first: _Branch, second: _Branch) -> _Branch:
    properties = dict(first.properties)
    for name, schemas in second.properties.items():
        properties[name] = properties.get(name, ()) + schemas
    return _Branch(
        types=_shared(first.types, second.types),
        values=second.values if first.values is None else first.values,
        required=first.required | second.required,
        properties=properties,
        closed=first.closed + second.closed,
        minimum=max(first.minimum, second.minimum),
        maximum=min(first.maximum, second.maximum),
    )


def _shared(first: frozenset[str], second: frozenset[str]) -> frozenset[str]:
    """Types in both sets; an integer is also a number."""
    shared = first & second
    for mine, theirs in ((first, second), (second, first)):
        if "integer" in mine and "number" in theirs:
            shared |= {"integer"}
    return shared


def _common_values(first: _Branch, second: _Branch, types: frozenset[str]) -> bool:
    """Whether a value that is listed by one of the branches may be valid under the other one."""
    given = first.values if first.values is not None else second.values
    assert given is not None
    for value in given:
        if not types & types_of(value):
            continue
        if first.values is None or second.values is None:
            return True
        if any(same(value, theirs) for theirs in second.values):
            return True
    return False


def types_of(value: Json) -> frozenset[str]:
    """JSON Schema type names of a value."""
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return frozenset({"integer", "number"})
    names = {float: "number", str: "string", type(None): "null", list: "array", dict: "object"}
    return frozenset({names[type(value)]})


def same(first: Json, second: Json) -> bool:
    """Whether two values are equal in JSON Schema, where 1 equals 1.0 but not true."""
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(
            same(first[name], second[name]) for name in first
        )
    return bool(first == second)


def _listed(schema: Mapping[str, Json], keyword: str) -> Sequence[Json]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []
