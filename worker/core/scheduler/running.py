"""The running set, in the order in which its members may claim pages."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from worker.core.request import Request, RequestState


class RunningSet:
    """Running requests by level, then age; the last is the first to be preempted for lack of pages.

    A request that claims pages takes them from requests after it, so a step that walks the set in
    order never preempts a request that has a row in it already.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        """Adds a request at its place in the order."""
        insort(self._requests, request, key=_claim)

    def remove(self, request: Request) -> None:
        """Takes a request out."""
        self._requests.remove(request)

    def drop_finished(self) -> None:
        """Takes out all that have ended."""
        self._requests = [r for r in self._requests if r.state is RequestState.RUNNING]

    def last(self) -> Request:
        """The youngest request of the lowest level."""
        return self._requests[-1]


def _claim(request: Request) -> tuple[int, int]:
    return -request.level, request.arrival
