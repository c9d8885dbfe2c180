"""Workarounds for HTTP handling in Serve and uvicorn, for gateways and Serve's Python proxy."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Iterable
from typing import Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cluster.forwarded import ForwardedClient
from router.api.http.parts import server_send

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


def serve_middlewares() -> list[Middleware]:
    """Middlewares for all of Serve's HTTP applications."""
    return [Middleware(ForwardedClient), Middleware(ReadableHeaders)]


class ReadableHeaders:
    """ASGI middleware that drops request headers that are not UTF-8, and duplicate X-Request-ID
    headers of responses.

    Serve decodes several headers before routing, and fails with status 500 if they are not UTF-8. A
    request ID is also echoed and logged: it is replaced unless it is printable and short. Serve
    adds an ID to responses that already have one: the first is kept, since the body contains it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forwards a request with the headers that Serve can decode."""
        headers = scope.get("headers", ())
        if not all(_is_readable(name, value) for name, value in headers):
            kept = [header for header in headers if _is_readable(*header)]
            scope = {**scope, "headers": kept}

        server_send.set(send)

        # Not a coroutine: it returns that of `send`, which the application awaits.
        def send_once(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                message["headers"] = _with_single_request_id(message.get("headers", ()))
            return send(message)

        await self._app(scope, receive, send_once)


def _with_single_request_id(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    kept: list[tuple[bytes, bytes]] = []
    found = False
    for name, value in headers:
        is_request_id = name.lower() == b"x-request-id"
        if not (is_request_id and found):
            kept.append((name, value))
        found |= is_request_id
    return kept


def _is_readable(name: bytes, value: bytes) -> bool:
    if name == b"x-request-id":
        return _REQUEST_ID.fullmatch(value) is not None
    if value.isascii() and name.isascii():
        return True
    try:
        (name + value).decode()
    except UnicodeDecodeError:
        return False
    return True


def release_reset_connections() -> None:
    """Patches uvicorn in this process to free a connection as soon as its client resets it.

    uvicorn cancels the keep-alive timer of an idle connection if it is closed, but not if it is
    reset, as proxies do with surplus connections: without the patch, each such connection keeps
    8 KiB until the timer expires.
    """
    if getattr(HttpToolsProtocol.connection_lost, "releases", False):
        return
    original = HttpToolsProtocol.connection_lost

    def connection_lost(self: Any, exc: Exception | None) -> None:
        original(self, exc)
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None

    vars(connection_lost)["releases"] = True
    HttpToolsProtocol.connection_lost = connection_lost  # type: ignore[method-assign]
