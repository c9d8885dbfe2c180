"""HttpStats: HTTP responses of a gateway by route, method and status, refusals included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

OTHER: Final = "other"
"""Label of unknown routes and methods, since clients can send any."""
METHODS: Final = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
"""Methods that are labels themselves."""
_COMPLETIONS: Final = ("/v1/chat/completions", "/v1/completions")
_EXPECTED: Final = (200, 400, 401, 403, 404, 408, 413, 415, 429, 500, 503)
"""Statuses of responses to completion requests."""


class HttpStats:
    """Counters of HTTP responses, on the event loop.

    Routes of completions have all their statuses from the start, at 0, since a series that begins
    with the first failure has no rate.
    """

    __slots__ = ("counts", "keys_are_stale")

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str, int], int] = {
            (route, "POST", status): 0 for route in _COMPLETIONS for status in _EXPECTED
        }
        """Number of responses by route, method and status."""
        self.keys_are_stale: Callable[[], bool] = lambda: False
        """Returns whether a file of API keys has changed to something wrong or unreadable."""

    def add(self, route: str, method: str, status: int) -> None:
        """Counts a response.

        Args:
            route: path template of the route, or OTHER.
            method: method of the request.
            status: status of the response.
        """
        key = (route, method if method in METHODS else OTHER, status)
        self.counts[key] = self.counts.get(key, 0) + 1
