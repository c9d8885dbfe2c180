"""The short way of a stream's parts: from the response to the HTTP server itself.

All that stands between them (Serve's wrappers, Starlette's middleware) looks at the head of a
response and at its end. Each part of a stream would cost a coroutine of each of them: as much per
token as all else that a gateway does with it.
"""

from __future__ import annotations

from contextvars import ContextVar

from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

SEND_PART = "rayfleet.send_part"
"""Key of a request's scope for what takes the parts of its response between head and end."""

server_send: ContextVar[Send | None] = ContextVar("server_send", default=None)
"""The HTTP server's own `send`, set by the outermost middleware of its process. Not in the scope:
Serve's Python proxy, which has that middleware too, sends the scope to another process."""


class PartsApp(Starlette):
    """Tells routes which way the parts of their responses go."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        scope[SEND_PART] = server_send.get() or send
        await super().__call__(scope, receive, send)
