"""Random JSON schemas over all keywords, and random texts of grammars."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from tests.support.worker.vocabularies import EOS, TOKENS, allowed
from worker.core.grammar.matcher_state import MatcherState

NAMES = ("a", "b", "c", "ab", "x y", 'q"', "é", "\\")
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 1.0, 2.5, 0.1, -0.0, 1e3, 10**12, "", "a", "b", "ab", "é\n"),
    *('say "hi"', "\\", "1", [], [1], ["a", None], {}, {"a": 1}, {"a": {"b": [True]}}),
)
NUMBERS = (0, 1, -1, 2, 3, 7, 10, 100, -5, 0.5, 0.1, 1.5, -2.25, 1e-9, 1e5, 12345.678, 2**31, 2**63)
DIVISORS = (1, 2, 3, 5, 10, 7, 100, 0.5, 0.25, 0.1, 0.01, 1.5, 1.0, 1e6)
PATTERNS = (
    *("^a+$", "a", "^[a-c]{2,4}$", r"^\d+$", r"\w", r"^\S*$", "^.{0,3}$", '^["\\\\]*$', r"^\s?$"),
    *("^(a|b)c?$", "^a|b$", "[^a]", r"^\W{1,2}$", r"^[^\d\s]+$", r"^\u0022$", "^x", "y$", "^$"),
    *("^(?!a)", r"\bx", "(a)\\1", "^[\\x00-\\x1f]$", "^a{130}$", r"^-?(0|[1-9]\d*)$", '^[^"]+$'),
)
FORMATS = (
    *("date", "date-time", "time", "duration", "email", "idn-email", "hostname", "idn-hostname"),
    *("ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template"),
    *("json-pointer", "relative-json-pointer", "regex", "int32", "password", "made-up"),
)
_REFERENCES = ("#", "#/$defs/one", "#/$defs/two", "#anchor", "#/properties/a", "#/definitions/old")


class SchemaGenerator:
    """Generates schemas.

    Args:
        draw: source of randomness.
    """

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._makers: dict[str, Callable[[int], Any]] = {
            **dict.fromkeys(("minimum", "maximum"), self._number),
            **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), self._number),
            "multipleOf": lambda _: draw.choice(DIVISORS),
            **dict.fromkeys(("minLength", "maxLength"), self._count),
            "pattern": lambda _: draw.choice(PATTERNS),
            "format": lambda _: draw.choice(FORMATS),
            **dict.fromkeys(("minItems", "maxItems", "minContains", "maxContains"), self._count),
            **dict.fromkeys(("minProperties", "maxProperties"), self._count),
            "uniqueItems": lambda _: draw.random() < 0.5,
            **dict.fromkeys(("items", "contains", "additionalProperties"), self.schema),
            **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), self._verdict),
            **dict.fromkeys(("propertyNames", "not", "if", "then", "else"), self.schema),
            **dict.fromkeys(("prefixItems", "allOf", "anyOf", "oneOf"), self._several),
            **dict.fromkeys(("properties", "dependentSchemas"), self._named),
            "patternProperties": lambda depth: {
                draw.choice(PATTERNS): self.schema(depth) for _ in range(draw.randint(1, 2))
            },
            "required": lambda _: self._some_names(),
            "dependentRequired": lambda _: {draw.choice(NAMES): self._some_names()},
            "type": self._type,
            "const": lambda _: draw.choice(VALUES),
            "enum": lambda _: draw.sample(VALUES, draw.randint(1, 4)),
            "$ref": lambda _: draw.choice(_REFERENCES),
        }
        self.keywords = sorted(self._makers)

    def document(self, keywords: tuple[str, ...] = ()) -> dict[str, Any]:
        """A complete schema with these and other keywords, and definitions to refer to."""
        found = self._object(2, keywords)
        found.setdefault("properties", {}).setdefault("a", self.schema(1))
        found["$defs"] = {
            "one": {"$anchor": "anchor", **self._object(1)},
            "two": self.schema(1),
        }
        found["definitions"] = {"old": self.schema(1)}
        return found

    def schema(self, depth: int) -> Any:
        """A schema of at most this depth."""
        if depth <= 0 or self._draw.random() < 0.15:
            simple: list[Any] = [True, False, {}, {"$ref": self._draw.choice(_REFERENCES)}]
            return self._draw.choice(simple + [{"type": name} for name in TYPES] * 2)
        return self._object(depth)

    def _object(self, depth: int, keywords: tuple[str, ...] = ()) -> dict[str, Any]:
        draw = self._draw
        chosen = [*keywords, *draw.sample(self.keywords, draw.choice((0, 1, 1, 2, 3)))]
        if draw.random() < 0.6:
            chosen.append("type")
        draw.shuffle(chosen)
        return {name: self._makers[name](depth - 1) for name in chosen}

    def _number(self, _: int) -> Any:
        return self._draw.choice(NUMBERS)

    def _count(self, _: int) -> int:
        return self._draw.choice((0, 1, 1, 2, 3))

    def _verdict(self, depth: int) -> Any:
        return False if self._draw.random() < 0.5 else self.schema(depth)

    def _several(self, depth: int) -> list[Any]:
        return [self.schema(depth) for _ in range(self._draw.randint(1, 3))]

    def _named(self, depth: int) -> dict[str, Any]:
        names = self._draw.sample(NAMES, self._draw.randint(1, 3))
        return {name: self.schema(depth) for name in names}

    def _some_names(self) -> list[str]:
        return self._draw.sample(NAMES, self._draw.randint(0, 2))

    def _type(self, _: int) -> Any:
        if self._draw.random() < 0.2:
            return self._draw.sample(TYPES, self._draw.randint(1, 3))
        return self._draw.choice(TYPES)


_SNIPPETS = tuple(
    snippet.encode()
    for snippet in (
        *('"a":', '"b":', '"ab":', '"c":', '"\\u0061":', '"A":', '"q\\"":', '"\\\\":', '"x y":'),
        *('"', "}", "]", "{}", "[]", "1.0", "-0", "1e5", "0.10", "00", "1e999", "null", "true"),
        *('"\\n"', "\t", "\x1f", '\\"', "\\", "\\ud800", "é", "-02-29", "999", ".5", "\x7f"),
    )
)


def walk(
    state: MatcherState,
    draw: random.Random,
    limit: int = 300,
    closing: Sequence[bytes] = (),
) -> bytes | None:
    """A text of a grammar over single bytes; None if it does not end within `limit` bytes.

    Bytes are drawn from those that may follow, and often the longest possible part of a snippet
    that is likely to show a fault.

    Args:
        closing: texts that end a value and that single bytes would not form by chance; one is
            written often.
    """
    drawn = b""
    snippets = (*_SNIPPETS, *closing)
    while len(drawn) < limit and not state.is_complete:
        choices = allowed(state)
        if EOS in choices and draw.random() < 0.4:
            return drawn
        choices -= {EOS}
        if len(drawn) > limit // 2 and (ends := choices & set(b'"]}')):
            choices = ends
        if draw.random() < 0.3:
            is_closing = closing and len(drawn) > limit // 2
            for byte in draw.choice(closing if is_closing else snippets):
                if state.is_complete or byte not in allowed(state):
                    break
                assert state.advance(byte) is None
                drawn += bytes((byte,))
            continue
        token_id = draw.choice(sorted(choices))
        assert state.advance(token_id) is None
        drawn += TOKENS[token_id]
    return drawn if state.is_complete else None
