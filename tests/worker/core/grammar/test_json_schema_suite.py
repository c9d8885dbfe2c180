"""The JSON Schema Test Suite (draft 2020-12), which the source package of jsonschema ships: a
schema is rejected, or its valid instances are accepted and its invalid ones are not."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.worker.vocabularies import EOS, VOCAB_SIZE, allowed, make_backend
from worker.core.grammar.base import GrammarError, LoadedGrammar
from worker.core.grammar.matcher_state import MatcherState
from worker.protocol.sampling import SamplingParams
from worker.protocol.structured import StructuredOutputsParams

pytestmark = pytest.mark.long

BACKENDS = {name: make_backend(name) for name in ("xgrammar", "guidance")}
NOT_CANONICAL = {
    "format.json": "formats are enforced, not annotations",
    "bignum.json": "integers beyond those that are exact as floats",
    "ecmascript-regex.json": "classes on which ECMA-262 and Python disagree, control characters",
    "float-overflow.json": "1e308 for an integer",
    "vocabulary.json": "a meta schema elsewhere, without the vocabulary of validation",
    "email.json": "quoted local parts, addresses in place of hosts",
    "idn-email.json": "hosts that are not ASCII",
    "hostname.json": "punycode, labels of 62 characters and more, digits first in the last label",
    "idn-hostname.json": "hosts that are not ASCII",
    "iri.json": "IRIs that are not ASCII",
    "iri-reference.json": "IRIs that are not ASCII",
    "ipv6.json": "IPv4 addresses at the end",
    "date-time.json": "leap seconds, lower case",
    "time.json": "leap seconds, lower case",
    "uri.json": "IPv6 addresses as hosts",
    "uri-template.json": "modifiers of variables",
}
"""Files with valid instances that are rejected, and the accepted form."""
NOT_CANONICAL_GROUPS = ("nul characters in strings", "dependencies with escaped characters")


def suite() -> Path:
    """Folder of the suite. `make check-long` downloads it and sets the variable."""
    return Path(os.environ["JSON_SCHEMA_TEST_SUITE"]) / "tests" / "draft2020-12"


def accepts(grammar: LoadedGrammar, instance: Any) -> bool:
    state = MatcherState(grammar(), SamplingParams(), eos_token_ids=[EOS], vocab_size=VOCAB_SIZE)
    for byte in json.dumps(instance, ensure_ascii=False).encode():
        if byte not in allowed(state) or state.advance(byte) is not None:
            return False
    return state.is_complete or EOS in allowed(state)


def orders(instance: Any) -> Iterator[Any]:
    """Variants of an instance with integers as such, and with its members in each order, which
    grammars fix."""
    if isinstance(instance, float) and instance.is_integer():
        yield int(instance)
    elif isinstance(instance, list):
        yield [next(orders(item)) for item in instance]
    elif isinstance(instance, dict) and len(instance) < 5:
        for members in itertools.permutations(instance.items()):
            yield dict(members)
    else:
        yield instance


def check(path: Path, group: dict[str, Any], grammar: LoadedGrammar) -> int:
    """Checks the instances of a group; returns their number."""
    is_canonical = (
        path.name not in NOT_CANONICAL and group["description"] not in NOT_CANONICAL_GROUPS
    )
    for test in group["tests"]:
        place = (path.name, group["description"], test["description"], group["schema"])
        if not test["valid"]:
            assert not accepts(grammar, test["data"]), place
        elif is_canonical:
            assert any(accepts(grammar, instance) for instance in orders(test["data"])), place
    return len(group["tests"])


def test_the_suite() -> None:
    num_tests = num_rejected = 0
    for path in sorted(suite().rglob("*.json")):
        for group in json.loads(path.read_text()):
            schema = group["schema"]
            given = schema if isinstance(schema, dict) else {"allOf": [schema]}
            num_backends = 0
            for backend in BACKENDS.values():
                try:
                    params = StructuredOutputsParams(json=given)
                    grammar = backend.load(backend.compile(params))
                except GrammarError:
                    continue
                num_tests += check(path, group, grammar)
                num_backends += 1
            num_rejected += not num_backends
    assert num_tests > 1500
    assert num_rejected < 130, "no more are rejected than were"
