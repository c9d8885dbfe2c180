"""Requests that wait for a slot, first come first served."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict

from worker.request import Request


class FcfsQueue:
    """Oldest arrival first; a request that was taken back keeps its place before all new ones."""

    def __init__(self) -> None:
        self.num_tokens = 0
        """Tokens of all that wait."""
        self.num_expected_cached = 0
        """Those of them that gateways expect in the prefix cache."""
        self._resumed: list[Request] = []
        self._new: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._resumed) + len(self._new)

    def push(self, request: Request) -> None:
        """Adds a request that has never run."""
        self._new[request.request_id] = request
        self.num_expected_cached += request.num_expected_cached
        self.num_tokens += len(request.token_ids)

    def push_back(self, request: Request) -> None:
        """Adds a request that was taken back from the running set."""
        insort(self._resumed, request, key=_arrival)
        self.num_tokens += len(request.token_ids)

    def peek(self) -> Request | None:
        """The next to admit, or None."""
        if self._resumed:
            return self._resumed[0]
        return next(iter(self._new.values()), None)

    def remove(self, request: Request) -> None:
        """Takes out a request, admitted or ended."""
        if self._new.pop(request.request_id, None) is None:
            self._resumed.remove(request)
        else:
            self.num_expected_cached -= request.num_expected_cached
        self.num_tokens -= len(request.token_ids)


def _arrival(request: Request) -> int:
    return request.arrival
