"""Detects parts of a rewritten JSON schema that xgrammar 0.2.8 does not enforce exactly.

xgrammar ignores some keywords, applies only one of several combined keywords, allows raw control
characters in bounded strings and patterns, and lets a listed property be repeated as an additional
one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_KEYWORDS: Mapping[str, frozenset[str]] = {
    "boolean": frozenset(),
    "null": frozenset(),
    "string": frozenset(),
    "number": frozenset(),
    "integer": frozenset({"minimum", "maximum"}),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
"""Keywords that xgrammar enforces, by the type of the values that they apply to."""
_ALONE = ("$ref", "anyOf", "const", "enum")
"""Keywords that xgrammar enforces only if the schema has no other keywords."""


def inexact_keyword(schema: Any) -> str | None:
    """First keyword or combination of keywords of a rewritten schema that is not enforced; None if
    all are."""
    return next((found for part in _parts(schema) if (found := _inexact(part))), None)


def _inexact(part: Any) -> str | None:
    if part is False:
        return "false"
    if part is True or not part:
        return None
    keywords: list[str] = [name for name in part if name not in ("$defs", "type")]
    for keyword in _ALONE:
        if keyword in part:
            others = [name for name in keywords if name != keyword]
            if not others and "type" in part and keyword not in ("const", "enum"):
                others = ["type"]
            if others:
                return f"{others[0]} with {keyword}"
            if keyword in ("const", "enum"):
                values = part["enum"] if keyword == "enum" else [part["const"]]
                return None if all(map(_is_plain, values)) else keyword
            return None
    kind = part.get("type")
    if not isinstance(kind, str):
        return keywords[0] if keywords else None
    unknown = [name for name in keywords if name not in _KEYWORDS[kind]]
    if unknown:
        return unknown[0]
    return _inexact_object(part) if kind == "object" else None


def _inexact_object(part: Mapping[str, Any]) -> str | None:
    properties = part.get("properties", {})
    if any(name not in properties for name in part.get("required", ())):
        return "required without properties of the same name"
    if properties and part.get("additionalProperties", True) is not False:
        return "additionalProperties with properties"
    if not all(map(_is_plain, properties)):
        return "properties with special characters"
    return None


def _is_plain(value: Any) -> bool:
    """Whether a value of `const` or `enum`, or a name, can be spelled in only one way in JSON."""
    if isinstance(value, str):
        return value.isprintable() and not set('"\\') & set(value)
    return value is None or isinstance(value, (bool, int))


def _parts(schema: Any) -> Iterator[Any]:
    """A schema and all its subschemas."""
    pending = [schema]
    while pending:
        part = pending.pop()
        is_closed = isinstance(part, dict) and part.get("additionalProperties") is False
        yield part
        if not isinstance(part, dict):
            continue
        if not is_closed and "additionalProperties" in part:
            pending.append(part["additionalProperties"])
        pending += [part[name] for name in ("items",) if name in part]
        for name in ("anyOf", "allOf", "prefixItems"):
            pending += part.get(name, [])
        for name in ("properties", "patternProperties", "$defs"):
            pending += part.get(name, {}).values()
