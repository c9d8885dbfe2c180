"""QueueOrder: prompts in flight by priority, since urgent requests overtake others in a queue."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from router.fleet.workers import Floats, grown

_NONE = np.zeros(0)


class QueueView(NamedTuple):
    """This gateway's prompts in flight as seen by one request, per row of the WorkerTable."""

    ahead: Floats
    """Seconds to compute the prompts of the same or higher priority, which are ahead of the
    request."""
    sent: Floats
    """Seconds to compute all prompts, of any priority."""
    num_behind: Floats
    """Number of prompts of lower priority, which the request overtakes."""

    def waiting_s(self, waiting: Floats) -> Floats:
        """Seconds that the request waits, per row; `waiting` is the wait behind all prompts.

        Prompts of other gateways have unknown priorities and count as ahead of the request.
        """
        others = np.maximum(waiting - self.sent, 0.0)
        others += self.ahead
        result: Floats = np.minimum(waiting, others)
        return result


class QueueOrder:
    """Seconds and numbers of this gateway's prompts in flight, by priority and worker.

    If priorities were ignored, an urgent request would avoid a long queue that it can overtake, in
    favor of a short queue of its own priority.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, Floats] = {}
        """Seconds to compute the prompts: an array with one entry per row, by priority."""
        self._numbers: dict[int, Floats] = {}
        """Number of prompts: an array with one entry per row, by priority."""
        self._counts: dict[int, int] = {}
        """Number of prompts over all rows, by priority."""

    def add(self, priority: int, row: int, work_s: float, capacity: int) -> None:
        """Adds a prompt sent to the worker in `row`; `capacity` is the number of rows."""
        seconds = self._seconds.get(priority, _NONE)
        if len(seconds) < capacity:
            seconds = self._seconds[priority] = grown(seconds, capacity)
            self._numbers[priority] = grown(self._numbers.get(priority, _NONE), capacity)
        seconds[row] += work_s
        self._numbers[priority][row] += 1.0
        self._counts[priority] = self._counts.get(priority, 0) + 1

    def remove(self, priority: int, row: int, work_s: float) -> None:
        """Removes a prompt, given the arguments it was added with."""
        self._counts[priority] -= 1
        if self._counts[priority]:
            self._seconds[priority][row] -= work_s
            self._numbers[priority][row] -= 1.0
        else:  # sums drift by rounding, so they are reset
            del self._counts[priority], self._seconds[priority], self._numbers[priority]

    def view(self, priority: int, capacity: int) -> QueueView | None:
        """The prompts as seen by a request of this priority; None if it overtakes none."""
        if not self._counts or min(self._counts) >= priority:
            return None
        ahead, sent, behind = np.zeros(capacity), np.zeros(capacity), np.zeros(capacity)
        for other, seconds in self._seconds.items():
            sent[: len(seconds)] += seconds
            if other >= priority:
                ahead[: len(seconds)] += seconds
            else:
                numbers = self._numbers[other]
                behind[: len(numbers)] += numbers
        return QueueView(ahead, sent, behind)
