"""HttpStats and IgnoredFields: counters of a gateway's HTTP responses and ignored request parts."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Final

OTHER: Final = "other"
"""Label of unknown routes and methods, since clients can send arbitrary ones."""
METHODS: Final = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
"""Methods with a separate label."""
_COMPLETIONS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
_EXPECTED: Final = (200, 400, 401, 403, 404, 408, 413, 415, 429, 500, 503)
"""HTTP statuses for which the counters of completion routes exist from the start."""
MAX_IGNORED_FIELDS: Final = 64
"""Maximum number of ignored fields with their own label, since clients can send arbitrary ones."""
_FIELD: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""Pattern of the names of ignored fields that may be labels."""


class IgnoredFields:
    """Numbers of requests with parts that were ignored, by API and field. Thread-safe."""

    __slots__ = ("_counts", "_lock")

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()

    def add(self, api: str, field: str) -> None:
        """Counts an ignored part of a request.

        Args:
            api: name of the API, such as `messages`.
            field: field or `FIELD.TYPE`; counted as OTHER if there are too many different ones.
        """
        key = (api, field)
        with self._lock:
            if key not in self._counts and (
                len(self._counts) >= MAX_IGNORED_FIELDS or not _FIELD.fullmatch(field)
            ):
                key = (api, OTHER)
            self._counts[key] = self._counts.get(key, 0) + 1

    def counts(self) -> dict[tuple[str, str], int]:
        """Number of requests with an ignored part, by API and field."""
        with self._lock:
            return dict(self._counts)


class HttpStats:
    """Counters of HTTP responses, updated on the event loop.

    Counters of completion routes exist from the start, at 0, for all expected statuses, so that
    rates in Prometheus include the first failure.
    """

    __slots__ = ("counts", "ignored", "keys_are_stale")

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str, int], int] = {
            (route, "POST", status): 0 for route in _COMPLETIONS for status in _EXPECTED
        }
        """Number of responses by route, method and status."""
        self.ignored = IgnoredFields()
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
