"""Counts the answers of the API, whoever gives them: routes, API keys, or nobody's route."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.metrics.http import OTHER, HttpStats


class AnswerCounter:
    """ASGI middleware that counts each answer once, when its status is sent.

    It must stand outside all other middleware, since these refuse requests too. A part of a stream
    costs it one call and one comparison.

    Args:
        app: what answers.
        stats: where it is counted.
        routes: those there are; their templates are the labels, whatever paths clients ask for.
    """

    def __init__(self, app: ASGIApp, stats: HttpStats, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        self._stats = stats
        self._routes = [route for route in routes if isinstance(route, Route)]
        self._plain = {route.path for route in self._routes if "{" not in route.path}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Has a request answered, and counts the answer by its status."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answered = False

        # No coroutine of its own: `send` gives the one that is awaited.
        def count(message: Message) -> Awaitable[None]:
            nonlocal answered
            if not answered and message["type"] == "http.response.start":
                answered = True
                self._stats.add(self._route(scope), scope["method"], message["status"])
            return send(message)

        try:
            await self._app(scope, receive, count)
        except Exception:
            if not answered:  # Starlette answers with 500 outside of all middleware
                self._stats.add(self._route(scope), scope["method"], 500)
            raise

    def _route(self, scope: Scope) -> str:
        """Template of the route that takes the path, with whatever method."""
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in self._plain:
            return str(path)
        found = (route.path for route in self._routes if route.path_regex.match(path))
        return next(found, OTHER)
