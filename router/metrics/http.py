"""HttpStats: HTTP responses of a gateway by route, method and status, including rejections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

OTHER: Final = "other"
"""Label of unknown routes and methods, since clients can send arbitrary ones."""
METHODS: Final = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
"""Methods with their own label."""
_COMPLETIONS: Final = ("/v1/chat/completions", "/v1/completions")
_EXPECTED: Final = (200, 400, 401, 403, 404, 408, 413, 415, 429, 500, 503)
"""Statuses of responses to completion requests."""


class HttpStats:
    """Counters of HTTP responses, on the event loop.

    Completion routes have all statuses from the start, at 0, since a series that starts with the
    first failure has no rate.
    """

    __slots__ = ("counts", "keys_are_stale")

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str, int], int] = {
            (route, "POST", status): 0 for route in _COMPLETIONS for status in _EXPECTED
        }
        """Number of responses by route, method and status."""
        self.keys_are_stale: Callable[[], bool] = lambda: False
        """Returns whether a key file has become invalid or unreadable."""

    def add(self, route: str, method: str, status: int) -> None:
        """Counts a response.

        Args:
            route: path template of the route, or OTHER.
            method: method of the request.
            status: status of the response.
        """
        key = (route, method if method in METHODS else OTHER, status)
        self.counts[key] = self.counts.get(key, 0) + 1
