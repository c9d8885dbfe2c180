"""First in, first out."""

from __future__ import annotations

from collections.abc import Sequence

from worker.core.scheduler.policy import Item


class Fifo:
    """In the order of the queue, up to the first that does not fit."""

    stops = True

    def order(self, items: Sequence[Item]) -> list[int]:
        """See AdmissionPolicy."""
        return list(range(len(items)))
