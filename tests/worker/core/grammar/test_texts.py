"""Texts in structural tags: each that xgrammar admits is JSON, and as its schema has it."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.support.worker.vocabularies import TOKENS, allowed, follow, make_backend
from worker.core.grammar.base import GrammarBackend

NUM_WALKS = 12
TEXT = {"type": "string", "minLength": 2, "maxLength": 9}
SCHEMAS: dict[str, Any] = {
    "bounded": TEXT,
    "property": {
        "type": "object",
        "properties": {"x": TEXT},
        "required": ["x"],
        "additionalProperties": False,
    },
    "items": {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 3},
    "or null": {"anyOf": [TEXT, {"type": "null"}]},
    "referred to": {"$ref": "#/$defs/text", "$defs": {"text": TEXT}},
    "pattern": {"type": "string", "pattern": r"^[a-f]{2,4}-\d+\.\w$"},
}


def tag(schema: Any, style: str = "json") -> dict[str, Any]:
    """As the arguments of a function are forced."""
    content = {
        "type": "json_schema",
        "json_schema": schema,
        "style": style,
        "max_whitespace_cnt": 1,
    }
    return {"format": {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}}


def walk(backend: GrammarBackend, draw: random.Random, form: dict[str, Any]) -> bytes:
    """A text of the form, each byte drawn from those that may follow."""
    follower, drawn = follow(backend, structural_tag=form), b""
    while not follower.is_complete:
        token_id = draw.choice(sorted(allowed(follower)))
        assert follower.advance(token_id) is None
        drawn += TOKENS[token_id]
    return drawn


def accepts(backend: GrammarBackend, text: bytes, form: dict[str, Any]) -> bool:
    follower = follow(backend, structural_tag=form)
    return all(follower.advance(byte) is None for byte in text) and follower.is_complete


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_whatever_is_drawn_conforms(schema: Any) -> None:
    backend, draw = make_backend("xgrammar"), random.Random(0)
    validator = Draft202012Validator(schema)
    for _ in range(NUM_WALKS):
        text = walk(backend, draw, tag(schema))
        validator.validate(json.loads(text.removeprefix(b"<f>").removesuffix(b"</f>")))


def test_what_conforms_is_admitted_with_its_escapes() -> None:
    backend = make_backend("xgrammar")
    for text, is_good in ((r"a\n\"b", True), (r"\\\\", True), ("a\t", False), ("a", False)):
        assert accepts(backend, f'<f>"{text}"</f>'.encode(), tag(TEXT)) is is_good
    assert accepts(backend, b'<f>"123456789"</f>', tag(TEXT))
    assert not accepts(backend, b'<f>"1234567890"</f>', tag(TEXT))


def test_texts_that_are_no_json_stay_as_they_are() -> None:
    form = tag({"type": "object", "properties": {"x": TEXT}, "required": ["x"]}, "qwen_xml")
    call = "<f><parameter=x>{}</parameter></f>"
    assert accepts(make_backend("xgrammar"), call.format('say\t"hi"').encode(), form)
