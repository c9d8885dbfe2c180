"""Schemas written by Pydantic, zod and OpenAI's strict mode are accepted, with their values."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

from tests.support.worker.vocabularies import EOS, allowed, make_backend, make_state
from worker.core.grammar.base import GrammarBackend, GrammarError


def strict(**properties: Any) -> dict[str, Any]:
    """An object as OpenAI's strict mode requires it."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def loose(**properties: Any) -> dict[str, Any]:
    """An object as Pydantic writes it."""
    return {"type": "object", "title": "M", "properties": properties, "required": list(properties)}


TEXT, INTEGER, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
CAT = loose(kind={"const": "cat", "title": "Kind", "type": "string"}, lives=INTEGER)
DOG = loose(kind={"const": "dog", "title": "Kind", "type": "string"}, name=TEXT)
NODE = strict(value=INTEGER, next={"anyOf": [{"$ref": "#/$defs/node"}, NULL]})
LIST = strict(value=INTEGER, next={"anyOf": [{"$ref": "#"}, NULL]})
UUID = "6F9619FF-8B86-D011-B42D-00C04FC964FF".lower()
ZOD_EMAIL = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+"
    r"[A-Za-z]{2,}$"
)
ZOD_DATE = (
    r"^(?:(?:\d\d[2468][048]|\d\d[13579][26]|\d\d0[48]|[02468][048]00|[13579][26]00)-02-29|"
    r"\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|"
    r"(?:02)-(?:0[1-9]|1\d|2[0-8])))$"
)

