"""ApiError: errors returned to clients, in the formats of OpenAI's and Anthropic's APIs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec

from worker.protocol.limits import Overflow, Problem
from worker.protocol.messages import Rejection

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "internal_server_error",
    501: "not_implemented_error",
    503: "service_unavailable_error",
}

MODEL_NOT_FOUND = "model_not_found"
"""Error code if a model does not exist or the API key may not use it."""
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
"""Error code if the prompt exceeds the context length; coding agents then compact the
conversation."""
MAX_MESSAGE = 1000
"""Maximum length of an error message in characters. The longest message has about 300 without the
client's text; the rest is for a quoted value."""
MAX_PARAM = 200
"""Maximum length in characters of the field name in an error: clients' names may have any length.
"""

ANTHROPIC_PATH = "/v1/messages"
"""Path of Anthropic's Messages API, and prefix of its other paths."""
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def clip(text: str, max_length: int) -> str:
    """The text, without its middle if it is longer than `max_length`: errors quote clients' values,
    which may be as long as a body."""
    if len(text) <= max_length:
        return text
    half = (max_length - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


class ApiError(Exception):
    """An error returned to the client.

    Args:
        status: HTTP status, which also determines the error's `type`.
        message: human-readable message; the middle is omitted beyond MAX_MESSAGE characters.
        param: the invalid field of the request, also shortened; None if there is none.
        code: machine-readable code, such as "model_not_found"; None to use the status.
        retry_after_s: seconds of the Retry-After header; None if there is none.
        overflow: lengths of a prompt that exceeds the context length; None for other errors.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        overflow: Overflow | None = None,
    ) -> None:
        message = clip(message, MAX_MESSAGE)
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = None if param is None else clip(param, MAX_PARAM)
        self.code = code
        self.retry_after_s = retry_after_s
        self.overflow = overflow

    def body(self) -> bytes:
        """The error in OpenAI's format as JSON:
        `{"error": {"message", "type", "param", "code"}}`."""
        fallback = "invalid_request_error" if self.status < 500 else "internal_server_error"
        error = {
            "message": self.message,
            "type": _TYPES.get(self.status, fallback),
            "param": self.param,
            "code": self.code if self.code is not None else self.status,
        }
        return msgspec.json.encode({"error": error})


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Replaces the field name in errors raised within the block with the client's name for it."""
    try:
        yield
    except ApiError as error:
        name = names.get(error.param or "")
        if name is None or error.param is None:
            raise
        raise ApiError(
            error.status,
            error.message.replace(error.param, name),
            param=name,
            code=error.code,
            retry_after_s=error.retry_after_s,
            overflow=error.overflow,
        ) from error


def error_body(error: ApiError, path: str, request_id: str) -> bytes:
    """The error as JSON, in the format of the API that `path` belongs to."""
    is_anthropic = path == ANTHROPIC_PATH or path.startswith(ANTHROPIC_PATH + "/")
    return anthropic_body(error, request_id) if is_anthropic else error.body()


def error_headers(error: ApiError, request_id: str) -> dict[str, str]:
    """Response headers of an error; `request_id` may be empty."""
    headers = {"content-type": "application/json"}
    if request_id:
        headers["x-request-id"] = request_id
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status == 408:
        # Otherwise the server reads the rest of the body, however slowly it arrives.
        headers["connection"] = "close"
    return headers


def anthropic_body(error: ApiError, request_id: str) -> bytes:
    """The error in Anthropic's format as JSON:
    `{"type": "error", "error": {"type", "message"}, "request_id"}`."""
    fallback = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _ANTHROPIC_TYPES.get(error.status, fallback)
    message = error.message
    if error.overflow is not None:  # Claude Code parses these words
        num_tokens, maximum = error.overflow
        message = f"prompt is too long: {num_tokens} tokens > {maximum} maximum"
    return msgspec.json.encode(
        {
            "type": "error",
            "error": {"type": kind, "message": message},
            "request_id": request_id or None,
        }
    )


def unknown_model(name: str) -> ApiError:
    """A 404: the model does not exist, or the key may not use it."""
    return ApiError(404, f"The model `{name}` does not exist.", param="model", code=MODEL_NOT_FOUND)


def missing_model() -> ApiError:
    """A 400: the request does not name a model although there are several."""
    return bad_request("model is missing: GET /v1/models lists the available models", "model")


def rate_limited(message: str, retry_after_s: int) -> ApiError:
    """A 429: a limit of the API key is reached."""
    return ApiError(429, message, code="rate_limit_exceeded", retry_after_s=retry_after_s)


def bad_request(message: str, param: str | None = None) -> ApiError:
    """A 400: the request is invalid."""
    return ApiError(400, message, param=param)


def raise_for_problem(problem: Problem | None) -> None:
    """Raises ApiError (400) with the problem, if any: a limit of workers that a request exceeds."""
    if problem is not None:
        code = None if problem.overflow is None else CONTEXT_LENGTH_EXCEEDED
        raise ApiError(
            400, problem.message, param=problem.param, code=code, overflow=problem.overflow
        )


def timed_out(message: str) -> ApiError:
    """A 408: the client is sending its request too slowly."""
    return ApiError(408, message, code="request_timeout")


def too_large(message: str) -> ApiError:
    """A 413: the body is too large."""
    return ApiError(413, message)


def no_worker(model: str, problem: str = "try again shortly") -> ApiError:
    """A 503: no worker is available."""
    return ApiError(
        503,
        f"no worker of model {model} is available: {problem}",
        code="no_worker_available",
        retry_after_s=1,
    )


def busy(message: str) -> ApiError:
    """A 503: a limit on the gateway's memory is reached."""
    return ApiError(503, message, code="gateway_busy", retry_after_s=1)


def overloaded(message: str, retry_after_s: int) -> ApiError:
    """A 429: a queue is full."""
    return ApiError(429, message, code="queue_full", retry_after_s=max(retry_after_s, 1))


def rejected(rejection: Rejection, param: str | None = None) -> ApiError:
    """The error of a request that a worker has rejected.

    Args:
        rejection: the worker's reply.
        param: the client's name of the invalid field; None if there is none.
    """
    if rejection.status == 429:
        return overloaded(rejection.message, rejection.retry_after_s)
    return ApiError(rejection.status, rejection.message, param=param)
