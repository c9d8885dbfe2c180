"""Running set, in the order in which its members may claim pages."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from worker.core.request import Request, RequestState


class RunningSet:
    """Running requests by level, then age; the last one is the first to be preempted.

    A request that claims pages takes them from requests after it, so a step that iterates in this
    order never preempts a request that already has a row.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        """Inserts a request in order."""
        insort(self._requests, request, key=_claim)

    def remove(self, request: Request) -> None:
        """Removes a request."""
        self._requests.remove(request)

    def drop_finished(self) -> None:
        """Removes all requests that have ended."""
        self._requests = [r for r in self._requests if r.state is RequestState.RUNNING]

    def last(self) -> Request:
        """Newest request of the lowest level."""
        return self._requests[-1]


def _claim(request: Request) -> tuple[int, int]:
    return -request.level, request.arrival
