"""Rewrites a schema's constraints on property names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from worker.core.grammar.json_schema.formats import FORMATS
from worker.core.grammar.json_schema.patterns import translated
from worker.core.grammar.json_schema.values import an_array, check_writable, count, unsupported

Json = Any

_KNOWN = frozenset(
    (
        *("$dynamicRef", "$recursiveRef", "$ref", "additionalItems", "additionalProperties"),
        *("allOf", "anyOf", "const", "contains", "dependencies", "dependentRequired"),
        *("dependentSchemas", "else", "enum", "exclusiveMaximum", "exclusiveMinimum", "format"),
        *("if", "items", "maxContains", "maxItems", "maxLength", "maxProperties", "maximum"),
        *("minContains", "minItems", "minLength", "minProperties", "minimum", "multipleOf", "not"),
        *("oneOf", "pattern", "patternProperties", "prefixItems", "properties", "propertyNames"),
        *("required", "then", "type", "unevaluatedItems", "unevaluatedProperties", "uniqueItems"),
    )
)
"""JSON Schema keywords that affect which values are valid."""


def constraints(schema: Mapping[str, Json]) -> dict[str, Json]:
    """Keywords of a schema, with their values, that affect which values are valid."""
    return {name: value for name, value in schema.items() if name in _KNOWN}


def check(out: Mapping[str, Json]) -> None:
    """Raises GrammarError for names that grammars cannot generate."""
    for keyword in ("properties", "required"):
        for name in out.get(keyword, ()):
            check_writable(name, keyword)
            if "patternProperties" in out and not (name.isascii() and name.isprintable()):
                raise unsupported(
                    "patternProperties", f"with property {name!r:.80} is not supported"
                )


def restrict(out: dict[str, Json], given: Mapping[str, Json]) -> None:
    """Restricts objects, given by their rewritten keywords `out`, to property names that match a
    schema.

    Raises:
        GrammarError: the schema, `propertyNames`, is not supported.
    """
    demands = constraints(given)
    types = demands.pop("type", "string")
    if "string" not in (types if isinstance(types, list) else [types]):
        out.update(properties={}, additionalProperties=False)
        out.pop("patternProperties", None)
        return
    if demands.get("format") not in FORMATS:
        demands.pop("format", None)
    if not demands:
        return
    if "patternProperties" in out:
        raise unsupported("propertyNames", "is not supported together with 'patternProperties'")
    rest = out.get("additionalProperties", True)
    if len(demands) == 1 and ("enum" in demands or "const" in demands):
        listed = an_array(demands, "enum") if "enum" in demands else [demands["const"]]
        allowed = [name for name in listed if isinstance(name, str)]
        listed_properties = out.get("properties", {})
        properties = {
            name: schema if name in allowed else False for name, schema in listed_properties.items()
        }
        out["properties"] = {**dict.fromkeys(allowed, rest), **properties}
        out["additionalProperties"] = False
        return
    if out.get("properties") or out.get("required"):
        raise unsupported("propertyNames", "together with 'properties' must be an enum")
    out["patternProperties"] = {_pattern(demands): rest}
    out["additionalProperties"] = False


def _pattern(demands: Mapping[str, Json]) -> str:
    """Pattern that matches the valid names. Raises GrammarError for keywords that are not
    supported.
    """
    if set(demands) == {"pattern"} and isinstance(demands["pattern"], str):
        return translated(demands["pattern"])
    if set(demands) == {"format"} and FORMATS[demands["format"]].max_length is None:
        return f"^(?:{FORMATS[demands['format']].pattern})$"
    if set(demands) <= {"minLength", "maxLength"}:
        minimum, maximum = count(demands, "minLength") or 0, count(demands, "maxLength")
        return f"^(?s:.){{{minimum},{'' if maximum is None else maximum}}}$"
    found = ", ".join(sorted(demands))
    raise unsupported("propertyNames", f"with {found} is not supported")
