"""`openapi_document`: GET /openapi.json, made from the types that routes decode."""

from __future__ import annotations

import importlib.metadata
import re
from functools import cache
from typing import Any

import msgspec

from router.api.anthropic.protocol import COUNTED, KNOWN, CountTokensRequest, MessagesRequest
from router.api.http.auth import OPEN_PATHS
from router.api.openai.fields import IGNORED
from router.api.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from router.api.responses.protocol import KNOWN as RESPONSES
from router.api.responses.protocol import ResponsesRequest
from router.errors import ANTHROPIC_PATH

_REFERENCE = "#/components/schemas/{name}"
_POSTED: tuple[tuple[str, str, type[msgspec.Struct], bool], ...] = (
    ("/v1/chat/completions", "Answers a chat", ChatRequest, True),
    ("/v1/completions", "Continues a text", CompletionRequest, True),
    ("/v1/messages", "Answers a chat in Anthropic's form", MessagesRequest, True),
    ("/v1/messages/count_tokens", "Number of tokens of a prompt", CountTokensRequest, False),
    ("/v1/responses", "Answers a turn of a conversation", ResponsesRequest, True),
    ("/tokenize", "Token ids of a prompt or a chat", TokenizeRequest, False),
    ("/detokenize", "The text of token ids", DetokenizeRequest, False),
)
"""Routes with bodies: path, summary, type of the body, and whether they may stream."""
_IGNORED = {
    ChatRequest: IGNORED,
    CompletionRequest: IGNORED,
    MessagesRequest: KNOWN.ignored,
    CountTokensRequest: COUNTED.ignored,
    ResponsesRequest: RESPONSES.ignored,
}
"""Fields that are taken and ignored, by type of the body."""
_BODILESS = (
    ("/v1/models", "get", "Models that the key may use"),
    ("/v1/models/{name}", "get", "One model"),
    ("/health", "get", "Whether the process is alive"),
    ("/ping", "get", "Whether the process is alive"),
    ("/ping", "post", "Whether the process is alive"),
    ("/ready", "get", "Whether every model has a worker that takes requests"),
    ("/load", "get", "Completions under way"),
    ("/version", "get", "Version of the server"),
    ("/v1/responses/{response_id}", "get", "A response that this gateway keeps"),
    ("/v1/responses/{response_id}", "delete", "Deletes a response"),
    ("/v1/responses/{response_id}/cancel", "post", "Ends a background response"),
)
"""Routes without bodies: path, method and summary."""
_WITHOUT_EFFECT = {"description": "Taken, and without effect."}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": ["string", "null"]},
    },
}
_PROBLEMS = {
    "400": "A field is wrong; `param` names it",
    "401": "No valid API key",
    "403": "The key may not ask for this",
    "404": "No such model",
    "408": "The body came too slowly",
    "413": "The body is too large",
    "415": "The body is a form, or is packed otherwise than by gzip",
    "429": "Too much is waiting, or the key has used its limits",
    "500": "An error of the server",
    "503": "No worker takes requests now",
}


@cache  # 30 ms for the schemas
def openapi_document(root_path: str = "") -> bytes:
    """The OpenAPI 3.1 document as JSON: bodies in full, responses without schemas.

    Args:
        root_path: prefix that a proxy in front puts before all paths; empty for none.
    """
    bodies = [body for _, _, body, _ in _POSTED]
    _, schemas = msgspec.json.schema_components(bodies, ref_template=_REFERENCE)
    for body in bodies:
        schema = schemas[body.__name__]
        schema["additionalProperties"] = False
        ignored = sorted(_IGNORED.get(body, ()))
        schema["properties"].update(dict.fromkeys(ignored, _WITHOUT_EFFECT))
    paths: dict[str, dict[str, Any]] = {}
    for path, method, summary in _BODILESS:
        paths.setdefault(path, {})[method] = _operation(path, summary)
    for path, summary, body, may_stream in _POSTED:
        content = {"schema": {"$ref": _REFERENCE.format(name=body.__name__)}}
        operation = _operation(path, summary, may_stream=may_stream)
        operation["requestBody"] = {"required": True, "content": {"application/json": content}}
        paths.setdefault(path, {})["post"] = operation
    document = {
        "openapi": "3.1.0",
        "info": {"title": "rayfleet", "version": importlib.metadata.version("rayfleet")},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": {**schemas, "Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "anthropic": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{"key": []}, {"anthropic": []}],
    }
    return msgspec.json.encode(document)


def _operation(path: str, summary: str, *, may_stream: bool = False) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if may_stream:
        # No schema: some tools take one for the stream's, others for that of each event.
        content["text/event-stream"] = {}
    shape = "AnthropicError" if path.startswith(ANTHROPIC_PATH) else "Error"
    error = {"application/json": {"schema": {"$ref": _REFERENCE.format(name=shape)}}}
    responses: dict[str, Any] = {"200": {"description": summary, "content": content}}
    for status, problem in _PROBLEMS.items():
        responses[status] = {"description": problem, "content": error}
    if path == "/ready":
        responses["503"] = {"description": "Not yet", "content": content}
    operation: dict[str, Any] = {"summary": summary, "responses": responses}
    if path in OPEN_PATHS:
        operation["security"] = []
    operation["parameters"] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    return operation
