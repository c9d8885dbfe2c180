"""Grammars of arguments between tags, as Qwen3-Coder and GLM write them.

Texts are written as they are; other values are JSON. `router.parsers.arguments` reads them by the
types of each argument: where a text is among these, what is written is the text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from worker.core.grammar.base import GrammarError
from worker.core.grammar.json_schema.exact import Schema, exact_schema
from worker.core.grammar.json_schema.exclusive import types_of
from worker.core.grammar.json_schema.patterns import literal
from worker.core.grammar.json_schema.values import unsupported
from worker.protocol.argument_types import argument_types

Json = Any

_ALL = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_OF_TEXTS = ("minLength", "maxLength", "pattern")
_MAX_DEPTH = 8
_NAMES = "[A-Za-z_][A-Za-z0-9_]{0,63}"
"""Names of arguments that the schema does not list."""


class _Style(NamedTuple):
    """Tags of a model family."""

    before_name: str
    after_name: tuple[str, ...]
    """Texts between the name and the value; a line break is optional between two of them."""
    closing: str
    """Text after a value."""
    markers: tuple[str, ...]
    """Texts that cannot be in a value, since they end it."""


TAGGED_STYLES = {
    "qwen_xml": _Style(
        "<parameter=",
        (">\n",),
        "\n</parameter>",
        ("</parameter>", "<parameter=", "</function>", "</tool_call>"),
    ),
    "glm_xml": _Style(
        "<arg_key>",
        ("</arg_key>", "<arg_value>"),
        "</arg_value>",
        ("</arg_value>", "</tool_call>"),
    ),
}
"""Styles by the names that xgrammar has for them."""


class Writer(Protocol):
    """Writer of a Lark grammar."""

    def rule(self, body: str, options: str = "") -> str:
        """Adds a rule; returns its name."""
        ...

    def terminal(self, body: str) -> str:
        """Adds a terminal, a regular expression; returns its name."""
        ...

    def json(self, schema: Schema) -> str:
        """Expression of JSON under a rewritten schema."""
        ...


class TaggedArguments:
    """Writes the grammar of one function's arguments.

    Args:
        given: schema of the arguments.
        style: one of TAGGED_STYLES.
        writer: writer of the grammar.
    """

    def __init__(self, given: dict[str, Json], style: str, writer: Writer) -> None:
        self._schema = exact_schema(given)
        self._read_as = argument_types(given)
        self._definitions = self._schema.get("$defs", {})
        self._style = TAGGED_STYLES[style]
        self._writer = writer

    def expression(self) -> str:
        """Expression of the arguments.

        Raises:
            GrammarError: the schema has a keyword that is not supported between tags.
        """
        schema = self._resolved(self._schema)
        known = ("$defs", "type", "properties", "required", "additionalProperties")
        if other := [name for name in schema if name not in known]:
            raise _unsupported(other[0])
        properties, required = schema.get("properties", {}), schema.get("required", [])
        for name in required:
            if properties.get(name, False) is False:
                raise _unsupported(f"required with {name!r}, which is not among the properties,")
        parts = []
        for name, part in properties.items():
            if part is not False:
                argument = self._argument(_literal(name), part, self._read_as.get(name, {}))
                parts.append(argument if name in required else f"{argument}?")
        rest = schema.get("additionalProperties", True)
        if "string" in self._types(rest, 0) and self._is_free(rest):
            taken = "|".join(map(literal, properties)) or "-"
            name = self._writer.terminal(f"/{_NAMES}/ & ~/(?:{taken})/")
            parts.append(f"{self._argument(name, True, {})}*")
        elif rest is not False and not properties:
            raise _unsupported("additionalProperties with a schema")
        return self._writer.rule(" ".join(parts) or '""')

    def _argument(self, name: str, schema: Schema, read_as: Mapping[str, Json]) -> str:
        style = self._style
        between = ' "\\n"? '.join(map(_literal, style.after_name))
        opening = f'"\\n"? {_literal(style.before_name)} {name} {between}'
        types = read_as.get("type")
        if "enum" in read_as or types is None or "string" in types:
            if "enum" in read_as and self._values(schema) is None:
                raise _unsupported("enum beside other schemas")
            if "enum" not in read_as and "string" not in self._types(schema, 0):
                raise _unsupported("a schema whose types cannot be determined")
            return self._writer.rule(f"{opening} {self._text(schema)}")
        value = self._writer.json(self._with_definitions(schema))
        return self._writer.rule(f"{opening} {value} {_literal(style.closing)}")

    def _text(self, schema: Schema) -> str:
        """Expression of the texts under a schema, with the tag that ends them."""
        values = self._values(schema)
        if values is not None:
            choices = " | ".join(map(_literal, values))
            return self._writer.rule(f"({choices}) {_literal(self._style.closing)}")
        markers = "|".join(map(literal, self._style.markers))
        terms = ["/(?s:.*)/", f"~/(?s:.*)(?:{markers})(?s:.*)/", *self._terms(schema, 0)]
        closing = _literal(self._style.closing)
        text = self._writer.terminal(" & ".join(terms))
        whole = self._writer.terminal(f"{text} {closing}")
        return self._writer.rule(whole, "[lazy]")

    def _values(self, schema: Schema) -> list[str] | None:
        """Texts of all values of an enum; None if the schema has none."""
        part = self._resolved(schema)
        if "const" not in part and "enum" not in part:
            return None
        if other := [name for name in part if name not in ("const", "enum", "type", "$defs")]:
            raise _unsupported(f"{other[0]} beside enum")
        values = part["enum"] if "enum" in part else [part["const"]]
        texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
        if any(marker in text for text in texts for marker in self._style.markers):
            raise _unsupported("enum with a tag of the model")
        return texts

    def _is_free(self, schema: Schema) -> bool:
        """Whether any text is valid."""
        try:
            return self._values(schema) is None and not self._terms(schema, 0)
        except GrammarError:
            return False

    def _terms(self, schema: Schema, depth: int) -> list[str]:
        """Terminals that texts under a schema fit."""
        part = self._resolved(schema)
        if "string" not in self._types(part, 0):
            return []
        terms = []
        if "minLength" in part or "maxLength" in part:
            terms.append(f"/(?s:.{{{part.get('minLength', 0)},{part.get('maxLength', '')}}})/")
        if "pattern" in part:  # as rewritten, with anchors at both ends
            pattern = part["pattern"].removeprefix("^").removesuffix("$")
            terms.append("/" + pattern.replace("/", r"\/") + "/")
        if "const" in part or "enum" in part or depth > _MAX_DEPTH:
            raise _unsupported("enum beside other schemas")
        for one in part.get("allOf", ()):
            terms += self._terms(one, depth + 1)
        if "$ref" in part:
            terms += self._terms({"$ref": part["$ref"]}, depth + 1)
        branches = [one for one in part.get("anyOf", ()) if "string" in self._types(one, 0)]
        if len(branches) == 1:
            terms += self._terms(branches[0], depth + 1)
        elif branches and not any(map(self._is_free, branches)):
            raise _unsupported("anyOf of several texts")
        return terms

    def _types(self, schema: Schema, depth: int) -> frozenset[str]:
        """Types that a schema may allow."""
        if schema is False:
            return frozenset()
        part = self._resolved(schema)
        types = part.get("type", _ALL)
        found = frozenset([types] if isinstance(types, str) else types)
        if depth > _MAX_DEPTH:
            return found
        if "const" in part:
            found &= types_of(part["const"])
        if "enum" in part:
            found &= frozenset().union(*map(types_of, part["enum"]))
        if "anyOf" in part:
            branches = [self._types(one, depth + 1) for one in part["anyOf"]]
            found &= frozenset().union(*branches)
        for one in part.get("allOf", ()):
            found &= self._types(one, depth + 1)
        return found

    def _resolved(self, schema: Schema) -> dict[str, Json]:
        """A schema that is no mere reference."""
        part = {} if isinstance(schema, bool) else schema
        for _ in range(_MAX_DEPTH):
            if "$ref" not in part or set(part) - {"$ref", "$defs"}:
                return part
            found = self._definitions[part["$ref"].rpartition("/")[2]]
            part = {} if isinstance(found, bool) else found
        return part

    def _with_definitions(self, schema: Schema) -> Schema:
        if isinstance(schema, bool) or not self._definitions:
            return schema
        return {**schema, "$defs": self._definitions}


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _unsupported(keyword: str) -> GrammarError:
    return unsupported(keyword, "is not supported for arguments that the model writes between tags")
