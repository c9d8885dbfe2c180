"""Queue of one tenant's requests in one level, earliest deadline first."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator

from worker.core.request import Request


class TenantQueue:
    """Waiting requests sorted by deadline, then arrival. Deadlines of queued requests must not
    change."""

    def __init__(self) -> None:
        self._members: OrderedDict[str, Request] = OrderedDict()
        """Requests by id, in the order in which they were added."""
        self._sorted: list[Request] = []

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        """Requests by deadline, then arrival; the queue must not change during the iteration."""
        return iter(self._sorted)

    def push(self, request: Request) -> None:
        """Adds a request at its position in the order."""
        self._members[request.request_id] = request
        insort(self._sorted, request, key=_place)

    def remove(self, request: Request) -> bool:
        """Removes a request; returns whether it was in the queue."""
        if self._members.pop(request.request_id, None) is None:
            return False
        del self._sorted[bisect_left(self._sorted, _place(request), key=_place)]
        return True

    def last(self) -> Request:
        """The request that was added last."""
        return next(reversed(self._members.values()))


def _place(request: Request) -> tuple[float, int]:
    return request.queue_entry.deadline_s, request.arrival
