"""Structured outputs: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from __future__ import annotations

from typing import Any

import msgspec

from router.api.body import Payload
from router.errors import bad_request
from worker.wire.structured import MAX_GRAMMAR_BYTES, StructuredOutputsParams

_FIELDS = ("response_format", "structured_outputs", "output_config", "text")
"""Fields in which bodies of any API may ask for structured outputs."""
_FORMATS = ("text", "json_object", "json_schema", "structural_tag")


def structured_outputs(
    response_format: dict[str, Any] | None, extra: dict[str, Any] | None
) -> StructuredOutputsParams | None:
    """The form that two fields of a body ask for; None where any text will do.

    Args:
        response_format: OpenAI's field.
        extra: vLLM's `structured_outputs`.

    Raises:
        ApiError: 400, one is wrong, or there are both.
    """
    by_format = _of_format(response_format)
    given = {name: value for name, value in (extra or {}).items() if value is not None}
    if not given:
        return by_format
    if by_format is not None:
        raise bad_request(
            "response_format and structured_outputs exclude each other", "structured_outputs"
        )
    for name in given:
        if name not in StructuredOutputsParams.__struct_fields__:
            raise bad_request(
                f"structured_outputs.{name} is not supported by this server", "structured_outputs"
            )
    return _convert(given, "structured_outputs")


def refuse_large_grammars(body: Payload) -> None:
    """Looks at the fields for it of a large body without decoding them.

    Decoding one of many megabytes would halt the streams of this process for a tenth of a second.

    Raises:
        ApiError: one is larger than any grammar may be.
    """
    if len(body) <= MAX_GRAMMAR_BYTES:
        return
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return  # the same is found, and said, when all of it is decoded
    for name in _FIELDS:
        size = len(memoryview(fields.get(name, msgspec.Raw())))
        # Some white space and the names around a schema are free.
        if size > 2 * MAX_GRAMMAR_BYTES:
            raise bad_request(
                f"{name} has {size} bytes: a schema or grammar may have {MAX_GRAMMAR_BYTES}", name
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
                "response_format.json_schema must hold an object: schema", "response_format"
            )
        return _convert({"json": schema}, "response_format")
    if kind == "structural_tag":
        return _convert({"structural_tag": response_format}, "response_format")
    known = ", ".join(_FORMATS)
    raise bad_request(f"response_format.type must be one of {known}", "response_format")


def _convert(given: dict[str, Any], field: str) -> StructuredOutputsParams:
    try:
        return msgspec.convert(given, StructuredOutputsParams)
    except (ValueError, TypeError, RecursionError) as error:
        raise bad_request(f"{field}: {error}", field) from error
