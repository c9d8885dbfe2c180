"""Schemas, patterns, choices and grammars in both libraries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.worker.vocabularies import make_backend, make_state
from worker.core.grammar.base import GrammarBackend, GrammarError
from worker.core.grammar.exactness import inexact_keyword
from worker.core.grammar.guidance_backend import GuidanceBackend
from worker.core.grammar.lark_tags import lark_of
from worker.protocol.structured import StructuredOutputsParams


def accepts(backend: GrammarBackend, text: str, **params: Any) -> bool:
    try:
        state = make_state(backend, **params)
        for byte in text.encode():
            if state.advance(byte) is not None:
                return False
    except GrammarError:
        return False
    octets = state.mask
    return state.is_complete or bool(octets[256 // 8] & 1)


LIST = {
    "$ref": "#/$defs/n",
    "$defs": {
        "n": {
            "type": "object",
            "properties": {"next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}},
            "required": ["next"],
            "additionalProperties": False,
        }
    },
}
OLD_TAG = {
    "structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}],
    "triggers": ["<f>"],
}

CASES: list[tuple[dict[str, Any], str, str]] = [
    ({"json": {"type": "integer", "minimum": 5}}, "7", "3"),
    ({"json": '{"type": "string"}'}, '"ab"', '"a\tb"'),
    ({"json": LIST}, '{"next": {"next": null}}', '{"next": {"next": 1}}'),
    ({"json": {"enum": [1, "a"]}, "disable_any_whitespace": True}, '"a"', "2"),
    ({"json_object": True}, '{"a": [1, {"b": null}]}', "[1]"),
    ({"regex": r"\d{3}-\d{2}"}, "123-45", "123-4x"),
    ({"choice": ["ja", 'n"ein\\', "müßig\n"]}, "müßig\n", "mü"),
    ({"choice": ["ja", 'n"ein\\', "müßig\n"]}, 'n"ein\\', "nein"),
    ({"grammar": 'root ::= "a" root | "b"'}, "aab", "aa"),
    ({"grammar": 'start: "a" start | "b"'}, "aab", "aa"),
]


@pytest.mark.parametrize("name", ["xgrammar", "guidance"])
@pytest.mark.parametrize(("params", "good", "bad"), CASES, ids=lambda value: str(value)[:30])
def test_only_matching_texts_are_accepted(
    name: str, params: dict[str, Any], good: str, bad: str
) -> None:
    backend = make_backend(name)
    assert accepts(backend, good, **params)
    assert not accepts(backend, bad, **params)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "minLength": 1, "maxLength": 3}, '"a\\tb"', '"a\tb"'),
        ({"type": "string", "pattern": "^.{1,99}$"}, '"ab"', '"a\tb"'),
        ({"type": "string", "pattern": "^.{1,200}$"}, '"ab"', '"a\tb"'),
        ({"type": "string", "pattern": '^[^"]*$'}, '"ab"', '"a\\"b"'),
        ({"type": "string", "pattern": '^["\\\\]{2}$'}, r'"\"\\"', '"""'),
        ({"type": "string", "pattern": "^a$", "format": "ipv4"}, None, '"a"'),
        ({"type": "string", "pattern": "^1", "format": "ipv4"}, '"1.2.3.4"', '"1.2.3.04"'),
        ({"const": {"a": 1}}, '{"a": 1}', '{"a": 2}'),
        ({"not": {}}, None, "1"),
        ({"properties": {"a": {}}, "unevaluatedProperties": False}, '{"a": 1}', '{"b": 1}'),
        ({"properties": {"a": False}}, '{"b": 1}', '{"a": 1}'),
        ({"properties": {"a": False}}, '{"b": 1}', r'{"\u0061": 1}'),
        ({"type": "number", "exclusiveMaximum": 1}, "0.9999999999", "0.99999999999999999999"),
    ],
)
def test_what_guidance_enforces(schema: Any, good: str | None, bad: str) -> None:
    backend = make_backend("guidance")
    assert good is None or accepts(backend, good, json=schema)
    assert not accepts(backend, bad, json=schema)


