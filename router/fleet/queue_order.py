"""The order of a worker's queue: a more urgent prompt goes before those that are there."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from router.fleet.workers import Floats, grown

_NONE = np.zeros(0)


class QueueView(NamedTuple):
    """A worker's queue as one request finds it, per row of the WorkerTable."""

    ahead: Floats
    """Seconds to compute prompts in flight from this gateway that are as urgent, or more."""
    sent: Floats
    """Seconds to compute all prompts in flight from this gateway."""
    num_behind: Floats
    """Prompts in flight from this gateway that are less urgent."""

    def waiting_s(self, waiting: Floats) -> Floats:
        """Seconds that the request waits, of those that all of the queue takes, per row.

        What this gateway has not sent is other gateways', of unknown urgency, and goes ahead.
        """
        others = np.maximum(waiting - self.sent, 0.0)
        others += self.ahead
        result: Floats = np.minimum(waiting, others)
        return result


class QueueOrder:
    """Prompts in flight from this gateway, by priority and worker.

    Without it an urgent request would avoid a worker for a queue that it goes before, and join one
    whose short queue is as urgent as itself.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, Floats] = {}
        """Seconds to compute the prompts, by priority, per row."""
        self._numbers: dict[int, Floats] = {}
        """Number of prompts, by priority, per row."""
        self._counts: dict[int, int] = {}

    def add(self, priority: int, row: int, work_s: float, capacity: int) -> None:
        """A prompt was sent to the worker in `row`, one of `capacity` rows."""
        seconds = self._seconds.get(priority, _NONE)
        if len(seconds) < capacity:
            seconds = self._seconds[priority] = grown(seconds, capacity)
            self._numbers[priority] = grown(self._numbers.get(priority, _NONE), capacity)
        seconds[row] += work_s
        self._numbers[priority][row] += 1.0
        self._counts[priority] = self._counts.get(priority, 0) + 1

    def remove(self, priority: int, row: int, work_s: float) -> None:
        """A prompt is computed, or never will be there."""
        self._counts[priority] -= 1
        if self._counts[priority]:
            self._seconds[priority][row] -= work_s
            self._numbers[priority][row] -= 1.0
        else:  # sums of what came and went drift
            del self._counts[priority], self._seconds[priority], self._numbers[priority]

    def view(self, priority: int, capacity: int) -> QueueView | None:
        """The queues as a request of this priority finds them; None where it is before nothing."""
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
