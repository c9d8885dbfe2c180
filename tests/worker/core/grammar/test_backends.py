"""What the libraries make of schemas, patterns, choices and grammars."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.support.worker.vocabularies import follow, make_backend
from worker.core.grammar.base import GrammarBackend, GrammarError
from worker.core.grammar.exactness import inexact_keyword
from worker.core.grammar.guidance_backend import GuidanceBackend
from worker.wire.structured import StructuredOutputsParams


def accepts(backend: GrammarBackend, text: str, **params: Any) -> bool:
    try:
        follower = follow(backend, **params)
        for byte in text.encode():
            if follower.advance(byte) is not None:
                return False
    except GrammarError:
        return False
    octets = follower.mask
    return follower.is_complete or bool(octets[256 // 8] & 1)


LIST = {
    "$ref": "#/$defs/n",
    "$defs": {
        "n": {
            "type": "object",
            "properties": {"next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}},
            "required": ["next"],
        }
    },
}
OLD_TAG = {
    "structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}],
    "triggers": ["<f>"],
}

CASES: list[tuple[dict[str, Any], str, str]] = [
    ({"json": {"type": "integer", "minimum": 5}}, "7", "3"),
    ({"json": '{"type": "string", "pattern": "^.{0,2}$"}'}, '"ab"', '"abc"'),
    ({"json": LIST}, '{"next": {"next": null}}', '{"next": {"next": 1}}'),
    ({"json": {"const": {"a": 1}}, "disable_any_whitespace": True}, '{"a":1}', '{"a": 2}'),
    ({"json_object": True}, '{"a": [1, {"b": null}]}', "[1]"),
    ({"regex": r"\d{3}-\d{2}"}, "123-45", "123-4x"),
    ({"choice": ["ja", 'n"ein\\', "müßig\n"]}, "müßig\n", "mü"),
    ({"choice": ["ja", 'n"ein\\', "müßig\n"]}, 'n"ein\\', "nein"),
    ({"grammar": 'root ::= "a" root | "b"'}, "aab", "aa"),
    ({"grammar": 'start: "a" start | "b"'}, "aab", "aa"),
]


@pytest.mark.parametrize("name", ["xgrammar", "guidance"])
@pytest.mark.parametrize(("params", "good", "bad"), CASES, ids=lambda value: str(value)[:30])
def test_what_conforms_is_accepted_and_nothing_else(
    name: str, params: dict[str, Any], good: str, bad: str
) -> None:
    backend = make_backend(name)
    assert accepts(backend, good, **params)
    assert not accepts(backend, bad, **params)


def test_texts_of_bounded_length_are_json() -> None:
    schema = {"type": "string", "minLength": 1, "maxLength": 3}
    backend = make_backend("guidance")
    assert accepts(backend, '"a\\tb"', json=schema)
    assert not accepts(backend, '"a\tb"', json=schema)
    with pytest.raises(GrammarError, match="maxLength"):  # it would let the tab through
        make_backend("xgrammar").compile(StructuredOutputsParams(json=schema))


def test_of_forced_text_the_longest_tokens_are_admitted() -> None:
    """llguidance admits nothing but the first token of what has to follow."""
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


def test_texts_of_patterns_are_json() -> None:
    few, many = ({"type": "string", "pattern": f"^.{{1,{count}}}$"} for count in (99, 200))
    for backend, schema in (("xgrammar", few), ("guidance", few), ("guidance", many)):
        assert accepts(make_backend(backend), '"ab"', json=schema)
        assert not accepts(make_backend(backend), '"a\tb"', json=schema)
    with pytest.raises(GrammarError, match="pattern"):  # it would let the tab through
        make_backend("xgrammar").compile(StructuredOutputsParams(json=many))


def test_structural_tags_of_both_forms() -> None:
    backend = make_backend("xgrammar")
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


def params_of(tag: str) -> Any:
    return StructuredOutputsParams(structural_tag=tag)


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"properties": {"x": {"not": {"type": "null"}}}}, "not"),
        ({"anyOf": [{"type": "null"}, {"if": {}, "then": {"minimum": 1}}]}, "if"),
        ({"$ref": "#/$defs/a", "minimum": 2, "$defs": {"a": {}}}, "minimum beside $ref"),
        ({"type": "string", "enum": ["a", 1]}, "type beside enum"),
        ({"type": "object", "required": ["a"]}, "required without properties of the same name"),
        ({"items": {"type": "string", "maxLength": 10}}, "maxLength"),
        ({"properties": {"x": {"type": "string", "minLength": 1}}}, "minLength"),
        ({"type": "string", "minLength": 0}, None),
        ({"items": {"pattern": "^[a-z]{2,200}$"}}, "pattern"),
        ({"items": {"pattern": "^[a-z]{200}$"}}, "pattern"),
        ({"items": {"pattern": "^[a-z]{2,20}$"}}, None),
        ({"properties": {"not": {}, "if": {}, "uniqueItems": {}}}, None),
        ({"enum": [{"not": 1}], "description": "d"}, None),
        ({"type": "string", "enum": ["a", "b"]}, None),
        ({"$ref": "#/$defs/a", "$defs": {"a": {}}, "title": "t"}, None),
        (True, None),
    ],
)
def test_what_would_not_be_enforced_is_found(schema: Any, keyword: str | None) -> None:
    found = inexact_keyword(json.loads(json.dumps(schema)))
    assert found == keyword or (keyword == "if" and found in ("if", "then"))
