"""Structured outputs: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from __future__ import annotations

from typing import Any

import msgspec

from router.api.openai.long_strings import CutJson
from router.errors import bad_request
from worker.protocol.analyzed import analyzed
from worker.protocol.structured import MAX_GRAMMAR_BYTES, StructuredOutputsParams

_FIELDS = ("response_format", "structured_outputs", "output_config", "text")
"""Fields that request structured outputs in any API's bodies."""
_FORMATS = ("text", "json_object", "json_schema", "structural_tag")


def structured_outputs(
    response_format: dict[str, Any] | None, extra: dict[str, Any] | None
) -> StructuredOutputsParams | None:
    """The structured outputs that a body requests; None if it requests none.

    Args:
        response_format: OpenAI's field.
        extra: vLLM's `structured_outputs`.

    Raises:
        ApiError: 400 if a field is invalid, or both fields are set.
    """
    by_format = _of_format(response_format)
    given = {name: value for name, value in (extra or {}).items() if value is not None}
    if not given:
        return by_format
    if by_format is not None:
        raise bad_request(
            "response_format and structured_outputs are mutually exclusive", "structured_outputs"
        )
    for name in given:
        if name not in StructuredOutputsParams.__struct_fields__:
            known = ", ".join(StructuredOutputsParams.__struct_fields__)
            raise bad_request(
                f"structured_outputs.{name} is not supported: choose from {known}",
                "structured_outputs",
            )
    return _convert(given, "structured_outputs")


def check_grammar_sizes(body: CutJson) -> None:
    """Checks the size of grammars in a large body without decoding them.

    Decoding many megabytes would block all streams of this process for 0.1 s.

    Raises:
        ApiError: 400 if a grammar exceeds the maximum size.
    """
    if body.num_bytes(memoryview(body.skeleton)) <= MAX_GRAMMAR_BYTES:
        return
    try:
        fields = msgspec.json.decode(body.skeleton, type=analyzed(dict[str, msgspec.Raw]))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return  # the full decoding fails too, and reports it
    for name in _FIELDS:
        size = body.num_bytes(memoryview(fields.get(name, msgspec.Raw())))
        # Twice the limit, since whitespace and names around a schema do not count.
        if size > 2 * MAX_GRAMMAR_BYTES:
            raise bad_request(
                f"{name} has {size} bytes; the maximum for a grammar is {MAX_GRAMMAR_BYTES} bytes",
                name,
            )


def _of_format(response_format: dict[str, Any] | None) -> StructuredOutputsParams | None:
    if response_format is None:
        return None
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "json_schema":
        wrapped = response_format.get("json_schema")
        schema = wrapped.get("schema") if isinstance(wrapped, dict) else None
        if not isinstance(schema, dict):
            raise bad_request(
                "response_format.json_schema.schema must be a JSON schema (an object)",
                "response_format",
            )
        return _convert({"json": schema}, "response_format")
    if kind == "structural_tag":
        return _convert({"structural_tag": response_format}, "response_format")
    known = ", ".join(_FORMATS)
    raise bad_request(f"response_format.type must be one of {known}", "response_format")


def _convert(given: dict[str, Any], field: str) -> StructuredOutputsParams:
    try:
        return msgspec.convert(given, analyzed(StructuredOutputsParams))
    except (ValueError, TypeError) as error:
        raise bad_request(f"{field}: {error}", field) from error
    except RecursionError as error:
        raise bad_request(f"{field} is nested too deeply: simplify it", field) from error