def test_the_longest_tokens_of_forced_text_are_allowed() -> None:
    """llguidance only admits the first token of forced text."""
    tokens = [*(bytes([byte]) for byte in range(128)), b"name", b'name":', b"na"]
    backend = GuidanceBackend([*tokens, b""], [len(tokens)])
    schema = {
        "type": "object",
        "properties": {"name": {"type": "integer"}},
        "required": ["name"],
        "additionalProperties": False,
    }
    params = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    matcher = backend.load(backend.compile(params))()
    words = np.zeros(-(-(len(tokens) + 1) // 32), dtype=np.int32)
    for byte in b'{"':
        assert matcher.accept(byte)
    matcher.fill(words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert [tokens[token_id] for token_id in np.flatnonzero(bits)] == [b'name":']


@pytest.mark.parametrize("name", ["xgrammar", "guidance"])
def test_structural_tags_of_both_forms(name: str) -> None:
    backend = make_backend(name)
    tag = {
        "type": "tag",
        "begin": "<f>",
        "end": "</f>",
        "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
    }
    new = {
        "type": "structural_tag",
        "format": {"type": "triggered_tags", "triggers": ["<f>"], "tags": [tag]},
    }
    for form in (OLD_TAG, new, {"format": new["format"]}):
        assert accepts(backend, "so <f>12</f> it is", structural_tag=form)
        assert not accepts(backend, "so <f>x</f> it is", structural_tag=form)
    for broken in ("[]", "{", '{"structures": [{}], "triggers": []}', '{"type": "x"}'):
        with pytest.raises(GrammarError, match="structural_tag"):
            backend.compile(params_of(broken))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "const_string", "value": 5}, "value of const_string must be a string, got 5"),
        ({"type": "sequence", "elements": "a"}, "elements of sequence must be a list of formats"),
        (
            {"type": "tag", "begin": "a", "content": {}, "end": [1]},
            "end of tag must be a string or",
        ),
        ({"type": "triggered_tags", "triggers": ["a"], "tags": ["x"]}, "must be a list of tags"),
        (
            {"type": "triggered_tags", "triggers": ["a"], "tags": [{"begin": 4}]},
            "begin of tag must be a string, got 4",
        ),
        ({"type": "json_schema", "json_schema": True, "max_whitespace_cnt": []}, "an integer"),
    ],
)
def test_fields_of_structural_tags_with_wrong_types(part: dict[str, Any], message: str) -> None:
    with pytest.raises(GrammarError, match=f"structural_tag: .*{message}"):
        lark_of({"format": part})


def params_of(tag: str) -> Any:
    return StructuredOutputsParams(structural_tag=tag)


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "array", "items": {"type": "string", "maxLength": 10}}, "maxLength"),
        ({"properties": {"x": {"type": "string", "minLength": 1}}}, "properties"),
        ({"type": "object", "properties": {"a": {}}}, "additionalProperties with properties"),
        ({"type": "string", "pattern": "^a$"}, "pattern"),
        ({"$ref": "#/$defs/a", "minimum": 2, "$defs": {"a": {}}}, "minimum with $ref"),
        ({"type": "object", "required": ["a"]}, "required without properties of the same name"),
        ({"anyOf": [{"type": "null"}, {"allOf": [{}]}]}, "allOf"),
        ({"enum": ['a"b']}, "enum"),
        ({"type": "string", "enum": ["a", "b"]}, None),
        ({"$ref": "#/$defs/a", "$defs": {"a": {}}}, None),
        ({"type": "integer", "minimum": 2}, None),
        ({}, None),
    ],
)
def test_keywords_that_xgrammar_ignores_are_detected(schema: Any, keyword: str | None) -> None:
    assert inexact_keyword(schema) == keyword


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"properties": {"x": {"not": {"const": 1}}}}, "not"),
        ({"anyOf": [{"type": "null"}, {"if": {"minimum": 2}, "then": {"minimum": 1}}]}, "if"),
        ({"type": "array", "contains": {"type": "null"}}, "contains"),
        ({"oneOf": [{"minimum": 1}, {"maximum": 5}]}, "oneOf"),
        ({"anyOf": [{}], "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"type": "number", "multipleOf": 0.01}, "multipleOf"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"type": "string", "pattern": "(?=a)"}, "pattern"),
        ({"type": "string", "format": "regex"}, "format"),
        ({"$ref": "https://example.org/schema"}, "$ref"),
        ({"$ref": "#/$defs/none"}, "$ref"),
        ({"patternProperties": {"a": {}, "b": {"type": "null"}}}, "patternProperties"),
        ({"type": "record"}, "type"),
        ({"minLength": -1}, "minLength"),
        ({"required": "a"}, "required"),
        ({"const": 2**53 + 1}, "const"),
    ],
)
def test_unsupported_keywords_are_named_in_the_error(schema: Any, keyword: str) -> None:
    for name in ("xgrammar", "guidance"):
        for params in ({"json": schema}, {"structural_tag": tag_of(schema)}):
            with pytest.raises(GrammarError) as rejection:
                make_backend(name).compile(StructuredOutputsParams(**params))
            assert keyword in str(rejection.value)


@pytest.mark.parametrize(("least", "required"), [(0, []), (1, ["a"])])
def test_min_properties_that_required_implies_is_supported_between_tags(
    least: int, required: list[str]
) -> None:
    properties = {"a": {"type": "integer"}}
    schema = {"properties": properties, "required": required, "minProperties": least}
    text = "<f><arg_key>a</arg_key><arg_value>1</arg_value></f>"
    assert accepts(make_backend("guidance"), text, structural_tag=tag_of(schema, "glm_xml"))


def tag_of(schema: Any, style: str = "json") -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": schema, "style": style}
    return {"format": {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}}
