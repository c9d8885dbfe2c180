"""As many as fit, the cheapest first."""

from __future__ import annotations

from collections.abc import Sequence

from worker.core.scheduler.policy import Item


class Pack:
    """Of equally urgent requests by ascending cost, then in the order of the queue.

    What fits by ascending cost is the largest number of requests that fit at all, and of these
    choices the cheapest.
    """

    stops = False

    def order(self, items: Sequence[Item]) -> list[int]:
        """See AdmissionPolicy."""
        return sorted(range(len(items)), key=lambda i: (-items[i].level, items[i].cost, i))


class PackInTurn:
    """As many as fit in the order given, in which each tenant has its turns."""

    stops = False

    def order(self, items: Sequence[Item]) -> list[int]:
        """See AdmissionPolicy."""
        return list(range(len(items)))
