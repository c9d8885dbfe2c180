"""AnswerCounter: ASGI middleware that counts all HTTP responses by route and status."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.metrics.http import OTHER, HttpStats


class AnswerCounter:
    """Counts each response once, when its status is sent.

    It must be the outermost middleware, since others reject requests too. It costs a call and a
    comparison per part of a stream.

    Args:
        app: the wrapped application.
        stats: counters of responses.
        routes: routes of the application; their path templates are the labels.
    """

    def __init__(self, app: ASGIApp, stats: HttpStats, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        self._stats = stats
        self._routes = [route for route in routes if isinstance(route, Route)]
        self._plain = {route.path for route in self._routes if "{" not in route.path}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forwards a request and counts its response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answered = False

        # Returns `send`'s coroutine instead of awaiting it in another one.
        def count(message: Message) -> Awaitable[None]:
            nonlocal answered
            if not answered and message["type"] == "http.response.start":
                answered = True
                self._stats.add(self._route(scope), scope["method"], message["status"])
            return send(message)

        try:
            await self._app(scope, receive, count)
        except Exception:
            if not answered:  # Starlette responds with 500 outside of all middleware
                self._stats.add(self._route(scope), scope["method"], 500)
            raise

    def _route(self, scope: Scope) -> str:
        """Template of the route that matches the path, for any method; OTHER if no route does."""
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in self._plain:
            return str(path)
        found = (route.path for route in self._routes if route.path_regex.match(path))
        return next(found, OTHER)
