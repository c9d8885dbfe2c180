"""Answers of a gateway's HTTP API by route, method and status, refused requests included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

OTHER: Final = "other"
"""Label of routes and methods that the gateway does not have: clients choose those freely."""
METHODS: Final = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_COMPLETIONS: Final = ("/v1/chat/completions", "/v1/completions")
_EXPECTED: Final = (200, 400, 401, 403, 404, 408, 413, 415, 429, 500, 503)
"""Statuses that a completion may be answered with."""


class HttpStats:
    """Counts answers. Belongs to the event loop.

    Completions have all their statuses from the start, at 0: the rate of a series that begins with
    its first failure is not known.
    """

    __slots__ = ("counts", "keys_are_stale")

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str, int], int] = {
            (route, "POST", status): 0 for route in _COMPLETIONS for status in _EXPECTED
        }
        """Number of answers by route, method and status."""
        self.keys_are_stale: Callable[[], bool] = lambda: False
        """Whether files of API keys say something that could not be taken."""

    def add(self, route: str, method: str, status: int) -> None:
        """Counts one answer.

        Args:
            route: template of a route that the gateway has, or OTHER.
            method: as the client sent it.
            status: of the answer.
        """
        key = (route, method if method in METHODS else OTHER, status)
        self.counts[key] = self.counts.get(key, 0) + 1
