"""Typical JSON schemas of applications. Their sizes are bounded, so that each text can
terminate."""

from __future__ import annotations

from random import Random
from typing import Any, Final

_PROPERTIES: Final[dict[str, dict[str, Any]]] = {
    "name": {"type": "string", "minLength": 1, "maxLength": 20},
    "age": {"type": "integer", "minimum": 0, "maximum": 120},
    "score": {"enum": [0.5, 1.5, 2.5]},
    "active": {"type": "boolean"},
    "nothing": {"type": "null"},
    "color": {"enum": ["red", "green", "blue"]},
    "kind": {"const": "event"},
    "day": {"type": "string", "format": "date"},
    "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "minItems": 1, "maxItems": 3},
    "numbers": {
        "type": "array",
        "items": {"type": "integer", "minimum": -9, "maximum": 9},
        "maxItems": 4,
    },
    "pair": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, {"enum": ["x", "y"]}],
        "items": False,
        "minItems": 2,
    },
    "address": {
        "type": "object",
        "properties": {
            "street": {"type": "string", "maxLength": 16},
            "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
        },
        "required": ["street", "zip"],
        "additionalProperties": False,
    },
    "either": {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 8}]},
    "unit": {"$ref": "#/$defs/unit"},
    "grüße": {"type": "string", "maxLength": 10},
}
_DEFINITIONS: Final = {"unit": {"enum": ["kg", "m", "s"]}}


def schemas(count: int, seed: int) -> list[dict[str, Any]]:
    """Objects with two to five properties, some of them optional, and arrays of such objects."""
    rng = Random(seed)
    made = []
    for number in range(count):
        # Each property comes first in some schema.
        first = list(_PROPERTIES)[number % len(_PROPERTIES)]
        others = rng.sample([name for name in _PROPERTIES if name != first], k=rng.randrange(1, 5))
        names = [first, *others]
        rng.shuffle(names)
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: _PROPERTIES[name] for name in names},
            "required": [name for name in names if name == first or rng.random() < 0.7],
            "additionalProperties": False,
        }
        if rng.random() < 0.2:
            schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 2}
        made.append({**schema, "$defs": _DEFINITIONS} if "unit" in names else schema)
    return made
