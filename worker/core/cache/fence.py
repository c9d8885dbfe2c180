"""Fences, which hold items back until the last step that uses them has completed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class CompletedSteps:
    """Number of the last completed step, and the fences that wait for later steps.

    Steps complete in the order of their sequence numbers, which start at 1.
    """

    def __init__(self) -> None:
        self.last = 0
        """Last completed step; 0 before the first."""
        self.num_held = 0
        """Number of items held back by all fences."""
        self.fences: list[Fence[Any]] = []

    def complete(self, seq: int) -> None:
        """Marks all steps up to `seq` as completed, and releases the items held for them."""
        assert seq > self.last, f"step {seq} completed after step {self.last}"
        self.last = seq
        if self.num_held:
            for fence in self.fences:
                fence.release_due()


class Fence(Generic[T]):
    """Holds items back, each until a given step has completed.

        step 7 launched ── release(page, fence 7) ── step 7 completed ── page usable again

    Fence 0 means that no step uses the item.

    Args:
        steps: the completed steps.
        release: called with each item once its step has completed.
    """

    def __init__(self, steps: CompletedSteps, release: Callable[[T], None]) -> None:
        self._steps = steps
        self._release = release
        self._held: list[tuple[int, T]] = []
        steps.fences.append(self)

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[T]:
        return (item for _, item in self._held)

    def passed(self, seq: int) -> bool:
        """Whether step `seq` has completed."""
        return seq <= self._steps.last

    def hold(self, item: T, seq: int) -> None:
        """Holds `item` until step `seq` completes. The step must not have completed yet."""
        assert seq > self._steps.last, f"step {seq} has already completed"
        self._held.append((seq, item))
        self._steps.num_held += 1

    def release_due(self) -> None:
        """Releases the items whose steps have completed, in the order in which they were held."""
        if not self._held:
            return
        last = self._steps.last
        due = [item for seq, item in self._held if seq <= last]
        self._held = [(seq, item) for seq, item in self._held if seq > last]
        self._steps.num_held -= len(due)
        for item in due:
            self._release(item)
