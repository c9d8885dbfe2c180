"""PartsApp: lets streams send their parts directly to the HTTP server, bypassing all middleware.

Middleware and Serve's wrappers only need the start and end of a response. If each of them handled
every part in a coroutine, this would cost as much as everything else that a gateway does per token.
"""

from __future__ import annotations

from contextvars import ContextVar

from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

SEND_PART = "rayfleet.send_part"
"""Scope key of the `send` for parts of a response between its start and its end."""

server_send: ContextVar[Send | None] = ContextVar("server_send", default=None)
"""`send` of the HTTP server, set by the outermost middleware of its process. It is not in the scope
because Serve's Python proxy, which has the same middleware, sends the scope to another process."""


class PartsApp(Starlette):
    """Puts the `send` for parts of responses into the scope of each request."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forwards a request, with the `send` for parts in its scope."""
        scope[SEND_PART] = server_send.get() or send
        await super().__call__(scope, receive, send)
