"""Response objects of the Responses API, and the events for a prompt that is too long."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from router.api.openai.blocks import event
from router.api.responses.protocol import ResponsesRequest
from router.errors import CONTEXT_LENGTH_EXCEEDED, ApiError

COMPLETED = "completed"


def response_of(
    body: ResponsesRequest,
    status: str,
    *,
    response_id: str,
    model: str,
    created: int,
    temperature: float,
    top_p: float,
    output: Sequence[Mapping[str, Any]] = (),
    usage: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A response object.

    Args:
        body: the body of the request.
        status: status of the response.
        response_id: id of the response.
        model: model name in the response.
        created: time of the request, in Unix seconds.
        temperature: sampling temperature.
        top_p: top-p of sampling.
        output: output items; empty before the end.
        usage: token counts; None before the end.
    """
    reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "completed_at": int(time.time()) if status == COMPLETED else None,
        "status": status,
        "background": bool(body.background),
        "error": None,
        "incomplete_details": reason,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "output": list(output),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": body.reasoning or {"effort": None, "summary": None},
        "store": body.store is not False,
        "temperature": temperature,
        "top_p": top_p,
        "text": body.text or {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "truncation": body.truncation or "disabled",
        "usage": usage,
        "user": body.user,
    }


def error_of(error: ApiError) -> dict[str, Any]:
    """`error` of a failed response. Codex retries `server_error`, but not `invalid_prompt`."""
    if error.status == 429:
        code = "rate_limit_exceeded"
    elif error.code == CONTEXT_LENGTH_EXCEEDED:
        code = error.code
    else:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
    return {"code": code, "message": error.message}


def overflow_events(
    body: ResponsesRequest, error: ApiError, *, response_id: str, model: str
) -> bytes:
    """Events of a streamed response whose prompt exceeds the context length.

    OpenAI's API reports this error in the stream, with status 200. Codex compacts the conversation
    only after `response.failed` with the code `context_length_exceeded`, and OpenCode only after an
    `error` event with this code.
    """
    common: dict[str, Any] = {
        "response_id": response_id,
        "model": model,
        "created": int(time.time()),
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": 1.0 if body.top_p is None else body.top_p,
    }
    begun = response_of(body, "in_progress", **common)
    failed = {**response_of(body, "failed", **common), "error": error_of(error)}
    reported = {
        "type": "invalid_request_error",
        "code": error.code,
        "message": error.message,
        "param": error.param,
    }
    events = (
        ("response.created", {"response": begun}),
        ("response.in_progress", {"response": begun}),
        ("error", {"error": reported}),
        ("response.failed", {"response": failed}),
    )
    return b"".join(
        event(name, sequence_number=number, **fields)
        for number, (name, fields) in enumerate(events)
    )
