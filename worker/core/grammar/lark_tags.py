"""Structural tags as llguidance's Lark grammars, for schemas that xgrammar does not enforce.

Supports the formats used by forced and strict tool calls and by the legacy form of structural tags:
const_string, json_schema, sequence, tag, tags_with_separator and triggered_tags.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from worker.core.grammar.base import MAX_WHITESPACE, GrammarError
from worker.core.grammar.json_schema.exact import Schema, exact_schema
from worker.core.grammar.tagged_arguments import TAGGED_STYLES, TaggedArguments

Format = Mapping[str, Any]

_ESCAPES = 'nrbtf\\"'
"""Escape sequences allowed in JSON. Without code point escapes, a text can be written in only one
way, so that no property name can be repeated as an additional property."""

_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "value": ((str,), "a string"),
    "json_schema": ((dict, bool), "a JSON schema"),
    "style": ((str,), "a string"),
    "max_whitespace_cnt": ((int, type(None)), "an integer"),
    "elements": ((list,), "a list of formats"),
    "begin": ((str,), "a string"),
    "end": ((str, list), "a string or a list of strings"),
    "tags": ((list,), "a list of tags"),
    "separator": ((str,), "a string"),
    "triggers": ((list,), "a list of strings"),
}
"""Types of the fields of formats, and their description for errors."""
_LISTS: dict[str, type] = {"end": str, "tags": dict, "triggers": str}
"""Types of the entries of lists; entries of `elements` are checked when they are written."""


def lark_of(tag: Mapping[str, Any]) -> str:
    """Lark grammar of a structural tag in the current form.

    Raises:
        GrammarError: a format of the tag, or a keyword of a schema, is unsupported.
    """
    writer = _Writer()
    start = writer.expression(tag["format"])
    return "\n".join([f"start: {start}", *writer.rules]) + "\n"


class _Writer:
    """Writes the rules and terminals of a Lark grammar to `rules`."""

    def __init__(self) -> None:
        self.rules: list[str] = []
        self._max_whitespace = MAX_WHITESPACE
        self._kinds: dict[str, Callable[[Format], str]] = {
            "const_string": lambda part: _literal(part["value"]),
            "json_schema": self._schema,
            "sequence": lambda part: " ".join(map(self.expression, part["elements"])) or '""',
            "tag": self._tag,
            "tags_with_separator": self._separated,
            "triggered_tags": self._triggered,
        }

    def expression(self, part: Format) -> str:
        """Lark expression for a format; adds the rules that the expression needs."""
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise GrammarError("structural_tag: each format must be an object with a string 'type'")
        if kind not in self._kinds:
            known = ", ".join(self._kinds)
            raise GrammarError(
                f"structural_tag: llguidance does not support type {kind!r:.80}: choose from "
                f"{known}"
            )
        _check(part, kind)
        try:
            return self._kinds[kind](part)
        except KeyError as error:
            raise GrammarError(f"structural_tag: {kind} requires the field {error}") from error

    def rule(self, body: str, options: str = "") -> str:
        """Adds a rule and returns its name."""
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def terminal(self, body: str) -> str:
        """Adds a terminal for a regular expression and returns its name."""
        name = f"T{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def json(self, schema: Schema) -> str:
        """Expression for JSON that matches a rewritten schema."""
        body = {} if schema is True else schema
        options = {"x-guidance": json_options(self._max_whitespace)}
        return self.rule("%json " + json.dumps({**body, **options} if body is not False else False))

    def _schema(self, part: Format) -> str:
        style = part.get("style", "json")
        limit = part.get("max_whitespace_cnt")
        self._max_whitespace = MAX_WHITESPACE if limit is None else int(limit)
        if style == "json":
            return self.json(exact_schema(part["json_schema"]))
        if style not in TAGGED_STYLES:
            known = ", ".join(["json", *TAGGED_STYLES])
            raise GrammarError(
                f"structural_tag: llguidance does not support style {style!r:.80}: choose from "
                f"{known}"
            )
        return TaggedArguments(part["json_schema"], style, self).expression()

    def _tag(self, part: Format, taken: int = 0) -> str:
        """Rule for a tag without the first `taken` characters of its begin text."""
        _check(part, "tag")
        ends = part["end"] if isinstance(part["end"], list) else [part["end"]]
        content = self.expression(part["content"])
        closing = " | ".join(map(_literal, ends))
        return self.rule(f"{_literal(part['begin'][taken:])} {content} ({closing})")

    def _separated(self, part: Format) -> str:
        tags = self.rule(" | ".join(map(self._tag, part["tags"])))
        if part.get("stop_after_first"):
            more = tags
        else:
            more = self.rule(f"{tags} ({_literal(part['separator'])} {tags})*")
        return more if part.get("at_least_one") else self.rule(f"{more}?")

    def _triggered(self, part: Format) -> str:
        """Expression for free text with tags that start with triggers. Each trigger must be
        followed by the rest of a tag."""
        text = "/(?s:.*)/"
        calls = []
        for trigger in part["triggers"]:
            for tag in part["tags"]:
                _check(tag, "tag")
            begun = [tag for tag in part["tags"] if tag["begin"].startswith(trigger)]
            head = self.rule(f"{text} {_literal(trigger)}", "[lazy]")
            tags = " | ".join(self._tag(tag, len(trigger)) for tag in begun)
            calls.append(self.rule(f"{head} ({tags})"))
        call, tail = self.rule(" | ".join(calls)), self.rule(text)
        needed = bool(part.get("at_least_one"))
        if part.get("stop_after_first"):
            return call if needed else self.rule(f"{call} | {tail}")
        return self.rule(f"{call}{'+' if needed else '*'} {tail}")


def json_options(max_whitespace: int | None) -> dict[str, object]:
    """llguidance options for JSON.

    Args:
        max_whitespace: maximum number of consecutive white-space characters; None for compact JSON.
    """
    options: dict[str, object] = {"json_allowed_escapes": _ESCAPES}
    if max_whitespace is None:
        return {**options, "whitespace_flexible": False}
    return {**options, "whitespace_pattern": rf"[ \n\r\t]{{0,{max_whitespace}}}"}


def _check(part: Format, kind: str) -> None:
    """Raises GrammarError if a field of a format has the wrong type."""
    for name, (types, expected) in _TYPES.items():
        if name not in part:
            continue
        value = part[name]
        entry = _LISTS.get(name, object)
        if not isinstance(value, types) or (
            isinstance(value, list) and not all(isinstance(item, entry) for item in value)
        ):
            raise GrammarError(
                f"structural_tag: {name} of {kind} must be {expected}, got {value!r:.80}"
            )


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
