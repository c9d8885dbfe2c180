"""Structural tags: converts the legacy form, which vLLM clients still send, to the current one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from worker.core.grammar.base import GrammarError


def modern_tag(text: str) -> dict[str, Any]:
    """Converts a tag to the current form, `{"type": "structural_tag", "format": ...}`.

    The legacy form is `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`: free text
    in which each trigger is followed by one of the structures.

    Raises:
        GrammarError: the text is in neither form.
    """
    try:
        tag = json.loads(text)
    except ValueError as error:
        raise GrammarError(f"structural_tag is not valid JSON: {error}") from error
    except RecursionError as error:
        raise GrammarError("structural_tag is nested too deeply: simplify it") from error
    if not isinstance(tag, dict):
        raise GrammarError("structural_tag must be a JSON object")
    if "format" in tag:
        return {"type": "structural_tag", **tag}
    try:
        tags = [
            {
                "type": "tag",
                "begin": structure["begin"],
                "content": {"type": "json_schema", "json_schema": structure["schema"]},
                "end": structure["end"],
            }
            for structure in tag["structures"]
        ]
        triggers = list(tag["triggers"])
    except (KeyError, TypeError) as error:
        raise GrammarError(
            'structural_tag must have "format", or "structures" (each with begin, schema, end) '
            'and "triggers"'
        ) from error
    return {
        "type": "structural_tag",
        "format": {"type": "triggered_tags", "triggers": triggers, "tags": tags},
    }


def with_schemas(tag: Any, rewrite: Callable[[Any, str], Any]) -> Any:
    """The tag with all of its JSON schemas rewritten.

    Args:
        tag: the tag, or a part of it.
        rewrite: called with each schema and the style of its text (json, qwen_xml, glm_xml, …).
    """
    if isinstance(tag, list):
        return [with_schemas(part, rewrite) for part in tag]
    if not isinstance(tag, dict):
        return tag
    changed = {}
    for name, value in tag.items():
        if name == "json_schema":
            changed[name] = rewrite(value, tag.get("style", "json"))
        else:
            changed[name] = with_schemas(value, rewrite)
    return changed
