"""Parts of a JSON schema that xgrammar 0.2.8 does not enforce, and does not warn of.

It warns of others (see `worker.front.grammar.compiling`). A schema with any of them would yield
text that parses but need not validate.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_IGNORED = (
    "$dynamicRef",
    "contains",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "else",
    "if",
    "not",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
    "uniqueItems",
)

_LENGTHS = ("maxLength", "minLength")
"""Bounds of strings, under which xgrammar allows raw control characters, which JSON does not, and
no escapes."""

_MANY_TIMES = re.compile(r"\{\d*,?\d{3}")
"""Large repetitions in a pattern: from 129 times on, xgrammar allows raw control characters in what
is repeated, too."""

_ALTERNATIVES = ("$ref", "anyOf", "allOf", "oneOf", "const", "enum")
"""Keywords of which xgrammar reads only the first that it finds, and nothing beside it."""

_HARMLESS = (
    "$comment",
    "$defs",
    "$id",
    "$schema",
    "default",
    "definitions",
    "deprecated",
    "description",
    "discriminator",
    "examples",
    "nullable",
    "readOnly",
    "title",
    "writeOnly",
)
"""Keywords without an effect on what is valid, but for definitions that others refer to."""

_ONE = ("additionalProperties", "items", "propertyNames", "additionalItems")
_MANY = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")


def inexact_keyword(schema: Any) -> str | None:
    """First keyword of a schema, or combination of keywords, that is not enforced; None if all
    are."""
    for part in _parts(schema):
        for keyword in _IGNORED:
            if part.get(keyword) not in (None, False, {}, []):
                return keyword
        for keyword in _LENGTHS:
            if part.get(keyword):
                return keyword
        if _MANY_TIMES.search(part.get("pattern", "")):
            return "pattern"
        for keyword in _ALTERNATIVES:
            beside = [name for name in part if name != keyword and name not in _HARMLESS]
            if keyword in part and not _agrees(part, keyword, beside):
                return f"{beside[0]} beside {keyword}"
        properties = part.get("properties", {})
        if any(name not in properties for name in part.get("required", ())):
            return "required without properties of the same name"
    return None


def _agrees(part: dict[str, Any], keyword: str, beside: list[str]) -> bool:
    """Whether the keywords beside an alternative add nothing to it."""
    if not beside:
        return True
    if keyword not in ("const", "enum") or beside != ["type"]:
        return False
    values = [part["const"]] if keyword == "const" else part["enum"]
    types = part["type"] if isinstance(part["type"], list) else [part["type"]]
    return isinstance(values, list) and all(_is_of(value, types) for value in values)


def _is_of(value: Any, types: list[Any]) -> bool:
    names = {
        bool: ("boolean",),
        int: ("integer", "number"),
        float: ("number",),
        str: ("string",),
        type(None): ("null",),
        list: ("array",),
        dict: ("object",),
    }
    return any(name in types for name in names[type(value)])


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema and all its subschemas."""
    pending = [schema]
    while pending:
        part = pending.pop()
        if not isinstance(part, dict):
            continue
        yield part
        pending += [part[name] for name in _ONE if name in part]
        for name in _MANY:
            if isinstance(part.get(name), list):
                pending += part[name]
        for name in _NAMED:
            if isinstance(part.get(name), dict):
                pending += part[name].values()
