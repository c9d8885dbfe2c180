"""Formats of tool calls and reasoning from a checkpoint's `response_template` (transformers).

Templates are supported if a streamable format can be derived from them: fields whose delimiters are
literal texts, and calls as JSON with name and arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from router.parsers.formats import ToolFormat, json_format
from router.parsers.thoughts import ThoughtFormat

NAME = "response_template"
"""Name of the formats derived from a response template."""
_THOUGHTS = ("thinking", "reasoning", "reasoning_content")
"""Names of message fields that contain reasoning, in order of precedence."""
_PLACEHOLDER = re.compile(r"\{([\w.]+)\}")
_PLACEHOLDERS = {
    "content",
    *("content.name", "content.tool_name", "content.arguments", "content.parameters"),
}
"""Placeholders of transforms that keep a call's name and arguments."""


def tools_of_response(template: object) -> ToolFormat | None:
    """The tool call format of a response template; None if it has none, or an unsupported one."""
    field = _fields(template).get("tool_calls")
    if not isinstance(field, Mapping) or field.get("content") != "json":
        return None
    used = set(_PLACEHOLDER.findall(json.dumps(field.get("transform"))))
    opening, closing = _literals(field.get("open")), _literals(field.get("close"))
    if len(opening) != 1 or len(closing) > 1 or field.get("content_args") or used - _PLACEHOLDERS:
        return None
    if "close_pattern" in field:
        return None
    return json_format(NAME, opening[0], "".join(closing))


def thoughts_of_response(template: object) -> ThoughtFormat | None:
    """The reasoning format of a response template; None if it has none, or an unsupported one."""
    fields = _fields(template)
    for field in (fields[name] for name in _THOUGHTS if name in fields):
        if not isinstance(field, Mapping) or field.get("content", "text") != "text":
            continue
        opening, closing = _literals(field.get("open")), _literals(field.get("close"))
        if opening and closing:
            return ThoughtFormat(
                name=NAME,
                opening=opening[0].strip(),
                closing=closing[0].strip(),
                other_openings=tuple(text.strip() for text in opening[1:]),
                other_closings=tuple(text.strip() for text in closing[1:]),
                sign=re.compile("(?!)"),
            )
    return None


def _fields(template: object) -> Mapping[str, Any]:
    """The fields of a template; empty if it is malformed or of another version."""
    if not isinstance(template, Mapping) or template.get("version", 1) != 1:
        return {}
    fields = template.get("fields")
    return fields if isinstance(fields, Mapping) else {}


def _literals(given: object) -> list[str]:
    """The literal delimiters of a field; empty if there are none, or one is only whitespace."""
    literals = given if isinstance(given, list) else [given]
    valid = [text for text in literals if isinstance(text, str) and text.strip()]
    return valid if len(valid) == len(literals) else []
