"""`openapi_document`: GET /openapi.json, generated from the types that routes decode."""

from __future__ import annotations

import importlib.metadata
import re
from functools import cache
from typing import Any

import msgspec

from router.api.anthropic.protocol import COUNTED, KNOWN, CountTokensRequest, MessagesRequest
from router.api.decisions.protocol import KNOWN as DECISIONS
from router.api.decisions.protocol import DecisionRequest, SystemOneRequest
from router.api.http.auth import OPEN_PATHS, RERANK_PATHS, SCORE_PATHS
from router.api.openai.fields import IGNORED
from router.api.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadAdapterRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from router.api.pooling.protocol import (
    COHERE,
    ClassifyRequest,
    CohereEmbedRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from router.api.pooling.protocol import KNOWN as POOLING
from router.api.responses.protocol import KNOWN as RESPONSES
from router.api.responses.protocol import ResponsesRequest
from router.errors import ANTHROPIC_PATH

_REFERENCE = "#/components/schemas/{name}"
_POSTED: tuple[tuple[str, str, type[msgspec.Struct], bool], ...] = (
    ("/v1/chat/completions", "Creates a chat completion", ChatRequest, True),
    ("/v1/completions", "Creates a completion", CompletionRequest, True),
    ("/v1/messages", "Creates a message (Anthropic)", MessagesRequest, True),
    (
        "/v1/messages/count_tokens",
        "Counts the tokens of a message's prompt",
        CountTokensRequest,
        False,
    ),
    ("/v1/responses", "Creates a response", ResponsesRequest, True),
    ("/v1/embeddings", "Creates embeddings", EmbeddingRequest, False),
    ("/v2/embed", "Creates embeddings (Cohere)", CohereEmbedRequest, False),
    ("/pooling", "Returns the vectors of texts", PoolingRequest, False),
    ("/classify", "Classifies texts", ClassifyRequest, False),
    *((path, "Scores pairs of texts", ScoreRequest, False) for path in SCORE_PATHS),
    *((path, "Ranks documents by relevance", RerankRequest, False) for path in RERANK_PATHS),
    ("/v1/decisions", "Answers questions by probabilities (OpenAI)", DecisionRequest, False),
    ("/v1/systemone", "Answers questions by probabilities", SystemOneRequest, False),
    ("/tokenize", "Tokenizes a prompt or a chat", TokenizeRequest, False),
    ("/detokenize", "Converts token ids to text", DetokenizeRequest, False),
    ("/v1/load_lora_adapter", "Loads a LoRA adapter (admin key)", LoadAdapterRequest, False),
    ("/v1/unload_lora_adapter", "Unloads a LoRA adapter (admin key)", UnloadAdapterRequest, False),
)
"""Routes with bodies: path, summary, type of the body, and whether they may stream."""
_IGNORED = {
    ChatRequest: IGNORED,
    CompletionRequest: IGNORED,
    MessagesRequest: KNOWN.ignored,
    CountTokensRequest: COUNTED.ignored,
    ResponsesRequest: RESPONSES.ignored,
    **dict.fromkeys(
        (EmbeddingRequest, PoolingRequest, ClassifyRequest, ScoreRequest, RerankRequest),
        POOLING.ignored,
    ),
    CohereEmbedRequest: COHERE.ignored,
    **dict.fromkeys((DecisionRequest, SystemOneRequest), DECISIONS.ignored),
}
"""Fields that are accepted and ignored, by type of the body."""
_BODILESS = (
    ("/v1/models", "get", "Lists the models that the key may use"),
    ("/v1/models/{name}", "get", "One model"),
    ("/health", "get", "Whether the process is alive"),
    ("/ping", "get", "Whether the process is alive"),
    ("/ping", "post", "Whether the process is alive"),
    ("/ready", "get", "Whether every model has a ready worker"),
    ("/load", "get", "Number of open completions"),
    ("/sessions", "get", "Lists waiting and live agent sessions"),
    ("/version", "get", "Version of the server"),
    ("/v1/responses/{response_id}", "get", "Returns a stored response"),
    ("/v1/responses/{response_id}", "delete", "Deletes a response"),
    ("/v1/responses/{response_id}/cancel", "post", "Cancels a background response"),
)
"""Routes without bodies: path, method and summary."""
_WITHOUT_EFFECT = {"description": "Accepted and ignored."}
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
    "400": "Invalid request; `param` names the field",
    "401": "No valid API key",
    "403": "Not allowed for this API key",
    "404": "Unknown model",
    "408": "Timed out while receiving the request body",
    "413": "The body is too large",
    "415": "Unsupported content type or encoding",
    "429": "A queue is full, or a limit of the key is reached",
    "500": "Internal server error",
    "501": "The model does not support the route",
    "503": "No worker is available",
}


@cache  # 30 ms for the schemas
def openapi_document(root_path: str = "") -> bytes:
    """The OpenAPI 3.1 document as JSON: bodies in full, responses without schemas.

    Args:
        root_path: prefix that a reverse proxy adds to all paths; empty if there is none.
    """
    bodies = list(dict.fromkeys(body for _, _, body, _ in _POSTED))
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
        # No schema: some tools apply it to the whole stream, others to each event.
        content["text/event-stream"] = {}
    shape = "AnthropicError" if path.startswith(ANTHROPIC_PATH) else "Error"
    error = {"application/json": {"schema": {"$ref": _REFERENCE.format(name=shape)}}}
    responses: dict[str, Any] = {"200": {"description": summary, "content": content}}
    for status, problem in _PROBLEMS.items():
        responses[status] = {"description": problem, "content": error}
    if path == "/ready":
        responses["503"] = {"description": "Not ready", "content": content}
    operation: dict[str, Any] = {"summary": summary, "responses": responses}
    if path in OPEN_PATHS:
        operation["security"] = []
    operation["parameters"] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    return operation
