"""Running set, in the order in which its members may claim pages."""

from __future__ import annotations

from bisect import insort

from worker.core.request import Request, RequestState


class RunningSet(list[Request]):
    """Running requests by level, then age. The last one is the first to be preempted if there are
    too few pages.

    A request that claims pages takes them from requests after it, so a step that iterates in this
    order never preempts a request that already has a row.
    """

    def add(self, request: Request) -> None:
        """Adds a request at its position in the order."""
        insort(self, request, key=_claim)

    def drop_finished(self) -> None:
        """Removes all requests that have ended."""
        self[:] = [request for request in self if request.state is RequestState.RUNNING]

    def last(self) -> Request:
        """The youngest request of the lowest level, which is the first to be preempted."""
        return self[-1]


def _claim(request: Request) -> tuple[int, int]:
    return -request.level, request.arrival
