"""Requests of one tenant that wait with equal urgency, earliest deadline first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from worker.core.request import Request

_Entry = tuple[float, int, int, Request]
"""Deadline, arrival, generation; no two entries agree in all three."""


class TenantQueue:
    """A heap whose entries name the generation of their request: of an older one they are dead.

    So a request leaves, or changes its place, in constant time; the dead are dropped when they
    surface, and swept when they outnumber the living.
    """

    def __init__(self) -> None:
        self._members: OrderedDict[str, Request] = OrderedDict()
        """In the order in which they came."""
        self._heap: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._members)

    def push(self, request: Request) -> None:
        """Adds a request at its deadline."""
        self._members[request.request_id] = request
        entry = request.queue_entry
        heappush(self._heap, (entry.deadline_s, request.arrival, entry.generation, request))

    def remove(self, request: Request) -> bool:
        """Takes a request out, whose generation the caller changes; whether it was here."""
        if self._members.pop(request.request_id, None) is None:
            return False
        if len(self._heap) > 2 * len(self._members) + 16:
            self._heap = [
                entry
                for entry in self._heap
                if self._members.get(entry[3].request_id) is entry[3] and _is_live(entry)
            ]
            heapify(self._heap)
        return True

    def last(self) -> Request:
        """The one that came last."""
        return next(reversed(self._members.values()))

    def in_order(self) -> Iterator[Request]:
        """All by deadline, then arrival; the first k cost O(k log k). No changes meanwhile.

        A heap is a tree, each entry before its two children: who is next is a child of one seen.
        """
        heap = self._heap
        while heap and not _is_live(heap[0]):
            heappop(heap)
        frontier = [(heap[0], 0)] if heap else []
        while frontier:
            entry, index = heappop(frontier)
            if _is_live(entry):
                yield entry[3]
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(heap):
                    heappush(frontier, (heap[child], child))


def _is_live(entry: _Entry) -> bool:
    return entry[2] == entry[3].queue_entry.generation
