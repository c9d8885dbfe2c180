"""Sends errors as complete responses."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.types import Send

from router.errors import ApiError, error_body, error_headers


async def send_error(
    send: Send,
    error: ApiError,
    request_id: str = "",
    *,
    headers: Sequence[tuple[bytes, bytes]] = (),
    path: str = "",
) -> None:
    """Sends an error as the complete response.

    Args:
        send: ASGI's send.
        request_id: id of the request; empty if there is none.
        headers: additional headers.
        path: path of the request; its API determines the format of the body.
    """
    body = error_body(error, path, request_id)
    named = error_headers(error, request_id).items()
    headers = [
        *((name.encode(), value.encode("latin-1")) for name, value in named),
        (b"content-length", b"%d" % len(body)),
        *headers,
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