ACCEPTED: dict[str, tuple[Any, Any]] = {
    "text": (TEXT, 'say "hi"\n\\ é'),
    "any object": ({"type": "object"}, {"a": [1, {"b": None}]}),
    "anything": ({}, [1.5e3, "a"]),
    "strict": (strict(city=TEXT, days=INTEGER), {"city": "Bern", "days": 3}),
    "nothing": (strict(), {}),
    "described": (loose(a={**TEXT, "description": "d", "examples": ["x"]}), {"a": "y"}),
    "default": (loose(a={**INTEGER, "default": 1, "title": "A"}), {"a": 2}),
    "open object": (loose(a=TEXT), {"a": "x", "more": 1}),
    "Optional": (loose(a={"anyOf": [TEXT, NULL], "default": None}), {"a": None}),
    "nullable": (strict(a={"type": ["string", "null"]}), {"a": None}),
    "Literal": (loose(a={"enum": ["x", "y"], "type": "string"}), {"a": "y"}),
    "mixed Literal": (loose(a={"enum": ["a", 1, None]}), {"a": 1}),
    "const": (loose(a={"const": "v1"}), {"a": "v1"}),
    "Enum": (
        {**loose(a={"$ref": "#/$defs/C"}), "$defs": {"C": {"enum": ["x"], "type": "string"}}},
        {"a": "x"},
    ),
    "described reference": (
        {**loose(a={"$ref": "#/$defs/C", "description": "d"}), "$defs": {"C": strict(b=TEXT)}},
        {"a": {"b": ""}},
    ),
    "allOf of one reference": (
        {**loose(a={"allOf": [{"$ref": "#/definitions/C"}]}), "definitions": {"C": INTEGER}},
        {"a": 1},
    ),
    "discriminated union": (
        {
            **loose(
                pet={
                    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
                    "discriminator": {
                        "propertyName": "kind",
                        "mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"},
                    },
                }
            ),
            "$defs": {"Cat": CAT, "Dog": DOG},
        },
        {"pet": {"kind": "dog", "name": "Bo"}},
    ),
    "union": ({"anyOf": [strict(a=INTEGER), strict(b=TEXT)]}, {"b": "x"}),
    "oneOf of types": ({"oneOf": [TEXT, INTEGER, {"type": "array"}]}, 5),
    "recursion": ({**NODE, "$defs": {"node": NODE}}, {"value": 1, "next": None}),
    "recursion to the root": (LIST, {"value": 1, "next": {"value": 2, "next": None}}),
    "list": (loose(a={"type": "array", "items": TEXT, "minItems": 1, "maxItems": 5}), {"a": ["x"]}),
    "tuple": (
        {"type": "array", "prefixItems": [INTEGER, TEXT], "minItems": 2, "maxItems": 2},
        [1, "a"],
    ),
    "tuple of draft 7": (
        {"$schema": DRAFT_7, "items": [INTEGER, TEXT], "additionalItems": False},
        [1, "a"],
    ),
    "dict": ({"type": "object", "additionalProperties": INTEGER}, {"a": 1, "b": 2}),
    "dict with bounds": (
        {"type": "object", "additionalProperties": TEXT, "maxProperties": 3, "minProperties": 1},
        {"a": "x"},
    ),
    "dict of patterns": (
        {"type": "object", "patternProperties": {"^x-": TEXT}, "additionalProperties": False},
        {"x-a": "1"},
    ),
    "dict by Enum": (
        {
            "type": "object",
            "propertyNames": {"$ref": "#/$defs/C"},
            "additionalProperties": INTEGER,
            "$defs": {"C": {"enum": ["x", "y"], "type": "string"}},
        },
        {"y": 1},
    ),
    "z.record": (
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
        {"k": []},
    ),
    "bounded text": (loose(a={**TEXT, "minLength": 1, "maxLength": 2000}), {"a": "x"}),
    "pattern": (loose(a={**TEXT, "pattern": r"^\d{3}-\d{4}$"}), {"a": "555-0100"}),
    "open pattern": (loose(a={**TEXT, "pattern": r"[A-Z]"}), {"a": "a B c"}),
    "z.email": ({**TEXT, "format": "email", "pattern": ZOD_EMAIL}, "o'k.a+b@mail.example.org"),
    "z.iso.date": ({**TEXT, "format": "date", "pattern": ZOD_DATE}, "2024-02-29"),
    "z.url": ({**TEXT, "format": "uri"}, "https://example.org/a?b=c#d"),
    "z.int": ({**INTEGER, "minimum": -(2**53) + 1, "maximum": 2**53 - 1}, -12),
    "int64": ({**INTEGER, "format": "int64", "minimum": -(2**63), "maximum": 2**63 - 1}, 7),
    "uint64": ({**INTEGER, "format": "uint64", "minimum": 0, "maximum": 2**64 - 1}, 7),
    "AnyUrl": ({**TEXT, "format": "uri", "minLength": 1, "maxLength": 2083}, "http://a.b/"),
    "datetime": ({**TEXT, "format": "date-time"}, "2026-11-28T06:00:00.5+01:00"),
    "date": ({**TEXT, "format": "date"}, "2026-11-28"),
    "time": ({**TEXT, "format": "time"}, "06:00:00Z"),
    "timedelta": ({**TEXT, "format": "duration"}, "P1DT2H"),
    "UUID": ({**TEXT, "format": "uuid"}, UUID),
    "IPv4Address": ({**TEXT, "format": "ipv4"}, "10.0.0.255"),
    "IPv6Address": ({**TEXT, "format": "ipv6"}, "2001:db8::1"),
    "hostname": ({**TEXT, "format": "hostname"}, "a-b.example.org"),
    "SecretStr": ({**TEXT, "format": "password", "writeOnly": True}, "x"),
    "bounded integer": ({**INTEGER, "minimum": 1, "exclusiveMaximum": 10}, 9),
    "bounded number": ({"type": "number", "minimum": 0, "maximum": 1}, 0.25),
    "PositiveFloat": ({"type": "number", "exclusiveMinimum": 0}, 0.001),
    "multiple": ({**INTEGER, "multipleOf": 5, "minimum": 0}, 15),
    "halves": ({"type": "number", "multipleOf": 0.5}, -2.5),
    "booleans of draft 4": ({**INTEGER, "minimum": 1, "exclusiveMinimum": True}, 2),
    "inheritance": (
        {"allOf": [loose(a=INTEGER), loose(b=TEXT)], "unevaluatedProperties": False},
        {"a": 1, "b": "x"},
    ),
    "draft 7": (
        {"$schema": DRAFT_7, **strict(a=INTEGER)},
        {"a": 1},
    ),
    "anchor": ({"$ref": "#here", "$defs": {"x": {"$anchor": "here", **INTEGER}}}, 1),
    "dependency": (
        {"properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
        {"a": 1, "b": 2},
    ),
    "one of several is required": (
        {**strict(), "properties": {"a": INTEGER, "b": INTEGER}, "minProperties": 1},
        {"b": 1},
    ),
    "alternatives of required": (
        {"properties": {"a": INTEGER}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"a": 1},
    ),
}


def accepts(backend: GrammarBackend, text: str, schema: Any) -> bool:
    state = make_state(backend, json=schema)
    for byte in text.encode():
        if byte not in allowed(state) or state.advance(byte) is not None:
            return False
    return state.is_complete or EOS in allowed(state)


@pytest.mark.parametrize(("schema", "value"), ACCEPTED.values(), ids=ACCEPTED)
def test_schemas_that_many_clients_send(schema: Any, value: Any) -> None:
    if schema.get("exclusiveMinimum") is not True:  # a schema of draft 4
        validator_for(schema, default=Draft202012Validator)(schema).validate(value)
    text, num_backends = json.dumps(value, ensure_ascii=False), 0
    for name in ("xgrammar", "guidance"):
        try:
            assert accepts(make_backend(name), text, schema), name
            num_backends += 1
        except GrammarError:
            assert name == "xgrammar"
    assert num_backends
