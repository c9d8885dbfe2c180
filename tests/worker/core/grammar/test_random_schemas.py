"""Texts that are sampled freely under random JSON schemas are valid: under `response_format`, in
forced calls and in strict calls."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from router.parsers import FORMATS, Call, CallArguments, OutputParser
from tests.support.effort import cases
from tests.support.worker.random_schemas import SchemaGenerator, walk
from tests.support.worker.vocabularies import EOS, VOCAB_SIZE, allowed, make_backend
from worker.core.grammar.base import GrammarBackend, GrammarError, LoadedGrammar
from worker.core.grammar.matcher_state import MatcherState
from worker.core.grammar.tagged_arguments import TAGGED_STYLES
from worker.protocol.argument_types import argument_types
from worker.protocol.sampling import SamplingParams
from worker.protocol.structured import StructuredOutputsParams

NUM_SCHEMAS = 2500
NUM_SHARDS = 10
NUM_TEXTS = 2
FORCED = sorted(name for name, tools in FORMATS.items() if tools.before)
BACKENDS = {name: make_backend(name) for name in ("xgrammar", "guidance")}


def schemas(shard: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Schemas of a shard with their seeds; two of three have two given keywords, so that all pairs
    occur."""
    for seed in range(shard, cases(NUM_SCHEMAS, 10), NUM_SHARDS):
        made = SchemaGenerator(random.Random(seed))
        names = made.keywords
        number = seed * 7919
        pair = (names[number % len(names)], names[number // len(names) % len(names)])
        yield seed, made.document(pair if seed % 3 else ())


def loaded(backend: GrammarBackend, **params: Any) -> LoadedGrammar | None:
    """The grammar, as a compiling process accepts it; None for one that it rejects."""
    try:
        grammar = backend.load(backend.compile(StructuredOutputsParams(**params)))
        return grammar if allowed(state_of(grammar)) else None
    except GrammarError:
        return None


def state_of(grammar: LoadedGrammar) -> MatcherState:
    return MatcherState(grammar(), SamplingParams(), eos_token_ids=[EOS], vocab_size=VOCAB_SIZE)


def value_of(text: bytes) -> Any:
    """The value of a JSON text; numbers beyond floats are the largest float."""

    def number(written: str) -> float:
        value = float(written)
        return value if math.isfinite(value) else math.copysign(1.7e308, value)

    return json.loads(text, parse_float=number)


def check(schema: Mapping[str, Any], value: Any) -> None:
    checker = Draft202012Validator.FORMAT_CHECKER
    errors = list(Draft202012Validator(schema, format_checker=checker).iter_errors(value))
    assert not errors, (value, errors[0].message, schema)


@pytest.mark.parametrize("shard", range(NUM_SHARDS))
def test_texts_under_a_response_format(shard: int) -> None:
    num_checked = num_schemas = 0
    for seed, schema in schemas(shard):
        num_schemas += 1
        for backend in BACKENDS.values():
            if (grammar := loaded(backend, json=schema)) is None:
                continue
            draw = random.Random(seed)
            for _ in range(NUM_TEXTS):
                if (text := walk(state_of(grammar), draw)) is not None:
                    check(schema, value_of(text))
                    num_checked += 1
    assert num_checked > num_schemas, "most schemas are accepted"


@pytest.mark.parametrize("is_strict", [False, True], ids=["forced", "strict"])
@pytest.mark.parametrize("name", FORCED)
def test_arguments_of_calls(name: str, is_strict: bool) -> None:
    tools = FORMATS[name]
    style = TAGGED_STYLES.get(tools.style)
    closing = [style.closing.encode()] if style else []
    num_schemas = num_accepted = num_checked = 0
    for seed, parameters in schemas(FORCED.index(name)):
        num_schemas += 1
        schema = {**parameters, "type": "object"}
        made = (tools.free_text_tag if is_strict else tools.calls_tag)(
            {"act": schema}, single_call=True
        )
        if made is None:  # no marker distinguishes calls from text
            return
        for backend in BACKENDS.values():
            if (grammar := loaded(backend, structural_tag=made)) is None:
                continue
            num_accepted += 1
            call = state_of(grammar)
            for byte in tools.before.replace("NAME", "act").encode() if is_strict else b"":
                assert call.advance(byte) is None
            text = walk(call, random.Random(seed), limit=900, closing=closing)
            if text is None:
                continue
            before = tools.before.replace("NAME", "act") if is_strict else ""
            check(schema, arguments(name, before + text.decode(), schema))
            num_checked += 1
    assert num_checked >= 0.9 * num_accepted, "nearly all texts end"
    assert num_accepted > num_schemas // 5, "many schemas are accepted"


def arguments(name: str, text: str, parameters: Mapping[str, Any]) -> Any:
    """Arguments of the only call in a text, as a client gets them."""
    properties = {"act": argument_types(parameters)}
    parser = OutputParser(
        thoughts=None, is_thinking=False, tools=FORMATS[name], properties=properties
    )
    pieces = parser.push(text) + parser.end()
    assert [type(piece) for piece in pieces[:2]] == [Call, CallArguments], (text, pieces)
    found = [piece.text for piece in pieces if isinstance(piece, CallArguments)]
    return value_of("".join(found).encode())
