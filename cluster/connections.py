"""Corrections of what speaks HTTP in gateways and in Serve's own proxy."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Iterable
from typing import Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.api.parts import server_send

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


def serve_middlewares() -> list[Middleware]:
    """Called by Serve, which puts them around all that it serves over HTTP."""
    return [Middleware(ReadableHeaders)]


class ReadableHeaders:
    """ASGI middleware that drops headers which Serve cannot decode, and then answers with a 500.

    It reads several as UTF-8, before any route of ours. Nothing here has other values; a request id
    is also echoed and logged, so it is printable and short, or a new one is made. Serve adds it to
    answers that have it already: they keep the first, which stands in their bodies, too.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hands on a request with the headers that Serve can decode."""
        headers = scope.get("headers", ())
        if not all(_is_readable(name, value) for name, value in headers):
            kept = [header for header in headers if _is_readable(*header)]
            scope = {**scope, "headers": kept}

        server_send.set(send)

        # No coroutine of its own: `send` gives the one that is awaited.
        def send_once(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                message["headers"] = _with_one_request_id(message.get("headers", ()))
            return send(message)

        await self._app(scope, receive, send_once)


def _with_one_request_id(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    kept: list[tuple[bytes, bytes]] = []
    is_there = False
    for name, value in headers:
        is_request_id = name.lower() == b"x-request-id"
        if not (is_request_id and is_there):
            kept.append((name, value))
        is_there |= is_request_id
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
    """Lets go of a connection that its client has reset, for the rest of this process.

    uvicorn stops the timer of an idle connection where it is closed, and forgets to where it is
    reset, as proxies do with those that they have too many of: each then stays, 8 KiB of it, until
    its keep-alive time is over.
    """
    if getattr(HttpToolsProtocol.connection_lost, "releases", False):
        return
    lose = HttpToolsProtocol.connection_lost

    def connection_lost(self: Any, exc: Exception | None) -> None:
        lose(self, exc)
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None

    vars(connection_lost)["releases"] = True
    HttpToolsProtocol.connection_lost = connection_lost  # type: ignore[method-assign]
